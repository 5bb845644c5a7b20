"""DistillSparse, algorithm 1, steps 5 and 7: adapters phi that make the sparse actor follow the
dense policy theta.

The sparse copy is theta's own tensors (shared and frozen, so always up to date) with low-rank
adapters, attending by the actors' rule. Its loss on the actor's own samples is PPO's against the
actor's log-probs plus `kl_coef` times the reverse KL to the dense policy.

The dense log-probs of the KL. At the first step of an update phase they are taken from the policy's
own update (step 4), one optimizer step before the weights that the copy shares. At the later steps
of a phase those belong to an older teacher, so k1, k3 and topk take a pass of theta as it is now;
`full` always does.

The loss is PPO's whatever the policy's is, since p_old is the actor here: the ratio is
p_sparse/p_inf and contains the actor's numerics. GSPO's clip of 3e-4 on the ratio's mean would bind
on those alone, and a loss without a ratio would not correct for the actor at all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlcore.interfaces import Reduce
from rlcore.learner.batch import StepBatch
from rlcore.learner.exporting import write_attention
from rlcore.learner.lm_head import HeadSpec, KlTarget, TopkTarget
from rlcore.learner.metric_sums import LOSS, Declared, Sums, take_step
from rlcore.learner.packing import MicroBatch
from rlcore.learner.protocols import Companion, TrainEngine
from rlcore.learner.ranks import is_first_rank
from rlcore.learner.specs import SPARSE_COPY, DistillSpec, LearnerJob
from rlcore.learner.state import export_model
from rlcore.learner.step_loss import StepLoss
from rlcore.objectives.advantages import without_truncated
from rlcore.objectives.kl import CLAMP, distill_sampled
from rlcore.objectives.losses import CLIP_SHARES, coefficients, counts
from rlcore.objectives.protocols import LossTensors
from rlcore.objectives.specs import ObjectiveSpec, loss_class
from rlcore.types import TokenScores

STALE_CAP = 2.0  # truncation of p_sparse/p_inf where samples are older than phi
_SUMS = {
    "loss/sparse_policy": LOSS,
    "loss/distill_kl": LOSS,
    "distill/actor_abs_dlogp_mean": Declared("kept tokens"),
    "distill/clip_share": Declared("kept tokens"),
}


@dataclass(frozen=True, slots=True)
class _Dense:
    """Log-probs under theta of a micro-batch's N tokens, and at the actor's top ids."""

    logp: Tensor  # [N]
    logp_at_ids: Tensor | None  # [N, k]


class SparseCopy(Companion):
    """theta + phi and phi's optimizer."""

    name = SPARSE_COPY

    def __init__(
        self,
        job: LearnerJob,
        distill: DistillSpec,
        engine: TrainEngine,
        policy: TrainEngine,
        reduce: Reduce,
    ) -> None:
        """`engine` holds an adapted model of the same folder as `policy`'s."""
        self.engine = engine
        self.adapter_alone = distill.lora.publish == "adapter"
        self._job = job
        self._distill = distill
        self._policy = policy
        self._reduce = reduce
        self._loss = StepLoss(_objective(job.objective), short_circuit=False)
        self._head = HeadSpec(
            job.sampling.temperature,
            job.learner.head_chunk_tokens,
            fp32=job.learner.exact_head,
        )
        self.weights_changed()

    def weights_changed(self) -> None:
        """Make the copy's base weights the policy's own tensors."""
        for name, p in self.engine.names.items():
            p.data = self._policy.names[name].data

    def step(self, batch: StepBatch, step: int, advantages: Tensor) -> dict[str, float]:
        start = time.monotonic()
        self.weights_changed()
        mask = batch.sent.mask & torch.isfinite(batch.sent.logp_inf)
        if self._job.objective.overlong_filter:
            mask = without_truncated(mask, batch.sent.truncated)
        tokens, sequences = counts(mask, self._reduce)
        mode, max_len = self._job.objective.aggregation, self._job.sampling.max_new_tokens
        coefs = coefficients(mode, mask, tokens, sequences, max_len)
        sums = Sums.of_step(_SUMS, batch.episodes, self.engine.device)
        for i, mb in enumerate(batch.micro):
            dense = self._dense(batch, mb)
            target = self._target(batch, mb, dense)
            scores, kl = self.engine.forward_with_kl(mb, None, self._head, target)
            if len(mb.episodes):
                rows = mb.episodes
                tokens_of = self._tensors(batch, mb, scores, advantages, mask[rows])
                distance = self._distance(mb, tokens_of, dense, kl)
                loss, values = self._micro_loss(tokens_of, distance, coefs[rows])
                values["entropy"] = scores.entropy.sum()
                values["nonfinite_logp"] = (~torch.isfinite(scores.logp)).sum()
                sums.add(values)
            else:
                # joins the other ranks' collectives at zero weight
                loss = 0.0 * (scores.logp.sum() + (0.0 if kl is None else kl.sum()))
            self.engine.backward(loss, last=i == len(batch.micro) - 1)
        what = f"the adapters' step {step} (learner.distill)"
        metrics = take_step(self.engine, sums, self._reduce, what=what, kept=tokens)
        return {name: metrics[name] for name in _SUMS} | {
            "distill/grad_norm": metrics["grad_norm"],
            "time/learner_distill_s": time.monotonic() - start,
        }

    def _tensors(
        self,
        batch: StepBatch,
        mb: MicroBatch,
        scores: TokenScores,
        advantages: Tensor,
        on: Tensor,
    ) -> LossTensors:
        """Tensors of the policy loss, whose p_old is the actor: this copy, perhaps at an older
        version."""
        rows = mb.episodes
        logp_inf = torch.where(on, batch.sent.logp_inf[rows], 0.0)
        return LossTensors(
            logp_new=mb.dense(scores.logp, on.shape[1]),
            logp_ref=logp_inf,
            advantages=advantages[rows],
            weight=torch.ones_like(logp_inf),
            mask=on,
            sampled=on,
        )

    def _micro_loss(
        self, tokens: LossTensors, distance: Tensor, coefs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a micro-batch's episodes, and its sums. distance [b, T]: each token's KL."""
        loss, values = self._loss(tokens, coefs, torch.zeros_like(tokens.weight), None)
        total = (distance * coefs).sum()
        clipped = [values[f"policy/{name}"] for name in CLIP_SHARES]
        return loss + self._distill.kl_coef * total, {
            "loss/sparse_policy": values["loss/policy"],
            "loss/distill_kl": total,
            "distill/actor_abs_dlogp_mean": _gap(tokens).abs().sum(),
            "distill/clip_share": torch.stack(clipped).sum(),
        }

    def _distance(
        self, mb: MicroBatch, tokens: LossTensors, dense: _Dense | None, kl: Tensor | None
    ) -> Tensor:
        """Each token's KL to the dense policy, [b, T]."""
        on = tokens.mask
        if kl is not None:
            return torch.where(on, mb.dense(kl, on.shape[1]), 0.0)
        assert dense is not None and self._distill.kl in ("k1", "k3")
        ratio = _gap(tokens).clamp(-CLAMP, CLAMP).exp().clamp(max=STALE_CAP)
        logp_dense = mb.dense(dense.logp, on.shape[1])
        return distill_sampled(self._distill.kl, tokens.logp_new, logp_dense, on, ratio)

    @torch.no_grad()
    def _dense(self, batch: StepBatch, mb: MicroBatch) -> _Dense | None:
        """Log-probs under theta of a micro-batch's tokens; None where the KL takes all of theta."""
        if self._distill.kl == "full":
            return None
        ids = self._ids(batch, mb)
        if batch.ref_is_old:
            scores = self._policy.forward(mb, ids, self._head)
            return _Dense(scores.logp, scores.logp_at_ids)
        ref = batch.ref
        assert ref is not None
        if not len(mb.episodes):  # a dummy's one position
            nothing = None if ids is None else ref.logp.new_zeros(ids.shape)
            return _Dense(ref.logp.new_zeros(1), nothing)
        at_ids = None if ids is None or ref.logp_at_ids is None else mb.flat(ref.logp_at_ids)
        return _Dense(mb.flat(ref.logp), at_ids)

    def _ids(self, batch: StepBatch, mb: MicroBatch) -> Tensor | None:
        """The actor's top ids [N, k] where the KL is over those."""
        ids = batch.sent.topk_ids_inf
        if self._distill.kl != "topk":
            return None
        assert ids is not None
        return mb.flat(ids) if len(mb.episodes) else ids.new_full((1, ids.shape[2]), -1)

    def _target(self, batch: StepBatch, mb: MicroBatch, dense: _Dense | None) -> KlTarget | None:
        """Return the target of the KL where sampled tokens do not suffice."""
        if self._distill.kl == "full":
            return self._policy.as_base(mb)
        ids = self._ids(batch, mb)
        if ids is None:
            return None
        assert dense is not None and dense.logp_at_ids is not None
        return TopkTarget(ids, dense.logp_at_ids)

    def export(self, folder: Path, *, policy_folder: Path) -> None:
        """Write theta + phi merged, phi as an adapter on the policy's export, and the rule."""
        base, source = str(policy_folder.resolve()), self._job.model_path
        export_model(folder, self.engine, base, source=source, lora=self._distill.lora)
        if is_first_rank():
            write_attention(folder, self._job)


def _objective(objective: ObjectiveSpec) -> ObjectiveSpec:
    """The copy's objective: PPO, with the run's clip where that is per token, too.

    Its distance is to the policy instead of the frozen one, and it has no entropy bonus.
    """
    changes: dict[str, object] = {"loss": "ppo", "kl_coef": 0.0, "entropy_coef": 0.0}
    if not loss_class(objective.loss).inner_clip:
        plain = ObjectiveSpec()
        changes |= {"eps_low": plain.eps_low, "eps_high": plain.eps_high}
    return objective.model_copy(update=changes)


def _gap(tokens: LossTensors) -> Tensor:
    """log p_sparse - log p_inf [b, T], detached."""
    return torch.where(tokens.mask, tokens.logp_new.detach() - tokens.logp_ref, 0.0)
