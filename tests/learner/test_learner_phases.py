"""Phases of several epochs on real ranks: one p_ref, steps away from it, exact continuation."""

import math

import distill_jobs
import phase_jobs as jobs
import pytest
from learner_helpers import on_ranks, small_model

pytestmark = pytest.mark.ranks

FAR = {"lr": 1e-2}  # steps long enough for ratios to leave a clip
JACKPOT = {"jackpot": {"target": "new", "tail": "residual"}}
VARIANTS = {
    "ppo": FAR | {"eps_low": 0.02, "eps_high": 0.02, "corrections": {"tis": {}}},
    "ppo_kl": FAR | {"kl_coef": 0.1, "micro_batch_tokens": 40},
    "reward_kl": FAR
    | {"advantage": "reinforce_pp", "whitening": "tokens", "micro_batch_tokens": 40}
    | {"kl_coef": 0.1, "kl_in": "reward", "kl_target": 1e-3, "kl_horizon": 40},
    "gspo": FAR | {"loss": "gspo", "eps_low": 3e-4, "eps_high": 4e-4},
    "cispo": FAR | {"loss": "cispo", "eps_low": 0.02, "eps_high": 0.02, "corrections": {"ais": {}}},
    "by_size": FAR | {"corrections": {"ais": {"alpha": "n_star"}}},
    "reinforce": FAR | {"loss": "reinforce", "corrections": {"tis": {}}},
    "rapid": FAR
    | {"loss": "reinforce", "advantage": "group_mean", "corrections": {"rapid": {}}}
    | {"micro_batch_tokens": 40},
    "jackpot": FAR | {"corrections": JACKPOT, "micro_batch_tokens": 40},
    "pruned": FAR | {"corrections": {"dvp": {}, "mis": {}, "veto": {}}},
}
CLIPS = ("ppo", "gspo", "cispo")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("world", "shape", "names"),
    [(1, (2, 2), list(VARIANTS)), (1, (1, 3), ["ppo", "rapid"]), (2, (2, 2), ["ppo", "jackpot"])],
)
def test_a_phase_of_several_epochs(model, tmp_path, world, shape, names):
    chosen = {name: VARIANTS[name] for name in names}
    for out in on_ranks(world, jobs.phases, model, shape, chosen, str(tmp_path)):
        for name, found in out.items():
            rows = found["rows"]
            assert found["p_ref_stays"], name
            assert f"step {math.prod(shape)} is beyond the phase" in found["beyond"]
            # from the middle of the phase to the bit, whichever batches were left of it
            assert found["resumed_rows"] == rows[1:], name
            assert jobs.same(found["weights"], found["resumed_weights"]), name
            assert [row["staleness/max"] for row in rows] == list(range(len(rows)))
            if name == "by_size":  # the policy that sampled is p_ref in all steps of the phase
                shares = [row["correction/ais/alpha"] for row in rows]
                assert min(shares) > 0.0 and max(shares) < 0.9 and shares[3] == shares[1]
            if VARIANTS[name].get("loss") != "reinforce":
                assert rows[0]["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
                assert all(abs(row["policy/ratio"] - 1.0) > 1e-4 for row in rows[1:]), name
            if name in CLIPS:
                clipped = [
                    row["policy/clip_low_share"] + row["policy/clip_high_share"] for row in rows
                ]
                assert clipped[0] == 0.0 and min(clipped[1:]) > 0.05, name


def test_a_loss_that_is_anchored_at_the_new_policy_is_weighed_up_to_it_in_later_epochs(
    model, tmp_path
):
    chosen = {name: VARIANTS[name] for name in ("reinforce", "rapid", "jackpot")}
    (out,) = on_ranks(1, jobs.phases, model, (1, 2), chosen, str(tmp_path))
    for name, found in out.items():
        first, second = found["rows"]
        # the same samples, p_inf and p_ref: only p_new differs, and the weights follow it
        assert abs(first["correction/weight_mean"] - second["correction/weight_mean"]) > 1e-3, name
        assert first["mismatch/kl_k1"] == second["mismatch/kl_k1"]


def test_a_sparse_copy_is_distilled_towards_the_policy_of_the_moment_in_every_epoch(model):
    """Over the whole vocabulary, topk is the full KL: also where p_ref is older than theta."""
    options = FAR | {"sparse": distill_jobs.RULE, "micro_batch_tokens": 60}
    variants = {
        kl: options | {"distill": distill_jobs.distill(kl, lr=1e-3)}
        for kl in ("full", "topk", "k1", "k3")
    }
    (out,) = on_ranks(1, jobs.distillation, model, variants)
    full, topk = ([row["loss/distill_kl"] for row in out[kl]] for kl in ("full", "topk"))
    # the first step's teacher is one step old, which is far off at this rate; no later one is
    assert topk[0] > 5 * full[0]
    assert topk[1:] == pytest.approx(full[1:], rel=1e-2)
    for kl in ("k1", "k3"):
        assert all(math.isfinite(row["loss/distill_kl"]) for row in out[kl])
