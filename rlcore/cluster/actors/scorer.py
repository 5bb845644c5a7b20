"""The graders' process: one on the driver's node, and one on each other node of rollout actors."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from rlcore.cluster.delivery import NodeOutlet
from rlcore.cluster.placement import shard_name
from rlcore.cluster.sample_text import first_shown, readable, verdict, without_texts
from rlcore.references import ShardLost, read_records
from rlcore.serialization import StoredEpisode
from rlcore.types import Answer, Score

if TYPE_CHECKING:
    from rlcore.tasks.graders import GraderPool

Verdict = dict[str, Any]  # of one sample of an evaluation, readable


class ScorerActor:
    """Grader processes between rollout actors and buffer. The one on the driver's node keeps the
    verdicts of evaluations."""

    def __init__(
        self,
        buffer: str,
        pools: tuple[GraderPool, ...],
        tokenizer_path: str,
        home: str | None = None,
    ) -> None:
        """`buffer`: its name, since Ray repeats these arguments when it restarts this process.
        `pools`: one a training task; the first has the evaluation tasks too. `tokenizer_path`: for
        readable samples. `home`: name of the process on the driver's node, for a process elsewhere,
        which starts its graders at once, since actors send to it as soon as they find it."""
        self._buffer = ray.get_actor(buffer)
        self._home: Any = ray.get_actor(home) if home else None
        self._pools = pools
        self._tokenizer_path = tokenizer_path
        # purpose -> (group id, sample index) -> verdict; keyed, because a sample that was
        # requested twice may return twice
        self._evaluations: dict[str, dict[tuple[int, int], Verdict]] = defaultdict(dict)
        self._lock = threading.Lock()
        self._notes: deque[str] = deque()
        # of the node's samples, to its shard, which reports records and scores together
        own = shard_name(buffer, ray.get_runtime_context().get_node_id()) if home else ""
        self._scores = NodeOutlet("add_scores", own, self._buffer)
        self._sending = threading.Lock()
        if home or ray.get_runtime_context().was_current_actor_reconstructed:
            self.start()  # Ray restarted the process, and no client calls `start` again

    def start(self) -> int:
        from rlcore.models.text import decode_response, load_tokenizer
        from rlcore.tasks.graders import Graders

        tokenizer = load_tokenizer(self._tokenizer_path)
        self._decode = lambda ids: decode_response(tokenizer, ids)
        self.scorer = Graders(self._pools, on_scored=self._scored, note=self._notes.append)
        return os.getpid()

    def pid(self) -> int:
        """The process id; a changed one means that the answers it held are lost. Raises the error
        that stopped the scoring."""
        self.scorer.check()
        return os.getpid()

    def notes(self) -> list[str]:
        """Sentences for the user since the last call."""
        notes = []
        while self._notes:
            notes.append(self._notes.popleft())
        return notes

    def submit(self, answers: list[Answer]) -> None:
        """Answers from a rollout actor."""
        self.scorer.submit(answers)

    def submit_scored(self, scored: list[tuple[Answer, Score]]) -> None:
        """Episodes from a rollout actor, graded by their environments."""
        self._scored(scored)

    def _scored(self, scored: list[tuple[Answer, Score]]) -> None:
        training = [score for answer, score in scored if answer.purpose == "train"]
        if training:
            with self._sending:
                self._scores(training)
        evaluated = [(answer, score) for answer, score in scored if answer.purpose != "train"]
        if self._home is not None:
            if evaluated:
                self._home.submit_scored.remote(evaluated)
            return
        with self._lock:
            for answer, score in evaluated:
                key = (answer.group_id, answer.sample_index)
                self._evaluations[answer.purpose][key] = verdict(answer, score)

    def evaluation_progress(self, purpose: str) -> int:
        """Verdicts of one evaluation that have come so far."""
        with self._lock:
            return len(self._evaluations[purpose])

    def evaluation(self, purpose: str) -> list[Verdict]:
        """All verdicts of one evaluation, without their texts."""
        with self._lock:
            return [without_texts(v) for v in self._evaluations[purpose].values()]

    def evaluation_shown(self, purpose: str, count: int) -> list[Verdict]:
        """The first verdicts of one evaluation, which is then forgotten."""
        with self._lock:
            return first_shown(self._evaluations.pop(purpose, {}).values(), count)

    def samples(self, step: int, count: int, timeout_s: float) -> list[dict[str, Any]]:
        """Readable samples of a batch, fetched here so that their records pass no other process."""
        from rlcore.cluster.clients.shards import fetch_records

        ref: Any = self._buffer.peek.remote(step, count)
        until = time.monotonic() + timeout_s
        stored: list[StoredEpisode] = ray.get(ref, timeout=timeout_s)
        shown = []
        for episode in stored:
            fetch = partial(fetch_records, timeout_s=max(0.0, until - time.monotonic()))
            with contextlib.suppress(ShardLost):  # it is sampled again, and not shown
                records = read_records(episode.records, fetch)
                whole = StoredEpisode(episode.score, tuple(records))
                shown.append(readable(whole, self._decode))
        return shown

    def close(self) -> None:
        self.scorer.close()
