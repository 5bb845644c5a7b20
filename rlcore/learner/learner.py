"""One data-parallel rank of the learner: update phases, optimizer steps, supervised steps, state in and out.

An update phase is the H optimizer steps between two publishes; p_ref is the policy as the phase began.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlcore.attention.block_topk import BlockTopK
from rlcore.corrections import build
from rlcore.errors import StageError, UserError
from rlcore.learner.batch import StepBatch, build_batch, staleness_split
from rlcore.learner.deepspeed_engine import LrSchedule, RankReduce, ZeroEngine, join_ranks
from rlcore.learner.distill import SparseCopy
from rlcore.learner.head import HeadSpec
from rlcore.learner.lora import LoraSpec, add_adapters, save_adapter
from rlcore.learner.loss import Objective, Sums
from rlcore.learner.packing import Layout, MicroBatch, Tokens, dummy, pack
from rlcore.learner.policy import DTYPES, Attention, FrozenPolicy, Policy, load_causal_lm
from rlcore.learner.state_files import Write
from rlcore.learner.update import Update
from rlcore.models import ATTENTION_FILE
from rlcore.objectives.advantages import Advantage
from rlcore.objectives.aggregate import Aggregation
from rlcore.objectives.policy_loss import Loss
from rlcore.seeding import derive_seed
from rlcore.types import Group

COPY = "sparse"  # folder of the sparse copy in a checkpoint and an export
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


class LearnerRank:
    """Owns this rank's engine. Every method is collective: all ranks call it, in the same order.

    Arguments are the keys of `learner`, `algorithm`, `rollout` and `correction` in the run's configuration, plain.
    `corrections` is name -> keyword arguments in their order; `threads` are torch's on the CPU. `frozen_path`: model
    folder of the policy that KL is taken to, by default the starting one. `lora`: fields of LoraSpec; adapters are
    trained instead of the model. `sparse`: fields of BlockTopK, the actors' rule; the policy is then trained through
    sparse attention, or with `distill` (kl, kl_coef, lr, lora) through dense attention beside a sparse copy with
    adapters (DistillSparse).
    """

    def __init__(
        self,
        *,
        model_path: str,
        rank: int = 0,
        world_size: int = 1,
        master_addr: str = "127.0.0.1",
        master_port: int,
        device: Literal["cpu", "cuda"] = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
        zero_stage: int = 0,
        lr: float,
        lr_warmup_steps: int = 0,
        lr_schedule: LrSchedule = "constant",
        total_steps: int | None = None,
        lr_final: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        micro_batch_tokens: int = 8192,
        layout: Layout | Literal["auto"] = "auto",
        attention: Attention | Literal["auto"] = "auto",
        gradient_checkpointing: bool = False,
        head_chunk_tokens: int = 1024,
        ref_pass: Literal["auto", "always"] = "auto",
        temperature: float = 1.0,
        corrections: Mapping[str, Mapping[str, Any]] | None = None,
        advantage: Advantage = "grpo",
        loss: Loss = "ppo",
        eps_low: float = 0.2,
        eps_high: float = 0.2,
        aggregation: Aggregation = "token-mean",
        kl_coef: float = 0.0,
        kl_estimator: str = "k3",
        entropy_coef: float = 0.0,
        max_response_len: int = 256,
        overlong_buffer: int = 0,
        overlong_penalty: float = 1.0,
        logprobs_k: int = 0,
        run_seed: int = 0,
        threads: int = 1,
        pad_id: int = 0,
        collective_timeout_s: float = 1800.0,
        frozen_path: str | None = None,
        lora: Mapping[str, Any] | None = None,
        sparse: Mapping[str, Any] | None = None,
        distill: Mapping[str, Any] | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        self.rank, self.world_size, self.run_seed = rank, world_size, run_seed
        self.device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        if attention == "auto":
            flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
            attention = "flash_attention_2" if flash else "sdpa"
        if layout == "auto":
            layout = "packed" if attention == "flash_attention_2" else "sorted"
        self.layout, self.micro_batch_tokens, self.pad_id = layout, micro_batch_tokens, pad_id
        pipeline = build(corrections or {}, run_seed)
        needs = pipeline.needs
        objective = Objective(
            loss, eps_low, eps_high, needs.short_circuit, aggregation, kl_coef, kl_estimator, entropy_coef
        )
        join_ranks(rank, world_size, master_addr, master_port, self.device, collective_timeout_s)
        self.reduce = RankReduce(self.device)
        rule = None if sparse is None else BlockTopK(**sparse)
        self._rule = rule
        mine = None if distill is not None else rule
        lm = load_causal_lm(model_path, dtype, attention, sparse=mine is not None)
        self.model_path, self.model_config = model_path, lm.config
        self.lora = None if lora is None else LoraSpec(**lora)
        if self.lora is not None:
            add_adapters(lm, self.lora, seed=derive_seed(run_seed, "lora"), key="learner.lora")
        if gradient_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        frozen = None
        if kl_coef > 0:  # the starting policy attends as the trained one does, another model densely
            its = None if frozen_path else mine
            start = load_causal_lm(frozen_path or model_path, dtype, attention, sparse=its is not None)
            frozen = FrozenPolicy(Policy(start.to(self.device), its))
        make_engine = partial(
            ZeroEngine,
            zero_stage=zero_stage,
            dtype=dtype,
            device=self.device,
            lr_warmup_steps=lr_warmup_steps,
            lr_schedule=lr_schedule,
            total_steps=total_steps,
            lr_final=lr_final,
            betas=betas,
            weight_decay=weight_decay,
            grad_clip=grad_clip,
        )
        self.engine = make_engine(Policy(lm.train(), mine), lr=lr)
        self.update = Update(
            engine=self.engine,
            frozen=frozen,
            pipeline=pipeline,
            objective=objective,
            spec=HeadSpec(temperature, 0, needs.safe_set_rho, entropy_coef != 0.0, head_chunk_tokens),
            topk=max(logprobs_k, 0),
            reduce=self.reduce,
            advantage=advantage,
            max_response_len=max_response_len,
            overlong=(overlong_buffer, overlong_penalty),
            ref_pass=ref_pass,
        )
        self.copy: SparseCopy | None = None
        if distill is not None:
            if zero_stage == 3 or rule is None:
                raise UserError(
                    f"learner.distill needs a sparse actor and learner.zero_stage 0, 1 or 2 (it is {zero_stage})."
                )
            copied = load_causal_lm(model_path, dtype, attention, sparse=True)
            self._copy_lora = LoraSpec(**distill["lora"])
            key = "learner.distill.lora"
            add_adapters(copied, self._copy_lora, seed=derive_seed(run_seed, "distill"), key=key)
            if gradient_checkpointing:
                copied.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            if distill["kl"] == "topk":
                self.update.topk, self.update.keep_topk = max(logprobs_k, 1), True
            self.copy = SparseCopy(
                make_engine(Policy(copied.train(), rule), lr=distill["lr"]),
                self.engine,
                objective=objective,
                spec=self.update.spec,
                kl=distill["kl"],
                kl_coef=distill["kl_coef"],
                reduce=self.reduce,
                max_response_len=max_response_len,
            )
        #: what was chosen where the configuration left it open, for reports
        self.facts = {"attention": attention, "layout": layout, "dtype": dtype, "zero_stage": str(zero_stage)}
        if self.lora is not None:
            self.facts["lora"] = f"rank {self.lora.rank}"
        self._phase: list[StepBatch] = []
        self._next = 0  # index of the phase's next batch
        self._fresh = True  # no step of the phase has been taken: p_new is p_ref
        self._ref_seconds = 0.0

    # ----- reinforcement learning -----

    def begin_phase(self, groups_per_step: Sequence[Sequence[Group]], *, first: bool = True) -> None:
        """Take this rank's whole groups for each step of an update phase, and compute what precedes its first step.

        Ranks may have unequal shares, also empty ones, but the same number of steps. `first=False`: the rest of a phase
        whose first step was taken before a checkpoint, so p_new is not p_ref any more.
        """
        start = time.monotonic()
        with_topk = self.update.topk > 0
        self._phase = [build_batch(groups, with_topk=with_topk, device=self.device) for groups in groups_per_step]
        self._next, self._fresh = 0, first
        for batch in self._phase:
            batch.micro = self._micro_batches(batch.tokens)
        self.update.prepare(self._phase, first=first)
        self._ref_seconds = time.monotonic() - start

    def train_step(self, step: int) -> dict[str, float]:
        """The optimizer step that turns version `step` into `step + 1`, on the phase's next batch.

        Returns global metrics, the same on every rank (times are this rank's). Raises StageError, before anything is
        updated, when a loss or a gradient is not finite.
        """
        start = time.monotonic()
        self._seed(step)
        batch, first = self._phase[self._next], self._fresh
        self._fresh = False
        self._next += 1
        sums, kept, metrics = self.update.run(batch, step, first=first)
        metrics |= self._apply(step, sums, batch.tokens, self.update.objective.sum_names)
        for name in metrics:
            if name.startswith("policy/"):
                metrics[name] /= max(kept, 1)
        metrics |= staleness_split(batch, step, self.reduce)
        metrics["time/learner_update_s"] = time.monotonic() - start
        if self.copy is not None:
            metrics |= self.copy.step(batch, step, self.update.group_advantages(batch))
        metrics["time/learner_ref_s"] = self._ref_seconds if first else 0.0
        return metrics

    # ----- supervised learning -----

    def sft_step(self, step: int, examples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, float]:
        """One optimizer step of cross-entropy on this rank's (prompt ids, answer ids with end of sequence).

        The loss is the mean over the answer tokens of all ranks, at temperature 1. Returns global metrics.
        """
        start = time.monotonic()
        self._seed(step)
        tokens = [Tokens(np.asarray(p), np.asarray(a)) for p, a in examples]
        micro = self._micro_batches(tokens)
        count = float(self.reduce(torch.tensor(float(sum(len(t.response_ids) for t in tokens)))))
        spec = HeadSpec(chunk=self.update.spec.chunk)
        sums = Sums()
        for i, mb in enumerate(micro):
            scores = self.engine.forward(mb, None, spec)
            loss = -scores.logp.sum() / max(count, 1.0) * (1.0 if len(mb.sequences) else 0.0)
            self.engine.backward(loss, last=i == len(micro) - 1)
            if len(mb.sequences):
                nonfinite = (~torch.isfinite(scores.logp)).sum()
                sums.add({"loss/sft": loss.detach(), "entropy": scores.entropy.sum(), "nonfinite_logp": nonfinite})
        metrics = self._apply(step, sums, tokens, ("loss/sft",))
        return metrics | {"time/learner_update_s": time.monotonic() - start}

    # ----- shared by both -----

    def _seed(self, step: int) -> None:
        """A step's randomness (dropout, if the model has any) depends on its number, so there is no state to save."""
        torch.manual_seed(derive_seed(self.run_seed, "learner", step, self.rank))

    def _micro_batches(self, tokens: Sequence[Tokens]) -> list[MicroBatch]:
        """This rank's micro-batches, filled up with dummies to the largest count of any rank (at least one)."""
        micro = pack(tokens, self.micro_batch_tokens, self.layout, self.pad_id, self.device)
        wanted = int(self.reduce.max(torch.tensor(max(1, len(micro)))))
        return micro + [dummy(self.pad_id, self.device)] * (wanted - len(micro))

    def _apply(self, step: int, sums: Sums, tokens: Sequence[Tokens], names: tuple[str, ...]) -> dict[str, float]:
        """Check loss and gradient, update, and make global metrics of the sums."""
        trained = [len(t.response_ids) for t in tokens]
        sizes = {"train/tokens": sum(trained), "train/sequences": len(trained)}
        sums.add({name: torch.tensor(float(v), device=self.device) for name, v in sizes.items()})
        metrics = sums.over_ranks((*names, "entropy", "nonfinite_logp", *sizes), self.reduce, self.device)
        norm = self.engine.grad_norm()
        nonfinite = metrics.pop("nonfinite_logp")
        losses = {name: v for name, v in metrics.items() if name.startswith("loss/")}
        if not all(map(math.isfinite, [norm, *losses.values()])):
            seen = ", ".join(f"{name} {v:.4g}" for name, v in losses.items())
            raise StageError(
                f"optimizer step {step} was not taken: {seen}, gradient norm {norm:.4g}, {nonfinite:.0f} of "
                f"{metrics['train/tokens']:.0f} log-probs of the learner not finite."
            )
        metrics["entropy"] /= max(metrics["train/tokens"], 1)
        return metrics | {"grad_norm": norm, "lr": self.engine.step()}

    def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], *, copy: bool = False
    ) -> list[np.ndarray]:
        """Log-probs [T] float32 of each (prompt ids, response ids) under the current policy, as training takes them.

        `copy`: under the sparse copy instead (DistillSparse).
        """
        engine = self.engine if self.copy is None or not copy else self.copy.engine
        tokens = [Tokens(np.asarray(p), np.asarray(r)) for p, r in sequences]
        out = [np.zeros(len(t.response_ids), dtype=np.float32) for t in tokens]
        with torch.no_grad():
            for mb in self._micro_batches(tokens):
                logp = engine.forward(mb, None, self.update.spec).logp
                for i, sequence in enumerate(mb.sequences.tolist()):
                    out[sequence] = logp[mb.row == i].cpu().numpy()
        return out

    # ----- state -----

    def state_for_publish(self, dtype: str, *, copy: bool = False) -> dict[str, Tensor]:
        """Whole weights by Hugging Face name on the CPU in `dtype`, adapters merged, tied ones once.

        `copy`: of the sparse copy, theta and phi in one. On ranks other than 0 nothing.
        """
        wanted = DTYPES[dtype]
        engine = self.engine if self.copy is None or not copy else self.copy.engine
        return {name: w.to(wanted) for name, w in engine.weights() if self.rank == 0}

    def trained_weights(self) -> dict[str, Tensor]:
        """What is trained (the weights, or adapters on them) in float32: `load_weights` takes it back. Rank 0's."""
        weights = {name: w for name, w in self.engine.trained_weights() if self.rank == 0}
        if self.copy is not None:
            phi = self.copy.engine.trained_weights()
            weights |= {f"{COPY}/{name}": w for name, w in phi if self.rank == 0}
        return weights

    def save(self, folder: str | Path, run: Callable[[Write], object] | None = None) -> None:
        """Write the learner's state (float32 weights, Adam moments, step count) to `folder` as safetensors.

        `run`: is given the writing of each file as a job, to be done in order; without it all is written on return.
        """
        self.engine.save(Path(folder), run)
        if self.copy is not None:
            self.copy.engine.save(Path(folder) / COPY, run)

    def load(self, folder: str | Path, *, keep_phase: bool = False) -> None:
        """Continue from `save`, also one made with another ZeRO stage or number of ranks.

        `keep_phase`: the phase just begun stays (its p_ref was computed under other weights than those loaded).
        """
        self.engine.load(Path(folder))
        if self.copy is not None:
            self.copy.engine.load(Path(folder) / COPY)
            self.copy.share()
        if not keep_phase:
            self._phase = []

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace what is trained (as `trained_weights` gives it) and nothing else."""
        phi = {name.removeprefix(f"{COPY}/"): t for name, t in tensors.items() if name.startswith(f"{COPY}/")}
        self.engine.load_weights({name: t for name, t in tensors.items() if not name.startswith(f"{COPY}/")})
        if self.copy is not None:
            self.copy.engine.load_weights(phi)
            self.copy.share()

    def load_frozen(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights of the frozen policy that KL is taken to (Hugging Face names, whole)."""
        if self.update.frozen is None:
            raise RuntimeError("this learner has no frozen policy")
        self.update.frozen.load(tensors)

    def export(self, folder: str | Path) -> None:
        """Write a Hugging Face folder: merged weights as safetensors, configuration and tokenizer.

        Adapters are written beside them as a PEFT folder, `adapter`; a sparse copy the same way in `sparse`, merged
        and as an adapter on the policy exported here, with its rule of attention in ATTENTION_FILE.
        """
        self._export(Path(folder), self.engine, self.lora, self.model_path)
        if self.copy is not None:
            self._export(Path(folder) / COPY, self.copy.engine, self._copy_lora, str(Path(folder).resolve()))
            if self.rank == 0:  # its weights are made for this attention and load without a word for any
                text = json.dumps({"sparse": asdict(self._rule)}, indent=1)  # type: ignore[arg-type]
                (Path(folder) / COPY / ATTENTION_FILE).write_text(text)

    def _export(self, out: Path, engine: ZeroEngine, lora: LoraSpec | None, base_model: str) -> None:
        if lora is not None:
            adapters = {name: w for name, w in engine.trained_weights() if self.rank == 0}
            if self.rank == 0:
                save_adapter(out / "adapter", adapters, lora, base_model)
        state = {name: w.contiguous() for name, w in engine.weights() if self.rank == 0}
        if self.rank != 0:
            return
        out.mkdir(parents=True, exist_ok=True)
        save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})
        self.model_config.save_pretrained(out)  # type: ignore[operator, union-attr]
        for name in TOKENIZER_FILES:
            if (Path(self.model_path) / name).is_file():
                shutil.copy(Path(self.model_path) / name, out / name)
