"""The computations of a pass through the LM head, and their division into chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlcore.corrections.break_even import last_layer_sketch
from rlcore.corrections.dvp import OUTSIDE_LOGP
from rlcore.models.largest import largest_columns, row_maxima
from rlcore.objectives.kl import distill_topk, full_kl
from rlcore.objectives.specs import TeacherSpec
from rlcore.types import TokenScores

_FEWEST = 64  # positions that a chunk may always have: fewer would waste the products


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The outputs of the head pass besides log p and entropy.

    Example: HeadSpec(temperature=1.0, chunk=1024, topk=20)
    """

    temperature: float  # divides the logits, as the actor does
    chunk: int  # most positions per chunk
    topk: int = 0  # own top entries; 0: none
    # DVP's rho: probabilities are conditioned on {a: p(a) >= rho * max p}; None: on everything
    safe_set_rho: float | None = None
    # the ids asked for are the sets that truncated sampling kept, and probabilities are conditioned
    # on them; on everything where a row has none
    kept_sets: bool = False
    entropy_grad: bool = False  # whether gradients flow through the entropy
    ids_grad: bool = False  # and through the log-probs at the ids asked for (`corrections.centre`)
    # a bfloat16 model's logits are not rounded. On CPUs both passes are products in float32, of a
    # float32 copy of the weight. On GPUs tensor cores sum in float32 anyway and give that sum
    # (UNPROVEN there); the gradient at the logits is rounded to bfloat16 there, as that of every
    # other layer is
    fp32: bool = False
    sketch: bool = False  # of the gradient of the output layer, for N* (`corrections.break_even`)
    # the forward pass by one kernel (`fused_head_gpu`), where probabilities are of all tokens
    fused: bool = False
    invariant: bool = False  # logits of a position are the same to the bit in any company

    def slices(self, n: int) -> list[slice]:
        """The chunks of n positions: `chunk` at most, and an eighth of n, but never fewer than
        `_FEWEST` because of n (benchmarks/results/head_memory_cpu.md has times). 0 positions have
        one empty chunk, so that a rank that predicts no token joins the collectives."""
        rows = min(self.chunk, max(_FEWEST, -(-n // 8)))
        return [slice(start, min(start + rows, n)) for start in range(0, max(n, 1), rows)]


# KL of the policy to another one, from hidden states through the LM head, chunk by chunk.
#
# Nothing of size [N, V] survives a chunk: the backward pass recomputes it. Both policies are taken
# whole, also under a safe set: constrained to sets that differ, their KL would be infinite.


@dataclass(frozen=True, slots=True)
class TopkTarget:
    """A policy known at some tokens only: its log-probs [N, k] float32 at ids [N, k] int64 (-1
    pads)."""

    ids: Tensor
    logp: Tensor


@dataclass(frozen=True, slots=True)
class TeacherTarget:
    """A teacher, whole or at its likeliest tokens, and how the distance to it is taken."""

    spec: TeacherSpec
    policy: tuple[Tensor, Tensor] | TopkTarget


# (hidden states [N, D'], head weight [V, D']) of a whole policy, or some of its log-probs
KlTarget = tuple[Tensor, Tensor] | TopkTarget | TeacherTarget


def kl_pass(hidden: Tensor, weight: Tensor, target: KlTarget, spec: HeadSpec) -> Tensor:
    """KL(p_new || target) per position [N] float32, at the spec's temperature; of a teacher what
    `to_teacher` gives.

    hidden [N, D] and weight [V, D] are the policy's and carry the gradient.
    """
    if isinstance(target, TeacherTarget):
        return teacher_pass(hidden, weight, target, spec)
    if isinstance(target, TopkTarget):
        return topk_kl_pass(hidden, weight, target, spec)
    return full_kl_pass(hidden, weight, target, spec)


def full_kl_pass(
    hidden: Tensor, weight: Tensor, base: tuple[Tensor, Tensor], spec: HeadSpec
) -> Tensor:
    """Exact KL(p_new || p_base) over the vocabulary. base: its hidden states and head weight."""
    weight, w_whole = _as_products_take_it(weight, spec), _as_products_take_it(base[1], spec)

    def chunk(h: Tensor, w: Tensor, h_base: Tensor, w_base: Tensor) -> Tensor:
        new = _log_probs(h, w, spec.temperature)
        return full_kl(new, _log_probs(h_base, w_base, spec.temperature))

    parts = [
        checkpoint(chunk, hidden[s], weight, base[0][s], w_whole, use_reentrant=False)
        for s in spec.slices(len(hidden))
    ]
    return torch.cat(parts)


def topk_kl_pass(hidden: Tensor, weight: Tensor, target: TopkTarget, spec: HeadSpec) -> Tensor:
    """KL(p_new || target) over the target's tokens and one bin for all others."""
    weight = _as_products_take_it(weight, spec)

    def chunk(h: Tensor, w: Tensor, ids: Tensor, logp: Tensor) -> Tensor:
        new = _log_probs(h, w, spec.temperature)
        return distill_topk(new.gather(1, ids.clamp_min(0)), logp, ids, torch.ones_like(ids[:, 0]))

    parts = [
        checkpoint(chunk, hidden[s], weight, target.ids[s], target.logp[s], use_reentrant=False)
        for s in spec.slices(len(hidden))
    ]
    return torch.cat(parts)


def teacher_pass(hidden: Tensor, weight: Tensor, target: TeacherTarget, spec: HeadSpec) -> Tensor:
    """[N, 2] of `to_teacher`."""
    weight, given = _as_products_take_it(weight, spec), target.policy
    if isinstance(given, TopkTarget):
        parts = [(given.ids[s], given.logp[s]) for s in spec.slices(len(hidden))]
    else:
        whole = _as_products_take_it(given[1], spec)
        parts = [(given[0][s], whole) for s in spec.slices(len(hidden))]

    def chunk(h: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        new = _log_probs(h, w, spec.temperature)
        if isinstance(given, TopkTarget):
            return to_teacher(new, TopkTarget(a, b), target.spec)
        return to_teacher(new, _log_probs(a, b, spec.temperature), target.spec)

    found = [
        checkpoint(chunk, hidden[s], weight, *part, use_reentrant=False)
        for s, part in zip(spec.slices(len(hidden)), parts)
    ]
    return torch.cat(found)


def to_teacher(new: Tensor, teacher: Tensor | TopkTarget, spec: TeacherSpec) -> Tensor:
    """[N, 2] from log-probs [N, V] of the policy: its distance to the teacher, with the gradient;
    and 1 where both have the same likeliest token, else 0.

    With a teacher that is known at k tokens, `tail=sampled` leaves its estimate of the others out.
    """
    from rlcore.objectives.distillation import divergence, topk_divergence

    if isinstance(teacher, TopkTarget):
        at = new.gather(1, teacher.ids.clamp_min(0))
        distance = topk_divergence(at, teacher.logp, teacher.ids, spec)
        likeliest = teacher.ids[:, :1]
    else:
        distance = divergence(new, teacher, spec)
        likeliest = teacher.argmax(-1, keepdim=True)
    same = (new.argmax(-1, keepdim=True) == likeliest).any(-1)
    return torch.stack([distance, same.to(distance.dtype)], -1)


def _as_products_take_it(weight: Tensor, spec: HeadSpec) -> Tensor:
    return weight.float() if spec.fp32 else weight


def _log_probs(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = hidden.to(weight.dtype) @ weight.t()
    return torch.log_softmax(logits.float() / temperature, dim=-1)


# One pass over hidden states and the LM head: log-probs, entropy, top k and safe set, without [N,
# V] in float32.
#
# Positions go through the head in chunks. Of each chunk only `[N]`- and `[N, k]`-sized results and
# the softmax's row statistics survive; the backward pass recomputes the chunk's logits. A pass
# holds two `[chunk, V]` float32 buffers, and a chunk is an eighth of the positions at most, so that
# they are much smaller than [N, V] for a short micro-batch, too.
#
# Liger's fused kernels cannot replace it: `fused_linear_scaled_cross_entropy` (0.8.5) gives
# log-probs and entropy, but no top k, no log-probs of other ids and no safe set
# (benchmarks/results/head_memory_cpu.md, with the measured size of a chunk).


def _sums_in_float32(weight: Tensor) -> bool:
    """True where a product in the weight's dtype can give its float32 sums (`torch.mm(out_dtype=)`,
    which CPUs lack)."""
    return weight.is_cuda and weight.dtype != torch.float32


class _Buffers:
    """Scratch of one pass, reused by its chunks: `z` holds logits, `e` exponentials, both [chunk,
    V] float32. `weight` is [V, D] as the products take it, a float32 copy where asked for."""

    def __init__(self, rows: int, weight: Tensor, spec: HeadSpec, *, both: bool) -> None:
        shape, device, fp32 = (rows, weight.shape[0]), weight.device, spec.fp32
        self.invariant = spec.invariant
        self.sums = fp32 and _sums_in_float32(weight)
        self.weight = weight = weight.float() if fp32 and not self.sums else weight
        self.z = torch.empty(shape, dtype=torch.float32, device=device)
        self.e = torch.empty_like(self.z) if both else self.z
        self.low = (
            None
            if weight.dtype == torch.float32 or self.sums
            else torch.empty(shape, dtype=weight.dtype, device=device)
        )

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """`z[:n] = hidden @ weight.T / temperature`, the product in the weight's dtype, the result
        float32."""
        z, w = self.z[: hidden.shape[0]], self.weight.t()
        hidden = hidden.to(w.dtype)
        if self.sums:
            return torch.mm(hidden, w, out_dtype=torch.float32, out=z).mul_(1.0 / temperature)
        if self.low is None:
            if self.invariant:
                from rlcore.attention.bitwise import LEAST, linear

                if len(z) < LEAST:  # few rows would take another kernel
                    return z.copy_(linear(hidden, self.weight)).mul_(1.0 / temperature)
            return torch.addmm(z, hidden, w, beta=0.0, alpha=1.0 / temperature, out=z)
        low = torch.mm(hidden, w, out=self.low[: hidden.shape[0]])
        return torch.mul(low, 1.0 / temperature, out=z)


@dataclass(slots=True)
class _Outputs:
    """Result tensors of a pass over N positions; the optional ones exist when asked for."""

    logp: Tensor
    entropy: Tensor
    top: Tensor  # [N, 1] row maximum of the tempered logits
    total: Tensor  # [N, 1] sum of exp(logit - top), over the safe set if there is one
    topk_ids: Tensor | None = None
    topk_logp: Tensor | None = None
    at_ids: Tensor | None = None
    inside: Tensor | None = None
    coverage: Tensor | None = None

    @classmethod
    def empty(
        cls, n: int, k: int, ids: Tensor | None, conditioned: bool, device: torch.device
    ) -> _Outputs:
        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        out = cls(new(n), new(n), new(n, 1), new(n, 1))
        if k:
            out.topk_ids, out.topk_logp = new(n, k, dtype=torch.int64), new(n, k)
        if ids is not None:
            out.at_ids = new(*ids.shape)
        if conditioned:
            out.inside, out.coverage = new(n, dtype=torch.bool), new(n)
        return out


def _keep_safe(e: Tensor, rho: float) -> Tensor:
    """Zero the shifted exponentials outside the safe set (those below rho times the maximum, which
    is 1), in place."""
    return torch.threshold_(e, _below(rho), 0.0)


def _largest_kept(z: Tensor, kept: Tensor, top: Tensor) -> Tensor:
    """[n, 1]: the largest logit of each kept set, `top` where there is none. Logits shifted by it
    lose no precision where the set is far below the row's maximum."""
    values = z.gather(1, kept.clamp_min(0)).masked_fill_(kept < 0, -torch.inf)
    largest = values.amax(dim=1, keepdim=True)
    return torch.where(torch.isfinite(largest), largest, top)


def _keep_listed(e: Tensor, kept: Tensor) -> Tensor:
    """Zero the exponentials [n, V] outside the kept sets [n, k], in place, except in rows without a
    set."""
    columns, absent = kept.clamp_min(0), kept < 0
    values = e.gather(1, columns).masked_fill_(absent, 0.0)
    e.masked_fill_(~absent.all(dim=1, keepdim=True), 0.0)
    return e.scatter_add_(1, columns, values)


def _condition(e: Tensor, spec: HeadSpec, kept: Tensor | None) -> Tensor:
    """Zero the exponentials of tokens outside the set that probabilities are conditioned on, in
    place."""
    if spec.safe_set_rho is not None:
        e = _keep_safe(e, spec.safe_set_rho)
    return e if kept is None else _keep_listed(e, kept)


def _below(rho: float) -> float:
    """The largest float32 below `rho`: `threshold_` zeroes what is not greater, the safe set keeps
    equality."""
    return float(torch.nextafter(torch.tensor(rho, dtype=torch.float32), torch.tensor(0.0)))


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """sum_v a[n, v] * b[n, v] without a temporary of [n, V]."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).view(-1)


# seven parameters: the tensors of one chunk, which a record would only rename
def _score_chunk(
    out: _Outputs,
    s: slice,
    z: Tensor,
    e: Tensor,
    targets: Tensor,
    ids: Tensor | None,
    spec: HeadSpec,
) -> None:
    """Fill rows `s` of `out` from the chunk's tempered logits `z`; `e` is scratch. Both are
    overwritten."""
    k = 0 if out.topk_ids is None else out.topk_ids.shape[1]
    kept = ids if spec.kept_sets else None
    out.top[s], blocks = row_maxima(z, k)
    if kept is not None:
        out.top[s] = _largest_kept(z, kept, out.top[s])
    z.sub_(out.top[s])  # shifted first: entropy and log-probs then lose nothing to cancellation
    torch.exp(z, out=e)
    total = e.sum(dim=1)
    if out.coverage is not None:
        everything, total = total, _condition(e, spec, kept).sum(dim=1)
        out.coverage[s] = total / everything
    out.total[s] = total.unsqueeze(1)
    log_total = total.log().unsqueeze(1)
    out.entropy[s] = log_total.squeeze(1) - _row_dot(e, z) / total

    def at(columns: Tensor) -> Tensor:
        values = z.gather(1, columns) - log_total
        if out.coverage is None:
            return values
        return values.masked_fill_(e.gather(1, columns) == 0.0, OUTSIDE_LOGP)

    out.logp[s] = at(targets.unsqueeze(1)).squeeze(1)
    if out.inside is not None:
        out.inside[s] = e.gather(1, targets.unsqueeze(1)).squeeze(1) > 0.0
    if out.topk_ids is not None and out.topk_logp is not None:
        columns = largest_columns(z, blocks, k)
        out.topk_ids[s], out.topk_logp[s] = columns, at(columns)
    if ids is not None and out.at_ids is not None:
        out.at_ids[s] = at(ids.clamp_min(0)).masked_fill_(ids < 0, 0.0)


# six parameters: the tensors of the pass, which a record would only rename
def _score_chunks(
    out: _Outputs,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ids: Tensor | None,
    spec: HeadSpec,
) -> Tensor | None:
    """Fill `out`, chunk by chunk; the sketch [n, 32] if there is one."""
    chunks = spec.slices(len(hidden))
    buffers = _Buffers(chunks[0].stop if chunks else 0, weight, spec, both=True)
    sketches = []
    for s in chunks:
        z, e = buffers.logits(hidden[s], spec.temperature), buffers.e[: s.stop - s.start]
        its_ids = None if ids is None else ids[s]
        _score_chunk(out, s, z, e, targets[s], its_ids, spec)
        if spec.sketch:
            sketches.append(last_layer_sketch(hidden[s], e, out.total[s], targets[s]))
    return torch.cat(sketches) if spec.sketch else None


class _HeadFunction(torch.autograd.Function):
    """(logp, entropy, topk_ids, topk_logp, logp_at_ids, inside, coverage, sketch).

    Gradients flow through logp, entropy and logp_at_ids.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ids: Tensor | None,
        spec: HeadSpec,
    ) -> tuple:
        n, k = hidden.shape[0], min(spec.topk, weight.shape[0])
        conditioned = spec.safe_set_rho is not None or spec.kept_sets
        out = _Outputs.empty(n, k, ids, conditioned, hidden.device)
        if spec.fused and not conditioned:
            from rlcore.learner.fused_head_gpu import score

            sketch = score(out, hidden, weight, targets, ids, spec)
        else:
            sketch = _score_chunks(out, hidden, weight, targets, ids, spec)
        kept = ids if spec.kept_sets else None
        ctx.save_for_backward(
            hidden,
            weight,
            targets,
            out.top,
            out.total,
            out.entropy,
            out.inside,
            kept,
            ids if spec.ids_grad else None,
        )
        ctx.spec = spec
        extras = (out.topk_ids, out.topk_logp, out.at_ids, out.inside, out.coverage, sketch)
        through = out.at_ids if spec.ids_grad else None
        constant = (t for t in extras if t is not None and t is not through)
        ctx.mark_non_differentiable(*constant)
        # no zero gradients of [N] for outputs that no loss uses
        ctx.set_materialize_grads(False)
        return (out.logp, out.entropy, *extras)

    @staticmethod
    def backward(
        ctx: Any,
        g_logp: Tensor | None,
        g_entropy: Tensor | None,
        _ids: Tensor | None,
        _topk: Tensor | None,
        g_at: Tensor | None,
        *_: Any,
    ) -> tuple:
        hidden, weight, targets, top, total, entropy, inside, kept, ids = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        g_entropy = g_entropy if spec.entropy_grad else None
        g_at = None if ids is None else g_at
        if g_logp is None and g_entropy is None and g_at is None:
            return None, None, None, None, None
        g = torch.zeros_like(entropy) if g_logp is None else g_logp
        if inside is not None:
            g = g.masked_fill(~inside, 0.0)  # log p of a token outside the set is a constant
        d_hidden = torch.empty_like(hidden)
        d_weight = None
        if ctx.needs_input_grad[1]:  # with adapters the head's weight is frozen
            d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        # logits are computed again, chunk by chunk, instead of having been kept
        chunks = spec.slices(hidden.shape[0])
        rows = chunks[0].stop if chunks else 0
        buffers = _Buffers(rows, weight, spec, both=g_entropy is not None)
        for s in chunks:
            z = buffers.logits(hidden[s], spec.temperature).sub_(top[s])
            e = torch.exp(z, out=buffers.e[: len(z)])
            _condition(e, spec, None if kept is None else kept[s])
            ge = None if g_entropy is None else g_entropy[s]
            at = None if g_at is None else _Slopes.of(ids[s], g_at[s], e, inside is not None)
            whole = g[s] if at is None else g[s] + at.slopes.sum(1)
            dz = _d_logits(z, e, total[s], entropy[s], whole, ge, spec.temperature)
            dz.scatter_add_(1, targets[s].unsqueeze(1), g[s].unsqueeze(1) / spec.temperature)
            if at is not None:  # after the target, which may be one of them: the order is fixed
                dz.scatter_add_(1, at.columns, at.slopes / spec.temperature)
            dz = dz.to(buffers.weight.dtype)
            d_hidden[s] = torch.mm(dz, buffers.weight)
            if d_weight is not None:
                _add_product(d_weight, dz, hidden[s])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


class _Slopes(NamedTuple):
    """The gradient at the log-probs of a chunk's ids, [n, k] each."""

    columns: Tensor
    slopes: Tensor  # 0 where there is no id, and where its log-prob is a constant

    @classmethod
    def of(cls, ids: Tensor, slopes: Tensor, e: Tensor, conditioned: bool) -> _Slopes:
        columns, constant = ids.clamp_min(0), ids < 0
        if conditioned:
            constant = constant | (e.gather(1, columns) == 0.0)
        return cls(columns, slopes.masked_fill(constant, 0.0))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a.T @ b, in the float32 of `total`."""
    if a.dtype == torch.float32:
        total.addmm_(a.t(), b.float())
    else:
        total.add_(torch.mm(a.t(), b))


# seven parameters: the tensors of one chunk, which a record would only rename
def _d_logits(
    z: Tensor,
    e: Tensor,
    total: Tensor,
    entropy: Tensor,
    g: Tensor,
    ge: Tensor | None,
    temperature: float,
) -> Tensor:
    """The part of the gradient at the logits before temperature that every token of the vocabulary
    has: -(g p + ge p (log p + H)) / T, in place of `z` or `e`. g [n] is the sum of a row's slopes.

    z: [n, V] shifted tempered logits, not read when no gradient goes through the entropy; e: their
    exponentials.
    """
    scale = 1.0 / (temperature * total)  # [n, 1]: p / T = e * scale
    if ge is None:
        return e.mul_(-g.unsqueeze(1) * scale)
    z.sub_((total.log().squeeze(1) - entropy).unsqueeze(1))  # log p + H
    z.mul_(-ge.unsqueeze(1) * scale).sub_(g.unsqueeze(1) * scale)
    return z.mul_(e)


def head_pass(
    hidden: Tensor, weight: Tensor, targets: Tensor, spec: HeadSpec, ids: Tensor | None = None
) -> TokenScores:
    """Scores of N positions.

    hidden: [N, D] float32 or bfloat16, the state that predicts each target. weight: [V, D], same
    dtype. targets: [N] int64. ids: [N, k'] int64, -1 where there is none. Logits are `hidden @
    weight.T / temperature`, rounded to that dtype unless `spec.fp32`. Gradients flow to `hidden`
    and `weight` through `logp` (and `entropy` if `spec.entropy_grad`, `logp_at_ids` if
    `spec.ids_grad`). With a safe set (DVP) they
    are exactly 0 at logits outside it, and `logp` of a token outside it is the constant
    OUTSIDE_LOGP. With kept sets, which are `ids`, the same is true of these sets.
    """
    logp, entropy, *extras = _HeadFunction.apply(hidden, weight, targets, ids, spec)
    return TokenScores(logp, entropy if spec.entropy_grad else entropy.detach(), *extras)


class Head(nn.Module):
    """Holds the LM-head weight as its own parameter, so that ZeRO-3's hooks gather it around this
    pass."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        ids: Tensor | None,
        spec: HeadSpec,
        base: KlTarget | None,
    ) -> tuple:
        """The KL to `base` or None, then the fields of TokenScores: DeepSpeed inspects only tuples.

        hidden [N, D], targets [N], ids [N, k'] or None.
        """
        kl = None if base is None else kl_pass(hidden, self.weight, base, spec)
        s = head_pass(hidden, self.weight, targets, spec, ids)
        extras = s.topk_ids, s.topk_logp, s.logp_at_ids, s.inside, s.coverage, s.sketch
        return kl, s.logp, s.entropy, *extras
