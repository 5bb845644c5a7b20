import itertools
import math
import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from rlcore.advisor.simulate.actors import Speed
from rlcore.advisor.simulate.clock import run_simulated
from rlcore.advisor.simulate.loop import Scenario, Simulation, simulate
from rlcore.errors import DeadlineExceeded
from rlcore.loop.evaluation import (
    Judged,
    effective_size,
    evaluate_alone,
    majority,
    mean_and_error,
    pass_at,
    summarise,
)
from rlcore.loop.members import ActorPool
from rlcore.loop.role_protocols import Publication
from rlcore.loop.specs import EvaluatedTaskSpec, EvaluationSpec, ScheduleSpec, SupervisionSpec
from rlcore.metrics.intervals import wilson
from rlcore.types import POLICY, WeightManifest


def _verdict(prompt, correct, status="ok", sample=0, answer=""):
    return {
        "prompt_id": prompt,
        "sample": sample,
        "answer": answer,
        "status": status,
        "reward": None if status != "ok" else correct,
        "correct": None if status != "ok" else correct,
        "length": 4,
    }


def test_graders_that_failed_are_left_out_and_their_share_is_reported():
    verdicts = [
        _verdict("a", 1.0),
        _verdict("a", 0.0, sample=1),
        _verdict("b", 0.0),
        _verdict("b", None, "error", sample=1),
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
        _verdict("c", i / 5, sample=i) for i in range(5)
    ]
    shuffled = [random.Random(seed).sample(verdicts, len(verdicts)) for seed in range(20)]
    # the rewards are such that it would show
    assert len({sum(v["reward"] for v in order) for order in shuffled}) > 1
    first, *others = [summarise("t", "sampled", order, 1) for order in shuffled]
    assert all(other == first for other in others)


def test_pass_at_k_is_its_enumerated_probability():
    for n, correct, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if correct <= n and k <= n:
            drawn = list(itertools.combinations([i < correct for i in range(n)], k))
            assert pass_at(k, n, correct) == pytest.approx(sum(map(any, drawn)) / len(drawn))
    assert pass_at(8, 2, 1) == 1.0 and pass_at(8, 2, 0) == 0.0


@pytest.mark.parametrize(
    ("votes", "share"),
    [
        ("++a", 1),
        ("+aab", 0),
        ("+a", 1 / 2),
        ("+ab", 1 / 3),
        ("  +", 1),
        ("   ", 0),
        ("aa++", 1 / 2),
    ],
)
def test_a_majority_is_right_if_its_answer_is(votes, share):
    # right answers of two spellings are one answer, and blanks do not vote
    answers = [Judged(i, v == "+", f"7{i}" if v == "+" else v.strip()) for i, v in enumerate(votes)]
    assert majority(answers) == pytest.approx(share)


def test_several_k_are_reported_of_one_evaluation():
    rights = {"a": "1000", "b": "0110", "c": "0000"}
    verdicts = [
        _verdict(p, float(c), sample=i, answer=c)
        for p, cs in rights.items()
        for i, c in enumerate(cs)
    ]
    got = summarise("t", "sampled", verdicts, 4, (1, 2, 4))
    assert {k: got[f"eval/t/mean@{k}"] for k in (1, 2, 4)} == {1: 1 / 3, 2: 1 / 3, 4: 1 / 4}
    assert got["eval/t/pass@1"] == pytest.approx(1 / 4)
    assert got["eval/t/pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 3)
    assert got["eval/t/majority@4"] == pytest.approx((0 + 1 / 2 + 0) / 3)
    assert "eval/t/majority@1" not in got
    silent = [v | {"answer": ""} for v in verdicts if not v["correct"]]
    assert not any("majority" in name for name in summarise("t", "sampled", silent, 4))


def test_errors_are_those_of_prompts_not_of_answers():
    """The spread of means over many evaluations whose prompts differ in difficulty."""
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        chances = rng.beta(0.3, 0.3, 40)
        verdicts = [
            _verdict(str(p), float(rng.random() < c), sample=i)
            for p, c in enumerate(chances)
            for i in range(8)
        ]
        got = summarise("t", "sampled", verdicts, 8)
        means.append(got["eval/t/mean@8"])
        errors.append(got["eval/t/stderr_mean@8"])
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.15)
    naive = math.sqrt(0.25 / 320)
    assert np.mean(errors) > 2 * naive
    assert "eval/t/stderr_greedy" not in summarise("t", "greedy", [_verdict("a", 1.0)], 1)


@pytest.mark.parametrize(
    ("prompts", "samples", "a", "b"),
    [(20, 4, 20, 0.4), (20, 1, 20, 0.4), (20, 16, 20, 0.4), (20, 4, 0.5, 0.5), (30, 1, 0.3, 12)],
)
def test_intervals_cover_the_share_as_often_as_they_say(prompts, samples, a, b):
    """Over many evaluations of prompts of unequal difficulty; a mean of 0.98 among them, where
    1.96 standard errors cover 0.33 to 0.83."""
    rng = np.random.default_rng(3)
    covered, runs = 0, 1000
    for _ in range(runs):
        right = rng.random((prompts, samples)) < rng.beta(a, b, prompts)[:, None]
        values = right.astype(float).tolist()
        found = wilson(mean_and_error(values)[0], effective_size(values))
        covered += found.low <= a / (a + b) <= found.high
    assert 0.92 <= covered / runs <= 0.985


def test_the_effective_size_is_the_prompts_where_all_are_right_and_at_most_the_answers():
    assert effective_size([[1.0] * 4] * 20) == effective_size([[0.0] * 4] * 20) == 20
    assert effective_size([[1.0] * 4]) == effective_size([[0.0, 1.0]]) == 1
    assert effective_size([[1.0, 0.0]] * 10) == 20  # no prompt differs from another
    assert effective_size([[1.0] * 4, [0.0] * 4] * 10) == pytest.approx(20, rel=0.1)
    got = summarise("t", "greedy", [_verdict(str(p), 1.0) for p in range(20)], 1)
    assert got["eval/t/effective_greedy"] == 20


def test_a_task_is_evaluated_by_its_own_settings(tmp_path):
    """AMC at 16 samples, T=0.6, top-p 0.95 beside a greedy task, with the rest as in training."""
    own = {"name": "digits", "samples": 16, "temperature": 0.6, "top_p": 0.95, "greedy": False}
    spec = EvaluationSpec(prompts=8, tasks={"amc": EvaluatedTaskSpec(**own)})
    assert (spec.of("amc").samples, spec.of("amc").prompts) == (16, 8)
    assert spec.of("digits") == spec
    asked = {}
    for label in ("amc", "digits"):
        scenario = Scenario(
            ScheduleSpec(steps=1, groups_per_step=2),
            evaluation=spec.of(label).model_copy(update={"prompts": 2}),
            tokens=lambda request, label=label: (
                asked.setdefault((label, request.purpose), request) and 4
            ),
        )
        simulate(scenario, tmp_path / label)
    amc = asked["amc", "eval/0/digits/sampled"].sampling
    assert (amc.temperature, amc.top_p, amc.top_k) == (0.6, 0.95, 0)
    assert ("amc", "eval/0/digits/greedy") not in asked
    greedy = asked["digits", "eval/0/digits/greedy"].sampling
    assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)


class TwoKinds(Simulation):
    """One actor of each kind; `asked`: the actors that were given each purpose."""

    def pools(self):
        self.asked = defaultdict(set)
        return [ActorPool(label, self._spawn, 1) for label in ("bf16", "sparse")]

    def _spawn(self, name):
        def tokens(request):
            self.asked[request.purpose].add(name)
            return 10

        self.scenario = replace(self.scenario, tokens=tokens)
        return super()._spawn(name)


def test_actors_are_evaluated_each_by_itself(tmp_path):
    spec = EvaluationSpec(every=2, at_start=False, prompts=6, actors=("sparse", "bf16"))
    schedule = ScheduleSpec(steps=2, groups_per_step=2)

    async def main():
        simulation = TwoKinds(Scenario(schedule, evaluation=spec), tmp_path)
        await simulation.run()
        return simulation

    simulation = run_simulated(main())
    names = ("digits", "digits@sparse", "digits@bf16")
    assert {f"eval/{name}/greedy" for name in names} <= set(simulation.reporter.rows[-1])
    asked = [simulation.asked[f"eval/2/{name}/greedy"] for name in names]
    assert asked == [{"bf16-0", "sparse-0"}, {"sparse-0"}, {"bf16-0"}]


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
