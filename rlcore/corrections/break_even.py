"""N*, the answers of a batch above which correcting lowers the mean squared error of its gradient.
Also the share of the correction that a batch supports (METHODS.md, "N* between groups").

The gradient is the output layer's, the sum over tokens of A h (e_x - p_ref) with h the hidden
state. The head pass leaves 32 numbers of each token, `last_layer_sketch`; products of two gradients
are taken from these. Let d be the difference of the uncorrected and the corrected gradient of a
group of answers. The mean product of the d of two different groups is the squared bias. An error
that repeats within a group, because its answers share contexts, and averages out over contexts adds
nothing to it. All pairs of groups of some 14 steps count, so that a bias that lasts is told from
the noise of thousands of answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlcore.corrections.decisions import typical_n_star
from rlcore.corrections.numerics import SumReduce, log_difference, ratio, total
from rlcore.lazy import torch
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 16  # numbers that stand for a hidden state, and for a residual over the vocabulary
AGES = (0, 1, 2, 4, 8)  # lower edges of the classes of tokens, in steps before p_ref
DECAY = 0.93  # of the sums, for each step: they are of the last 14 steps, about
SETTLED = 8  # steps from which on no typical N* is mixed in
_REMEMBERED = 64  # batches of one phase, whose later epochs add nothing
NEARLY_WHOLE = 10.0  # cap of the ratio that stands for an unbiased correction, as in the lab
_CELLS = SIZE * SIZE


# ----- of the head pass -----


def _hashed(rows: Tensor) -> tuple[Tensor, Tensor]:
    """An entry in 0..15 and a sign of each row, by a hash of it."""
    bits = rows + 1
    for factor in (0x45D9F3B, 0x119DE1F3):
        bits = ((bits ^ (bits >> 16)) * factor) & 0xFFFFFFFF
    bits = bits ^ (bits >> 16)
    return bits % SIZE, (1 - 2 * ((bits >> 8) & 1)).float()


def places_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The entry in 0..15 and the sign (1 or -1, float32) that stand for each row, by a hash of it
    (count sketch); the first 16 keep an entry each. rows [...] int64, not negative."""
    place, sign = _hashed(rows)
    first = rows < SIZE
    return torch.where(first, rows, place), torch.where(first, 1.0, sign)


@lru_cache(maxsize=16)
def _places(count: int, device: torch.device, *, states: bool = False) -> Tensor:
    """[count, 16] float32: one entry of each row is 1 or -1, by `places_of`. `states`: all rows by
    the hash where there are more than 16."""
    rows = torch.arange(count)
    place, sign = _hashed(rows) if states and count > SIZE else places_of(rows)
    return torch.zeros(count, SIZE).scatter_(1, place[:, None], sign[:, None]).to(device)


def last_layer_sketch(hidden: Tensor, weights: Tensor, total: Tensor, targets: Tensor) -> Tensor:
    """[n, 32] float32 of n tokens: 16 numbers of the hidden state h and 16 of e_x - p.

    Products keep their expectation over hashes: the product of two tokens' h, times the product of
    their e_x - p, is about the product of their output-layer gradients. hidden [n, D]; p [n,
    V] is `weights / total`, weights float32; targets [n].
    """
    places = vocabulary_places(weights.shape[1], weights.device)
    return sketch_of(hidden, weights @ places, total, targets, places)


def vocabulary_places(count: int, device: torch.device) -> Tensor:
    """[V, 16] float32: `places_of` each token, as a matrix."""
    return _places(count, device)


def sketch_of(
    hidden: Tensor, summed: Tensor, total: Tensor, targets: Tensor, places: Tensor
) -> Tensor:
    """`last_layer_sketch` from `weights @ places` [n, 16] and `vocabulary_places`."""
    states = hidden.float() @ _places(hidden.shape[1], hidden.device, states=True)
    return torch.cat([states, places[targets] - summed / total], 1)


# ----- of a step -----

# What is known of the tokens of a class is one row of float64: the 256 numbers of the summed d, and
# the sums over groups of |d|^2, of the squared number of tokens, of tokens, of the variance that
# correcting adds, and of answers.
_SQUARES, _PAIRED, _TOKENS, _ADDED, _ANSWERS = range(_CELLS, _CELLS + 5)
_WIDTH = _CELLS + 5
_ROWS = 1 + len(AGES)  # of all tokens, then of each class


def varied(group_ids: Tensor, advantages: Tensor, on: Tensor) -> Tensor:
    """The tokens of `on` [B, T] whose group has an advantage that is not 0: others add neither bias
    nor variance, and their answers do not count in N. Groups are whole on their rank."""
    _, place = torch.unique(group_ids, return_inverse=True)
    moves = ((advantages != 0) & on).any(-1)
    return on & (torch.bincount(place, moves.double()) > 0)[place][:, None]


def age_class(step: StepTensors) -> Tensor:
    """[B, T] int64: the class of `AGES` of each token, by the versions from its own to p_ref's."""
    version = step.step if step.ref_version is None else step.ref_version
    edges = torch.tensor(AGES[1:], device=step.token_version.device)
    return torch.bucketize(version - step.token_version.long(), edges, right=True)


def _by_group(step: StepTensors, factor: Tensor) -> Tensor:
    """[groups, 256] float64: the summed sketches of A h (e_x - p_ref) times `factor` [B, T]."""
    assert step.sketch is not None
    states, residuals = step.sketch.float().split(SIZE, -1)
    groups, place = torch.unique(step.group_ids, return_inverse=True)
    found = torch.zeros(len(groups), _CELLS, dtype=torch.float64, device=states.device)
    if not factor.any():
        return found
    scale = (step.advantages * factor).where(factor != 0, 0.0)[..., None].to(states)
    answers = (states * scale).transpose(1, 2) @ residuals
    return found.index_add_(0, place, answers.flatten(1).double())


def _moments(step: StepTensors, on: Tensor, cap: float, reduce: SumReduce | None) -> Tensor:
    """The rows [6, 261] of one step, over all ranks."""
    difference, on = log_difference(step.logp_ref, step.logp_inf, on)
    on = varied(step.group_ids, step.advantages, on)
    weight = ratio(difference).clamp(max=cap)
    age = age_class(step)
    _, place = torch.unique(step.group_ids, return_inverse=True)
    classes = []
    for own in ((age == number) & on for number in range(len(AGES))):
        d = _by_group(step, torch.where(own, 1.0 - weight, 0.0))
        c = _by_group(step, torch.where(own, weight, 0.0))
        tokens = torch.bincount(place, own.sum(-1).double(), minlength=len(d)).double()
        classes.append((d, c, tokens, own.any(-1).sum().double()))
    parts = [torch.stack(of_class) for of_class in zip(*classes)]
    d, c, tokens = (torch.cat([of.sum(0, keepdim=True), of]) for of in parts[:3])
    answers = torch.cat([on.any(-1).sum()[None].double(), parts[3]])
    last = [values.square().sum((1, 2)) for values in (d, c, c + d)]
    last += [tokens.square().sum(1), tokens.sum(1), answers]
    found = torch.cat([d.sum(1), c.sum(1), torch.stack(last, 1)], 1)
    found = found if reduce is None else reduce(found.flatten()).view(found.shape)
    return _row_of(found.cpu())


def _row_of(summed: Tensor) -> Tensor:
    """The rows of a step from its sums over groups. The sums are of d and the corrected gradient c
    [2 * 256], of |d|^2, |c|^2 and |c + d|^2, of squared tokens, of tokens and of answers."""
    d, c = summed[:, : 2 * _CELLS].split(_CELLS, 1)
    squares, corrected, plain, paired, tokens, answers = summed[:, 2 * _CELLS :].unbind(1)
    pairs = (tokens.square() - paired).clamp(min=0.0)
    at = torch.where(pairs > 0, paired / pairs.clamp(min=1.0), 0.0)

    def spread(total_: Tensor, own: Tensor) -> Tensor:  # sum over groups of squared deviations
        return own - at * (total_.square().sum(1) - own)

    added = spread(c, corrected) - spread(c + d, plain)
    # of a single group no deviation is known
    added = torch.where(pairs > 0, added, corrected - plain)
    return torch.cat([d, torch.stack([squares, paired, tokens, added, answers], 1)], 1)


class BreakEven:
    """The estimate of N* of one stream of steps: sums that decay, kept in checkpoints.

    `cap`: of the correction's ratio p_ref/p_inf. Every rank makes the same calls and holds the
    same sums."""

    def __init__(self, cap: float) -> None:
        self._cap = cap
        self._steps = 0
        self._sums: Tensor | None = None
        self._seen: list[tuple[float, float]] = []  # of batches, by their log-probs and tokens

    def follow(self, step: StepTensors, on: Tensor, reduce: SumReduce | None = None) -> bool:
        """Add a step, whose tokens `on` [B, T] count. False for one that says nothing: without a
        sketch, with fewer than two groups that vary, or a later epoch of its phase. Collective."""
        if step.sketch is None or self._again(step, reduce):
            return False
        found = _moments(step, on, self._cap, reduce)
        one_group = bool(found[0, _TOKENS] ** 2 <= found[0, _PAIRED])
        if one_group or not bool(torch.isfinite(found).all()):
            return False
        if self._sums is not None:
            kept = torch.full((_WIDTH,), DECAY, dtype=torch.float64)
            kept[[_SQUARES, _PAIRED]] = DECAY**2
            found += kept * self._sums
        self._sums = found
        self._steps += 1
        return True

    def _again(self, step: StepTensors, reduce: SumReduce | None) -> bool:
        """Return whether this batch was seen before: the products of its groups with themselves
        would count as products of different ones."""
        sent = (step.mask != 0) & torch.isfinite(step.logp_inf)
        logp, tokens = total([step.logp_inf.where(sent, 0.0), sent], reduce)
        known = any(
            tokens == n and math.isclose(logp, value, rel_tol=1e-9) for value, n in self._seen
        )
        if not known:
            self._seen = [*self._seen, (logp, tokens)][-_REMEMBERED:]
        return known

    def _rates(self) -> tuple[Tensor, Tensor]:
        """Squared bias of a token and variance that correcting one adds, each [6] float64, of all
        tokens and of each class. The fewer tokens a class had, the closer it is to the value of
        all."""
        assert self._sums is not None
        rows = self._sums
        tokens = rows[:, _TOKENS]
        products = rows[:, :_CELLS].square().sum(1) - rows[:, _SQUARES]
        pairs = tokens.square() - rows[:, _PAIRED]
        known = pairs > 0
        bias2 = torch.where(known, products / pairs.clamp(min=1.0), 0.0)
        added = rows[:, _ADDED] / tokens.clamp(min=1.0)
        whole = (1 - DECAY**self._steps) / (1 - DECAY)
        steps = whole * tokens / tokens[0]  # that a class has had, in batches
        own = torch.where(known, steps / (steps + 1.0), 0.0)
        own[0] = 1.0
        return own * bias2 + (1 - own) * bias2[0], own * added + (1 - own) * added[0]

    @property
    def _length(self) -> float:
        """Tokens of an answer."""
        assert self._sums is not None
        return float(self._sums[0, _TOKENS] / self._sums[0, _ANSWERS])

    def _mixed(self) -> tuple[Tensor, Tensor]:
        """`_rates`, in the first steps mixed with the squared bias that has the typical N*."""
        bias2, added = self._rates()
        sure = min(1.0, self._steps / SETTLED)
        typical = added.clamp(min=0.0) / (typical_n_star(self._length) * self._length)
        return sure * bias2 + (1 - sure) * typical, added

    def figures(self) -> dict[str, float]:
        """`bias2` and `variance_added` of an answer, and `n_star`, which is left out where no bias
        is seen. Empty before the first step."""
        if self._sums is None:
            return {}
        bias2, added = (float(rates[0]) for rates in self._rates())
        mixed = float(self._mixed()[0][0])
        found = {"bias2": bias2 * self._length**2, "variance_added": added * self._length}
        if mixed > 0:
            found["n_star"] = max(added / mixed, 0.0) / self._length
        return found

    def share(
        self, step: StepTensors, on: Tensor, reduce: SumReduce | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """The share of correction [B, T] with about the least mean squared error: for tokens of an
        age, of N tokens of groups that vary,

            alpha = N/(N + N*),   N* = variance added/bias^2 of a token of this age

        1 where correcting adds no variance, and the typical N* before any step was followed. Also
        {"alpha", "n_star"}: the mean share of the tokens `on`, and N* of all in answers.
        """
        moving = varied(step.group_ids, step.advantages, on)
        answers, tokens, every = total([moving.any(-1), moving, on], reduce)
        if self._sums is None:
            star = typical_n_star(tokens / max(answers, 1.0))
            shares = torch.full((_ROWS,), answers / (answers + star), dtype=torch.float64)
            figures = {"n_star": star}
        else:
            bias2, added = self._mixed()
            gained = tokens * bias2.clamp(min=0.0)
            shares = torch.where(added > 0, gained / (gained + added.clamp(min=1e-300)), 1.0)
            figures = {k: v for k, v in self.figures().items() if k == "n_star"}
        share = shares.to(step.logp_ref)[1 + age_class(step)]
        (applied,) = total([share.where(on, 0.0)], reduce)
        return share, {"alpha": applied / max(every, 1.0), **figures}

    def state(self) -> dict[str, Any]:
        """All that later steps depend on, as JSON holds it."""
        sums = None if self._sums is None else self._sums.tolist()
        return {"steps": self._steps, "sums": sums, "seen": self._seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._steps, sums = int(state["steps"]), state["sums"]
        self._sums = None if sums is None else torch.tensor(sums, dtype=torch.float64)
        self._seen = [(float(logp), float(tokens)) for logp, tokens in state["seen"]]
