"""Facts of an engine that a run is checked, counted and described by before any engine exists.

A shipped engine's facts stand next to it in a file that imports neither torch nor the engine. A
registry names them (`ENGINE_FACTS` of `learner/specs.py` and of `rollout/specs.py`); a class of a
user's own names its facts in its attribute `facts`. Without one it is `EngineFacts` itself: an
engine that reads none of the settings that only some engines read, and states no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from rlcore.registry import load_object, resolve

if TYPE_CHECKING:
    from rlcore.models.sizes import ModelSizes, Parts
    from rlcore.spec import Spec


Divided = Literal["sequences", "layers", "experts"]


class Division(NamedTuple):
    """Ranks that hold parts of something. Example: Division("layers", "tensor_parallel", 2)"""

    of: Divided
    name: str  # of the setting, in the section of the engine
    ranks: int


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The memory that a rank holds besides the policy that it trains."""

    kl: bool = False  # a frozen policy beside it
    trained: float | None = None  # entries that are trained; None: all
    bucket_bytes: float = 0.0  # of a publication
    # bytes an entry of the set that rank 0 keeps to find changed entries; 0: none
    kept_width: int = 0


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes by purpose: at a rank's peak, while engines have its GPU, and in its host's memory."""

    peak: Parts
    waiting: Parts
    host: Parts


class EngineFacts:
    """The base, and the facts of an engine that states none. `spec` is the section of the engine:
    a LearnerSpec of a training engine, an ActorSpec of a rollout engine."""

    #: settings of the section that this engine reads, of those in `engine_settings` of the section
    reads: ClassVar[frozenset[str]] = frozenset()
    #: the engine's own settings, in `engine_args` of the section; None: it has none
    settings: ClassVar[type[Spec] | None] = None
    #: what other settings may ask an engine for; rollout engines: "adapters", "group transports",
    #: "expert routes", "sleep", "bits"
    provides: ClassVar[frozenset[str]] = frozenset()
    #: what makes a training rank smaller, in settings that this engine reads
    smaller: ClassVar[str] = ""
    #: widths of a head that a rollout engine's attention has on CPU; empty: any
    cpu_heads: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def refuse(cls, spec: Any, key: str) -> None:
        """Raise UserError for settings that the engine cannot work with. `key`: of the section."""

    @classmethod
    def refuse_run(cls, c: Any, spec: Any, key: str) -> None:
        """Raise UserError for settings that the engine cannot work with in the run `c`, a
        RunConfig."""

    @classmethod
    def words(cls, spec: Any) -> str:
        """How the engine divides a model, for the line of a dry run. Example: "ZeRO-3" """
        return ""

    @classmethod
    def divisions(cls, spec: Any) -> tuple[Division, ...]:
        """The things that a training engine's ranks hold parts of.

        Ranks with parts of the same sequences or layers have a share of a batch together; those
        with parts of experts have one each."""
        return ()

    @classmethod
    def rank_memory(cls, sizes: ModelSizes, spec: Any, load: RankLoad) -> RankMemory | None:
        """Memory of a training rank; None: the engine does not state it."""
        return None

    @classmethod
    def unused_room(cls, spec: Any) -> str:
        """A setting, not in use, by which a training rank keeps less while engines have its GPU."""
        return ""

    @classmethod
    def frozen_bytes(cls, sizes: ModelSizes, spec: Any) -> float:
        """Bytes on a rank's device of a model without gradients."""
        return 4.0 * sizes.parameters

    @classmethod
    def actor_memory(
        cls, sizes: ModelSizes, spec: Any, *, bucket_bytes: float, max_len: int
    ) -> Parts | None:
        """Least memory of a rollout engine's rank; None: the engine does not state it."""
        return None


def facts_of(
    declared: Mapping[str, str], engines: Mapping[str, str], name: str, key: str
) -> type[EngineFacts]:
    """The facts of the engine `name`: of the registry `declared`, else of its class, which is
    imported. Raises UserError, naming `key`, for an engine that cannot be loaded."""
    if name in declared:
        found: type[EngineFacts] = load_object(declared[name])
        return found
    return getattr(resolve(engines, name, key=key), "facts", EngineFacts)


def foreign(spec: Spec, settings: Mapping[str, bool], facts: type[EngineFacts]) -> Iterator[str]:
    """Names in `settings` that are away from their defaults and that the engine does not read."""
    for name in settings:
        default = type(spec).model_fields[name].get_default(call_default_factory=True)
        if name not in facts.reads and getattr(spec, name) != default:
            yield name
