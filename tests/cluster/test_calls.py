"""What the failure of a call says of the process that was called, and what a call passes on."""

from __future__ import annotations

import asyncio
import inspect
import time
from types import SimpleNamespace
from typing import Protocol

import pydantic
import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    AuthenticationError,
    RayTaskError,
)

from rlcore.cluster import calls
from rlcore.cluster.actors.buffer import BufferActor
from rlcore.cluster.calls import call, kill
from rlcore.cluster.clients.buffer import RayBuffer
from rlcore.errors import DeadlineExceeded, RoleLost, StageError
from rlcore.loop.role_protocols import BufferClient, derived, waits_for


async def failing(failure):
    raise failure


@pytest.mark.parametrize("failure", [ActorDiedError(), ActorUnschedulableError("its node is gone")])
def test_a_process_that_died_or_whose_node_is_gone_is_lost(failure):
    with pytest.raises(RoleLost, match="the graders died while the run waited for a heartbeat"):
        asyncio.run(
            call(failing(failure), timeout_s=5, what="a heartbeat", key="k", who="the graders")
        )


def test_a_failed_call_keeps_the_message_of_another_library():
    """Pydantic's last line is the address of a page."""

    class Width(pydantic.BaseModel):
        width: int

    with pytest.raises(pydantic.ValidationError) as caught:
        Width(width="x")
    failed = RayTaskError("start", "Traceback (most recent call last):\n ...", caught.value)
    with pytest.raises(StageError, match=r"actor bf16-0 to start failed: .*Width.width: Input"):
        asyncio.run(call(failing(failed), timeout_s=5, what="actor bf16-0 to start", key="k"))


def test_a_call_that_takes_too_long_names_its_key():
    with pytest.raises(DeadlineExceeded, match=r"waited 0.01 s for it \(a.key=0.01\)"):
        asyncio.run(call(asyncio.sleep(5), timeout_s=0.01, what="it", key="a.key"))


def test_a_process_that_stood_still_reads_an_answer_that_came_meanwhile():
    async def stands_still():
        answer = asyncio.get_running_loop().create_future()
        asked = asyncio.ensure_future(call(answer, timeout_s=0.4, what="it", key="a.key"))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon_threadsafe(answer.set_result, 7)
        time.sleep(0.6)  # longer than the deadline
        return await asked

    assert asyncio.run(stands_still()) == 7


@pytest.mark.parametrize("limit_s", [60.0, 120.0, 1000.0, 2969.0])
def test_a_silent_process_is_named_before_a_minute_has_passed(limit_s, monkeypatch):
    """With a clock of the parts of the deadline instead of the time."""
    waited, said = [], []
    real = asyncio.wait

    async def wait(tasks, *, timeout):
        waited.append(timeout)
        if sum(waited) > 70 and limit_s > 70:
            answer.set_result(7)
        return await real(tasks, timeout=0.001)

    async def asked():
        nonlocal answer
        answer = asyncio.get_running_loop().create_future()
        more = {"key": "cluster.hang_timeout_s", "who": "rank 0"}
        return await call(
            answer,
            timeout_s=limit_s,
            what="it",
            **more,
            note=lambda s: said.append((sum(waited), s)),
        )

    answer = None
    monkeypatch.setattr(asyncio, "wait", wait)
    if limit_s < 70:
        with pytest.raises(DeadlineExceeded):
            asyncio.run(asked())
    else:
        assert asyncio.run(asked()) == 7
        assert said.pop()[1] == "rank 0 answers again"
    ((at, sentence),) = said
    assert 40 <= at < 60
    assert sentence == (
        f"rank 0 has not answered for {at:.0f} s: it counts as lost after "
        f"cluster.hang_timeout_s={limit_s:g} s"
    )


def test_a_silent_process_that_died_does_not_answer_again(monkeypatch):
    monkeypatch.setattr(calls, "SILENT_S", 0.01)
    said = []

    async def dies():
        await asyncio.sleep(0.2)
        raise ActorDiedError

    with pytest.raises(RoleLost):
        asyncio.run(call(dies(), timeout_s=0.8, what="it", key="k", note=said.append))
    assert len(said) == 1 and "has not answered" in said[0]


def test_a_short_deadline_is_its_own_sentence():
    said = []
    with pytest.raises(DeadlineExceeded):
        asyncio.run(call(asyncio.sleep(5), timeout_s=0.01, what="it", key="k", note=said.append))
    assert said == []


def test_the_buffers_client_passes_on_all_that_the_buffer_says_of_failed_scores():
    class Failed:
        class failed_scores:
            @staticmethod
            def remote():
                return asyncio.sleep(0, (3, 2, "3 of 5 samples"))

    limits = SimpleNamespace(
        supervision=SimpleNamespace(start_timeout_s=5.0),
        schedule=SimpleNamespace(publish_timeout_s=5.0),
    )
    client = RayBuffer(Failed(), "buffer", None, limits)
    assert asyncio.run(client.failed_scores()) == (3, 2, "3 of 5 samples")


def test_a_method_that_a_client_forgets_is_named():
    class Counts(Protocol):
        @waits_for("a count")
        async def count(self, upto: int, *, fast: bool) -> int: ...

        async def stop(self) -> None: ...

    class Client(Counts):
        async def stop(self) -> None: ...

        async def _forward(self, name, what, args, given):
            return name, what, args, given

    made = derived(Counts)(Client)()
    found = asyncio.run(made.count(3, fast=True))
    assert found == ("count", "a count", (3,), {"fast": True})
    with pytest.raises(TypeError, match=r"Lacking lacks Counts\.stop"):
        derived(Counts)(type("Lacking", (), {}))


def test_every_call_of_the_buffers_client_is_a_method_of_its_process():
    for name, declared in vars(BufferClient).items():
        if inspect.iscoroutinefunction(declared):
            of_process = inspect.signature(getattr(BufferActor, name))
            assert list(of_process.parameters) == list(inspect.signature(declared).parameters), name


def test_a_process_of_a_cluster_with_another_head_counts_as_ended(monkeypatch):
    """So Ray answers after a restart of the head, also where a run is taken down."""
    asked = []

    def refuse(handle, *, no_restart):
        asked.append((handle, no_restart))
        raise AuthenticationError("RPC error: WrongClusterID")

    monkeypatch.setattr(ray, "kill", refuse)
    kill("a learner")
    kill("the graders", no_restart=False)
    assert asked == [("a learner", True), ("the graders", False)]
