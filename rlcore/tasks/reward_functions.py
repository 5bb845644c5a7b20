"""Reward functions as a user has them: rlcore's own form, and the forms of verl (recipes of 2026),
TRL 1.x and OpenRLHF 0.10. Each is recognised by its parameters and called unchanged."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlcore.registry import LoadError, load_object
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.grades import as_grade, wants_tokens
from rlcore.types import Grade, Item

VARIABLE = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
GROUND_TRUTH = "ground_truth"  # in an item's meta: a reference answer that is no text
# Arguments that trainers pass to such functions and that grading processes lack.
ABSENT = (
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
    "reward_router_address",
    "reward_model_tokenizer",
)


@dataclass(frozen=True, slots=True)
class CallForm:
    """A way of calling reward functions. `mark` is the parameter by which it is recognised, `call`
    how it is written, `answers` the columns of the reference answer, the first that a row has."""

    call: str
    mark: str = ""
    answers: tuple[str, ...] = ("answer",)
    # (problem, response, completions are messages) -> keyword arguments
    given: Callable[[Item, str, bool], dict[str, Any]] | None = None
    read: Callable[[Any], Any] | None = None  # a result -> what `as_grade` takes, or None
    meta: tuple[str, ...] = ()  # columns that every function is given
    columns: bool = False  # further parameters are columns of the row


OWN = CallForm("grade(item, response), or grade(item, response, tokens)")


def form_of(function: Callable[..., Any]) -> CallForm | None:
    """The form of a function, by its signature; None: none of them."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return None
    for form in FORMS:
        if form.mark in signature.parameters:
            return form
    further = {"tokens": ()} if "tokens" in signature.parameters else {}
    try:
        signature.bind(None, "", **further)
    except TypeError:
        return None
    return OWN


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's function and how it is called.

    Example: RewardFunction.load("reward.py:compute_score", {}).grade(item, "#### 4", (), False)
    """

    source: str
    function: Callable[..., Any]
    form: CallForm

    @classmethod
    def load(cls, source: str, args: Mapping[str, Any]) -> RewardFunction:
        """The function of "package.module:function" or "path/to/file.py:function"; `args`: keyword
        arguments of every call. Raises ArgumentError."""
        try:
            function = load_object(source)
        except LoadError as error:
            raise ArgumentError("grader", source, str(error)) from error
        if not callable(function):
            raise ArgumentError("grader", source, "is not a function.")
        form = form_of(function)
        if form is None:
            forms = "; ".join(f.call for f in (OWN, *FORMS))
            raise ArgumentError(
                "grader", source, f"has none of the parameters that are accepted: give {forms}."
            )
        unknown = args.keys() - accepted(function, args).keys()
        if unknown:
            raise ArgumentError(
                "grader_args", dict(args), f"is not accepted: {source} has no {min(unknown)}."
            )
        absent = (required(function) - args.keys()) & set(ABSENT)
        if form is not OWN and absent:
            raise ArgumentError(
                "grader",
                source,
                f"requires {', '.join(sorted(absent))}, which graders do not have.",
            )
        return cls(source, partial(function, **args) if args else function, form)

    @property
    def name(self) -> str:
        return self.source.rpartition(":")[2]

    @property
    def all_columns(self) -> bool:
        """True if it takes every column of a row."""
        kinds = [p.kind for p in inspect.signature(self.function).parameters.values()]
        return self.form.columns and inspect.Parameter.VAR_KEYWORD in kinds

    def columns(self) -> set[str]:
        """The columns that it names, besides what every function of its form is given."""
        if not self.form.columns:
            return set(self.form.meta)
        parameters = inspect.signature(self.function).parameters.values()
        named = {p.name for p in parameters if p.kind not in VARIABLE}
        return named - {"prompts", "completions", *ABSENT}

    def needed(self) -> set[str]:
        """The columns without which it cannot be called."""
        return self.columns() & required(self.function) if self.form.columns else set()

    def grade(
        self, item: Item, response: str, tokens: Sequence[str], messages: bool
    ) -> Grade | None:
        """The reward of a response; None where the function leaves it unrewarded, as TRL's may.
        Raises the function's own errors, and ValueError for a result that is not a reward."""
        if self.form.given is None or self.form.read is None:
            further = {"tokens": tokens} if wants_tokens(self.function) else {}
            return as_grade(_awaited(self.function(item, response, **further)))
        values = self.form.given(item, response, messages)
        result = self.form.read(_awaited(self.function(**accepted(self.function, values))))
        return None if result is None else as_grade(result)


def weighted_sum(
    functions: Sequence[RewardFunction],
    weights: Sequence[float],
    graded: Sequence[Grade | None],
) -> Grade:
    """The weighted rewards added up; of several functions, each reward is a part under the
    function's name. Raises ValueError if none gave a reward, or one of several rewards tokens."""
    found = [(f, w, g) for f, w, g in zip(functions, weights, graded) if g is not None]
    if not found:
        listed = ", ".join(f.name for f in functions)
        raise ValueError(f"no reward was given: {listed} returned None")
    if len(functions) == 1 and weights[0] == 1:
        return found[0][2]
    parts: dict[str, float] = {}
    for function, _, grade in found:
        if grade.token_rewards:
            raise ValueError(f"{function.name} rewards tokens, which a single grader may do")
        parts |= {
            part if part == "correct" else f"{function.name}.{part}": value
            for part, value in grade.parts.items()
        }
        parts[function.name] = grade.reward
    return Grade(sum(w * grade.reward for _, w, grade in found), parts)


def required(function: Callable[..., Any]) -> set[str]:
    """Names of the parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in VARIABLE}


def accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a function takes, of `values`."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


def single(values: Any) -> Any:
    """The only value of a result on a batch of one. Raises ValueError for another result."""
    try:
        (value,) = values
    except (TypeError, ValueError) as error:
        raise ValueError(f"{values!r:.80} was returned, not a list of one reward") from error
    return _plain(value)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "size", True) else value


def _awaited(value: Any) -> Any:
    return asyncio.run(_value(value)) if inspect.isawaitable(value) else value


async def _value(awaitable: Any) -> Any:
    return await awaitable


def _numbers(values: Iterable[tuple[Any, Any]]) -> dict[str, float]:
    plain = {str(name): _plain(value) for name, value in values}
    return {name: float(v) for name, v in plain.items() if isinstance(v, int | float)}


# -- verl ------------------------------------------------------------------------------------------


def _verl_given(item: Item, response: str, messages: bool) -> dict[str, Any]:
    return {
        "data_source": item.meta.get("data_source", ""),
        "solution_str": response,
        "ground_truth": copy.deepcopy(item.meta.get(GROUND_TRUTH, item.answer)),
        "extra_info": copy.deepcopy(item.meta.get("extra_info") or {}),
    }


def _verl_batch(item: Item, response: str, messages: bool) -> dict[str, Any]:
    plural = {"extra_info": "extra_infos"}
    values = _verl_given(item, response, messages)
    return {plural.get(name, f"{name}s"): [value] for name, value in values.items()}


def _verl_read(result: Any) -> Any:
    """A number, or a dictionary with `score` and further values; `acc` is what accuracy means."""
    if not isinstance(result, Mapping):
        return _plain(result)
    if "score" not in result:
        raise ValueError(f"{dict(result)!r:.80} was returned, a dictionary without score")
    parts = _numbers((n, v) for n, v in result.items() if n != "score")
    if "acc" in parts:
        parts.setdefault("correct", parts["acc"])
    return _plain(result["score"]), parts


# -- TRL -------------------------------------------------------------------------------------------


def _trl_given(item: Item, response: str, messages: bool) -> dict[str, Any]:
    prompt = item.opening() if messages else item.question
    completion = [{"role": "assistant", "content": response}] if messages else response
    reference = {"answer": item.answer} if item.answer else {}
    columns = reference | copy.deepcopy(item.meta)
    listed = {name: [value] for name, value in columns.items()}
    return {**listed, "prompts": [prompt], "completions": [completion]}


# -- OpenRLHF --------------------------------------------------------------------------------------


def _openrlhf_given(item: Item, response: str, messages: bool) -> dict[str, Any]:
    return {
        "queries": [item.question + response],
        "prompts": [item.question],
        "labels": [copy.deepcopy(item.meta.get(GROUND_TRUTH, item.answer))],
    }


def _openrlhf_read(result: Any) -> Any:
    """Rewards, or a dictionary of `rewards`, `scores` and `extra_logs`; a value of a log may stand
    for all samples."""
    if not isinstance(result, Mapping):
        return single(result)
    logs = dict(result.get("extra_logs") or {})
    if result.get("scores") is not None:
        logs["score"] = result["scores"]
    parts = _numbers(
        (n, v[0] if getattr(v, "ndim", True) and hasattr(v, "__len__") else v)
        for n, v in logs.items()
    )
    return single(result.get("rewards")), parts


VERL = CallForm(
    "verl's compute_score(data_source, solution_str, ground_truth, extra_info)",
    "solution_str",
    ("reward_model.ground_truth", GROUND_TRUTH, "answer"),
    _verl_given,
    _verl_read,
    ("data_source", "extra_info"),
)
VERL_BATCH = CallForm(
    "verl's compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
    "solution_strs",
    VERL.answers,
    _verl_batch,
    lambda results: _verl_read(single(results)),
    VERL.meta,
)
TRL = CallForm(
    "TRL's function(completions, **columns)",
    "completions",
    ("answer", "solution", ""),
    _trl_given,
    single,
    columns=True,
)
OPENRLHF = CallForm(
    "OpenRLHF's reward_func(queries, prompts, labels)",
    "queries",
    ("label", "labels", "answer"),
    _openrlhf_given,
    _openrlhf_read,
)
FORMS = (VERL, VERL_BATCH, TRL, OPENRLHF)
