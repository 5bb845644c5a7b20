"""Settings of other trainers translated to keys of rlcore, and written as an experiment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.extras.foreign_async import schedule
from rlcore.extras.foreign_corrections import correction
from rlcore.extras.foreign_files import Given, read
from rlcore.extras.foreign_harmless import harmless
from rlcore.extras.foreign_keys import ACTOR, ENTRIES, SKY_LOSS, Source
from rlcore.extras.foreign_meanings import COVERED, NEUTRAL, REASONS, SWITCHES
from rlcore.extras.foreign_rewards import cut_out
from rlcore.extras.foreign_translator import Left, Translation, Translator, plain
from rlcore.files import CACHED, HUB_NAME
from rlcore.tasks.row_files import SUFFIXES

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
    "model.max_len",
    "model.chat_template_args",
    "critic.discount",
    "critic.lam",
    "algorithm.overlong_share",
    "algorithm.overlong_penalty",
)
UNKNOWN = (
    "not known here: look for it with `rlcore help WORD`, or leave it out if it changes nothing"
)


def translate(source: Source, given: Given) -> Translation:
    """Our settings for another trainer's."""
    t = Translator(source, given)
    for entry in ENTRIES:
        if entry.of(source) in t.given and entry.of(source) and entry.ours not in TOGETHER:
            plain(t, entry)
    for rule in RULES:
        rule(t)
    t.values["actor.bf16.num_gpus"] = 1
    known = {entry.of(source) for entry in ENTRIES}
    known |= {switch.partition("|")[0] for switch in SWITCHES[source]}
    known |= {
        key for key in t.given if key.startswith((*KWARGS, f"{t.name(TEMPLATE) or TEMPLATE}."))
    }
    lost, covered = [], []
    for key in (key for key in t.given if key not in known):
        value = t.given[key]
        if said := _covered(t, key, value):
            covered.append(Left(key, value, said))
        elif harmless(source, key) and key not in REASONS:
            lost.append(Left(key, value, "changes nothing that is learned"))
        else:
            computed = "only running the script would give them: give these settings"
            t.leave(key, computed if key.startswith("**") else REASONS.get(key, UNKNOWN))
    return Translation(t.values, t.options, lost, t.left, covered)


def _covered(t: Translator, key: str, value: Any) -> str | None:
    """Where a setting that is not a key of ours is, or None."""
    if f"{key}={_neutral(value)}" in NEUTRAL:
        return "so here, too"
    if key.startswith(("critic.", "trainer.critic.")) and t.options.get("critic") is None:
        return "unread there, as no critic is trained"
    if key == "config_path" or (key == "config_name" and _SHIPPED.fullmatch(str(value))):
        return "the trainer's defaults are taken"
    return COVERED.get(key)


_SHIPPED = re.compile(r"(\w+_)?ppo(_megatron)?(_\w+)?_trainer(\.ya?ml)?")


def _neutral(value: Any) -> Any:
    """Write 1.0 as 1, also in lists."""
    if isinstance(value, list):
        return [_neutral(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _batches(t: Translator) -> None:
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
        schedule(t, 1)
        return
    groups, steps = sizes
    if groups < 1 or groups % 1 or steps < 1 or steps % 1:
        t.leave(
            t.name("schedule.groups_per_step"),
            "its batch is not a whole number of groups or steps: set schedule.groups_per_step",
        )
        schedule(t, 1)
        return
    t.values["schedule.groups_per_step"] = int(groups)
    schedule(t, int(steps))


def _prompt_sizes(t: Translator) -> tuple[float, float] | None:
    step, phase = t.name("schedule.groups_per_step"), t.name("schedule.steps_per_publish")
    if step not in t.given and phase not in t.given:
        return None
    groups = t.number(step, t.number(phase, 0))
    # the fully asynchronous programs of verl have no phases: 0
    return groups, (t.number(phase, groups) or groups) / groups if groups else 0


def _trl_sizes(t: Translator) -> tuple[float, float] | None:
    accumulated = t.number("gradient_accumulation_steps", 1)
    samples = t.number("per_device_train_batch_size", 8) * accumulated
    t.leave("per_device_train_batch_size", "taken as of one process: multiply by yours")
    phase = t.number("steps_per_generation", accumulated) / accumulated
    return samples / t.number("num_generations", 8), phase


def _openrlhf_sizes(t: Translator) -> tuple[float, float] | None:
    if "train.batch_size" not in t.given:
        return None
    samples, n = t.number("train.batch_size", 128), t.number("rollout.n_samples_per_prompt", 1)
    return samples / n, t.number("rollout.batch_size", samples / n) * n / samples


def _prime_sizes(t: Translator) -> tuple[float, float] | None:
    samples, n = t.number("orchestrator.batch_size", 0), t.number("orchestrator.group_size", 1)
    if not samples:
        t.leave("orchestrator.batch_size", "batches are of sequences: give orchestrator.batch_size")
        return None
    return samples / n, 1


def _lengths(t: Translator) -> None:
    total = t.theirs("model.max_len")
    sizes = [t.theirs(key) for key in ("task.max_prompt_tokens", "rollout.max_new_tokens")]
    if isinstance(total, int) and total > 0:
        t.values["model.max_len"] = total
    elif all(isinstance(size, int) for size in sizes):
        t.values["model.max_len"] = total = sum(sizes)
    at_once = t.values.get("actor.bf16.max_batched_tokens")
    if isinstance(at_once, int) and isinstance(total, int) and at_once < total:
        del t.values["actor.bf16.max_batched_tokens"]  # a step of an engine holds one sequence here


def _clips(t: Translator) -> None:
    high = t.values.get("algorithm.eps_high")
    if isinstance(high, list) and len(high) == 2:  # OpenRLHF's --eps_clip_low_high
        t.values["algorithm.eps_low"], t.values["algorithm.eps_high"] = high
    both = t.given.get(f"{ACTOR}.clip_ratio", t.values.get("algorithm.eps_low"))
    if both is not None:
        t.values.setdefault("algorithm.eps_low", both)
        t.values.setdefault("algorithm.eps_high", both)
    if t.values.get("algorithm.loss") not in (None, "ppo"):
        t.values.pop("algorithm.dual_clip", None)  # of PPO alone, in all of them


def _kl(t: Translator) -> None:
    key, estimator = t.name("algorithm.kl_coef"), t.name("algorithm.kl_estimator")
    in_reward = t.given.get("algorithm.kl_ctrl.kl_coef", 0.001)
    if t.source == "verl" and t.on("algorithm.use_kl_in_reward") and in_reward:
        t.values |= {"algorithm.kl_coef": in_reward, "algorithm.kl_in": "reward"}
        return
    if key not in t.given or not t.given[key]:
        return
    if t.source in KL_LOSS and not t.switched(KL_LOSS):
        if t.source == "openrlhf":  # of the others it is in neither
            t.values |= {"algorithm.kl_coef": t.given[key], "algorithm.kl_in": "reward"}
        return
    t.values["algorithm.kl_coef"] = t.given[key]
    if estimator in t.given:
        plain(t, next(e for e in ENTRIES if e.ours == "algorithm.kl_estimator"))


def _advantage(t: Translator) -> None:
    if t.values.get("algorithm.advantage") != "grpo":
        return
    scaled = t.given.get(
        f"{SKY_LOSS}.grpo_norm_by_std", t.given.get("algorithm.norm_adv_by_std_in_grpo", True)
    )
    plain = str(scaled).lower() == "false" or t.source == "prime_rl"
    if plain or t.on("algo.advantage.no_std_norm"):
        t.values["algorithm.advantage"] = "dr_grpo"


def _critic(t: Translator) -> None:
    """GAE has a critic there: its own model."""
    if t.values.get("algorithm.advantage") != "gae":
        return
    del t.values["algorithm.advantage"]
    t.options |= {"algorithm": "ppo", "critic": "model"}
    if t.source == "trl":
        return
    rates: dict[Source, str] = {
        "verl": "critic.optim.lr",
        "openrlhf": "critic.adam.lr",
        "skyrl": "trainer.critic.optimizer_config.lr",
    }
    t.values["critic.traces"] = "gae"
    for ours in ("critic.discount", "critic.lam"):
        t.values[ours] = t.number(t.name(ours), 1.0)
    rate = t.given.get(rates.get(t.source, ""))
    if isinstance(rate, float):
        t.values["critic.lr"] = rate


def _overlong(t: Translator) -> None:
    """A soft penalty over the last tokens before the limit."""
    buffer = t.theirs("algorithm.overlong_share")
    limit = t.values.get("rollout.max_new_tokens")
    off = "reward.reward_kwargs.overlong_buffer_cfg.enable"
    if not isinstance(buffer, int | float) or not buffer or str(t.given.get(off)) == "False":
        return
    if not isinstance(limit, int) or not 0 < buffer < limit:
        t.leave(t.name("algorithm.overlong_share"), "give algorithm.overlong_share")
        return
    t.values["algorithm.overlong_share"] = round(buffer / limit, 6)
    t.values["algorithm.overlong_penalty"] = t.number(t.name("algorithm.overlong_penalty"), 1.0)


TEMPLATE = "model.chat_template_args"


def _template(t: Translator) -> None:
    """Arguments of the chat template."""
    name = t.name(TEMPLATE)
    whole = t.given.get(name)
    found = dict(whole) if isinstance(whole, dict) else {}
    found |= {k.removeprefix(f"{name}."): v for k, v in t.given.items() if k.startswith(f"{name}.")}
    if found and name:
        t.values[TEMPLATE] = found
    elif whole:
        t.leave(name, f"give {TEMPLATE}={{...}}")


def _entropy(t: Translator) -> None:
    if t.source == "skyrl" and not t.on(f"{SKY_LOSS}.use_entropy_loss"):
        t.values.pop("algorithm.entropy_coef", None)


def _loss(t: Translator) -> None:
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


def _lora(t: Translator) -> None:
    rank = t.theirs("learner.lora.rank", 0)
    if isinstance(rank, int) and rank > 0 and (t.source != "trl" or t.on("use_peft")):
        t.values["learner.lora.rank"] = rank
        t.values["learner.lora.alpha"] = t.theirs("learner.lora.alpha", 16)


def _data(t: Translator) -> None:
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
        _steps(t)


def _steps(t: Translator) -> None:
    """verl's asynchronous programs count groups; elsewhere the steps are the user's to say."""
    total, groups = (
        t.given.get("rollout.total_rollout_steps"),
        t.values.get("schedule.groups_per_step"),
    )
    if isinstance(total, int) and groups and total >= groups:
        t.values["schedule.steps"] = total // groups
    else:
        t.leave(t.name("schedule.steps") or "steps", "give schedule.steps, the optimizer steps")


def _reward(t: Translator) -> None:
    """A user's function works unchanged: docs/rewards.md."""
    where, name = t.given.get("reward.custom_reward_function.path"), "compute_score"
    if t.source == "verl" and where:
        name = str(t.given.get("reward.custom_reward_function.name", name))
        arguments = {
            key.removeprefix(kwargs): value
            for key, value in t.given.items()
            for kwargs in KWARGS
            if key.startswith(kwargs)
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
        t.leave("reward_funcs", "give task.args.grader: these functions, in their own file")


def _place(name: str) -> str:
    """A function that TRL's command names, such as accuracy_reward or my_rewards.short."""
    module, _, function = name.rpartition(".")
    return name if ":" in name else f"{module or 'trl.rewards'}:{function}"


KWARGS = tuple(f"{part}custom_reward_function.reward_kwargs." for part in ("", "reward."))
KL_LOSS: dict[Source, str] = {
    "verl": f"{ACTOR}.use_kl_loss",
    "openrlhf": "algo.kl.use_loss",
    "skyrl": f"{SKY_LOSS}.use_kl_loss",
}
RULES = (
    _batches,
    _lengths,
    _clips,
    _kl,
    _advantage,
    _critic,
    _overlong,
    _template,
    _entropy,
    _loss,
    correction,
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
    found = cut_out(found, path, Path(out) / f"{name}_rewards.py")
    target.write_text(experiment(found, f"From {path} ({NAMES[source]}), by rlcore import-config."))
    words = [f"config_dir={out}", f"experiment={name}", "run_dir=DIR"]
    left = [_line(each) for each in found.left]
    try:
        load(words[1:], out)
    except UserError as e:
        left.append(f"still missing: {e}")
    same = [f"{key}={_written(value)}" for key, value in found.values.items()]
    same += [_line(each) for each in found.covered]
    harmless = [each.key for each in found.harmless]
    print(f"{target}, from {NAMES[source]}'s settings")
    for title, lines in (("same", same), ("harmless", harmless), ("you must act", left)):
        print(f"{title} ({len(lines)}):")
        print("".join(f"  {line}\n" for line in lines), end="")
    for line in dict.fromkeys(_fetched(found.values)):
        print(f"first: {line}")
    print(f"next: rlcore train {' '.join(words)} dry_run=true")
    return MUST_ACT if left else 0


def _fetched(values: Mapping[str, Any]) -> Iterator[str]:
    """The commands that bring what settings name of the Hugging Face Hub."""
    for key, value in values.items():
        names = value if isinstance(value, list) else [value]
        for name in (str(name).removeprefix(CACHED) for name in names if key.endswith("path")):
            if not HUB_NAME.fullmatch(name) or Path(name).exists() or Path(name).suffix in SUFFIXES:
                continue
            folder = key.endswith(("train_path", "heldout_path"))
            yield f"rlcore fetch {name}{' kind=dataset' if folder else ''}"


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
