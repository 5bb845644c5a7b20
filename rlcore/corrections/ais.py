"""Adaptive importance sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from rlcore.corrections.break_even import BreakEven
from rlcore.corrections.numerics import (
    CLAMP,
    SumReduce,
    at_least_float32,
    at_least_one,
    finish,
    inside,
    log_difference,
    positive,
    ratio,
    require,
    same_shape,
    sums,
    total,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import Unread, setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class AisSpec(CorrectionSpec):
    """Adaptive importance sampling (papers/ais.txt).

    Biased by the truncation at `cap` and by partial correction: it corrects the share alpha, and
    its gradient lies between the uncorrected one and tis's."""

    method: ClassVar[str] = "rlcore.corrections.ais:Ais"
    statistics: ClassVar[Statistics] = {
        "alpha": ("1", "share of the correction, mean over the tokens; 0 off, 1 full"),
        "alpha_ess": ("1", "the signal of the effective sample size"),
        "alpha_mis": ("1", "the signal of the mismatch"),
        "alpha_var": ("1", "the signal of the variance"),
        "n_star": ("answers", "alpha=n_star: answers at which half of the correction is applied"),
    }
    weighs: ClassVar[bool] = True

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("delta", "gamma", "beta", "eps"),
            lambda spec: spec.alpha == "n_star",
            "alpha=n_star takes the share from the batch's size, not from signals",
        ),
    )

    cap: float = setting(5.0, "C: w = min(p_ref/p_inf, C)", ge=1)
    delta: float = setting(0.02, "mean |dlogp| at which the correction is full", gt=0)
    gamma: float = setting(1.2, "growth of std(A*w)/std(A) that is tolerated", gt=0)
    beta: float = setting(1.0, "how much more growth damps the correction", ge=0)
    eps: float = setting(1e-6, "guards a division", gt=0)
    alpha: Literal["signals", "n_star"] = setting(
        "signals", "from three signals of the batch (the paper's), or from its size: N/(N + N*)"
    )

    @property
    def token_alone(self) -> bool:
        return True

    @property
    def biases(self) -> tuple[Bias, ...]:
        caps = Bias("truncation", {"cap": WIDE})
        return (caps, Bias("partial correction", where="matched"))


_AIS = AisSpec()
_TINY = 1e-300  # keeps a division finite where there is no token
Number: TypeAlias = (
    "float | Tensor"  # a float, or a 0-d tensor where the device must not be waited for
)


# Adaptive importance sampling: how strongly to correct is itself estimated from the batch (AIS
# section 3).
#
# `ais` does it in one call. A trainer whose batch comes in micro-batches adds up `ais_accumulate`
# of each (and over ranks, with an all-reduce), then asks `ais_weight`: alpha is then one number for
# the whole batch, however it was cut.


@dataclass(frozen=True, slots=True)
class _Moments:
    """The moments that alpha depends on, of the tokens that count: w = min(p_ref/p_inf, cap), A
    advantages."""

    count: Number
    abs_dlogp: Number  # sum of |dlogp|, each at most 20
    mean_w: Number
    squares: tuple[Number, Number, Number]  # sums of squared deviations of w, A and A w


def ais(
    logp_ref: Tensor,
    logp_inf: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cap: float = _AIS.cap,
    delta: float = _AIS.delta,
    gamma: float = _AIS.gamma,
    beta: float = _AIS.beta,
    eps: float = _AIS.eps,
    reduce: SumReduce | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Weight `1 + alpha (min(p_ref/p_inf, cap) - 1)` with one alpha in [0, 1] for the global batch
    (AIS eq. 12 to 18).

        alpha = clip(alpha_ess - beta alpha_var, 0, 1) * alpha_mis
        alpha_ess = (1 + CV(w)^2)^(-1/2)
        alpha_mis = min(1, mean|dlogp| / delta)
        alpha_var = max(0, (dsigma - gamma)/gamma),  dsigma = std(A w) / (std(A) + eps)

    CV and std are sample statistics (n - 1), 0 on fewer than two tokens; |dlogp| counts as at most
    20, so that no single broken token decides alpha. Biased on purpose: it corrects the share alpha
    of the mismatch.

    Args: log-probs and advantages [B, T], mask [B, T]; `reduce` sums over data-parallel ranks.
    Returns (weight [B, T] in [1 - alpha, 1 + alpha (cap - 1)], {"alpha", "alpha_ess", "alpha_mis",
    "alpha_var"}). Matched log-probs give weight exactly 1. Without any token alpha is 0. The
    signals are numbers, so this waits for the device; `ais_accumulate` and `ais_weight` do not.
    """
    _check(cap, delta, gamma, beta, eps)
    difference, w, usable, samples = _samples(logp_ref, logp_inf, advantages, mask, cap)
    count, abs_dlogp, *summed = total([usable, difference.abs().clamp(max=CLAMP), *samples], reduce)
    means = [s / max(count, 1.0) for s in summed]
    # centred before squaring: the one-pass form would lose a small variance to cancellation
    squares = total(
        [torch.where(usable, (s - m) ** 2, 0.0) for s, m in zip(samples, means)], reduce
    )
    moments = _Moments(count, abs_dlogp, means[0], (squares[0], squares[1], squares[2]))
    signals = _signals(moments, delta, gamma, beta, eps)
    weight = finish(1.0 + signals["alpha"] * (w - 1.0), usable, mask)
    return weight, {name: float(value) for name, value in signals.items()}


def ais_accumulate(
    logp_ref: Tensor, logp_inf: Tensor, advantages: Tensor, mask: Tensor, *, cap: float = _AIS.cap
) -> Tensor:
    """Statistics [8] float64 of some of a batch's tokens, which add up over micro-batches and
    ranks."""
    at_least_one("cap", cap)
    difference, _, usable, samples = _samples(logp_ref, logp_inf, advantages, mask, cap)
    # w is centred at 1, its value without mismatch, so that the subtraction keeps a small variance
    shifted = [torch.where(usable, samples[0] - 1.0, 0.0), samples[1], samples[2]]
    values = [usable, difference.abs().clamp(max=CLAMP)]
    for sample in shifted:
        values += [sample, sample**2]
    return sums(values)


def ais_weight(
    statistics: Tensor,
    logp_ref: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    *,
    cap: float = _AIS.cap,
    delta: float = _AIS.delta,
    gamma: float = _AIS.gamma,
    beta: float = _AIS.beta,
    eps: float = _AIS.eps,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ais` of some of a batch's tokens, given the summed `ais_accumulate` of all of them.

    The signals are 0-d tensors: nothing waits for the device. `cap` is the statistics' cap.
    """
    _check(cap, delta, gamma, beta, eps)
    require(statistics.shape == (8,), f"statistics has shape {list(statistics.shape)}, not [8].")
    same_shape(logp_ref=logp_ref, logp_inf=logp_inf, mask=mask)
    count, abs_dlogp, *rest = statistics.unbind()
    n = count.clamp(min=1.0)
    firsts, seconds = rest[::2], rest[1::2]
    squares = [(s2 - s1**2 / n).clamp(min=0.0) for s1, s2 in zip(firsts, seconds)]
    mean_w = torch.where(count > 0, 1.0 + firsts[0] / n, 0.0)
    moments = _Moments(count, abs_dlogp, mean_w, (squares[0], squares[1], squares[2]))
    signals = _signals(moments, delta, gamma, beta, eps)
    difference, usable = log_difference(logp_ref, logp_inf, mask)
    w = ratio(difference).clamp(max=cap)
    alpha = torch.as_tensor(signals["alpha"]).to(w.dtype)
    weight = finish(1.0 + alpha * (w - 1.0), usable, mask)
    return weight, {name: torch.as_tensor(value) for name, value in signals.items()}


def _check(cap: float, delta: float, gamma: float, beta: float, eps: float) -> None:
    at_least_one("cap", cap)
    positive("delta", delta)
    positive("gamma", gamma)
    positive("eps", eps)
    require(beta >= 0.0, f"beta={beta} is not accepted: it must be >= 0.")


def _samples(
    logp_ref: Tensor, logp_inf: Tensor, advantages: Tensor, mask: Tensor, cap: float
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """(log difference, w, usable tokens, [w, A, A w] in float64), 0 where not usable; [B, T]."""
    same_shape(logp_ref=logp_ref, logp_inf=logp_inf, advantages=advantages, mask=mask)
    difference, usable = log_difference(logp_ref, logp_inf, mask)
    w = ratio(difference).clamp(max=cap)
    a = torch.where(usable, at_least_float32(advantages), 0.0).double()
    wide = w.double()
    return difference, w, usable, [torch.where(usable, s, 0.0) for s in (wide, a, a * wide)]


def _signals(m: _Moments, delta: float, gamma: float, beta: float, eps: float) -> dict[str, Number]:
    """alpha and what it is made of, from floats or from 0-d tensors."""
    degrees = _bounded(m.count - 1, low=1.0)  # 0 below two tokens: no deviation
    std_w, std_a, std_aw = (_root(s / degrees) for s in m.squares)
    cv = std_w / _bounded(m.mean_w, low=_TINY)
    alpha_ess = (1.0 + cv**2) ** -0.5
    alpha_mis = _bounded(m.abs_dlogp / _bounded(m.count, low=1.0) / delta, high=1.0)
    alpha_var = _bounded((std_aw / (std_a + eps) - gamma) / gamma, low=0.0)
    alpha = _bounded(alpha_ess - beta * alpha_var, low=0.0, high=1.0) * alpha_mis
    return {
        "alpha": alpha,
        "alpha_ess": alpha_ess,
        "alpha_mis": alpha_mis,
        "alpha_var": alpha_var,
    }


def _bounded(value: Number, low: float | None = None, high: float | None = None) -> Number:
    if isinstance(value, torch.Tensor):
        return value.clamp(min=low, max=high)
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


def _root(value: Number) -> Number:
    return value.sqrt() if isinstance(value, torch.Tensor) else sqrt(value)


class Ais(Correction):
    """Weight `1 + alpha (min(p_ref/p_inf, cap) - 1)`, alpha estimated from the step (AIS eq. 12 to
    18), or by age from the batch's size and the N* of some 14 steps (`BreakEven`).

    The paper's mini-batch is here the step's global batch: the tokens still in the loss when AIS's
    turn comes. Tokens outside the safe set (DVP) are not among them: they have weight 0 from there.
    """

    needs = Needs(batch_stats=True)

    def __init__(self, spec: AisSpec, run_seed: int) -> None:
        self._seen = BreakEven(spec.cap) if spec.alpha == "n_star" else None
        # the formula's keywords are the setting's names
        self.settings = spec.model_dump(exclude={"alpha"})

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        on = inside(step, current.mask)  # a token outside would count as the largest difference
        cap = self.settings["cap"]
        share: float | Tensor
        if self._seen is not None:
            difference, usable = log_difference(step.logp_ref, step.logp_inf, on)
            self._seen.follow(step, usable, reduce)
            share, metrics = self._seen.share(step, usable, reduce)
            weight = finish(1.0 + share * (ratio(difference).clamp(max=cap) - 1.0), usable, on)
            share = share[..., None]
        else:
            weight, metrics = ais(
                *(step.logp_ref, step.logp_inf, step.advantages, on),
                **self.settings,
                reduce=reduce,
            )
            share = metrics["alpha"]

        def weigh_at(_new: Tensor, ref: Tensor, inf: Tensor) -> Tensor:
            return 1.0 + share * (ratio(ref - inf).clamp(max=cap) - 1.0)

        return Corrected(current.weight * weight, current.mask, metrics, weigh_at=weigh_at)

    def state(self) -> Mapping[str, Any]:
        return {} if self._seen is None else self._seen.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        if self._seen is not None and state:
            self._seen.restore(state)
