"""The `correction` section of a run: labels and their specifications, in the order they apply."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import (
    SerializationInfo,
    TypeAdapter,
    ValidationError,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from rlcore.corrections.registry import CORRECTIONS
from rlcore.corrections.specs import CorrectionSpec
from rlcore.errors import UserError
from rlcore.registry import resolve
from rlcore.spec import Spec, refuse, setting

NONE = "none"  # the label of a run that names no correction on purpose


class NamedCorrection(NamedTuple):
    """One correction of a run. Example: NamedCorrection("tis", "tis", TisSpec())"""

    label: str
    name: str  # of its specification: an entry of the registry, or path/to/file.py:Class
    spec: CorrectionSpec


class CorrectionList(Spec):
    """The corrections of a run, read from and written to a mapping whose order counts.

    A built-in correction's label is its name, `tis: {cap: 3}`. A user's own says which class
    declares its settings, `mine: {name: "path/to/file.py:MySpec", cap: 3}`.
    """

    entries: tuple[NamedCorrection, ...] = ()
    none: bool = False  # `correction=none`

    @model_validator(mode="before")
    @classmethod
    def _from_mapping(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data  # refused by its type
        # `tis: null` switches off what an experiment selects
        chosen = {label: settings for label, settings in data.items() if settings is not None}
        none = chosen.pop(NONE, None)
        if none:
            raise _error(PydanticCustomError(NONE, "empty, since it has no settings"), NONE, none)
        entries = tuple(_named(label, settings) for label, settings in chosen.items())
        return {"entries": entries, "none": none is not None}

    @model_serializer(mode="plain")
    def _to_mapping(self, info: SerializationInfo) -> dict[str, Any]:
        written: dict[str, Any] = {NONE: {}} if self.none else {}
        for label, name, spec in self.entries:
            own = {} if name == label else {"name": name}
            written[label] = own | spec.model_dump(mode=info.mode)
        return written

    @property
    def names(self) -> tuple[str, ...]:
        """Every label of the run in order, "none" included."""
        return ((NONE,) if self.none else ()) + tuple(entry.label for entry in self.entries)

    def chosen(self) -> dict[str, CorrectionSpec]:
        """Specifications by label, in the order in which they apply; empty for none."""
        return {entry.label: entry.spec for entry in self.entries}

    def get(self, label: str) -> CorrectionSpec | None:
        """The specification under a label, or None if the run does not have it."""
        return self.chosen().get(label)

    def check(self, key: str) -> None:
        refuse(
            self.none and bool(self.entries),
            f"{key}=[{','.join(self.names)}] contradicts itself: none stands alone.",
        )


@cache
def shipped() -> type[Spec]:
    """A model with one field for each shipped correction: the keys of help texts and hints."""
    fields: dict[str, Any] = {
        name: (resolve(CORRECTIONS, name, key="correction") | None, None) for name in CORRECTIONS
    }
    none = setting(None, "the run names no correction on purpose")
    fields[NONE] = (dict[str, Any] | None, none)
    return create_model("ShippedCorrections", __base__=Spec, **fields)


def _named(label: str, settings: Any) -> NamedCorrection:
    """The correction of one entry of the section. Raises ValidationError or UserError."""
    if not isinstance(settings, Mapping):
        raise _error("dict_type", label, settings)
    own = dict(settings)
    name = own.pop("name", label)  # reserved: no specification has a setting of this name
    if label not in CORRECTIONS and "name" not in settings:
        raise _error("extra_forbidden", label, settings)
    spec = resolve(CORRECTIONS, str(name), key=f"correction.{label}.name")
    if not (isinstance(spec, type) and issubclass(spec, CorrectionSpec)):
        raise UserError(
            f"correction.{label}.name={name} is not accepted: it must name a class that inherits "
            "rlcore.corrections.specs.CorrectionSpec."
        )
    # In JSON mode, which is strict and still takes a list for a tuple, as for every other section.
    annotation: Any = dict[str, spec]  # type: ignore[valid-type]
    adapter: TypeAdapter[dict[str, CorrectionSpec]] = TypeAdapter(annotation)
    read = adapter.validate_json(json.dumps({label: own}), strict=True)
    return NamedCorrection(label, str(name), read[label])


def _error(kind: Any, label: str, value: Any) -> ValidationError:
    error = InitErrorDetails(type=kind, loc=(label,), input=value)
    return ValidationError.from_exception_data("correction", [error])
