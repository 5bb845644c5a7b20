"""Real DeepSpeed ranks: gradients, metrics and state do not depend on stage, rank count or
micro-batches."""

import json
import math

import numpy as np
import pytest
import rank_jobs as jobs
from learner_helpers import ALPHABET, on_ranks, small_model
from tiny_mixture import tiny_mixture

from rlcore.learner.state_files import join_state, open_state
from rlcore.models.folder import read_weights

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _difference(a, b):
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def test_micro_batches_stages_and_ranks_give_one_gradient(model):
    one_rank = on_ranks(1, jobs.gradient_table, model)[0]
    first = 0, 10_000, "sorted"
    tables = one_rank, *on_ranks(2, jobs.gradient_table, model)
    for name in ("jackpot", "centre"):
        reference, norm, count = one_rank[name][first]
        assert count == 1 and norm > 0.05
        squares = sum(float((g.astype(np.float64) ** 2).sum()) for g in reference.values())
        assert abs(math.sqrt(squares) - norm) < 1e-5
        for table in tables:
            for setting, (gradients, its_norm, its_count) in table[name].items():
                assert setting[1] == 10_000 or its_count > 2, setting
                assert _difference(gradients, reference) < 1e-5, setting
                assert abs(its_norm - norm) < 1e-5, setting
    assert _difference(one_rank["centre"][first][0], one_rank["tis"][first][0]) > 1e-4


def test_a_shared_prefix_changes_no_gradient_at_any_stage(model):
    table, other = on_ranks(2, jobs.sharing_table, model)
    for name in {name for name, _ in table}:
        (gradients, row), (plain, plain_row) = table[name, "auto"], table[name, "off"]
        assert row == other[name, "auto"][1]
        assert row["train/positions"] < row["train/sequence_positions"]
        assert plain_row["train/positions"] >= plain_row["train/sequence_positions"], name
        apart, norm = (
            math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in tensors))
            for tensors in ([g - plain[n] for n, g in gradients.items()], plain.values())
        )
        assert norm > 0.01 and apart / norm < 1e-6, name
        rest = row.keys() - {"train/positions"}
        assert {n: row[n] for n in rest} == pytest.approx(
            {n: plain_row[n] for n in rest}, rel=1e-5, abs=1e-6
        )


def test_leaving_out_backward_passes_of_gradient_0_changes_no_weight(model):
    table, other = on_ranks(2, jobs.flat_and_whole, model)
    for stage in range(4):
        (weights, rows), (whole, its_rows) = table[stage, "flat"], table[stage, "whole"]
        assert _difference(weights, whole) == 0.0, stage
        left = [row.pop("train/flat_positions") for row in rows]
        assert left[0] == left[2] == 0.0 and left[1] == rows[1]["train/positions"] > 90
        assert [row.pop("train/flat_positions") for row in its_rows] == [0.0] * 3
        assert rows == its_rows and rows[1]["grad_norm"] == 0.0 < rows[2]["grad_norm"]
        assert rows[2]["grad_norm"] == other[stage, "whole"][1][2]["grad_norm"]


@pytest.mark.slow
def test_passes_that_are_kept_change_no_weight(model):
    table = on_ranks(2, jobs.kept_and_two, model)[0]  # this rank has the weights
    for beside in jobs.BESIDE_KEPT:
        (weights, row), (again, its_row) = table[beside, "kept"], table[beside, "apart"]
        assert _difference(weights, again) == 0.0, beside
        assert row == its_row and "mismatch/ais_alpha" in row


VARIANTS = {
    "accepted": {"keep_by_acceptance": 2, "corrections": {"ais": {}}, "zero_stage": 1},
    "none": {},
    "centre_tis": {"corrections": jobs.CENTRE, "zero_stage": 3},
    "vcpo": {"corrections": {"vcpo": {}, "tis": {}}, "zero_stage": 1},
    "jackpot_new": {"corrections": {"jackpot": {"target": "new"}}, "zero_stage": 2},
    "ais_kl": {
        "corrections": {"ais": {}},
        "kl_coef": 0.1,
        "zero_stage": 3,
        "aggregation": "seq-mean-token-mean",
    },
    "dvp_mis_veto": {
        "corrections": {"dvp": {"rho": 0.02}, "mis": {}, "veto": {}},
        "entropy_coef": 0.01,
    },
    "rapid_full_kl": {
        "corrections": {"rapid": {}},
        "kl_coef": 0.1,
        "kl_estimator": "full",
        "zero_stage": 3,
    },
    "gspo_overlong": {
        "loss": "gspo",
        "advantage": "reinforce_pp_baseline",
        "whitening": "tokens",
        "overlong_share": 0.4,
        "corrections": {"tis": {}},
        "aggregation": "seq-mean-token-sum-norm",
    },
}


@pytest.mark.slow
def test_one_rank_and_two_report_the_same_statistics(model):
    one = on_ranks(1, jobs.all_phase_rows, model, VARIANTS)[0]
    two, other = on_ranks(2, jobs.all_phase_rows, model, VARIANTS)
    assert two == other  # every rank reports the global numbers
    for name in VARIANTS:
        for row, again in zip(one[name], two[name]):
            assert (
                row.keys()
                == again.keys()
                >= {"loss/policy", "grad_norm", "entropy", "lr", "staleness/mean"}
            )
            for key in row.keys() - {"train/positions"}:  # padding is each rank's own
                assert math.isclose(row[key], again[key], rel_tol=2e-3, abs_tol=2e-5), (
                    name,
                    key,
                    row[key],
                    again[key],
                )
        rate = row["lr"] / one["none"][2]["lr"]
        assert rate == pytest.approx(row.get("correction/vcpo/step_scale", 1.0))
        assert one[name][0]["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
        assert one[name][0]["grad_norm"] > 0.01
    assert one["none"][2]["policy/ratio"] != 1.0  # p_ref stays that of the phase's beginning
    assert (
        one["ais_kl"][0]["loss/kl"] == pytest.approx(0.0, abs=1e-6)
        and one["ais_kl"][2]["loss/kl"] > 1e-7
    )
    assert one["rapid_full_kl"][2]["loss/kl"] > 1e-7
    assert one["none"][2]["staleness/mean"] == 2.0


def test_each_rank_writes_and_reads_the_part_of_a_state_that_it_holds(model, tmp_path):
    ranks = on_ranks(2, jobs.entries_read, model, str(tmp_path), (0, 1, 2, 3))
    for stage in (0, 1, 2, 3):
        (first, first_read, whole), (second, second_read, _) = (rank[stage] for rank in ranks)
        assert first + second == whole and max(first, second) < 0.55 * whole, stage
        if stage == 0:  # nothing is partitioned
            assert first_read == second_read == whole
        else:
            assert (first_read, second_read) == (first, second), stage


def test_matrices_decay_alike_at_every_stage_and_vectors_do_not(model):
    before = {n: t.numpy() for n, t in read_weights(model).items()}
    weights = on_ranks(2, jobs.decayed, model)[0]
    for stage, after in weights.items():
        for name, w in before.items():  # 100 times a rate of 1e-3, beside steps of that size
            apart = np.abs(after[name] - (0.9 if w.ndim > 1 else 1.0) * w).max()
            assert apart < 2e-3, (stage, name)


def test_the_most_accepted_responses_are_trained_on_as_if_they_were_all(model):
    chosen, by_hand, all_of_them = on_ranks(1, jobs.kept_by_acceptance, model)[0]
    for key in ("grad_norm", "loss/policy", "train/tokens", "correction/weight_mean"):
        assert chosen[key] == pytest.approx(by_hand[key], rel=1e-5), key
    assert chosen["train/sequences"] == 8 and all_of_them["train/sequences"] == 12
    assert chosen["train/acceptance_kept_mean"] > chosen["train/acceptance_mean"]
    assert abs(chosen["grad_norm"] - all_of_them["grad_norm"]) > 1e-4


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_loaded_learner_continues_bit_for_bit(model, tmp_path, world):
    stages = (0, 1, 2, 3)
    result = on_ranks(world, jobs.save_and_load, model, str(tmp_path), stages)[0]
    for stage in stages:
        straight, resumed, rows, resumed_rows = result[stage]
        assert straight and all(
            np.array_equal(straight[name], resumed[name]) for name in straight
        ), stage
        assert rows == resumed_rows
    # any stage and rank count opens what another one saved, to the bit
    saved = str(tmp_path / "stage3")
    here = on_ranks(3 - world, jobs.load_elsewhere, model, saved, stages)[0]
    weights, after, steps = here[0]
    assert steps == 2
    for stage in stages[1:]:
        assert _difference(here[stage][0], weights) == 0.0
        assert _difference(here[stage][1], after) < 2e-5
    assert _difference(after, weights) > 1e-4
    # whole tensors are an export of it
    join_state(tmp_path / "stage3", tmp_path / "whole")
    again = on_ranks(1, jobs.load_elsewhere, model, str(tmp_path / "whole"), (1,))[0]
    assert _difference(again[1][0], weights) == 0.0 and again[1][2] == 2
    files = sorted(p.name for p in (tmp_path / "stage3").iterdir())
    parts = [f"learner-{rank:05d}-00000.safetensors" for rank in range(world)]
    assert files == [*parts, "learner.json", "step_bound.json", "update.json"]
    assert json.loads((tmp_path / "stage3" / "learner.json").read_text())["optimizer_steps"] == 1


@pytest.mark.parametrize("world", [1, 2])
def test_a_learner_that_makes_room_between_steps_learns_the_same(model, tmp_path, world):
    stages = (0, 1, 2, 3)
    result = on_ranks(world, jobs.making_room, model, str(tmp_path), stages)[0]
    for stage in stages:
        stays, kept, yields, moved_to, moved, published = result[stage]
        assert _difference(stays, yields) == 0.0, stage
        assert published, stage
        # two moments of every weight, and at stages 1 to 3 the masters; of each rank its share
        entries = sum(w.size for w in stays.values())
        share = 8 * entries if stage == 0 else 12 * entries / world
        assert share <= moved < 1.1 * share + 4 * entries, stage
        with open_state(kept) as expected, open_state(moved_to) as found:
            assert expected.keys() == found.keys()
            for name, source in expected.items():
                assert source.whole().equal(found[name].whole()), (stage, name)


@pytest.mark.parametrize("router_replay", [False, True])
def test_experts_are_published_one_by_one_at_any_stage(tmp_path, router_replay):
    tiny_mixture(tmp_path, ALPHABET, seed=3)
    before = {n: t.numpy() for n, t in read_weights(tmp_path).items()}
    single = on_ranks(1, jobs.mixture_weights, str(tmp_path), router_replay)[0]
    reference = single[0][1]
    for shapes, weights, alone in (
        *single.values(),
        *on_ranks(2, jobs.mixture_weights, str(tmp_path), router_replay)[0].values(),
    ):
        assert shapes == {n: w.shape for n, w in weights.items()}
        assert weights.keys() == before.keys()
        assert _difference(weights, reference) < 1e-4
        assert len(alone) == 2 and all(np.array_equal(w, weights[n]) for n, w in alone.items())
    experts = [n for n in before if ".experts." in n]
    assert any(np.abs(reference[n] - before[n]).max() > 1e-3 for n in experts)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_divided_model_is_never_whole_in_a_rank_and_is_the_same(model, tmp_path, kind):
    if kind == "experts":
        tiny_mixture(tmp_path, ALPHABET, seed=3)
        model = str(tmp_path)
    ranks = on_ranks(2, jobs.divided, model)
    for one in ranks:
        assert not one["whole"][0]
        loaded = one["divided"][0]
        assert len(loaded) > 40  # the policy's parameters and the frozen one's
        for entries, held in loaded:
            assert held <= (entries + 1) // 2
    whole, divided = (ranks[0][how] for how in ("whole", "divided"))
    expected = read_weights(model)
    assert all(np.array_equal(divided[1][n], w.numpy()) for n, w in expected.items())
    assert divided[1].keys() == whole[1].keys() and not ranks[1]["divided"][1]
    assert len(whole[2]) == len(divided[2]) == (3 if kind == "dense" else 2)
    for found, alike in zip(divided[2], whole[2], strict=True):
        np.testing.assert_allclose(found, alike, atol=1e-4)
    assert kind == "experts" or not np.allclose(divided[2][0], divided[2][2])
