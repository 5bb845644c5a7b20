"""A critic next to the policy: its values, the advantages and targets of a batch, and its own step.

The critic is a companion with its own engine that is not published: it has optimizer, ZeRO
stage, checkpoint and resume like every trained model. `value_head` has the policy's own tensors,
frozen, as its trunk; `model` starts as a copy of the starting policy. Both predict values by a
linear map of the last hidden state, 0 at first, in float32.

Values are taken once a phase, before its first step, as p_ref is: every epoch has the same targets.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlcore.corrections.numerics import total
from rlcore.interfaces import Reduce
from rlcore.learner.batch import StepBatch, TurnSpans
from rlcore.learner.lm_head import HeadSpec, KlTarget
from rlcore.learner.metric_sums import LOSS, Declared, Sums, take_step
from rlcore.learner.packing import MicroBatch
from rlcore.learner.policy import Policy
from rlcore.learner.protocols import Companion, TrainEngine
from rlcore.learner.specs import CRITIC, CriticSpec
from rlcore.objectives.values import Estimates, States, estimates, value_loss

HEAD = "value_head"
_SUMS = {"loss/value": LOSS, "critic/clip_share": Declared()}


class ValueHead(nn.Linear):
    """A value in float32 of a hidden state of any dtype."""

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden.float(), self.weight.float(), self.bias.float())[..., 0]


class ValueModel(Policy):
    """An LM whose head predicts one number, the value of what follows."""

    def __init__(self, lm: nn.Module) -> None:
        """`lm` is given the head, as its own weight, and its LM head is not trained."""
        super().__init__(lm)
        config: Any = lm.config.get_text_config()  # type: ignore[union-attr, operator]
        head = ValueHead(config.hidden_size, 1, device=self.head.weight.device)
        for p in head.parameters():
            nn.init.zeros_(p)
        lm.add_module(HEAD, head.to(self.head.weight.dtype))
        embeddings: Any = lm.get_input_embeddings()  # type: ignore[operator]
        if self.head.weight is not embeddings.weight:
            self.head.weight.requires_grad_(False)

    def forward(
        self,
        mb: MicroBatch,
        ids: Tensor | None,
        spec: HeadSpec | None,
        base: KlTarget | None = None,
    ) -> Any:
        """Values [N] float32 of the states that predict a micro-batch's tokens."""
        return getattr(self.lm, HEAD)(self.hidden(mb))


def freeze_trunk(lm: nn.Module) -> None:
    """Freeze everything but the head, in place."""
    for name, p in lm.named_parameters():
        p.requires_grad_(name.startswith(HEAD))


class Critic(Companion):
    """A model of values and its optimizer."""

    name = CRITIC
    published = False
    adapter_alone = False

    def __init__(
        self, spec: CriticSpec, engine: TrainEngine, policy: TrainEngine, reduce: Reduce
    ) -> None:
        """`engine` holds a `ValueModel` of the same folder as `policy`'s model."""
        self.engine = engine
        self.warmup_steps = spec.warmup_steps
        self._spec = spec
        self._policy = policy
        self._reduce = reduce
        self.weights_changed()

    def weights_changed(self) -> None:
        """Make the trunk of kind=value_head the policy's own tensors."""
        if self._spec.kind != "value_head":
            return
        for name, p in self.engine.names.items():
            if not name.startswith(HEAD):
                p.data = self._policy.names[name].data

    @torch.no_grad()
    def values(self, batch: StepBatch) -> Tensor:
        """[B, T] float32: the value of the state before each token, 0 where there is none."""
        self.weights_changed()
        out = torch.zeros_like(batch.sent.logp_inf)
        for mb in batch.micro:
            found = self.engine.outputs(mb)
            if len(mb.episodes):
                out[mb.episodes[mb.row], mb.column] = found
        return out

    def advantages(self, batch: StepBatch, turns: TurnSpans, by_token: bool) -> Tensor:
        """[B, T] float32 advantages of a batch whose p_ref is known; keeps the targets for `step`.

        `turns`: the rewards; a token's less any penalty. `by_token`: a state is what precedes
        a token. Collective where advantages are whitened.
        """
        sent, spec = batch.sent, self._spec
        states = States.by_token(sent.mask)
        if not by_token:
            states = States.by_turn(turns.of_token, sent.mask)
        batch.states = states
        cut = sent.truncated if spec.bootstrap and sent.truncated is not None else None
        batch.estimates = found = estimates(
            states.sums(turns.token_rewards),
            states.firsts(self._held(batch)),
            states.sums(self._log_ratio(batch)),
            states.count,
            torch.zeros_like(states.count, dtype=torch.bool) if cut is None else cut,
            spec,
        )
        advantages = states.spread(found.advantages, sent.mask)
        return self._whitened(advantages, _known(batch)) if spec.whiten else advantages

    def _held(self, batch: StepBatch) -> Tensor:
        if batch.values is None:
            raise RuntimeError("advantages before the phase's values were taken")
        return batch.values

    def _log_ratio(self, batch: StepBatch) -> Tensor:
        """[B, T] log p_ref/p_inf, 0 where there is no token; -inf for one that p_ref cannot sample
        or whose log-prob is not usable, where the trace ends."""
        sent, ref = batch.sent, batch.ref
        if self._spec.traces == "gae":
            return torch.zeros_like(sent.logp_inf)
        if ref is None:
            raise RuntimeError("traces before p_ref is known")
        ratio = ref.logp.double() - sent.logp_inf.double()
        usable = torch.isfinite(ratio)
        if ref.inside is not None:
            usable &= ref.inside
        return torch.where(sent.mask, torch.where(usable, ratio, -torch.inf), 0.0)

    def _whitened(self, advantages: Tensor, mask: Tensor) -> Tensor:
        """Advantages less their mean over the mask's tokens of the global batch, divided by their
        deviation; 0 outside the mask, and if the batch's advantages are all equal."""
        summed, tokens = total([advantages.double(), mask], self._reduce)
        centred = torch.where(mask, advantages.double() - summed / max(tokens, 1.0), 0.0)
        (squares,) = total([centred.square()], self._reduce)
        deviation = (squares / max(tokens - 1.0, 1.0)) ** 0.5
        return (centred / (deviation + 1e-8)).float()

    def step(self, batch: StepBatch, step: int, advantages: Tensor) -> dict[str, float]:
        """One optimizer step towards the batch's targets. Raises StageError, before anything is
        updated, when the loss or a gradient is not finite."""
        start = time.monotonic()
        self.weights_changed()
        states, found = batch.states, batch.estimates
        if states is None or found is None:
            raise RuntimeError("a critic's step before its targets are known")
        mask = batch.sent.mask
        on = states.first & _known(batch)
        targets = states.spread(found.targets, mask)
        (count,) = total([on], self._reduce)
        sums = Sums.of_step(_SUMS, batch.episodes, self.engine.device)
        for i, mb in enumerate(batch.micro):
            values = self.engine.outputs(mb)
            loss = 0.0 * values.sum()
            if len(mb.episodes):
                rows, width = mb.episodes, mask.shape[1]
                errors, cut = value_loss(
                    mb.dense(values, width), self._held(batch)[rows], targets[rows], self._spec.clip
                )
                share = on[rows] / max(count, 1.0)
                loss = (errors * share).sum()
                sums.add({"loss/value": loss, "critic/clip_share": (cut * share).sum()})
            self.engine.backward(loss, last=i == len(batch.micro) - 1)
        what = f"the critic's step {step} (critic.kind={self._spec.kind})"
        metrics = take_step(self.engine, sums, self._reduce, what=what)
        return (
            {name: metrics[name] for name in _SUMS}
            | self._explained(found, states.firsts(self._held(batch)))
            | self._of_advantages(advantages, _known(batch), mask)
            | {
                "critic/grad_norm": metrics["grad_norm"],
                "critic/lr": metrics["lr"],
                "time/learner_critic_s": time.monotonic() - start,
            }
        )

    def _of_advantages(self, advantages: Tensor, known: Tensor, mask: Tensor) -> dict[str, float]:
        """Metrics of the tokens' advantages over the global batch. Collective."""
        squares = advantages.double().square().where(known, 0.0)
        summed, having, tokens = total([squares, known, mask], self._reduce)
        return {
            "critic/advantage_rms": (summed / max(having, 1.0)) ** 0.5,
            "critic/untargeted_share": 1.0 - having / tokens if tokens else 0.0,
        }

    def _explained(self, found: Estimates, values: Tensor) -> dict[str, float]:
        """Metrics of how well the phase's values predicted their targets, over the global batch.
        Collective."""
        on = found.known
        targets, errors = found.targets.where(on, 0.0), (found.targets - values).where(on, 0.0)
        parts = [on, targets, targets.square(), errors, errors.square(), values.where(on, 0.0)]
        n, t, tt, e, ee, v = total(parts, self._reduce)
        n = max(n, 1.0)
        spread, left = tt / n - (t / n) ** 2, ee / n - (e / n) ** 2
        return {
            # of targets that are all equal there is nothing to explain
            "critic/explained_variance": 1.0 - left / spread if spread > 1e-12 else 0.0,
            "critic/value_mean": v / n,
            "critic/target_mean": t / n,
        }

    def export(self, folder: Path, *, policy_folder: Path) -> None:
        """Write nothing: a critic is a part of training, and checkpoints hold it."""


def _known(batch: StepBatch) -> Tensor:
    """[B, T] bool: tokens whose state has a target, once `Critic.advantages` has found it."""
    states, found = batch.states, batch.estimates
    if states is None or found is None:
        raise RuntimeError("a critic's step before its targets are known")
    return states.spread(found.known, batch.sent.mask).bool()
