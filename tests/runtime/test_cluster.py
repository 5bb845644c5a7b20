"""Which cluster a run is on, what it waits for there and what it refuses."""

import threading
import time

import pytest
import ray

from rlcore.config.compose import load
from rlcore.errors import DeadlineExceeded, UserError
from rlcore.runtime import placing
from rlcore.runtime.cluster import actor_class, beside_driver, cluster, free_port

SIZE = {"num_cpus": 2, "needed_cpus": 1, "object_store_mib": 100}


def test_an_unreachable_head_is_refused_at_once_but_waited_for_in_a_recovery():
    where = {**SIZE, "address": f"127.0.0.1:{free_port()}", "needed_gpus": 0}
    begun = time.monotonic()
    with pytest.raises(UserError, match="does not answer"), cluster(**where):
        pass
    with (
        pytest.raises(DeadlineExceeded, match=r"does not answer.*after 1 s \(cluster\.start_timeout_s\)"),
        cluster(**where, patience_s=1),
    ):
        pass
    assert 1 < time.monotonic() - begun < 20


def test_gpus_that_this_machine_does_not_show_are_refused_before_ray_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with (
        pytest.raises(UserError, match=r"learner\.num_gpus ask for 1 GPUs where this machine shows 0"),
        cluster(address=None, needed_gpus=1, **SIZE),
    ):
        pass
    assert not ray.is_initialized()


def test_ranks_on_a_joined_cluster_meet_on_rank_0_s_node(monkeypatch):
    class Rank:
        class address:
            remote = staticmethod(lambda port: ("10.0.0.7", port))

    monkeypatch.setattr(placing, "get", lambda ref, **limits: ref)
    config = load(["run_dir=x", "experiment=quickstart"])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert placing.meeting(config, [Rank])[0] == "127.0.0.1"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert placing.meeting(config, [Rank], 4242) == ("10.0.0.7", 4242)


def test_a_role_without_resources_runs_beside_the_driver(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with cluster(address=None, needed_gpus=0, **SIZE):
        strategy = beside_driver()
        assert strategy.node_id == ray.get_runtime_context().get_node_id()
        assert (
            actor_class(threading.Event, num_cpus=0, scheduling_strategy=strategy)
            ._default_options["scheduling_strategy"]
            .soft
        )


def test_a_signal_inside_ray_s_start_interrupts_the_run(monkeypatch):
    """Ray's own handler exits with the number of the signal, as if that were a result."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def start(**settings):
        raise SystemExit(15)

    monkeypatch.setattr(ray, "init", start)
    with pytest.raises(KeyboardInterrupt), cluster(address=None, needed_gpus=0, **SIZE):
        pass
