"""A learner's ranks as stand-ins: one that dies or hangs is a lost role, which the run recovers
from."""

import asyncio
import os
import sys
import time

import pytest
import ray
from timing import deadline

from rlcore.cluster.calls import get
from rlcore.cluster.clients.learner import RankGroup
from rlcore.cluster.ray_cluster import cluster
from rlcore.cluster.specs import RaySpec
from rlcore.errors import RoleLost, StageError

pytestmark = pytest.mark.cluster

# workers do not know the tests' folder
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
STEP_S = deadline(4)


class Rank:
    """Answers, hangs as in a collective, fails, or dies."""

    def step(self, how):
        if how == "hang":
            time.sleep(10**6)
        if how == "fail":
            raise RuntimeError("connection closed by peer")
        if how == "die":
            time.sleep(0.5)  # the peers are heard first
            os._exit(1)
        return how


@pytest.fixture(scope="module", autouse=True)
def room_for_two():
    with cluster(RaySpec(num_cpus=2, object_store_mib=100), needed_cpus=1, needed_gpus=0):
        yield


def group(count=2):
    handles = [ray.remote(num_cpus=0)(Rank).remote() for _ in range(count)]
    ray.get([h.step.remote("up") for h in handles])
    return RankGroup("policy", handles, timeout_s=STEP_S)


def called(*hows):
    """What becomes of a call of ranks that behave so."""
    ranks = group(len(hows))
    refs = ranks.ask_each("step", [(how,) for how in hows])
    return asyncio.run(ranks.answers(refs, "optimizer step 7"))


def called_now(*hows):
    ranks = group(len(hows))
    return ranks.answers_now(
        ranks.ask_each("step", [(how,) for how in hows]), "the learner to load"
    )


def test_a_rank_that_hangs_in_a_step_is_a_lost_role():
    with pytest.raises(
        RoleLost,
        match=rf"learner hangs: waited {STEP_S:g} s for optimizer step 7 "
        rf"\(schedule\.step_timeout_s={STEP_S:g}",
    ):
        called("fine", "hang")


def test_of_several_failures_the_death_is_raised_and_a_mere_failure_ends_the_run():
    with pytest.raises(RoleLost, match="rank 1 died"):
        called("fail", "die")
    with pytest.raises(StageError, match="connection closed") as failure:
        called("fail", "fine")
    assert not isinstance(failure.value, RoleLost)
    assert called("fine", "late") == ["fine", "late"]


def test_outside_the_loop_the_same_failures_are_lost_roles_too():
    with pytest.raises(RoleLost, match="the learner to load: the process died"):
        called_now("fail", "die")
    with pytest.raises(RoleLost, match="learner hangs: waited"):
        called_now("hang")
    with pytest.raises(StageError, match="connection closed") as failure:
        called_now("fail")
    assert not isinstance(failure.value, RoleLost)


def test_an_error_of_the_run_arrives_as_itself():
    class Refusing:
        def step(self):
            raise StageError("the loss is not finite")

    handle = ray.remote(num_cpus=0)(Refusing).remote()
    with pytest.raises(StageError, match=r"^the loss is not finite$"):
        get(handle.step.remote(), timeout_s=20, what="a step", key="schedule.step_timeout_s")
