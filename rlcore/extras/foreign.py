"""Settings of other trainers translated to keys of rlcore, and written as an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.extras.foreign_files import Given, read
from rlcore.extras.foreign_keys import ACTOR, ENTRIES, SKY_LOSS, ForeignKey, Source
from rlcore.extras.foreign_meanings import DEFAULTS, HARMLESS, NEUTRAL, REASONS, SWITCHES

MUST_ACT = 3  # exit code: a setting that matters was not translated

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
    """Our keys with their values, the options of groups, and the rest: settings that do not change
    what is learned, and settings that the user must act on."""

    values: dict[str, Any]
    options: dict[str, Any]  # group -> option
    harmless: list[Left]
    left: list[Left]


class _Translator:
    def __init__(self, source: Source, given: Given) -> None:
        self.source = source
        self.given: Given = {**DEFAULTS[source], **given}
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

    def switched(self, by_source: dict[Source, str]) -> bool:
        """True if the source has such a switch, and it is on."""
        return self.on(by_source.get(self.source, ""))

    def number(self, key: str, default: float) -> float:
        value = self.given.get(key, default)
        return float(value) if isinstance(value, int | float) else default


def translate(source: Source, given: Given) -> Translation:
    """Our settings for those of another trainer."""
    t = _Translator(source, given)
    for entry in ENTRIES:
        if entry.of(source) in t.given and entry.of(source) and entry.ours not in TOGETHER:
            _plain(t, entry)
    for rule in RULES:
        rule(t)
    t.values["actor.bf16.num_gpus"] = 1
    known = {entry.of(source) for entry in ENTRIES}
    known |= {switch.partition("|")[0] for switch in SWITCHES[source]}
    harmless = []
    for key, value in t.given.items():
        if key in known or key.startswith(KWARGS):
            continue
        if f"{key}={_neutral(value)}" in NEUTRAL or (HARMLESS.search(key) and key not in REASONS):
            harmless.append(Left(key, value, "changes nothing that is learned"))
        else:
            t.leave(key, REASONS.get(key, "no counterpart"))
    return Translation(t.values, t.options, harmless, t.left)


def _neutral(value: Any) -> Any:
    """Write 1.0 as 1, also in lists."""
    if isinstance(value, list):
        return [_neutral(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
    else:
        t.values[entry.ours] = value


def _batches(t: _Translator) -> None:
    """Groups of a step, and steps of a rollout phase."""
    of_source: dict[Source, Any] = {
        "verl": _prompt_sizes,
        "skyrl": _prompt_sizes,
        "trl": _trl_sizes,
        "openrlhf": _openrlhf_sizes,
        "prime_rl": _prime_sizes,
    }
    sizes = of_source[t.source](t)
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
    if t.source == "prime_rl" or t.switched(ASYNC):
        t.options["schedule"] = "async"
        queue = {"skyrl": 4, "prime_rl": 8}.get(t.source, 1)
        t.values["schedule.max_staleness"] = int(t.number(t.name("schedule.max_staleness"), queue))
        in_flight = t.source != "openrlhf" or t.on("train.partial_rollout_enable")
        t.values["schedule.on_publish"] = "in_flight" if in_flight else "finish"
    elif steps > 1:
        t.options["schedule"] = "large_batch"
    if steps > 1:
        t.values["schedule.steps_per_publish"] = int(steps)


def _prompt_sizes(t: _Translator) -> tuple[float, float] | None:
    step, phase = t.name("schedule.groups_per_step"), t.name("schedule.steps_per_publish")
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
    if "train.batch_size" not in t.given:
        return None
    samples, n = t.number("train.batch_size", 128), t.number("rollout.n_samples_per_prompt", 1)
    return samples / n, t.number("rollout.batch_size", samples / n) * n / samples


def _prime_sizes(t: _Translator) -> tuple[float, float] | None:
    samples, n = t.number("orchestrator.batch_size", 0), t.number("orchestrator.group_size", 1)
    if not samples:
        t.leave("orchestrator.batch_size", "batches are of sequences: give orchestrator.batch_size")
        return None
    return samples / n, 1


def _lengths(t: _Translator) -> None:
    total = t.given.get("data.max_len")  # OpenRLHF's, of prompt and response
    if isinstance(total, int):
        t.values["model.max_len"] = total
        return
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
    key, estimator = t.name("algorithm.kl_coef"), t.name("algorithm.kl_estimator")
    if key not in t.given or not t.given[key]:
        return
    if t.source in KL_LOSS and not t.switched(KL_LOSS):
        if t.source == "openrlhf":  # of the others it is in neither
            t.values |= {"algorithm.kl_coef": t.given[key], "algorithm.kl_in": "reward"}
        return
    t.values["algorithm.kl_coef"] = t.given[key]
    if estimator in t.given:
        _plain(t, next(e for e in ENTRIES if e.ours == "algorithm.kl_estimator"))


def _advantage(t: _Translator) -> None:
    if t.values.get("algorithm.advantage") != "grpo":
        return
    scaled = t.given.get(
        f"{SKY_LOSS}.grpo_norm_by_std", t.given.get("algorithm.norm_adv_by_std_in_grpo", True)
    )
    plain = str(scaled).lower() == "false" or t.source == "prime_rl"
    if plain or t.on("algo.advantage.no_std_norm"):
        t.values["algorithm.advantage"] = "dr_grpo"


def _entropy(t: _Translator) -> None:
    if t.source == "skyrl" and not t.on(f"{SKY_LOSS}.use_entropy_loss"):
        t.values.pop("algorithm.entropy_coef", None)


def _loss(t: _Translator) -> None:
    """Translate prime-rl's own loss, which masks by a difference of probabilities."""
    if t.source != "prime_rl":
        return
    key = t.name("algorithm.loss")
    t.left = [left for left in t.left if left.key != key]
    if t.given[key] != "default":
        t.leave(key, "no counterpart: choose algorithm and correction")
        return
    t.options |= {"algorithm": "dppo"}
    t.leave(key, "masks of DPPO and a squared log-ratio: correction.dppo is the masks alone")


def _correction(t: _Translator) -> None:
    chosen: list[str] = []
    cap = t.theirs("correction.tis.cap")
    how = str(t.theirs("correction.tis.level", "token")).lower()
    if t.source == "trl":
        on = t.on("use_vllm") and t.given.get("vllm_importance_sampling_correction") is not False
        # the mode and the cap that TRL has where none is given
        how, cap = str(t.theirs("correction.tis.level", "sequence_mask")), cap or 3.0
    elif t.source == "openrlhf":
        on = t.on("algo.advantage.is_correction_enable")
        how = {"tis": "token", "seq-mask-tis": "sequence_mask"}.get(how, how)
    elif t.source == "prime_rl":
        on = False
        if t.given["trainer.loss.type"] == "default":
            chosen.append("dppo")
            for side in ("low", "high"):
                mask = t.number(f"trainer.loss.dppo_mask_{side}", 0.2)
                t.values[f"correction.dppo.{side}"] = mask
    else:
        on = t.name("correction.tis.level") in t.given
    if how == "sequence" and t.source == "skyrl":
        cap = t.given.get(f"{SKY_LOSS}.off_policy_correction.sequence_tis_ratio_clip_high", 5.0)
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
    if t.source in ("verl", "skyrl"):  # their data has these columns
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


def _reward(t: _Translator) -> None:
    """A user's function works unchanged: docs/rewards.md."""
    where, name = t.given.get("custom_reward_function.path"), "compute_score"
    if t.source == "verl" and where:
        name = str(t.given.get("custom_reward_function.name", name))
        arguments = {
            key.removeprefix(KWARGS): value
            for key, value in t.given.items()
            if key.startswith(KWARGS)
        }
        t.values["task.args.grader"] = f"{where}:{name}"
        if arguments:
            t.values["task.args.grader_args"] = arguments
    url = t.given.get("reward.remote_url")
    if isinstance(url, str) and url.endswith(".py"):
        t.values["task.args.grader"] = f"{url}:reward_func"
    elif url is not None:
        t.leave("reward.remote_url", "a reward behind HTTP is task.rewards.LABEL.http")
    functions = t.given.get("reward_funcs")
    if functions is not None and "$" not in str(functions):
        t.values["task.args.grader"] = (
            [_place(str(f)) for f in functions]
            if isinstance(functions, list)
            else _place(functions)
        )
        if "reward_weights" in t.given:
            t.values["task.args.grader_weights"] = t.given["reward_weights"]
    elif functions is not None:
        t.leave("reward_funcs", "give task.args.grader: these functions, in a file of their own")


def _place(name: str) -> str:
    """A function that TRL's command names, such as accuracy_reward or my_rewards.short."""
    module, _, function = name.rpartition(".")
    return name if ":" in name else f"{module or 'trl.rewards'}:{function}"


KWARGS = "custom_reward_function.reward_kwargs."
KL_LOSS: dict[Source, str] = {
    "verl": f"{ACTOR}.use_kl_loss",
    "openrlhf": "algo.kl.use_loss",
    "skyrl": f"{SKY_LOSS}.use_kl_loss",
}
ASYNC: dict[Source, str] = {
    "openrlhf": "train.async_enable",
    "skyrl": "trainer.fully_async.enabled",
}
RULES = (
    _batches,
    _lengths,
    _clips,
    _kl,
    _advantage,
    _entropy,
    _loss,
    _correction,
    _lora,
    _data,
    _reward,
)
NAMES: dict[Source, str] = {
    "verl": "verl",
    "trl": "TRL",
    "openrlhf": "OpenRLHF",
    "skyrl": "SkyRL",
    "prime_rl": "prime-rl",
}


def import_config(path: str, out: str) -> int:
    """Write `out`/experiment/<name of the file>.yaml and print, in three classes, the settings that
    are translated, those that are harmless to lose and those that the user must act on. Returns 3
    if there are any of the last class, else 0.

    Raises UserError for a file that is of none of the trainers, or an experiment that exists.
    """
    source, given = read(path)
    found = translate(source, given)
    name = Path(path).stem
    target = Path(out) / "experiment" / f"{name}.yaml"
    if target.exists():
        raise UserError(f"{target} exists: remove it, or give another folder, out=FOLDER.")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(experiment(found, f"From {path} ({NAMES[source]}), by rlcore import-config."))
    words = [f"config_dir={out}", f"experiment={name}", "run_dir=DIR"]
    left = [_line(each) for each in found.left]
    try:
        load(words[1:], out)
    except UserError as e:
        left.append(f"still missing: {e}")
    same = [f"{key}={_written(value)}" for key, value in found.values.items()]
    harmless = [each.key for each in found.harmless]
    print(f"{target}, from {NAMES[source]}'s settings")
    for title, lines in (("same", same), ("harmless", harmless), ("you must act", left)):
        print(f"{title} ({len(lines)}):")
        print("".join(f"  {line}\n" for line in lines), end="")
    print(f"next: rlcore train {' '.join(words)} dry_run=true")
    return MUST_ACT if left else 0


def experiment(found: Translation, title: str) -> str:
    """The experiment's file."""
    lines = ["# @package _global_", f"# {title}"]
    lines += [f"# you must act: {_line(left)}" for left in found.left]
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
