"""Small models, random groups, jobs, a plain engine, and functions run on real ranks in processes
of their own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import numpy as np
import torch
from tabular import StepEngine
from timing import charge, free_port

from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.corrections.shadow import build_shadows
from rlcore.corrections.specs import CORRECTIONS, Shadow
from rlcore.interfaces import Reduce
from rlcore.learner.batch import StepBatch, build_batch
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.lora import is_adapter, plain_name
from rlcore.learner.packing import Layout, PassCosts, pack
from rlcore.learner.policy import FrozenPolicy, Policy, load_causal_lm
from rlcore.learner.rank import LearnerRank
from rlcore.learner.specs import CriticSpec, LearnerJob, LearnerSpec, RankPlace
from rlcore.learner.update import Update
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.objectives.specs import ObjectiveSpec, TeacherSpec
from rlcore.registry import load_object
from rlcore.testing.records import make_group, make_sampling, make_trajectory
from rlcore.types import POLICY, Group, TokenScores

ALPHABET = "0123456789=+"
VOCAB = 15
DEADLINE_S = 600  # far more than needed: two ranks on a busy machine wait for each other


def small_model(folder: Path, *, hidden: int = 66, tie: bool = True, **sizes: int) -> str:
    """Sizes that two ranks do not divide evenly, but for those given."""
    usual: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 63}
    spec = FreshModelSpec(hidden_size=hidden, layers=2, tie_embeddings=tie, **(usual | sizes))
    return str(build_fresh_model(folder, ALPHABET, spec, seed=3, max_len=64))


def make_job(
    model: str,
    *,
    corrections: Mapping[str, Mapping[str, Any]] | None = None,
    logprobs_k: int = 4,
    total_steps: int = 100,
    sparse: Any = None,
    frozen_path: str | None = None,
    temperature: float = 0.8,
    keep_by_acceptance: int | None = None,
    shadow: Shadow | None = None,
    critic: CriticSpec | None = None,
    teacher: TeacherSpec | None = None,
    cpu_fast_paths: bool = True,
    **settings: Any,
) -> LearnerJob:
    """A job on a small model. `settings` are those of `learner` and `algorithm`, by name."""
    settings = {"lr": 1e-3, "lr_warmup_steps": 0} | settings
    objective = {n: settings.pop(n) for n in ObjectiveSpec.model_fields if n in settings}
    specs = {n: load_object(CORRECTIONS[n])(**args) for n, args in (corrections or {}).items()}
    return LearnerJob(
        model_path=model,
        learner=LearnerSpec(**settings),
        objective=ObjectiveSpec(**objective),
        corrections=specs,
        sampling=make_sampling(temperature=temperature, max_new_tokens=10, logprobs_k=logprobs_k),
        total_steps=total_steps,
        run_seed=5,
        pad_id=0,
        sparse=sparse,
        frozen_path=frozen_path,
        keep_by_acceptance=keep_by_acceptance,
        shadow=shadow or Shadow(),
        critic=critic or CriticSpec(),
        teacher=teacher or TeacherSpec(),
        cpu_fast_paths=cpu_fast_paths,
    )


def make_place(rank: int, world: int, port: int) -> RankPlace:
    return RankPlace(rank, world, "127.0.0.1", port, timeout_s=DEADLINE_S)


def make_groups(
    count: int, *, samples: int = 3, seed: int = 0, k: int = 4, version: int = 0, first_id: int = 0
) -> list[Group]:
    """Groups with random tokens, lengths 1 to 9, log-probs near those of a fresh model, and random
    rewards."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(first_id, first_id + count):
        prompt = rng.integers(3, VOCAB, rng.integers(2, 7)).astype(np.int32)
        trajectories, rewards = [], []
        for i in range(samples):
            t = int(rng.integers(1, 10))
            top = np.argsort(rng.random((t, VOCAB)))[:, :k].astype(np.int32)
            response = rng.integers(3, VOCAB, t).astype(np.int32)
            logp = (-2.7 + 0.3 * rng.standard_normal(t)).astype(np.float32)
            one = make_trajectory(
                g,
                i,
                turns=[(prompt.tolist(), response.tolist())],
                version=version,
                logp_inf=logp,
                topk_ids=top,
                topk_logp=np.log(np.full((t, k), 0.1, np.float32)),
            )
            trajectories.append(one)
            rewards.append(float(rng.random()))
        groups.append(
            make_group(trajectories, rewards, admitted_version=version, arrival_version=version)
        )
    return groups


def trained(
    model: str, cases: Mapping[str, Mapping[str, Any]], *, steps: int = 2, **settings: Any
) -> dict[str, dict[str, torch.Tensor]]:
    """The weights after `steps` of a rank, by case, each of which has settings of its own."""
    found = {}
    for name, own in cases.items():
        # a job is not validated: a configuration may refuse on a CPU what tests compute there
        job = make_job(model, lr=1e-2, share_prefix="off", **settings, **own)
        rank = LearnerRank(job, make_place(0, 1, 0))
        for step in range(steps):
            rank.begin_phase([make_groups(2, seed=step)])
            rank.train_step(step)
        found[name] = dict(rank.published_weights(POLICY, "float32"))
    return found


def with_rewards(groups: list[Group], reward: Callable[[Any], float]) -> list[Group]:
    """The same groups with `reward(episode)` for every episode."""
    for g in groups:
        for e in g.episodes:
            e.score = replace(e.score, reward=float(reward(e)))
    return groups


class PlainEngine(StepEngine):
    """An engine's verbs of a step on plain torch in one process, counting passes."""

    device = torch.device("cpu")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.forwards = self.backwards = 0
        named = dict(policy.lm.named_parameters())
        self.names = {plain_name(n): p for n, p in named.items() if not is_adapter(n)}

    def forward(self, mb: Any, ids: Any, spec: HeadSpec) -> TokenScores:
        return self.forward_with_kl(mb, ids, spec, None)[0]

    def forward_with_kl(
        self, mb: Any, ids: Any, spec: HeadSpec, base: Any
    ) -> tuple[TokenScores, Any]:
        self.forwards += 1
        kl, *scores = self.policy(mb, ids, spec, base)
        return TokenScores(*scores), kl

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.backwards += 1
        loss.backward()

    @torch.no_grad()
    def as_base(self, mb: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy.hidden(mb), self.policy.head.weight

    def grad_norm(self) -> float:
        squares = [g.square().sum() for g in self.gradients().values()]
        return float(torch.stack(squares).sum().sqrt())

    def step(self, scale: float = 1.0) -> float:
        """Leaves weights and gradients as they are, for tests to look at."""
        return 0.0

    def gradients(self) -> dict[str, torch.Tensor]:
        named = self.policy.lm.named_parameters()
        return {n: p.grad.clone() for n, p in named if p.grad is not None}


def sharp_policy(model: str, noise: float = 0.05) -> Policy:
    """The small model with noise on its head, so that its distributions are far from flat."""
    policy = Policy(load_causal_lm(model, "float32", "sdpa"))
    with torch.no_grad():
        weight = policy.head.weight
        weight.add_(noise * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return policy


def disturb(policy: Policy) -> None:
    """In place of an optimizer step: the policy is another one now."""
    with torch.no_grad():
        policy.head.weight.mul_(1.1)


def make_update(model: str, *, reduce: Reduce = ONE_RANK, **settings: Any) -> Update:
    """An update on a plain engine; `settings` as in `make_job`."""
    job = make_job(model, **settings)
    frozen = FrozenPolicy(sharp_policy(model, -0.05)) if job.objective.kl_coef else None
    pipeline = build(job.corrections, job.run_seed, job.objective)
    shadows = build_shadows(job.shadow, job.run_seed, job.objective)
    return Update(job, PlainEngine(sharp_policy(model)), frozen, pipeline, reduce, shadows)


# in the eyes of which sharing always pays where there is something to share
SHARED = PassCosts(position=1.0, score=0.0, key=0.0, query=0.0)


def make_batch(
    groups: list[Group],
    micro_batch_tokens: int = 10_000,
    layout: Layout = "sorted",
    costs: PassCosts | None = None,
) -> StepBatch:
    """One rank's batch in micro-batches."""
    batch = build_batch(groups, with_topk=True, device=torch.device("cpu"))
    batch.micro = pack(batch.episodes, micro_batch_tokens, layout, costs=costs)
    return batch


def _rank_main(
    pipe: Any, function: Callable[..., Any], rank: int, world: int, port: int, args: tuple[Any, ...]
) -> None:
    try:
        found = "ok", function(rank, world, port, *args)
    except BaseException:
        found = "error", traceback.format_exc()
    pipe.send((*found, forked.used_cpu_s()))


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(rank, world, port, *args)` in `world` fresh processes; their results in order
    of rank."""
    port = free_port()
    context = forked.context()
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(theirs, function, rank, world, port, args), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(DEADLINE_S), f"rank {rank} of {world} sent nothing for {DEADLINE_S} s"
            status, value, cpu_s = pipe.recv()
            charge(cpu_s)
            assert status == "ok", f"rank {rank} of {world}:\n{value}"
            results.append(value)
        return results
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
