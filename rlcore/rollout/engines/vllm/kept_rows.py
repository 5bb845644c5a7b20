"""Log-prob rows that stay on the device until a record needs them, or a group of steps is full.

vLLM copies the ids and log-probs of every step to the host and cuts them request by request. Here a
request gets the number of its row in a group of steps. A group is copied at once, and a record
takes its rows of a group together.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from rlcore.rollout.engines.vllm.patches import KEPT_LOGPROBS, LOGPROBS, is_second
from rlcore.rollout.segments import KeptRows

STEPS = 32  # of a group, at most
_BYTES = 1 << 22  # of a group on the host, unless one step has more
_BYTES_AN_ENTRY = 8  # an id and its log-prob


class RowStore:
    """Gives each step of one engine its place in a group."""

    def __init__(self, device: torch.device) -> None:
        # first in line, ahead of the step that is under way
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._group: StepGroup | None = None

    def add(self, ids: Tensor, logp: Tensor) -> tuple[StepGroup, int]:
        """The group of a step whose kernels have ended, and the number of its first row there.
        `ids`, `logp`: [n, k + 1]."""
        n, width = ids.shape
        group = self._group
        if group is None or not group.has_room(n, width):
            if group is not None:
                group.copy()
            steps = max(1, min(STEPS, _BYTES // (_BYTES_AN_ENTRY * n * width)))
            group = self._group = StepGroup(n * steps, width, self._stream)
        return group, group.add(ids, logp)

    def close_group(self) -> None:
        """Copy what is on the device, whose memory another process may get."""
        if self._group is not None:
            self._group.copy()
            self._group = None


class StepGroup:
    """Rows of following steps of equal width, in arrays that are filled by copies."""

    def __init__(self, rows: int, width: int, stream: torch.cuda.Stream | None) -> None:
        self._ids = np.empty((rows, width), np.int32)
        self._logp = np.empty((rows, width), np.float32)
        self._stream = stream
        self._waiting: list[tuple[Tensor, Tensor]] = []  # not copied yet
        self._copied = self._added = 0

    def has_room(self, rows: int, width: int) -> bool:
        """Return whether a step with so many rows of this width belongs here."""
        most, own = self._ids.shape
        return width == own and self._added + rows <= most

    def add(self, ids: Tensor, logp: Tensor) -> int:
        """Append a step; returns the number of its first row."""
        first = self._added
        self._added += len(ids)
        self._waiting.append((ids, logp))
        return first

    def copy(self) -> None:
        """Copy what is not on the host yet, together. Waits for no step that is under way: the
        steps of these rows have ended, and the copy has a stream for itself."""
        if not self._waiting:
            return
        place = slice(self._copied, self._added)
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            ids, logp = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
            self._ids[place] = ids.int().cpu().numpy()
            self._logp[place] = logp.cpu().numpy()
        self._copied = self._added
        self._waiting.clear()

    def take(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids [n, k + 1] int32 and log-probs [n, k + 1] float32 of rows by number."""
        self.copy()
        at = np.array(rows, np.intp)
        return self._ids.take(at, axis=0), self._logp.take(at, axis=0)


class KeptLogprobs(LogprobsTensors):
    """vLLM's record of a step's log-probs, which its runners neither copy nor cut."""

    store: RowStore

    def to_cpu_nonblocking(self) -> LogprobsTensors:
        """The rows stay where they are."""
        return self

    def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> Any:
        """In the place of arrays, for the scheduler. Called when the step has ended, and in another
        thread than the engine's."""
        return StepRows(self)


class StepRows:
    """In the place of vLLM's `LogprobsLists`."""

    def __init__(self, tensors: KeptLogprobs) -> None:
        self._tensors = tensors
        self._place: tuple[StepGroup, int] | None = None

    def slice_request(self, row: int, tokens: int) -> KeptRows:
        """The rows of a request, whose first is `row` of the step."""
        if self._place is None:
            tensors = self._tensors
            self._place = tensors.store.add(tensors.logprob_token_ids, tensors.logprobs)
        group, first = self._place
        first += row
        return KeptRows(group, [first] if tokens == 1 else list(range(first, first + tokens)))


def keep_rows(runner: Any, untried: bool = False) -> str | None:
    """Have a model runner keep the log-prob rows of sampled tokens. Returns why not, None if it
    does; `runner.rl_rows` is their store then. `untried`: on a GPU, too, which has not shown it."""
    if not KEPT_LOGPROBS.version().startswith(KEPT_LOGPROBS.known_versions):
        return f"it was not tried with vLLM {KEPT_LOGPROBS.version()}"
    if runner.device.type == "cuda" and not untried:
        return "no GPU has shown it"
    store = runner.rl_rows = RowStore(runner.device)

    def kept(tensors: LogprobsTensors) -> KeptLogprobs:
        made = KeptLogprobs(*tensors)
        made.store = store
        return made

    def sample(*args: Any) -> Any:
        output, *others = plain(*args)
        if output.logprobs_tensors is not None:
            output.logprobs_tensors = kept(output.logprobs_tensors)
        return output, *others

    if is_second(runner):
        plain = KEPT_LOGPROBS.replace(sample, of=runner)
    else:
        plain = LOGPROBS.replace(lambda *a, **k: kept(plain(*a, **k)), of=runner.sampler)
    return None
