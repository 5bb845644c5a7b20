"""A bandit of two positions whose batch IS its distribution, so that a step's gradient is exact.

Probabilities of the actor are quarters, so sixteen rows hold every sequence as often as it is
drawn. Acceptance probabilities are quarters too, so four uniforms a token hold every draw: 256 rows
of two tokens, in float64, on which a batch statistic is its own expectation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import rlcore.corrections.jackpot as jackpot_method
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import Pipeline
from rlcore.interfaces import Corrected
from rlcore.objectives.kl import kl_penalty
from rlcore.objectives.losses import coefficients, counts, policy_loss
from rlcore.objectives.protocols import LossTensors
from rlcore.objectives.specs import ObjectiveSpec, make_loss
from rlcore.types import StepTensors

V, DRAWS = 3, 4
INF = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64) / 4
REF = torch.tensor([2.0, 4.0, 2.0], dtype=torch.float64) / 8  # over INF: 1/2, 2, 1
NEW = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64) / 8  # over INF: 1/4, 5/2, 1
BASE = torch.tensor([4.0, 3.0, 1.0], dtype=torch.float64) / 8


def policy(state: Tensor, rolls: tuple[int, int, int] = (1, 2, 0)) -> Tensor:
    """[1 + V, V]: the same distribution at every state, its tokens renamed: Z is the same too."""
    return torch.stack([state, *(state.roll(r) for r in rolls)])


@dataclass
class Bandit:
    """Policies by state [1 + V, V]: the first row at the start, the others after each token."""

    inf: Tensor = field(default_factory=lambda: policy(INF))
    ref: Tensor = field(default_factory=lambda: policy(REF))
    new: Tensor = field(default_factory=lambda: policy(NEW))
    base: Tensor = field(default_factory=lambda: policy(BASE))
    reward: Tensor = field(
        default_factory=lambda: torch.tensor(
            [[1.0, -0.5, 0.3], [0.2, 2.0, -1.0], [-0.7, 0.4, 0.9]], dtype=torch.float64
        )
    )

    def __post_init__(self) -> None:
        self.logits = self.new.log().requires_grad_()
        rows = [
            (a, b)
            for a in range(V)
            for b in range(V)
            for _ in range(int(torch.round(16 * self.inf[0, a] * self.inf[1 + a, b])))
        ]
        grid = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
        self.uniforms = torch.cartesian_prod(grid, grid).repeat(len(rows), 1)
        self.tokens = torch.tensor(rows).repeat_interleave(DRAWS**2, 0)

    def at(self, logp: Tensor) -> Tensor:
        """[B, 2]: log-probs of the rows' tokens under a policy [1 + V, V]."""
        a, b = self.tokens.unbind(1)
        return torch.stack([logp[0, a], logp[1 + a, b]], 1)

    def rows(self, values: Tensor) -> Tensor:
        """[B, 2, V]: what a policy's table says at the states of each row."""
        return torch.stack(
            [values[0].expand(len(self.tokens), V), values[1 + self.tokens[:, 0]]], 1
        )

    def step(self) -> StepTensors:
        b = len(self.tokens)
        ids = torch.arange(V).expand(b, 2, V).contiguous()
        logp = {n: t.log() for n, t in (("inf", self.inf), ("ref", self.ref), ("new", self.new))}
        return StepTensors(
            mask=torch.ones(b, 2, dtype=torch.bool),
            logp_inf=self.at(logp["inf"]),
            logp_ref=self.at(logp["ref"]),
            logp_new=self.at(logp["new"]),
            rewards=self.reward[tuple(self.tokens.T)],
            group_ids=torch.arange(b),
            advantages=self.reward[tuple(self.tokens.T)][:, None].expand(b, 2),
            token_version=torch.zeros(b, 2, dtype=torch.int32),
            sample_ids=torch.arange(b),
            step=0,
            topk_ids_inf=ids,
            topk_logp_inf=self.rows(logp["inf"]),
            ref_topk_ids=ids,
            ref_topk_logp=self.rows(logp["ref"]),
            ref_logp_at_inf_ids=self.rows(logp["ref"]),
            new_topk_ids=ids,
            new_topk_logp=self.rows(logp["new"]),
            new_logp_at_inf_ids=self.rows(logp["new"]),
        )

    def correct(self, pipeline: Pipeline) -> Corrected:
        """The pipeline's verdict, every acceptance drawn as often as it is probable."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jackpot_method, "token_uniforms", lambda *_: self.uniforms)
            return pipeline.correct(self.step(), ONE_RANK, measure=False)

    def descent(self, pipeline: Pipeline, objective: ObjectiveSpec) -> Tensor:
        """What the learner's policy loss descends, by logits, negated: an ascent of the reward."""
        step, corrected = self.step(), self.correct(pipeline)
        tokens = LossTensors(
            self.at(self.logits.log_softmax(-1)),
            step.logp_ref,
            step.advantages,
            corrected.weight,
            corrected.mask,
            step.mask,
        )
        loss, _ = policy_loss(
            make_loss(objective), tokens, short_circuit=pipeline.needs.short_circuit
        )
        return -self._gradient(loss, corrected, objective)

    def kl_descent(self, pipeline: Pipeline, objective: ObjectiveSpec) -> Tensor:
        """The gradient of the learner's KL term, by logits."""
        step, corrected = self.step(), self.correct(pipeline)
        logp_new = self.at(self.logits.log_softmax(-1))
        weight = pipeline.penalty_weight(
            corrected, logp_new, step.logp_ref, step.logp_inf, objective.kl_ratio_cap
        )
        kind = objective.kl_estimator
        assert kind != "full"
        kl = kl_penalty(kind, logp_new, self.at(self.base.log()), weight)
        return self._gradient(kl, corrected, objective)

    def _gradient(self, loss: Tensor, corrected: Corrected, objective: ObjectiveSpec) -> Tensor:
        mask = corrected.mask
        coefs = coefficients(objective.aggregation, mask, *counts(mask, ONE_RANK), max_len=2)
        return torch.autograd.grad((loss * coefs).sum(), self.logits)[0]

    def reference(self, first: Tensor, token: Tensor, rest: Tensor) -> Tensor:
        """The policy gradient, half a sequence's sum: a prefix from `first`, the token that is
        differentiated from `token`, what follows from `rest`; policies [1 + V, V]."""
        logp = self.logits.log_softmax(-1)
        starts = (token[0, :, None] * rest[1:] * self.reward * logp[0, :, None]).sum()
        ends = (first[0, :, None] * token[1:] * self.reward * logp[1:]).sum()
        return torch.autograd.grad((starts + ends) / 2, self.logits)[0]

    def kl_reference(self, *, forward: bool) -> Tensor:
        """The gradient of the mean KL over the states that the actor visits."""
        logp, base = self.logits.log_softmax(-1), self.base.log()
        kl = (base.exp() * (base - logp)) if forward else (logp.exp() * (logp - base))
        visits = torch.cat([torch.ones(1, dtype=torch.float64), self.inf[0]])
        return torch.autograd.grad((visits @ kl.sum(-1)) / 2, self.logits)[0]
