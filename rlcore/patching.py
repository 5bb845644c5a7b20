"""Attributes of other libraries that rlcore replaces: a name that is gone is an error, and a
version that was never tried is reported.

The patches of vLLM are in `rollout/engines/vllm/patches.py`, patches of torch, transformers, PEFT
and DeepSpeed in `learner/engines/deepspeed_patches.py`, of Ray in `cluster/ray_cluster.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced attribute.

    Example: Patch("torch.nn:Module", "forward", "to compute norms faster", ("2.13.",))
    """

    owner: str  # "module" or "module:Class"; of an attribute of single objects, their class
    name: str
    why: str  # ends a sentence "rlcore replaces it ..."
    known_versions: tuple[str, ...]  # beginnings of the library's versions that it was tried on

    def find(self) -> Any:
        """The owner, imported. Raises RuntimeError if the library has none of this name."""
        module, _, name = self.owner.partition(":")
        try:
            found = import_module(module)
            return getattr(found, name) if name else found
        except (ModuleNotFoundError, AttributeError) as e:
            raise RuntimeError(self._gone(self.owner)) from e

    def replace(self, by: Any, of: Any = None) -> Any:
        """Set the attribute of the owner, or of the single object `of`; return what it was.

        Raises RuntimeError if there is no such attribute. Warns of a version that was not tried.
        """
        target = self.find() if of is None else of
        place = f"{self.owner}.{self.name}"
        if not hasattr(target, self.name):
            raise RuntimeError(self._gone(place))
        if not self.version().startswith(self.known_versions):
            warnings.warn(
                f"rlcore replaces {place} {self.why}, which was tried on {self._library} "
                f"{' and '.join(self.known_versions)} and not on {self.version()}",
                stacklevel=2,
            )
        before = getattr(target, self.name)
        setattr(target, self.name, by)
        return before

    @contextmanager
    def replaced(self, by: Any) -> Iterator[None]:
        """Replace the owner's attribute inside. Raises and warns as `replace` does."""
        before = self.replace(by)
        try:
            yield
        finally:
            setattr(self.find(), self.name, before)

    @property
    def _library(self) -> str:
        return self.owner.partition(":")[0].partition(".")[0]

    def version(self) -> str:
        """The installed version of the library."""
        # not importlib.metadata: a build for another device has another distribution's name
        return str(import_module(self._library).__version__)

    def _gone(self, place: str) -> str:
        known = " or ".join(f"{v}*" for v in self.known_versions)
        return (
            f"{self._library} {self.version()} has no {place}, which rlcore replaces {self.why}: "
            f"install {self._library} {known}"
        )
