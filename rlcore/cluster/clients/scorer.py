"""The clients of graders' processes: of one process, and of one on every node with actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray

from rlcore.cluster.actors.scorer import ScorerActor
from rlcore.cluster.calls import call, get, kill
from rlcore.cluster.clients.buffer import RayBuffer
from rlcore.cluster.placement import CALL_THREADS, actor_class, on_node, other_actor_nodes
from rlcore.cluster.specs import Hosting
from rlcore.errors import DeadlineExceeded, RoleLost
from rlcore.loop.role_protocols import ScorerClient
from rlcore.tasks.graders import GraderPool

WHO = "the graders' process"
SAMPLES_TIMEOUT_S = 15.0  # training waits for them
ANSWER_S = 5.0  # that the answer may come after it
CLOSE_TIMEOUT_S = 15.0


class RayScorer(ScorerClient):
    """Answers to evaluations have the deadline of the evaluation. Ray restarts this process and
    repeats calls that it did not answer."""

    def __init__(self, handle: Any, started: Any, hosting: Hosting) -> None:
        """`started`: its answer to `start`, or a reference that is done when it has started."""
        self.handle = handle
        self.starting = [(started, "the graders to start")]
        self._hang_timeout_s = hosting.supervision.hang_timeout_s
        self._evaluation_timeout_s = hosting.evaluation.timeout_s

    async def _verdicts(self, ref: Any) -> Any:
        limit, key = self._evaluation_timeout_s, "evaluation.timeout_s"
        return await call(ref, timeout_s=limit, what="verdicts", key=key, who=WHO)

    async def evaluation_progress(self, purpose: str) -> int:
        return int(await self._verdicts(self.handle.evaluation_progress.remote(purpose)))

    async def evaluation(self, purpose: str) -> list[dict[str, Any]]:
        return list(await self._verdicts(self.handle.evaluation.remote(purpose)))

    async def evaluation_shown(self, purpose: str, count: int) -> list[dict[str, Any]]:
        return list(await self._verdicts(self.handle.evaluation_shown.remote(purpose, count)))

    async def samples(self, step: int, count: int) -> list[dict[str, Any]]:
        ref = self.handle.samples.remote(step, count, SAMPLES_TIMEOUT_S)
        what, key = "readable samples", "logging.samples_per_step"
        limit = SAMPLES_TIMEOUT_S + ANSWER_S
        return list(await call(ref, timeout_s=limit, what=what, key=key, who=WHO))

    async def pid(self, note: Callable[[str], None]) -> int:
        """Its process id; a changed one means that it was restarted. `note` is told of its silence.
        Raises the error that stopped the scoring."""
        limit, key = self._hang_timeout_s, "cluster.hang_timeout_s"
        ref, what = self.handle.pid.remote(), f"a heartbeat of {WHO}"
        return int(await call(ref, timeout_s=limit, what=what, key=key, who=WHO, note=note))

    async def notes(self) -> list[str]:
        """Sentences for the user since the last call, such as of a reward that does not answer."""
        limit, key = self._hang_timeout_s, "cluster.hang_timeout_s"
        ref = self.handle.notes.remote()
        return list(await call(ref, timeout_s=limit, what="notes", key=key, who=WHO))

    def restart(self) -> None:
        """End the process; Ray starts another one."""
        kill(self.handle, no_restart=False)

    def close(self) -> None:
        """End the grading processes. Blocks."""
        get(
            self.handle.close.remote(),
            timeout_s=CLOSE_TIMEOUT_S,
            what="the graders to close",
            key="task.grade_timeout_s",
        )

    def kill(self) -> None:
        """End the process for good."""
        kill(self.handle)


def scorer_name(buffer: str, node_id: str = "") -> str:
    """The name of the graders' process of a node, under which other processes find it; without a
    node, the one on the driver's node."""
    return f"{buffer}-graders" + (f"-{node_id[:12]}" if node_id else "")


class RayNodeScorers:
    """The graders' processes on actors' nodes. Ray restarts one that dies; one that cannot go on is
    given up, and the actors of its node then send to the driver's graders."""

    def __init__(
        self,
        hosting: Hosting,
        buffer: RayBuffer,
        pools: tuple[GraderPool, ...],
        tokenizer_path: str,
        note: Callable[[str], None],
    ) -> None:
        """`pools`, `tokenizer_path`: as of `ScorerActor`."""
        self._buffer = buffer
        self._hosting = hosting
        self._graders = pools, tokenizer_path
        self._note = note
        self._processes = sum(pool.grading.grader_processes for pool in pools)
        self._clients: dict[str, RayScorer] = {}  # by node
        self._pids: dict[str, int] = {}
        self._known: set[str] = set()  # nodes that were looked at
        self.start()

    def start(self) -> set[str]:
        """Start a process on each new node that has a CPU besides what the grading processes use;
        returns the nodes there are."""
        found = other_actor_nodes(own_nodes=self._hosting.own_nodes)
        for node_id, resources in found.items():
            if node_id not in self._known:
                self._known.add(node_id)
                if resources.get("CPU", 0) > self._processes:
                    self._clients[node_id] = self._spawn(node_id)
        return set(found)

    def _spawn(self, node_id: str) -> RayScorer:
        actor = actor_class(
            ScorerActor,
            num_cpus=0,
            name=scorer_name(self._buffer.name, node_id),
            scheduling_strategy=on_node(node_id),
            max_concurrency=CALL_THREADS,
            max_restarts=self._hosting.supervision.max_restarts,
            max_task_retries=-1,
        )
        handle = actor.remote(self._buffer.name, *self._graders, scorer_name(self._buffer.name))
        return RayScorer(handle, handle.__ray_ready__.remote(), self._hosting)

    async def watch(self) -> list[str]:
        """A heartbeat of all processes; returns the nodes whose queued answers are lost, once each.
        Raises an error that stopped the scoring of any."""
        # Ray's head may take long to answer: not in the event loop, which other deadlines need
        alive = await asyncio.to_thread(self.start)
        nodes = list(self._clients)
        lost = await asyncio.gather(*(self._lost(node, node in alive) for node in nodes))
        return [node for node, gone in zip(nodes, lost, strict=True) if gone]

    async def _lost(self, node: str, lives: bool) -> bool:
        client = self._clients[node]
        if lives and not _started(client):
            return False
        try:
            pid = await client.pid(self._note) if lives else None
            for sentence in await client.notes() if lives else ():
                self._note(f"on node {node[:12]}: {sentence}")
        except DeadlineExceeded:
            await asyncio.to_thread(client.restart)
            return True
        except RoleLost:
            pid = None
        if pid is None:
            await self._give_up(node)
            return True
        before = self._pids.get(node, pid)
        self._pids[node] = pid
        return pid != before

    async def _give_up(self, node: str) -> None:
        self._note(
            f"the graders of node {node[:12]} are lost: what its actors sample is graded on the "
            "driver's node"
        )
        self._pids.pop(node, None)
        await asyncio.to_thread(self._clients.pop(node).kill)

    def close(self) -> None:
        """End their grading processes. Blocks."""
        for client in self._clients.values():
            client.close()

    def kill(self) -> None:
        """End all processes for good."""
        for client in self._clients.values():
            client.kill()


def _started(client: RayScorer) -> bool:
    """Return whether the start of the process has ended, with or without success: until then it
    answers no heartbeat."""
    return bool(ray.wait([client.starting[0][0]], timeout=0)[0])
