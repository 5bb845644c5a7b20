"""The heartbeats of the roles that a run cannot do without."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from timing import deadline

from rlcore.cluster import heartbeats
from rlcore.cluster.clients import scorer
from rlcore.cluster.clients.scorer import RayNodeScorers
from rlcore.cluster.heartbeats import RayRoleWatch
from rlcore.errors import RoleLost


def test_a_silent_head_is_asked_for_no_nodes_and_counts_as_lost(monkeypatch):
    """Ray's questions to the head wait for it, for longer than a driver without a head may live."""
    answers, asked = iter([True, False, False]), []

    async def head_answers():
        return next(answers)

    async def pid(note):
        return 1

    async def nothing(name=""):
        asked.append(name)
        return []

    monkeypatch.setattr(heartbeats, "head_answers", head_answers)
    graders = SimpleNamespace(pid=pid, notes=lambda: nothing("notes"))
    shards = SimpleNamespace(watch=lambda note: nothing("shards"))
    watch = RayRoleWatch(
        SimpleNamespace(handle=None),
        SimpleNamespace(roles=lambda: []),
        graders,
        SimpleNamespace(heartbeat_s=0.0, hang_timeout_s=1.0),
        print,
        shards,
        SimpleNamespace(watch=lambda: nothing("graders")),
    )
    monkeypatch.setattr(watch, "_alive", lambda handle, who: nothing(who))
    with pytest.raises(RoleLost, match="head"):
        asyncio.run(asyncio.wait_for(watch.run(nothing, nothing), deadline(10)))
    assert asked == ["the replay buffer", "shards", "graders", "notes", "the replay buffer"]


def test_a_nodes_graders_are_watched_without_holding_the_event_loop(monkeypatch):
    """Ray's head may not answer for long, and every deadline would pass meanwhile."""
    waits, here = threading.Event(), {"node": {"CPU": 0}}

    def slow_head(**_):
        assert waits.wait(deadline(10))
        return here

    hosting = SimpleNamespace(own_nodes=False)
    monkeypatch.setattr(scorer, "other_actor_nodes", lambda **_: here)
    beside = RayNodeScorers(hosting, None, (), "", print)
    monkeypatch.setattr(scorer, "other_actor_nodes", slow_head)

    async def watch():
        asked = asyncio.create_task(beside.watch())
        await asyncio.sleep(0)
        waits.set()  # never reached by a loop that waits for the head
        return await asked

    assert asyncio.run(watch()) == []
