import random

import pytest

from rlcore.errors import DeadlineExceeded
from rlcore.loop.evaluation import evaluate_alone, summarise
from rlcore.loop.role_protocols import Publication
from rlcore.loop.specs import EvaluationSpec, ScheduleSpec, SupervisionSpec
from rlcore.simulate.actors import Speed
from rlcore.simulate.clock import run_simulated
from rlcore.simulate.loop import Scenario, Simulation, simulate
from rlcore.types import POLICY, WeightManifest


def _verdict(prompt, correct, status="ok"):
    return {
        "prompt_id": prompt,
        "status": status,
        "reward": None if status != "ok" else correct,
        "correct": None if status != "ok" else correct,
        "length": 4,
    }


def test_graders_that_failed_are_left_out_and_their_share_is_reported():
    verdicts = [
        _verdict("a", 1.0),
        _verdict("a", 0.0),
        _verdict("b", 0.0),
        _verdict("b", None, "error"),
    ]
    got = summarise("t", "sampled", verdicts, 2)
    assert got["eval/t/mean@2"] == 1 / 3
    assert got["eval/t/pass@2"] == 0.5
    assert got["eval/t/sampled_failed_scores"] == 1
    assert got["eval/t/sampled_failed_share"] == 0.25


def test_what_was_not_judged_in_time_is_wrong():
    late = [_verdict(prompt, None, "timeout") for prompt in "bcd"]
    got = summarise("t", "greedy", [_verdict("a", 1.0), *late], 1)
    assert got["eval/t/greedy"] == 0.25
    assert got["eval/t/greedy_failed_scores"] == 3
    assert got["eval/t/greedy_failed_share"] == 0
    assert got["eval/t/greedy_reward"] == 1.0
    assert summarise("t", "greedy", late, 1)["eval/t/greedy"] == 0


def test_nothing_judged_gives_no_accuracy():
    got = summarise("t", "greedy", [_verdict("a", None, "error")], 1)
    assert got == {"eval/t/greedy_failed_scores": 1.0, "eval/t/greedy_failed_share": 1.0}


def test_a_partial_reward_is_not_correct():
    verdicts = [_verdict("a", 0.9), _verdict("b", 1.0)]
    assert summarise("t", "greedy", verdicts, 1)["eval/t/greedy"] == 0.5


def test_the_order_in_which_verdicts_arrive_changes_nothing():
    verdicts = [_verdict(str(i), i / 7) for i in range(8)] + [
        _verdict("c", i / 5) for i in range(5)
    ]
    shuffled = [random.Random(seed).sample(verdicts, len(verdicts)) for seed in range(20)]
    # the rewards are such that it would show
    assert len({sum(v["reward"] for v in order) for order in shuffled}) > 1
    first, *others = [summarise("t", "sampled", order, 1) for order in shuffled]
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("settings", "due"), [({"every": 5}, [0, 5, 9]), ({"every": 0, "at_start": False}, [9])]
)
def test_when_an_evaluation_is_due(settings, due, tmp_path):
    scenario = Scenario(
        ScheduleSpec(steps=9, groups_per_step=2),
        evaluation=EvaluationSpec(prompts=4, samples=2, **settings),
    )
    simulation = simulate(scenario, tmp_path)
    assert sorted({version for version, _ in simulation.reporter.evaluations}) == due
    shown = [v for found in simulation.reporter.evaluations.values() for v in found]
    assert shown and all(v["response"] and "prompt" in v for v in shown)
    last = simulation.reporter.rows[-1]
    assert {"eval/digits/mean@2", "eval/digits/pass@2", "eval/digits/greedy"} <= set(last)


def test_an_evaluation_names_the_versions_that_really_sampled_it(tmp_path):
    """Requests that queued while weights were published are of later versions than the one it was
    asked for."""
    scenario = Scenario(
        ScheduleSpec(steps=12, groups_per_step=4, max_staleness=1, on_publish="in_flight"),
        evaluation=EvaluationSpec(every=4, at_start=False, prompts=4),
        tokens=lambda request: 40 if request.purpose != "train" else 10,
    )
    rows = simulate(scenario, tmp_path).reporter.rows
    spans = [r["eval/version_span"] for r in rows if "eval/version_span" in r]
    assert len(spans) == 3 and max(spans) >= 1
    shown = [r for r in rows if "eval/policy_version" in r]
    assert all(r["eval/policy_version"] >= 4 for r in shown)


def test_an_evaluation_that_takes_too_long_ends_the_run_with_its_key(tmp_path):
    scenario = Scenario(
        ScheduleSpec(steps=4, groups_per_step=2),
        evaluation=EvaluationSpec(every=2, prompts=4, timeout_s=30),
        speed=Speed(step_s=10),
    )
    with pytest.raises(DeadlineExceeded, match=r"evaluation\.timeout_s\): 0 of 4 samples arrived"):
        simulate(scenario, tmp_path)


def test_alone_it_survives_the_death_of_an_actor(tmp_path):
    async def main():
        scenario = Scenario(
            ScheduleSpec(), supervision=SupervisionSpec(heartbeat_s=1), speed=Speed(step_s=1)
        )
        simulation = Simulation(scenario, tmp_path)
        manifest = WeightManifest(3, (), (), "float32", {}, True)
        await simulation.fleet.publish(Publication(3, {POLICY: (manifest, None)}))
        simulation.actors["bf16-0"].die()
        found = await evaluate_alone(simulation.parts.evaluator, simulation.fleet, 3, 1.0)
        await simulation.fleet.supervisor.close()
        return found

    found = run_simulated(main())
    assert found["eval/policy_version"] == 3 and "eval/digits/greedy" in found
