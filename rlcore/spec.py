"""The declaration of settings: each once, in the package that uses it, without importing torch.

A specification is a frozen pydantic model. `config/schema.py` composes the packages' specifications
into the configuration of a run; constructors take them whole. Example:

    class VetoSpec(Spec):
        threshold: float = setting(1e-4, "a token with p_ref/p_inf below drops its sequence", gt=0)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticUndefined

from rlcore.errors import UserError


class Unread(NamedTuple):
    """Settings that nothing reads where others of the same specification have some values.

    Example: Unread(("c2",), lambda spec: spec.target == "ref", "target=ref has no such factor")
    """

    names: tuple[str, ...]
    where: Callable[[Any], bool]  # of the specification
    because: str  # names the settings that decide


Reduction = Literal["mean", "sum", "max", "min", "last"]


class DeclaredMetric(NamedTuple):
    """A metric, declared with the settings of its feature (`metrics/learner_metrics.py`)."""

    name: str
    unit: str
    meaning: str
    reduction: Reduction = "mean"  # of the values of several steps: a summary, a thinned curve
    healthy: str = ""  # the usual range; "": the metric describes a run and has none
    otherwise: str = ""  # the advice outside of the range, in Markdown


class Fixed(StrEnum):
    """Why a run that goes on from a checkpoint keeps a setting's value."""

    PROBLEMS = "problems that the checkpoint counts, remembers and has in flight would be others"
    ASKED = "samples of one prompt would answer different questions"
    MODEL = "the checkpoint goes on with the model that it was made of"
    WEIGHTS = "the checkpoint's weights and optimizer state are of these"
    SAMPLED = "samples in the checkpoint's buffer were drawn otherwise than the learner assumes"


class Spec(BaseModel):
    """Settings that belong together. Unknown keys and infinities are refused; values never change.

    Ranges of single settings stand on the settings. Rules over several settings of one
    specification are in `check`; rules that join packages are in `config/checks.py`.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    #: which settings are dead under which others: a run that sets one is warned
    #: (`config/unread.py: unread`)
    unread: ClassVar[tuple[Unread, ...]] = ()
    #: settings that a resumed run cannot change, and why, in a word of `Fixed` or an own sentence;
    #: a section stands for all that it holds (`config/resuming.py: check_resume`)
    fixed: ClassVar[Mapping[str, str]] = {}
    #: sections that a resumed run can neither add nor drop, and why; what they hold may change
    fixed_presence: ClassVar[Mapping[str, str]] = {}

    #: metrics of a run that uses the feature
    metrics: ClassVar[tuple[DeclaredMetric, ...]] = ()

    @classmethod
    def declared(cls) -> Iterator[DeclaredMetric]:
        """`metrics` of the class and of the specifications below it."""
        yield from cls.metrics
        for info in cls.model_fields.values():
            for below in held(info.annotation):
                yield from below.declared()

    def dead(self) -> Iterator[tuple[str, str]]:
        """Each setting that nothing reads under the others, and why."""
        for cls in type(self).__mro__:
            for pair in cls.__dict__.get("unread", ()):
                if pair.where(self):
                    yield from ((name, pair.because) for name in pair.names)

    def kept(self, *, presence: bool = False) -> Iterator[tuple[str, str]]:
        """Each setting that a resumed run cannot change (`presence`: add or drop), and why."""
        name = "fixed_presence" if presence else "fixed"
        for cls in type(self).__mro__:
            yield from cls.__dict__.get(name, {}).items()

    def own_sections(self, key: str) -> Mapping[str, Spec]:
        """Plain mappings in this specification whose settings a class declares that it names, such
        as an engine, by name. Raises UserError for settings that are not the class's."""
        return {}

    def check(self, key: str) -> None:
        """Raise UserError if settings of this specification contradict each other.

        `key` is the configuration key of the specification, such as `actor.bf16`. The door
        (`config/compose.py`) calls it on every specification of a run.
        """


def held(annotation: Any) -> Iterator[type[Spec]]:
    """The specifications that a type names, in the order in which it does."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        yield annotation
    for inner in get_args(annotation):
        yield from held(inner)


def setting(
    default: Any = PydanticUndefined,
    meaning: str = "",
    *,
    unit: str = "",
    names: Literal["", "path", "model", "template", "code"] = "",
    default_factory: Callable[[], Any] | None = None,
    **bounds: Any,
) -> Any:
    """One declared setting: its default (none: required), meaning, unit and bounds.

    `names`: the thing that a text stands for, so that paths are made absolute (`config/paths.py`):
    a file or folder, a model's folder, a chat template, or code, "file.py:Class".
    `bounds` are pydantic's: gt, ge, lt, le, min_length, max_length.
    """
    said = {"unit": unit, "names": names}
    extra: dict[str, Any] = {key: text for key, text in said.items() if text}
    if default_factory is not None:
        return Field(
            default_factory=default_factory, description=meaning, json_schema_extra=extra, **bounds
        )
    return Field(default=default, description=meaning, json_schema_extra=extra, **bounds)


def parsed(cls: type[Spec] | None, given: Mapping[str, Any], key: str, owner: str) -> Spec | None:
    """The specification `cls` of settings that are written below `key`; None where there is none.

    `owner`: what declares them, as "key=value". Types are not converted into each other. Raises
    UserError for settings that it does not have."""
    if cls is None:
        refuse(
            bool(given),
            f"{key}={json.dumps(given)} is not read by {owner}, whose facts declare no settings: "
            f"leave {key} empty, or name their specification in `facts.settings`.",
        )
        return None
    try:
        return cls.model_validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, (key, *first["loc"])))
        said = {"extra_forbidden": "not a setting of it", "missing": "required"}
        what = said.get(first["type"], first["msg"])
        raise UserError(
            f"{name} is not accepted by {owner}: {what}; it has {', '.join(cls.model_fields)}."
        ) from None


def refuse(when: bool, sentence: str) -> None:
    """Raise UserError with `sentence`, which names key, value and choices, if `when` holds."""
    if when:
        raise UserError(sentence)
