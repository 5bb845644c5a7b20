"""DistillSparse, algorithm 1, steps 5 and 7: adapters phi that make the sparse actor follow the dense policy theta.

The sparse copy is theta's own tensors (shared, frozen, always as theta stands now) with low-rank adapters, attending by
the actors' rule. Its loss on the actor's own samples is PPO against the actor's log-probs plus `kl_coef` times the
reverse KL to the dense policy, whose log-probs are those the policy's own update has already computed.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from rlcore.errors import StageError, UserError
from rlcore.interfaces import Corrected, Reduce
from rlcore.learner.batch import StepBatch
from rlcore.learner.deepspeed_engine import ZeroEngine
from rlcore.learner.head import HeadSpec, KlTarget, TopkTarget
from rlcore.learner.loss import Objective, Sums
from rlcore.learner.packing import MicroBatch
from rlcore.objectives.aggregate import coefficients, counts
from rlcore.objectives.distill import DistillKl, distill_sampled

STALE_CAP = 2.0  # truncation of p_sparse/p_inf where samples are older than phi
_SUMS = ("loss/sparse_policy", "loss/distill_kl", "distill/actor_abs_dlogp_mean", "distill/clip_share")


class SparseCopy:
    """theta + phi and phi's optimizer. `step` is collective, as every method of a rank is."""

    def __init__(
        self,
        engine: ZeroEngine,
        policy: ZeroEngine,
        *,
        objective: Objective,
        spec: HeadSpec,
        kl: DistillKl,
        kl_coef: float,
        reduce: Reduce,
        max_response_len: int,
    ) -> None:
        """`engine` holds an adapted model of the same folder as `policy`'s. Raises UserError for an unknown `kl`."""
        if kl not in ("k1", "k3", "topk", "full"):
            raise UserError.choice("learner.distill.kl", kl, ("k1", "k3", "topk", "full"))
        self.engine, self.policy, self.kl, self.kl_coef = engine, policy, kl, kl_coef
        self.objective = replace(objective, kl_coef=0.0, entropy_coef=0.0, short_circuit=False)
        self.spec = replace(spec, topk=0, safe_set_rho=None, entropy_grad=False)
        self.reduce, self.max_response_len = reduce, max_response_len
        self.share()

    def share(self) -> None:
        """Make the copy's base weights the policy's own tensors."""
        for name, p in self.engine.names.items():
            p.data = self.policy.names[name].data

    def step(self, batch: StepBatch, step: int, advantages: Tensor) -> dict[str, float]:
        """One optimizer step of phi on a batch that the policy has just been trained on. Returns global metrics.

        `batch.ref`: theta's log-probs as the batch entered its update. Raises StageError, before anything is updated,
        when a loss or a gradient is not finite.
        """
        start = time.monotonic()
        self.share()
        assert batch.ref is not None
        mask = batch.sent.mask & torch.isfinite(batch.sent.logp_inf)
        tokens, sequences = counts(mask, self.reduce)
        coefs = coefficients(self.objective.aggregation, mask, tokens, sequences, self.max_response_len)
        sums = Sums()
        for i, mb in enumerate(batch.micro):
            scores, kl = self.engine.forward_with_kl(mb, None, self.spec, self._target(batch, mb))
            if len(mb.sequences):
                loss, values = self._loss(batch, mb, scores.logp, kl, advantages, mask, coefs)
                sums.add(values)
            else:
                loss = 0.0 * (scores.logp.sum() + (0.0 if kl is None else kl.sum()))
            self.engine.backward(loss, last=i == len(batch.micro) - 1)
        metrics = sums.over_ranks(_SUMS, self.reduce, self.engine.device)
        norm = self.engine.grad_norm()
        if not all(map(math.isfinite, [norm, *metrics.values()])):
            raise StageError(
                f"the adapters' step {step} (learner.distill) was not taken: loss {metrics['loss/sparse_policy']:.4g}, "
                f"KL {metrics['loss/distill_kl']:.4g}, gradient norm {norm:.4g}."
            )
        for name in metrics:
            if name.startswith("distill/"):
                metrics[name] /= max(tokens, 1)
        self.engine.step()
        return metrics | {"distill/grad_norm": norm, "time/learner_distill_s": time.monotonic() - start}

    def _loss(
        self,
        batch: StepBatch,
        mb: MicroBatch,
        logp: Tensor,
        kl: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        coefs: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a micro-batch's sequences and its sums. The actor is p_old of PPO: it is this copy, maybe older."""
        assert batch.ref is not None
        rows, width = mb.sequences, mask.shape[1]
        on = mask[rows]
        logp_sparse = mb.dense(logp, width)
        logp_inf = torch.where(on, batch.sent.logp_inf[rows], 0.0)
        plain = Corrected(torch.ones_like(logp_inf), on, {})
        zeros = torch.zeros_like(logp_inf)
        loss, values = self.objective(logp_sparse, logp_inf, advantages[rows], plain, coefs[rows], zeros, None, None)
        gap = torch.where(on, logp_sparse.detach() - logp_inf, 0.0)
        if kl is not None:
            per_token = torch.where(on, mb.dense(kl, width), 0.0)
        else:
            ratio = gap.clamp(-20.0, 20.0).exp().clamp(max=STALE_CAP)
            assert self.kl == "k1" or self.kl == "k3"
            per_token = distill_sampled(self.kl, logp_sparse, batch.ref.logp[rows], on, ratio)
        distance = (per_token * coefs[rows]).sum()
        clipped = [values[n] for n in ("policy/clip_low_share", "policy/clip_high_share") if n in values]
        return loss + self.kl_coef * distance, {
            "loss/sparse_policy": values["loss/policy"],
            "loss/distill_kl": distance.detach().double(),
            "distill/actor_abs_dlogp_mean": gap.abs().sum().double(),
            "distill/clip_share": torch.stack([*clipped, torch.zeros_like(values["loss/policy"])]).sum(),
        }

    def _target(self, batch: StepBatch, mb: MicroBatch) -> KlTarget | None:
        """What the KL is taken to where sampled tokens do not suffice."""
        if self.kl == "full":
            with torch.no_grad():
                return self.policy.policy.hidden(mb), self.policy.policy.head.weight
        if self.kl != "topk":
            return None
        ids, ref = batch.sent.topk_ids_inf, batch.ref
        assert ids is not None and ref is not None and ref.logp_at_ids is not None
        if len(mb.sequences):
            return TopkTarget(mb.flat(ids), mb.flat(ref.logp_at_ids))
        nothing = ids.new_full((len(mb.targets), ids.shape[2]), -1)
        return TopkTarget(nothing, torch.zeros(nothing.shape, device=ids.device))
