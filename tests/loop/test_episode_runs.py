"""Episodes of several turns and parts on the real controller and buffer, in simulated time: what a
run trains on after a resume, or after an actor's death in the middle of episodes."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from rlcore.advisor.simulate.actors import SimulatedActor
from rlcore.advisor.simulate.clients import SimulatedLearner
from rlcore.advisor.simulate.clock import run_simulated
from rlcore.advisor.simulate.loop import Scenario, Simulation
from rlcore.loop.specs import CheckpointSpec, ScheduleSpec
from rlcore.serialization import dump_trajectory, load_group
from rlcore.testing.records import make_score, make_trajectory

STEPS, GROUPS, SAMPLES, TURNS = 12, 4, 3, 3
SYNCHRONOUS = {"on_policy": {}, "large_batch": {"steps_per_publish": 4}}
ASYNCHRONOUS = {"eta_2": {"max_staleness": 2, "on_publish": "in_flight"}}


def turn_tokens(request):
    return TURNS + request.seed % 40


class EpisodeActor(SimulatedActor):
    """Plays episodes of three turns in one or two parts. What is said, answered and rewarded
    follows from the request's seed, as with an environment whose answers do. The parts and the
    score reach the buffer one after the other, as in a run."""

    def _finish(self, drawing):
        request = drawing.request
        if request.purpose != "train":
            super()._finish(drawing)
            return
        del self._running[request.request_id]
        self._work.set()
        self._undelivered.add(request.request_id)
        self._task(self._deliver_episode(request, drawing.versions))

    async def _deliver_episode(self, request, versions):
        draw = f"{self.name}:{self.pid}:{next(self._drawn)}"
        rng = random.Random(request.seed)
        turns = []
        for chunk in np.array_split(versions, TURNS):
            turns.append(([rng.randrange(9)], [rng.randrange(9) for _ in chunk], list(chunk)))
        first = TURNS - request.seed % 2  # turns of the first part
        parts = [turns[:first], turns[first:]] if first < TURNS else [turns]
        for i, part in enumerate(parts):
            record = make_trajectory(
                request.group_id,
                request.sample_index,
                turns=[(observed, drawn) for observed, drawn, _ in part],
                version=[v for *_, chunk in part for v in chunk],
                prompt_id=request.prompt_id,
                actor_id=self.name,
                draw_id=draw,
                part=i,
                parts=len(parts),
            )
            await self._buffer.add_records([dump_trajectory(record)])
            await asyncio.sleep(self.speed.answer_s)
        rewards = tuple(rng.choice((0.0, 0.25, 1.0)) for _ in range(TURNS))
        await self._buffer.add_scores([make_score(record, sum(rewards), turn_rewards=rewards)])
        self._undelivered.discard(request.request_id)


class ReadingLearner(SimulatedLearner):
    """Remembers everything of the episodes it was given, but for who played them and when."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.read = {}  # step -> episodes

    async def fetch(self, batches):
        await super().fetch(batches)
        for step, batch in batches.items():
            stored = await self._buffer.actor.stored(step, [group for group, _ in batch.groups])
            groups = [load_group(group) for group in stored]
            self.read[step] = [
                (
                    e.score.group_id,
                    e.score.sample_index,
                    e.score.reward,
                    e.score.turn_rewards,
                    [
                        [a.tolist() for a in (r.token_ids, r.sampled, r.token_version)]
                        for r in e.parts
                    ],
                )
                for group in groups
                for e in group.episodes
            ]


class EpisodeRun(Simulation):
    def make_learner(self):
        return ReadingLearner(self.buffer, step_s=self.scenario.learn_s)


@pytest.fixture
def play(monkeypatch, tmp_path):
    monkeypatch.setattr("rlcore.advisor.simulate.loop.SimulatedActor", EpisodeActor)

    def run(schedule, folder, events=None, *, resume=False):
        spec = ScheduleSpec(steps=STEPS, groups_per_step=GROUPS, **schedule)
        checkpoints = CheckpointSpec(every=1)
        scenario = Scenario(spec, checkpoint=checkpoints, samples=SAMPLES, tokens=turn_tokens)
        simulations = []

        async def main():
            simulations.append(EpisodeRun(scenario, tmp_path / folder))
            await simulations[0].run(events, resume=resume)

        try:
            run_simulated(main())
        except Crash:
            assert not resume
        return simulations[0]

    return run


class Crash(Exception):
    """Ends a run without a last checkpoint."""


def crash_at(step):
    async def fail(simulation):
        simulation.learner.fails_at[step] = Crash("the machine is gone")

    return fail


async def stop(simulation):
    await simulation.until(5)
    simulation.controller.request_stop()


async def kill_an_actor(simulation):
    """While it holds episodes, of which some have more turns to come."""
    await simulation.until(3)
    actor = simulation.started[0]
    while not any(d.versions for d in actor._running.values()):
        await asyncio.sleep(0.01)
    actor.die()


def parts(simulation):
    return {len(e[-1]) for step in simulation.learner.read.values() for e in step}


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("end", [stop, *(crash_at(step) for step in (5, 7, 8))])
def test_a_resumed_synchronous_run_trains_on_the_same_episodes(play, name, end):
    whole = play(SYNCHRONOUS[name], "whole")
    assert sorted(whole.learner.read) == list(range(STEPS)) and parts(whole) == {1, 2}
    first = play(SYNCHRONOUS[name], "parts", end)
    assert 0 < first.progress.step < STEPS
    second = play(SYNCHRONOUS[name], "parts", resume=True)
    assert second.progress.step == STEPS and len(second.learner.read) < STEPS
    # what both have trained on, before the last checkpoint's end was lost, is the same, too
    for attempt in (first, second):
        for step, episodes in attempt.learner.read.items():
            assert episodes == whole.learner.read[step], step
    assert first.learner.read.keys() | second.learner.read.keys() == whole.learner.read.keys()
    assert second.learner.trained == whole.learner.trained


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_an_actor_that_dies_in_the_middle_of_episodes_changes_nothing(play, name):
    whole = play(SYNCHRONOUS[name], "whole")
    killed = play(SYNCHRONOUS[name], "killed", kill_an_actor)
    assert len(killed.started) > len(whole.started)
    assert killed.learner.read == whole.learner.read


@pytest.mark.parametrize("end", [stop, crash_at(7), kill_an_actor])
def test_an_asynchronous_run_loses_no_episode_and_trains_on_none_twice(play, end):
    first = play(ASYNCHRONOUS["eta_2"], "parts", end)
    if end is not kill_an_actor:
        assert first.progress.step < STEPS
        last = play(ASYNCHRONOUS["eta_2"], "parts", resume=True)
    else:
        last = first
    keys = [key for step in last.learner.trained.values() for key in step]
    assert len(keys) == len(set(keys)) == STEPS * GROUPS * SAMPLES
    row = last.reporter.rows[-1]
    assert row["ledger/consumed"] == STEPS * GROUPS
    departed = ("consumed", "evicted", "failed", "live")
    assert row["ledger/admitted"] == sum(row[f"ledger/{how}"] for how in departed)
    assert parts(last) == {1, 2}
