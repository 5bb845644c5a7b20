"""Who samples a group: shares of new groups over steps, and groups of several kinds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.advisor.simulate.loop import Scenario, simulate
from rlcore.loop.shares import KindRate, KindShares, best_mix, most_shares, worth, worth_of
from rlcore.loop.specs import ScheduleSpec, ShareSpec
from rlcore.metrics.names import declared
from rlcore.types import actor_label

TWO = {"bf16": 2, "draft": 2}


def share(shape="linear", start=1.0, end=0.25, steps=8):
    return ShareSpec(shape=shape, start=start, end=end, steps=steps)


schedules = st.builds(
    share,
    st.sampled_from(["linear", "cosine"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 40),
)


@given(schedules, st.lists(st.integers(0, 50), min_size=1, max_size=120), st.integers(0, 119))
@settings(max_examples=100, deadline=None)
def test_the_groups_of_a_kind_follow_its_share_exactly_also_across_a_resume(spec, steps, at):
    """Their number is within one of the sum of the shares, whenever it is counted."""
    kinds = KindShares(TWO, {"draft": spec}, mixed=False, state={})
    owed, drawn = 0.0, 0
    for group, step in enumerate(sorted(steps)):
        if group == at:
            kinds = KindShares(TWO, {"draft": spec}, mixed=False, state=kinds.state())
        kinds.admit(group, 4, step)
        owed += spec.at(step)
        drawn += kinds.of(group, 0) == ("draft",)
        assert abs(drawn - owed) < 1 + 1e-9
        assert len({kinds.of(group, i) for i in range(4)}) == 1
    assert kinds.metrics()["engine/draft/admitted"] == drawn


def test_shapes_reach_their_end_and_stay():
    linear, cosine = share("linear"), share("cosine")
    assert [linear.at(s) for s in (0, 4, 8, 99)] == [1.0, 0.625, 0.25, 0.25]
    assert [cosine.at(s) for s in (0, 8, 99)] == pytest.approx([1.0, 0.25, 0.25])
    assert cosine.at(2) > linear.at(2) and cosine.at(6) < linear.at(6)
    assert ShareSpec.model_validate(0.3).at(7) == 0.3
    assert most_shares([linear, ShareSpec(start=0.5)]) == (1.5, 0.75)


def test_a_mixed_group_has_samples_of_all_kinds_by_their_engines():
    kinds = KindShares({"bf16": 1, "fp8": 3}, {}, mixed=True, state={})
    drawn = Counter()
    for group in range(10):
        kinds.admit(group, 8, 0)
        drawn.update(kinds.of(group, i) for i in range(8))
    assert drawn == {("bf16",): 20, ("fp8",): 60}


def test_without_shares_anybody_draws():
    kinds = KindShares(TWO, {}, mixed=False, state={})
    kinds.admit(3, 4, 0)
    assert kinds.of(3, 0) == () and kinds.metrics() == {} and kinds.state()["groups"] == {}


def run(folder, events=None, **settings):
    """(simulation, labels of the actors that drew each group's samples)."""
    drawn: dict[int, dict[int, str]] = {}

    def reward(answer):
        if answer.purpose == "train":
            kinds = drawn.setdefault(answer.group_id, {})
            kinds[answer.sample_index] = actor_label(answer.draw_id)
        return answer.sample_index % 2

    schedule = ScheduleSpec(steps=12, groups_per_step=8, max_staleness=1)
    scenario = Scenario(schedule, samples=4, kinds=TWO, reward=reward, **settings)
    return simulate(scenario, folder, events), drawn


def test_a_run_gives_groups_to_kinds_by_their_shares(tmp_path):
    done, groups = run(tmp_path, shares={"draft": share()})
    last = done.reporter.rows[-1]
    assert last["engine/draft/share"] == 0.25
    assert all(len(set(kinds.values())) == 1 for kinds in groups.values())
    of_draft = sum("draft" in kinds.values() for kinds in groups.values())
    assert 0 <= last["engine/draft/admitted"] - of_draft <= 16  # what is in flight at the end
    first = [set(groups[g].values()) for g in range(8)]
    assert first == [{"draft"}] * 8  # the share was 1


def test_a_run_with_mixed_groups_has_both_kinds_in_each(tmp_path):
    _, groups = run(tmp_path, mixed_groups=True)
    whole = [kinds for kinds in groups.values() if len(kinds) == 4]
    assert whole and all(Counter(k.values()) == {"bf16": 2, "draft": 2} for k in whole)


def test_a_kind_whose_actors_are_gone_leaves_its_groups_to_the_others(tmp_path):
    async def remove(simulation):
        await simulation.until(3)
        simulation.wanted = {"draft": 0}
        while True:
            await asyncio.sleep(1)

    done, _ = run(tmp_path, remove, shares={"draft": ShareSpec(start=0.5)})
    assert done.reporter.rows[-1]["step"] == 12


def test_a_kind_is_worth_its_effective_tokens_by_time_and_by_money():
    row = {"mismatch/tokens@bf16": 100, "mismatch/ess@bf16": 1.0, "correction/kept_share@bf16": 1.0}
    row |= {"mismatch/tokens@fp8": 200, "mismatch/ess@fp8": 0.8, "correction/kept_share@fp8": 0.5}
    found = worth(row, {"bf16": 4.0, "fp8": 2.0, "idle": 3.0}, {"fp8": 0.5})
    assert found == {
        "worth/tokens_per_actor_s@bf16": 25.0,
        "worth/tokens_per_actor_s@fp8": 40.0,
        "worth/tokens_per_price@fp8": 160.0,
    }
    assert all(declared(name) is not None for name in found)


RATES = st.builds(
    KindRate, st.floats(10, 1000), st.floats(0.05, 1.0), st.floats(0, 0.5), st.floats(5, 500)
)


@given(st.lists(RATES, min_size=1, max_size=3), st.integers(0, 9999))
def test_no_other_mix_within_the_tolerated_tail_gives_more(rates, seed):
    kinds = {f"k{i}": rate for i, rate in enumerate(rates)}
    best, most = best_mix(kinds, 0.05), 0.05
    rng = random.Random(seed)
    for _ in range(60):
        draws = [rng.expovariate(1.0) ** 3 for _ in kinds]
        tokens = {label: d / sum(draws) for label, d in zip(kinds, draws)}
        if sum(x * kinds[n].below for n, x in tokens.items()) > most:
            continue
        seconds = sum(x / kinds[n].tokens for n, x in tokens.items())
        given = sum(x * kinds[n].effective for n, x in tokens.items()) / seconds
        assert best is not None and given <= best.effective * (1 + 1e-9)
    if best is None:
        assert all(rate.below > most for rate in rates)
    else:
        tokens = {n: x * kinds[n].length for n, x in best.groups.items()}
        below = sum(x * kinds[n].below for n, x in tokens.items()) / sum(tokens.values())
        assert below <= most + 1e-9 and sum(best.groups.values()) == pytest.approx(1)


def test_a_noisy_kind_gets_what_the_tail_allows():
    kinds = {"bf16": KindRate(100, 1.0, 0.01, 20), "int3": KindRate(300, 0.8, 0.21, 20)}
    best = best_mix(kinds, 0.05)
    assert best.groups == pytest.approx({"bf16": 0.8, "int3": 0.2})
    assert best.effective == pytest.approx((0.8 + 0.16) / (0.8 / 100 + 0.2 / 300))


def test_the_worth_of_shares_of_groups_counts_the_length_of_answers():
    kinds = {"bf16": KindRate(100, 1.0, 0.01, 10), "int3": KindRate(300, 0.8, 0.21, 30)}
    # of four tokens the long answers have three
    assert worth_of(kinds, {"bf16": 0.5, "int3": 0.5}) == pytest.approx(3.4 / (1 / 100 + 3 / 300))
    assert worth_of(kinds, {"int3": 1.0}) == pytest.approx(240.0)
    best = best_mix(kinds, 0.05)
    assert worth_of(kinds, best.groups) == pytest.approx(best.effective)
