"""DeepSpeed behind five verbs: forward, backward, step, the whole state in, the whole state out. ZeRO 0 to 3.

Gradient accumulation. DeepSpeed's own counter is not used: the number of micro-batches changes from step to step, and
with `gradient_accumulation_steps=1` every backward would end an accumulation (ZeRO-2 then keeps the last micro-batch
only). The boundary is set by hand before every backward, and no loss is divided by a number of steps. Every rank must
make the same number of backward calls.

Losses are sums with global normalisers. DeepSpeed averages gradients over ranks: `backward` multiplies by their number.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.errors import StageError, UserError
from rlcore.learner.head import HeadSpec, KlTarget
from rlcore.learner.lora import adapted_layers, factors, is_adapter, merged, plain_name
from rlcore.learner.packing import MicroBatch
from rlcore.learner.policy import Policy
from rlcore.learner.state_files import StateWriter, Write, read_index, read_tensors
from rlcore.types import TokenScores
from rlcore.weights.rendezvous import meeting_store

LrSchedule = Literal["constant", "linear", "cosine"]
ADAM_STATES = ("exp_avg", "exp_avg_sq")


def join_ranks(
    rank: int, world_size: int, master_addr: str, master_port: int, device: torch.device, timeout_s: float
) -> None:
    """Meet the other ranks: gloo on CPU, NCCL on CUDA. A collective that waits longer than `timeout_s` raises."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        torch.cuda.set_device(device)
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        alone = world_size == 1  # nobody to meet: no port is taken
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=dist.HashStore() if alone else meeting_store(master_addr, master_port, rank, world_size, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    # DeepSpeed's progress reports, and a deprecation inside it that nobody here can act on
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    import deepspeed

    # On CPU DeepSpeed would compile a shared-memory all-reduce here that training never calls: half a minute, a
    # compiler, and a build lock that a killed process leaves behind for the next one to wait on.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)


class RankReduce:
    """Implements `rlcore.interfaces.Reduce` over all ranks; the identity on one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, values: Tensor) -> Tensor:
        return self._all(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._all(values, dist.ReduceOp.MAX)

    def _all(self, values: Tensor, op: Any) -> Tensor:
        if dist.get_world_size() == 1:
            return values
        moved = values.detach().to(self.device, copy=True)
        dist.all_reduce(moved, op=op)
        return moved.to(values.device)


def learning_rate(
    step: int, lr: float, warmup: int, schedule: LrSchedule, total: int | None, final: float = 0.0
) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then constant or down to `final` * lr at `total`."""
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    if total is None:
        raise UserError(f"learner.lr_schedule={schedule} needs the number of steps of the run (schedule.steps).")
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return lr * (final + (1.0 - final) * left)


class ZeroEngine:
    """One rank's policy and optimizer. `optimizer_steps` counts the steps taken since the fresh model."""

    def __init__(
        self,
        policy: Policy,
        *,
        zero_stage: int,
        dtype: str,
        device: torch.device,
        lr: float,
        lr_warmup_steps: int,
        lr_schedule: LrSchedule,
        total_steps: int | None,
        lr_final: float = 0.0,
        betas: tuple[float, float],
        weight_decay: float,
        grad_clip: float,
    ) -> None:
        import deepspeed

        if dtype == "bfloat16" and zero_stage == 0:
            raise UserError.choice(
                "learner.zero_stage", 0, (1, 2, 3), "with learner.dtype=bfloat16 gradients would accumulate in bfloat16"
            )
        self.policy, self.stage, self.dtype, self.device = policy, zero_stage, dtype, device
        self._rate = (lr, lr_warmup_steps, lr_schedule, total_steps, lr_final)
        learning_rate(lr_warmup_steps, *self._rate)  # a schedule without an end is refused now, not mid-run
        self.optimizer_steps = 0
        self.world_size = dist.get_world_size()
        config = _config(zero_stage, dtype, lr, betas, weight_decay, grad_clip)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=policy, model_parameters=_parameter_groups(policy, weight_decay), config=config
        )
        named = {n.removeprefix("lm."): p for n, p in policy.named_parameters() if n.startswith("lm.")}
        #: the model's weights by Hugging Face name, and what the optimizer trains: the same, or adapters on them
        self.names = {plain_name(n): p for n, p in named.items() if not is_adapter(n)}
        self.trained = {n: p for n, p in named.items() if p.requires_grad}
        self._adapted = adapted_layers(policy.lm)

    # ----- computing -----

    def forward(self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec) -> TokenScores:
        """Scores of a micro-batch; gradients according to torch's grad mode."""
        return TokenScores(*self._engine(mb, ids, spec)[1:])

    def forward_with_kl(
        self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec, base: KlTarget | None
    ) -> tuple[TokenScores, Tensor | None]:
        """The same, with the KL [N] to `base`, another policy at the same positions."""
        kl, *scores = self._engine(mb, ids, spec, base)
        return TokenScores(*scores), kl

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of a micro-batch's share of the global loss; `last` ends the accumulation."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.world_size, scale_wrt_gas=False)

    def grad_norm(self) -> float:
        """Global L2 norm of the accumulated gradient before clipping; NaN or inf if any entry is."""
        grads = self._local_gradients()
        total = torch.stack([g.detach().float().square().sum() for g in grads]).sum().double()
        if self.stage > 0 and self.world_size > 1 and not self._whole_gradients:
            dist.all_reduce(total)
        return math.sqrt(total.item()) if math.isfinite(total.item()) else total.item()

    @property
    def _whole_gradients(self) -> bool:
        """Stage 1 in bfloat16 accumulates whole float32 gradients on every rank."""
        return hasattr(self._optimizer, "fp32_groups_gradients")

    def _local_gradients(self) -> list[Tensor]:
        if self.stage == 0:
            return [p.grad for p in self.trained.values() if p.grad is not None]
        if self._whole_gradients:
            return [g for group in self._optimizer.fp32_groups_gradients for g in group]
        return [g for group in self._optimizer.averaged_gradients.values() for g in group if g is not None]

    def step(self) -> float:
        """Clip, update and clear; returns the learning rate used."""
        rate = learning_rate(self.optimizer_steps, *self._rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        self.optimizer_steps += 1
        return rate

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole accumulated gradients by parameter name, after the last backward. All ranks must call it."""
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(p).detach().float().clone() for name, p in self.trained.items()}

    # ----- state -----

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every (name, whole CPU copy in the model's dtype), adapters merged, tied weights once.

        All ranks iterate, rank 0's count.
        """
        import deepspeed

        for name, p in self.names.items():
            layer = self._adapted.get(name)
            parts = [p] if layer is None else [p, *factors(layer)]
            with deepspeed.zero.GatheredParameters(parts, enabled=self.stage == 3):
                whole = p.detach() if layer is None else merged(p.detach(), layer)
                yield name, whole.to("cpu", copy=True)

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every (parameter name, whole float32 CPU copy) of what is trained. All ranks iterate, rank 0's count."""
        for name, p in self.trained.items():
            yield name, self._read(p, "weight").reshape(self._shape(p)).to("cpu", torch.float32, copy=True)

    def save(self, folder: Path, run: Callable[[Write], object] | None = None) -> None:
        """Write what is trained: float32 weights, Adam moments and the step count. All ranks call it; rank 0 writes.

        `run`: is given the writing as jobs (see `StateWriter`), so that training can go on meanwhile.

        The learning rate is a function of the step and torch's generator is seeded by it, so neither has a state.
        """
        writer = StateWriter(folder, *([run] if run else [])) if dist.get_rank() == 0 else None
        if self.optimizer_steps:
            self._link_states()
        for name, p in self.trained.items():
            for key in ("weight", *ADAM_STATES) if self.optimizer_steps else ("weight",):
                whole = self._read(p, key)
                if writer is not None:
                    writer.add(f"{key}:{name}", whole.reshape(self._shape(p)))
        if writer is not None:
            writer.close(optimizer_steps=self.optimizer_steps)
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Continue from `save`, at any ZeRO stage and rank count. Raises StageError if the names do not match."""
        facts = read_index(folder)
        self.optimizer_steps = int(facts["optimizer_steps"])
        keys = ("weight", *ADAM_STATES) if self.optimizer_steps else ("weight",)
        missing = {f"{key}:{name}" for key in keys for name in self.trained}
        self._make_states(keys[1:])
        for label, tensor in read_tensors(folder):
            key, name = label.split(":", 1)
            if label not in missing or tensor.shape != self._shape(self.trained[name]):
                raise StageError(f"learner state in {folder} does not fit the model: {label} {tuple(tensor.shape)}")
            missing.discard(label)
            self._write(self.trained[name], key, tensor.to(self.device))
        if missing:
            raise StageError(f"learner state in {folder} lacks {len(missing)} tensors, e.g. {min(missing)}")
        self._weights_from_masters()

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the trained weights, leaving the optimizer alone. Raises StageError if the names do not match."""
        if set(tensors) != set(self.trained):
            raise StageError(f"weights do not fit the model: {sorted(set(tensors) ^ set(self.trained))[:3]}")
        for name, tensor in tensors.items():
            self._write(self.trained[name], "weight", tensor.to(self.device))
        self._weights_from_masters()

    def _shape(self, p: nn.Parameter) -> torch.Size:
        return getattr(p, "ds_shape", p.shape)

    def _read(self, p: nn.Parameter, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.stage == 0:
            return p.detach() if key == "weight" else self._optimizer.state[p][key]
        return safe_get_full_fp32_param(p) if key == "weight" else safe_get_full_optimizer_state(p, key)

    def _write(self, p: nn.Parameter, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if self.stage == 0:
            (p.data if key == "weight" else self._optimizer.state[p][key]).copy_(value)
        elif self.stage == 3:  # DeepSpeed's own setter fails on a parameter that the ranks do not divide evenly
            part = self._optimizer.get_local_fp32_param(p, None if key == "weight" else key)
            mine = value.flatten()[dist.get_rank() * part.numel() :][: part.numel()]
            part.data[: mine.numel()].copy_(mine)
        elif key == "weight":
            safe_set_full_fp32_param(p, value)
        else:
            safe_set_full_optimizer_state(p, value, key)

    def _make_states(self, keys: tuple[str, ...]) -> None:
        """Adam creates its moments at its first step; a loaded state needs them before."""
        inner = self._optimizer if self.stage == 0 else self._optimizer.optimizer
        if not keys:
            inner.state.clear()
            return
        for flat in self._flat_masters():
            zeros = {key: torch.zeros_like(flat) for key in keys}
            inner.state[flat] = {"step": torch.tensor(float(self.optimizer_steps)), **zeros}
        self._link_states()

    def _link_states(self) -> None:
        """Let DeepSpeed find the moments of each parameter.

        It does so itself after the first step of its first parameter group, when the second has no states yet.
        """
        if self.stage in (1, 2):
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _flat_masters(self) -> list[Tensor]:
        """The tensors that torch's AdamW holds states for."""
        if self.stage == 0:
            return list(self.trained.values())
        attributes = ("fp32_groups_flat_partition", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
        for attribute in attributes:
            if hasattr(self._optimizer, attribute):
                return list(getattr(self._optimizer, attribute))
        raise StageError(f"unknown DeepSpeed optimizer {type(self._optimizer).__name__} at ZeRO stage {self.stage}")

    def _weights_from_masters(self) -> None:
        """Make the model's weights what the float32 masters say."""
        if self.stage in (1, 2):
            self._optimizer.update_lp_params()
        elif self.stage == 3:
            opt = self._optimizer
            for i, master in enumerate(opt.fp32_partitioned_groups_flat):
                opt.fp16_partitioned_groups_flat[i].data.copy_(master.data)
                opt._unflatten_partitioned_parameters(i)
            if opt.persistent_parameters:  # small ones are kept whole on every rank: gather them anew
                opt.persistent_parameters[0].partition(opt.persistent_parameters)
                opt.persistent_parameters[0].all_gather(opt.persistent_parameters)


def _parameter_groups(policy: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms, biases) do not."""
    params = [p for p in policy.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def _config(
    stage: int, dtype: str, lr: float, betas: tuple[float, float], weight_decay: float, grad_clip: float
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": grad_clip,
        "steps_per_print": 2**31,
        # torch's AdamW: no C++ build, and the same arithmetic on CPU and GPU
        "optimizer": {
            "type": "AdamW",
            "params": {"torch_adam": True, "lr": lr, "betas": list(betas), "weight_decay": weight_decay},
        },
        "zero_optimization": {"stage": stage, "overlap_comm": False, "contiguous_gradients": True},
    }
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return config
