"""Two tiny models of one architecture, and engines started as seldom as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import forked
import pytest
from engine_helpers import Model, build_model, drain, make_job, requests

from rlcore.rollout.specs import start_engine
from rlcore.types import Request, Trajectory
from rlcore.weights.stream import whole


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("a"), seed=1)


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("b"), seed=2)


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Any]]:
    """Starts engines; they live until the session ends."""
    engines = []

    def make(model: Model, **changes: Any) -> Any:
        if "tensor_parallel" in changes:
            fork_ranks()
        engines.append(start_engine(make_job(model, **changes)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def fork_ranks() -> None:
    """Have vLLM start the ranks of an engine as forks, not by two further imports of it. A rank
    finds the same there as in a process that is spawned."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = forked.context


@pytest.fixture(scope="session")
def shared_engine(start: Callable[..., Any], model_a: Model) -> Any:
    return start(model_a)


_asked: set[str] = set()  # ids of all requests that tests made


@pytest.fixture
def engine(shared_engine: Any, model_a: Model) -> Any:
    """The shared engine on model A's weights as version 0, with nothing queued."""
    shared_engine.abort(_asked)
    shared_engine.end_drain()
    shared_engine.update_weights(0, whole(model_a.tensors), "in_flight")
    return shared_engine


@pytest.fixture
def ask() -> Callable[..., list[Request]]:
    def make(*args: Any, **kwargs: Any) -> list[Request]:
        made = requests(*args, **kwargs)
        _asked.update(r.request_id for r in made)
        return made

    return make


@pytest.fixture
def finish() -> Callable[[Any], list[Trajectory]]:
    return drain
