"""Rates of a machine from the metrics of past runs on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

from rlcore.advisor.planner.specs import ActorRates, EpisodeSpec, LearnerRates, LengthSpec, Rates
from rlcore.errors import UserError
from rlcore.rollout.step_costs import NAMES, non_negative
from rlcore.rollout.worker import HAND_OVER_S, HAND_OVER_TURNS_S

Row = Mapping[str, float | int | None]

WARM_UP = 3  # rows that are left out: caches fill, pipelines too
FEWEST = 4  # rows that must remain
SPAN = (
    1.5  # largest over smallest batch from which on fixed costs and costs of tokens are separated
)
_SHARE = 0.7  # of the longest of n answers: its median is the quantile of 1 - 0.7 / n
_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run with one kind of actors. Example: MeasuredRun("runs/a", rows, "bf16", 256, 16,
    synchronous=True, ref_pass=False)"""

    name: str  # for messages
    rows: Sequence[Row]
    label: str  # of its actors
    max_running: int
    max_tokens: int  # rollout.max_new_tokens
    synchronous: bool
    ref_pass: bool  # p_ref is a pass of its own
    played: bool = False  # its samples are episodes of an environment

    @property
    def steady(self) -> Sequence[Row]:
        """The rows that are measured. Raises UserError if they are too few."""
        steady = self.rows[WARM_UP:-1]  # the last row waits for an evaluation
        if len(steady) < FEWEST:
            raise UserError(
                f"{self.name} has {len(self.rows)} steps, and rates need "
                f"{FEWEST + WARM_UP + 1} or more: let it run longer."
            )
        return steady

    def column(self, name: str) -> np.ndarray:
        """A metric of the steady rows that have it. Raises UserError if none does."""
        values = [row[name] for row in self.steady if row.get(name) is not None]
        if not values:
            raise UserError(
                f"{self.name} has no {name} in its steady rows: run it again with this version and "
                "logging.detail=full."
            )
        return np.array(values, float)

    def has(self, name: str) -> bool:
        """Return whether a steady row has this metric."""
        return any(row.get(name) is not None for row in self.steady)

    def mean(self, name: str) -> float:
        """Mean over the steady rows that have the metric."""
        return float(self.column(name).mean())

    def a_step(self, name: str) -> float:
        """Mean over all steady rows of a metric that some rows lack, which count as 0."""
        return float(self.column(name).sum() / len(self.steady))

    @property
    def turns(self) -> float:
        """Turns of an episode; an answer is one."""
        return max(1.0, self.mean("reward_parts/turns")) if self.played else 1.0

    @property
    def given(self) -> float:
        """Tokens of a sequence that were not sampled: the learner's positions of a sequence are all
        its tokens but the last."""
        positions, tokens = self.mean("train/sequence_positions"), self.mean("train/tokens")
        return (positions - tokens) / self.mean("train/sequences") + 1.0

    def learner_tokens(self) -> np.ndarray:
        """[N] of each step, prompts included."""
        return self.column("train/tokens") + self.given * self.column("train/sequences")


def measured(
    runs: Sequence[MeasuredRun], *, grade_s: float | None, beside: str = "", scored: bool = False
) -> Rates:
    """Rates of these runs. They hold for the same number of processes on the same machine.
    `grade_s`: seconds to grade one answer; None: the default. `beside` names the critic and teacher
    of the runs, whose time in the ranks is part of the learner's. `scored`: by a teacher's engines.
    Raises UserError for a run with too few steps.
    """
    played = {run.played for run in runs}
    if len(played) > 1:
        raise UserError(
            "runs= names some with an environment and some without, whose lengths mean turns and "
            "answers: measure them apart."
        )
    grading = {} if grade_s is None else {"grade_s": grade_s}
    episodes = _episodes(runs) if played == {True} else None
    own = Rates().grade_s if grade_s is None else grade_s
    return Rates(
        actor=_actor(runs),
        learner=_learner(runs),
        lengths=_lengths(runs),
        episodes=episodes,
        deliver_s=_delivery(runs, own),
        beside=beside,
        teacher_tokens_per_s=_scored(runs) if scored else None,
        **grading,
    )


def _episodes(runs: Sequence[MeasuredRun]) -> EpisodeSpec:
    """Rows do not tell what comes first from what comes later: each turn is given equally much."""
    return EpisodeSpec(
        turns=fmean(run.turns for run in runs),
        given=round(fmean(run.given / run.turns for run in runs)),
        # of all calls so far, so that the last row knows best
        call_s=fmean(float(run.column("environment/call_s")[-1]) for run in runs),
    )


def _scored(runs: Sequence[MeasuredRun]) -> float:
    """Tokens a second of one engine of a teacher, over the batches that were trained on."""
    seconds = sum(float(r.column("time/teacher_engine_s").sum()) for r in runs)
    tokens = sum(float(r.learner_tokens().sum()) for r in runs)
    return tokens / max(seconds, 1e-9)


def _actor(runs: Sequence[MeasuredRun]) -> ActorRates:
    costs = {}
    for name in NAMES:
        # of all steps so far, so that the last row knows best
        costs[name] = fmean(float(r.column(f"engine/{r.label}/{name}")[-1]) for r in runs)
    prompt_s = costs["prompt_s"]
    return ActorRates(
        decode_s=max(costs["step_s"], 1e-6),
        decode_request_s=costs["request_s"],
        decode_context_s=costs["context_s"],
        prefill_tokens_per_s=1.0 / prompt_s if prompt_s > 1e-9 else 1e9,
        load_s=max(fmean(r.mean("time/publish_stop_s") for r in runs), 1e-4),
        max_running=max(r.max_running for r in runs),
        hand_over_s=HAND_OVER_TURNS_S if runs[0].played else HAND_OVER_S,
    )


def _delivery(runs: Sequence[MeasuredRun], grade_s: float) -> float:
    """Seconds between an answer's record and its score in the buffer, its own grading excluded; 0
    of runs before that was measured."""
    name = "time/score_lag_s"
    # of all samples so far, so that the last row knows best
    lags = [float(r.column(name)[-1]) for r in runs if r.has(name)]
    return max(0.0, fmean(lags) - grade_s) if lags else 0.0


def _fetching(runs: Sequence[MeasuredRun]) -> float:
    """Seconds a token of reading batches; 0 of runs before that was measured."""
    name = "time/fetch_s"
    known = [r for r in runs if r.has(name)]
    tokens = sum(float(r.learner_tokens().sum()) for r in known)
    return sum(float(r.column(name).sum()) for r in known) / tokens if known else 0.0


def _learner(runs: Sequence[MeasuredRun]) -> LearnerRates:
    tokens = np.concatenate([r.learner_tokens() for r in runs])
    ref_s = np.concatenate([_ref_seconds(r) for r in runs])
    learn_s = np.concatenate([r.column("time/learn_s") for r in runs]) - ref_s
    batches = [float(r.learner_tokens().mean()) for r in runs]
    step_s = 0.0
    token_s = float(learn_s.sum() / tokens.sum())
    if max(batches) >= SPAN * min(batches):
        x = np.stack([np.ones_like(tokens), tokens], axis=1)
        step_s, token_s = (float(v) for v in non_negative(x.T @ x, x.T @ learn_s))
    return LearnerRates(
        step_s=step_s + max(0.0, fmean(_beside(r) for r in runs)),
        token_s=token_s,
        ref_token_s=float(ref_s.sum() / tokens.sum()),
        fetch_token_s=_fetching(runs),
        publish_s=max(fmean(_gathering(r) / _publications_a_step(r) for r in runs), 1e-4),
    )


def _ref_seconds(run: MeasuredRun) -> np.ndarray:
    """[N]: seconds of p_ref's pass, where it has its own."""
    name = "time/learner_ref_s"
    return run.column(name) if run.ref_pass else np.zeros_like(run.column(name))


def _gathering(run: MeasuredRun) -> float:
    """Seconds a step of publications, but not while an actor receives, drains and loads."""
    parts = ("receive", "stop", "drain")
    loading = sum(run.a_step(f"time/publish_{part}_s") for part in parts)
    return run.a_step("time/publish_s") - loading


def _publications_a_step(run: MeasuredRun) -> float:
    return len(run.column("time/publish_stop_s")) / len(run.steady)


def _beside(run: MeasuredRun) -> float:
    """Seconds of a step in which the learner neither waits, computes nor publishes."""
    stands = run.a_step("time/publish_s") if run.synchronous else _gathering(run)
    known = run.mean("time/wait_data_s") + run.mean("time/learn_s") + stands
    return run.mean("time/step_s") - known - run.mean("time/checkpoint_s")


def _lengths(runs: Sequence[MeasuredRun]) -> LengthSpec:
    fits = [_of_answers(r) for r in runs]
    return LengthSpec(
        prompt=max(1, round(fmean(r.given / r.turns for r in runs))),
        median=fmean(median for median, _ in fits),
        spread=fmean(spread for _, spread in fits),
    )


def _of_answers(run: MeasuredRun) -> tuple[float, float]:
    """(median, spread) of answers: by their mean, and by the share that was cut off, or by the
    longest. Of episodes by the longest, and by turn: all are taken to be of one length."""
    cut = run.mean("response_length/truncated_share")
    sequences = run.mean("train/sequences")
    longest = float(run.max_tokens)
    if run.played or cut * sequences < 1.0:
        cut, longest = _SHARE / sequences, run.mean("response_length/max")
    median, spread = log_normal(run.mean("response_length/mean"), longest, cut)
    return median / run.turns, spread


def log_normal(mean: float, longest: float, cut: float) -> tuple[float, float]:
    """(median, standard deviation of the logarithm) of a log-normal distribution that, cut at
    `longest`, has this mean, and of which the share `cut` lies beyond. Lengths in tokens.

    `0 < mean <= longest`, `0 < cut < 1`.
    """
    normal = NormalDist()
    z = normal.inv_cdf(1.0 - cut)

    def cut_mean(spread: float) -> float:
        below = math.exp(-spread * z + spread**2 / 2) * normal.cdf(z - spread)
        return longest * (below + cut)

    low, high = 0.0, max(z, 1e-3)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if cut_mean(middle) < mean else (middle, high)
    return longest * math.exp(-low * z), low
