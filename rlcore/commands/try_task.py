"""`rlcore try`: prompts as the model will see them, and the graders' verdicts on known answers,
before anything is trained."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.commands import derived
from rlcore.commands.preflight import (
    ALL,
    ask_lean_servers,
    check_rewards,
    make_tasks,
    note,
    tokenizer_of,
    training_sources,
)
from rlcore.commands.processes import environment_jobs
from rlcore.commands.try_environment import TriedModel, try_episodes
from rlcore.config.names import load_own
from rlcore.config.schema import RunConfig
from rlcore.errors import DeadlineExceeded, Faults, UserError
from rlcore.interfaces import Task
from rlcore.loop.prompts import PromptSource
from rlcore.models.text import (
    decode_response,
    end_ids,
    spelled_tokens,
    split_stops,
    uses_template,
)
from rlcore.rollout.text import cut
from rlcore.rooms import from_room
from rlcore.spec import refuse
from rlcore.tasks import remarks_of
from rlcore.tasks.graders import Graders
from rlcore.tasks.isolation.own import advice
from rlcore.tasks.scoring import Scored
from rlcore.types import Answer, Item, Score

DEFAULT_PROMPTS, MOST_PROMPTS = 3, 1000
FURTHER = 16  # problems after the shown ones that are searched for a different answer
SHOWN_IDS = 16
SHOWN_HEAD, SHOWN_TAIL = 200, 80  # characters of a response: answers are at the end
CONTROLS = {n: f"\\x{n:02x}" for n in (*range(9), *range(11, 32), 127)}  # a terminal obeys them
WAKE_S = 0.2  # between two looks at graders that may have failed
WORKED, REFERENCE = "worked answer", "reference answer"
SCRIPTED = TriedModel()  # by worked turns and known answers
ANOTHER, EMPTY = "another problem's answer", "empty response"


@dataclass(frozen=True, slots=True)
class Response:
    """A response that is graded as if the model had sampled it."""

    what: str  # WORKED, REFERENCE, ANOTHER or EMPTY
    text: str  # what the grader receives
    tokens: int | None = None  # None: no tokenizer


@dataclass(frozen=True, slots=True)
class Trial:
    """A prompt and the responses that are tried on it."""

    item: Item
    lines: list[str]  # the prompt, as it is shown
    refused: bool  # a run would refuse it
    responses: list[Response]


def prompts_asked(word: str | None) -> int:
    """The number in `n=5`. Raises UserError."""
    if word is None:
        return DEFAULT_PROMPTS
    if not word.isdecimal() or not 1 <= int(word) <= MOST_PROMPTS:
        raise UserError(f"n={word} is not accepted: give a number of prompts, 1 to {MOST_PROMPTS}.")
    return int(word)


def try_task(config: RunConfig, n: int, said: TriedModel = SCRIPTED) -> int:
    """Print the first n prompts of every training task and the verdicts on known answers; of a task
    with an environment, n episodes with a scripted or served model.

    Starts graders and environments as a run does, and no engine or learner. Returns 1 if a run
    would refuse one of the prompts or a score failed, else 0. Raises UserError.
    """
    tasks, sources, tokenizer = check(config, said)
    faults = 0
    for label, job in environment_jobs(config).items():
        asked = config.rollout_of(label).sampling(), said
        items = _items(sources.pop(label), n)
        faults += try_episodes(job, tokenizer, tasks[label], items, asked)
    return 1 if faults + _try_prompts(config, tasks, sources, tokenizer, n) else 0


def check(
    config: RunConfig, said: TriedModel = SCRIPTED
) -> tuple[dict[str, Task], dict[str, PromptSource], Any]:
    """(tasks by label, their prompts, tokenizer or None). Raises UserError with all faults."""
    faults = Faults()
    faults.of(_check_said, config, said)
    faults.of(load_own, config)
    faults.of(check_rewards, config)
    faults.of(ask_lean_servers, config)
    tasks = faults.of(make_tasks, config)
    natural = any(task.alphabet() is None for task in (tasks or {}).values())
    none = config.model.path is None and (tasks is None or (natural and not config.played))
    tokenizer = None if none else faults.of(tokenizer_of, config, tasks or {})
    sources = None if tasks is None else faults.of(training_sources, config, tasks, tokenizer)
    if tokenizer is not None:
        for job in environment_jobs(config).values():
            faults.of(from_room("check_template"), job.environment, tokenizer, job.template)
    faults.end()
    assert tasks is not None and sources is not None
    return tasks, sources, tokenizer


def _check_said(config: RunConfig, said: TriedModel) -> None:
    """Raise UserError for words that would change nothing."""
    given = {"say": said.text, "url": said.url, "served": said.served}
    word = next((f"{name}={value}" for name, value in given.items() if value is not None), None)
    refuse(
        word is not None and not config.played,
        f"{word} is of a model in an environment, and there is none: add environment=NAME.",
    )
    refuse(
        said.text is not None and said.url is not None,
        f"say={said.text} is what a scripted model says, and url={said.url} names a served one: "
        "give one of them.",
    )
    refuse(
        said.served is not None and said.url is None,
        f"served={said.served} names the model of a server, and none is given: add url=URL.",
    )


def _try_prompts(
    config: RunConfig,
    tasks: Mapping[str, Task],
    sources: Mapping[str, PromptSource],
    tokenizer: Any,
    n: int,
) -> int:
    """Of tasks without an environment; the number of faults."""
    trials = {label: _trials(config, label, s, tokenizer, n) for label, s in sources.items()}
    scores = graded(config, trials) if trials else {}
    faults = 0
    for label, its in trials.items():
        note(_title(config, label, tasks[label], len(its)))
        task = config.tasks[label]
        remarks = [*remarks_of(tasks[label]), *advice(task.name, task.args)]
        for line in [*remarks, *sources[label].remarks()]:
            note(line)
        note(_rendering(config, tokenizer))
        for line in _ends(config, label, tokenizer):
            note(line)
        for trial, verdicts in zip(its, scores[label]):
            for line in [*trial.lines, *_verdicts(config, label, trial, verdicts)]:
                note(line)
        for line in _summary(its, scores[label]):
            note(line)
        faults += sum(trial.refused for trial in its)
        faults += sum(s.status != "ok" for verdicts in scores[label] for s in verdicts)
    return faults


def _trials(
    config: RunConfig, label: str, source: PromptSource, tokenizer: Any, n: int
) -> list[Trial]:
    if tokenizer is not None and config.tasks[label].overlong_rows == "skip":
        source.check("train", ALL)
    items = _items(source, n + FURTHER)
    refuse(
        not items,
        f"{config.task_key(label)}.name={config.tasks[label].name} has no problems: name a file of "
        f"them with {config.task_key(label)}.args.train_path.",
    )
    stop = derived.stop_strings(config)
    trials = []
    for at, item in enumerate(items[:n]):
        lines, refused = _prompt(source, tokenizer, item)
        lines += _spelled(config, tokenizer, item)
        texts = responses(source.task, item, [*items[at + 1 :], *items[:at]])
        special = config.tasks[label].grader_text == "raw"
        ends = stop.of(item.prompt_id)
        graded = [_as_sampled(tokenizer, what, t, ends, special=special) for what, t in texts]
        trials.append(Trial(item, lines, refused, graded))
    return trials


def _items(source: PromptSource, count: int) -> list[Item]:
    """The first training problems that the run would draw; held-out problems for a task without
    training problems."""
    size = source.size("train")
    if size != 0:
        return source.peek(count if size is None else min(count, size))
    held = source.task.size("heldout")
    return [
        source.task.item("heldout", i) for i in range(count if held is None else min(count, held))
    ]


def responses(task: Task, item: Item, others: Sequence[Item]) -> list[tuple[str, str]]:
    """(kind, text) of the responses to try on a problem: the known answer, a different answer of
    one of the `others`, and an empty one."""
    known = _known(task, item)
    tried = [known] if known else []
    for other in others:
        found = _known(task, other)
        if found and found[1] != (known or ("", ""))[1] and other.answer != item.answer:
            tried.append((ANOTHER, found[1]))
            break
    return [*tried, (EMPTY, "")]


def _known(task: Task, item: Item) -> tuple[str, str] | None:
    if (worked := task.worked_answer(item)) is not None:
        return WORKED, worked
    return (REFERENCE, item.answer) if item.answer else None


def _as_sampled(
    tokenizer: Any, what: str, text: str, stop: Sequence[str], *, special: bool
) -> Response:
    """A text as graders would receive it: decoded from tokens, and cut at the stop strings."""
    if tokenizer is None:
        return Response(what, cut(text, stop))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Response(what, cut(decode_response(tokenizer, ids, special=special), stop), len(ids))


def _prompt(source: PromptSource, tokenizer: Any, item: Item) -> tuple[list[str], bool]:
    """(lines that show a prompt, whether a run would refuse it)."""
    if tokenizer is None:
        return ["", item.prompt_id, *_quoted(_as_text(item))], False
    try:
        ids = source.encode(item).tolist()
    except UserError as error:
        return ["", f"{item.prompt_id}  REFUSED: {error}", *_quoted(_as_text(item))], True
    # Special tokens show what a template adds.
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    first = " ".join(map(str, ids[:SHOWN_IDS])) + (" ..." if len(ids) > SHOWN_IDS else "")
    lines = ["", f"{item.prompt_id}  {_tokens(len(ids))}: {first}", *_quoted(text)]
    return lines, False


def _as_text(item: Item) -> str:
    """A prompt without a tokenizer's template; the messages of a conversation with their roles."""
    if not item.messages:
        return item.question
    return "\n".join(f"[{message['role']}] {message['content']}" for message in item.messages)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _quoted(text: str) -> list[str]:
    return [f"  | {line}" for line in text.translate(CONTROLS).split("\n")]


def graded(
    config: RunConfig, trials: Mapping[str, Sequence[Trial]]
) -> dict[str, list[list[Score]]]:
    """The scores of every trial's responses, by the graders of a run and under their deadlines."""
    everything = [trial for its in trials.values() for trial in its]
    answers = [
        Answer(group, sample, "try:0", trial.item.prompt_id, response.text, response.tokens or 0)
        for group, trial in enumerate(everything)
        for sample, response in enumerate(trial.responses)
    ]
    scores: dict[tuple[int, int], Score] = {}
    arrived = threading.Condition()

    def on_scored(scored: Scored) -> None:
        with arrived:
            scores.update({(a.group_id, a.sample_index): score for a, score in scored})
            arrived.notify_all()

    graders = Graders(derived.grader_pools(config), on_scored=on_scored, note=note)
    deadline = time.monotonic() + config.evaluation.timeout_s
    try:
        graders.submit(answers)
        with arrived:
            while not arrived.wait_for(lambda: len(scores) == len(answers), WAKE_S):
                graders.check()
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{len(answers) - len(scores)} answers were not graded within "
                        f"evaluation.timeout_s={config.evaluation.timeout_s:g}"
                    )
    finally:
        graders.close()
    by_trial = iter(
        [scores[group, sample] for sample in range(len(trial.responses))]
        for group, trial in enumerate(everything)
    )
    return {label: [next(by_trial) for _ in its] for label, its in trials.items()}


def _title(config: RunConfig, label: str, task: Task, shown: int) -> str:
    size = task.size("train")
    if size == 0:
        return f"task {label}: {shown} of {task.size('heldout')} held-out prompts"
    of = "" if size is None else f" of {size}"
    prompts = "prompt" if shown == 1 and not of else "prompts"
    return f"task {label}: {shown}{of} training {prompts}, as seed={config.seed} draws them"


def _rendering(config: RunConfig, tokenizer: Any) -> str:
    """One line on the tokenizer and the chat template."""
    model = config.model
    if tokenizer is None:
        return "no tokenizer: model=FOLDER shows the tokens and the chat template"
    whose = f"model.path={model.path}" if model.path else "the fresh model, a token a character"
    if uses_template(tokenizer, model):
        template = "on"
    elif model.chat_template == "off":
        template = "off, by model.chat_template=off"
    else:
        template = "off, since the tokenizer has none"
    return f"tokenizer of {whose}; chat template {template}"


def _spelled(config: RunConfig, tokenizer: Any, item: Item) -> list[str]:
    """One line on the special tokens that a row spells, if it does."""
    found = [] if tokenizer is None else spelled_tokens(tokenizer, _as_text(item))
    if not found:
        return []
    read = "text" if config.model.control_tokens == "text" else "special tokens"
    key = f"model.control_tokens={config.model.control_tokens}"
    return [f"  the row spells {', '.join(found)}, read as {read} ({key})"]


def _ends(config: RunConfig, label: str, tokenizer: Any) -> list[str]:
    """One line on what ends an answer, with a tokenizer."""
    if tokenizer is None:
        return []
    stop = config.rollout_of(label).stop
    ids, strings = split_stops(tokenizer, stop)
    ids = list(dict.fromkeys([*end_ids(tokenizer, config.model.path), *ids]))
    shown = [f"token {i} {tokenizer.convert_ids_to_tokens(i)}" for i in ids]
    shown += [f"text {json.dumps(text, ensure_ascii=False)}" for text in strings]
    return [f"an answer ends with {', '.join(shown) or 'its length alone'}"]


def _verdicts(config: RunConfig, label: str, trial: Trial, scores: Sequence[Score]) -> list[str]:
    limit = config.rollout_of(label).max_new_tokens
    lines = []
    for response, score in zip(trial.responses, scores):
        shown = json.dumps(response.text, ensure_ascii=False)
        if len(shown) > SHOWN_HEAD + SHOWN_TAIL:
            shown = f"{shown[:SHOWN_HEAD]} ... {shown[-SHOWN_TAIL:]}"
        size = "" if response.tokens is None else f" ({_tokens(response.tokens)})"
        lines.append(f"  {response.what}{size}: {verdict(score)}")
        lines.append(f"    {shown}")
        if response.what == WORKED and (response.tokens or 0) > limit:
            lines.append(f"    longer than max_new_tokens={limit}: the model could not give it")
    return lines


def verdict(score: Score) -> str:
    """A score in words: `reward 0.5 (correct 0, format 1)`."""
    if score.status != "ok" or score.reward is None:
        return f"FAILED ({score.status}): {score.error}"
    parts = ", ".join(f"{name} {value:.4g}" for name, value in score.parts.items())
    return f"reward {score.reward:.4g}{f' ({parts})' if parts else ''}"


def _summary(trials: Sequence[Trial], scores: Sequence[Sequence[Score]]) -> list[str]:
    """Mean reward of each kind of response, and remarks on unusual ones."""
    found: dict[str, list[float]] = {}
    failed = 0
    for trial, verdicts in zip(trials, scores):
        for response, score in zip(trial.responses, verdicts):
            if score.reward is None:
                failed += 1
            else:
                found.setdefault(response.what, []).append(score.reward)
    means = {what: sum(rewards) / len(rewards) for what, rewards in found.items()}
    listed = [f"{what} {mean:.4g} ({len(found[what])})" for what, mean in means.items()]
    lines = ["", f"mean reward: {', '.join(listed) or 'none'}; {failed} failed scores"]
    if failed:
        whole = sum(map(len, scores))
        lines.append(
            f"{failed} of {whole} responses could not be scored: a run counts and drops such "
            "samples, which have no reward; return a number for every response"
        )
    right = [mean for what, mean in means.items() if what in (WORKED, REFERENCE)]
    wrong = [mean for what, mean in means.items() if what in (ANOTHER, EMPTY)]
    known = any(r.what in (WORKED, REFERENCE) for trial in trials for r in trial.responses)
    if not known:
        lines.append("the task has no known answers: no response was tried that should be right")
    elif not right:
        lines.append("the grader fails for every known answer: a run would drop all samples")
    elif wrong and max(right) <= max(wrong):
        lines.append("the grader does not prefer known answers to wrong ones: is it right?")
    return [*lines, ""]
