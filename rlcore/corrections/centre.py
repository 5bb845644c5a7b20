"""Score centering: the expected score leaves the loss, so that a policy does not drift where its
actors differ from it.

With q the actor's and p the learner's probabilities, the gradient of a token drawn from q and
weighed by w(p/q) is A w grad log p. Its mean at a state is not 0 for a constant A. So a state whose
advantages do not average to 0 moves p against q: drift, E[A | state](q - p). The term takes sum_v
q_v w_v A grad log p_v away, over the actor's stored tokens and one bin for all others. The expected
gradient in the logits is then q (A - E_q A) without weights, the actor's own policy gradient. With
weights that are whole ratios nothing is left to take away. It leaves the bias of credit, which
weights correct.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlcore.corrections.numerics import (
    CLAMP,
    at_least_float32,
    first_occurrence,
    probability,
    same_shape,
    total,
)
from rlcore.corrections.specs import CorrectionSpec
from rlcore.interfaces import Corrected, Correction, Needs, Reduce, WeighAt
from rlcore.lazy import torch
from rlcore.objectives.specs import ObjectiveSpec, loss_class
from rlcore.spec import refuse
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.objectives.protocols import PolicyLoss

TAIL = 1e-6  # least mass outside the stored tokens
LARGEST = 100.0  # of the tail's factor
_TINY = 1e-30  # keeps logarithms finite


class CentreSpec(CorrectionSpec):
    """Score centering (arXiv 2609.20807): a term in the loss that weighs nothing.

    With the whole vocabulary stored it adds no bias. With k tokens its expected gradient
    in the logits is off by at most 2 |A| q_T in L1, q_T the actor's mass outside them."""

    method: ClassVar[str] = "rlcore.corrections.centre:Centre"
    sequence_wise: ClassVar[bool] = True
    centres: ClassVar[bool] = True

    @property
    def token_alone(self) -> bool:
        return True

    @property
    def needs_topk(self) -> bool:
        return True

    def beside(
        self, key: str, chosen: Mapping[str, CorrectionSpec], objective: ObjectiveSpec
    ) -> None:
        refuse(
            key.startswith("correction.shadow"),
            f"{key}=centre would measure weights, and centre has none: leave it out, or use "
            "correction=[centre].",
        )
        for label, spec in chosen.items():
            refuse(
                not spec.token_alone,
                f"{key}=[{','.join(chosen)}] needs weights that depend on one token alone, and "
                f"{label} as it is set weighs by more (a sequence, a draw, a set, a "
                "tail that is left out): use tis, mis, icepop or ais by token, or jackpot with "
                "mode=expected, or no centre.",
            )
        refuse(
            not loss_class(objective.loss).token_wise,
            f"{key}=centre takes the mean of each token's part in the loss, and algorithm.loss="
            f"{objective.loss} is not known to be a sum over tokens: use algorithm.loss=ppo, "
            "cispo, sapo or reinforce, or leave centre out.",
        )

    def cautions(self, *, critic: bool, stored: int, floor: float) -> Iterator[str]:
        if critic:
            yield (
                "correction=centre removes E[A | state](q - p), which a critic's advantages leave "
                "near 0: it costs its term and gains little"
            )
        if stored < 8:
            yield (
                f"correction=centre knows {stored} tokens of the actors' (rollout.logprobs_k), so "
                "that its term is off by up to twice the mass of all others: use 8 or more, 20 is "
                "usual"
            )
        if floor > 0:
            yield (
                "correction=centre follows the actors' policy, floor included, so that it does not "
                "remove what a probability floor draws: use correction=[dvp,tis] where an answer "
                "has such tokens (mismatch/floor_tokens)"
            )


# ----- the term of a state -----


def with_tail(logp: Tensor, valid: Tensor) -> Tensor:
    """[..., k + 1] float64: the probabilities of the stored tokens that are `valid` [..., k], 0 for
    others, and the mass outside them, at least 1e-6.

    Where both policies have less, the tail's factor is then 1: equal policies change nothing, and
    stored sets that are whole need no other formula.
    """
    known = probability(logp, valid)
    return torch.cat([known, (1.0 - known.sum(-1, keepdim=True)).clamp(min=TAIL)], -1)


def weighted_mass(
    q: Tensor, logp_new: Tensor, logp_ref: Tensor, valid: Tensor, weigh_at: WeighAt | None
) -> Tensor:
    """[..., k + 1] float64: m_v = q_v w(p_v/q_v) at the stored tokens, and the tail's
    q_T w(p_T/q_T) = alpha p_T.

    q: the actor's, `with_tail`. Log-probs [..., k] of the policies that weights are computed from:
    log p_ref belongs to the policy they lead to. `weigh_at`: None where w is 1.
    """
    if weigh_at is None:
        return q
    new, ref, inf = (p.clamp(min=_TINY).log() for p in (*_tails(logp_new, logp_ref, valid), q))
    # a stored token that is no id has no mass, and its weight no meaning
    return torch.where(q > 0, q * weigh_at(new, ref, inf).to(q), 0.0)


def _tails(logp_new: Tensor, logp_ref: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    return with_tail(logp_new, valid), with_tail(logp_ref, valid)


def centre_coefficients(mass: Tensor, p: Tensor, slope: Tensor | float = 1.0) -> Tensor:
    """c_v = m_v - alpha p_v [..., k] float64, alpha = m_T/p_T, at most 100. The loss gains A sum_v
    c_v log p_v, the gradient of A sum m log p over the whole vocabulary.

    mass, p [..., k + 1]: of `weighted_mass`, and the learner's, `with_tail`. `slope`: of the loss
    at each of these tokens, where it is not the slope of log p.
    """
    alpha = (mass[..., -1:] / p[..., -1:]).clamp(max=LARGEST)
    m, tail = mass[..., :-1], alpha
    if not isinstance(slope, float):
        m, tail = m * slope[..., :-1], alpha * slope[..., -1:]
    return m - tail * p[..., :-1]


def centre(
    topk_ids: Tensor, topk_logp_inf: Tensor, logp_at: Tensor, *, weigh: WeighAt | None = None
) -> tuple[Tensor, Tensor]:
    """(c [..., k], S = sum c [...]) of each position (arXiv 2609.20807). A (c - S p), with c at the
    stored tokens, leaves the gradient in the logits of a token of advantage A.

    Args: the actor's stored ids [..., k] (-1 pads; of a repeated one the first counts) and their
    log-probs. Then the learner's log-probs at them over its full vocabulary; `weigh(log p, log p,
    log q)`: the token's weight, None for 1. Nothing carries a gradient. The mean over q of A times
    the centred score is q (A - E_q A) without weights if all of q is stored. Else it is off by at
    most 2 |A| q_T in L1. Under truncated sampling both log-probs are conditioned on the stored set.
    """
    same_shape(topk_ids=topk_ids, topk_logp_inf=topk_logp_inf, logp_at=logp_at)
    valid = first_occurrence(topk_ids.long())
    q, p = with_tail(topk_logp_inf, valid), with_tail(logp_at, valid)
    mass = weighted_mass(q, logp_at, logp_at, valid, weigh)
    c = torch.where(valid, centre_coefficients(mass, p), 0.0)
    return c, c.sum(-1)


# ----- the term of a loss -----


@dataclass(frozen=True, slots=True)
class Centred:
    """The inputs of the term for some whole episodes, in addition to the loss's inputs.

    Example: Centred(mass, valid, logp_at, None)
    """

    mass: Tensor  # [b, T, k + 1], `Corrected.centre`
    valid: Tensor  # [b, T, k] bool: first occurrences of the actor's stored ids
    logp_at: Tensor  # [b, T, k]: log p_new at them, with the gradient
    # [b, T, k]: of the policy that the loss's ratio is to; None: that ratio is 1
    anchor_at: Tensor | None


def centring(loss: PolicyLoss, term: Centred, advantages: Tensor, mask: Tensor) -> Tensor:
    """[b, T]: the term that a per-token loss gains, A sum_H c_v log p_v, of value 0.

    The loss's own part of a token may not be A w log p (PPO's clip and ratio, CISPO's weight,
    SAPO's gate). Then the loss's slope at each token is averaged. advantages, mask [b, T].
    """
    on = (mask != 0)[..., None] & term.valid
    p = with_tail(term.logp_at, term.valid)
    ratio = torch.zeros_like(p)
    if term.anchor_at is not None:
        anchor = with_tail(term.anchor_at, term.valid)
        known = torch.cat([term.valid, torch.ones_like(mask != 0)[..., None]], -1)
        difference = p.clamp(min=_TINY).log() - anchor.clamp(min=_TINY).log()
        ratio = torch.where(known, difference, 0.0).clamp(-CLAMP, CLAMP)
    slope = _slope(loss, ratio, torch.where(mask != 0, at_least_float32(advantages), 0.0))
    c = torch.where(on, centre_coefficients(term.mass.double(), p, slope), 0.0)
    logp = torch.where(on, term.logp_at, 0.0)
    return (c.to(logp.dtype) * (logp - logp.detach())).sum(-1)


def _slope(loss: PolicyLoss, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """d objective / d log ratio [b, T, n] of n tokens at each position, of its advantage [b, T]."""
    rows = log_ratio.flatten(0, 1)
    with torch.enable_grad():
        leaf = rows.detach().requires_grad_()
        each = advantages.flatten().to(rows)[:, None].expand_as(rows)
        objective, _ = loss(leaf, each, torch.ones_like(rows, dtype=torch.bool))
        (found,) = torch.autograd.grad(objective.sum(), leaf)
    return found.view(log_ratio.shape)


class Centre(Correction):
    """The term `A sum_H c_v log p_v` next to the weights of the list (score centering, arXiv
    2609.20807), with the mask and the denominator of the loss that it joins.

    Weights and mask stay as they are. `tail_mass` is the actor's mass outside its stored tokens."""

    needs = Needs(topk=True)

    def __init__(self, spec: CentreSpec, run_seed: int) -> None:
        self.spec = spec

    def centre(self, step: StepTensors, weigh_at: WeighAt | None) -> Tensor | None:
        ids, logp_inf, logp_ref = step.topk_ids_inf, step.topk_logp_inf, step.ref_logp_at_inf_ids
        if ids is None or logp_inf is None or logp_ref is None:
            raise ValueError("correction=centre needs the actor's top k and the learner's")
        valid = first_occurrence(ids.long())
        q = with_tail(logp_inf, valid)
        # p_new is p_ref wherever no correction asks for it
        logp_new = logp_ref if step.new_logp_at_inf_ids is None else step.new_logp_at_inf_ids
        return weighted_mass(q, logp_new, logp_ref, valid, weigh_at).to(step.logp_inf.dtype)

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        assert step.topk_ids_inf is not None and step.topk_logp_inf is not None
        valid = first_occurrence(step.topk_ids_inf.long())
        tail = with_tail(step.topk_logp_inf, valid)[..., -1]
        summed, tokens = total([tail.where(current.mask, 0.0), current.mask], reduce)
        return Corrected(current.weight, current.mask, {"tail_mass": summed / max(tokens, 1.0)})
