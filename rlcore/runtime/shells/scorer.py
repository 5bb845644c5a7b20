"""The graders' process."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from typing import Any

import ray

from rlcore.types import Trajectory


class ScorerShell:
    """Grader processes between rollout and buffer; keeps evaluation verdicts (numbers, not payloads)."""

    def __init__(self, buffer: str, options: dict[str, Any], tokenizer_path: str) -> None:
        self._buffer, self._options, self._tokenizer_path = ray.get_actor(buffer), options, tokenizer_path
        # purpose -> (group id, sample index) -> verdict; keyed, because a reissued request may answer twice
        self._evals: dict[str, dict[tuple[int, int], dict[str, Any]]] = defaultdict(dict)
        self._lock = threading.Lock()
        self._forwards: list[Any] = []
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self.start()  # Ray has restarted this process: nobody else will

    def start(self) -> int:
        from rlcore.models import decode_response, load_tokenizer
        from rlcore.tasks.scoring import Scorer

        tokenizer = load_tokenizer(self._tokenizer_path)
        self._decode = lambda ids: decode_response(tokenizer, ids)
        self.scorer = Scorer(**self._options, decode=self._decode, on_scored=self._scored)
        return os.getpid()

    def pid(self) -> int:
        """This process; another number than before means that what it held is lost. Raises what stopped the scoring."""
        self.scorer.check()
        with self._lock:
            sent = self._forwards
            done, self._forwards = ray.wait(sent, num_returns=len(sent), timeout=0) if sent else ([], [])
        ray.get(done)  # the buffer refusing a trajectory is an error of the run
        return os.getpid()

    def submit(self, trajectories: list[Trajectory]) -> None:
        """Unscored trajectories from a rollout shell."""
        self.scorer.submit(trajectories)

    def _scored(self, trajectories: list[Trajectory]) -> None:
        train = [t for t in trajectories if t.purpose == "train"]
        with self._lock:
            for t in trajectories:
                if t.purpose != "train":
                    self._evals[t.purpose][t.group_id, t.sample_index] = self._verdict(t)
            if train:
                self._forwards.append(self._buffer.add.remote(train))

    def _verdict(self, t: Trajectory) -> dict[str, Any]:
        correct = None if t.reward is None else t.reward_parts.get("correct", t.reward)
        return {
            "prompt_id": t.prompt_id,
            "sample": t.sample_index,
            "status": t.score_status,
            "reward": t.reward,
            "correct": correct,
            "length": len(t.response_ids),
            "versions": _versions(t),
            "truncated": t.finish_reason == "length",
            "prompt": self._decode(t.prompt_ids),
            "response": self._decode(t.response_ids),
        }

    def evaluation_progress(self, purpose: str) -> int:
        """Verdicts of one evaluation that have come so far."""
        with self._lock:
            return len(self._evals[purpose])

    def evaluation(self, purpose: str) -> list[dict[str, Any]]:
        """All verdicts of one evaluation, which is then forgotten."""
        with self._lock:
            return list(self._evals.pop(purpose, {}).values())

    def decode(self, trajectories: list[Trajectory]) -> list[dict[str, Any]]:
        """Readable records of trajectories, for samples/."""
        return [
            {
                "prompt_id": t.prompt_id,
                "prompt": self._decode(t.prompt_ids),
                "response": self._decode(t.response_ids),
                "reward": t.reward,
                "score_status": t.score_status,
                "reward_parts": t.reward_parts,
                "finish_reason": t.finish_reason,
                "actor": t.actor_id,
                "actor_kind": t.actor_kind,
                "versions": _versions(t),
                "tokens": len(t.response_ids),
            }
            for t in trajectories
        ]

    def close(self) -> None:
        self.scorer.close()


def _versions(t: Trajectory) -> list[int]:
    """[oldest, newest] policy version among its tokens; empty without tokens."""
    return [int(t.token_version.min()), int(t.token_version.max())] if len(t.token_version) else []
