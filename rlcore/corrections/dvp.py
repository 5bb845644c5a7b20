"""Dynamic vocabulary pruning: actor and learner both exclude extremely unlikely tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp, log
from typing import TYPE_CHECKING, ClassVar, Literal

from rlcore.corrections.numerics import require, total
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import Bias
from rlcore.spec import Fixed, setting
from rlcore.types import SamplingSpec, StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class DvpSpec(CorrectionSpec):
    """Dynamic vocabulary pruning (papers/dvp.txt).

    Its reference is the policy constrained to its safe set. Where weights lead to p_ref, it is
    biased where the safe set of p_ref lacks a token of p_new's set. That token has weight 0, from a
    phase's second step on. With zero=trajectory and weights per token, it is also biased by the
    sequences that are dropped for one token outside."""

    method: ClassVar[str] = "rlcore.corrections.dvp:Dvp"
    statistics: ClassVar[Statistics] = {
        "outside_share": ("share", "tokens outside the learner's safe set"),
        "sequence_outside_share": ("share", "sequences with such a token"),
        "coverage_mean": ("probability", "mass of the learner's safe set"),
    }
    sequence_wise: ClassVar[bool] = True
    zeroes: ClassVar[bool] = True
    fixed: ClassVar[Mapping[str, str]] = {"rho": Fixed.SAMPLED}

    rho: float = setting(exp(-13.0), "safe set: p >= rho * max p", gt=0, lt=1)
    zero: Literal["token", "trajectory"] = setting(
        "token", "what a token outside the learner's set takes out: itself, or all of its sequence"
    )

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("safe set", {"rho": 1e-300}),)


# stands for a pruned logit: exp() of it is 0, and unlike -inf it is safe in a backward pass
FILL = -1e30
OUTSIDE_LOGP = -1e6  # stands for the log-prob of a pruned token: its ratio is 0 for every purpose


def safe_set_logprobs(
    logits: Tensor, ids: Tensor, *, rho: float = DvpSpec().rho
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of `ids` under `p(a | a in S)`, with `S = {a : p(a) >= rho max_b p(b)}` (DVP def.
    5.1 and 5.2).

    Args: logits [..., V] of any float dtype, after temperature; ids [...] int; rho in (0, 1].
    Returns (logp [...] float32, inside [...] bool, coverage [...] float32 = sum of p over S,
    detached). logp carries a gradient to the logits, exactly 0 outside S; S itself is taken without
    one. An id outside S has the constant log-prob -1e6 and no gradient at all: its ratio is 0.
    """
    require(
        0.0 < rho <= 1.0,
        f"rho={rho} is not accepted: the safe set keeps p >= rho * max p, with rho in (0, 1].",
    )
    require(
        ids.shape == logits.shape[:-1],
        f"ids has shape {list(ids.shape)}, and logits {list(logits.shape)}: one id a position.",
    )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    with torch.no_grad():
        top = wide.amax(-1, keepdim=True)
        safe = wide >= top + log(rho)
        inside = safe.gather(-1, ids.long()[..., None])[..., 0]
    # subtracted first, because large logits would lose the low-order digits of log-probs
    wide = wide - top
    masked = torch.where(safe, wide, FILL)
    normaliser = masked.logsumexp(-1)
    logp = masked.gather(-1, ids.long()[..., None])[..., 0] - normaliser
    coverage = (normaliser - wide.logsumexp(-1)).detach().exp().clamp(max=1.0)
    return torch.where(inside, logp, OUTSIDE_LOGP), inside, coverage


class Dvp(Correction):
    """The actor samples with min-p = rho, the learner's log-probs are over its own safe set (DVP
    section 5).

    A sampled token outside the safe set has ratio 0: weight 0, still in the denominator.
    Sequence-level weights drop its whole sequence. The set belongs to the policy that weights lead
    to: p_ref, or p_new under a loss without p_new/p_ref, whose gradient theorem 5.3 takes at p_new.
    A veto looks at p_ref's set. With `zero=trajectory` every token of its sequence weighs 0, as in
    equation 22, whose ratio is of the whole trajectory. The ratio of the two constrained policies
    is left to another correction (none, TIS, MIS, ...).

    Both values of `zero` estimate the gradient of the constrained policies, a bias that the method
    accepts. They have no other bias: `token` with weights per token (prefix and rest from the
    actor), `trajectory` with weights per sequence. With weights per token, `trajectory` loses the
    tokens before and after such a token, in `sequence_outside_share` of the sequences.
    """

    def __init__(self, spec: DvpSpec, run_seed: int) -> None:
        self.spec = spec
        self.needs = Needs(safe_set_rho=spec.rho)

    def constrain_sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        return replace(sampling, min_p=max(sampling.min_p, self.spec.rho))

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        if step.ref_inside is None or step.coverage is None:
            raise ValueError(
                "correction=dvp needs StepTensors.ref_inside and .coverage: the learner applied no "
                "safe set"
            )
        on = current.mask
        coverage = step.coverage.float().clamp(0, 1)
        left = (step.mask & ~step.ref_inside).any(-1)
        outside, covered, count, sequences, present = total(
            [~step.ref_inside & on, coverage.where(on, 0.0), on, left, step.mask.any(-1)], reduce
        )
        # a rank without tokens must not decide the minimum, and still takes part in the reduction
        lowest = (-coverage).where(on, -1.0).max() if on.any() else coverage.new_tensor(-1.0)
        metrics = {
            "outside_share": outside / max(count, 1.0),
            "sequence_outside_share": sequences / max(present, 1.0),
            "coverage_mean": covered / count if count else 1.0,
            "coverage_min": -reduce.max(lowest).item(),
        }
        stays = step.ref_inside | ~on
        if self.spec.zero == "trajectory":
            stays = stays & ~left[:, None]
        return Corrected(current.weight * stays, on, metrics)
