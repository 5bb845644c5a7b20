"""Rows of runs for tests of verdicts: recorded ones, and ones that are ill or well by
construction."""

import json
import random
from pathlib import Path

RECORDED = Path(__file__).parent / "data" / "recorded_runs.jsonl"


def recorded():
    """{run: rows} of eight runs on a GPU, of which five lose their policy, and of two on CPUs, of
    which one does."""
    runs = map(json.loads, RECORDED.read_text().splitlines())
    return {
        run["run"]: [
            {
                "step": step,
                "lr": run["lr"],
                **dict(zip(run["names"], values)),
                **run.get("evaluations", {}).get(str(step), {}),
            }
            for step, values in enumerate(run["rows"], start=1)
        ]
        for run in runs
    }


def rows(steps, *, failing=0.0, rise=0.01, start=0.2, evals=5, seed=0, **extra):
    """Of a run whose every value is well, but for `extra`: a value, or a function of the step.
    `failing`: failed scores a step; `evals`: steps between evaluations."""
    noise = random.Random(seed)

    def row(step):
        reward = min(1.0, start + rise * step)
        held_out = {
            "eval/policy_version": step - 1,
            "eval/digits/mean@1": min(1.0, start + rise * step),
            "eval/digits/stderr_mean@1": 0.02,
            "eval/digits/sampled_failed_share": 0.0,
        }
        found = {
            "step": step,
            "mismatch/ess": 0.95,
            "mismatch/acceptance": 0.98,
            "mismatch/kl_k3": 0.001 if step > 1 else 0.0,
            "policy/clip_low_share": 0.01,
            "policy/clip_high_share": 0.02,
            "staleness/mean": 2.0 if step > 1 else 0.0,
            "staleness/max": 3.0 if step > 1 else 0.0,
            "time/step_s": 2.0,
            "time/wait_data_s": 0.5,
            "time/rollout_s": 1.8,
            "entropy": 0.4,
            "grad_norm": 0.3,
            "lr": 5e-5,
            "reward/mean": reward + noise.gauss(0, 0.02),
            "reward/std": 0.4,
            "reward/equal_share": 0.3,
            "response_length/mean": 20.0,
            "response_length/truncated_share": 0.01,
            "ledger/score_errors": failing * step,
            "ledger/score_timeouts": 0.0,
            "buffer/arrived_samples": 10.0 * step,
            **(held_out if evals and step % evals == 1 else {}),
        }
        changed = {n: v(step) if callable(v) else v for n, v in extra.items()}
        # what only evaluations have stays with them
        return found | {n: v for n, v in changed.items() if n in found or "eval/" not in n}

    return [row(step) for step in range(1, steps + 1)]


def after(step, before, then):
    """A value that changes after a step."""
    return lambda at: before if at <= step else then


# What makes a run ill, by the shortest of 5, 20 and 200 steps at which some rule must have spoken.
ILL = {
    "few effective samples": (5, {"mismatch/ess": after(2, 0.9, 0.03)}),
    "samples far from the policy": (5, {"mismatch/kl_k3": after(2, 0.002, 0.3)}),
    "answers cut off": (5, {"response_length/truncated_share": 0.88, "reward/mean": 0.05}),
    "half of the answers cut off": (
        5,
        {"response_length/truncated_share": 0.5, "reward/mean": 0.05},
    ),
    "log-probs not finite": (5, {"mismatch/nonfinite_share": 0.5}),
    "far from the reference": (5, {"loss/kl": 8.0}),
    "empty answers": (20, {"response_length/mean": 0.0, "reward/mean": 0.2}),
    "all cut off, some credit": (
        5,
        {
            "response_length/truncated_share": 1.0,
            "reward/mean": 0.4,
            "reward_parts/correct": 0.0,
        },
    ),
    "all cut off, credit without a part that says what is right": (
        5,
        {"response_length/truncated_share": 1.0, "reward/mean": 0.075},
    ),
    "gradient 0": (5, {"grad_norm": 0.0}),
    "gradient not finite": (5, {"grad_norm": None}),
    "gradient not finite in every second step": (5, {"grad_norm": lambda s: [0.3, None][s % 2]}),
    "gradient 0 in two of three steps": (20, {"grad_norm": lambda s: [0.3, 0.0, 0.0][s % 3]}),
    "learning rate 0": (5, {"lr": 0.0}),
    "tokens all masked": (5, {"correction/kept_share": 0.01}),
    "scores that fail": (5, {"failing": 1.0}),
    "held-out scores that fail": (20, {"eval/digits/sampled_failed_share": 0.6}),
    "groups of equal rewards": (5, {"reward/equal_share": 1.0, "reward/mean": 0.0}),
    "no spread of rewards": (5, {"reward/std": 0.0, "reward/mean": 0.1}),
    "entropy gone": (5, {"entropy": 0.001}),
    "rewards fall at once": (20, {"reward/mean": after(10, 0.42, 0.05)}),
    "held-out result falls": (
        20,
        {"eval/digits/mean@1": lambda step: 0.47 - 0.012 * step, "reward/mean": 0.45},
    ),
    "entropy rises": (20, {"entropy": lambda step: 0.3 + 0.2 * step, "reward/mean": 0.15}),
    "answers shrink": (
        20,
        {"response_length/mean": lambda step: max(1.0, 20 - 2 * step), "reward/mean": 0.15},
    ),
    "rewards fall slowly": (200, {"reward/mean": lambda step: 0.7 - 0.003 * step}),
    "no gain in 200 steps": (
        200,
        {"reward/mean": lambda step: 0.3 + 0.01 * (step % 3), "eval/digits/mean@1": 0.3},
    ),
}
LATER = ("no gain in 200 steps",)  # not ill before
# Runs that raise no alarm and are not called healthy, either, and what the verdict says of them.
UNSURE = {
    "rewards vanish": ({"reward/mean": after(10, 0.4, None)}, "no reward/mean"),
    "rewards in every second step": (
        {"reward/mean": lambda step: None if step % 2 else 0.3 + 0.004 * step},
        "no reward/mean in 10 of 20 steps",
    ),
    "effective samples vanish": ({"mismatch/ess": after(10, 0.95, None)}, "no mismatch/ess"),
    "all right before the first step": (
        {
            "reward/mean": 1.0,
            "reward/std": 0.0,
            "reward/equal_share": 1.0,
            "grad_norm": 0.0,
            "eval/digits/mean@1": 1.0,
        },
        "no step had a gradient",
    ),
    "held-out result ends lower": (
        {"eval/digits/mean@1": after(10, 0.47, 0.43)},
        "eval/digits/mean@1 went from 0.47 to 0.43, which may be chance",
    ),
    "answers of one token": (
        {"response_length/mean": 1.0, "reward/mean": 0.2, "eval/digits/mean@1": 0.3},
        "answers have 1 tokens",
    ),
    "some log-probs not finite": (
        {"mismatch/nonfinite_share": 0.04},
        "4% of the tokens have no finite log-prob",
    ),
    "rewards come down from their best": (
        {"reward/mean": after(14, 0.6, 0.5)},
        "reward/mean is down at",
    ),
}
# Runs that are well, in ways that a rule could take for an illness.
WELL = {
    "learns": {},
    "on policy": {"staleness/mean": 0.0, "staleness/max": 0.0},
    "on policy, coarse actors": {
        "mismatch/kl_k3": 0.05,
        "staleness/mean": 0.0,
        "staleness/max": 0.0,
    },
    "coarse actors, a floor from the first step on": {"mismatch/kl_k3": 0.05},
    "solved": {
        "reward/mean": after(4, 0.8, 1.0),
        "reward_parts/correct": after(4, 0.8, 1.0),
        "reward/std": after(4, 0.4, 0.0),
        "reward/equal_share": after(4, 0.3, 1.0),
        "grad_norm": after(4, 0.3, 0.0),
        "entropy": after(4, 0.3, 0.001),
        "eval/digits/mean@1": after(4, 0.8, 1.0),
    },
    "answers need no end": {
        "response_length/truncated_share": 1.0,
        "reward_parts/correct": lambda step: min(1.0, 0.3 + step / 100),
    },
    "a score that fails": {"ledger/score_errors": after(2, 0.0, 1.0)},
    "answers of one token that gain": {"response_length/mean": 1.0},
    "a reference that is followed": {"loss/kl": 0.4, "mismatch/nonfinite_share": 0.0},
    "shorter answers that gain": {"response_length/mean": lambda step: max(3.0, 20 - step)},
    "one odd step in twenty": {
        "mismatch/ess": lambda step: 0.1 if step % 20 == 7 else 0.95,
        "mismatch/kl_k3": lambda step: 0.0 if step == 1 else 0.4 if step % 20 == 7 else 0.001,
    },
}
