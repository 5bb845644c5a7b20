"""Every correction's formula as a pure function of tensors: the stable import path for scripts and users.

Shapes are [B,T] (sequences, response positions) in float32, masks bool or 0/1, results detached (`safe_set_logprobs`
alone carries a gradient). `logp_inf` is the actor's processed log-prob of the sampled token, `logp_ref` the learner's
as the batch entered its update phase, `logp_new` the learner's now; `logp_target` is whichever of the two is corrected
towards. Half precisions are widened, log differences are clamped at +-20 before `exp`, a masked token enters no
statistic whatever it holds, and an unmasked token whose log-prob is NaN leaves the loss (weight 0). Where statistics
are taken, `reduce` (a sum over data-parallel ranks) makes them global.
"""

from rlcore.corrections.formulas.adaptive import ais
from rlcore.corrections.formulas.groups import best_of_group, rapid_advantages
from rlcore.corrections.formulas.obrs import jackpot_weight, obrs_acceptance, obrs_calibrate, obrs_normalizer
from rlcore.corrections.formulas.ratios import mis, tis, veto
from rlcore.corrections.formulas.safe_set import safe_set_logprobs

__all__ = [
    "ais",
    "best_of_group",
    "jackpot_weight",
    "mis",
    "obrs_acceptance",
    "obrs_calibrate",
    "obrs_normalizer",
    "rapid_advantages",
    "safe_set_logprobs",
    "tis",
    "veto",
]
