"""A bandit of one or two positions whose batch IS its distribution, run through the learner's own
update: the gradient of a step is then the expected gradient.

Probabilities of the actor are quarters, so sixteen rows hold every sequence as often as it is
drawn. Acceptance probabilities are eighths, so eight uniforms a token hold every draw of a
rejection. Statistics of the batch (denominators, AIS's alpha, Jackpot's kappa) are thus their own
expectations: what is enumerated is the limit of large batches. All of it is in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from correction_helpers import on_ranks
from tabular import TabularEngine, TabularPolicy
from torch import Tensor

import rlcore.corrections.jackpot as jackpot_method
from rlcore.corrections.dvp import DvpSpec
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.corrections.specs import CorrectionSpec, Stratum
from rlcore.interfaces import Reduce
from rlcore.learner.batch import StepBatch, TurnSpans
from rlcore.learner.packing import dummy, pack
from rlcore.learner.policy import FrozenPolicy
from rlcore.learner.sequences import TokenSequence
from rlcore.learner.specs import LearnerJob, LearnerSpec
from rlcore.learner.update import Update
from rlcore.objectives.advantages import Rewards
from rlcore.objectives.protocols import Advantage
from rlcore.objectives.specs import ObjectiveSpec, loss_class
from rlcore.testing.records import make_sampling
from rlcore.types import StepTensors

V, T, DRAWS, PROMPT = 3, 2, 8, 3  # token 2 at the start ends its sequence
KL_COEF = 0.5


def table(after_0: list[int], after_1: list[int], start: list[int]) -> Tensor:
    """[V + 1, V] probabilities by last token, in sixteenths; nothing follows token 2."""
    return torch.tensor([after_0, after_1, [16, 0, 0], start], dtype=torch.float64) / 16


# Of a token that is less likely under p_ref (p_new) than under p_inf, the ratio is in eighths, also
# under the safe set at RHO: the start's token 1, p_new's token 2 after 0 and p_ref's token 0 after
# 1 lie outside, so p_ref's set is p_new's at the start, larger after 0 and smaller after 1.
RHO = 0.3
INF = table([4, 8, 4], [4, 4, 8], [8, 4, 4])
SECOND = table([8, 4, 4], [4, 8, 4], [4, 8, 4])  # of another kind of actors, as INF is chosen
ACTORS = {"first": INF, "second": SECOND}
REF = table([6, 7, 3], [2, 7, 7], [7, 2, 7])
NEW = table([7, 7, 2], [3, 6, 7], [10, 2, 4])
BASE = table([5, 5, 6], [8, 4, 4], [4, 7, 5])
REWARD = {(0, 0): 1.0, (0, 1): -0.5, (0, 2): 0.375, (1, 0): 0.25, (1, 1): 2.0, (1, 2): -1.0}
REWARD |= {(0,): 1.5, (1,): -0.75, (2,): 0.5}


class Given(Advantage):
    """The reward itself: advantages are fixed."""

    def __call__(self, rewards: Rewards) -> Tensor:
        return rewards.values


GIVEN = "grid_bandit:Given"


@dataclass(frozen=True)
class Policies:
    """Probabilities [V + 1, V] of the learner's policies by state, and what its actors have."""

    ref: Tensor = REF
    new: Tensor = NEW
    base: Tensor = BASE
    one_token: bool = False  # every sequence ends after its first token
    actors: tuple[str, ...] = ("first",)  # of ACTORS, one a kind


def logits(p: Tensor) -> Tensor:
    return p.clamp(min=1e-30).log()


@dataclass(frozen=True)
class Case:
    """One cell with all its settings."""

    corrections: Mapping[str, CorrectionSpec]
    objective: ObjectiveSpec
    later: bool  # a later step of its phase: p_new is not p_ref
    policies: Policies = field(default_factory=Policies)
    second: Mapping[str, CorrectionSpec] | None = (
        None  # of a second kind of actors, if there is one
    )
    pairs: bool = False  # advantages are of rewards in groups of two independent samples

    @property
    def lists(self) -> list[list[CorrectionSpec]]:
        """As the pipeline has them, of each kind."""
        lists = [self.corrections] if self.second is None else [self.corrections, self.second]
        return [[spec.under(self.objective) for spec in own.values()] for own in lists]

    @property
    def specs(self) -> list[CorrectionSpec]:
        return [spec for own in self.lists for spec in own]

    @property
    def strata(self) -> tuple[Stratum, ...]:
        if self.second is None:
            return ()
        return Stratum(("first",), self.corrections), Stratum(("second",), self.second)

    def rows(self, holds: Callable[[CorrectionSpec], bool]) -> Tensor:
        """[B, 1] bool: it holds for a correction of the row's kind."""
        return torch.tensor([any(map(holds, own)) for own in self.lists])[self.batch.kinds][:, None]

    @property
    def anchored(self) -> bool:
        """The loss has no p_new/p_ref: weights lead to p_new, not to p_ref."""
        clip_off = any(spec.inner_clip_off for spec in self.specs)
        return clip_off or not loss_class(self.objective.loss).carries_ratio

    @property
    def rho(self) -> float | None:
        return next((spec.rho for spec in self.specs if isinstance(spec, DvpSpec)), None)

    @property
    def p_new(self) -> Tensor:
        return self.policies.new if self.later else self.policies.ref

    @property
    def batch(self) -> Batch:
        rejects = any(spec.rejects for spec in self.specs)
        return Batch.of(self.policies.one_token, rejects, self.policies.actors, self.pairs)


def sequences(inf: Tensor, one_token: bool) -> list[tuple[int, ...]]:
    """Every sequence as often as an actor draws it, in an order that mixes groups and ranks."""
    found: list[tuple[int, ...]] = []
    for a in range(V):
        if a == 2 or one_token:
            found += [(a,)] * round(16 * inf[PROMPT, a].item())
            continue
        for b in range(V):
            found += [(a, b)] * round(16 * (inf[PROMPT, a] * inf[a, b]).item())
    assert len(found) == 16
    return found[::3] + found[1::3] + found[2::3]


class Batch:
    """The rows as tensors: of each sequence one for every pair of draws, where tokens are
    rejected; with `pairs` every two sequences as often as they are drawn together."""

    def __init__(
        self, one_token: bool, rejects: bool, actors: tuple[str, ...], pairs: bool
    ) -> None:
        assert not (rejects and pairs), "all draws of all pairs are 32,768 rows"
        drawn = [
            (kind, s) for kind, a in enumerate(actors) for s in sequences(ACTORS[a], one_token)
        ]
        if pairs:
            drawn = [row for two in product(drawn, repeat=2) for row in two]
        both = [row for row in drawn for _ in range(DRAWS**T if rejects else 1)]
        self.kinds, rows = torch.tensor([kind for kind, _ in both]), [row for _, row in both]
        self.several = len(actors) > 1
        self.tokens = torch.tensor([(*r, 0)[:T] for r in rows])
        self.mask = torch.tensor([[True, len(r) == T] for r in rows])
        self.states = torch.stack([torch.full((len(rows),), PROMPT), self.tokens[:, 0]], 1)
        self.rewards = torch.tensor([REWARD[r] for r in rows], dtype=torch.float64)
        self.groups = torch.arange(len(rows)) // (2 if pairs else len(rows) // 4)
        # those that the length limit has cut off: they do not end with token 2
        self.truncated = self.mask[:, 1] & (self.tokens[:, 1] != 2)
        self.episodes = [(TokenSequence.of_answer([PROMPT], r),) for r in rows]
        self.policies = torch.stack([ACTORS[a] for a in actors])  # [K, V + 1, V]
        own = self.policies[self.kinds[:, None], self.states]
        self.inf = own.gather(2, self.tokens[..., None])[..., 0].where(self.mask, 1.0)
        grid = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
        # the rows of a sequence are neighbours: each of them has another pair of draws
        self.uniforms = torch.cartesian_prod(grid, grid).repeat(max(1, len(rows) // 64), 1)
        self.sent = self._sent()

    @staticmethod
    @cache
    def of(one_token: bool, rejects: bool, actors: tuple[str, ...], pairs: bool) -> Batch:
        return Batch(one_token, rejects, actors, pairs)

    def at(self, p: Tensor) -> Tensor:
        """[B, T]: what a table says of the rows' tokens."""
        return p[self.states, self.tokens].where(self.mask, 1.0)

    def _sent(self) -> StepTensors:
        b = len(self.rewards)
        zeros = torch.zeros(b, T, dtype=torch.float64)
        ids = torch.arange(V).expand(b, T, V)
        top = logits(self.policies)[self.kinds[:, None], self.states]
        return StepTensors(
            mask=self.mask,
            logp_inf=self.inf.log(),
            logp_ref=zeros,
            logp_new=zeros,
            rewards=self.rewards,
            group_ids=self.groups,
            advantages=zeros,
            token_version=torch.zeros(b, T, dtype=torch.int32),
            sample_ids=torch.arange(b),
            step=0,
            truncated=self.truncated,
            topk_ids_inf=ids.where(self.mask[..., None], -1),
            topk_logp_inf=top.where(self.mask[..., None], -torch.inf),
            kinds=self.kinds if self.several else None,
        )

    @cache  # noqa: B019
    def shares(self, ranks: int, parts: int) -> list[StepBatch]:
        """Each rank's whole groups, in micro-batches of about 1/parts of its tokens; the last rank
        of several has one group of four, so that it has dummies too."""
        found = []
        for rank in range(ranks):
            mine = (self.groups == 3) == (rank == 1) if ranks == 2 else self.groups >= 0
            index = mine.nonzero()[:, 0]
            episodes = [self.episodes[i] for i in index.tolist()]
            sent = self.sent.rows(index)
            turns = TurnSpans(
                sent.rewards.double()[:, None],
                torch.ones(len(index), dtype=torch.int64),
                torch.zeros(sent.mask.shape, dtype=torch.int64),
                torch.zeros(sent.mask.shape, dtype=torch.float64),
            )
            share = StepBatch(episodes, sent, torch.zeros(len(index), dtype=torch.int32), turns)
            # every row is as long as the longest of its micro-batch
            share.micro = pack(episodes, -(-2 * len(self.rewards) // (parts * ranks)), "sorted")
            found.append(share)
        most = max(len(share.micro) for share in found)
        for share in found:
            share.micro += [dummy()] * (most - len(share.micro))
        return found


def gradient(case: Case, *, ranks: int = 1, parts: int = 1) -> tuple[Tensor, Tensor]:
    """What the learner's update ascends, [V + 1, V], over ranks and micro-batches; and the
    advantages [B, T] that it took."""
    batch = case.batch
    shares = [replace(share, sent=replace(share.sent)) for share in batch.shares(ranks, parts)]

    def draws(_seed: int, _purpose: str, _step: int, ids: Tensor, _length: int) -> Tensor:
        return batch.uniforms[ids]

    def work(rank: int, reduce: Reduce) -> tuple[Tensor, Tensor]:
        return _of_rank(case, shares[rank], reduce)

    with patch.object(jackpot_method, "token_uniforms", draws):
        found = [work(0, ONE_RANK)] if ranks == 1 else on_ranks(work, ranks)
    return -sum(g for g, _ in found), torch.cat([a for _, a in found])


def _of_rank(case: Case, batch: StepBatch, reduce: Reduce) -> tuple[Tensor, Tensor]:
    engine = TabularEngine(logits(case.policies.ref))
    frozen: Any = TabularPolicy(logits(case.policies.base))
    job = LearnerJob(
        model_path="",
        learner=LearnerSpec(),
        objective=case.objective,
        corrections=case.corrections,
        sampling=make_sampling(max_new_tokens=T, logprobs_k=V),
        total_steps=2,
        run_seed=0,
        pad_id=0,
    )
    pipeline = build(job.corrections, job.run_seed, job.objective, case.strata)
    taken: list[Tensor] = []
    replaced = pipeline.advantages

    def advantages(step: StepTensors, reduce: Reduce) -> Tensor:
        taken.append(replaced(step, reduce))
        return taken[-1]

    # what is measured beside the weights changes none, and takes half of a cell's time
    unmeasured = patch.object(pipeline, "_measured", lambda step, reduce: {})
    with unmeasured, patch.object(pipeline, "advantages", advantages):
        update = Update(job, engine, FrozenPolicy(frozen), pipeline, reduce)
        # a phase of one step, or of two on one batch
        update.prepare([batch], first=True, steps=1 + case.later)
        engine.move(logits(case.p_new))
        update.run(batch, step=int(case.later), first=not case.later)
    # a step corrected one micro-batch at a time keeps those that it was given
    return engine.gradient(), taken[0] if taken else update.group_advantages(batch)


# ----- the reference -----


def constrained(p: Tensor, rho: float | None) -> Tensor:
    """A policy conditioned on its own safe set."""
    if rho is None:
        return p
    kept = p.where(p >= rho * p.amax(-1, keepdim=True), 0.0)
    return kept / kept.sum(-1, keepdim=True)


def reference(case: Case, advantages: Tensor) -> Tensor:
    """The policy gradient that the case is compared with, [V + 1, V]."""
    batch = case.batch
    inf = batch.inf
    ref = batch.at(constrained(case.policies.ref, case.rho))
    new = batch.at(constrained(case.p_new, case.rho))
    weight = new / inf
    around = (new if case.anchored else ref) / inf
    # all tokens of the sequence but one's own, which is p_new's anyway
    others = around.flip(1).where(batch.mask, 1.0)
    weight = weight * others.where(case.rows(lambda s: s.corrects == "sequence"), 1.0)
    z = logits(case.p_new).requires_grad_()
    logp = batch.at(_log_probs(z, case.rho))
    summed = (share(case, batch) * weight * advantages * logp).where(batch.mask, 0.0).sum()
    return torch.autograd.grad(summed, z)[0]


def expected_advantages(case: Case) -> Tensor:
    """[B, T]: the reward, in pairs less the expected one, and less the KL that is to go where the
    reward has it."""
    batch, objective = case.batch, case.objective
    given = batch.rewards - (batch.rewards.mean() if case.pairs else 0.0)
    given = given[:, None].expand(batch.mask.shape)
    if not objective.kl_in_reward:
        return given
    ref, base = (
        batch.at(constrained(p, case.rho)) for p in (case.policies.ref, case.policies.base)
    )
    both = batch.mask & (ref > 0) & (base > 0)
    k1 = (ref / base).where(both, 1.0).log()
    return given - KL_COEF * torch.stack([k1.sum(1), k1[:, 1]], 1)


def kl_reference(case: Case) -> Tensor:
    """The gradient that the KL term or the entropy bonus is to ascend (the loss's, negated),
    [V + 1, V].

    Sampled: the token is p_new's, k1 and k2 the reverse KL, k3 the forward one. full and entropy:
    over the vocabulary, at the states that the actor visits; the token is the actor's, or under a
    rejection the one that weights lead to."""
    batch, kind, entropy = case.batch, case.objective.kl_estimator, case.objective.entropy_coef
    z = logits(case.p_new).requires_grad_()
    coefficient = share(case, batch)
    if kind == "full" or entropy:
        logp, base = z.log_softmax(-1), logits(case.policies.base).log_softmax(-1)
        if entropy:  # of the constrained policy
            logp, base = _log_probs(z, case.rho), torch.zeros_like(base)
        at_state = (logp.exp() * (logp - base)).sum(-1)[batch.states]
        # the weights of the kept tokens: a length that depends on the token is the target's
        target = case.p_new if case.anchored else case.policies.ref
        led = batch.at(constrained(target, case.rho)) / batch.inf
        coefficient = coefficient * led.where(case.rows(lambda s: s.rejects), 1.0)
        summed = (coefficient * at_state).where(batch.mask, 0.0).sum()
        return -torch.autograd.grad(summed, z)[0]
    new, base = (
        batch.at(constrained(p, case.rho)).clamp(min=1e-30)
        for p in (case.p_new, case.policies.base)
    )
    slope = 1.0 - base / new if kind == "k3" else (new / base).log()
    both = (new > 1e-20) & (base > 1e-20)
    weight = (new / batch.inf).where(both, 0.0)
    logp = batch.at(_log_probs(z, case.rho))
    value = coefficient * weight * slope.where(both, 0.0) * logp
    return -torch.autograd.grad(value.where(batch.mask, 0.0).sum(), z)[0]


def _log_probs(z: Tensor, rho: float | None) -> Tensor:
    p = z.detach().softmax(-1)
    outside = p < (rho or 0.0) * p.amax(-1, keepdim=True)
    return z.masked_fill(outside, -1e9).log_softmax(-1)


def share(case: Case, batch: Batch) -> Tensor:
    """[B, T]: what each token counts in the aggregation, all tokens kept."""
    lengths, mode = batch.mask.sum(1, keepdim=True), case.objective.aggregation
    b = len(lengths)
    if mode == "token-mean":
        return torch.full((b, T), 1.0, dtype=torch.float64) / lengths.sum()
    if mode == "seq-mean-token-mean":
        return (1.0 / (lengths.double() * b)).expand(b, T)
    return torch.full((b, T), 1.0 / (b * T), dtype=torch.float64)
