"""What the composition root builds for the loop, beside the clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlcore.interfaces import Reporter
from rlcore.loop.evaluation import Evaluator
from rlcore.loop.fleet import Fleet
from rlcore.loop.prompts import RequestMaker
from rlcore.loop.saver import Saver


def _never() -> None:
    return None


def _to_nobody(refused: str) -> None:
    """Nobody has asked."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The controller's parts. `scale_requests`: the actor counts requested by `rlcore scale`
    since the last call, by label; None: no request; UserError: one that cannot be read.
    `scale_answer` is given the reason why it was refused, or ""."""

    fleet: Fleet
    requests: RequestMaker
    evaluator: Evaluator
    saver: Saver
    reporter: Reporter
    scale_requests: Callable[[], dict[str, int] | None] = _never
    scale_answer: Callable[[str], None] = _to_nobody
