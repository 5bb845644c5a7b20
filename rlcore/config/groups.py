"""Splits the arguments of a command line into group selections and values."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from rlcore.config.names import check_registered
from rlcore.config.sentences import closest, is_text, keys, one_line
from rlcore.errors import UserError
from rlcore.files import HUB_NAME, shipped

SHIPPED = shipped("configs")
# Groups whose files each fill a key of their own, so that several can be chosen.
LABELLED = ("actor", "correction")
# Groups of which a run may choose several. A single task keeps its settings directly in `task`.
LISTED = (*LABELLED, "task")

# (folder, (file, time of change, bytes), ...) for each folder
Listing = tuple[tuple[Any, ...], ...]
SETTLED_NS = 2_000_000_000  # the coarsest file times are of two seconds

_QUICK, _WRONG = "experiment=quickstart", "evaluation.dense_actor=true"
# Experiments that consist of another one and a few words: their words, and what they show. Their
# former names are refused with these words (docs/experiments.md).
COMMAND_LINES = {
    "async_staleness": (
        f"{_QUICK} schedule.max_staleness=8",
        "actors up to eight steps behind",
    ),
    "fp8_ais": (
        f"{_QUICK} actor=fp8 correction=ais algorithm.advantage=group_mean",
        "an FP8 actor (emulated on CPU), corrected by AIS on group means, as in its paper",
    ),
    "fp8_jackpot": (
        f"{_QUICK} actor=fp8 correction=jackpot",
        "an FP8 actor, corrected by Jackpot towards the learner's policy",
    ),
    "fp8_tis": (f"{_QUICK} actor=fp8", "an FP8 actor, corrected by token TIS"),
    "lora": (
        f"{_QUICK} learner=lora learner.lr=2e-3",
        "low-rank adapters, merged before publishing (learner.lora.publish=adapter: sent alone)",
    ),
    "mismatch_int4": (
        f"{_QUICK} actor=fp8 actor.fp8.rounding=int4 {_WRONG}",
        "a mismatch on purpose: actor weights rounded to INT4",
    ),
    "mismatch_noise": (
        f"{_QUICK} actor.bf16.logit_noise=0.5 {_WRONG}",
        "a mismatch on purpose: noise on the actor's logits",
    ),
    "mismatch_stale": (
        f"{_QUICK} schedule.max_staleness=16 {_WRONG}",
        "a mismatch on purpose: actors sixteen steps behind",
    ),
    "mismatch_temperature": (
        f"{_QUICK} actor.bf16.temperature_scale=1.3 {_WRONG}",
        "a mismatch on purpose: the actor samples at another temperature than it reports",
    ),
    "paper/rapid_h2": (
        "experiment=paper/rapid_h8 schedule.steps_per_publish=2",
        "RAPID's table 3, H=2: the least off-policy (N_inference is 64, section 4.1)",
    ),
    "paper/rapid_h4": (
        "experiment=paper/rapid_h8 schedule.steps_per_publish=4",
        "RAPID's table 3, H=4: recommended with 8 (N_inference is 128)",
    ),
    "paper/rapid_h16": (
        "experiment=paper/rapid_h8 schedule.steps_per_publish=16",
        "RAPID's table 3, H=16: the most off-policy (N_inference is 512)",
    ),
    "quickstart_on_policy": (
        f"{_QUICK} schedule=on_policy",
        "generation and learning in turn: the baseline of the asynchronous run",
    ),
    "train_sparse": (
        "experiment=sparse_training_free learner.train_sparse=true",
        "DistillSparse's baseline: the policy trained through sparse attention, evaluated dense",
    ),
}


@dataclass(frozen=True)
class Overrides:
    """The `key=value` words of a command line: selections of groups, and values."""

    selections: tuple[Override, ...]  # options of groups
    values: tuple[Override, ...]  # single keys

    def selected(self) -> dict[str, Any]:
        """group (or group@package) -> chosen option or options."""
        return {group_key(o): o.value() for o in self.selections}

    def value_of(self, key: str) -> Any:
        """Return the value that the words set `key` to (the last one counts), or None."""
        found = [o.value() for o in self.values if o.key_or_group == key]
        return found[-1] if found else None


def parse(words: Sequence[str], config_dir: str | Path | None = None) -> Overrides:
    """Separate group selections from values. Raises UserError for any other word."""
    available = groups(config_dir)
    selections, values = [], []
    for word in words:
        for override in _own_class(_parse_word(word)):
            if override.key_or_group in available:
                _require_options(override, available[override.key_or_group])
                selections.append(override)
            else:
                values.append(override)
    return Overrides(tuple(selections), tuple(values))


def groups(config_dir: str | Path | None = None) -> dict[str, dict[str, Path]]:
    """group -> option -> file, of the shipped folder and the user's own, which may add options."""
    check_registered(groups_in([SHIPPED]), SHIPPED)
    return groups_in(roots(config_dir))


def groups_in(folders: Sequence[Path]) -> dict[str, dict[str, Path]]:
    """group -> option -> file, of folders of groups; the first that has an option counts."""
    return {group: dict(options) for group, options in _groups(listing(folders)).items()}


@lru_cache(maxsize=16)
def _groups(found: Listing) -> dict[str, dict[str, Path]]:
    options: dict[str, dict[str, Path]] = {}
    for root, *files in found:
        for name in sorted((file for file, *_ in files), key=lambda file: file.split("/")):
            group, *inner = Path(name).parent.parts or ("",)
            if group:  # else config.yaml, which selects options and is none
                option = "/".join([*inner, Path(name).stem])  # e.g. paper/rapid_h8 of experiment
                options.setdefault(group, {}).setdefault(option, root / name)
    return options


def listing(folders: Sequence[Path]) -> Listing:
    """The YAML files of folders with times and sizes: a value that changes when one is added,
    changed or removed."""
    return tuple((folder, *_files(folder)) for folder in folders)


def settled(found: Listing) -> bool:
    """Return whether a further change would show in the listing; it may not within a tick of the
    clock that stamps files."""
    newest = max((time_ns for _, *files in found for _, time_ns, _ in files), default=0)
    return time.time_ns() - newest > SETTLED_NS


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """(path within the folder, time of change in ns, bytes) of every YAML file, sorted."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        inner = os.path.relpath(parent, folder)
        for name in sorted(names):
            if name.endswith(".yaml"):
                path = os.path.join(parent, name)
                at = os.stat(path) if os.path.exists(path) else os.lstat(path)
                yield os.path.normpath(os.path.join(inner, name)), at.st_mtime_ns, at.st_size


def setting_names(config_dir: str | Path | None = None) -> list[str]:
    """Return the names that arguments of a run may use: its groups and its dotted keys."""
    return [*groups(config_dir), *keys()]


def roots(config_dir: str | Path | None) -> list[Path]:
    """Folders of groups in the order in which they are searched. Raises UserError."""
    if not (SHIPPED / "config.yaml").is_file():
        raise UserError(
            f"The shipped {SHIPPED}/config.yaml is missing: install rlcore from its checkout."
        )
    if config_dir is None:
        return [SHIPPED]
    own = Path(config_dir).resolve()
    if not own.is_dir():
        raise UserError(
            f"config_dir={config_dir} is not a folder: give one that holds groups such as "
            "experiment/."
        )
    # Hydra starts from the first folder: a user's own config.yaml replaces the shipped one.
    return [own, SHIPPED] if (own / "config.yaml").is_file() else [SHIPPED, own]


def group_key(override: Override) -> str:
    """The group of a selection, with the package that it is put into if it names one."""
    return override.key_or_group + (f"@{override.package}" if override.package else "")


def hydra_word(override: Override) -> str:
    """A selection in the form that Hydra composes from; not of several tasks."""
    chosen = override.value()
    if override.key_or_group in LABELLED and not isinstance(chosen, list) and not override.package:
        chosen = [chosen]  # one of a group that holds a list
    if isinstance(chosen, list):
        shown = f"[{','.join(chosen)}]"
    else:
        shown = "null" if chosen is None else str(chosen)
    return f"{'+' if override.package else ''}{group_key(override)}={shown}"


def each_value(word: str) -> list[str]:
    """The word once for each value that it gives its key, in the form of Hydra's multirun.

    Example: each_value("seed=0,1") is ["seed=0", "seed=1"]. Raises UserError.
    """
    override = _read_word(word)
    if not override.is_sweep_override():
        return [word]
    key = word.partition("=")[0]
    try:
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    except HydraException as e:
        raise UserError(
            f"The word {word!r} cannot be swept ({one_line(e)}): write key=a,b,c or key=range(n)."
        ) from e


def _readable(word: str) -> Override | None:
    try:
        return _read_word(word)
    except UserError:
        return None


def _read_word(word: str) -> Override:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as e:
        raise UserError(
            f"The word {word!r} cannot be read ({one_line(e)}): write key=value or group=option."
        ) from e


_KEY = re.compile(r"\+{0,2}[A-Za-z_][\w./@-]*")


def _as_text(word: str, read: Override | None) -> Override | None:
    """The override of a word whose value is meant as it stands. This is any text without quotes,
    for a key that holds text, or one that Hydra's grammar cannot read and that is not a list or
    mapping; None for another. `read`: by Hydra's grammar, if it could."""
    key, equals, text = word.partition("=")
    if not equals or not _KEY.fullmatch(key):
        return None
    holds_text = is_text(key.lstrip("+"))
    if read is None:
        as_it_is = holds_text or text.lstrip()[:1] not in ("[", "{")
    else:
        value = None if read.is_sweep_override() else read.value()
        null = value is None and text.strip() == "null"
        as_it_is = holds_text and not null and not isinstance(value, str)
    if not as_it_is:
        return None
    plain = OverridesParser.create().parse_override(f"{key}=x")
    plain._value, plain.input_line = QuotedString(text=text, quote=Quote.single), word
    return plain


def _parse_word(word: str) -> Override:
    override = _as_text(word, _readable(word)) or _read_word(word)
    # Hydra's syntax for several runs, which a forgotten bracket asks for by accident.
    if override.is_sweep_override():
        hint = f"{override.key_or_group}=[{word.partition('=')[2]}]"
        raise UserError(
            f"The word {word!r} asks for several runs: use rlcore sweep, or write a list, {hint}."
        )
    if override.key_or_group.split(".")[0] == "hydra":
        raise UserError(
            f"The word {word!r} configures Hydra itself: only keys of a run are accepted "
            "(see --help)."
        )
    return override


def _own_class(override: Override) -> list[Override]:
    """`environment=path/to/file.py:Class`, and `task` likewise, name a class where other groups
    only have options."""
    group, chosen = override.key_or_group, override.value()
    if group not in ("environment", "task") or not isinstance(chosen, str) or ":" not in chosen:
        return [override]
    named = _parse_word(f"{group}.name={override.get_value_string()}")
    # The option `own` replaces the arguments of the task that is chosen by default.
    return [_parse_word("task=own"), named] if group == "task" else [named]


def _require_options(override: Override, options: dict[str, Path]) -> None:
    group = group_key(override)
    if override.is_delete():
        raise UserError(
            f"~{group} cannot be removed from a run: choose one of {', '.join(options)}."
        )
    chosen, shown = override.value(), override.get_value_string()
    if isinstance(chosen, list) and group not in LISTED:
        *first, last = LISTED
        raise UserError(
            f"{group}={shown} names several: only {', '.join(first)} and {last} take a list."
        )
    if group == "task" and isinstance(chosen, list):
        _require_tasks(chosen, shown)
    for option in chosen if isinstance(chosen, list) else [chosen]:
        # experiment=null cancels one that a user's own config.yaml selects
        if option is None and override.key_or_group == "experiment":
            continue
        moved = COMMAND_LINES.get(str(option)) if group == "experiment" else None
        if moved is not None and option not in options:
            words, _ = moved
            raise UserError(f"experiment={option} is not a separate experiment: write {words}.")
        if not isinstance(option, str) or option not in options:
            why = closest(str(option), options)
            if group == "model" and not why:
                why = f"{option} is no folder"
            raise UserError.choice(group, shown, options, why)


def _require_tasks(chosen: list[Any], shown: str) -> None:
    if not chosen:
        raise UserError("task=[] names no task: choose at least one.")
    for option in chosen:
        if chosen.count(option) > 1:
            raise UserError(
                f"task={shown} names {option} twice: give the second its own label, "
                f"'+task.LABEL={{name: {option}, args: {{...}}}}'."
            )


# ----- rlcore train model=M data=D reward=R -----

DATA, REWARD = "data", "reward"


def three_words(
    words: Sequence[str], own: Mapping[str, str], config_dir: str | None, part: str = "train"
) -> list[str] | None:
    """The words with these three in place of what they stand for, or None where none is given.

    `words`: settings of a run; `own`: data= and reward=; `part`: of the task, that data= has. A
    reward is FILE.py:FUNCTION, MODULE:FUNCTION, or a shipped task that grades rows, such as gsm8k.
    Raises UserError.
    """
    options = groups(config_dir)
    model = _model(words, options["model"])
    if model is None and DATA not in own and REWARD not in own:
        return None
    given = {word.partition("=")[0] for word in words}
    if DATA in own and REWARD not in own and not given & {"task", "task.args.grader"}:
        raise UserError(
            f"reward= is missing, which scores the answers to data={own[DATA]}: give "
            "reward=FILE.py:FUNCTION, or a task that grades rows, such as reward=gsm8k."
        )
    if REWARD in own and DATA not in own and not any("_path" in key for key in given):
        raise UserError(
            f"data= is missing, whose answers reward={own[REWARD]} scores: give data=FILE, rows "
            "with a question and an answer."
        )
    found = [] if model is None else ["model=path", f"model.path={model}"]
    reward = own.get(REWARD)
    if reward is not None and reward in options["task"]:
        found.append(f"task={reward}")
    elif reward is not None or DATA in own:
        found += [] if "task" in given else ["task=file"]
        found += [] if reward is None else [f"task.args.grader={_function(reward)}"]
    if DATA in own:
        found.append(f"task.args.{part}_path={own[DATA]}")
    return [*found, *(word for word in words if word != f"model={model}")]


def _model(words: Sequence[str], options: Mapping[str, Path]) -> str | None:
    """The value of model= if it is a folder or a name of the hub, and no option."""
    values = [word.partition("=")[2] for word in words if word.startswith("model=")]
    value = values[-1] if values else None
    if value is None or value in options:
        return None
    if os.path.isdir(value) or "/" in value or HUB_NAME.fullmatch(value):
        return value
    return None


def _function(reward: str) -> str:
    file, colon, name = reward.rpartition(":")
    if not colon or not file or not name:
        raise UserError(
            f"reward={reward} is not accepted: give FILE.py:FUNCTION, MODULE:FUNCTION, or a task "
            "that grades rows, such as gsm8k or math."
        )
    return reward
