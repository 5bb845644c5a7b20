"""Choices of a run of three words: settings that follow from the model, the machine, the
rows and 32 trial answers, each with its reason. Words of the user go before all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlcore.commands.preflight import make_tasks, tokenizer_of
from rlcore.commands.start_checks import check
from rlcore.commands.trial import TRIAL_S, Tried, try_answers
from rlcore.config.compose import load
from rlcore.config.schema import RunConfig
from rlcore.cores import cores
from rlcore.errors import Faults
from rlcore.interfaces import Split, Task
from rlcore.models.folder import read_config
from rlcore.models.text import encode_prompt

HELDOUT_SHARE = 0.02
FEW = 16  # held-out questions, whose accuracy has an error of an eighth
WHOLE = 50e6  # parameters below which all weights are trained on CPUs
LIMIT = {"cpu": 192, "gpu": 1024}  # tokens of a trial answer
PROMPTS = 512  # prompts that are measured
USUAL = 64  # tokens of a prompt that cannot be measured
MIB = 1 << 20


class Choice(NamedTuple):
    """Settings with one reason. Example: Choice(("learner.lr=1e-06",), "all weights of ...")"""

    words: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that choices follow from."""

    parameters: int
    gpus: int
    cpus: int
    rows: int | None
    has_heldout: bool
    prompt: int  # longest prompt, in tokens
    tried: Tried | None = None
    answer: int | None = None  # rollout.max_new_tokens, if the user gives it
    room: int | None = None  # tokens of prompt and answer: the user's limit, else the model's

    @property
    def most(self) -> int:
        """The tokens of the longest answer that is tried."""
        usual = LIMIT["gpu" if self.gpus else "cpu"]
        return min(usual, max(1, (self.room or 1 << 30) - self.prompt))

    @property
    def adapters(self) -> bool:
        """True where adapters are trained instead of all weights."""
        return not self.gpus and self.parameters > WHOLE


def completed(
    words: Sequence[str],
    by_user: Sequence[str],
    config_dir: str | None,
    run_dir: str | None,
    *,
    trial: bool,
) -> tuple[list[str], list[str]]:
    """The words with those that are chosen before them, and the lines that say why.

    `words`: all, among them `by_user`, for whose keys and groups nothing is chosen. Raises
    UserError for words that do not compose, before anything is read or tried.
    """
    given = {word.partition("=")[0].lstrip("+") for word in by_user}
    if "experiment" in given:
        return list(words), []
    # lengths with which the user's compose, until the others are chosen
    asked = [int(n) for w in by_user if (n := w.rpartition("max_new_tokens=")[2]).isdecimal()]
    short = "rollout.max_new_tokens=1", f"model.max_len={1 + max([1, *asked])}"
    config = load([*short, *words], config_dir, run_dir=run_dir)
    if config.model.path is None or config.mixed:
        return list(words), []
    facts, sample = look(config)
    if given & {"rollout.max_new_tokens", "rollout"}:
        facts = replace(facts, answer=config.rollout.max_new_tokens)
    if "model.max_len" in given:
        facts = replace(facts, room=config.model.max_len)
    if trial and facts.answer is None:
        # no trial answers of what is refused
        first = [word for choice in _chosen(facts, given) for word in choice.words]
        check(load([*first, *words], config_dir, run_dir=run_dir))
        facts = replace(facts, tried=sample())
    kept = _chosen(facts, given)
    chosen = [word for choice in kept for word in choice.words]
    lines = [f"  {' '.join(choice.words)}: {choice.reason}" for choice in kept]
    return [*chosen, *words], ["rlcore: chosen (a word of yours goes before each):", *lines]


def _chosen(facts: Facts, given: set[str]) -> list[Choice]:
    return [choice for each in choices(facts) if (choice := _without(each, given)).words]


def look(config: RunConfig, part: Split = "train") -> tuple[Facts, Callable[[], Tried | None]]:
    """Measure the model, this machine and the rows. The function samples trial answers to problems
    of this part.

    An input that is at fault is passed over here: the checks before a start name it.
    """
    from rlcore.cluster.ray_cluster import local_gpus
    from rlcore.models.sizes import folder_parameters

    faults, gpus = Faults(), local_gpus()
    tasks = faults.of(make_tasks, config) or {}
    task = next(iter(tasks.values()), None)
    tokenizer = faults.of(tokenizer_of, config, tasks)
    facts = Facts(
        faults.of(folder_parameters, str(config.model.path)) or 0,
        gpus,
        cores(),
        None if task is None else task.size("train"),
        task is None or task.size("heldout") != 0,
        USUAL if task is None or not tokenizer else _longest(config, task, tokenizer, part),
        room=(faults.of(read_config, str(config.model.path)) or {}).get("max_position_embeddings"),
    )

    def sample() -> Tried | None:
        if task is None or task.size(part) == 0:
            return None
        return try_answers(config, task, tokenizer, facts.most, part)

    return facts, sample


def with_length(
    config: RunConfig, by_user: Sequence[str], check: Callable[[], object]
) -> tuple[RunConfig, str]:
    """The evaluation of a model with the length of its trial answers, where no word of the user
    gives one, and a line that says why. `check`: before answers are sampled."""
    given = {word.partition("=")[0].lstrip("+") for word in by_user}
    key, usual = "rollout.max_new_tokens", config.rollout.max_new_tokens
    if given & {key, "rollout", "experiment"} or config.model.diffusion is not None:
        return config, ""
    if config.mixed or config.played:
        return config, f"{key}={usual} by default: answers of several tasks or turns are not tried"
    check()
    facts, sample = look(config, "heldout")
    new, why = _new_tokens(replace(facts, tried=sample(), room=config.model.max_len))
    rollout = config.rollout.model_copy(update={"max_new_tokens": new})
    return config.model_copy(update={"rollout": rollout}), f"{key}={new} is chosen: {why}"


def _longest(config: RunConfig, task: Task, tokenizer: Any, part: Split) -> int:
    count = min(PROMPTS, task.size(part) or PROMPTS)
    asked = (task.item(part, index) for index in range(count))
    return max(
        (len(encode_prompt(tokenizer, i.messages or i.question, config.model)) for i in asked),
        default=USUAL,
    )


def _without(choice: Choice, given: set[str]) -> Choice:
    """A choice without what the user gave, by key or by the group of the key."""
    kept = [
        word
        for word in choice.words
        if not {(key := word.partition("=")[0]), key.partition(".")[0]} & given
    ]
    return choice._replace(words=tuple(kept))


def choices(facts: Facts) -> Iterator[Choice]:
    """The settings, about ten, in the order in which they are printed."""
    yield _where(facts)
    yield _learner(facts)
    yield _rate(facts)
    yield from _pace(facts)
    yield _lengths(facts)
    yield _store(facts)
    if not facts.has_heldout:
        rows = "" if facts.rows is None else f" of {facts.rows} rows"
        why = f"no held-out file: a share{rows}, by the questions' hashes, is never trained on"
        if facts.rows is not None and (held := HELDOUT_SHARE * facts.rows) < FEW:
            why += f"; ABOUT {math.ceil(held)} QUESTIONS SHOW NO GAIN: give a larger share"
        yield Choice((f"task.args.heldout_share={HELDOUT_SHARE}",), why)
    yield Choice(
        ("evaluation.every=10", f"evaluation.prompts={256 if facts.gpus else 64}"),
        "at the start, every ten steps and at the end",
    )


def _where(facts: Facts) -> Choice:
    size = f"{facts.parameters / 1e6:,.0f} M parameters"
    if facts.gpus:
        engines = max(1, facts.gpus - 1)
        return Choice(
            ("actor.bf16.num_gpus=1", f"actor.bf16.count={engines}"),
            f"{facts.gpus} GPU{'s' if facts.gpus > 1 else ''} here, {size}, bfloat16",
        )
    return Choice(
        ("actor.bf16.num_gpus=0", "actor.bf16.dtype=float32"),
        f"no GPU here, {facts.cpus} cores, {size}, float32",
    )


def _learner(facts: Facts) -> Choice:
    if facts.gpus:
        return Choice(
            ("learner=gpu",), "one rank: all weights, bfloat16, activations computed again"
        )
    if facts.adapters:
        return Choice(
            ("learner=lora", "learner.micro_batch_tokens=auto"),
            f"on CPUs adapters are trained above {WHOLE / 1e6:.0f} M parameters; micro-batches are "
            "tried at the start",
        )
    return Choice(
        ("learner=cpu",), "all weights of a small model; micro-batches are tried at the start"
    )


def _rate(facts: Facts) -> Choice:
    if not facts.adapters:
        return Choice(("learner.lr=1e-06",), "all weights of a pretrained model")
    rate = 1e-4 if facts.parameters < 1e9 else 5e-5 if facts.parameters < 1e10 else 1e-5
    return Choice((f"learner.lr={rate:g}",), "adapters: 1e-05 to 1e-04, less for larger models")


def _pace(facts: Facts) -> Iterator[Choice]:
    if facts.gpus == 1:
        yield Choice(
            ("schedule=on_policy", "schedule.colocated=true"),
            "engine and learner have the one GPU in turn",
        )
    else:
        yield Choice(
            ("schedule=async",), "samples are at most one step old, corrected by correction=[tis]"
        )
    steps = 200 if facts.gpus else 40
    yield Choice(
        (f"schedule.steps={steps}", "schedule.groups_per_step=8", "rollout.samples_per_prompt=8"),
        "64 answers a step",
    )


def _lengths(facts: Facts) -> Choice:
    new, why = _new_tokens(facts)
    if (tried := facts.tried) and not tried.out_of_time and not tried.with_signal:
        why += "; NONE LEARNS from equal rewards: an easier reward or a stronger model"
    whole = min(_rounded(facts.prompt + new, 64), facts.room or math.inf)
    return Choice((f"rollout.max_new_tokens={new}", f"model.max_len={whole}"), why)


def _new_tokens(facts: Facts) -> tuple[int, str]:
    """(tokens of the longest answer, why)."""
    tried = facts.tried
    if facts.answer is not None:
        return facts.answer, f"answers of yours, and prompts of {facts.prompt} tokens or fewer"
    if tried is None:
        return facts.most, "no trial answers were sampled"
    if tried.out_of_time:
        return facts.most, (
            f"{len(tried.lengths)} trial answers reached {tried.limit} tokens in {TRIAL_S:g} s, "
            f"{tried.cut:.0%} without their end: lengths are not known"
        )
    longest = tried.limit if tried.cut > 0 else min(tried.limit, math.ceil(1.25 * tried.p99))
    why = (
        f"{len(tried.lengths)} trial answers: 99% within {tried.p99} tokens, {tried.cut:.0%} "
        f"cut off at {tried.limit}, {tried.with_signal} of {tried.groups} groups with signal"
    )
    why += "" if tried.mean is None else f", mean reward {tried.mean:.3g}"
    return min(_rounded(longest, 32), facts.most), why


def _rounded(number: int, to: int) -> int:
    return -(-number // to) * to


def _store(facts: Facts) -> Choice:
    """Two publications, as the wire has them: float32 on CPUs, else bfloat16."""
    once = facts.parameters * (2 if facts.gpus else 4) / MIB
    size = max(512, _rounded(math.ceil(2.2 * once), 64))
    return Choice(
        (f"cluster.object_store_mib={size}",), f"two publications of {once:,.0f} MiB of weights"
    )
