"""Evaluation on held-out prompts by the same actors, among the training requests, on the newest
published weights."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rlcore.errors import DeadlineExceeded
from rlcore.loop.fleet import Fleet
from rlcore.loop.prompts import HeldOutRequests
from rlcore.loop.role_protocols import ScorerClient
from rlcore.loop.specs import EvaluationSpec
from rlcore.loop.timing import now
from rlcore.types import Request, SamplingSpec

POLL_S = 0.05  # between two polls of a running evaluation
SHOWN = 8  # verdicts of each task and mode that are shown

OnSamples = Callable[[int, str, list[dict[str, Any]]], None]  # version, label, some of its verdicts


@dataclass(slots=True)
class _PendingEvaluation:
    version: int
    started: float
    expected: dict[tuple[str, str], int]  # (task label, mode) -> expected verdicts
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
        self._samples = {"sampled": spec.samples} | ({"greedy": 1} if spec.greedy else {})
        self._pending: _PendingEvaluation | None = None

    def wants(self, step: int, last_step: int) -> bool:
        """Return whether version `step` is to be evaluated."""
        if step == 0:
            return self._spec.at_start
        return step == last_step or bool(self._spec.every and step % self._spec.every == 0)

    @property
    def awaited(self) -> int | None:
        """The version whose evaluation is running; its last samples may come from later
        versions."""
        return None if self._pending is None else self._pending.version

    def start(self, version: int) -> None:
        """Assign the requests of an evaluation of the newest published weights. Raises RuntimeError
        while another one is running."""
        if self._pending is not None:
            raise RuntimeError("an evaluation is still running: collect it first")
        pending = _PendingEvaluation(version, now(), {}, {})
        for label in self._requests.sources:
            count = self._requests.count(label, self._spec.prompts)
            for mode, n in self._samples.items():
                purpose, sampling = pending.purpose(label, mode), self._sampling(label, mode)
                pending.expected[label, mode] = n * count
                for index in range(count):
                    group_id = -1 - len(pending.groups)
                    pending.groups[group_id] = self._requests.group(
                        label, index, group_id, sampling=sampling, purpose=purpose, n=n
                    )
        self._pending = pending
        self._fleet.assignments.assign(pending.groups)

    def _sampling(self, label: str, mode: str) -> SamplingSpec:
        """As in training, at the temperature of the mode; greedy answers without truncation."""
        # logprobs_k=-1: nothing reads the log-probs of an evaluation
        training = replace(self._requests.sampling(label), logprobs_k=-1)
        if mode == "greedy":
            return replace(training, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        return replace(training, temperature=self._spec.temperature)

    async def collect(self, *, wait: bool) -> dict[str, float]:
        """The metrics of the pending evaluation if it is complete (or `wait`), else nothing.

        Raises DeadlineExceeded after `evaluation.timeout_s`.
        """
        if self._pending is None:
            return {}
        pending = self._pending
        for label, mode in pending.expected:
            while not await self._arrived(pending, label, mode):
                if not wait:
                    return {}
                await asyncio.sleep(POLL_S)
        self._fleet.assignments.withdraw_evaluation()
        self._pending = None
        return self._results(pending)

    def _results(self, pending: _PendingEvaluation) -> dict[str, float]:
        results: dict[str, float] = {}
        versions: set[int] = set()
        for label, mode in pending.expected:
            purpose = pending.purpose(label, mode)
            verdicts = pending.verdicts[purpose]
            results.update(summarise(label, mode, verdicts, self._samples[mode]))
            versions.update(version for v in verdicts for version in v["versions"])
            self._on_samples(pending.version, f"{label}/{mode}", pending.shown[purpose])
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


def summarise(label: str, mode: str, verdicts: list[dict[str, Any]], k: int) -> dict[str, float]:
    """Metrics of one mode: accuracy is the share of samples judged correct.

    A response that was not judged by its deadline is wrong. A grader that failed by itself (status
    "error") says nothing about the response: such samples are left out of accuracy, and
    `failed_share` is their share of all samples. Rewards are means over those that have one.

    mean@k averages over samples, pass@k asks for one correct sample among the prompt's k. "Correct"
    is the grader's part of that name, or the reward where it has none, at 1 or above (to 1e-6).
    Verdicts may be in any order: it changes nothing, not even by rounding."""
    name = f"eval/{label}"
    rewarded = [v for v in verdicts if v["status"] == "ok"]
    judged = [v for v in verdicts if v["status"] != "error"]
    by_prompt: dict[str, list[bool]] = defaultdict(list)
    for v in judged:
        by_prompt[v["prompt_id"]].append(v["status"] == "ok" and v["correct"] >= 1 - 1e-6)
    out = {f"{name}/{mode}_failed_scores": float(len(verdicts) - len(rewarded))}
    if verdicts:
        out[f"{name}/{mode}_failed_share"] = 1 - len(judged) / len(verdicts)
    if not judged:
        return out
    accuracy = sum(sum(c) for c in by_prompt.values()) / len(judged)
    if mode == "greedy":
        out[f"{name}/greedy"] = accuracy
    else:
        out[f"{name}/mean@{k}"] = accuracy
        if k > 1:
            out[f"{name}/pass@{k}"] = sum(any(c) for c in by_prompt.values()) / len(by_prompt)
    if rewarded:
        out[f"{name}/{mode}_reward"] = math.fsum(v["reward"] for v in rewarded) / len(rewarded)
    out[f"{name}/{mode}_length"] = sum(v["length"] for v in judged) / len(judged)
    return out
