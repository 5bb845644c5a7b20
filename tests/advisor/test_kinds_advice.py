"""Advice on kinds of actors: the ranking, the mix, and the start of a set-point."""

import pytest

from rlcore.advisor.kinds_advice import (
    calibrated,
    calibration_lines,
    kind_rates,
    kinds_lines,
    least_pages,
    mix,
    ranked,
)
from rlcore.config.compose import load
from rlcore.config.schema import ActorSection
from rlcore.errors import UserError

ROW = {
    "mismatch/below_086_share": 0.1,
    **{
        f"{n}@{k}": v
        for k, values in {
            "bf16": (0.99, 100.0, 0.99, 1.0, 0.01, 99.0, 20.0),
            "int3": (0.7, 100.0, 0.8, 1.0, 0.21, 240.0, 20.0),
        }.items()
        for n, v in zip(
            (
                "mismatch/agreement_p5",
                "mismatch/tokens",
                "mismatch/ess",
                "correction/kept_share",
                "mismatch/below_086_share",
                "worth/tokens_per_actor_s",
                "response_length/mean",
            ),
            values,
        )
    },
}


FLEET = {label: ActorSection() for label in ("bf16", "int3")}


def test_a_fast_kind_with_a_long_tail_is_ranked_last_and_mixed_in():
    assert [k["kind"] for k in ranked(ROW)] == ["bf16", "int3"]
    found = mix(kind_rates([ROW], FLEET))
    assert set(found) == {"actor_s"}
    assert found["actor_s"]["shares"] == pytest.approx({"bf16": 0.8, "int3": 0.2})
    said = "\n".join(kinds_lines(ranked(ROW), found))
    assert "actor.bf16.share=0.80 actor.int3.share=0.20" in said and "fixed_share" not in said
    (_, said) = list(kinds_lines(ranked(ROW | {"mismatch/fixed_share@int3": 0.25}), found))[1:3]
    assert said.endswith("agreement_p5 0.7, fixed_share 0.25")
    bad = ROW | {"mismatch/below_086_share@bf16": 0.2}
    assert mix(kind_rates([bad], FLEET)) == {} and "no mix" in "\n".join(
        kinds_lines(ranked(bad), {})
    )


def test_the_rates_of_a_kind_are_its_sums_over_steps():
    slow = {name: v / 3 if name.startswith("worth/") else v for name, v in ROW.items()}
    found = kind_rates([ROW, slow, {"step": 3}], FLEET)["actor_s"]["bf16"]
    assert found.tokens == pytest.approx(100.0 / 2)  # 200 tokens in 1 s and 3 s
    assert (found.effective, found.below, found.length) == pytest.approx((0.99, 0.01, 20.0))


def test_a_run_of_one_kind_gives_the_rates_of_that_kind():
    pooled = {n.removesuffix("@int3"): v for n, v in ROW.items() if n.endswith("@int3")}
    timed = pooled | {"time/rollout_s": 0.5, "time/step_s": 36.0}
    del timed["worth/tokens_per_actor_s"]
    found = kind_rates([timed], {"int3": ActorSection(count=2, price=10.0)})
    assert found["actor_s"]["int3"] == pytest.approx((200.0, 0.8, 0.21, 20.0))
    assert found["price"]["int3"].tokens == pytest.approx(100.0 / 0.2)  # two engines, 0.01 hours
    assert kind_rates([timed | {"mismatch/tokens": 0.0}], FLEET) == {}


def test_kinds_with_a_price_are_mixed_for_money_too():
    priced = {f"worth/tokens_per_price@{k}": v for k, v in (("bf16", 5.0), ("int3", 50.0))}
    found = mix(kind_rates([ROW | priced], FLEET))
    assert set(found) == {"actor_s", "price"}
    assert found["price"]["effective"] > 5.0


def test_the_least_pages_that_reach_a_value_are_interpolated():
    points = [(4, 0.6), (8, 0.8), (16, 0.9)]
    assert least_pages(points, 0.8, least=2, most=64) == 8
    assert least_pages(points, 0.85, least=2, most=64) == 12  # half of a doubling
    assert least_pages(points, 0.5, least=2, most=64) == 4
    assert least_pages(points, 0.95, least=2, most=64) == 32  # all pages agree
    assert least_pages([(4, 0.9), (8, 0.7)], 0.86, least=6, most=64) == 6  # noise
    assert least_pages([], 0.86, least=2, most=64) == 2


PAGES = "actor.sparse.sparse={blocks:null,blocks_by_length:[4,4,4],length_step:128}"
SPARSE = ["experiment=sparse_training_free", "run_dir=runs/x", "model.max_len=512", PAGES]


def test_a_calibration_measures_pages_and_names_the_start():
    """Agreement rises with the share of a stretch's pages."""
    tried = []

    def step(config):
        blocks = config.actor["sparse"].sparse.blocks_by_length
        assert config.actor["sparse"].target is None
        tried.append(blocks)
        ends = (8, 16, 32)
        return {
            f"mismatch/stretch_{n}/agreement_p5": 0.5 + 0.5 * b / end
            for n, (b, end) in enumerate(zip(blocks, ends), start=1)
            if n < 3  # no answer came so far
        }

    config = load([*SPARSE, "actor.sparse.target={moves:pages}"])
    found = calibrated(config, step)["sparse"]
    assert tried == [(2, 2, 2), (4, 4, 4), (8, 8, 8), (8, 16, 16)]
    first, second, third = found["blocks_by_length"]
    assert 0.5 + 0.5 * first / 8 >= 0.86 > 0.5 + 0.5 * (first - 1) / 8
    assert second in (11, 12) and third == second
    said = list(calibration_lines({"sparse": found}))
    assert said[-1].endswith(f"blocks_by_length=[{first},{second},{third}]")


def test_a_run_without_a_set_point_of_pages_has_nothing_to_calibrate():
    with pytest.raises(UserError, match=r"moves=pages"):
        calibrated(load(SPARSE), lambda config: {})
