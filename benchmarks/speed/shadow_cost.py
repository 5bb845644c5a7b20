"""Cost of measuring other lists of corrections beside a run's own (`correction.shadow`).

    python -m benchmarks.speed.shadow_cost [--rounds 7]

One learner rank on DeepSpeed takes steps that are all measured, on a load like the quickstart's
(the worst case: a model of 1.7M parameters) and on one of a realistic vocabulary. Processor seconds
of `shadow_metrics`, and of the whole step without it; medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, table
from benchmarks.speed.correction_cost import groups, model
from rlcore.corrections.ais import AisSpec
from rlcore.corrections.jackpot import JackpotSpec
from rlcore.corrections.mis import MisSpec
from rlcore.corrections.specs import CorrectionSpec, Shadow
from rlcore.corrections.tis import TisSpec
from rlcore.corrections.veto import VetoSpec

EVERY = 10  # the default of correction.shadow_every
LISTS: dict[str, dict[str, dict[str, CorrectionSpec]]] = {
    "[[tis]]": {"tis": {"tis": TisSpec()}},
    "[[jackpot]]": {"jackpot": {"jackpot": JackpotSpec()}},
    "[[tis],[mis],[jackpot],[veto,ais]]": {
        "tis": {"tis": TisSpec()},
        "mis": {"mis": MisSpec()},
        "jackpot": {"jackpot": JackpotSpec()},
        "veto+ais": {"veto": VetoSpec(), "ais": AisSpec()},
    },
}
LOADS = {
    "the quickstart's: 512 answers of 7 tokens, 1.7M parameters": {
        "hidden": 192,
        "layers": 4,
        "vocab": 16,
        "sequences": 512,
        "tokens": 7,
        "topk": 15,
    },
    "8 answers of 128 tokens, vocabulary 151,936, 42M parameters": {
        "hidden": 256,
        "layers": 4,
        "vocab": 151936,
        "sequences": 8,
        "tokens": 128,
        "topk": 20,
    },
}


def measured(args: argparse.Namespace, rank: Any, rounds: int) -> tuple[float, float]:
    """Median processor seconds (of a measurement, of a step without it)."""
    from rlcore.corrections import shadow

    batch, spent, steps = groups(args), [], []
    plain = shadow.shadow_metrics

    def timed(*given: Any) -> dict[str, float]:
        begin = time.process_time()
        found = plain(*given)
        spent.append(time.process_time() - begin)
        return found

    shadow.shadow_metrics = timed
    try:
        for step in range(rounds + 2):  # the first two warm allocators up
            begin = time.process_time()
            rank.begin_phase([batch])
            rank.train_step(step)
            steps.append(time.process_time() - begin - spent[-1])
    finally:
        shadow.shadow_metrics = plain
    return statistics.median(spent[2:]), statistics.median(steps[2:])


def learner_rank(path: str, args: argparse.Namespace) -> Any:
    from rlcore.learner.rank import LearnerRank
    from rlcore.learner.specs import LearnerJob, LearnerSpec, RankPlace
    from rlcore.objectives.specs import ObjectiveSpec
    from rlcore.testing.records import make_sampling

    job = LearnerJob(
        model_path=path,
        learner=LearnerSpec(lr=1e-5, micro_batch_tokens=8192, num_cpus=1),
        objective=ObjectiveSpec(),
        corrections={"tis": TisSpec()},
        sampling=make_sampling(logprobs_k=args.topk),
        total_steps=1000,
        run_seed=0,
        pad_id=0,
        shadow=Shadow(next(iter(LISTS.values())), every=1),
    )
    return LearnerRank(job, RankPlace(0, 1, "127.0.0.1", 0, timeout_s=600))


def rows_of(load: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of the table that are of one load; in a process of its own."""
    from rlcore.corrections.shadow import build_shadows
    from rlcore.objectives.specs import ObjectiveSpec

    args = argparse.Namespace(**LOADS[load])
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = model(Path(folder) / "model", args)
        rank = learner_rank(path, args)
        for name, lists in LISTS.items():
            rank._update._shadows = build_shadows(Shadow(lists), 0, ObjectiveSpec())
            one, step = measured(args, rank, rounds)
            found.append(
                {
                    "load": load,
                    "correction.shadow": name,
                    "CPU ms a measurement": 1000 * one,
                    "CPU ms a step": 1000 * step,
                    f"share at n = {EVERY}": f"{one / EVERY / step:.3%}",
                }
            )
    return found


def main() -> None:
    import multiprocessing

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rows = []
    context = multiprocessing.get_context("spawn")
    for load in LOADS:
        with context.Pool(1) as pool:
            rows += pool.apply(rows_of, (load, args.rounds))
    print(f"\nMedians of {args.rounds} steps; {machine()}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
