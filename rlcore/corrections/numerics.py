"""Numerics that all corrections share: checks of arguments, the tokens that count, safe log
differences, importance ratios, and global sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from rlcore.errors import UserError
from rlcore.interfaces import Reduce
from rlcore.lazy import torch
from rlcore.objectives import kl
from rlcore.objectives.kl import CLAMP
from rlcore.seeding import derive_seed
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class InvalidArgument(UserError, ValueError):
    """An argument outside what its function accepts; the message names the argument."""


def choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InvalidArgument unless `value` is one of the choices."""
    if value not in choices:
        raise InvalidArgument(
            f"{name}={value!s} is not accepted; choose one of: {', '.join(choices)}."
        )


def require(condition: bool, sentence: str) -> None:
    """Raise InvalidArgument with the sentence unless the condition holds."""
    if not condition:
        raise InvalidArgument(sentence)


def at_least_one(name: str, cap: float) -> None:
    """A cap on a ratio must leave ratio 1 alone, or matched distributions would be corrected."""
    require(
        cap >= 1.0,
        f"{name}={cap} is not accepted: it caps a ratio that is 1 without mismatch, so it must be "
        ">= 1.",
    )


def positive(name: str, value: float) -> None:
    """Raise InvalidArgument unless the value is above 0."""
    require(value > 0.0, f"{name}={value} is not accepted: it must be > 0.")


def same_shape(**tensors: Tensor) -> None:
    """Raise InvalidArgument, naming the first that differs, unless all shapes are equal."""
    (first, expected), *others = tensors.items()
    for name, tensor in others:
        require(
            tensor.shape == expected.shape,
            f"{name} has shape {list(tensor.shape)}, and {first} has {list(expected.shape)}: they "
            "must be equal.",
        )


# sums over data-parallel ranks; None at the call sites: a single rank
SumReduce = Callable[["Tensor"], "Tensor"]


# Shared by every formula: which tokens count, safe log differences, and global sums.
#
# A token counts when its mask is 1 and its log-probs can be compared: neither is NaN, and they are
# not infinite in a way that makes the difference undefined. Masked positions may hold anything.
# Everything is detached and at least float32.


def at_least_float32(values: Tensor) -> Tensor:
    """Detached, half precisions widened to float32; float64 stays."""
    return kl.at_least_float32(values.detach())


def result_dtype(values: Tensor) -> torch.dtype:
    """The dtype of results: float64 for float64 values, else float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def probability(logp: Tensor, valid: Tensor) -> Tensor:
    """exp in float64 where valid and not NaN, else 0; never above 1."""
    logp = logp.detach().double()
    return torch.where(valid & ~torch.isnan(logp), logp.clamp(max=0.0).exp(), 0.0)


def log_difference(numerator: Tensor, denominator: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`numerator - denominator` where it is defined, else 0, and where it is defined.

    Args: log-probs [B, T] of any float dtype; mask [B, T] bool or 0/1. Returns (difference [B, T]
    unclamped and possibly infinite, usable [B, T] bool). A masked or undefined token (a NaN, or the
    same infinity on both sides) has difference 0 and is not usable.
    """
    raw = at_least_float32(numerator) - at_least_float32(denominator)
    usable = (mask != 0) & ~torch.isnan(raw)
    return torch.where(usable, raw, torch.zeros_like(raw)), usable


def ratio(difference: Tensor) -> Tensor:
    """`exp` of a log difference clamped at +-20."""
    return difference.clamp(-CLAMP, CLAMP).exp()


def sums(values: Sequence[Tensor]) -> Tensor:
    """[n] float64: the sum of each tensor. Statistics add up: so do these of several batches."""
    return torch.stack([v.sum(dtype=torch.float64) for v in values])


def total(values: Sequence[Tensor], reduce: SumReduce | None) -> list[float]:
    """Global sums in float64 of several tensors, by one reduction. Waits for the device."""
    summed = sums(values)
    found: list[float] = (summed if reduce is None else reduce(summed)).tolist()
    return found


def share(which: Tensor, mask: Tensor, reduce: SumReduce | None) -> float:
    """Global share of the mask's tokens at which `which` [B, T] bool holds; 0 without any token."""
    hits, count = total([which & (mask != 0), mask != 0], reduce)
    return hits / max(count, 1.0)


def finish(weight: Tensor, usable: Tensor, mask: Tensor) -> Tensor:
    """Weights for the caller: 1 (no correction) at masked tokens, 0 at unmasked ones that could not
    be compared."""
    return torch.where(usable, weight, torch.where(mask != 0, 0.0, 1.0).to(weight))


def first_occurrence(ids: Tensor) -> Tensor:
    """Mark the entries [..., n] that hold an id (>= 0) not seen earlier in the row. Sorts: n^2
    comparisons would not scale."""
    ordered, order = ids.sort(dim=-1, stable=True)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return ~torch.zeros_like(repeated).scatter(-1, order, repeated) & (ids >= 0)


# counts [n] and sums [n], both float64, of n prefixes of some sorted values -> which fit, [n] bool
Fits = Callable[["Tensor", "Tensor"], "Tensor"]
_DIGITS = 8  # of the 32 bits of a value, decided by one reduction


def smallest_that_fit(values: Tensor, on: Tensor, fits: Fits, reduce: SumReduce | None) -> Tensor:
    """Mark the smallest of the values [B, T] for which `on` [B, T] holds, as many over all ranks as
    `fits` allows. Equal values stay or go together, so that no order among them matters.

    Args: fits(counts, sums) says of prefixes of the ascending values whether they may stay; where
    one may not, no longer one may. Values are compared as float32, and may be infinite. Every rank
    makes the same reductions, and none waits for the device.
    """
    bits = values.float().contiguous().view(torch.int32).long()
    keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # in the order of the values
    ordered, order = keys[on].sort()
    summed = torch.cat([values.new_zeros(1).double(), values[on].double()[order].cumsum(0)])
    bound = torch.full((), -(1 << 31), device=values.device)
    for digit in range(32 // _DIGITS - 1, -1, -1):
        steps = torch.arange(1, 1 << _DIGITS, device=values.device) << (_DIGITS * digit)
        index = torch.searchsorted(ordered, bound + steps, right=True)
        found = torch.cat([index.double(), summed[index]])
        counts, sums_ = (found if reduce is None else reduce(found)).chunk(2)
        bound = bound + (fits(counts, sums_).sum() << (_DIGITS * digit))
    return on & (keys <= bound)


class OneRank(Reduce):
    """No reduction."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return values


ONE_RANK = OneRank()


def inside(step: StepTensors, mask: Tensor, target: Literal["ref", "new"] = "ref") -> Tensor:
    """The tokens of `mask` [B, T] that have a ratio to p_inf: under a safe set (DVP), the tokens
    inside the target's."""
    within = step.ref_inside if target == "ref" else step.new_inside
    return mask if within is None else mask & within


def _signed(value: int) -> int:
    """An unsigned 64-bit constant as torch's int64 holds it."""
    return value - (1 << 64) if value >= 1 << 63 else value


# the constants of SplitMix64 (Steele, Lea and Flood 2014)
_STRIDE, _FIRST, _SECOND = map(
    _signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own repeats the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _scramble(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit moves every output
    bit."""
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def token_uniforms(
    run_seed: int, purpose: str, step: int, sample_ids: Tensor, length: int
) -> Tensor:
    """Uniforms in [0, 1) of shape [B, length], float32 with 24 random bits.

    Args: the run's seed; what the draw is for; the optimizer step; sample_ids [B] int64, unique and
    stable per sequence; positions. The value at (b, t) depends on nothing but (seed, purpose, step,
    sample_ids[b], t). Example: token_uniforms(0, "obrs", step, sample_ids, logp.shape[1])
    """
    seed = derive_seed(run_seed, purpose, step)
    rows = _scramble(sample_ids.long() * _STRIDE + seed)
    columns = torch.arange(1, length + 1, device=sample_ids.device) * _STRIDE
    return _shift(_scramble(rows[:, None] + columns), 40).float() * 2.0**-24


TokenOrSequence = Literal["token", "sequence"]
Level = Literal["token", "sequence", "geometric"]


# Importance ratios p_target/p_inf, truncated (TIS), masked (MIS, IcePop) or used as a veto.
#
# All functions take log-probs [B, T] (half precisions are widened) and a mask [B, T] (bool or 0/1),
# and return detached tensors. A masked token never enters a product or mean and gets weight 1; an
# unmasked token whose log-prob is NaN leaves the loss (weight 0) and its sequence's product too.
# Log differences are clamped at +-20 before `exp`: per token, or once on the sum or mean at the
# sequence levels.


def importance_ratio(
    logp_target: Tensor, logp_inf: Tensor, mask: Tensor, level: Level
) -> tuple[Tensor, Tensor]:
    """The ratio [B, T] of each token or, repeated along the row, of its sequence; and the tokens
    [B, T] it is defined on.

    `sequence` multiplies the ratios of the row's tokens (a sum of logs), `geometric` takes their
    geometric mean.
    """
    choice("level", level, ("token", "sequence", "geometric"))
    same_shape(logp_target=logp_target, logp_inf=logp_inf, mask=mask)
    difference, usable = log_difference(logp_target, logp_inf, mask)
    if level != "token":
        # +inf and -inf in one row have no product; bounded to where the clamp binds anyway, they
        # cancel
        rows = difference.double().clamp(-1e6, 1e6).sum(-1, keepdim=True)
        if level == "geometric":
            rows = rows / usable.sum(-1, keepdim=True).clamp(min=1)
        difference = rows.to(difference.dtype).expand_as(difference)
    return ratio(difference), usable
