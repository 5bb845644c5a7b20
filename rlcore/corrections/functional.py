"""Every correction's formula as a pure function of tensors: the stable import path for scripts and
users, usable without the rest of rlcore.

Shapes are [B, T] (sequences, sampled tokens) in float32, masks bool or 0/1, results detached
(`safe_set_logprobs`, `sampled_kl` and `kl_penalty` alone carry a gradient). `logp_inf` is the
actor's processed log-prob of the sampled token, `logp_ref` the learner's as the batch entered its
update phase, `logp_new` the learner's now. `logp_target` is either of these two, the policy that is
corrected towards. Half precisions are widened, float64 stays, and log differences are clamped at
+-20 before `exp`. A masked token enters no statistic whatever it holds. An unmasked token whose
log-prob is NaN leaves the loss (weight 0). Numbers and shapes are checked: InvalidArgument, which
is a ValueError, names the argument.

Statistics of a batch that comes in micro-batches, or of several ranks, are taken in two phases:

    parts = [ais_accumulate(ref, inf, adv, mask) for ref, inf, adv, mask in micro_batches]
    whole = merge(parts)                    # over ranks: torch.distributed.all_reduce(whole)
    weight, signals = ais_weight(whole, ref, inf, mask)       # of each micro-batch

likewise `jackpot_accumulate` with `jackpot(..., statistics=whole)`, `mismatch_accumulate` with
`mismatch_values`, `drift_accumulate` with `drift_values` (the input of `StepBound`) and
`policy_drift_accumulate` with `policy_drift` (of whole groups). So does
`sequence_ess_accumulate` with `sequence_ess`, which also takes the maximum of
`sequence_ess_largest` over all parts and ranks. Nothing waits for a device, except what returns
Python numbers: `ais`, `batch_worth_correcting`, `drift_values`, `fixed_share`, `obrs_calibrate`,
`mismatch_values`, `policy_drift` and `sequence_ess`. In the one-call forms `reduce` sums over
ranks.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from rlcore.corrections.ais import ais, ais_accumulate, ais_weight
from rlcore.corrections.break_even import last_layer_sketch
from rlcore.corrections.centre import centre
from rlcore.corrections.dppo import dppo, drpo, topk_divergence
from rlcore.corrections.drift import (
    policy_distance,
    policy_drift,
    policy_drift_accumulate,
    unbiased_square,
)
from rlcore.corrections.dvp import safe_set_logprobs
from rlcore.corrections.jackpot import (
    JackpotSpec,
    JackpotTokens,
    JackpotWeights,
    TopK,
    jackpot,
    jackpot_accumulate,
    jackpot_weight,
)
from rlcore.corrections.m2po import m2po
from rlcore.corrections.minpro import minpro
from rlcore.corrections.mis import mis
from rlcore.corrections.mismatch import mismatch_accumulate, mismatch_values
from rlcore.corrections.numerics import InvalidArgument, token_uniforms
from rlcore.corrections.obrs import (
    obrs_acceptance,
    obrs_calibrate,
    obrs_divergence,
    obrs_normalizer,
)
from rlcore.corrections.opsm import opsm
from rlcore.corrections.outliers import outliers
from rlcore.corrections.rapid import best_of_group, rapid_advantages
from rlcore.corrections.regimes import batch_worth_correcting, fixed_share, floor_tokens
from rlcore.corrections.step_bound import StepBound, drift_accumulate, drift_values
from rlcore.corrections.tis import tis
from rlcore.corrections.vcpo import (
    sequence_ess,
    sequence_ess_accumulate,
    sequence_ess_largest,
    vcpo_scale,
)
from rlcore.corrections.vesp import vesp
from rlcore.corrections.veto import veto
from rlcore.objectives.kl import entropy, full_kl, kl_penalty, penalty_weight, sampled_kl


def merge(statistics: Iterable[Tensor]) -> Tensor:
    """The statistics of a whole batch from its parts': their sum."""
    return torch.stack(list(statistics)).sum(0)


__all__ = [
    "InvalidArgument",
    "JackpotSpec",
    "JackpotTokens",
    "JackpotWeights",
    "StepBound",
    "TopK",
    "ais",
    "ais_accumulate",
    "ais_weight",
    "batch_worth_correcting",
    "best_of_group",
    "centre",
    "dppo",
    "drift_accumulate",
    "drift_values",
    "drpo",
    "entropy",
    "fixed_share",
    "floor_tokens",
    "full_kl",
    "jackpot",
    "jackpot_accumulate",
    "jackpot_weight",
    "kl_penalty",
    "last_layer_sketch",
    "m2po",
    "merge",
    "minpro",
    "mis",
    "mismatch_accumulate",
    "mismatch_values",
    "obrs_acceptance",
    "obrs_calibrate",
    "obrs_divergence",
    "obrs_normalizer",
    "opsm",
    "outliers",
    "penalty_weight",
    "policy_distance",
    "policy_drift",
    "policy_drift_accumulate",
    "rapid_advantages",
    "safe_set_logprobs",
    "sampled_kl",
    "sequence_ess",
    "sequence_ess_accumulate",
    "sequence_ess_largest",
    "tis",
    "token_uniforms",
    "topk_divergence",
    "unbiased_square",
    "vcpo_scale",
    "vesp",
    "veto",
]
