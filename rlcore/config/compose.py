"""From overrides to a checked `RunConfig`: Hydra composes the groups, the schema and `checks` judge
the result.

Group selections (`task=math`, `correction=[dvp,mis]`) go to Hydra; values (`learner.lr=1e-4`)
replace values of the composed configuration. A key that the schema knows needs no `+`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from rlcore.config.checks import check
from rlcore.config.groups import (
    LABELLED,
    Overrides,
    group_key,
    groups,
    groups_in,
    hydra_word,
    listing,
    parse,
    roots,
    settled,
)
from rlcore.config.paths import absolute
from rlcore.config.resolution import resolved
from rlcore.config.schema import BESIDE, RunConfig, task_form
from rlcore.config.sentences import closest, one_line, validate
from rlcore.errors import UserError
from rlcore.spec import refuse
from rlcore.tasks.specs import TaskSpec

# Keys in whose place a run directory has what the run found for `auto`.
STATED = ("learner.max_threads",)


GROUP = "task"


# `task` with several tasks: how `task=[a,b]` becomes sections by label.
#
# `task=a` fills `task` itself with the keys of one task. A list, even of one, fills `task.LABEL`,
# and so does an option whose file holds tasks by label.


def names_several(override: Override) -> bool:
    """Return whether a selection is a list of tasks."""
    chosen = override.key_or_group == GROUP and not override.package
    return chosen and isinstance(override.value(), list)


def selected_tasks(selections: Sequence[Override]) -> list[str]:
    """The options of `task=[a,b]`, unless a later word chooses a single one."""
    own = [o for o in selections if o.key_or_group == GROUP and not o.package]
    chosen = own[-1].value() if own else None
    return [str(option) for option in chosen] if isinstance(chosen, list) else []


def compose_tasks(before: Any, options: Mapping[str, Path]) -> DictConfig:
    """`task` of a run that selects several. `before`: the settings of `task` in the rest of the
    configuration, such as an experiment. The settings of a selected label apply; a single task's,
    or other labels', do not. `options`: the options' files."""
    tasks: dict[str, Any] = {}
    for option, file in options.items():
        cfg = OmegaConf.load(file)
        assert isinstance(cfg, DictConfig)
        several = task_form(cfg) == "several"
        own = dict(cfg.items_ex(resolve=False)) if several else {option.rpartition("/")[2]: cfg}
        for label, section in own.items():
            name = str(label)
            refuse(
                name in tasks,
                f"task=[{','.join(options)}] has two tasks of the label {name}: leave one out, "
                "and give it another label, '+task.LABEL={name: ..., args: {...}}'.",
            )
            tasks[name] = section
    if isinstance(before, DictConfig) and task_form(before) == "several":
        for label in tasks.keys() & before.keys():
            tasks[label] = OmegaConf.merge(tasks[label], before[label])
    return OmegaConf.create(tasks)


def name_environments(cfg: DictConfig, options: Mapping[str, Path]) -> None:
    """Replace `task.LABEL.environment=NAME` by the option of that name, or by a user's own class.
    `options`: the files of the group environment."""
    for label in task_labels(cfg).get(GROUP, ()):
        section = cfg[GROUP][label]
        name = section.get("environment") if isinstance(section, DictConfig) else None
        if not isinstance(name, str):
            continue
        if ":" in name:
            section["environment"] = {"name": name}
            continue
        if name not in options:
            choices = [*options, "path/to/file.py:Class"]
            key = f"task.{label}.environment"
            raise UserError.choice(key, name, choices, closest(name, options))
        section["environment"] = OmegaConf.load(options[name])


def keep_one(task: Any) -> None:
    """Drop an experiment's settings of labels, where the user chooses a single task."""
    if isinstance(task, DictConfig) and task_form(task) == "one":
        for key in [k for k in task if k not in TaskSpec.model_fields]:
            if isinstance(task.get(key), DictConfig):
                del task[key]


def task_labels(cfg: DictConfig) -> dict[str, list[str]]:
    """{"task": its labels} of a run with several tasks, else nothing."""
    task = cfg.get(GROUP)
    if not isinstance(task, DictConfig) or task_form(task) == "one":
        return {}
    return {GROUP: [str(label) for label in task]}


def require_label(override: Override, known: Sequence[str]) -> None:
    """Raise UserError for a key of a single task in a run with several."""
    _, *rest = override.key_or_group.split(".")
    refuse(
        bool(rest) and rest[0] in TaskSpec.model_fields and rest[0] not in known,
        f"{override.input_line} is a key of a run with one task, and this one has "
        f"task=[{','.join(known)}]: write task.LABEL.{'.'.join(rest)} with one of these labels.",
    )


def load(
    overrides: Sequence[str], config_dir: str | Path | None = None, *, run_dir: str | None = None
) -> RunConfig:
    """Compose and check a run.

    `config_dir` is a user's own folder of groups, searched in addition to the shipped ones;
    `run_dir` is the run directory where neither the words nor a config.yaml names one. With
    `resume=auto` and a `run_dir` that holds a config.yaml, the run's own configuration is the base
    and the words change it. Raises UserError, one sentence, for anything that does not fit.
    """
    words = parse(overrides, config_dir)
    saved = Path(str(words.value_of("run_dir") or "")) / "config.yaml"
    if words.value_of("resume") == "auto" and saved.is_file():
        cfg = _resumed(saved, words, config_dir)
    else:
        cfg = _composed(words, config_dir)
    if run_dir is not None and OmegaConf.is_missing(cfg, "run_dir"):
        cfg["run_dir"] = run_dir
    return _checked(cfg, words.selected())


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration with every key: the text of a run directory's config.yaml."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def recorded(run_dir: str | Path) -> dict[str, Any]:
    """Every key of a run's config.yaml, such as `learner.lr`, with its value there; not checked.

    Raises UserError for a folder without one.
    """
    return flat(_saved(Path(run_dir) / "config.yaml"))


def check_resume(config: RunConfig) -> None:
    """Raise UserError for a setting that a run cannot change when it continues from a checkpoint.
    `config`: of a run directory with a checkpoint, from `load`.
    """
    before = _begun_with(config)
    if before is not None:
        from rlcore.config import resuming

        resuming.check_resume(before, config)


def other_threads(config: RunConfig) -> str | None:
    """`config/resuming.py: other_threads`, against the run directory's own configuration."""
    before = _begun_with(config)
    if before is None:
        return None
    from rlcore.config import resuming

    return resuming.other_threads(before, config)


def _begun_with(config: RunConfig) -> RunConfig | None:
    saved = Path(config.run_dir) / "config.yaml"
    if not saved.is_file():  # a checkpoint may have been put into a folder of its own
        return None
    return _checked(OmegaConf.create(_escaped(_saved(saved))), {})


def _composed(words: Overrides, config_dir: str | Path | None) -> DictConfig:
    folders = roots(config_dir)
    cfg = COMPOSITIONS.get(tuple(folders), words.selections)
    _lay_over(cfg, words.values, config_dir)
    return cfg


class _Compositions:
    """Cache of Hydra's compositions, by folders, the state of their files, and selections.

    Composing takes a tenth of a second, and a sweep, a plan of many fleets or a test run asks for
    the same selections again and again.
    """

    def __init__(self, most: int = 512) -> None:
        self._most = most  # entries; the oldest goes first
        self._known: dict[tuple[Any, ...], DictConfig] = {}

    def get(self, folders: tuple[Path, ...], selections: tuple[Override, ...]) -> DictConfig:
        """The composition, a copy that the caller may change. Raises UserError."""
        found = listing(folders)
        key = (found, tuple(o.input_line for o in selections))
        known = self._known.get(key)
        if known is None:
            known = _compose(list(folders), selections)
            if settled(found):
                while len(self._known) >= self._most:
                    del self._known[next(iter(self._known))]
                self._known[key] = known
        return copy.deepcopy(known)


COMPOSITIONS = _Compositions()


def _compose(folders: list[Path], selections: Sequence[Override]) -> DictConfig:
    tasks = selected_tasks(selections)
    plain = [o for o in selections if not names_several(o)]
    selected = [hydra_word(o) for o in plain]
    further = ",".join(f"file://{folder}" for folder in folders[1:])
    overrides = [*selected, *([f"hydra.searchpath=[{further}]"] if further else [])]
    try:
        with initialize_config_dir(str(folders[0]), version_base="1.3"):
            cfg = hydra_compose("config", overrides=overrides)
            # The composed mapping does not tell which options filled it, nor in which order.
            loader = GlobalHydra.instance().config_loader()
            parts = loader.compute_defaults_list(
                "config", overrides=overrides, run_mode=RunMode.RUN
            ).defaults
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as e:
        raise UserError(
            f"{' '.join(selected) or 'The configuration'} does not compose: {one_line(e)}."
        ) from e
    # The schema alone decides which keys exist, so that its sentences are the ones a user sees.
    OmegaConf.set_struct(cfg, False)
    files = groups_in(folders)
    for group in LABELLED:
        options = [
            part.config_path.partition("/")[2]
            for part in parts
            if part.package == group and part.config_path
        ]
        _keep_selected(cfg, group, [files[group][option] for option in options])
    if not tasks and any(group_key(o) == GROUP for o in selections):
        keep_one(cfg.get("task"))
    if tasks:
        cfg["task"] = compose_tasks(cfg.get("task"), {t: files["task"][t] for t in tasks})
    return cfg


def _keep_selected(cfg: DictConfig, group: str, files: Iterable[Path]) -> None:
    """Drop the labels whose option is not selected, and put the rest in the order of selection.

    An experiment may set `actor.bf16.count` and its user say `actor=fp8`: that must not add a
    second actor.
    """
    labels = [label for file in files for label in _read(file)]
    if group == "correction":
        labels += [key for key in BESIDE if key in (cfg.get(group) or {})]
    cfg[group] = {label: cfg[group][label] for label in dict.fromkeys(labels)}


def _resumed(saved: Path, words: Overrides, config_dir: str | Path | None) -> DictConfig:
    """The saved configuration with groups and values replaced by the arguments.

    A scheduler that requeues a job repeats its command, so `experiment=` may be among the words
    again: a difference from that experiment alone is more likely a mistake than intended.
    """
    cfg = OmegaConf.create(_escaped(_saved(saved)))
    if not words.selections:
        _lay_over(cfg, words.values, config_dir)
        return cfg
    fresh = _composed(words, config_dir)
    # A group that is named again replaces the saved one whole, as it does in a new run.
    for group in {o.key_or_group for o in words.selections} - {"experiment"}:
        cfg[group] = fresh[group]
    _lay_over(cfg, words.values, config_dir)
    experiment = words.selected().get("experiment")
    if experiment:
        _require_same(cfg, fresh, f"experiment={experiment}", saved)
    return cfg


def _require_same(cfg: DictConfig, fresh: DictConfig, word: str, saved: Path) -> None:
    before, now = (flat(_checked(c, {}).model_dump(mode="json")) for c in (cfg, fresh))
    stated = {key for key in STATED if now.get(key) == "auto"}
    keys = [key for key in before | now if key not in stated]
    changed = [key for key in keys if before.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        raise UserError(
            f"{word} gives {key}={now.get(key)} where {saved} has {before.get(key)}: omit {word} "
            f"to resume, or repeat every word that the run was started with{_more(changed)}."
        )


def _lay_over(cfg: DictConfig, values: Iterable[Override], config_dir: str | Path | None) -> None:
    environments = groups(config_dir)["environment"]
    name_environments(cfg, environments)
    # Labels of the selection only: a label that a word adds must not make the next word's typing
    # error valid.
    labels = {group: list(cfg.get(group) or {}) for group in LABELLED}
    labels |= task_labels(cfg)
    for override in values:
        word = override.input_line
        _require_label(override, labels)
        try:
            if override.is_delete():
                _delete(cfg, override)
            else:
                key, value = override.key_or_group, override.value()
                named = _named_corrections(key, value)  # which take the place of others
                value = value if named is None else named
                OmegaConf.update(cfg, key, value, merge=named is None, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError, AssertionError) as e:
            open_ = isinstance(e, GrammarParseError) and "${" in str(word)
            remedy = r": close it by }, or write \${ for a text with ${" if open_ else ""
            raise UserError(f"{word} does not fit: {one_line(e)}{remedy}.") from e
        # now, since the next word may set one of its keys
        name_environments(cfg, environments)


def _named_corrections(key: str, value: Any) -> dict[str, Any] | None:
    """The labels of `actor.LABEL.correction=[tis,veto]` without settings, so that further words
    may set some; None for another key or value."""
    group, *rest = key.split(".")
    names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if not names or (group, *rest[1:]) != ("actor", "correction"):
        return None
    return {name: {} for name in value}


def _require_label(override: Override, labels: dict[str, list[str]]) -> None:
    """A key below a label that the run does not select is more likely a mistake than a new one."""
    group, *rest = override.key_or_group.split(".")
    if group == "task" and group in labels:
        require_label(override, labels[group])
    if group not in labels or len(rest) < 2 or override.is_add():
        return
    refuse(
        rest[0] not in labels[group],
        f"{override.input_line} sets a key of {rest[0]}, which this run does not select: it has "
        f"{group}=[{','.join(labels[group])}]; add {rest[0]} to that list.",
    )


def _delete(cfg: DictConfig, override: Override) -> None:
    *parents, leaf = override.key_or_group.split(".")
    parent = OmegaConf.select(cfg, ".".join(parents)) if parents else cfg
    if not isinstance(parent, DictConfig) or leaf not in parent:
        raise UserError(f"{override.input_line} removes a key that the run does not have.")
    del parent[leaf]


def _checked(cfg: DictConfig, selected: dict[str, Any]) -> RunConfig:
    try:
        # "???" in an option's file: resolving it would raise without naming the option.
        written = flat(OmegaConf.to_container(cfg, resolve=False))
        missing = sorted(key for key, value in written.items() if value == "???")
        if missing:
            asked = " ".join(f"{group}={option}" for group, option in selected.items())
            where = f" ({asked})" if asked else ""
            raise UserError(
                f"{missing[0]} has no default{where}: give {missing[0]}=VALUE{_more(missing)}."
            )
        data = resolved(cfg)
    except OmegaConfBaseException as e:
        raise UserError(f"A value of the configuration cannot be resolved: {one_line(e)}.") from e
    checked: RunConfig = absolute(check(validate(data)))
    return checked


def _more(keys: Sequence[str]) -> str:
    return f" (also: {', '.join(keys[1:6])})" if len(keys) > 1 else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UserError(f"{path} cannot be read as a run's configuration: {one_line(e)}.") from e
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a run's configuration: it holds no keys.")
    return data


def _saved(path: Path) -> dict[str, Any]:
    """A run's configuration. Version 0.2 had `cluster.cpu_fast_paths` by actor."""
    data = _read(path)
    actors = [a for a in (data.get("actor") or {}).values() if isinstance(a, dict)]
    former = [a.pop("cpu_fast_path") for a in actors if "cpu_fast_path" in a]
    if former:
        data.setdefault("cluster", {}).setdefault("cpu_fast_paths", all(former))
    return data


def _escaped(node: Any) -> Any:
    """Escape "${" in a resolved configuration, where it is plain text."""
    if isinstance(node, dict):
        return {k: _escaped(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_escaped(v) for v in node]
    return node.replace("${", "\\${") if isinstance(node, str) else node


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    dot = f"{prefix}." if prefix else ""
    return {
        key: value
        for name, child in node.items()
        for key, value in flat(child, f"{dot}{name}").items()
    }
