"""Simulated clients of the loop in one process: buffer, learner, scorers and nodes. The buffer's
rules are the real ones; the others take simulated time and keep a record of the calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.buffer import ReplayBuffer
from rlcore.buffer.journal import (
    RecordFile,
    ShardFiles,
    file_of,
    read_record_file,
    write_record_file,
)
from rlcore.buffer.shard import Shard, ShardReply, ShardReport, ShardReporter
from rlcore.cluster.actors.buffer import BufferActor
from rlcore.cluster.sample_text import first_shown, readable, verdict, without_texts
from rlcore.errors import DeadlineExceeded, StageError
from rlcore.loop.role_protocols import (
    ActorClient,
    Batch,
    BufferClient,
    LearnerClient,
    Publication,
    SampleDetails,
    SampleKey,
    ScorerClient,
    Sent,
    derived,
)
from rlcore.references import ShardLost, read_records
from rlcore.serialization import StoredEpisode, read_header
from rlcore.types import POLICY, Answer, Score, WeightManifest

Reward = Callable[[Answer], float | None]  # None: the grader raises


@derived(BufferClient)
class SimulatedBuffer(BufferClient):
    """The real buffer and its host, in this process."""

    def __init__(self, buffer: ReplayBuffer, nodes: int = 1) -> None:
        """`nodes`: of the simulated cluster."""
        self.actor = BufferActor(
            ShardFiles(
                lambda folder, keys, _: self.nodes.write(folder, keys),
                lambda folder, files, _: self.nodes.read(folder, files),
            )
        )
        self.nodes = SimulatedNodes(nodes, self.actor)
        self._buffer = buffer
        self._started = False

    async def start(self) -> SimulatedBuffer:
        """Start the buffer; returns this client."""
        await self.actor.start(self._buffer)
        return self

    async def add_records(self, records: Sequence[bytes], actor: str = "bf16-0") -> None:
        """From a rollout actor."""
        await self.nodes.add_records(actor, records)

    async def add_scores(self, scores: Sequence[Score], node: int = 0) -> None:
        """From the graders of a node."""
        await self.nodes.add_scores(node, scores)

    async def _forward(
        self, name: str, what: str, args: Sequence[Any], given: Mapping[str, Any]
    ) -> Any:
        return await getattr(self.actor, name)(*args, **given)

    async def save(self, folder: str, *, timeout_s: float) -> None:
        await self.actor.save(folder, timeout_s=timeout_s)

    async def load(self, folder: str) -> None:
        """Continue from what `save` wrote."""
        shards = [shard.name for shard in self.nodes.shards.values()]
        await self.actor.load(folder, shards, timeout_s=60.0)


class SimulatedLearner(LearnerClient):
    """Counts its steps and keeps a record of every token it was trained on.

    `trained`: step -> (group id, sample index) -> (oldest, newest version) of the sample.
    `phases`: the steps of each phase that was begun, and for how many of them p_ref was computed.
    """

    def __init__(
        self,
        buffer: SimulatedBuffer,
        *,
        step_s: float = 1.0,
        publish_s: float = 0.1,
        beside: Callable[[], Iterable[Any]] | None = None,
    ) -> None:
        """`beside`: the engines that it shares memory with in turns, which must sleep while it
        trains."""
        self.trained: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
        self.published: list[int] = []
        self.sent: list[tuple[int, int]] = []  # (version, receivers) of a group transport
        self.resumed_phases: list[str] = []
        self.phases: list[tuple[list[int], int]] = []
        self.fails_at: dict[int, Exception] = {}  # step -> what it raises instead
        self.step_s = step_s
        self.publish_s = publish_s
        self.write_s = 0.0  # what its disk takes for a checkpoint
        self.has_memory = True  # to train
        self._beside = beside
        self._buffer = buffer
        self._batches: dict[int, Batch] = {}
        self._stored: dict[int, list[Any]] = {}
        self._phase: dict[int, list[Any]] = {}  # the records of each of its steps
        self._saving: tuple[Path, str] | None = None

    async def fetch(self, batches: Mapping[int, Batch]) -> None:
        for step, batch in batches.items():
            ids = [group_id for group_id, _ in batch.groups]
            self._stored[step] = await self._read(step, ids)

    async def _read(self, step: int, ids: list[int]) -> list[Any]:
        while True:
            stored = await self._buffer.actor.stored(step, ids, 3600.0)
            if stored is None:
                raise DeadlineExceeded(f"waited for the groups of step {step}")
            episodes = [episode for group in stored for episode in group.episodes]
            records = [record for e in episodes for record in e.records]
            with contextlib.suppress(ShardLost):
                return read_records(records, self._buffer.nodes.fetch)
            await asyncio.sleep(1.0)

    async def begin_phase(
        self, steps: Sequence[int], *, batches: int, keep_start: bool, resumed: str | None
    ) -> None:
        self._own_turn()
        self.phases.append((list(steps), batches))
        phase = [self._stored.pop(step) for step in steps[:batches]]
        self._phase = {step: phase[i % batches] for i, step in enumerate(steps)}
        if resumed is not None:
            self.resumed_phases.append(resumed)
        await asyncio.sleep(self.begin_seconds(len(steps)))

    def begin_seconds(self, steps: int) -> float:
        """Return the seconds that precede the first of `steps` steps of the phase in
        `self._phase`."""
        return self.step_s / 4

    def step_seconds(self, records: Sequence[Any]) -> float:
        """An optimizer step on these records."""
        return self.step_s

    def _own_turn(self) -> None:
        assert self.has_memory, "trains without its memory"
        if self._beside is not None:
            assert all(e.asleep or e.dead for e in self._beside()), "trains next to an engine"

    async def release(self) -> dict[str, float]:
        await asyncio.sleep(0.1)
        self.has_memory = False
        return {"release_s": 0.1, "freed_gib": 2.0}

    async def reclaim(self) -> dict[str, float]:
        await asyncio.sleep(0.1)
        self.has_memory = True
        self._own_turn()
        return {"reclaim_s": 0.1}

    async def train_step(self, step: int) -> dict[str, float]:
        self._own_turn()
        await asyncio.sleep(self.step_seconds(self._phase[step]))
        self._own_turn()
        if step in self.fails_at:
            raise self.fails_at.pop(step)
        headers = [read_header(record) for record in self._phase.pop(step)]
        samples = {}
        for h in headers:
            assert h.oldest_version is not None and h.newest_version is not None
            samples[h.group_id, h.sample_index] = (h.oldest_version, h.newest_version)
        self.trained[step] = samples
        staleness = [step - oldest for oldest, _ in samples.values()]
        return {
            "train/tokens": float(sum(h.tokens for h in headers)),
            "train/sequences": float(len(samples)),
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": float(max(staleness)),
            "loss/policy": 0.0,
            "grad_norm": 1.0,
        }

    async def sample_details(self, samples: Sequence[SampleKey]) -> dict[SampleKey, SampleDetails]:
        newest = self.trained[max(self.trained)]
        return {key: {"log_ratio": [0.25], "advantage": 0.5} for key in samples if key in newest}

    async def publish(self, version: int, *, full: bool, resumed: str | None) -> Publication:
        await asyncio.sleep(self.publish_s)
        self.published.append(version)
        manifest = WeightManifest(version, (), (), "float32", {}, full)
        return Publication(version, {POLICY: (manifest, version)}, Sent(2.0, 0.5))

    async def send(self, publication: Publication, receivers: Sequence[ActorClient]) -> Sent:
        assert self._beside is None or not self.has_memory, "sends before it has freed its memory"
        await asyncio.sleep(self.publish_s)
        self.sent.append((publication.version, len(receivers)))
        for actor in receivers:
            if getattr(actor, "dead", False):
                raise StageError("a weight broadcast did not end, or a rank was lost")
            actor.take_weights(publication.version)  # type: ignore[attr-defined]
        return publication.sent

    async def save(self, folder: str, *, in_phase: bool) -> None:
        trained = {
            step: [[*key, *versions] for key, versions in samples.items()]
            for step, samples in self.trained.items()
        }
        self._saving = (Path(folder), json.dumps({"trained": trained, "in_phase": in_phase}))

    async def saved(self, *, timeout_s: float) -> None:
        assert self._saving is not None
        if self.write_s > timeout_s:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded(f"waited {timeout_s:g} s for the learner to write")
        await asyncio.sleep(self.write_s)
        folder, text = self._saving
        folder.mkdir(parents=True)
        (folder / "learner.json").write_text(text)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        trained = json.loads((folder / "learner.json").read_text())["trained"]
        self.trained = {
            int(step): {(g, i): (oldest, newest) for g, i, oldest, newest in samples}
            for step, samples in trained.items()
        }


class SimulatedScorer(ScorerClient):
    """Grades one answer after another, on every node by itself. `restart` loses waiting answers, as
    killed processes do."""

    def __init__(self, buffer: SimulatedBuffer, *, reward: Reward, grade_s: float = 0.01) -> None:
        self.restarts = 0
        self._buffer = buffer
        self._reward = reward
        self.grade_s = grade_s
        self._evaluations: dict[str, dict[tuple[int, int], dict[str, Any]]] = defaultdict(dict)
        self._queues: dict[int, asyncio.Queue[Answer]] = {}  # by node
        self._grading: list[asyncio.Task[None]] = []

    def submit(self, answers: Sequence[Answer], actor: str = "bf16-0") -> None:
        """From a rollout actor."""
        node = self._buffer.nodes.of(actor)
        if node not in self._queues:
            self._queues[node] = asyncio.Queue()
            self._grading.append(self._start(node))
        for answer in answers:
            self._queues[node].put_nowait(answer)

    def _start(self, node: int) -> asyncio.Task[None]:
        """The process of a node."""
        return asyncio.create_task(self._grade(node, self._queues[node]))

    def restart(self) -> None:
        """Its process dies and is replaced; queued answers and verdicts are lost."""
        self.restarts += 1
        for task in self._grading:
            task.cancel()
        self._grading.clear()
        self._queues.clear()
        self._evaluations.clear()

    async def _grade(self, node: int, queue: asyncio.Queue[Answer]) -> None:
        while True:
            answer = await queue.get()
            await asyncio.sleep(self.grade_s)
            score = self._score(answer)
            if answer.purpose == "train":
                await self._buffer.add_scores([score], node)
            else:
                key = (answer.group_id, answer.sample_index)
                self._evaluations[answer.purpose][key] = verdict(answer, score)

    def _score(self, answer: Answer) -> Score:
        reward = self._reward(answer)
        key = (answer.group_id, answer.sample_index, answer.draw_id)
        if reward is None:
            return Score(*key, "error", error="the grader raised")
        return Score(*key, "ok", reward, {"correct": reward})

    async def evaluation_progress(self, purpose: str) -> int:
        return len(self._evaluations[purpose])

    async def evaluation(self, purpose: str) -> list[dict[str, Any]]:
        return [without_texts(v) for v in self._evaluations[purpose].values()]

    async def evaluation_shown(self, purpose: str, count: int) -> list[dict[str, Any]]:
        return first_shown(self._evaluations.pop(purpose, {}).values(), count)

    async def samples(self, step: int, count: int) -> list[dict[str, Any]]:
        stored = await self._buffer.actor.peek(step, count)
        shown = []
        for episode in stored:
            with contextlib.suppress(ShardLost):
                records = read_records(episode.records, self._buffer.nodes.fetch)
                whole = StoredEpisode(episode.score, tuple(records))
                shown.append(readable(whole, lambda ids: "7" * len(ids)))
        return shown


class SimulatedNodes:
    """Node 0 is the driver's, where the buffer is; the others have a shard each, until it dies.

    `lost`: shards that died and were not reported yet.
    """

    def __init__(self, count: int, buffer: BufferActor) -> None:
        self.shards = {i: Shard(f"shard-{i}") for i in range(1, count)}
        self._reporters = {i: ShardReporter(s, self._report) for i, s in self.shards.items()}
        self._sending: dict[int, asyncio.Task[None]] = {}  # by node
        self.lost: list[str] = []
        self._count = count
        self._buffer = buffer

    def of(self, actor: str) -> int:
        """The node of an actor, by its number."""
        return int(actor.rpartition("-")[2]) % self._count

    async def add_records(self, actor: str, records: Sequence[bytes]) -> None:
        """From a rollout actor."""
        reporter = self._reporters.get(self.of(actor))
        if reporter is None:
            await self._buffer.add_records(records)
            return
        reporter.put_records(records)
        self._send(self.of(actor))

    async def add_scores(self, node: int, scores: Sequence[Score]) -> None:
        """From the graders of a node."""
        reporter = self._reporters.get(node)
        if reporter is None:
            await self._buffer.add_scores(scores)
            return
        reporter.put_scores(scores)
        self._send(node)

    def _send(self, node: int) -> None:
        """Senders do not wait for the buffer."""
        if node not in self._sending:
            task = self._sending[node] = asyncio.create_task(self._reporters[node].flush())
            task.add_done_callback(lambda task: self._sent(node, task))

    def _sent(self, node: int, task: asyncio.Task[None]) -> None:
        del self._sending[node]
        if not task.cancelled():
            task.exception()  # the buffer's own next heartbeat raises it
        if node in self._reporters and self._reporters[node].waiting:
            self._send(node)

    async def _report(self, name: str, report: ShardReport) -> ShardReply:
        return await self._buffer.add_report(name, report)

    def fetch(self, keys: Mapping[str, Sequence[int]]) -> dict[str, list[bytes]]:
        """As `rlcore.references.Fetch`."""
        found = {shard.name: shard for shard in self.shards.values()}
        for name in keys:
            if name not in found:
                raise ShardLost(f"{name} is lost")
        return {name: found[name].get(its) for name, its in keys.items()}

    def write(self, folder: Path, keys: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """As `rlcore.buffer.journal.WriteShards`."""
        found = self.fetch(keys)
        return {name: write_record_file(folder / file_of(name), found[name]) for name in keys}

    def read(self, folder: Path, files: Mapping[str, Sequence[RecordFile]]) -> dict[str, list[int]]:
        """As `rlcore.buffer.journal.ReadShards`."""
        found = {shard.name: shard for shard in self.shards.values()}
        return {
            name: [found[name].keep(read_record_file(folder, file)) for file in its]
            for name, its in files.items()
        }

    async def beat(self) -> None:
        """A heartbeat of every shard: it drops what was released."""
        for shard in list(self.shards.values()):
            shard.drop(await self._buffer.released(shard.name))

    def revive(self, node: int) -> None:
        """A new process replaces a shard that died alone."""
        shard = self.shards[node] = Shard(f"shard-{node}#2")
        self._reporters[node] = ShardReporter(shard, self._report)

    def die(self, node: int) -> None:
        """The node's records are gone; its actors go on, and send to the buffer until `revive`."""
        self.lost.append(self.shards.pop(node).name)
        del self._reporters[node]
        if node in self._sending:
            self._sending[node].cancel()
