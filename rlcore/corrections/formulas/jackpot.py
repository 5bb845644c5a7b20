"""Jackpot in one call: rejection and weights of the tokens of a batch, or of one of its
micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.corrections.formulas.arguments import InvalidArgument, require, same_shape
from rlcore.corrections.formulas.numerics import SumReduce
from rlcore.corrections.formulas.obrs import (
    calibrated,
    calibration_sums,
    jackpot_weight,
    obrs_acceptance,
    obrs_normalizer,
)
from rlcore.corrections.specs import JackpotSpec


class TopK(NamedTuple):
    """Most likely tokens of the actor and of the target policy, as `obrs_normalizer` takes them."""

    ids_inf: Tensor  # [B, T, k], -1 pads
    logp_inf: Tensor  # [B, T, k]
    ids_target: Tensor  # [B, T, k2], -1 pads
    logp_target: Tensor  # [B, T, k2]
    logp_target_at_inf: Tensor  # [B, T, k], the target's log-probs of ids_inf


@dataclass(frozen=True, slots=True)
class JackpotTokens:
    """What Jackpot looks at, [B, T] each.

    Example: JackpotTokens(logp_new, logp_ref, logp_inf, mask, token_uniforms(0, "obrs", step,
    sample_ids, length), TopK(...))
    """

    logp_new: Tensor
    logp_ref: Tensor
    logp_inf: Tensor
    mask: Tensor  # bool or 0/1
    uniforms: Tensor  # in [0, 1): a token is accepted where its own is below its probability
    topk: TopK | None = None  # of the target policy; not needed for mode=mask or normaliser=none

    def target(self, settings: JackpotSpec) -> Tensor:
        """log p_t [B, T]."""
        return self.logp_new if settings.target == "new" else self.logp_ref


class JackpotWeights(NamedTuple):
    """Example: JackpotWeights(weight, keep, probability, accepted, None, None, None)"""

    weight: Tensor  # [B, T], multiplies the objective of the tokens that stay; 1 outside the mask
    keep: Tensor  # [B, T] bool: tokens that stay in the loss and its denominator
    probability: Tensor  # [B, T] of acceptance
    accepted: Tensor  # [B, T] bool, the draws
    z: Tensor | None  # [B, T] calibrated normaliser, where weights carry one
    z_approx: Tensor | None  # [B, T] before calibration
    unknown: Tensor | None  # [B, T] share of V_k without p_inf


def jackpot_accumulate(tokens: JackpotTokens, settings: JackpotSpec | None = None) -> Tensor:
    """Statistics [3] float64 of some of a batch's tokens for Z's calibration, which add up over
    micro-batches and ranks."""
    settings = _checked(tokens, settings)
    probability, accepted = _acceptance(tokens, settings)
    z_approx, _ = _normaliser(tokens, settings)
    drawn = accepted if settings.alpha_hat == "bernoulli" else probability
    return calibration_sums(z_approx, drawn, tokens.mask)


def jackpot(
    tokens: JackpotTokens,
    settings: JackpotSpec | None = None,
    *,
    statistics: Tensor | None = None,
    reduce: SumReduce | None = None,
) -> JackpotWeights:
    """Which tokens stay, and their weights (Jackpot sections 3 and 4). Nothing waits for the
    device.

    `settings` None: the defaults; its normaliser `auto` is the paper's here. `statistics`: the
    summed `jackpot_accumulate` of the whole batch when `tokens` are only some of it; None: these
    are all, or all of this rank if `reduce` sums over ranks. Raises InvalidArgument.
    """
    settings = _checked(tokens, settings)
    on = tokens.mask != 0
    probability, accepted = _acceptance(tokens, settings)
    keep = on if settings.mode == "reweight" else on & accepted
    if settings.mode == "mask":
        weight = torch.ones_like(probability)
        return JackpotWeights(weight, keep, probability, accepted, None, None, None)
    if settings.normaliser == "none":
        # z = 1 leaves max(lam, p_t/p_inf); rejected tokens stay, so that all of them are divided by
        weight = _weight(torch.ones_like(probability), tokens, settings)
        weight = torch.where(on, torch.where(accepted, weight, 0.0), 1.0)
        return JackpotWeights(weight, on, probability, accepted, None, None, None)
    z_approx, unknown = _normaliser(tokens, settings)
    if statistics is None:
        drawn = accepted if settings.alpha_hat == "bernoulli" else probability
        statistics = calibration_sums(z_approx, drawn, on)
        statistics = statistics if reduce is None else reduce(statistics)
    z, _, _ = calibrated(z_approx, on, statistics, lam=settings.lam)
    weight = torch.where(on, _weight(z, tokens, settings), 1.0)
    return JackpotWeights(weight, keep, probability, accepted, z, z_approx, unknown)


def _checked(tokens: JackpotTokens, settings: JackpotSpec | None) -> JackpotSpec:
    same_shape(
        logp_new=tokens.logp_new,
        logp_ref=tokens.logp_ref,
        logp_inf=tokens.logp_inf,
        mask=tokens.mask,
        uniforms=tokens.uniforms,
    )
    settings = JackpotSpec() if settings is None else settings
    require(
        not (settings.normaliser == "none" and settings.mode != "both"),
        f"normaliser=none with mode={settings.mode} is not accepted: use mode=both.",
    )
    return settings


def _acceptance(tokens: JackpotTokens, settings: JackpotSpec) -> tuple[Tensor, Tensor]:
    probability = obrs_acceptance(tokens.target(settings), tokens.logp_inf, lam=settings.lam)
    return probability, tokens.uniforms < probability


def _normaliser(tokens: JackpotTokens, settings: JackpotSpec) -> tuple[Tensor, Tensor]:
    if tokens.topk is None:
        raise InvalidArgument("topk=None is not accepted: Z is estimated from both sides' top k.")
    return obrs_normalizer(
        *tokens.topk, lam=settings.lam, missing=settings.missing, tail=settings.tail
    )


def _weight(z: Tensor, tokens: JackpotTokens, settings: JackpotSpec) -> Tensor:
    # without the ratio p_new/p_ref in the loss, the weight itself leads to p_new (B.1)
    logp_ref = tokens.logp_new if settings.short_circuit else tokens.logp_ref
    return jackpot_weight(
        z,
        tokens.logp_new,
        logp_ref,
        tokens.logp_inf,
        target=settings.target,
        lam=settings.lam,
        c1=settings.c1,
        c2=settings.c2,
    )
