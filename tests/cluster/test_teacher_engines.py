"""Records that a teacher's engines score on their way to the buffer: who scores which, deadlines,
faults. Ray is a stand-in here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from rlcore.cluster import teacher_engines as module
from rlcore.cluster.teacher_engines import (
    CHUNK,
    RayTeacher,
    TeacherActor,
    TeacherOutlet,
    TeacherState,
)
from rlcore.errors import RoleLost
from rlcore.loop.specs import SupervisionSpec
from rlcore.testing.records import make_trajectory
from rlcore.types import TEACHER, TEACHER_S

FAULTS = [GetTimeoutError("late"), ActorDiedError(), RayTaskError("score", "", ValueError())]


def answer(given: Any) -> tuple[np.ndarray, ...]:
    """What an engine of one likeliest token gives of a record: the tokens' own number."""
    ids, sampled = given
    own = ids[sampled]
    return own[:, None], np.zeros((len(own), 1), np.float32), -own.astype(np.float32)


class Engine:
    """A handle of a process that answers, takes no record that ends with 0, or raises."""

    def __init__(self, fault: Exception | None = None, answer: Any = answer) -> None:
        self.fault, self.answer = fault, answer
        self.asked: list[int] = []
        self.given_up: list[int] = []  # the last call of each time
        self.states: list[Any] = []  # answers to heartbeats; an exception is raised
        self.score = SimpleNamespace(remote=self._score)
        self.give_up = SimpleNamespace(remote=lambda _, number: self.given_up.append(number))
        self.state = SimpleNamespace(remote=lambda: self)

    def _score(self, given: Any, caller: str, number: int) -> Any:
        self.asked.append(len(given))
        answers = [None if ids[-1] == 0 else self.answer((ids, on)) for ids, on in given]
        return self.fault or (answers, 0.5 * len(given))


@pytest.fixture
def killed(monkeypatch) -> list[Any]:
    """The engines whose processes were ended for others to replace them."""
    found: list[Any] = []

    def get(ref: Any, timeout: float = 0.0) -> Any:
        assert timeout >= 0
        ref = ref.states.pop(0) if isinstance(ref, Engine) else ref
        if isinstance(ref, Exception):
            raise ref
        return ref

    def wait(refs: Any, timeout: float) -> Any:
        assert timeout == 0
        return [r for r in refs if r.states], []

    def kill(handle: Any, no_restart: bool) -> None:
        assert not no_restart
        found.append(handle)

    monkeypatch.setattr(module, "ray", SimpleNamespace(get=get, wait=wait))
    monkeypatch.setattr(module, "kill", kill)
    return found


def records(count: int, last: int = 7) -> list[Any]:
    return [make_trajectory(i, 0, turns=[((3, 4), (5, last))]) for i in range(count)]


# ----- from a rollout actor -----


def test_every_record_has_its_own_scores_and_engines_take_turns(killed) -> None:
    engines = [Engine(), Engine()]
    outlet, sent = TeacherOutlet(engines, 5.0), records(3 * CHUNK - 1)
    outlet(sent)
    assert [e.asked for e in engines] == [[CHUNK, CHUNK - 1], [CHUNK]]
    for t in sent:
        ids, logp_at, logp = (t.extras[name] for name in TEACHER)
        assert ids[:, 0].tolist() == [5, 7] and logp.tolist() == [-5.0, -7.0]
        assert logp_at.shape == (2, 1) and t.timings[TEACHER_S] == 0.5


def test_a_record_that_the_engine_does_not_take_goes_on_without_scores(killed) -> None:
    sent = [*records(1, last=0), *records(1)]
    TeacherOutlet([Engine()], 5.0)(sent)
    assert [TEACHER[0] in t.extras for t in sent] == [False, True]


def test_a_log_prob_that_is_no_number_costs_its_record_alone(killed) -> None:
    def odd(given: Any) -> tuple[np.ndarray, ...]:
        ids, logp_at, logp = answer(given)
        return (
            ids,
            logp_at + (np.nan if ids[-1] == 8 else 0),
            logp + (np.inf if ids[-1] == 9 else 0),
        )

    sent = [*records(1, last=8), *records(1, last=9), *records(1)]
    TeacherOutlet([Engine(answer=odd)], 5.0)(sent)
    assert [TEACHER[0] in t.extras for t in sent] == [False, False, True]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda e: type(e).__name__)
def test_records_of_an_engine_that_is_late_dead_or_failing_go_on_without_scores(killed, fault):
    sent = records(2 * CHUNK)
    engines = [Engine(fault), Engine()]
    TeacherOutlet(engines, 5.0)(sent)
    assert [TEACHER[0] in t.extras for t in sent] == [False] * CHUNK + [True] * CHUNK
    late = isinstance(fault, GetTimeoutError)
    assert [e.given_up for e in engines] == [[2] if late else [], []]


# ----- in the engine's process -----


class Scoring:
    """The engine of a process."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.seen: list[TeacherState] = []

    def score(self, given: Any) -> Any:
        self.seen.append(self.actor.state())
        if not given:
            raise RuntimeError("vLLM failed")
        return [answer(one) for one in given]


def test_a_process_says_how_long_it_computes_and_what_ended_its_engine(monkeypatch) -> None:
    actor: Any = TeacherActor(SimpleNamespace())  # type: ignore[arg-type]
    engine = Scoring(actor)
    monkeypatch.setattr("rlcore.rollout.specs.start_teacher", lambda job: engine)
    assert not actor.state().ready
    given = [(t.token_ids, t.sampled) for t in records(2)]
    answers, seconds = actor.score(given, "a", 1)  # a restarted process starts it here
    assert len(answers) == 2 and seconds >= 0 and engine.seen[0].busy_s >= 0
    assert actor.state().ready and actor.state().busy_s == 0
    with pytest.raises(RuntimeError):
        actor.score([], "a", 2)
    assert actor.state().error == "RuntimeError: vLLM failed"


def test_a_call_that_was_given_up_is_not_computed(monkeypatch) -> None:
    actor: Any = TeacherActor(SimpleNamespace())  # type: ignore[arg-type]
    engine = Scoring(actor)
    monkeypatch.setattr("rlcore.rollout.specs.start_teacher", lambda job: engine)
    given = [(t.token_ids, t.sampled) for t in records(1)]
    actor.give_up("a", 2)
    found = [len(actor.score(given, *call)[0]) for call in (("a", 2), ("a", 3), ("b", 1))]
    assert found == [0, 1, 1] and len(engine.seen) == 2


# ----- from the driver -----


def watched(engine: Engine, **settings: Any) -> tuple[RayTeacher, list[str]]:
    notes: list[str] = []
    return RayTeacher([engine], [None], SupervisionSpec(**settings), notes.append), notes


def test_an_engine_that_failed_or_hangs_is_replaced_and_one_that_starts_is_not(killed) -> None:
    engine = Engine()
    engine.states = [
        TeacherState(7, ready=True, busy_s=19.0),
        TeacherState(7, ready=True, error="RuntimeError: vLLM failed"),
        TeacherState(8, busy_s=29.0),  # replaced, and loading its model
        TeacherState(8, ready=True, busy_s=21.0),
    ]
    teacher, notes = watched(engine, hang_timeout_s=20.0, start_timeout_s=30.0)
    ended = []
    for _ in range(4):
        teacher.watch()
        ended.append(len(killed))
    assert ended == [0, 1, 1, 2]
    assert "RuntimeError: vLLM failed" in notes[0] and "replaced" in notes[1]
    assert "cluster.hang_timeout_s=20 s" in notes[2]


def test_an_engine_that_does_not_answer_is_replaced_after_the_deadline(killed) -> None:
    engine = Engine()
    engine.states = [TeacherState(7, ready=True)]
    teacher, notes = watched(engine, hang_timeout_s=1e-9)
    for _ in range(3):
        teacher.watch()
    assert killed == [engine] and "cluster.hang_timeout_s=1e-09 s" in notes[0]
    teacher.watch()  # what takes its place is starting
    assert killed == [engine]
    patient, _ = watched(Engine())
    patient.watch()
    patient.watch()
    assert killed == [engine]


def test_an_engine_whose_process_does_not_start_is_replaced(killed) -> None:
    engine = Engine()
    teacher, notes = watched(engine, start_timeout_s=1e-9)
    teacher.watch()
    teacher.watch()
    assert set(killed) == {engine} and "cluster.start_timeout_s=1e-09 s" in notes[0]


def test_an_engine_that_ray_restarts_no_more_ends_the_run(killed) -> None:
    engine = Engine()
    engine.states = [ActorDiedError()]
    with pytest.raises(RoleLost, match=r"engine 0 died .* cluster\.max_restarts=10"):
        watched(engine)[0].watch()
