"""Jobs of test_learner_phases.py: they run on ranks in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_helpers import VOCAB, make_groups
from rank_jobs import learner, share, state, untimed

from rlcore.learner.rank import LearnerRank
from rlcore.learner.state_files import open_state, write_parts
from rlcore.types import Group


def batches_of(count: int, rank: int, world: int, k: int = 4) -> list[list[Group]]:
    """This rank's shares of some batches."""
    all_groups = [make_groups(4, seed=s, first_id=10 * s, k=k) for s in range(count)]
    return [share(groups, rank, world) for groups in all_groups]


def p_refs(one: LearnerRank) -> list[torch.Tensor]:
    refs = [batch.ref for batch in one._phase]
    return [ref.logp.clone() for ref in refs if ref is not None]


def one_phase(
    rank: int, world: int, port: int, model: str, batches: int, epochs: int, options: dict[str, Any]
) -> dict[str, Any]:
    """A phase from its start to its end, and the rest of it from a state saved after its first
    step."""
    folder, steps = Path(options.pop("folder")), batches * epochs
    phase = batches_of(batches, rank, world)
    one = learner(rank, world, port, model, **options)
    # as a checkpoint within a phase holds them
    write_parts(folder / "start", one.held_weights())
    one.begin_phase(phase, steps=steps)
    refs = p_refs(one)
    rows = [untimed(one.train_step(0))]
    one.save(folder / "state")
    rows += [untimed(one.train_step(step)) for step in range(1, steps)]
    out: dict[str, Any] = {"rows": rows, "weights": state(one)}
    out["p_ref_stays"] = all(map(torch.equal, refs, p_refs(one))) and len(refs) == batches
    try:
        one.train_step(steps)
    except RuntimeError as e:
        out["beyond"] = str(e)
    again = learner(rank, world, port, model, **options)
    with open_state(folder / "start") as start:
        again.load_weights(start)
    again.begin_phase([*phase[1:], phase[0]], steps=steps - 1, first=False)
    again.load(folder / "state", keep_phase=True)
    out["resumed_rows"] = [untimed(again.train_step(step)) for step in range(1, steps)]
    out["resumed_weights"] = state(again)
    return out


def phases(
    rank: int,
    world: int,
    port: int,
    model: str,
    shape: tuple[int, int],
    variants: dict[str, dict[str, Any]],
    folder: str,
) -> dict[str, dict[str, Any]]:
    return {
        name: one_phase(rank, world, port, model, *shape, {**options, "folder": f"{folder}/{name}"})
        for name, options in variants.items()
    }


def distillation(
    rank: int, world: int, port: int, model: str, variants: dict[str, dict[str, Any]]
) -> dict[str, list[dict[str, float]]]:
    """Rows of two batches in two epochs, beside which a sparse copy is trained."""
    out = {}
    for name, options in variants.items():
        one = learner(rank, world, port, model, logprobs_k=VOCAB, **options)
        one.begin_phase(batches_of(2, rank, world, k=VOCAB), steps=4)
        out[name] = [untimed(one.train_step(step)) for step in range(4)]
    return out


def same(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    """Whether two sets of weights agree to the bit."""
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[n], theirs[n]) for n in mine)
