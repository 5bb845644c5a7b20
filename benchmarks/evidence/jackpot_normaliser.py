"""Error of Jackpot's Z over the top k against Z over the whole vocabulary, on real rollouts.

    python -m benchmarks.evidence.jackpot_normaliser --model FOLDER [--rounding int4] [--prompts 64]
                                            [--k 2 3 5 10 20]

An engine with emulated low-precision weights samples answers and returns log-probs of the whole
vocabulary; those of the policy come from transformers on the same tokens. Every estimate uses these
two distributions: `tail` none or residual, `missing` zero or bound, before and after calibration by
kappa. The model given should be warmed up (peaked distributions); it is compared with an untrained
model of the same shape (nearly uniform ones). `agreement.py` does the same on a pretrained model
under every mismatch.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.evidence.drawn import MAX_LEN, Drawn, Prompts, collect, policy_of
from benchmarks.harness import machine, table
from rlcore.corrections.functional import obrs_acceptance, obrs_calibrate, obrs_normalizer
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.rollout.specs import ActorSpec
from rlcore.tasks import make_task

TAILS: tuple[Literal["none", "residual"], ...] = ("none", "residual")
MISSING: tuple[Literal["zero", "bound"], ...] = ("zero", "bound")
UNTRAINED = FreshModelSpec(
    hidden_size=192,
    layers=4,
    heads=6,
    kv_heads=2,
    head_dim=32,
    intermediate_size=512,
    vocab_size=64,
)


def estimates(drawn: Drawn, ks: list[int], lam: float) -> list[dict[str, Any]]:
    """One row for each k, tail and missing; `drawn.z` is the truth."""
    on = drawn.mask
    whole, mask = drawn.z[on][None], torch.ones(1, int(on.sum()))
    accepted = obrs_acceptance(drawn.logp_ref[on][None], drawn.logp_inf[on][None], lam=lam)
    names = ("inf_ids", "inf_logp", "ref_ids", "ref_logp", "ref_at_inf")
    rows = []
    for k, tail, missing in product(ks, TAILS, MISSING):
        top = [getattr(drawn, name)[on][None, :, :k] for name in names]
        z, unknown = obrs_normalizer(*top, lam=lam, missing=missing, tail=tail)
        fixed, kappa, _ = obrs_calibrate(z, accepted, mask, lam=lam)
        rows.append(
            {
                "k": k,
                "tail": tail,
                "missing": missing,
                "mean |Z_k - Z|": float((z - whole).abs().mean()),
                "max": float((z - whole).abs().max()),
                "kappa": kappa,
                "calibrated: mean": float((fixed - whole).abs().mean()),
                "calibrated: max": float((fixed - whole).abs().max()),
                "unknown share": float(unknown.mean()),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a warmed-up model of the digits task")
    parser.add_argument("--rounding", default="int4", choices=["none", "fp8", "int8", "int4"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--k", type=int, nargs="+", default=[2, 3, 5, 10, 20])
    parser.add_argument("--lam", type=float, default=1.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        untrained = build_fresh_model(
            Path(folder) / "m", "0123456789=", UNTRAINED, seed=0, max_len=MAX_LEN
        )
        for name, model in (("warmed up", args.model), ("untrained", str(untrained))):
            policy, prompts = policy_of(model), Prompts(model, make_task("digits", {}))
            actor = ActorSpec(kv_cache_gib=0.25, rounding=args.rounding)
            shape = (args.prompts, 8, 16)
            found, _ = collect(model, actor, prompts, policy, shape=shape, lam=args.lam)
            kl = float(found.kl[found.mask].mean())
            top = float(found.inf_logp[..., 0][found.mask].exp().mean())
            print(
                f"\n{name}: {int(found.mask.sum())} tokens, vocabulary {policy.config.vocab_size}, "
                f"weights {args.rounding}, KL(p_inf||p_ref) {kl:.4f} nats, mean probability of the "
                f"top token {top:.2f}\n"
            )
            print(table(estimates(found, args.k, args.lam)))
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
