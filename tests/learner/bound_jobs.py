"""Jobs of ranks whose steps are bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from learner_helpers import make_groups, make_job, make_place

from rlcore.corrections.specs import CORRECTIONS, Stratum
from rlcore.learner.rank import LearnerRank
from rlcore.learner.sequences import TokenSequence, of_episode
from rlcore.learner.state_files import open_state
from rlcore.registry import load_object
from rlcore.types import POLICY, Group

LAG = 2


def sampled(learner: LearnerRank, step: int, version: int) -> list[Group]:
    """Groups whose log-probs are the policy's own now."""
    groups = make_groups(6, seed=step, version=version)
    for group in groups:
        scores = learner.score([s for e in group.episodes for s in of_episode(e)])
        group.episodes = [
            replace(e, parts=[replace(e.parts[0], logp_inf=logp)])
            for e, logp in zip(group.episodes, scores)
        ]
    return groups


def own_weights(learner: LearnerRank) -> dict[str, np.ndarray]:
    """The weights as they are, whole."""
    return {n: w.numpy() for n, w in learner.published_weights(POLICY, "float32", everywhere=True)}


class Late:
    """A learner whose batches were sampled `lag` versions before. `apart`: standard deviation of
    the log ratios of every second group's actors, which are called sparse; 0: there are none."""

    def __init__(
        self, learner: LearnerRank, place: tuple[int, int], lag: int = LAG, *, apart: float = 0.0
    ) -> None:
        self.learner, self.lag, self.apart = learner, lag, apart
        self.share = slice(place[0], None, place[1])
        self.queue: list[list[Group]] = []

    def run(self, steps: range, *, traced: bool = False) -> list[dict[str, float]]:
        """Steps in turn; rows. `traced`: as rlcore replay executes them."""
        rows = []
        for step in steps:
            first = step + len(self.queue)
            for number in range(first, step + self.lag + 1):
                self.queue.append(sampled(self.learner, number, step))
                if self.apart:
                    _move_apart(self.queue[-1], self.apart, number)
            self.learner.begin_phase([self.queue.pop(0)[self.share]])
            took = self.learner.traced_step(step)[0] if traced else self.learner.train_step(step)
            rows.append(took)
        return rows


def resumed(rank: int, world: int, port: int, model: str, folder: str) -> dict[str, Any]:
    """Six late steps whose rate is far too high, centred and divided by ZeRO-3; from the checkpoint
    after the third the same, and the fourth by a replay."""
    lists: dict[str, dict[str, Any]] = {"centre": {}, "tis": {}}
    settings = {"lr": 2e-2, "step_bound": 0.5, "zero_stage": 3}
    job = replace(make_job(model, corrections=lists, **settings), in_flight=LAG)
    late = Late(LearnerRank(job, make_place(rank, world, port)), (rank, world))
    rows = late.run(range(3))
    late.learner.save(folder)
    again = Late(late.learner, (rank, world))
    again.queue = list(late.queue)
    rows += late.run(range(3, 6))
    whole = own_weights(late.learner)
    queue = list(again.queue)
    late.learner.load(folder)
    found = {"rows": rows, "again": again.run(range(3, 6))}
    found["same"] = same(whole, own_weights(late.learner))
    late.learner.load(folder)
    again.queue = queue
    return found | {"replayed": again.run(range(3, 4), traced=True)}


def composed(rank: int, world: int, port: int, model: str) -> list[dict[str, float]]:
    """Five late steps that VCPO shortens, too."""
    job = make_job(model, corrections={"vcpo": {}}, lr=2e-2, step_bound=0.5)
    return Late(LearnerRank(job, make_place(rank, world, port)), (rank, world)).run(range(5))


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Equal to the bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def unbounded(rank: int, world: int, port: int, model: str, lag: int, lr: float) -> list[Any]:
    """Rows and weights of 40 steps, with the bound and without it."""
    found = []
    for bound in (0.5, None):
        job = make_job(model, lr=lr, step_bound=bound)
        late = Late(LearnerRank(job, make_place(rank, world, port)), (rank, world), lag=lag)
        found.append((late.run(range(40)), own_weights(late.learner)))
    return found


def noisy(rank: int, world: int, port: int, model: str) -> dict[int, list[dict[str, float]]]:
    """By lag: rows of ten steps, half of whose groups are of actors that sample from another
    policy, as sparse attention and drafts do."""
    strata = tuple(
        Stratum((kind,), {"tis": load_object(CORRECTIONS["tis"])()}) for kind in ("bf16", "sparse")
    )
    found = {}
    for lag in (0, LAG):
        job = make_job(model, corrections={"tis": {}}, lr=1e-2, step_bound=0.5)
        learner = LearnerRank(replace(job, strata=strata), make_place(rank, world, port))
        late = Late(learner, (rank, world), lag=lag, apart=0.32)
        found[lag] = late.run(range(10))
    return found


def _move_apart(groups: list[Group], apart: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for part in (p for g in groups[::2] for e in g.episodes for p in e.parts):
        part.actor_id, part.actor_kind = "sparse-0", "sparse"
        noise = apart * rng.standard_normal(len(part.logp_inf))
        part.logp_inf = (part.logp_inf + noise).astype(np.float32)


def held(rank: int, world: int, port: int, model: str, folder: str) -> dict[str, dict[str, Any]]:
    """By ZeRO stage: three supervised steps, with a held one in their middle and without."""
    rng = np.random.default_rng(rank)
    digits = rng.integers(3, 13, (4, 8, 2)).tolist()
    batches = [[TokenSequence.of_answer([*d, 14], [*d, 1]) for d in batch] for batch in digits]
    found: dict[str, Any] = {}
    for stage, dtype in ((0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "float32")):
        job = make_job(model, zero_stage=stage, dtype=dtype, weight_decay=0.1)
        plain, held = (LearnerRank(job, make_place(rank, world, port)) for _ in range(2))
        for step in range(3):
            plain.sft_step(step, batches[step])
            if step == 2:
                _hold(held, batches[3])
            held.sft_step(step, batches[step])
        place = Path(folder) / f"{stage}"
        plain.save(place / "plain")
        held.save(place / "held")
        steps = held.engine.optimizer_steps
        again = LearnerRank(job, make_place(rank, world, port))
        again.load(place / "held")
        rows = [one.sft_step(4, batches[3])["grad_norm"] for one in (plain, held, again)]
        found[f"{stage} {dtype}"] = {
            "steps": steps,
            "rows": rows,
            "same": [same(own_weights(plain), own_weights(one)) for one in (held, again)],
            "states": _equal_states(place / "plain", place / "held"),
        }
    return found


def _hold(learner: LearnerRank, batch: list[TokenSequence]) -> None:
    """A supervised step whose end is a hold."""
    step, learner.engine.step = learner.engine.step, lambda scale=1.0: learner.engine.hold() or 0.0
    learner.sft_step(9, batch)
    learner.engine.step = step


def _equal_states(one: Path, other: Path) -> bool:
    with open_state(one) as a, open_state(other) as b:
        return a.keys() == b.keys() and all(bool((a[n].whole() == b[n].whole()).all()) for n in a)


def stale_rows(rank: int, world: int, port: int, model: str) -> list[dict[str, float]]:
    """Rows of three unbounded steps on the same six groups of version 0, divided among the
    ranks."""
    learner = LearnerRank(make_job(model, step_bound=None), make_place(rank, world, port))
    rows, groups = [], sampled(learner, 0, 0)
    for step in range(3):
        learner.begin_phase([groups[rank::world]])
        rows.append(learner.train_step(step))
    return rows
