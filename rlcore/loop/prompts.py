"""Chooses the next prompt and builds its requests: reproducible and resumable.

Seeds depend on (run seed, group or prompt, sample) alone, never on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from rlcore.errors import UserError
from rlcore.interfaces import Split, Task
from rlcore.loop.specs import DifficultySpec, OverlongRows
from rlcore.models.text import fitting_prompt
from rlcore.seeding import CIRCLE, derive_seed, golden_point
from rlcore.types import Item, Message, Request, SamplingSpec

# Training prompts of several tasks: which task comes next, and which of its problems.
#
# The task of draw n is a function of (run seed, n, weights): the point `frac(u + n * phi)`, phi the
# golden ratio, falls into one of intervals whose lengths are the tasks' shares. These points are
# spread so evenly (`seeding.golden_point`, exact for every n) that every stretch of draws, the
# batches of single steps among them, has nearly the shares of the whole.


class TaskOrder:
    """Labels in the order in which prompts are drawn: random access by number."""

    def __init__(self, weights: Mapping[str, float], run_seed: int) -> None:
        """Raises ValueError unless some weight is positive and none is negative."""
        total = sum(weights.values())
        if min(weights.values(), default=0.0) < 0 or not total > 0:
            raise ValueError(f"weights of tasks must not be negative, nor all 0: {dict(weights)}")
        drawn = {label: weight for label, weight in weights.items() if weight > 0}
        self._labels = list(drawn)
        # the last bound is the whole circle, whatever rounding did
        ends = [int(end / total * CIRCLE) for end in accumulate(drawn.values())]
        self._ends = [*ends[:-1], CIRCLE]
        self._start = derive_seed(run_seed, "mixture") << 1

    def label(self, number: int) -> str:
        """The task of draw `number`, from 0."""
        point = golden_point(self._start, number)
        return next(label for label, end in zip(self._labels, self._ends) if point < end)


class Mixture:
    """Walks several tasks, each by its own cursor."""

    def __init__(
        self, sources: Mapping[str, PromptSource], weights: Mapping[str, float], *, run_seed: int
    ) -> None:
        """`sources` and `weights` by label; a task of weight 0 is never drawn."""
        self.sources = dict(sources)
        self.drawn = 0  # prompts so far
        self._weights = dict(weights)
        self._order = TaskOrder(weights, run_seed)

    def source(self, prompt_id: str) -> PromptSource:
        """The source of the task that a prompt is of."""
        return self.sources[prompt_id.partition("/")[0]]

    def peek(self, count: int) -> list[Item]:
        """The next `count` items; nothing moves."""
        labels = self._labels(count)
        ahead = {label: iter(self.sources[label].peek(labels.count(label))) for label in {*labels}}
        return [next(ahead[label]) for label in labels]

    def advance(self, count: int) -> None:
        """Move on over `count` items."""
        labels = self._labels(count)
        for label in dict.fromkeys(labels):
            self.sources[label].advance(labels.count(label))
        self.drawn += count

    def next(self) -> Item:
        """The next item; moves on."""
        item = self.peek(1)[0]
        self.advance(1)
        return item

    def _labels(self, count: int) -> list[str]:
        return [self._order.label(self.drawn + i) for i in range(count)]

    def another_walk(self, *, run_seed: int, max_prompt_tokens: int) -> Mixture:
        """The same tasks, from the beginning."""
        sources = {
            label: source.another_walk(
                run_seed=task_seed(run_seed, label), max_prompt_tokens=max_prompt_tokens
            )
            for label, source in self.sources.items()
        }
        return Mixture(sources, self._weights, run_seed=run_seed)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "drawn": self.drawn,
            "tasks": {label: source.state() for label, source in self.sources.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. With other weights, the next draws follow them; a task that is
        new begins with its first prompt. Raises UserError where a task is missing: groups of it
        may be in flight, and a run that says what it was trained on must go on saying so."""
        now = ",".join(self.sources)
        if "tasks" not in state:
            raise UserError(
                f"task=[{now}] cannot continue a run with a single task: resume with that one, or "
                "start another run_dir, with model.path=FOLDER of an export of this run."
            )
        missing = [label for label in state["tasks"] if label not in self.sources]
        if missing:
            raise UserError(
                f"task=[{now}] lacks {' and '.join(missing)}, which this run has trained on: keep "
                f"it and set task.{missing[0]}.weight=0 to draw no more prompts of it, or start "
                "another run_dir."
            )
        self.drawn = int(state["drawn"])
        for label, saved in state["tasks"].items():
            self.sources[label].restore(saved)

    def begin_anew(self) -> None:
        """Return to the first prompt, and remember nothing."""
        self.drawn = 0
        for source in self.sources.values():
            source.begin_anew()

    @property
    def remembers(self) -> bool:
        """True if pass rates of some task are recorded."""
        return any(source.remembers for source in self.sources.values())

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Remember the pass rates of groups that have arrived."""
        for prompt_id, rate in outcomes:
            self.source(prompt_id).observe([(prompt_id, rate)])

    def metrics(self) -> dict[str, float]:
        """`task/<task>/<count>` of what is remembered."""
        return {n: v for source in self.sources.values() for n, v in source.metrics().items()}


def task_seed(run_seed: int, label: str) -> int:
    """Seed of one task's walk: two labels of the same data must not walk it in step."""
    return derive_seed(run_seed, "task", label)


SEEDS = 1 << 63  # `derive_seed` is below


class Difficulty:
    """The remembered pass rates of one task's problems, by index.

    Skipping a problem depends on (seed, cursor) and on the remembered rates, never on timing; a
    problem that was not seen yet is always drawn.
    """

    def __init__(self, spec: DifficultySpec, run_seed: int) -> None:
        self.spec = spec
        self.rates: dict[int, float] = {}
        self._seed = run_seed

    def draws(self, index: int, cursor: int) -> bool:
        """Return whether problem `index`, which is next at `cursor`, is drawn."""
        rate = self.rates.get(index)
        if rate is None or self.spec.hopeless < rate < self.spec.solved:
            return True
        return derive_seed(self._seed, "difficulty", cursor) < self.spec.resample_rate * SEEDS

    def note(self, index: int, rate: float) -> None:
        """Remember the pass rate of a problem's newest group."""
        self.rates[index] = rate

    def metrics(self) -> dict[str, float]:
        """Numbers of problems, by pool."""
        solved = sum(rate >= self.spec.solved for rate in self.rates.values())
        hopeless = sum(rate <= self.spec.hopeless for rate in self.rates.values())
        return {
            "seen": float(len(self.rates)),
            "solved": float(solved),
            "hopeless": float(hopeless),
        }

    def state(self) -> dict[str, float]:
        """As JSON, whose keys are text."""
        return {str(index): rate for index, rate in self.rates.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.rates = {int(index): float(rate) for index, rate in state.items()}


ENDLESS_CHECK = 256  # items of a generated task that are checked before a run
NO_TOKENS = np.zeros(0, np.int32)
Outcome = tuple[str, float]  # prompt id, share of its samples that passed
# token ids of a question or of messages, chat template applied
Encode = Callable[[str | Sequence[Message]], list[int]]


class PromptSource:
    """Walks a task endlessly: unbounded tasks by index, finite ones by a fresh seeded permutation
    each epoch."""

    def __init__(
        self,
        task: Task,
        encode: Encode | None,
        *,
        run_seed: int,
        max_prompt_tokens: int,
        difficulty: Difficulty | None = None,
        overlong: OverlongRows = "refuse",
        bos: int | None = None,
    ) -> None:
        """`encode`: for checks, and for prompts that are encoded in this process; actors encode by
        themselves. None: an environment makes the prompts, where the episode is played.
        `difficulty`: the rule by which problems are skipped; its number of problems, or the task's,
        must be finite. `overlong`: the treatment of problems with longer prompts; "skip" applies
        once they are checked. `bos`: the BOS token, if there is one."""
        self.task = task
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong: dict[Split, tuple[int, int]] = {}  # (longer prompts, checked ones)
        self._overlong_rows = overlong
        self._bos = bos
        self._kept: dict[Split, list[int]] = {}  # indices, where others are left out
        self.cursor = 0  # items passed so far
        self._encode = encode
        self._seed = run_seed
        self._difficulty = difficulty
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, permutation)

    def source(self, prompt_id: str) -> PromptSource:
        """The source of a prompt: this one, the only source of the task."""
        return self

    def another_walk(self, *, run_seed: int, max_prompt_tokens: int) -> PromptSource:
        """A separate source over the same task and tokenizer, from the beginning."""
        cut = self._overlong_rows == "truncate_left"
        other = PromptSource(
            self.task,
            self._encode,
            run_seed=run_seed,
            max_prompt_tokens=self.max_prompt_tokens if cut else max_prompt_tokens,
            overlong=self._overlong_rows,
            bos=self._bos,
        )
        other._kept = self._kept
        return other

    def next(self) -> Item:
        """The item under the cursor; moves on."""
        item = self.peek(1)[0]
        self.advance(1)
        return item

    def peek(self, count: int) -> list[Item]:
        """The next `count` items; the cursor stays."""
        return [self.task.item("train", self._index(at)) for at in self._ahead(count)]

    def advance(self, count: int) -> None:
        """Move the cursor over `count` items."""
        if count:
            self.cursor = self._ahead(count)[-1] + 1

    def _ahead(self, count: int) -> list[int]:
        """Places of the next `count` items, without the problems that difficulty skips; at most an
        epoch is skipped, so that an item is always found."""
        if self._difficulty is None:
            return list(range(self.cursor, self.cursor + count))
        found: list[int] = []
        size, at, passed = self._size() or 1, self.cursor, 0
        while len(found) < count:
            drawn = self._difficulty.draws(self._index(at), at) or passed >= size
            if drawn:
                found.append(at)
            passed = 0 if drawn else passed + 1
            at += 1
        return found

    def size(self, split: Split) -> int | None:
        """Problems of a split, without those that are left out; None: without end."""
        kept = self._kept.get(split)
        return self.task.size(split) if kept is None else len(kept)

    def index(self, split: Split, place: int) -> int:
        """The task's index of problem `place` of a split."""
        kept = self._kept.get(split)
        return place if kept is None else kept[place]

    def _size(self) -> int | None:
        """Problems that are walked; None: without end."""
        size = self.size("train")
        first = None if self._difficulty is None else self._difficulty.spec.problems
        return size if first is None else min(first, first if size is None else size)

    def _index(self, cursor: int) -> int:
        size = self._size()
        if size is None:
            return cursor
        epoch, place = divmod(cursor, size)
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng(derive_seed(self._seed, "epoch", epoch))
            self._order = (epoch, rng.permutation(size))
        return self.index("train", int(self._order[1][place]))

    def encode(self, item: Item) -> np.ndarray:
        """Prompt tokens [P] int32, empty where an environment gives them. Raises UserError for a
        prompt that the model cannot hold."""
        if self._encode is None:
            return NO_TOKENS
        return self._fitting(self._encode(item.messages or item.question), item)

    def _fitting(self, ids: Sequence[int], item: Item) -> np.ndarray:
        cut = self._overlong_rows == "truncate_left"
        most = self.max_prompt_tokens
        return fitting_prompt(ids, item.prompt_id, most, cut=cut, bos=self._bos)

    def asked(self, split: Split, index: int) -> str | tuple[Message, ...] | None:
        """Return the text or messages that an actor makes a problem's prompt of; None where an
        environment makes it."""
        if self._encode is None:
            return None
        item = self.task.item(split, index)
        return item.messages or item.question

    def check(self, split: Split, limit: int) -> None:
        """Encode the first `limit` items of a split, so that a bad row is refused before anything
        starts. Rows that are too long are left out where that is asked for, and only the first
        `limit` others are kept. Raises UserError, also if none is left."""
        if self._encode is None:
            return
        size = self.task.size(split)
        skips = self._overlong_rows == "skip" and size is not None
        kept: list[int] = []
        longer = checked = 0
        for i in range(ENDLESS_CHECK if size is None else size):
            if len(kept) == limit:
                break
            item = self.task.item(split, i)
            ids = self._encode(item.messages or item.question)
            long, checked = len(ids) > self.max_prompt_tokens, checked + 1
            longer += long
            if not (long and skips):
                self._fitting(ids, item)
                kept.append(i)
        self.overlong[split] = longer, checked
        if skips:
            self._kept[split] = kept
        if checked and not kept:
            raise UserError(
                f"task.overlong_rows=skip leaves no {split} problem of {self.task.name}: all "
                f"{checked} prompts have more than {self.max_prompt_tokens} tokens "
                "(model.max_len - rollout.max_new_tokens, or task.max_prompt_tokens): raise it, or "
                "set task.overlong_rows=truncate_left."
            )

    def remarks(self) -> list[str]:
        """One line for each split with prompts that are too long and not refused."""
        done = {"skip": "left out", "truncate_left": "cut at their beginning"}
        how = self._overlong_rows
        return [
            f"{longer} of {checked} {split} prompts have more than {self.max_prompt_tokens} "
            f"tokens and are {done[how]} (overlong_rows={how})"
            for split, (longer, checked) in self.overlong.items()
            if longer
        ]

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        rates = {} if self._difficulty is None else {"rates": self._difficulty.state()}
        return {"cursor": self.cursor, **rates}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises UserError for the state of several tasks."""
        if "tasks" in state:
            labels = ",".join(state["tasks"])
            raise UserError(
                f"task={self.task.name} cannot continue a run with task=[{labels}]: resume with "
                "these tasks (a weight of 0 ends the prompts of one), or start another run_dir."
            )
        self.cursor = int(state["cursor"])
        if self._difficulty is not None:
            self._difficulty.restore(state.get("rates", {}))

    def begin_anew(self) -> None:
        """Return to the first prompt."""
        self.restore({"cursor": 0})

    @property
    def remembers(self) -> bool:
        """True if pass rates are recorded."""
        return self._difficulty is not None

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Remember the pass rates of groups that have arrived."""
        for prompt_id, rate in outcomes:
            if self._difficulty is not None:
                self._difficulty.note(split_and_index(prompt_id)[1], rate)

    def metrics(self) -> dict[str, float]:
        """`task/<task>/<count>`: counts of remembered pass rates; nothing without difficulty
        pools."""
        counts = {} if self._difficulty is None else self._difficulty.metrics()
        return {f"task/{self.task.name}/{name}": value for name, value in counts.items()}


class Prompts(Protocol):
    """The source of a run's training prompts: `PromptSource`, or `Mixture` over several."""

    def peek(self, count: int) -> list[Item]:
        """The next `count` items; nothing moves."""

    def advance(self, count: int) -> None:
        """Move on over `count` items."""

    def source(self, prompt_id: str) -> PromptSource:
        """The source of the task that a prompt is of."""

    def next(self) -> Item:
        """The next item; moves on."""

    def another_walk(self, *, run_seed: int, max_prompt_tokens: int) -> Prompts:
        """The same tasks, from the beginning."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises UserError for one of other tasks."""

    def begin_anew(self) -> None:
        """Return to the first prompt, and remember nothing."""

    @property
    def remembers(self) -> bool:
        """True if pass rates are recorded."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Remember the pass rates of groups that have arrived."""

    def metrics(self) -> dict[str, float]:
        """`task/<task>/<count>` of what is remembered."""


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """The request settings of each prompt of a task."""

    sampling: SamplingSpec
    samples: int


class RequestMaker:
    """Builds the n requests of a training group."""

    def __init__(
        self,
        prompts: Prompts,
        *,
        sampling: SamplingSpec,
        samples: int,
        run_seed: int,
        tasks: Mapping[str, SampleSettings] | None = None,
    ) -> None:
        """`tasks`: settings that replace `sampling` and `samples`, by task."""
        self.prompts = prompts
        self._usual = SampleSettings(sampling, samples)
        self._tasks = dict(tasks or {})
        self._run_seed = run_seed

    def asked(self, prompt_id: str) -> SampleSettings:
        """Return the request settings of a prompt."""
        return self._tasks.get(prompt_id.partition("/")[0], self._usual)

    def group(self, group_id: int, prompt_id: str) -> list[Request]:
        """One request per sample. Seeds depend on the admission, so a repeated prompt gets new
        samples."""
        split, index = split_and_index(prompt_id)
        usual = self.asked(prompt_id)
        asked = self.prompts.source(prompt_id).asked(split, index)

        def request(i: int) -> Request:
            seed = derive_seed(self._run_seed, "sample", group_id, i)
            return Request(group_id, i, prompt_id, NO_TOKENS, usual.sampling, seed, asked=asked)

        return [request(i) for i in range(usual.samples)]


class HeldOutRequests:
    """Builds the requests of evaluations: held-out prompts of one or several tasks, by label."""

    def __init__(
        self,
        sources: Mapping[str, PromptSource],
        *,
        sampling: SamplingSpec,
        run_seed: int,
        tasks: Mapping[str, SampleSettings] | None = None,
    ) -> None:
        """`sampling`: the sampling of training, which evaluations change. `tasks`: the sampling of
        single tasks."""
        self.sources = dict(sources)
        self._sampling = sampling
        self._tasks = dict(tasks or {})
        self.run_seed = run_seed

    def sampling(self, label: str) -> SamplingSpec:
        """How a task is sampled in training."""
        asked = self._tasks.get(label)
        return self._sampling if asked is None else asked.sampling

    def count(self, label: str, limit: int) -> int:
        """Held-out prompts of a task, at most `limit`."""
        size = self.sources[label].size("heldout")
        return limit if size is None else min(size, limit)

    def group(
        self, label: str, index: int, group_id: int, *, sampling: SamplingSpec, purpose: str, n: int
    ) -> list[Request]:
        """The n requests of one prompt. Seeds depend on the prompt, not on when it is asked."""
        source = self.sources[label]
        row = source.index("heldout", index)
        prompt_id = source.task.item("heldout", row).prompt_id
        asked = source.asked("heldout", row)

        def request(i: int) -> Request:
            seed = derive_seed(self.run_seed, "eval", prompt_id, i)
            return Request(group_id, i, prompt_id, NO_TOKENS, sampling, seed, purpose, asked)

        return [request(i) for i in range(n)]


def split_and_index(prompt_id: str) -> tuple[Split, int]:
    """The last two parts of "<task>/<split>/<index>"."""
    _, split, index = prompt_id.rsplit("/", 2)
    if split == "train":
        return "train", int(index)
    if split == "heldout":
        return "heldout", int(index)
    raise ValueError(f"prompt id {prompt_id!r} names no split: expected <task>/<split>/<index>")
