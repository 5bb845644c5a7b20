"""Settings of other trainers: reads them from a YAML file or from the script that starts the
trainer, translates them to keys of rlcore, and writes them as an experiment."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlcore.config.compose import load
from rlcore.config.sentences import one_line
from rlcore.errors import UserError
from rlcore.extras.foreign_keys import (
    ACTOR,
    ENTRIES,
    REASONS,
    SOURCES,
    SWITCHES,
    ForeignKey,
    Source,
)

Given = dict[str, Any]


def read(path: str) -> tuple[Source, Given]:
    """Whose settings a file holds, and the settings by dotted key; those that are null, left out.

    Raises UserError for a file that cannot be read, or that is of none of the three.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = yaml.safe_load(text) if Path(path).suffix in (".yaml", ".yml", ".json") else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UserError(f"{path} cannot be read: {one_line(e)}.") from e
    given = dict(_flat(data)) if isinstance(data, dict) else _of_script(text, path)
    given = {key: value for key, value in given.items() if value is not None}
    return _source(given, text, path), given


def _flat(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}", value


def _of_script(text: str, path: str) -> Given:
    """Words `a.b=value` (verl) and `--key value ...` (TRL, OpenRLHF) of a shell script."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as e:
        raise UserError(f"{path} cannot be read as a shell script: {e}.") from e
    given: Given = {}
    key = ""
    for word in words:
        dotted = re.fullmatch(r"\+{0,2}([\w]+(?:\.\w+)+)=(.*)", word, re.DOTALL)
        if dotted:
            given[dotted[1]], key = _value(dotted[2]), ""
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            given[key] = _value(value) if equals else True
        elif key:
            given[key] = _joined(given[key], _value(word))
    return given


def _joined(before: Any, value: Any) -> Any:
    """Several words after one option are a list."""
    if before is True:
        return value
    return [*before, value] if isinstance(before, list) else [before, value]


def _value(text: str) -> Any:
    text = os.path.expandvars(text)
    try:
        # YAML reads 1e-6 as a text
        return (
            float(text)
            if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text)
            else _plain_value(text)
        )
    except yaml.YAMLError:
        return text


def _plain_value(text: str) -> Any:
    value = yaml.safe_load(text)
    return value if isinstance(value, bool | int | float | str | list | None) else text


def _source(given: Given, text: str, path: str) -> Source:
    known = {
        source: {entry.of(source) for entry in ENTRIES} | set(SWITCHES[source])
        for source in SOURCES
    }
    if "openrlhf" in text.lower():
        return "openrlhf"
    found = max(SOURCES, key=lambda source: len(known[source] & set(given)))
    if len(known[found] & set(given)) < 2:
        raise UserError(
            f"{path} is not accepted: it holds no settings of verl, TRL's GRPO or OpenRLHF; give "
            "a YAML file, or the script that starts the training."
        )
    return found


# Truncation that the learner does not apply as well is refused: only "off" has a counterpart.
OFF = {"rollout.top_p": 1, "rollout.min_p": 0, "rollout.top_k": 0}
# Decided together with other keys, below.
TOGETHER = (
    "schedule.groups_per_step",
    "schedule.steps_per_publish",
    "schedule.max_staleness",
    "algorithm.kl_coef",
    "algorithm.kl_estimator",
    "correction.tis.cap",
    "correction.tis.level",
    "correction.opsm.delta",
    "learner.lora.rank",
    "learner.lora.alpha",
)


class Left(NamedTuple):
    """A setting that was not translated. Example: Left("remote_rm_url", "http://a", "see ...")"""

    key: str
    value: Any
    reason: str


class Translation(NamedTuple):
    """Our keys with their values, the options of groups, and what is left."""

    values: dict[str, Any]
    options: dict[str, Any]  # group -> option
    left: list[Left]


class _Translator:
    def __init__(self, source: Source, given: Given) -> None:
        self.source = source
        self.given = given
        self.values: dict[str, Any] = {}
        self.options: dict[str, Any] = {
            "model": "path",
            "task": "file",
            "actor": ["bf16"],
            "correction": ["none"],
            "schedule": "on_policy",
            "learner": "gpu",
        }
        self.left: list[Left] = []

    def leave(self, key: str, reason: str) -> None:
        """List a setting as not translated; one that the file lacks, if the reason asks for it."""
        self.left.append(Left(key, self.given.get(key), reason))

    def name(self, ours: str) -> str:
        """Return the other trainer's name of one of our keys."""
        return next(entry.of(self.source) for entry in ENTRIES if entry.ours == ours)

    def theirs(self, ours: str, default: Any = None) -> Any:
        """The value that the file gives for one of our keys."""
        return self.given.get(self.name(ours), default)

    def on(self, key: str) -> bool:
        return str(self.given.get(key, False)).lower() == "true"

    def number(self, key: str, default: float) -> float:
        value = self.given.get(key, default)
        return float(value) if isinstance(value, int | float) else default


def translate(source: Source, given: Given) -> Translation:
    """Our settings for those of another trainer."""
    t = _Translator(source, given)
    for entry in ENTRIES:
        if entry.of(source) in given and entry.of(source) and entry.ours not in TOGETHER:
            _plain(t, entry)
    for rule in (_batches, _lengths, _clips, _kl, _advantage, _correction, _lora, _data):
        rule(t)
    t.values["actor.bf16.num_gpus"] = 1
    known = {entry.of(source) for entry in ENTRIES} | set(SWITCHES[source])
    for key in given:
        if key not in known:
            t.leave(key, REASONS.get(key, "no counterpart"))
    return Translation(t.values, t.options, t.left)


def _plain(t: _Translator, entry: ForeignKey) -> None:
    key = entry.of(t.source)
    value = t.given[key]
    if isinstance(value, str) and "$" in value:
        t.leave(key, f"holds a variable: give {entry.ours}")
    elif entry.values:
        ours = entry.values.get(str(value).lower())
        if ours is None:
            t.leave(key, f"no counterpart among the values of {entry.ours}")
        else:
            t.values[entry.ours] = ours
    elif entry.least is not None and isinstance(value, int | float) and value < entry.least:
        return  # off, or its default, there
    elif entry.ours in OFF and value != OFF[entry.ours]:
        t.leave(key, f"{entry.ours} is refused: the learner would not truncate as well")
    else:
        t.values[entry.ours] = value


def _batches(t: _Translator) -> None:
    """Groups of a step, and steps of a rollout phase."""
    sizes = {"verl": _verl_sizes, "trl": _trl_sizes, "openrlhf": _openrlhf_sizes}[t.source](t)
    if sizes is None:
        return
    groups, steps = sizes
    if groups < 1 or groups % 1 or steps < 1 or steps % 1:
        t.leave(
            t.name("schedule.groups_per_step"),
            "its batch is no whole number of groups or steps: set schedule.groups_per_step",
        )
        return
    t.values["schedule.groups_per_step"] = int(groups)
    if t.on("async_train"):
        t.options["schedule"] = "async"
        t.values["schedule.max_staleness"] = int(t.number("async_queue_size", 1))
        in_flight = t.on("partial_rollout")
        t.values["schedule.on_publish"] = "in_flight" if in_flight else "finish"
    elif steps > 1:
        t.options["schedule"] = "large_batch"
    if steps > 1:
        t.values["schedule.steps_per_publish"] = int(steps)


def _verl_sizes(t: _Translator) -> tuple[float, float] | None:
    step, phase = f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"
    if step not in t.given and phase not in t.given:
        return None
    groups = t.number(step, t.number(phase, 0))
    return groups, t.number(phase, groups) / groups


def _trl_sizes(t: _Translator) -> tuple[float, float] | None:
    if "per_device_train_batch_size" not in t.given:
        return None
    accumulated = t.number("gradient_accumulation_steps", 1)
    samples = t.number("per_device_train_batch_size", 8) * accumulated
    t.leave("per_device_train_batch_size", "taken as of one process: multiply by yours")
    phase = t.number("steps_per_generation", accumulated) / accumulated
    return samples / t.number("num_generations", 8), phase


def _openrlhf_sizes(t: _Translator) -> tuple[float, float] | None:
    if "train_batch_size" not in t.given:
        return None
    samples, n = t.number("train_batch_size", 128), t.number("n_samples_per_prompt", 1)
    return samples / n, t.number("rollout_batch_size", samples / n) * n / samples


def _lengths(t: _Translator) -> None:
    sizes = [t.theirs(key) for key in ("task.max_prompt_tokens", "rollout.max_new_tokens")]
    if all(isinstance(size, int) for size in sizes):
        t.values["model.max_len"] = sum(sizes)


def _clips(t: _Translator) -> None:
    high = t.values.get("algorithm.eps_high")
    if isinstance(high, list) and len(high) == 2:  # OpenRLHF's --eps_clip_low_high
        t.values["algorithm.eps_low"], t.values["algorithm.eps_high"] = high
    both = t.given.get(f"{ACTOR}.clip_ratio", t.values.get("algorithm.eps_low"))
    if both is not None:
        t.values.setdefault("algorithm.eps_low", both)
        t.values.setdefault("algorithm.eps_high", both)
    if t.values.get("algorithm.loss") not in (None, "ppo"):
        t.values.pop("algorithm.dual_clip", None)  # of PPO alone, in all of them


def _kl(t: _Translator) -> None:
    switch = {"verl": f"{ACTOR}.use_kl_loss", "trl": "", "openrlhf": "use_kl_loss"}[t.source]
    key, estimator = t.name("algorithm.kl_coef"), t.name("algorithm.kl_estimator")
    if key not in t.given:
        return
    if switch and not t.on(switch):
        t.leave(key, "not in the loss: a KL in the reward has no counterpart")
        return
    t.values["algorithm.kl_coef"] = t.given[key]
    if estimator in t.given:
        _plain(t, next(e for e in ENTRIES if e.ours == "algorithm.kl_estimator"))


def _advantage(t: _Translator) -> None:
    plain = str(t.given.get("algorithm.norm_adv_by_std_in_grpo", True)).lower() == "false"
    if t.values.get("algorithm.advantage") == "grpo" and (plain or t.on("no_advantage_std_norm")):
        t.values["algorithm.advantage"] = "dr_grpo"


def _correction(t: _Translator) -> None:
    chosen: list[str] = []
    cap = t.theirs("correction.tis.cap")
    how = str(t.theirs("correction.tis.level", "token")).lower()
    if t.source == "verl":
        on = t.name("correction.tis.level") in t.given
    elif t.source == "trl":
        on = t.on("vllm_importance_sampling_correction")
        # the mode and the cap that TRL has where none is given
        how, cap = str(t.theirs("correction.tis.level", "sequence_mask")), cap or 3.0
    else:
        on = t.on("enable_vllm_is_correction")
    level, _, kind = how.partition("_")
    if on and level not in ("token", "sequence"):
        t.leave(t.name("correction.tis.level"), "no counterpart: choose a correction")
    elif on:
        name = "mis" if kind == "mask" else "tis"
        chosen.append(name)
        t.values[f"correction.{name}.level"] = level
        if name == "mis":
            t.values["correction.mis.low"] = 0.0
        if cap is not None:
            t.values[f"correction.{name}.{'high' if name == 'mis' else 'cap'}"] = cap
    if t.name("correction.opsm.delta") and t.theirs("correction.opsm.delta") is not None:
        chosen.append("opsm")
        t.values["correction.opsm.delta"] = t.theirs("correction.opsm.delta")
    t.options["correction"] = chosen or ["none"]


def _lora(t: _Translator) -> None:
    rank = t.theirs("learner.lora.rank", 0)
    if isinstance(rank, int) and rank > 0 and (t.source != "trl" or t.on("use_peft")):
        t.values["learner.lora.rank"] = rank
        t.values["learner.lora.alpha"] = t.theirs("learner.lora.alpha", 16)


def _data(t: _Translator) -> None:
    for key in ("task.args.train_path", "task.args.heldout_path"):
        files = t.values.get(key)
        if isinstance(files, list) and len(files) == 1:
            t.values[key] = files[0]
        elif isinstance(files, list):
            t.leave(t.name(key), "one file is read: join them, or mix tasks")
            del t.values[key]
    if t.source == "verl":  # its data has these columns
        t.values.setdefault("task.args.question_field", "prompt")
        t.values.setdefault("task.args.answer_field", "reward_model.ground_truth")
    if "task.args.heldout_path" not in t.values:
        t.values |= {"evaluation.every": 0, "evaluation.at_start": False}
        t.leave(
            t.name("task.args.heldout_path") or "eval_dataset",
            "no held-out file is named, so nothing is evaluated: give task.args.heldout_path",
        )
    if "schedule.steps" not in t.values:
        t.leave(t.name("schedule.steps") or "steps", "give schedule.steps, the optimizer steps")


NAMES = {"verl": "verl", "trl": "TRL", "openrlhf": "OpenRLHF"}


def import_config(path: str, out: str) -> int:
    """Write `out`/experiment/<name of the file>.yaml and print what was not translated.

    Raises UserError for a file that is of none of them, or an experiment that exists.
    """
    source, given = read(path)
    found = translate(source, given)
    name = Path(path).stem
    target = Path(out) / "experiment" / f"{name}.yaml"
    if target.exists():
        raise UserError(f"{target} exists: remove it, or give another folder, out=FOLDER.")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(experiment(found, f"From {path} ({NAMES[source]}), by rlcore import-config."))
    print(f"{target}: {len(found.values)} settings, from {NAMES[source]}'s")
    if found.left:
        print(f"not translated ({len(found.left)}):")
        print("\n".join(f"  {_line(left)}" for left in found.left))
    words = [f"config_dir={out}", f"experiment={name}", "run_dir=DIR"]
    try:
        load(words[1:], out)
    except UserError as e:
        print(f"still missing: {e}")
    print(f"next: rlcore train {' '.join(words)} dry_run=true")
    return 0


def experiment(found: Translation, title: str) -> str:
    """The experiment's file."""
    lines = ["# @package _global_", f"# {title}"]
    lines += [f"# not translated: {_line(left)}" for left in found.left]
    lines += ["defaults:"]
    lines += [f"  - override /{group}: {_written(o)}" for group, o in found.options.items()]
    lines += ["  - _self_", ""]
    return "\n".join(lines) + yaml.safe_dump(_nested(found.values), sort_keys=False)


def _line(left: Left) -> str:
    given = left.key if left.value is None else f"{left.key}={_written(left.value)}"
    return " ".join(f"{given}: {left.reason}".split())


def _written(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in values.items():
        *parents, leaf = key.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return root
