"""Jackpot: optimal budgeted rejection of tokens, and weights for those that stay.

Denominators and rejected tokens. At a state s a token x ~ p_inf stays with probability a(x) and
then follows `q = min(p_inf, p_t/lam) / Z(s)`. The weight `Z(s) max(lam, p_t/p_inf)` is p_t/q, so
the mean over ACCEPTED tokens has expectation `E_{x~p_t}[f]` in every state. Dividing the sum over
accepted tokens by all N proposed ones would give `Z(s) E_{p_t}[f]`, an unintended scaling by the
acceptance rate. So under the paper's normaliser a rejected token leaves the mask, and a token-mean
divides by the tokens kept. Over several states this weighs state s by its Z(s), the share of its
tokens that stayed.

Without Z, the sum over accepted tokens of `max(lam, p_t/p_inf) f` divided by all N proposed ones
has expectation `E_{x~p_t}[f]` in every state, and all states count the same. Without Z a rejected
token stays in the mask with weight 0, as the zeros of MIS, IcePop and DVP do. `normaliser=auto`
takes this wherever the mean is not over all tokens at once. Z would shrink a sum over a constant by
the acceptance rate. It would bias a mean of sequence means (by 25% on the bandit of the tests, at
75% acceptance). Under token-mean Z has 6% to 19% less variance and, weighing states by their
acceptance, 2% bias at 70% acceptance (benchmarks/evidence/jackpot_variance.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from rlcore.corrections.numerics import (
    InvalidArgument,
    SumReduce,
    at_least_float32,
    at_least_one,
    choice,
    log_difference,
    positive,
    ratio,
    require,
    same_shape,
    token_uniforms,
    total,
)
from rlcore.corrections.obrs import (
    LAM,
    MISSING,
    TINY,
    Missing,
    Tail,
    calibrated,
    calibration_sums,
    obrs_acceptance,
    obrs_divergence,
    obrs_normalizer,
    ratio_or_zero,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Needs, Reduce, WeighAt
from rlcore.lazy import torch
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.spec import Unread, refuse, setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class JackpotSpec(CorrectionSpec):
    """Optimal budgeted rejection sampling and reweighting (papers/jackpot.txt).

    Biased by the truncation at c1 and c2. normaliser=paper also by states of acceptance: a state
    counts by the share of its tokens that stay, and a mean that is not over all tokens at once
    shrinks. The ablations mode=mask and mode=reweight are each half a correction, and biased:
    tokens that stay do not follow p_t, or their weights are given to all tokens."""

    method: ClassVar[str] = "rlcore.corrections.jackpot:Jackpot"
    statistics: ClassVar[Statistics] = {
        "truncated_share": ("share", "tokens whose weight is cut at its cap"),
        "c2_truncated_share": ("share", "tokens whose factor back to p_ref is cut at c2"),
        "acceptance": ("share", "tokens accepted"),
        "acceptance_expected": ("share", "mean probability of acceptance"),
        "weight_mean": ("1", "mean weight"),
        "z": ("probability", "normaliser, its bias corrected"),
        "z_approx": ("probability", "normaliser on the stored top k"),
        "kappa": ("1", "bias correction of z_approx"),
        "unknown_share": ("share", "top-k entries of the learner that the actor did not return"),
    }
    weighs: ClassVar[bool] = True

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("alpha_hat", "missing", "tail"),
            lambda spec: not spec.needs_topk,
            "mode=mask and normaliser=none (auto but for token-mean) have no Z: set it to paper",
        ),
        Unread(("c1", "c2", "normaliser"), lambda spec: spec.mode == "mask", "mode=mask weighs 1"),
        Unread(("alpha_hat",), lambda spec: spec.mode == "expected", "mode=expected draws none"),
        Unread(
            ("c2",),
            lambda spec: spec.mode != "mask" and (spec.target == "ref" or spec.short_circuit),
            "target=ref and short_circuit=true have no factor p_ref/p_new",
        ),
    )

    mode: Literal["mask", "reweight", "both", "expected"] = setting(
        "both", "reject tokens, weigh, or both; expected: both, averaged over the draws"
    )
    target: Target = setting("ref", "p_t: ref without staleness, new with it")
    lam: float = setting(LAM, "lambda: accept with min(1, p_t/(lambda p_inf))", gt=0)
    c1: float = setting(3.0, "cap of Z * max(lambda, p_t/p_inf)", ge=1)
    c2: float = setting(3.0, "cap of p_ref/p_new, target new", ge=1)
    alpha_hat: Literal["bernoulli", "expected"] = setting(
        "expected", "the accepted share: drawn, or its expectation"
    )
    missing: Missing = setting(MISSING, "p_inf of tokens the actor did not return")
    tail: Tail = setting("residual", "mass outside the stored top k")
    short_circuit: bool = setting(False, "switch the inner PPO clip off, as TIS-adjusted does")
    normaliser: Literal["auto", "paper", "none"] = setting(
        "auto",
        "paper: weights carry Z, rejected tokens leave the denominator; none: no Z, they stay in "
        "it with weight 0; auto: paper under token-mean, else none",
    )

    @property
    def inner_clip_off(self) -> str:
        return "short_circuit" if self.short_circuit else ""

    @property
    def needs_topk(self) -> bool:
        return self.mode != "mask" and self.normaliser != "none"  # Z is estimated from them

    @property
    def token_alone(self) -> bool:
        return self.mode == "expected" and (self.tail == "residual" or not self.needs_topk)

    @property
    def rejects(self) -> bool:
        return self.mode in ("mask", "both")

    @property
    def draws_alpha(self) -> bool:
        """True if alpha_hat is the share of tokens that the draws accepted."""
        return self.alpha_hat == "bernoulli" and self.mode != "expected"

    @property
    def biases(self) -> tuple[Bias, ...]:
        if self.mode == "mask":
            return (Bias("half a correction", where="matched"),)
        caps = Bias("truncation", {"c1": WIDE, "c2": WIDE})
        if self.mode == "reweight":
            return (caps, Bias("half a correction", where="matched"))
        states = Bias("states of acceptance", {"normaliser": "none"})
        return (caps, states) if self.normaliser != "none" else (caps,)

    def under(self, objective: ObjectiveSpec) -> JackpotSpec:
        if self.normaliser != "auto":
            return self
        # Weights with Z are exact in a mean over all tokens kept. They shrink a sum over a constant
        # by the acceptance rate, and bias a mean of sequence means.
        drop = objective.aggregation != "token-mean" and self.mode in ("both", "expected")
        return self.model_copy(update={"normaliser": "none" if drop else "paper"})

    def check(self, key: str) -> None:
        refuse(
            self.normaliser == "none" and self.mode not in ("both", "expected"),
            f"{key}.normaliser=none with {key}.mode={self.mode} is not accepted: without Z, tokens "
            f"are both rejected and weighed; use {key}.mode=both or {key}.normaliser=auto.",
        )
        refuse(
            self.short_circuit and self.target != "new",
            f"{key}.short_circuit=true with {key}.target={self.target} leaves nothing that leads "
            f"to p_new: use {key}.target=new.",
        )


Target = Literal["ref", "new"]
_JACKPOT = JackpotSpec()


def jackpot_weight(
    z: Tensor,
    logp_new: Tensor,
    logp_ref: Tensor,
    logp_inf: Tensor,
    *,
    target: Target = "new",  # the contract's; the setting's default is ref
    lam: float = _JACKPOT.lam,
    c1: float = _JACKPOT.c1,
    c2: float = _JACKPOT.c2,
) -> Tensor:
    """Jackpot's weight [B, T] of a kept token, given its normaliser z [B, T].

    target="ref": `min(z max(lam, p_ref/p_inf), c1)` (eq. 8). target="new": `min(z max(lam,
    p_new/p_inf), c1) * min(p_ref/p_new, c2)` (eq. 11). A token whose ratio is undefined (NaN) gets
    0. Biased by the two truncations alone, given the true z. z = 1 gives the weights of the mode
    without Z (`rlcore.corrections.jackpot`).
    """
    choice("target", target, ("ref", "new"))
    positive("lam", lam)
    at_least_one("c1", c1)
    at_least_one("c2", c2)
    same_shape(z=z, logp_new=logp_new, logp_ref=logp_ref, logp_inf=logp_inf)
    logp_target = logp_ref if target == "ref" else logp_new
    towards = ratio_or_zero(logp_target, logp_inf)
    weight = (at_least_float32(z) * towards.clamp(min=lam)).clamp(max=c1)
    undefined = torch.isnan(
        at_least_float32(logp_target) - at_least_float32(logp_inf)
    ) | torch.isnan(weight)
    if target == "new":
        weight = weight * ratio_or_zero(logp_ref, logp_new).clamp(max=c2)
    return torch.where(undefined, 0.0, weight)


class TopK(NamedTuple):
    """Most likely tokens of the actor and of the target policy, as `obrs_normalizer` takes them."""

    ids_inf: Tensor  # [B, T, k], -1 pads
    logp_inf: Tensor  # [B, T, k]
    ids_target: Tensor  # [B, T, k2], -1 pads
    logp_target: Tensor  # [B, T, k2]
    logp_target_at_inf: Tensor  # [B, T, k], the target's log-probs of ids_inf


@dataclass(frozen=True, slots=True)
class JackpotTokens:
    """The inputs of Jackpot, [B, T] each. Example: JackpotTokens(logp_new, logp_ref, logp_inf,
    mask, token_uniforms(0, "obrs", step, sample_ids, length), TopK(...))"""

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
    stay: Tensor | float = 1.0  # the share of tokens that weights of mode=expected divide by


def jackpot_accumulate(tokens: JackpotTokens, settings: JackpotSpec | None = None) -> Tensor:
    """Statistics [3] float64 of some of a batch's tokens for Z's calibration, which add up over
    micro-batches and ranks."""
    settings = _checked(tokens, settings)
    probability, accepted = _acceptance(tokens, settings)
    z_approx, _ = _normaliser(tokens, settings)
    drawn = accepted if settings.draws_alpha else probability
    return calibration_sums(z_approx, drawn, tokens.mask)


def jackpot(
    tokens: JackpotTokens,
    settings: JackpotSpec | None = None,
    *,
    statistics: Tensor | None = None,
    reduce: SumReduce | None = None,
) -> JackpotWeights:
    """Choose the tokens that stay, and compute their weights (Jackpot sections 3 and 4). Nothing
    waits for the device.

    `settings` None: the defaults; its normaliser `auto` is the paper's here. `statistics`: the
    summed `jackpot_accumulate` of the whole batch when `tokens` are only some of it; None: these
    are all, or all of this rank if `reduce` sums over ranks. Raises InvalidArgument.
    """
    settings = _checked(tokens, settings)
    on = tokens.mask != 0
    probability, accepted = _acceptance(tokens, settings)
    keep = on & accepted if settings.rejects else on
    if settings.mode == "mask":
        weight = torch.ones_like(probability)
        return JackpotWeights(weight, keep, probability, accepted, None, None, None)
    if settings.normaliser == "none":
        # z = 1 leaves max(lam, p_t/p_inf); rejected tokens stay, so that all of them are divided by
        stays = probability if settings.mode == "expected" else accepted
        weight = stays * _weight(torch.ones_like(probability), tokens, settings)
        weight = torch.where(on, weight, 1.0)
        return JackpotWeights(weight, on, probability, accepted, None, None, None)
    z_approx, unknown = _normaliser(tokens, settings)
    if statistics is None:
        drawn = accepted if settings.draws_alpha else probability
        statistics = calibration_sums(z_approx, drawn, on)
        statistics = statistics if reduce is None else reduce(statistics)
    z, _, alpha_hat = calibrated(z_approx, on, statistics, lam=settings.lam)
    weight, stay = _weight(z, tokens, settings), torch.ones_like(alpha_hat)
    if settings.mode == "expected":
        # all tokens are divided by, where the mean over accepted ones has alpha_hat of them
        stay = alpha_hat.clamp(min=TINY)
        weight = weight * (probability / stay).to(weight)
    weight = torch.where(on, weight, 1.0)
    return JackpotWeights(weight, keep, probability, accepted, z, z_approx, unknown, stay)


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
        not (settings.normaliser == "none" and settings.mode not in ("both", "expected")),
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


class Jackpot(Correction):
    """OBRS mask and weights towards p_ref (eq. 8) or p_new (eq. 11).

    Modes: `both`; `mask` rejects and does not weigh; `reweight` weighs by the same formula and
    rejects nothing (an ablation: accepted tokens' weights for all). `expected` rejects nothing and
    weighs by the mean of `both` over its draws: at lambda 1 `min(Z rho, c1)`, over the accepted
    share. Its expectation is the same, without the draws' noise. `short_circuit`, with target=new,
    switches PPO's clip off and with it the factor p_ref/p_new (B.1). Draws depend on (run seed,
    step, sample, position) only.

    Biased by the truncations at c1 and c2 and, under the paper's normaliser, by the error of Z and
    by states counting by acceptance. Mode `mask` is biased by the difference between p_kept and p_t
    (`kl_kept`).
    """

    def __init__(self, spec: JackpotSpec, run_seed: int) -> None:
        self.spec = spec
        self.run_seed = run_seed
        self.needs = Needs(
            topk=spec.needs_topk, new=spec.target == "new", batch_stats=spec.needs_topk
        )

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        topk = self._topk(step)
        if topk is None and self.spec.needs_topk:
            raise ValueError(
                "correction=jackpot needs the actor's and the learner's top k "
                f"(target={self.spec.target})"
            )
        length = step.logp_inf.shape[1]
        uniforms = token_uniforms(self.run_seed, "obrs", step.step, step.sample_ids, length)
        tokens = JackpotTokens(
            step.logp_new, step.logp_ref, step.logp_inf, current.mask, uniforms, topk
        )
        found = jackpot(tokens, self.spec, reduce=reduce)
        metrics = self._metrics(tokens, found, reduce)
        at = self._weigh_at(found) if self.spec.token_alone else None
        return Corrected(current.weight * found.weight, found.keep, metrics, weigh_at=at)

    def _weigh_at(self, found: JackpotWeights) -> WeighAt:
        """Averaged over their draws."""

        def weigh_at(new: Tensor, ref: Tensor, inf: Tensor) -> Tensor:
            z = torch.ones_like(inf) if found.z is None else found.z[..., None].expand_as(inf)
            other = JackpotTokens(new, ref, inf, z, z)
            share = obrs_acceptance(other.target(self.spec), inf, lam=self.spec.lam)
            return share / found.stay * _weight(z, other, self.spec)

        return weigh_at

    def _topk(self, step: StepTensors) -> TopK | None:
        """Both sides' most likely tokens, if all of them are there."""
        theirs = (step.ref_topk_ids, step.ref_topk_logp, step.ref_logp_at_inf_ids)
        if self.spec.target == "new":
            theirs = (step.new_topk_ids, step.new_topk_logp, step.new_logp_at_inf_ids)
        both = [t for t in (step.topk_ids_inf, step.topk_logp_inf, *theirs) if t is not None]
        return TopK(*both) if len(both) == 5 else None

    def _metrics(
        self, tokens: JackpotTokens, found: JackpotWeights, reduce: Reduce
    ) -> dict[str, float]:
        on = tokens.mask
        accepted = found.accepted & on
        # what weights and caps do is of the tokens they apply to, the rest is of all proposed ones
        weighed = accepted if self.spec.rejects else on
        proposed: dict[str, Tensor] = {
            "acceptance": accepted,
            "acceptance_expected": found.probability,
        }
        kept: dict[str, Tensor] = {}
        if self.spec.mode != "mask":
            proposed |= self._normaliser_values(tokens, found)
            kept = {"weight_mean": found.weight, **self._truncated(tokens, found)}
        values = [v.where(on, 0.0) for v in proposed.values()]
        values += [v.where(weighed, 0.0) for v in kept.values()]
        *summed, count, count_kept = total([*values, on, weighed], reduce)
        sums = dict(zip([*proposed, *kept], summed))
        metrics = {name: sums[name] / max(count, 1.0) for name in proposed}
        metrics |= {name: sums[name] / max(count_kept, 1.0) for name in kept}
        if not count:
            metrics |= {"acceptance": 1.0, "acceptance_expected": 1.0}
        if "z_approx" in sums:
            drawn = "acceptance" if self.spec.draws_alpha else "acceptance_expected"
            metrics["kappa"] = sums[drawn] / sums["z_approx"] if sums["z_approx"] > 0 else 1.0
        return metrics

    def _normaliser_values(self, tokens: JackpotTokens, found: JackpotWeights) -> dict[str, Tensor]:
        """Per-token values [B, T] whose means say how well Z and the rejection do."""
        values: dict[str, Tensor] = {}
        if found.z is not None and found.z_approx is not None and found.unknown is not None:
            values = {"z_approx": found.z_approx, "z": found.z, "unknown_share": found.unknown}
        if tokens.topk is not None:
            ids, logp, _, _, at_inf = tokens.topk
            stored = logp.nan_to_num(-torch.inf).exp().where(ids >= 0, 0.0)
            values["dropped_mass"] = (1.0 - stored.sum(-1)).clamp(0.0, 1.0)
            values["kl_kept"] = obrs_divergence(ids, logp, at_inf, lam=self.spec.lam)
        return values

    def _truncated(self, tokens: JackpotTokens, found: JackpotWeights) -> dict[str, Tensor]:
        """Where each factor is above its own cap, [B, T] bool; their product shows neither."""
        spec = self.spec
        logp_target = tokens.target(spec)
        z = torch.ones_like(found.weight) if found.z is None else found.z
        uncapped = jackpot_weight(
            z, logp_target, logp_target, tokens.logp_inf, target="ref", lam=spec.lam, c1=inf
        )
        over = {"truncated_share": uncapped > spec.c1}
        if spec.target == "new":
            # the factor that leads back to p_ref, which short_circuit leaves out
            logp_ref = tokens.logp_new if spec.short_circuit else tokens.logp_ref
            factor = ratio(log_difference(logp_ref, tokens.logp_new, tokens.mask)[0])
            over["c2_truncated_share"] = factor > spec.c2
        return over
