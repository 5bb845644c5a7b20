"""What processes are started with, without starting any."""

from types import SimpleNamespace

import pytest

from rlcore.cluster import start
from rlcore.cluster.specs import Hosting, RaySpec
from rlcore.errors import UserError
from rlcore.learner.specs import LearnerJob, LearnerSpec
from rlcore.loop.specs import EvaluationSpec, ScheduleSpec, SupervisionSpec
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.testing.records import make_sampling
from rlcore.types import POLICY
from rlcore.weights.specs import TransportSpec


def hosting(**settings):
    made = {"ray": RaySpec(), "own_nodes": False, "transport": TransportSpec(), **settings}
    return Hosting(
        schedule=ScheduleSpec(step_timeout_s=77),
        supervision=SupervisionSpec(),
        evaluation=EvaluationSpec(),
        run_dir="",
        **made,
    )


def job(ranks, **learner):
    return LearnerJob(
        "model",
        LearnerSpec(ranks=ranks, **learner),
        ObjectiveSpec(),
        {},
        make_sampling(),
        total_steps=5,
        run_seed=0,
        pad_id=0,
    )


@pytest.fixture
def started(monkeypatch):
    """(actor class, its resources, arguments of `start`) of every process asked for."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    asked = []

    def actor_class(plain, **settings):
        def begin(*arguments):
            asked.append((plain.__name__, settings, arguments))
            return len(asked) - 1

        handle = SimpleNamespace(start=SimpleNamespace(remote=begin))
        placed = SimpleNamespace(remote=lambda *arguments: handle)
        return SimpleNamespace(options=lambda **place: placed)

    monkeypatch.setattr(start, "actor_class", actor_class)
    return asked


def test_collectives_have_the_deadline_of_a_step(started):
    start.start_learners(hosting(), None, {POLICY: job(2)}, wire_dtype="float32")
    places = [arguments[1] for _, _, arguments in started]
    assert [(p.rank, p.world_size, p.timeout_s) for p in places] == [(0, 2, 77), (1, 2, 77)]
    assert places[0].host == "127.0.0.1" and places[0].port == places[1].port


def test_a_companion_has_ranks_and_a_meeting_place_of_its_own(started):
    jobs = {POLICY: job(2), "draft": job(1)}
    learner = start.start_learners(hosting(), None, jobs, wire_dtype="float32")
    assert [who for _, who in learner.roles()] == [
        "learner rank 0",
        "learner rank 1",
        "draft learner rank 0",
    ]
    assert [what for _, what in learner.starting][-1] == "draft learner rank 0 to start"
    ports = [arguments[1].port for _, _, arguments in started]
    assert ports[0] == ports[1] != ports[2]


def test_a_learner_with_nodes_of_its_own_is_bound_to_them(started):
    start.start_learners(hosting(own_nodes=True), None, {POLICY: job(1)}, wire_dtype="float32")
    start.start_learners(hosting(), None, {POLICY: job(1)}, wire_dtype="float32")
    assert [bool(settings["resources"]) for _, settings, _ in started] == [True, False]


@pytest.mark.parametrize(
    ("gpus", "transport", "environment", "grows"),
    [
        (1, "nccl", {}, True),
        (1, "object_store", {}, True),
        (1, "ipc", {}, False),  # its handles are of whole allocations
        (0, "object_store", {}, False),
        (1, "nccl", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, False),
    ],
)
def test_memory_of_ranks_on_gpus_grows_in_place(
    started, monkeypatch, gpus, transport, environment, grows
):
    for name in start.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    where = hosting(transport=TransportSpec(transport=transport))
    jobs = {POLICY: job(1, num_gpus=gpus, zero_stage=1)}
    start.start_learners(where, None, jobs, wire_dtype="bfloat16")
    ((_, settings, _),) = started
    wanted = {"env_vars": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}
    assert settings.get("runtime_env") == (wanted if grows else None)


def test_a_port_that_is_taken_is_refused_by_its_key(started):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"learner\.port={port} is not free"):
            jobs = {POLICY: job(1, port=port)}
            start.start_learners(hosting(), None, jobs, wire_dtype="float32")
