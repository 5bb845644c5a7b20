"""Scores that are weighted sums of rewards: the reward of the task's own grader, and further
ones."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from rlcore.errors import DeadlineExceeded, StageError, UserError
from rlcore.registry import resolve
from rlcore.tasks import make_task, parse_prompt_id
from rlcore.tasks.rewards.protocols import MAX_ERROR, Reward, RewardQuery, RewardVerdict
from rlcore.tasks.rewards.requests import RequestThread
from rlcore.tasks.rewards.specs import OWN, REWARDS, OwnSpec, RewardSpec
from rlcore.tasks.scoring import Scored, Scorer
from rlcore.tasks.specs import EvalTaskSpec, GradingSpec
from rlcore.types import Answer, Score

Note = Callable[[str], None]


@dataclass(slots=True)
class _Open:
    """An answer, and the verdicts that it has so far."""

    answer: Answer  # a copy of its own: the same answer may be submitted twice
    task: str
    missing: set[str]  # OWN and labels of rewards
    verdicts: dict[str, RewardVerdict] = field(default_factory=dict)


class WeightedScorer:
    """A `Scorer` of tasks of which some have rewards besides their own grader, with its methods.

    A sample of which one reward fails has a failed score, since a sum without one of its parts
    would be another reward. keys: label of a task -> config key of its settings. note: called from
    any thread with a sentence for the user. Raises UserError if a reward cannot be set up.
    """

    def __init__(
        self,
        tasks: Mapping[str, EvalTaskSpec],
        grading: GradingSpec,
        *,
        on_scored: Callable[[Scored], None],
        note: Note,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self._specs = dict(tasks)
        self._tasks = {label: make_task(t.name, t.args, label=label) for label, t in tasks.items()}
        self._on_scored = on_scored
        self.scored = 0  # answers with a reward
        self.errors = 0
        self.timeouts = 0
        self._open: dict[int, _Open] = {}  # by id of the answer, which the entry keeps alive
        self._unfinished = 0
        self._state = threading.Condition()
        self._handing_over = threading.Lock()
        self._failure: BaseException | None = None
        self._closing = False
        self._requests = RequestThread()
        self._rewards: dict[str, dict[str, Reward]] = {}
        self._own: Scorer | None = None
        try:
            for label, spec in tasks.items():
                key = (keys or {}).get(label, "task")
                self._rewards[label] = {
                    name: make_reward(f"{key}.rewards.{name}", reward, self._requests, note)
                    for name, reward in spec.rewards.items()
                }
            own = {label: t for label, t in tasks.items() if t.grade_weight is not None}
            self._own = Scorer(own, grading, on_scored=self._graded) if own else None
        except BaseException:
            self._closing = True
            self._close_parts()
            raise

    @property
    def unfinished(self) -> int:
        """Answers submitted and not yet passed to `on_scored`."""
        return self._unfinished

    def submit(self, answers: Sequence[Answer]) -> None:
        """Queue answers; returns at once. Raises ValueError for a prompt id of no known task."""
        opened = [self._opened(answer) for answer in answers]
        with self._state:
            self.check()
            if self._closing:
                raise StageError("answers were submitted to a scorer that is closed")
            self._open |= {id(entry.answer): entry for entry in opened}
            self._unfinished += len(opened)
        own = [entry.answer for entry in opened if OWN in entry.missing]
        if own and self._own is not None:
            self._own.submit(own)
        for entry in opened:
            self._ask(entry)

    def drain(self, timeout_s: float) -> None:
        """Wait until everything submitted has been handed over. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        with self._state:
            while self._unfinished:
                self.check()
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"{self._unfinished} answers were not graded within {timeout_s:g} s"
                    )
                self._state.wait(min(1.0, max(deadline - time.monotonic(), 0.0)))
            self.check()

    def close(self) -> None:
        """Stop at once; answers that were not graded are dropped."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._close_parts()
        self.check()

    def check(self) -> None:
        """Raise StageError if the scorer has failed for good."""
        if self._failure is not None:
            raise StageError(f"scoring failed: {self._failure}") from self._failure
        if self._closing:
            return
        if self._own is not None:
            self._own.check()
        for rewards in self._rewards.values():
            for reward in rewards.values():
                reward.check()

    def _close_parts(self) -> None:
        with ExitStack() as closing:  # all of them, whatever one raises
            closing.callback(self._requests.close)
            for rewards in self._rewards.values():
                for reward in rewards.values():
                    closing.callback(reward.close)
            if self._own is not None:
                closing.callback(self._own.close)

    def _opened(self, answer: Answer) -> _Open:
        label, _, _ = parse_prompt_id(answer.prompt_id)
        if label not in self._specs:
            known = ", ".join(self._specs)
            raise ValueError(f"{answer.prompt_id}: no task is labelled {label!r}, only {known}")
        spec = self._specs[label]
        missing = {*spec.rewards, *((OWN,) if spec.grade_weight is not None else ())}
        return _Open(replace(answer), label, missing)

    def _ask(self, entry: _Open) -> None:
        """Submit an answer to the rewards that the task has in addition to its own grader."""
        rewards = self._rewards[entry.task]
        if not rewards:
            return
        _, split, index = parse_prompt_id(entry.answer.prompt_id)
        try:
            item = self._tasks[entry.task].item(split, index)
        except Exception as e:  # of a user's own task: its samples fail, as with a failed grader
            for name in rewards:
                self._told(
                    entry, name, RewardVerdict("error", error=f"{type(e).__name__}: {e}"[:300])
                )
            return
        asked = RewardQuery(item.question, item.answer, entry.answer.text)
        for name, reward in rewards.items():
            try:
                reward.submit(asked, partial(self._told, entry, name))
            except Exception as e:  # of a user's own reward
                self._told(
                    entry, name, RewardVerdict("error", error=f"{type(e).__name__}: {e}"[:300])
                )

    def _graded(self, scored: Scored) -> None:
        """Scores of the tasks' own graders."""
        finished = []
        for answer, score in scored:
            verdict = RewardVerdict(
                score.status,
                score.reward,
                score.parts,
                score.error,
                score.seconds,
                score.token_rewards,
                score.answer,
            )
            with self._state:
                entry = self._open[id(answer)]
            if self._is_last(entry, OWN, verdict):
                finished.append(entry)
        self._hand_over(finished)

    def _told(self, entry: _Open, name: str, verdict: RewardVerdict) -> None:
        if self._is_last(entry, name, verdict):
            self._hand_over([entry])

    def _is_last(self, entry: _Open, name: str, verdict: RewardVerdict) -> bool:
        """Keep the first verdict of a reward; True if the answer has all verdicts now."""
        with self._state:
            if name not in entry.missing:
                return False
            entry.verdicts[name] = verdict
            entry.missing.discard(name)
            return not entry.missing

    def _hand_over(self, entries: list[_Open]) -> None:
        if not entries or self._closing:
            return
        done = [(e.answer, _total(e.answer, self._specs[e.task], e.verdicts)) for e in entries]
        try:
            with self._handing_over:
                self._on_scored(done)
        except Exception as e:  # of any kind: the callers of this scorer raise it
            with self._state:
                self._failure = e
                self._state.notify_all()
            return
        statuses = [score.status for _, score in done]
        with self._state:
            self.scored += statuses.count("ok")
            self.errors += statuses.count("error")
            self.timeouts += statuses.count("timeout")
            self._unfinished -= len(done)
            for entry in entries:
                del self._open[id(entry.answer)]
            self._state.notify_all()


def make_reward(key: str, spec: RewardSpec, requests: RequestThread, note: Note) -> Reward:
    """One reward, started. `key`: the config key of its settings. Raises UserError."""
    if spec.own is not None:
        return own_reward(f"{key}.own", spec.own)
    kind = spec.kind
    cls = resolve(REWARDS, kind, key=key, like=Reward)
    reward: Reward = cls(f"{key}.{kind}", getattr(spec, kind), requests, note)
    return reward


def own_reward(key: str, spec: OwnSpec) -> Reward:
    """A reward of a user's own. `key`: the config key of `spec`. Raises UserError."""
    cls = resolve({}, spec.name, key=f"{key}.name", like=Reward)
    try:
        reward: Reward = cls(**spec.args)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{key}.args={spec.args} does not suit {key}.name={spec.name}: {error}."
        ) from error
    return reward


def _total(answer: Answer, spec: EvalTaskSpec, verdicts: Mapping[str, RewardVerdict]) -> Score:
    """`total`, or a failed score for verdicts that cannot be added up."""
    try:
        return total(answer, spec, verdicts).checked()
    except Exception as e:  # of any kind: verdicts may be of a user's own reward
        error = f"the rewards cannot be added up: {type(e).__name__}: {e}"[:MAX_ERROR]
        return Score(answer.group_id, answer.sample_index, answer.draw_id, "error", error=error)


def total(answer: Answer, spec: EvalTaskSpec, verdicts: Mapping[str, RewardVerdict]) -> Score:
    """The score of an answer from all its verdicts: the weighted sum, with each unweighted reward
    among the parts; failed if one of them failed."""
    weights = {name: reward.weight for name, reward in spec.rewards.items()}
    if spec.grade_weight is not None:
        weights = {OWN: spec.grade_weight, **weights}
    seconds = max(verdict.seconds for verdict in verdicts.values())
    ids = answer.group_id, answer.sample_index, answer.draw_id
    for name in weights:
        verdict = verdicts[name]
        if verdict.value is None:
            error = verdict.error if name == OWN else f"reward {name}: {verdict.error}"
            return Score(*ids, verdict.status, error=error, seconds=seconds)
    parts = {} if spec.grade_weight is None else dict(verdicts[OWN].parts)
    taken = sorted(parts.keys() & weights.keys())
    if taken:
        error = f"the task's own grader has a part that is named as the reward {taken[0]}"
        return Score(*ids, "error", error=error, seconds=seconds)
    reward = 0.0
    for name, weight in weights.items():
        value = verdicts[name].value
        assert value is not None
        reward += weight * value
        parts[name] = value
        if name != OWN:
            parts |= {f"{name}.{part}": x for part, x in verdicts[name].parts.items()}
    if OWN in weights:
        # "Correct" in an evaluation is the task's verdict, not the sum.
        parts.setdefault("correct", parts[OWN])
    by_token = _by_token(spec, verdicts, reward)
    vote = verdicts[OWN].answer if OWN in weights else ""
    return Score(*ids, "ok", reward, parts, token_rewards=by_token, seconds=seconds, answer=vote)


def _by_token(
    spec: EvalTaskSpec, verdicts: Mapping[str, RewardVerdict], reward: float
) -> tuple[float, ...]:
    """Token rewards of the task's own grader, weighted; the last token has the other rewards, too,
    so that the sum is `reward`."""
    if spec.grade_weight is None or not verdicts[OWN].token_rewards:
        return ()
    own = [spec.grade_weight * r for r in verdicts[OWN].token_rewards]
    own[-1] += reward - math.fsum(own)
    return tuple(own)
