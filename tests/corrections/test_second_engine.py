"""The gradients of rlcore and of the second engine on random cells: a few in every run, and nightly
on new seeds, which a failure prints."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from second_engine import Case, Engine, log_softmax
from tabular import TabularEngine, TabularPolicy

from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.corrections.specs import CORRECTIONS
from rlcore.learner.batch import StepBatch, TurnSpans
from rlcore.learner.packing import pack
from rlcore.learner.policy import FrozenPolicy
from rlcore.learner.sequences import TokenSequence
from rlcore.learner.specs import LearnerJob, LearnerSpec
from rlcore.learner.update import Update
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.registry import load_object
from rlcore.testing.records import make_sampling
from rlcore.types import StepTensors

V, LONGEST = 4, 5
FEW, MANY = 60, 3000
# by nights: DVP without weights; M2PO beside it, for a token outside the set of p_ref alone
FOUND = (1973308036, 1973308884, 353023321)
TOLERANCE = 2e-5  # rlcore's advantages and coefficients are float32

WEIGHERS: list[dict[str, dict[str, Any]]] = [
    {},
    {"tis": {"cap": 1.3, "floor": 0.4}},
    {"tis": {"level": "sequence", "cap": 2.0}},
    {"tis": {"cap": 1.5, "normalised": True}},
    {"tis": {"cap": 1.5, "normalised": True, "level": "sequence"}},
    {"tis": {"cap": 1.5, "adjusted": True}},
    {"mis": {"low": 0.6, "high": 1.5}},
    {"mis": {"low": 0.5, "high": 2.0, "level": "sequence"}},
    {"mis": {"low": 0.7, "high": 1.4, "level": "geometric"}},
    {"icepop": {"low": 0.7, "high": 1.6}},
    {"minpro": {"cap": 1.4}},
    {"vesp": {}},
    {"ais": {"cap": 1.5}},
    {"ais": {"cap": 5.0, "delta": 5.0, "gamma": 0.9}},
    {"jackpot": {"mode": "expected", "c1": 1.2, "alpha_hat": "bernoulli"}},
]
OF_REINFORCE: list[dict[str, dict[str, Any]]] = [
    {"rapid": {"eta": 1.5}},
    {"dppo": {"low": 0.1, "high": 0.1, "cap": 1.5}},
    {"dppo": {"divergence": "kl", "low": 0.02, "high": 0.02}},
]
FILTERS: list[dict[str, dict[str, Any]]] = [
    {"veto": {"threshold": 0.5}},
    {"opsm": {"delta": 0.05}},
    {"opsm": {"delta": 0.02, "target": "ref"}},
    {"m2po": {"budget": 0.1}},
    {"m2po": {"budget": 0.1, "over": "harmful"}},
    {"outliers": {"threshold": 0.05}},
    {"outliers": {"threshold": 0.3, "divergence": "k1", "over": "sum"}},
    {"outliers": {"threshold": 0.2, "divergence": "k2", "over": "worst"}},
]
ADVANTAGES = ["group_mean", "grpo", "rloo", "opo", "gpg", "reinforce", "reinforce_pp_baseline"]
LOSSES = ["ppo", "gspo", "gmpo", "sapo", "cispo", "reinforce"]
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def drawn(seed: int) -> tuple[Case, bool]:
    """A random cell, and whether it is a later step of its phase."""
    draw, g = random.Random(seed), np.random.default_rng(seed)
    loss, later = draw.choice(LOSSES), draw.random() < 0.6
    chosen = dict(draw.choice(WEIGHERS + OF_REINFORCE * (loss == "reinforce")))
    if "adjusted" in chosen.get("tis", {}) and loss != "ppo":
        chosen = {"tis": {"cap": 1.5}}
    whole = {"vesp", "rapid"} & set(chosen) or any("level" in s for s in chosen.values())
    if draw.random() < 0.3 and not whole:
        chosen = {"dvp": {"rho": 0.15}} | chosen
    for extra in draw.sample(FILTERS, draw.choice([0, 0, 1, 2])):
        (name,) = extra
        first = name in ("veto", "opsm") and draw.random() < 0.5
        if name not in chosen and not ("dvp" in chosen and name in ("opsm", "outliers")):
            chosen = extra | chosen if first and "dvp" not in chosen else chosen | extra
    tokenwise = {"tis", "mis", "icepop", "ais", "jackpot"}.issuperset(chosen) and not whole
    if tokenwise and loss not in ("gspo", "gmpo") and draw.random() < 0.7:
        chosen = {"centre": {}} | chosen if draw.random() < 0.5 else chosen | {"centre": {}}
    objective = {
        "loss": loss,
        "aggregation": draw.choice(MODES),
        "advantage": "group_mean" if "rapid" in chosen else draw.choice(ADVANTAGES),
        "eps_low": 0.1,
        "eps_high": 0.15,
        "kl_coef": draw.choice([0.0, 0.0, 0.3]),
        "kl_estimator": draw.choice(["k1", "k2", "k3", "full"]),
        "kl_ratio_cap": 1.3,
        "entropy_coef": draw.choice([0.0, 0.0, 0.1]),
    }
    if objective["advantage"] == "reinforce_pp_baseline":
        objective["whitening"] = "tokens"
    ref = g.normal(size=(V + 1, V))
    new = ref + 0.4 * g.normal(size=ref.shape) if later else ref
    inf, base = (ref + s * g.normal(size=ref.shape) for s in (0.5, 0.3))
    answers = [_answer(g, inf) for _ in range(9)]
    rewards = [round(float(g.normal()), 3) if draw.random() < 0.7 else 1.0 for _ in answers]
    groups = [0, 0, 0, 1, 1, 2, 2, 2, 2]
    flags = [len(a) == LONGEST for a in answers]
    case = Case(*(ref, new, inf, base, answers, rewards, groups, flags, LONGEST), chosen, objective)
    return case, later


def _answer(g: np.random.Generator, inf: np.ndarray) -> list[int]:
    p, state, found = np.exp(log_softmax(inf)), V, []
    for _ in range(int(g.integers(1, LONGEST + 1))):
        state = int(g.choice(V, p=p[state]))
        found.append(state)
    return found


def _batch(case: Case) -> StepBatch:
    b = len(case.answers)
    width = max(map(len, case.answers))
    tokens = torch.tensor([(a + [0] * width)[:width] for a in case.answers])
    mask = torch.arange(width) < torch.tensor([len(a) for a in case.answers])[:, None]
    states = torch.cat([torch.full((b, 1), V), tokens[:, :-1]], 1)
    top = torch.tensor(case.inf).log_softmax(-1)[states]
    zeros = torch.zeros(b, width, dtype=torch.float64)
    rewards = torch.tensor(case.rewards, dtype=torch.float64)
    sent = StepTensors(
        mask=mask,
        logp_inf=top.gather(2, tokens[..., None])[..., 0].where(mask, 0.0),
        logp_ref=zeros,
        logp_new=zeros,
        rewards=rewards,
        group_ids=torch.tensor(case.groups),
        advantages=zeros,
        token_version=torch.zeros(b, width, dtype=torch.int32),
        sample_ids=torch.arange(b),
        step=0,
        truncated=torch.tensor(case.truncated),
        topk_ids_inf=torch.arange(V).expand(b, width, V).where(mask[..., None], -1),
        topk_logp_inf=top.where(mask[..., None], -torch.inf),
    )
    of_token = torch.zeros(mask.shape, dtype=torch.int64)
    turns = TurnSpans(rewards[:, None], torch.ones(b, dtype=torch.int64), of_token, zeros)
    episodes = [(TokenSequence.of_answer([V], a),) for a in case.answers]
    batch = StepBatch(episodes, sent, torch.zeros(b, dtype=torch.int32), turns)
    batch.micro = pack(episodes, 20, "sorted")
    return batch


def of_rlcore(case: Case, *, later: bool) -> np.ndarray:
    engine = TabularEngine(torch.tensor(case.ref))
    frozen: Any = TabularPolicy(torch.tensor(case.base))
    job = LearnerJob(
        model_path="",
        learner=LearnerSpec(),
        objective=ObjectiveSpec(**case.objective),
        corrections={n: load_object(CORRECTIONS[n])(**s) for n, s in case.corrections.items()},
        sampling=make_sampling(max_new_tokens=LONGEST, logprobs_k=V),
        total_steps=2,
        run_seed=0,
        pad_id=0,
    )
    pipeline = build(job.corrections, 0, job.objective)
    update, batch = Update(job, engine, FrozenPolicy(frozen), pipeline, ONE_RANK), _batch(case)
    update.prepare([batch], first=True, steps=1 + later)
    engine.move(torch.tensor(case.new))
    update.run(batch, step=int(later), first=not later)
    return engine.gradient().numpy()


def apart(seed: int) -> float:
    """The largest difference of the two gradients, relative to the largest entry."""
    case, later = drawn(seed)
    theirs, ours = Engine(case).gradient(), of_rlcore(case, later=later)
    return float(np.abs(theirs - ours).max() / max(np.abs(theirs).max(), 1e-3))


def compare(seeds: Iterable[int]) -> None:
    for seed in seeds:
        found = apart(seed)
        assert found < TOLERANCE, f"seed {seed}: {found:.2e}, {drawn(seed)}"


def test_both_engines_have_the_same_gradient() -> None:
    compare([*range(FEW), *FOUND])


def test_a_wrong_line_of_either_is_seen() -> None:
    """The comparison itself: a cap that binds, moved by a tenth."""
    seed = next(s for s in range(200) if drawn(s)[0].corrections == {"minpro": {"cap": 1.4}})
    case, later = drawn(seed)
    theirs = Engine(case).gradient()
    case.corrections["minpro"]["cap"] = 1.26
    assert np.abs(theirs - of_rlcore(case, later=later)).max() > 1e-4
    case.corrections["minpro"]["cap"] = 1.4


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_both_engines_have_the_same_gradient_on_new_cells() -> None:
    first = int.from_bytes(os.urandom(4), "big")
    print(f"seeds from {first}")
    compare(range(first, first + MANY))
