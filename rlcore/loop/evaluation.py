"""Evaluation on held-out prompts by the same actors, among the training requests, on the newest
published weights."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlcore.errors import DeadlineExceeded
from rlcore.loop.fleet import Fleet
from rlcore.loop.members import EVALUATION, evaluation_id
from rlcore.loop.prompts import HeldOutRequests
from rlcore.loop.role_protocols import ScorerClient
from rlcore.loop.specs import EvaluationSpec
from rlcore.loop.timing import now
from rlcore.types import Request, SamplingSpec

POLL_S = 0.05  # between two polls of a running evaluation
SHOWN = 32  # verdicts of each task and mode that are shown

OnSamples = Callable[[int, str, list[dict[str, Any]]], None]  # version, label, some of its verdicts


@dataclass(slots=True)
class _PendingEvaluation:
    version: int
    started: float
    # (shown task, mode) -> expected verdicts; the shown task is its label, behind it @ and an
    # actor's label where the evaluation is of that actor alone
    expected: dict[tuple[str, str], int]
    groups: dict[int, list[Request]]
    # purpose -> all of its verdicts, once fetched; the first of them with their texts
    verdicts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    shown: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def purpose(self, label: str, mode: str) -> str:
        return f"eval/{self.version}/{label}/{mode}"


class Evaluator:
    """Starts evaluations and turns their verdicts into `eval/<task>/<metric>`. One at a time."""

    def __init__(
        self,
        spec: EvaluationSpec,
        requests: HeldOutRequests,
        fleet: Fleet,
        scorer: ScorerClient,
        on_samples: OnSamples,
    ) -> None:
        self._spec = spec
        self._requests = requests
        self._fleet = fleet
        self._scorer = scorer
        self._on_samples = on_samples
        self._pending: _PendingEvaluation | None = None
        # called with the answers that are judged, and those of the whole evaluation
        self.progress: Callable[[int, int], None] = lambda done, total: None

    def wants(self, step: int, last_step: int) -> bool:
        """Return whether version `step` is to be evaluated."""
        if step == 0:
            return self._spec.at_start
        return step == last_step or bool(self._spec.every and step % self._spec.every == 0)

    @property
    def awaited(self) -> int | None:
        """The version whose evaluation is running; its last samples may be of later versions."""
        return None if self._pending is None else self._pending.version

    def start(self, version: int) -> None:
        """Assign the requests of an evaluation of the newest published weights. Raises RuntimeError
        while another one is running."""
        if self._pending is not None:
            raise RuntimeError("an evaluation is still running: collect it first")
        pending = _PendingEvaluation(version, now(), {}, {})
        for label in self._requests.sources:
            self._ask(pending, label, label, EVALUATION)
            for actor in self._spec.actors:
                self._ask(pending, label, f"{label}@{actor}", self._fleet.place(actor))
        self._pending = pending
        self._fleet.assignments.assign(pending.groups)

    def _ask(self, pending: _PendingEvaluation, label: str, shown: str, place: int) -> None:
        """Add the requests of one task to a pending evaluation; `place`: of the actors' pool."""
        spec = self._spec.of(label)
        count = self._requests.count(label, spec.prompts)
        for mode, n in {"sampled": spec.samples, **({"greedy": 1} if spec.greedy else {})}.items():
            sampling = _sampling(self._requests.sampling(label), spec, mode)
            pending.expected[shown, mode] = n * count
            for index in range(count):
                group_id = evaluation_id(len(pending.groups), place)
                pending.groups[group_id] = self._requests.group(
                    label,
                    index,
                    group_id,
                    sampling=sampling,
                    purpose=pending.purpose(shown, mode),
                    n=n,
                )

    async def collect(self, *, wait: bool) -> dict[str, float]:
        """The metrics of the pending evaluation if it is complete (or `wait`), else nothing.

        Raises DeadlineExceeded after `evaluation.timeout_s`.
        """
        if self._pending is None:
            return {}
        pending = self._pending
        for shown, mode in pending.expected:
            while not await self._arrived(pending, shown, mode):
                if not wait:
                    return {}
                await asyncio.sleep(POLL_S)
        self._fleet.assignments.withdraw_evaluation()
        self._pending = None
        return self._results(pending)

    def _results(self, pending: _PendingEvaluation) -> dict[str, float]:
        results: dict[str, float] = {}
        versions: set[int] = set()
        for shown, mode in pending.expected:
            purpose = pending.purpose(shown, mode)
            verdicts, spec = pending.verdicts[purpose], self._spec.of(shown.partition("@")[0])
            results.update(summarise(shown, mode, verdicts, spec.samples, spec.report_k))
            versions.update(version for v in verdicts for version in v["versions"])
            self._on_samples(pending.version, f"{shown}/{mode}", pending.shown[purpose])
        oldest = min(versions, default=pending.version)
        newest = max(versions, default=pending.version)
        return {
            **results,
            "eval/policy_version": oldest,
            "eval/version_span": newest - oldest,
            "time/eval_s": now() - pending.started,
        }

    async def _arrived(self, pending: _PendingEvaluation, label: str, mode: str) -> bool:
        """Fetch the verdicts of one mode once all have come; until then they may be lost with the
        graders' process."""
        purpose, expected = pending.purpose(label, mode), pending.expected[label, mode]
        if purpose in pending.verdicts:
            return True
        done = await self._scorer.evaluation_progress(purpose)
        earlier = sum(map(len, pending.verdicts.values()))
        self.progress(earlier + done, sum(pending.expected.values()))
        if done >= expected:
            verdicts = await self._scorer.evaluation(purpose)
            if len(verdicts) >= expected:
                pending.shown[purpose] = await self._scorer.evaluation_shown(purpose, SHOWN)
                pending.verdicts[purpose] = verdicts
                return True
        limit = self._spec.timeout_s
        if now() - pending.started > limit:
            raise DeadlineExceeded(
                f"waited {limit:g} s for the evaluation of version {pending.version} on {label} "
                f"(evaluation.timeout_s): {done} of {expected} samples arrived."
            )
        return False

    def again(self) -> None:
        """Assign a pending evaluation once more: verdicts of it are lost."""
        if self._pending is not None:
            self._fleet.assignments.assign(self._pending.groups)


async def evaluate_alone(
    evaluator: Evaluator, fleet: Fleet, version: int, heartbeat_s: float
) -> dict[str, float]:
    """One evaluation outside training, on a fleet that serves `version`; its metrics."""
    evaluator.start(version)
    collecting = asyncio.create_task(evaluator.collect(wait=True))
    try:
        while not (await asyncio.wait([collecting], timeout=heartbeat_s))[0]:
            await fleet.supervisor.watch()
            fleet.assignments.assign_waiting(fleet.assignments.take_waiting())
        return collecting.result()
    finally:
        collecting.cancel()


def _sampling(training: SamplingSpec, spec: EvaluationSpec, mode: str) -> SamplingSpec:
    """The sampling of answers: as in training, except for the evaluation's own settings. Its top-p
    or top-k replaces all truncation; greedy answers have none."""
    own: dict[str, Any] = {"logprobs_k": -1}  # nothing reads the log-probs of an evaluation
    own["temperature"] = 0.0 if mode == "greedy" else spec.temperature
    if mode == "greedy" or spec.top_p is not None or spec.top_k is not None:
        own |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    if mode != "greedy":
        given = {"top_p": spec.top_p, "top_k": spec.top_k}
        own |= {name: value for name, value in given.items() if value is not None}
    if spec.max_new_tokens is not None:
        own["max_new_tokens"] = spec.max_new_tokens
    return replace(training, **own)


@dataclass(frozen=True, slots=True)
class Judged:
    """One judged answer. `vote`: its text in canonical spelling; "": none."""

    sample: int
    correct: bool
    vote: str


Prompts = list[list[Judged]]  # the judged answers of each prompt, by sample


def summarise(
    label: str,
    mode: str,
    verdicts: list[dict[str, Any]],
    samples: int,
    report_k: Sequence[int] = (),
) -> dict[str, float]:
    """Metrics of one mode: accuracy is the share of samples judged correct.

    A response that was not judged by its deadline is wrong. A grader that failed by itself (status
    "error") says nothing about the response: such samples are left out of accuracy, and
    `failed_share` is their share of all samples. Rewards are means over those that have one.

    "Correct" is the grader's part of that name, or the reward where it has none, at 1 or above (to
    1e-6). `samples`: answers requested for each prompt; `report_k`: numbers of answers that
    statistics are of, `samples` if empty. The order of verdicts does not matter, not even for
    rounding."""
    name = f"eval/{label}"
    rewarded = [v for v in verdicts if v["status"] == "ok"]
    judged = [v for v in verdicts if v["status"] != "error"]
    out = {f"{name}/{mode}_failed_scores": float(len(verdicts) - len(rewarded))}
    if verdicts:
        out[f"{name}/{mode}_failed_share"] = 1 - len(judged) / len(verdicts)
    if not judged:
        return out
    prompts = _by_prompt(judged)
    found: dict[str, list[list[float]]] = {}
    if mode == "greedy":
        found = {"greedy": [[float(a.correct) for a in answers] for answers in prompts]}
    else:
        for k in report_k or (samples,):
            found |= _statistics(prompts, k, samples)
    for what, values in found.items():
        out[f"{name}/{what}"], error = mean_and_error(values)
        if error is not None:
            out[f"{name}/stderr_{what}"] = error
        out[f"{name}/effective_{what}"] = effective_size(values)
    if rewarded:
        out |= _mean_reward(f"{mode}_reward", name, rewarded)
    out[f"{name}/{mode}_length"] = sum(v["length"] for v in judged) / len(judged)
    return out


def _mean_reward(what: str, name: str, rewarded: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean reward and its standard error, for runs whose answers are seldom quite right."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for v in sorted(rewarded, key=lambda v: (v["prompt_id"], v["sample"])):
        by_prompt[v["prompt_id"]].append(v["reward"])
    mean, error = mean_and_error(list(by_prompt.values()))
    out = {f"{name}/{what}": mean}
    return out if error is None else {**out, f"{name}/stderr_{what}": error}


def _by_prompt(judged: Sequence[dict[str, Any]]) -> Prompts:
    found: dict[str, list[Judged]] = defaultdict(list)
    for v in sorted(judged, key=lambda v: (v["prompt_id"], v["sample"])):
        correct = v["status"] == "ok" and v["correct"] >= 1 - 1e-6
        found[v["prompt_id"]].append(Judged(v["sample"], correct, v["answer"]))
    return list(found.values())


def _statistics(prompts: Prompts, k: int, samples: int) -> dict[str, list[list[float]]]:
    """Values by prompt: mean@k and majority@k are of the first k answers, pass@k of all."""
    first = [[a for a in answers if a.sample < k] for answers in prompts]
    found = {f"mean@{k}": [[float(a.correct) for a in answers] for answers in first]}
    if samples > 1:
        counts = [(len(answers), sum(a.correct for a in answers)) for answers in prompts]
        found[f"pass@{k}"] = [[pass_at(k, n, c)] for n, c in counts]
    if k > 1 and any(a.vote for answers in prompts for a in answers):
        found[f"majority@{k}"] = [[majority(answers)] for answers in first if answers]
    return found


def pass_at(k: int, n: int, correct: int) -> float:
    """The probability that k of n answers drawn without replacement hold a correct one: unbiased
    for k answers of the policy (Chen et al. 2021, arXiv:2107.03374, equation 1). With fewer than k
    answers: 1 if one is correct, else 0."""
    k = min(k, n)
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority(answers: Sequence[Judged]) -> float:
    """1 if the most frequent answer is correct, else 0; with several most frequent answers, the
    share of correct ones among them. All correct answers count as one, whatever their spelling; a
    response without an answer has no vote."""
    votes = Counter(None if a.correct else a.vote for a in answers if a.correct or a.vote)
    most = max(votes.values(), default=0)
    winners = [vote for vote, count in votes.items() if count == most]
    return float(None in winners) / len(winners) if winners else 0.0


def effective_size(prompts: Sequence[Sequence[float]]) -> float:
    """The number of independent answers whose share of correct ones would have the standard error
    of these values, clustered by prompt. It is p (1 - p) / error^2, at most one a value.

    Where all are right or all wrong there is no error to tell from, and each prompt counts once.
    """
    share, error = mean_and_error(prompts)
    values = [v for values in prompts for v in values]
    spread = share * (1 - share)
    if error is None or not spread:
        return float(sum(bool(answers) for answers in prompts))
    return min(spread / error**2, float(len(values))) if error else float(len(values))


def mean_and_error(prompts: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """The mean of all values and its standard error, clustered by prompt: answers to one prompt are
    not independent (Miller 2024, arXiv:2411.00640). None for a single prompt."""
    groups = [values for values in prompts if values]
    total = sum(map(len, groups))
    if not total:
        return math.nan, None
    mean = math.fsum(v for values in groups for v in values) / total
    if len(groups) < 2:
        return mean, None
    residuals = [math.fsum(values) - mean * len(values) for values in groups]
    spread = math.fsum(r * r for r in residuals) * len(groups) / (len(groups) - 1)
    return mean, math.sqrt(spread) / total
