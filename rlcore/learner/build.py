"""The components of a rank, built from its job: models, engines, the update, companions, and which
shortcuts their passes take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlcore.attention.specs import SparseSpec
from rlcore.corrections.pipeline import Pipeline
from rlcore.corrections.pipeline import build as build_pipeline
from rlcore.errors import UserError
from rlcore.interfaces import Reduce
from rlcore.learner.layer_kernels import compiled_layers, float8_layers, liger_layers
from rlcore.learner.limits import NAMES, LayerSizes, most_positions
from rlcore.learner.lora import add_adapters
from rlcore.learner.packing import Layout, PassCosts
from rlcore.learner.parts.part import LearnerPart
from rlcore.learner.policy import Attention, FrozenPolicy, Policy, load_causal_lm
from rlcore.learner.probes import (
    CPU,
    ShortcutVerdict,
    against_layers,
    against_merging,
    against_packing,
    against_replay,
    against_rule,
    hold_in_parts,
    odd_attention,
    refuse_odd_passes,
    share_prefixes,
)
from rlcore.learner.protocols import Companion, LogProbEstimator, TrainEngine
from rlcore.learner.ranks import RankReduce, Shards, join_groups, join_ranks
from rlcore.learner.sequences import Reader, read_next_tokens, read_with_routes
from rlcore.learner.specs import (
    ENGINES,
    ESTIMATORS,
    CriticSpec,
    LearnerJob,
    LearnerSpec,
    LoraSpec,
    RankPlace,
)
from rlcore.learner.update import Update
from rlcore.models.folder import read_shapes
from rlcore.registry import resolve
from rlcore.seeding import derive_seed
from rlcore.weights.experts import single_shapes

if TYPE_CHECKING:
    from rlcore.learner.cpu.spare_cores import SpareCores
    from rlcore.learner.parts.critic import ValueModel
    from rlcore.learner.parts.replay import Replay

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankParts:
    """The components that a rank is built of."""

    reduce: Reduce
    engine: TrainEngine  # the policy's
    update: Update
    companions: tuple[Companion, ...]
    others: tuple[LearnerPart, ...]  # parts without an engine
    layout: Layout
    costs: PassCosts | None  # of the policy, where its sequences may share prefixes
    tight: PassCosts | None  # of the policy, where micro-batches are divided by cost
    most: int  # positions of a micro-batch
    read: Reader  # how the models read a record
    estimator: LogProbEstimator | None  # of their log-probs; None: these are exact
    verdicts: tuple[ShortcutVerdict, ...]  # on the shortcuts that the passes might take


def build_parts(job: LearnerJob, place: RankPlace) -> RankParts:
    """Join the other ranks and load everything. Collective.

    Raises UserError for a model that cannot be trained as the job asks.
    """
    spec = job.learner
    torch.set_num_threads(job.threads or spec.threads)
    # a rank sees one GPU
    device = torch.device("cuda", 0) if spec.device == "cuda" else torch.device("cpu")
    # what can be refused is built before anything is loaded
    engine_class = resolve(ENGINES, spec.engine, key="learner.engine", like=TrainEngine)
    pipeline = build_pipeline(job.corrections, job.run_seed, job.objective, job.strata)
    estimator = _estimator(job)
    join_ranks(place, device)
    engine_class.prepare(device)
    shards, replicas = join_groups(spec)
    reduce = RankReduce(device, replicas)
    models = _Models(job, engine_class, shards, device)
    engine = engine_class(models.policy(), spec, job.total_steps, device)
    frozen = None
    if job.objective.kl_coef > 0:
        frozen = engine_class.frozen(models.starting(), spec, device)
    companions: list[Companion] = []
    critic = None
    if job.critic.trained:
        from rlcore.learner.parts.critic import Critic

        own = spec.model_copy(update={"lr": job.critic.lr, "lora": job.critic.lora})
        values = engine_class(models.values(job.critic), own, job.total_steps, device)
        companions.append(critic := Critic(job.critic, values, engine, reduce))
    teacher = None
    if job.teacher.used:
        from rlcore.learner.parts.teacher import Teacher

        teacher = Teacher(job, _teachers(job, models, engine, device), engine, reduce)
    shadows: dict[str, Pipeline] = {}
    if job.shadow.lists:
        from rlcore.corrections.shadow import build_shadows

        shadows = build_shadows(job.shadow, job.run_seed, job.objective, job.strata)
    update = Update(job, engine, frozen, pipeline, reduce, shadows, critic, teacher)
    if spec.distill is not None:
        from rlcore.learner.parts.sparse_copy import SparseCopy

        # its optimizer is the policy's, with a rate of its own
        its_spec = spec.model_copy(update={"lr": spec.distill.lr})
        its_engine = engine_class(models.sparse_copy(), its_spec, job.total_steps, device)
        companions.append(SparseCopy(job, spec.distill, its_engine, engine, reduce))
    if (spare := _spare_cores(job)) is not None:
        models.follow_load(spare)  # last: engines remember the threads that they were built with
    return RankParts(
        reduce,
        engine,
        update,
        tuple(companions),
        tuple(part for part in (teacher, engine.policy.replay, engine.policy.rounded) if part),
        models.layout,
        models.costs,
        models.tight,
        models.most,
        reader_of(job) if estimator is None else estimator.read,
        estimator,
        tuple(models.verdicts.values()),
    )


def _teachers(
    job: LearnerJob, models: _Models, engine: TrainEngine, device: torch.device
) -> dict[str, TrainEngine | FrozenPolicy]:
    """The models of a teacher by task; "" of every other task."""
    if job.teacher.kind == "engine":
        return {}
    if job.teacher.kind == "policy":
        return {"": engine}
    paths: Mapping[str, str | None] = job.teacher.paths or {"": job.teacher.path}
    hold = partial(type(engine).frozen, spec=job.learner, device=device)
    return {task: hold(models.teacher(path)) for task, path in paths.items()}


def reader_of(job: LearnerJob) -> Reader:
    """The reader by which the job's causal models read a record."""
    return read_with_routes if job.learner.router_replay else read_next_tokens


def _estimator(job: LearnerJob) -> LogProbEstimator | None:
    """The estimator of a masked model, else None. Raises UserError for a folder without a mask
    token."""
    if job.diffusion is None:
        return None
    made = resolve(ESTIMATORS, "diffusion", key="model", like=LogProbEstimator)
    return made(job.model_path, job.diffusion)


class _Models:
    """The models of a job, each loaded from its folder when asked for."""

    def __init__(
        self,
        job: LearnerJob,
        engine: type[TrainEngine],
        shards: Shards | None,
        device: torch.device,
    ) -> None:
        """`shards`: the ranks that hold parts of the same sequences, if they do."""
        self._job = job
        self._engine = engine
        self._shards = shards
        #: what divides their parameters among the ranks, if they are divided
        self._split = engine.splitter(job.learner)
        self._device = device
        self._spec = job.learner
        # the kernels for packed sequences are causal
        self.attention: Attention = "sdpa" if job.diffusion is not None else _attention(job.learner)
        #: of a pass of the policy, while all policies loaded may share prefixes
        self.costs: PassCosts | None = None
        self.tight: PassCosts | None = None
        self.most = 0  # positions of a micro-batch, once the policy is loaded
        #: of the micro-batches of all models
        self.layout = _layout(job.learner, self.attention)
        self.verdicts: dict[str, ShortcutVerdict] = {}  # by shortcut
        self._loaded: list[nn.Module] = []
        #: the rule that the policy attends by; with a sparse copy beside it, it attends densely
        self._rule = None if job.learner.distill is not None else job.sparse

    def policy(self) -> Policy:
        """The policy that is trained."""
        lm = self._load(self._job.model_path, self._rule)
        if self._job.diffusion is None:
            refuse_other_names(lm, self._job.model_path)
        self.most = most_positions(self._spec, partial(layer_sizes, lm))
        if self._spec.micro_batch_tokens == "auto":
            self.tight = PassCosts.of(lm)
        if self._may_share() and self._shares(lm, self._rule):
            self.costs = PassCosts.of(lm, by_mask=self._device != CPU)
        return self._trained(lm, self._rule, self._spec.lora, seed="lora", key="learner.lora")

    def sparse_copy(self) -> Policy:
        """The policy's model with adapters, attending by the actors' rule."""
        assert self._spec.distill is not None and self._job.sparse is not None
        lora, rule = self._spec.distill.lora, self._job.sparse
        lm = self._load(self._job.model_path, rule)
        self._share_too(lm, rule)
        return self._trained(lm, rule, lora, seed="distill", key="learner.distill.lora")

    def values(self, spec: CriticSpec) -> ValueModel:
        """The critic's model, which attends densely."""
        from rlcore.learner.parts.critic import ValueModel, freeze_trunk

        lm = self._load(self._job.model_path, None)
        self._share_too(lm, None)
        if spec.lora is not None:
            seed = derive_seed(self._job.run_seed, "critic")
            add_adapters(lm, spec.lora, seed=seed, key="critic.lora")
        if self._spec.gradient_checkpointing and spec.kind == "model":
            lm.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        model = ValueModel(lm.train())
        if spec.kind == "value_head":
            freeze_trunk(lm)
        return model

    def starting(self) -> Policy:
        """The policy that KL is taken to.

        The starting policy attends and rounds as the trained one does, another model densely and
        in full precision.
        """
        rule = None if self._job.frozen_path else self._rule
        lm = self._load(self._job.frozen_path or self._job.model_path, rule)
        self._share_too(lm, rule)
        return self._ready(lm, rule, rounded=not self._job.frozen_path)

    def teacher(self, path: str | None) -> Policy:
        """The teacher at `path`, or the starting policy; it attends densely."""
        lm = self._load(path or self._job.model_path, None)
        self._share_too(lm, None)
        return self._ready(lm, None, rounded=False)

    def _ready(
        self, lm: nn.Module, rule: SparseSpec | None, replay: Replay | None = None, *, rounded: bool
    ) -> Policy:
        """The model as it will attend, for parts of its sequences where ranks hold those. Weights
        are rounded where the job has that and the model is to be `rounded`."""
        if self._shards is not None:
            hold_in_parts(lm, self._shards, self._engine.split_attention, self._device)
        spec, layers = self._job.rounding, None
        if rounded and spec is not None:
            from rlcore.learner.parts.rounded import RoundedLayers

            layers = RoundedLayers(lm, spec, model_path=self._job.model_path)
        if rounded and self._spec.fp8 != "none":
            float8_layers(lm, self._spec.fp8, emulate=self._device == CPU)
        if self._spec.layers == "compiled":
            compile_them = partial(compiled_layers, device=self._device)
            self._require_layers(lm, compile_them)
            compile_them(lm)
        return Policy(lm, rule, replay, self._shards, layers)

    def _trained(
        self, lm: nn.Module, rule: SparseSpec | None, lora: LoraSpec | None, *, seed: str, key: str
    ) -> Policy:
        if lora is not None:
            if lora.publish == "merged":
                reason = against_merging(lm, lora, self._device)
                self._require(f"{key}.publish=merged", reason, f"{key}.publish=adapter")
            add_adapters(lm, lora, seed=derive_seed(self._job.run_seed, seed), key=key)
        if self._spec.gradient_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        # the frozen policy replays none: it chooses its own experts
        replay = None
        if self._spec.router_replay:
            from rlcore.learner.parts.replay import Replay

            reason = against_replay(lm, self._device)
            self._require("learner.router_replay=true", reason, "learner.router_replay=false")
            replay = Replay(lm)
        return self._ready(lm.train(), rule, replay, rounded=True)

    def _may_share(self) -> bool:
        """Return whether the job leaves the choice to the models."""
        spec, rule = self._spec, self._job.sparse
        return (
            spec.share_prefix == "auto"
            and self._follows_trees()
            and not self._job.bitwise_positions
            and self._job.diffusion is None  # positions see what follows them
            # the samples of a group may have had other experts for their prompt
            and not spec.router_replay
            # positions of the tree do not say where the prompt of their sequence ends, nor by which
            # pages it was sampled
            and (rule is None or not (rule.needs_prompts or rule.blocks_by_length is not None))
        )

    def _follows_trees(self) -> bool:
        """Return whether the attention of all models of the job can read the nodes of a tree."""
        if self._spec.device == "cpu":
            return self.attention == "sdpa"
        # one mask over the nodes knows no pages, and transformers takes any name with "flash" in it
        # for a package
        return self.attention in ("sdpa", "varlen", "fa4") and self._job.sparse is None

    def _share_too(self, lm: nn.Module, rule: SparseSpec | None) -> None:
        """Prepare a further model for the policy's micro-batches, or give up sharing for all."""
        if self.costs is not None and not self._shares(lm, rule):
            self.costs = None

    def _shares(self, lm: nn.Module, rule: SparseSpec | None) -> bool:
        divided = self._split is not None
        reason = share_prefixes(lm, rule, divided=divided, device=self._device)
        if reason is not None:
            logger.info("learner.share_prefix=auto computes every prompt anew: %s", reason)
        self._note("learner.share_prefix=auto", reason)
        return reason is None

    def _load(self, path: str, rule: SparseSpec | None) -> nn.Module:
        dtype, sparse = self._spec.compute_dtype, rule is not None
        lm = load_causal_lm(
            path, dtype, self.attention, sparse=sparse, split=self._split, device=self._device
        )
        if self._job.diffusion is None:
            self._probe(lm, path, rule)
        if self._spec.layers == "liger":
            self._require_layers(lm, liger_layers)
            liger_layers(lm)
        elif self._job.cpu_fast_paths and self._device == CPU and dtype == "float32":
            from rlcore.learner.cpu.norms import own_norms

            own_norms(lm)
        if self._job.bitwise_positions:
            _hold_bitwise(lm, self._job.bitwise_positions)
        self._loaded.append(lm)
        return lm

    def _probe(self, lm: nn.Module, path: str, rule: SparseSpec | None) -> None:
        """Compare what every pass of a causal model relies on with the plain way. Raises UserError
        for what was asked for and is wrong."""
        divided, device = self._split is not None, self._device
        refuse_odd_passes(lm, path, divided=divided, device=device)
        if rule is not None and device == CPU:
            reason = against_rule(lm, rule)
            self._require("sparse attention", reason, "actors and a learner that attend densely")
        if self.layout == "packed":
            reason = against_packing(lm, rule, divided=divided, device=device)
            if self._spec.layout == "packed":
                self._require("learner.layout=packed", reason, "learner.layout=sorted")
            elif reason is not None:
                logger.info("learner.layout=auto computes a sequence a row: %s", reason)
                self.layout = "sorted"
            self._note("learner.layout=packed", reason)

    def _require_layers(self, lm: nn.Module, change: Callable[[nn.Module], object]) -> None:
        reason = against_layers(lm, change, self._device)
        self._require(f"learner.layers={self._spec.layers}", reason, "learner.layers=torch")

    def _require(self, shortcut: str, reason: str | None, instead: str) -> None:
        """Raise UserError for a shortcut that was asked for and fails its comparison."""
        if reason is not None:
            raise UserError(
                f"{shortcut} is wrong for model.path={self._job.model_path}, which was tried both "
                f"ways on a few tokens: {reason}; use {instead}."
            )
        self._note(shortcut, None)

    def _note(self, shortcut: str, reason: str | None) -> None:
        """Keep a verdict; the first against a shortcut stands, since all models share it."""
        before = self.verdicts.get(shortcut)
        if before is None or before.taken:
            found = reason or "equal to the plain way up to rounding"
            self.verdicts[shortcut] = ShortcutVerdict(shortcut, reason is None, found)

    def follow_load(self, spare: SpareCores) -> None:
        """Have the passes of all models loaded so far set the number of threads."""
        for lm in self._loaded:
            spare.attach(lm)


def refuse_other_names(lm: nn.Module, path: str) -> None:
    """Raise UserError for a model whose parameters are not the weights in its files by name.

    Engines load, and exports hold, what is published by the names of the files. A weight that is
    not a parameter, such as a bias of a router that is a buffer, would be missing there.
    """
    # a parameter that is divided among the ranks keeps its whole shape aside
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in lm.named_parameters()}
    held = {single for name, shape in shapes.items() for single in single_shapes(name, shape)}
    if odd := sorted(read_shapes(path).keys() ^ held):
        where = "a parameter, and not in its files" if odd[0] in held else "no parameter"
        raise UserError(
            f"model.path={path} is not supported: weight {odd[0]} of {type(lm).__name__} is "
            f"{where}, so that it could be neither published nor exported; choose another model."
        )


def _hold_bitwise(lm: Any, positions: int) -> None:
    """Raises UserError for a model or a machine that cannot compute so."""
    from rlcore.attention.bitwise import WIDTHS, hold, machine_reason

    reason = machine_reason() or odd_attention(lm)
    width = getattr(lm.config.get_text_config(), "intermediate_size", 0)
    if reason is None and width % WIDTHS:
        reason = f"the width of its MLP, {width}, is not a multiple of {WIDTHS}"
    if reason is not None:
        raise UserError(f"bitwise=true cannot be had of this model: {reason}; leave it false.")
    hold(lm, positions)


def _spare_cores(job: LearnerJob) -> SpareCores | None:
    if not job.follows_load:
        return None
    from rlcore.learner.cpu.spare_cores import SpareCores

    most = job.learner.max_threads
    assert isinstance(most, int)
    return SpareCores(job.learner.threads, most)


def layer_sizes(lm: nn.Module) -> LayerSizes:
    """Sizes of a causal LM, whole or divided among the ranks."""
    config = lm.config.get_text_config()  # type: ignore[union-attr, operator]
    # asked for by name: architectures store some of them under names of their own
    found: dict[str, Any] = {name: getattr(config, name, None) for name in NAMES}
    lacking = [n for n in ("num_attention_heads", "num_hidden_layers") if found[n] is None]
    if lacking:
        raise UserError(
            f"learner.micro_batch_tokens=auto needs the sizes of the model's layers, and its "
            f"config.json has no {lacking[0]}: give a number of positions."
        )
    if found["intermediate_size"] is None:
        found["intermediate_size"] = 4 * found["hidden_size"]  # GPT-2's meaning of none
    named = (name for name, _ in lm.named_parameters())
    return LayerSizes.of(found, qk_norm=any(name.endswith("q_norm.weight") for name in named))


def _attention(spec: LearnerSpec) -> Attention:
    """`learner.attention` with auto resolved."""
    if spec.attention != "auto":
        return spec.attention
    if spec.device == "cpu" or spec.compute_dtype == "float32":
        return "sdpa"
    if spec.holders("sequences") > 1:  # transformers would import a package for its name
        return "varlen"
    from transformers.utils import is_flash_attn_2_available

    # the distribution is looked up, since the package of flash-attn-4 has the same import name
    return "flash_attention_2" if is_flash_attn_2_available() else "varlen"


def _layout(spec: LearnerSpec, attention: Attention) -> Layout:
    """`learner.layout` with auto resolved."""
    if spec.layout != "auto":
        return spec.layout
    return "sorted" if attention == "sdpa" else "packed"
