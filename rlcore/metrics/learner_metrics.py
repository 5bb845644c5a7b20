"""Metrics of the learner: corrections, losses and training batches."""

from collections.abc import Iterator
from typing import get_type_hints

from rlcore.corrections.specs import CORRECTIONS
from rlcore.metrics.metric import CUT, FLAT, Metric
from rlcore.registry import load_object
from rlcore.spec import held

CORRECTION = "see the page of the correction under [Corrections](corrections/index.md)"
ESS = "[ESS falls](troubleshooting.md#ess-falls)"
NEVER_BINDS = "[The clip never binds](troubleshooting.md#the-clip-never-binds)"
CLIPS = "0 in phases of one step, below 0.3 in longer ones"
CLIPPED = f"{NEVER_BINDS}; above it lower `learner.lr` or the phase's steps"


def _statistics() -> Iterator[Metric]:
    """The statistics that corrections declare; several may have one of the same name."""
    found: dict[str, dict[tuple[str, str], list[str]]] = {}
    for label, where in CORRECTIONS.items():
        for name, said in load_object(where).statistics.items():
            found.setdefault(name, {}).setdefault(said, []).append(label)
    for name, by_meaning in found.items():
        said = "; ".join(f"{', '.join(who)}: {text}" for (_, text), who in by_meaning.items())
        unit = next(iter(by_meaning))[0]
        usual = "depends on the correction"
        yield Metric(f"correction/<name>/{name}", unit, said, healthy=usual, otherwise=CORRECTION)


def _of_settings() -> Iterator[Metric]:
    """The metrics that settings of a learner and of its parts declare."""
    for hint in get_type_hints(load_object("rlcore.learner.specs:LearnerJob")).values():
        for spec in held(hint):
            yield from (Metric(*said) for said in spec.declared())


LEARNER_METRICS: tuple[Metric, ...] = (
    Metric(
        "shadow/<list>/kept_share",
        "share",
        "`correction.shadow`: tokens that a list would keep in the loss",
    ),
    Metric(
        "shadow/<list>/ess",
        "share",
        "`correction.shadow`: effective samples of a list's weights over the batch's tokens, a "
        "rejected one weighing 0",
    ),
    Metric(
        "shadow/<list>/cosine",
        "1",
        "`correction.shadow`: cosine of the advantages by a list's weights and by the executed "
        "weights",
    ),
    Metric(
        "correction/kept_share",
        "share",
        "tokens that all corrections together keep in the loss",
        healthy="above 0.8",
        otherwise=ESS,
    ),
    Metric(
        "correction/weight_mean",
        "1",
        "mean weight of the tokens kept in the loss",
        healthy="0.8 to 1.2",
        otherwise=ESS,
    ),
    Metric(
        "correction/zero_weight_share",
        "share",
        "tokens kept in the loss with weight 0",
        healthy="below 0.1",
        otherwise=ESS,
    ),
    *_statistics(),
    Metric(
        "correction/<name>/tail_mass",
        "share",
        "centre: mean mass of the actors' policy outside the tokens that they store",
        healthy="below 0.1",
        otherwise="the term is off by up to twice that: raise `rollout.logprobs_k`",
    ),
    Metric("correction/<name>/<statistic>", "1", "a statistic that your correction reports"),
    Metric(
        "loss/policy",
        "1",
        "policy loss",
        healthy="any: it says nothing about learning",
        otherwise="look at reward/mean",
    ),
    Metric(
        "loss/kl",
        "nats",
        "KL to the frozen starting policy, unscaled",
        healthy="rises slowly",
        otherwise="[KL rises](troubleshooting.md#kl-rises); `algorithm.kl_coef`",
    ),
    Metric(
        "train/answer_kl",
        "nats",
        "KL of an answer to the frozen starting policy, under p_ref (`kl_in=reward`)",
        healthy="rises slowly, or stays near `algorithm.kl_target`",
        otherwise="[KL rises](troubleshooting.md#kl-rises); `algorithm.kl_coef`",
    ),
    Metric("train/kl_coef", "1", "coefficient of that KL in the step's rewards"),
    Metric(
        "loss/sft",
        "1",
        "supervised loss of `rlcore sft`: mean negative log-prob of the responses' tokens",
    ),
    Metric(
        "grad_norm",
        "1",
        "norm of the gradient before clipping",
        healthy="no jumps; often near `learner.grad_clip`",
        otherwise="ten times its median: lower `learner.lr`",
    ),
    Metric(
        "entropy",
        "nats",
        "mean entropy of the policy over trained tokens",
        healthy="falls slowly, above 0.01",
        otherwise="collapse: lower `learner.lr`, raise `algorithm.eps_high` or "
        "`algorithm.entropy_coef`",
    ),
    Metric(
        "lr",
        "1",
        "learning rate of this step, a correction's step scale included",
        "last",
        healthy="as scheduled",
        otherwise="with [vcpo](corrections/vcpo.md) its factor is in it",
    ),
    Metric(
        "policy/ratio",
        "1",
        "mean ratio p_new/p_ref of the tokens kept in the loss",
        healthy="1 in phases of one step, near 1 in longer ones",
        otherwise="lower `learner.lr` or the phase's steps",
    ),
    Metric(
        "policy/clip_low_share",
        "share",
        "kept tokens whose ratio is below the clip range",
        healthy=CLIPS,
        otherwise=CLIPPED,
    ),
    Metric(
        "policy/clip_high_share",
        "share",
        "kept tokens whose ratio is above the clip range",
        healthy=CLIPS,
        otherwise=CLIPPED,
    ),
    Metric(
        "policy/dual_clip_share",
        "share",
        "kept tokens of negative advantage above the dual clip",
        healthy=CLIPS,
        otherwise=CLIPPED,
    ),
    Metric(
        "train/overlong_filtered",
        "sequences",
        "left out of the loss because the length limit cut them off (algorithm.overlong_filter)",
        "sum",
        healthy="a few",
        otherwise=CUT,
    ),
    Metric(
        "train/positions",
        "positions",
        "that one pass over the batch computes, padding included; common prefixes once where they "
        "are shared (learner.share_prefix)",
        "sum",
        healthy="near train/sequence_positions, or below it with shared prefixes",
        otherwise="padding: `learner.layout`, `learner.micro_batch_tokens`",
    ),
    Metric(
        "train/sequence_positions",
        "positions",
        "of the batch's sequences one by one, without padding",
        "sum",
    ),
    Metric(
        "train/flat_positions",
        "positions",
        "of the batch whose backward pass was left out, since no advantage differs from 0 and the "
        "gradient is exactly 0",
        "sum",
        healthy="0 in most steps",
        otherwise=FLAT,
    ),
    Metric("train/tokens", "tokens", "sampled tokens of the batch that are trained on"),
    Metric("train/sequences", "sequences", "sequences of the batch"),
    Metric(
        "train/acceptance_mean",
        "share",
        "mean acceptance of the responses before the selection by acceptance",
    ),
    Metric(
        "train/acceptance_kept_mean",
        "share",
        "mean acceptance of the responses that this selection kept",
    ),
    Metric(
        "train/reward_selected_mean",
        "reward",
        "mean reward of the responses that this selection kept",
    ),
    Metric(
        "estimate/token_variance",
        "nats²",
        "variance of a token's log-prob by the mask (masked diffusion)",
    ),
    Metric(
        "estimate/sequence_variance",
        "nats²",
        "variance of a response's log-prob by the mask (masked diffusion)",
    ),
    *_of_settings(),
)
