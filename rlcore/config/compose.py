"""From overrides to a checked `RunConfig`: Hydra composes the groups, the schema and `checks` judge the result.

Group selections (`task=math`, `correction=[dvp,mis]`) go to Hydra; values (`learner.lr=1e-4`) are laid over what it
composed. No `+` is needed for a key that the schema knows: the schema alone says which keys exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlcore.config.checks import check
from rlcore.config.paths import absolute
from rlcore.config.schema import RunConfig
from rlcore.config.sentences import closest, one_line, validate
from rlcore.errors import UserError

SHIPPED = Path(__file__).resolve().parents[2] / "configs"
LABELLED = ("actor", "correction")  # groups whose files each fill a key of their own, so that several can be chosen


@dataclass(frozen=True)
class Overrides:
    """A command line's `key=value` words, told apart."""

    selections: tuple[Override, ...]  # options of groups
    values: tuple[Override, ...]  # single keys

    def selected(self) -> dict[str, Any]:
        """group (or group@package) -> chosen option or options."""
        return {_group_key(o): o.value() for o in self.selections}

    def value_of(self, key: str) -> Any:
        """What the words set `key` to (the last one counts), or None."""
        found = [o.value() for o in self.values if o.key_or_group == key]
        return found[-1] if found else None


def load(overrides: Sequence[str], config_dir: str | Path | None = None) -> RunConfig:
    """Compose and check a run.

    `config_dir` is a user's own folder of groups, searched beside the shipped ones. With `resume=auto` and a
    `run_dir` that holds a config.yaml, the run's own configuration is the base and the words change it. Raises
    UserError, one sentence, for anything that does not fit.
    """
    words = parse(overrides, config_dir)
    saved = Path(str(words.value_of("run_dir") or "")) / "config.yaml"
    if words.value_of("resume") == "auto" and saved.is_file():
        cfg = _resumed(saved, words, config_dir)
    else:
        cfg = _composed(words, config_dir)
    return _checked(cfg, words.selected())


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration, every key written out, as config.yaml of a run directory holds it."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def from_yaml(path: str | Path) -> RunConfig:
    """The configuration of a run directory's config.yaml, checked again. Raises UserError."""
    return check(validate(_read(Path(path))))


def parse(words: Sequence[str], config_dir: str | Path | None = None) -> Overrides:
    """Tell group selections from values, and refuse what is neither or what is not offered. Raises UserError."""
    available = groups(config_dir)
    selections, values = [], []
    for word in words:
        override = _parse_word(word)
        if override.key_or_group in available:
            _require_options(override, available[override.key_or_group])
            selections.append(override)
        else:
            values.append(override)
    return Overrides(tuple(selections), tuple(values))


def groups(config_dir: str | Path | None = None) -> dict[str, dict[str, Path]]:
    """group -> option -> file, of the shipped folder and the user's own (which may add groups' options)."""
    found: dict[str, dict[str, Path]] = {}
    for root in _roots(config_dir):
        for file in sorted(root.glob("*/*.yaml")):
            found.setdefault(file.parent.name, {}).setdefault(file.stem, file)
    return found


def _roots(config_dir: str | Path | None) -> list[Path]:
    if not (SHIPPED / "config.yaml").is_file():
        raise UserError(f"The shipped {SHIPPED}/config.yaml is missing: install rlcore from its checkout.")
    if config_dir is None:
        return [SHIPPED]
    own = Path(config_dir).resolve()
    if not own.is_dir():
        raise UserError(f"config_dir={config_dir} is not a folder: give one that holds groups such as experiment/.")
    return [own, SHIPPED] if (own / "config.yaml").is_file() else [SHIPPED, own]


def _parse_word(word: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as e:
        raise UserError(f"The word {word!r} cannot be read ({one_line(e)}): write key=value or group=option.") from e
    if override.is_sweep_override():
        hint = f"{override.key_or_group}=[{word.partition('=')[2]}]"
        raise UserError(f"The word {word!r} asks for several runs; start one at a time, or mean a list: {hint}.")
    if override.key_or_group.split(".")[0] == "hydra":
        raise UserError(f"The word {word!r} sets Hydra itself: only keys of a run are accepted (see --help).")
    return override


def _require_options(override: Override, options: dict[str, Path]) -> None:
    group = _group_key(override)
    if override.is_delete():
        raise UserError(f"~{group} cannot be left out of a run: choose one of {', '.join(options)}.")
    chosen, shown = override.value(), override.get_value_string()
    if isinstance(chosen, list) and override.key_or_group not in LABELLED:
        raise UserError(f"{group}={shown} names several: only {' and '.join(LABELLED)} take a list.")
    for option in chosen if isinstance(chosen, list) else [chosen]:
        if option is None and override.key_or_group == "experiment":
            continue
        if not isinstance(option, str) or option not in options:
            raise UserError.choice(group, shown, options, closest(str(option), options))


def _group_key(override: Override) -> str:
    return override.key_or_group + (f"@{override.package}" if override.package else "")


def _hydra_word(override: Override) -> str:
    chosen = override.value()
    if override.key_or_group in LABELLED and not isinstance(chosen, list) and not override.package:
        chosen = [chosen]  # one of a group that holds a list
    shown = f"[{','.join(chosen)}]" if isinstance(chosen, list) else "null" if chosen is None else chosen
    return f"{'+' if override.package else ''}{_group_key(override)}={shown}"


def _composed(words: Overrides, config_dir: str | Path | None) -> DictConfig:
    roots = _roots(config_dir)
    selected = [_hydra_word(o) for o in words.selections]
    extra = [f"hydra.searchpath=[{','.join(f'file://{root}' for root in roots[1:])}]"] if roots[1:] else []
    try:
        with initialize_config_dir(str(roots[0]), version_base="1.3"):
            cfg = hydra_compose("config", overrides=[*selected, *extra])
            loader = GlobalHydra.instance().config_loader()
            parts = loader.compute_defaults_list("config", overrides=[*selected, *extra], run_mode=RunMode.RUN).defaults
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as e:
        raise UserError(f"{' '.join(selected) or 'The configuration'} does not compose: {one_line(e)}.") from e
    OmegaConf.set_struct(cfg, False)
    files = groups(config_dir)
    for group in LABELLED:
        options = [part.config_path.partition("/")[2] for part in parts if part.package == group and part.config_path]
        _keep_selected(cfg, group, [files[group][option] for option in options])
    _lay_over(cfg, words.values)
    return cfg


def _keep_selected(cfg: DictConfig, group: str, files: Iterable[Path]) -> None:
    """Drop the labels whose option is not selected, and put the rest in the order of selection.

    An experiment may set `actor.bf16.count` and its user say `actor=fp8`: that must not add a second actor.
    """
    labels = [label for file in files for label in _read(file)]
    cfg[group] = {label: cfg[group][label] for label in dict.fromkeys(labels)}


def _resumed(saved: Path, words: Overrides, config_dir: str | Path | None) -> DictConfig:
    """The saved configuration with the words' groups and values laid over it.

    A scheduler that requeues a job repeats its command, so `experiment=` may stand there again: it must then mean what
    the run was started with, since a change that it alone would make is more likely a mistake than a wish.
    """
    cfg = OmegaConf.create(_escaped(_read(saved)))
    if not words.selections:
        _lay_over(cfg, words.values)
        return cfg
    fresh = _composed(words, config_dir)
    for group in {o.key_or_group for o in words.selections} - {"experiment"}:
        cfg[group] = fresh[group]
    _lay_over(cfg, words.values)
    experiment = words.selected().get("experiment")
    if experiment:
        _require_same(cfg, fresh, f"experiment={experiment}", saved)
    return cfg


def _require_same(cfg: DictConfig, fresh: DictConfig, word: str, saved: Path) -> None:
    before, now = (_flat(_checked(c, {}).model_dump(mode="json")) for c in (cfg, fresh))
    changed = [key for key in before | now if before.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        raise UserError(
            f"{word} gives {key}={now.get(key)} where {saved} has {before.get(key)}: leave {word} out to resume, or "
            f"repeat every word that the run was started with{_more(changed)}."
        )


def _more(keys: Sequence[str]) -> str:
    return f" (also: {', '.join(keys[1:6])})" if len(keys) > 1 else ""


def _lay_over(cfg: DictConfig, values: Iterable[Override]) -> None:
    labels = {group: list(cfg.get(group) or {}) for group in LABELLED}
    for override in values:
        key, word = override.key_or_group, override.input_line
        path = key.split(".")
        if path[0] in LABELLED and len(path) > 2 and path[1] not in labels[path[0]] and not override.is_add():
            group = path[0]
            raise UserError(
                f"{word} sets a key of {path[1]}, which this run does not select: it has {group}="
                f"[{','.join(labels[group])}]; add {path[1]} to that list."
            )
        try:
            if override.is_delete():
                parent = OmegaConf.select(cfg, ".".join(path[:-1])) if path[:-1] else cfg
                if not isinstance(parent, DictConfig) or path[-1] not in parent:
                    raise UserError(f"{word} removes a key that the run does not have.")
                del parent[path[-1]]
            else:
                OmegaConf.update(cfg, key, override.value(), merge=True, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError, AssertionError) as e:
            raise UserError(f"{word} does not fit: {one_line(e)}.") from e


def _checked(cfg: DictConfig, selected: dict[str, Any]) -> RunConfig:
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        if missing:
            asked = " ".join(f"{group}={option}" for group, option in selected.items())
            where = f" ({asked})" if asked else ""
            raise UserError(f"{missing[0]} has no default{where}: give {missing[0]}=VALUE{_more(missing)}.")
        data = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as e:
        raise UserError(f"A value of the configuration cannot be resolved: {one_line(e)}.") from e
    return absolute(check(validate(data)))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UserError(f"{path} cannot be read as a run's configuration: {one_line(e)}.") from e
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a run's configuration: it holds no keys.")
    return data


def _escaped(node: Any) -> Any:
    """A resolved configuration holds no interpolations: its "${" are plain text."""
    if isinstance(node, dict):
        return {k: _escaped(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_escaped(v) for v in node]
    return node.replace("${", "\\${") if isinstance(node, str) else node


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    dot = f"{prefix}." if prefix else ""
    return {key: value for name, child in node.items() for key, value in _flat(child, f"{dot}{name}").items()}
