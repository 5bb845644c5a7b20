"""Evaluation on held-out prompts by the same actors, among the training requests, on the newest published weights."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rlcore.errors import DeadlineExceeded
from rlcore.runtime.cluster import call
from rlcore.runtime.fleet import Fleet
from rlcore.runtime.prompts import PromptSource
from rlcore.runtime.requests import evaluation_requests
from rlcore.types import Request, SamplingSpec

OnSamples = Callable[[int, str, list[dict[str, Any]]], None]  # version, label, some of its verdicts


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """What one evaluation asks for."""

    every: int  # steps; 0: only at the end
    at_start: bool
    prompts: int  # held-out prompts a task
    samples: int  # k of mean@k and pass@k
    greedy: bool
    temperature: float
    timeout_s: float


@dataclass(slots=True)
class _Pending:
    version: int
    started: float
    expected: dict[tuple[str, str], int]  # (task label, mode) -> verdicts to come
    groups: dict[int, list[Request]]
    verdicts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # purpose -> all of them, once fetched


class Evaluator:
    """Starts evaluations and turns their verdicts into `eval/<task>/<metric>`. One at a time."""

    def __init__(
        self,
        plan: EvalPlan,
        *,
        tasks: dict[str, PromptSource],
        sampling: SamplingSpec,
        fleet: Fleet,
        scorer: Any,
        run_seed: int,
        on_samples: OnSamples,
    ) -> None:
        self.plan, self.tasks, self.fleet, self.scorer = plan, tasks, fleet, scorer
        self.run_seed, self._on_samples = run_seed, on_samples
        greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, logprobs_k=-1)
        sampled = replace(sampling, temperature=plan.temperature, logprobs_k=-1)
        self._modes: dict[str, tuple[SamplingSpec, int]] = {"sampled": (sampled, plan.samples)}
        if plan.greedy:
            self._modes["greedy"] = (greedy, 1)
        self._pending: _Pending | None = None

    def wants(self, step: int, last_step: int) -> bool:
        """Whether version `step` is to be evaluated."""
        if step == 0:
            return self.plan.at_start
        return step == last_step or bool(self.plan.every and step % self.plan.every == 0)

    @property
    def awaited(self) -> int | None:
        """The version whose evaluation is under way; its last samples may be of later ones."""
        return None if self._pending is None else self._pending.version

    async def start(self, version: int) -> None:
        """Hand out the requests for the newest published weights; an evaluation still running is waited for first."""
        if self._pending is not None:
            raise RuntimeError("an evaluation is still running: collect it first")
        groups: dict[int, list[Request]] = {}
        expected: dict[tuple[str, str], int] = {}
        number = 0
        for label, prompts in self.tasks.items():
            size = prompts.task.size("heldout")
            indices = range(self.plan.prompts if size is None else min(size, self.plan.prompts))
            for mode, (sampling, samples) in self._modes.items():
                made = evaluation_requests(
                    prompts,
                    indices=indices,
                    samples=samples,
                    sampling=sampling,
                    run_seed=self.run_seed,
                    purpose=f"eval/{version}/{label}/{mode}",
                )
                expected[label, mode] = samples * len(made)
                for requests in made:
                    number -= 1
                    groups[number] = [replace(r, group_id=number) for r in requests]
        self._pending = _Pending(version, time.monotonic(), expected, groups)
        await self.fleet.assign(groups)

    async def collect(self, *, wait: bool) -> dict[str, float]:
        """The metrics of the pending evaluation if it is complete (or `wait`), else nothing.

        Raises DeadlineExceeded after `evaluation.timeout_s`.
        """
        if self._pending is None:
            return {}
        pending, results = self._pending, {}
        versions: set[int] = set()
        for label, mode in pending.expected:
            while not await self._arrived(pending, label, mode):
                if not wait:
                    return {}
                await asyncio.sleep(0.05)
        for label, mode in pending.expected:
            verdicts = pending.verdicts[f"eval/{pending.version}/{label}/{mode}"]
            results.update(summarise(label, mode, verdicts, self._modes[mode][1]))
            versions.update(version for v in verdicts for version in v["versions"])
            self._on_samples(pending.version, f"{label}/{mode}", sorted(verdicts, key=lambda v: v["prompt_id"])[:8])
        self.fleet.forget_evaluation()
        self._pending = None
        oldest, newest = min(versions, default=pending.version), max(versions, default=pending.version)
        return {
            **results,
            "eval/policy_version": oldest,
            "eval/version_span": newest - oldest,
            "time/eval_s": time.monotonic() - pending.started,
        }

    async def _arrived(self, pending: _Pending, label: str, mode: str) -> bool:
        """Fetch the verdicts of one mode once all have come; they may be lost with their process until then."""
        purpose, expected = f"eval/{pending.version}/{label}/{mode}", pending.expected[label, mode]
        if purpose in pending.verdicts:
            return True
        done = await self._scorer_call(self.scorer.evaluation_progress.remote(purpose))
        if done >= expected:
            verdicts = await self._scorer_call(self.scorer.evaluation.remote(purpose))
            if len(verdicts) >= expected:
                pending.verdicts[purpose] = verdicts
                return True
        if time.monotonic() - pending.started > self.plan.timeout_s:
            raise DeadlineExceeded(
                f"waited {self.plan.timeout_s:g} s for the evaluation of version {pending.version} on {label} "
                f"(evaluation.timeout_s): {done} of {expected} samples came."
            )
        return False

    async def _scorer_call(self, ref: Any) -> Any:
        limit = self.plan.timeout_s
        return await call(ref, timeout_s=limit, what="verdicts", key="evaluation.timeout_s", who="the graders' process")

    async def again(self) -> None:
        """Hand a pending evaluation out once more: the verdicts of it that had come are lost."""
        if self._pending is not None:
            await self.fleet.assign(self._pending.groups)


def summarise(label: str, mode: str, verdicts: list[dict[str, Any]], k: int) -> dict[str, float]:
    """Metrics of one mode: accuracy is the share of samples judged correct; failed scores are left out and counted.

    mean@k averages over samples, pass@k asks for one correct sample among the prompt's k. "Correct" is the grader's
    part of that name, or the reward where it has none, at 1 or above (to 1e-6).
    """
    judged = [v for v in verdicts if v["status"] == "ok"]
    by_prompt: dict[str, list[bool]] = defaultdict(list)
    for v in judged:
        by_prompt[v["prompt_id"]].append(v["correct"] >= 1 - 1e-6)
    out = {f"eval/{label}/{mode}_failed_scores": float(len(verdicts) - len(judged))}
    if not judged:
        return out
    accuracy = sum(sum(c) for c in by_prompt.values()) / len(judged)
    name = f"eval/{label}"
    if mode == "greedy":
        out[f"{name}/greedy"] = accuracy
    else:
        out[f"{name}/mean@{k}"] = accuracy
        if k > 1:
            out[f"{name}/pass@{k}"] = sum(any(c) for c in by_prompt.values()) / len(by_prompt)
    out[f"{name}/{mode}_reward"] = sum(v["reward"] for v in judged) / len(judged)
    out[f"{name}/{mode}_length"] = sum(v["length"] for v in judged) / len(judged)
    return out
