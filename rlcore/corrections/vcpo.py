"""VCPO: steps as large as the effective sample size warrants."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING, ClassVar, Literal

from rlcore.corrections.numerics import choice, log_difference, require, same_shape, sums
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.lazy import torch
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class VcpoSpec(CorrectionSpec):
    """VCPO's step size from the effective sample size (arXiv 2602.17616).

    It scales a whole step, and leaves the expected gradient's direction as it is."""

    method: ClassVar[str] = "rlcore.corrections.vcpo:Vcpo"
    statistics: ClassVar[Statistics] = {
        "ess": ("share", "effective sample size of the sequence weights"),
        "step_scale": ("1", "factor of the learning rate"),
    }
    sequence_wise: ClassVar[bool] = True

    rule: Literal["sqrt", "linear"] = setting(
        "sqrt", "of the share of effective samples: sqrt for Adam"
    )
    base: float = setting(1.0, "share of effective samples that takes the whole step", gt=0, le=1)
    cap: float | None = setting(
        None, "sequence ratios count as at most this; null: as they are", ge=1
    )
    target: Literal["ref", "new"] = setting("new", "ref: p_ref instead of p_new")

    @property
    def token_alone(self) -> bool:
        return True  # it weighs none


Rule = Literal["sqrt", "linear"]


def sequence_log_ratios(
    logp_target: Tensor, logp_inf: Tensor, mask: Tensor, *, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """`min(sum_t (log p_target - log p_inf), log cap)` [B] float64, and the sequences [B] bool that
    have a usable token. -inf: a token is impossible under the target. Log-probs and mask [B, T]."""
    require(cap is None or cap >= 1.0, f"cap={cap} is not accepted: ratio 1 must pass it.")
    same_shape(logp_target=logp_target, logp_inf=logp_inf, mask=mask)
    difference, usable = log_difference(logp_target, logp_inf, mask)
    # +inf and -inf have no sum; every finite difference is far below this bound
    summed = difference.double().clamp(max=1e6).sum(-1)
    return summed.clamp(max=inf if cap is None else log(cap)), usable.any(-1)


def sequence_ess_largest(
    logp_target: Tensor, logp_inf: Tensor, mask: Tensor, *, cap: float | None = None
) -> Tensor:
    """The largest `sequence_log_ratios`, 0-d float64, of some of a batch's sequences; -inf without
    one. The whole batch's value is the maximum over micro-batches and ranks."""
    logs, present = sequence_log_ratios(logp_target, logp_inf, mask, cap=cap)
    return torch.cat([logs.new_tensor([-inf]), logs[present]]).max()


def sequence_ess_accumulate(
    logp_target: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    *,
    largest: Tensor,
    cap: float | None = None,
) -> Tensor:
    """Statistics [3] float64 of some of a batch's sequences, which add up over micro-batches and
    ranks: `sum w`, `sum w^2` and the sequences, `w = min(prod_t p_target/p_inf, cap) / e^largest`.

    `largest`: the whole batch's `sequence_ess_largest`, so that no `w` is above 1 and one is 1,
    however small or large all ratios are. Sequences without a usable token are not counted.
    Log-probs and mask [B, T].
    """
    logs, present = sequence_log_ratios(logp_target, logp_inf, mask, cap=cap)
    # -inf: the batch has no possible sequence, so every w is 0
    shift = torch.where(torch.isinf(largest), 0.0, largest)
    w = torch.where(present, (logs - shift).exp(), 0.0)
    return sums([w, w * w, present])


def sequence_ess(statistics: Tensor) -> float:
    """`(sum w)^2 / (n sum w^2)` in [0, 1] from summed `sequence_ess_accumulate`; 1 without a
    sequence, 0 where all are impossible under the target. Waits for the device."""
    require(statistics.shape == (3,), f"statistics has shape {list(statistics.shape)}, not [3].")
    first, second, count = statistics.tolist()
    if not count:
        return 1.0
    return first**2 / (count * second) if second else 0.0


def vcpo_scale(ess: float, *, rule: Rule = "sqrt", base: float = 1.0) -> float:
    """Factor of the learning rate, in [0, 1]: `min(1, ess/base)`, or its square root (VCPO,
    arXiv 2602.17616): the root for Adam, whose steps do not grow with the gradient."""
    choice("rule", rule, ("sqrt", "linear"))
    require(0.0 < base <= 1.0, f"base={base} is not accepted: it is a share of samples, in (0, 1].")
    share = min(1.0, ess / base)
    return share**0.5 if rule == "sqrt" else share


class Vcpo(Correction):
    """Multiplies the step's learning rate by `sqrt(ESS / (base n))`, at most 1. `ESS = (sum w)^2 /
    sum w^2` is over the n sequences of the global batch, with `w = prod_t p_new/p_inf` (VCPO, arXiv
    2602.17616, section 4.1; p_ref instead of p_new with target=ref).

    Weights and mask stay as they are: the expected gradient does not change, and a step of few
    effective samples is short. It can be combined with any correction; the sequences are those that
    earlier corrections left, with all of their sampled tokens, whatever is rejected later. The
    rate's schedule never sees the factor, which depends on the step's batch alone. No state is
    kept, and a resumed step takes the same one. Under AdamW the decay of that step is scaled too.
    Every rank computes it from the same reduced sums. The paper's other half, a baseline that takes
    the norm of every sample's gradient, is not here.
    """

    def __init__(self, spec: VcpoSpec, run_seed: int) -> None:
        self.spec = spec
        self.needs = Needs(new=spec.target == "new")

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        spec = self.spec
        target = step.logp_new if spec.target == "new" else step.logp_ref
        left = step.mask & current.mask.any(-1, keepdim=True)
        tokens = (target, step.logp_inf, left)
        largest = reduce.max(sequence_ess_largest(*tokens, cap=spec.cap))
        ess = sequence_ess(reduce(sequence_ess_accumulate(*tokens, largest=largest, cap=spec.cap)))
        scale = vcpo_scale(ess, rule=spec.rule, base=spec.base)
        metrics = {"ess": ess, "step_scale": scale}
        return Corrected(current.weight, current.mask, metrics, step_scale=scale)
