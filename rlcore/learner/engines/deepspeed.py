"""DeepSpeed as a training engine, ZeRO 0 to 3.

Gradient accumulation. DeepSpeed's own counter is not used. The number of micro-batches changes from
step to step, and with `gradient_accumulation_steps=1` every backward would end an accumulation
(ZeRO-2 then keeps the last micro-batch only). The boundary is set by hand before every backward,
and no loss is divided by a number of steps. Every rank must make the same number of backward calls.

Losses are sums with global normalisers. DeepSpeed averages gradients over ranks: `backward`
multiplies by their number.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.errors import StageError
from rlcore.learner.engines.deepspeed_facts import DeepSpeedFacts, overlaps
from rlcore.learner.engines.zero_state import ModelParts, ZeroState, offload_config, swap_folder
from rlcore.learner.lm_head import HeadSpec, KlTarget
from rlcore.learner.lora import (
    adapted_layers,
    factors,
    is_adapter,
    merged,
    plain_name,
    published_factors,
)
from rlcore.learner.packing import MicroBatch
from rlcore.learner.policy import FrozenPolicy, Policy
from rlcore.learner.protocols import RateSchedule, TrainEngine
from rlcore.learner.ranks import Shards
from rlcore.learner.specs import LearnerSpec
from rlcore.learner.state_files import Part, Schedule, Source
from rlcore.types import TokenScores
from rlcore.weights.experts import single_shapes, singles

if TYPE_CHECKING:
    from rlcore.learner.split_loading import Split


def deepspeed_config(spec: LearnerSpec) -> dict[str, Any]:
    """DeepSpeed's configuration, without the entries that depend on the model."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # not used for accumulation: see `deepspeed.py`
        "gradient_accumulation_steps": 1,
        # between experts on other ranks its norm would be wrong: see `ExpertParts`
        "gradient_clipping": 0.0 if spec.expert_parallel > 1 else spec.grad_clip,
        "steps_per_print": 2**31,
        "optimizer": {
            "type": "AdamW",
            "params": {
                # torch's AdamW: no C++ build, and the same arithmetic on CPU and GPU
                "torch_adam": True,
                # one kernel for all weights, where there is one: GPUs
                "fused": spec.num_gpus > 0,
                "lr": spec.lr,
                "betas": list(spec.betas),
                "eps": spec.eps,
                "weight_decay": spec.weight_decay,
            },
        },
        "zero_optimization": {
            "stage": spec.zero_stage,
            "overlap_comm": overlaps(spec),
            "contiguous_gradients": True,
            **offload_config(spec),
        },
    }
    if spec.compute_dtype == "bfloat16":
        # sums of many micro-batches in bfloat16 would lose small gradients
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return config


def parameter_groups(policy: nn.Module, spec: LearnerSpec) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms, biases) do not."""
    params = [p for p in policy.parameters() if p.requires_grad]
    # a parameter that ZeRO-3 has divided has one dimension itself
    matrices = [p for p in params if len(getattr(p, "ds_shape", p.shape)) >= 2]
    vectors = [p for p in params if len(getattr(p, "ds_shape", p.shape)) < 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if spec.expert_parallel > 1:  # DeepSpeed makes groups of experts of them, by name
        groups = [{"name": name, **g} for name, g in zip(("matrices", "vectors"), groups)]
    return [g for g in groups if g["params"]]


def splitter(config: dict[str, Any]) -> Split:
    """A function that divides one parameter after another by DeepSpeed's zero.Init. `config`:
    DeepSpeed's."""
    import deepspeed

    def split(p: nn.Parameter) -> None:
        holder = nn.Module()
        holder.register_parameter("weight", p)
        deepspeed.zero.Init(module=holder, config_dict_or_path=config)

    return split


def gather_neighbours(policy: Policy) -> None:
    """Have ZeRO-3 gather, with a layer that rounds, the weights that its scales depend on too."""
    import deepspeed

    for layer, p in () if policy.rounded is None else policy.rounded.neighbours():
        deepspeed.zero.register_external_parameter(layer, p)


class SplitFrozenPolicy(FrozenPolicy):
    """The frozen policy, divided as the trained one is: a layer is whole while it is computed.
    Every method is collective."""

    def __init__(self, policy: Policy, config: dict[str, Any]) -> None:
        """`config`: DeepSpeed's configuration of the trained policy."""
        import deepspeed

        super().__init__(policy)
        # without an optimizer, DeepSpeed gathers and frees layers and keeps no other state
        own = {k: v for k, v in config.items() if k != "optimizer"}
        zero = own["zero_optimization"]
        own["zero_optimization"] = {k: v for k, v in zero.items() if k != "offload_optimizer"}
        self._engine = deepspeed.initialize(model=policy, config=own)[0]
        self._engine.eval()
        gather_neighbours(policy)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        import deepspeed

        held = dict(self.policy.lm.named_parameters())
        for name, tensor in tensors.items():
            p = held[name]
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
                p.copy_(tensor)

    @torch.no_grad()
    def forward(self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec) -> TokenScores:
        return TokenScores(*self._engine(mb, ids, spec)[1:])

    @torch.no_grad()
    def base(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        """The head's weight is a whole copy, freed once the micro-batch's KL is computed."""
        import deepspeed

        hidden = self._engine(mb, None, None)
        weight = self.policy.head.weight
        with deepspeed.zero.GatheredParameters([weight]):
            return hidden, weight.detach().clone()


LARGEST_BUCKET = 500_000_000  # entries of gradients that are reduced together


class ZeroEngine(TrainEngine):
    """One rank's policy and optimizer on DeepSpeed."""

    facts = DeepSpeedFacts

    @staticmethod
    def prepare(device: torch.device) -> None:
        # read when deepspeed is first imported, by transformers as well
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        # DeepSpeed's progress reports, and a deprecation inside it that we cannot act on
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        warnings.filterwarnings(
            "ignore", message="`torch.distributed.*is deprecated", category=FutureWarning
        )
        import deepspeed

        # On CPU DeepSpeed would compile a shared-memory all-reduce here that training never calls:
        # half a minute, a compiler, and a build lock that a killed process leaves behind.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)

    @staticmethod
    def splitter(spec: LearnerSpec) -> Split | None:
        return splitter(deepspeed_config(spec)) if spec.zero_stage == 3 else None

    @staticmethod
    def frozen(policy: Policy, spec: LearnerSpec, device: torch.device) -> FrozenPolicy:
        if spec.zero_stage == 3:
            return SplitFrozenPolicy(policy, deepspeed_config(spec))
        return FrozenPolicy(policy.to(device))

    @staticmethod
    def split_attention(lm: nn.Module, shards: Shards) -> None:
        from rlcore.learner.engines.model_parallel import split_attention

        split_attention(lm, shards)

    def __init__(
        self, policy: Policy, spec: LearnerSpec, total_steps: int, device: torch.device
    ) -> None:
        import deepspeed

        self.policy = policy
        self.device = device
        self.optimizer_steps = 0
        self._held = 0  # of them, without an update
        self._threads = torch.get_num_threads()
        self._stage = spec.zero_stage
        self._parks = spec.offload_while_sampling
        self._offloaded = spec.offload.optimizer != "none"
        self._rate = RateSchedule(spec, total_steps)
        self._world_size = dist.get_world_size()
        config = deepspeed_config(spec)
        config |= _divisions(policy.lm, spec)
        names = [name for name, _ in policy.lm.named_parameters()]
        # DeepSpeed makes this buffer of gradients whole, however small the model
        entries = sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters())
        zero = config["zero_optimization"]
        zero["reduce_bucket_size"] = min(LARGEST_BUCKET, entries)
        if spec.offload.nvme_path is not None:
            zero["offload_optimizer"]["nvme_path"] = swap_folder(Path(spec.offload.nvme_path))
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=policy,
            model_parameters=parameter_groups(policy, spec),
            config=config,
        )
        named = {
            n.removeprefix("lm."): p for n, p in policy.named_parameters() if n.startswith("lm.")
        }
        #: which of the weights are parts; None: all are whole, but for what ZeRO-3 divides
        self._parts: ModelParts | None = None
        self._clip: float | None = None  # the largest norm, where DeepSpeed does not clip
        if spec.expert_parallel > 1:
            from rlcore.learner.engines.model_parallel import ExpertParts

            self._parts = experts = ExpertParts(names, named, spec.expert_parallel)
            self._clip, named = spec.grad_clip, experts.named
        self.names = {plain_name(n): p for n, p in named.items() if not is_adapter(n)}
        trained = {n: p for n, p in named.items() if p.requires_grad}
        self.trained = trained
        self._adapted = adapted_layers(policy.lm)
        if self._stage == 3:
            gather_neighbours(policy)
            # adapted layers may read weights of modules inside them that they do not call, so that
            # ZeRO-3 would not gather those
            for layer in self._adapted.values():
                for p in (layer.get_base_layer().weight, *factors(layer)):
                    deepspeed.zero.register_external_parameter(layer, p)
        if spec.tensor_parallel > 1:
            from rlcore.learner.engines.model_parallel import TensorParts

            self._parts = TensorParts(trained, spec.tensor_parallel)
            # would send the first micro-batch to the other ranks, which have the same
            self._engine.first_dataloader_check.remove()
        # DeepSpeed averages over ranks that have other sequences, or other parts of them
        self._averaged = self._world_size // spec.tensor_parallel
        self._state = ZeroState(self._optimizer, self._stage, trained, self._parts)

    # ----- computing -----

    def forward(self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec) -> TokenScores:
        return TokenScores(*self._engine(mb, ids, spec)[1:])

    def forward_with_kl(
        self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec, base: KlTarget | None
    ) -> tuple[TokenScores, Tensor | None]:
        kl, *scores = self._engine(mb, ids, spec, base)
        return TokenScores(*scores), kl

    def outputs(self, mb: MicroBatch) -> Tensor:
        found: Tensor = self._engine(mb, None, None)
        return found

    @torch.no_grad()
    def as_base(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        if self._stage == 3:
            raise StageError("the policy's weights are partitioned (learner.zero_stage=3)")
        return self.policy.hidden(mb), self.policy.head.weight

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._averaged, scale_wrt_gas=False)
        if last:  # what ranks compute alike, such as the norm, is then equal to the bit
            torch.set_num_threads(self._threads)

    def grad_norm(self) -> float:
        if self._parts is not None:
            return self._divided_norm(self._parts)
        grads = self._local_gradients()
        # a rank holds its partition at stages 1 to 3, the whole gradient at stage 0
        total = torch.stack([g.detach().float().square().sum() for g in grads]).sum().double()
        if self._stage > 0 and self._world_size > 1 and not self._whole_gradients:
            dist.all_reduce(total)
        return math.sqrt(total.item())

    def _divided_norm(self, parts: ModelParts) -> float:
        whole = self._stage == 0 or self._whole_gradients
        pairs = gradients_of(self._optimizer, self.policy)
        total = parts.squares(pairs, all_held=whole).double()
        dist.all_reduce(total, group=parts.group if whole else None)
        return math.sqrt(total.item())

    @property
    def _whole_gradients(self) -> bool:
        """Stage 1 in bfloat16 accumulates whole float32 gradients on every rank."""
        return hasattr(self._optimizer, "fp32_groups_gradients")

    def _local_gradients(self) -> list[Tensor]:
        """Tensors whose squares add up to the square of the norm."""
        if self._stage == 0:
            return [p.grad for p in self.trained.values() if p.grad is not None]
        if self._whole_gradients:
            return [g for group in self._optimizer.fp32_groups_gradients for g in group]
        if self._offloaded:  # the norms of its parts are on the device, they themselves are not
            return list(self._optimizer.norm_for_param_grads.values())
        groups = self._optimizer.averaged_gradients.values()
        return [g for group in groups for g in group if g is not None]

    def rate(self) -> float:
        return self._rate(self.optimizer_steps)

    def step(self, scale: float = 1.0) -> float:
        rate = self.rate() * scale
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self._clip is not None and self._parts is not None:
            share = self._clip / (self._divided_norm(self._parts) + 1e-6)
            for _, g in gradients_of(self._optimizer, self.policy) if share < 1 else ():
                g.mul_(share)
        self._engine.step()
        self.optimizer_steps += 1
        return rate

    def hold(self) -> None:
        adam = self._optimizer if self._stage == 0 else self._optimizer.optimizer
        adam.step = lambda *_, **__: None  # all else that ends a step, on every stage
        try:
            self._engine.step()
        finally:
            del adam.step
        self.optimizer_steps += 1
        self._held += 1

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        def read(p: nn.Parameter) -> Tensor:
            found: Tensor = safe_get_full_grad(p)
            return found.detach().float()

        for name, p in self.trained.items():
            yield name, self._whole(p, read).clone()

    def _whole(self, p: Tensor, read: Callable[[Any], Tensor]) -> Tensor:
        return read(p) if self._parts is None else self._parts.whole(p, read)

    def _shape(self, p: Tensor) -> tuple[int, ...]:
        if self._parts is not None:
            return tuple(self._parts.shape(p))
        return tuple(getattr(p, "ds_shape", p.shape))

    # ----- state in and out -----

    def shapes(self) -> dict[str, tuple[int, ...]]:
        held = ((n, self._shape(p)) for n, p in self.names.items())
        return {n: shape for name, whole in held for n, shape in single_shapes(name, whole).items()}

    def weights(
        self,
        only: Collection[str] | None = None,
        *,
        on_device: bool = False,
        wanted: bool = True,
    ) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.names.items():
            asked = set(single_shapes(name, self._shape(p)))
            if only is not None:
                asked &= set(only)
            if not asked:
                continue
            layer = self._adapted.get(name)
            with self._gathered(p, *(factors(layer) if layer is not None else ())):
                held = self._whole(p, Tensor.detach)
                if not wanted:
                    continue
                whole = held if layer is None else merged(held, layer)
                for n, part in ((n, part) for n, part in singles(name, whole) if n in asked):
                    if not on_device:
                        yield n, part.to("cpu", copy=True)
                    else:  # a gathered weight is freed when the next one is asked for
                        yield n, part.clone() if self._stage == 3 else part

    def _gathered(self, *parts: Tensor) -> AbstractContextManager[None]:
        """A context in which these parameters are whole on every rank; collective at stage 3."""
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parts), enabled=self._stage == 3)

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        found = {n: p for n, (p, _) in self._factors()}
        return {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in found.items()}

    def adapter(
        self,
        only: Collection[str] | None = None,
        *,
        on_device: bool = False,
        wanted: bool = True,
    ) -> Iterator[tuple[str, Tensor]]:
        for name, (p, scale) in self._factors():
            if only is not None and name not in only:
                continue
            with self._gathered(p):
                if not wanted:
                    continue
                scaled = p.detach().float() * scale
            yield name, scaled if on_device else scaled.cpu()

    def _factors(self) -> Iterator[tuple[str, tuple[nn.Parameter, float]]]:
        for name, layer in self._adapted.items():
            yield from published_factors(name, layer).items()

    def trained_weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return self._state.weights(wanted=wanted)

    def held_weights(self) -> dict[str, Part]:
        return self._state.held_weights()

    def load_weights(self, sources: Mapping[str, Source]) -> None:
        self._state.replace_weights(sources)

    def release(self) -> int:
        return self._state.park() if self._parks else 0

    def reclaim(self) -> None:
        self._state.unpark()

    def save(self, folder: Path, run: Schedule | None = None) -> None:
        self._state.save(folder, self.optimizer_steps, run, held=self._held)

    def load(self, folder: Path) -> None:
        self.optimizer_steps, self._held = self._state.load(folder)


def _divisions(lm: nn.Module, spec: LearnerSpec) -> dict[str, Any]:
    """DeepSpeed's sections for a model of which each rank holds a part. Raises UserError for a
    model that cannot be divided so."""
    found = {}
    if spec.tensor_parallel > 1:
        from rlcore.learner.engines.model_parallel import autotp_config, check_layers

        check_layers(lm, spec.tensor_parallel)
        found["tensor_parallel"] = autotp_config(spec.tensor_parallel)
    if spec.expert_parallel > 1:
        from rlcore.learner.engines.model_parallel import autoep_config, check_experts

        check_experts(lm, spec.expert_parallel)
        found["expert_parallel"] = autoep_config(lm, spec.expert_parallel)
    return found


def gradients_of(optimizer: Any, model: nn.Module) -> Iterator[Any]:
    """(parameter, gradient that this rank holds) of DeepSpeed's optimizer; without one, of the
    model's parameters themselves."""
    if hasattr(optimizer, "fp32_groups_gradients"):
        for params, grads in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients):
            yield from zip(params, grads)
    elif hasattr(optimizer, "averaged_gradients"):
        for i, grads in optimizer.averaged_gradients.items():
            held = (g for g in grads if not getattr(g, "_zero_padding", False))
            yield from zip(optimizer.params_in_partition[i], held)
    else:
        yield from ((p, p.grad) for p in model.parameters() if p.grad is not None)
