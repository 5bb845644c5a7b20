"""Interpolations of a configuration: `${other.key}`, also of a key at its default, and
`${oc.env:NAME}`, whose text is read as the type of its key asks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from rlcore.config.schema import RunConfig
from rlcore.config.sentences import is_text, sections

_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^{}]*\}")


def resolved(cfg: DictConfig) -> Any:
    """Plain data of a composed configuration, without interpolations; the keys are its own.

    Raises OmegaConfBaseException for what cannot be resolved.
    """
    written = OmegaConf.to_container(cfg, resolve=False)
    if "${" not in json.dumps(written, default=str, ensure_ascii=False):
        return OmegaConf.to_container(cfg, resolve=True)
    whole = OmegaConf.merge(OmegaConf.create(_defaults(RunConfig, written)), cfg)
    return _own(written, OmegaConf.to_container(whole, resolve=True), "")


def _own(written: Any, found: Any, key: str) -> Any:
    """The values of `found` at the keys that are `written`."""
    if isinstance(written, dict) and isinstance(found, dict):
        dot = f"{key}." if key else ""
        return {name: _own(part, found[name], f"{dot}{name}") for name, part in written.items()}
    if isinstance(written, list) and isinstance(found, list):
        return [_own(part, value, f"{key}.") for part, value in zip(written, found)]
    named = isinstance(written, str) and _FROM_ENVIRONMENT.fullmatch(written)
    return _decoded(found) if named and not is_text(key) else found


def _decoded(text: Any) -> Any:
    """The value that an argument with this text would have; text where none."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _defaults(model: type[BaseModel], node: Any) -> dict[str, Any]:
    """Values of the keys that a section has without being told. `node`: what is written of it."""
    given = node if isinstance(node, Mapping) else {}
    made: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        own, forms = given.get(name), list(sections(info.annotation))
        if not forms:
            if not info.is_required():
                made[name] = _plain(info.get_default(call_default_factory=True))
        elif len(forms) == 1 and forms[0][1]:
            labels = own if isinstance(own, Mapping) else {}
            made[name] = {label: _defaults(forms[0][0], part) for label, part in labels.items()}
        elif len(forms) == 1 and (isinstance(own, Mapping) or own is None):
            absent = own is None and not info.is_required()
            unset = absent and info.get_default(call_default_factory=True) is None
            made[name] = None if unset else _defaults(forms[0][0], own)
    return made


def _plain(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None
