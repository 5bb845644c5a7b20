"""A learner's ranks as stand-ins: who dies or hangs is a lost role, which the run recovers from."""

import asyncio
import os
import sys
import time

import pytest
import ray

from rlcore.config.compose import load
from rlcore.errors import StageError
from rlcore.runtime import options
from rlcore.runtime.cluster import RoleLost, cluster, get
from rlcore.runtime.ranks import Ranks

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not know the tests' folder


class Rank:
    """Answers, hangs as in a collective, fails, or dies."""

    def step(self, how):
        if how == "hang":
            time.sleep(60)
        if how == "fail":
            raise RuntimeError("connection closed by peer")
        if how == "die":
            time.sleep(0.5)  # the peers are heard first
            os._exit(1)
        return how


@pytest.fixture(scope="module", autouse=True)
def room_for_two():
    with cluster(address=None, num_cpus=2, needed_cpus=1, needed_gpus=0, object_store_mib=100):
        yield


def started(count=2):
    handles = [ray.remote(num_cpus=0)(Rank).remote() for _ in range(count)]
    ray.get([h.step.remote("up") for h in handles])
    return handles


def asked(*hows):
    """What Ranks.call and get make of ranks that behave so."""
    ranks = Ranks(started(len(hows)), timeout_s=4)
    return asyncio.run(ranks.call("step", what="optimizer step 7", per_rank=[(how,) for how in hows]))


def test_a_rank_that_hangs_in_a_step_is_a_lost_role():
    with pytest.raises(RoleLost, match=r"learner hangs: waited 4 s for optimizer step 7 \(schedule\.step_timeout_s=4"):
        asked("well", "hang")


def test_of_several_failures_the_death_is_told_and_a_mere_failure_ends_the_run():
    with pytest.raises(RoleLost, match="rank 1 died"):
        asked("fail", "die")
    with pytest.raises(StageError, match="connection closed") as failure:
        asked("fail", "well")
    assert not isinstance(failure.value, RoleLost)


def test_a_death_while_a_recovery_starts_is_a_lost_role_too():
    limits = {"timeout_s": 20, "what": "the learner to load", "key": "schedule.step_timeout_s"}
    first, second = started()
    with pytest.raises(RoleLost, match="the learner to load: the process died"):
        get([first.step.remote("fail"), second.step.remote("die")], **limits)
    (alone,) = started(1)
    with pytest.raises(StageError, match="connection closed") as failure:
        get(alone.step.remote("fail"), **limits)
    assert not isinstance(failure.value, RoleLost)


def test_collectives_have_the_deadline_of_a_step():
    config = load(["run_dir=runs/x", "experiment=quickstart", "schedule.step_timeout_s=77"])
    assert options.learner(config, "m", 0, ("127.0.0.1", 1), 0)["collective_timeout_s"] == 77
