"""Rules on masked-diffusion models, which refuse settings for causal models alone: pure functions
of a `RunConfig`."""

from __future__ import annotations

from typing import ClassVar

from rlcore.config.schema import RunConfig
from rlcore.corrections.ais import AisSpec
from rlcore.corrections.dvp import DvpSpec
from rlcore.engine_facts import EngineFacts, foreign
from rlcore.errors import UserError
from rlcore.extras.diffusion.folder import LAYERS
from rlcore.rollout.specs import ActorSpec, RolloutSpec
from rlcore.spec import refuse

ENGINE = "diffusion"


class DiffusionFacts(EngineFacts):
    """The denoising engine rounds weights itself, and has no kernels of low precision."""

    reads: ClassVar[frozenset[str]] = frozenset(
        {
            *("kind", "rounding", "scales", "keep_high_precision", "precise_layers"),
            *("fp32_head", "max_num_seqs", "max_batched_tokens"),
        }
    )

    @classmethod
    def refuse(cls, spec: ActorSpec, key: str) -> None:
        refuse(
            spec.kind not in ("bf16", "fp8"),
            f"{key}.kind={spec.kind} is of causal models, which {key}.engine={ENGINE} does not "
            "decode: choose bf16, or fp8 with a rounding.",
        )
        refuse(
            spec.quantised_by_engine and spec.rounding == "none",
            f"{key}.kind=fp8 has no kernels in {key}.engine={ENGINE}: set {key}.rounding=fp8, "
            "which rounds the weights and computes in the actor's dtype.",
        )
        refuse(
            spec.tensor_parallel > 1,
            f"{key}.tensor_parallel={spec.tensor_parallel} cannot split a model in {key}.engine="
            f"{ENGINE}: use 1 and raise {key}.count.",
        )
        for name in foreign(spec, spec.engine_settings, cls):
            default = ActorSpec.model_fields[name].default
            refuse(
                True,
                f"{key}.{name}={getattr(spec, name)} is a setting of vLLM, and {key}.engine="
                f"{ENGINE} would ignore it: leave it at {'null' if default is None else default}.",
            )


def check_diffusion(c: RunConfig) -> None:
    """Check that every part that reads the model fits its kind."""
    for label, actor in c.actor.items():
        _check_engine(c, f"actor.{label}", actor)
    if c.model.diffusion is None:
        return
    _check_sampling(c)
    _check_learning(c)
    _check_adapters(c)


def _check_engine(c: RunConfig, key: str, actor: ActorSpec) -> None:
    masked = c.model.diffusion is not None
    refuse(
        masked and actor.engine == "vllm",
        f"{key}.engine=vllm decodes causal models, and model.diffusion is set: use "
        f"{key}.engine={ENGINE}.",
    )
    refuse(
        not masked and actor.engine == ENGINE,
        f"{key}.engine={ENGINE} denoises masked-diffusion models, and model.diffusion is null: "
        "choose model=diffusion, or engine=vllm.",
    )


# of `rollout`: a denoising step draws from the whole distribution
_CUTS = ("top_p", "top_k", "min_p")


def _check_sampling(c: RunConfig) -> None:
    refuse(
        c.rollout.logprobs_k != 0,
        f"rollout.logprobs_k={c.rollout.logprobs_k} asks for the top of the distribution that a "
        "token was drawn from, and with model.diffusion its log-prob is an estimate: use 0.",
    )
    specs = {"rollout": c.rollout} | {f"task.{n}": c.rollout_of(n) for n in c.tasks}
    for key, sampled in specs.items():
        refuse(
            bool(sampled.stop),
            f"{key}.stop={list(sampled.stop)} ends a response at a token, and with model.diffusion "
            "it ends at its end of sequence alone: leave it empty.",
        )
        for name in _CUTS:
            value, off = getattr(sampled, name), RolloutSpec.model_fields[name].default
            refuse(
                value != off,
                f"{key}.{name}={value} cuts the distribution that a token is drawn from, and with "
                f"model.diffusion it is drawn from all of it: use {off}.",
            )
    for label in ("", *c.evaluation.tasks):
        cuts = {n: getattr(c.evaluation.of(label), n) for n in ("top_p", "top_k")}
        key = f"evaluation.tasks.{label}" if label else "evaluation"
        refuse(
            cuts["top_p"] not in (None, 1.0) or bool(cuts["top_k"]),
            f"{key}.top_p={cuts['top_p']} and top_k={cuts['top_k']} cut the distribution that a "
            "token is drawn from, and with model.diffusion it is drawn from all of it: leave both "
            "null.",
        )
    refuse(
        c.schedule.on_publish == "in_flight",
        "schedule.on_publish=in_flight would change the model in the middle of a response, whose "
        "log-probs model.diffusion estimates in one pass of one version: use finish or abort.",
    )
    refuse(
        bool(c.played),
        "environment= plays episodes of several turns, and with model.diffusion a response is one "
        "canvas: use environment=none.",
    )
    lists = [(key, found.chosen()) for key, found in (c.correction_lists | c.shadow_lists).items()]
    for key, label, spec in ((k, n, s) for k, chosen in lists for n, s in chosen.items()):
        refuse(
            spec.rejects or spec.needs_topk or isinstance(spec, DvpSpec),
            f"{key}={label} rests on the distribution that each token was drawn from, and "
            "model.diffusion knows only an estimate of its log-prob: use ais, tis, mis or "
            "another that weighs by ratios.",
        )
        refuse(
            isinstance(spec, AisSpec) and spec.alpha == "n_star",
            f"{key}.{label}.alpha=n_star tells fixed errors from fresh ones by answers with equal "
            "first tokens, and model.diffusion does not read from left to right: use signals.",
        )


def _check_learning(c: RunConfig) -> None:
    learner = c.learner
    on = {
        "learner.distill": learner.distill is not None,
        "learner.draft": learner.draft is not None,
        "learner.train_sparse": learner.train_sparse,
        "learner.router_replay=true": learner.router_replay,
        "algorithm.train_on_best_by=acceptance": c.algorithm.kept_by_learner is not None,
    }
    for key, used in on.items():
        refuse(used, f"{key} is made for causal actors, and model.diffusion is set: leave it off.")
    for division in learner.divisions:
        raise UserError(
            f"learner.{division.name}={division.ranks} splits layers that are named and attend as "
            "in causal models, and model.diffusion is set: use 1."
        )
    refuse(
        learner.attention not in ("auto", "sdpa"),
        f"learner.attention={learner.attention} is causal, and a model with model.diffusion "
        "attends in both directions: use sdpa.",
    )


def _check_adapters(c: RunConfig) -> None:
    lora = c.learner.lora
    allowed = [name for name in LAYERS if name != "ff_out"]
    other = [t for t in lora.targets if t not in allowed] if lora is not None else []
    refuse(
        bool(other),
        f"learner.lora.targets holds {' and '.join(other)}, and of LLaDA's form only "
        f"{', '.join(allowed)} can have an adapter (ff_out is the head's name too).",
    )
