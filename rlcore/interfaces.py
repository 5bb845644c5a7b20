"""The few verbs of rlcore, as protocols. Stages know these and `types`, never each other; `runtime` wires them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlcore.types import Grade, Group, Item, OnPublish, Request, SamplingSpec, StepTensors, Trajectory, WeightManifest

if TYPE_CHECKING:
    import torch

Split = Literal["train", "heldout"]


class Task(Protocol):
    """Problems and their grader. Built from plain keyword arguments; cheap to rebuild in another process."""

    name: str

    def size(self, split: Split) -> int | None:
        """Number of problems in a split; None if made up without end."""

    def item(self, split: Split, index: int) -> Item:
        """Problem `index` of a split: the same for the same arguments, in every process, for ever."""

    def grade(self, item: Item, response: str) -> Grade:
        """Judge a response. Raise when it cannot be judged: that is a failed score, not a 0."""

    def worked_answer(self, item: Item) -> str | None:
        """A correct response for supervised warm-up; None if the task has none."""

    def alphabet(self) -> str | None:
        """Characters that prompts and worked answers are made of (its tokenizer comes of them); None: natural text."""


class Engine(Protocol):
    """A sampler that can change weights between two decode steps."""

    @property
    def version(self) -> int:
        """Policy version that the tokens sampled now carry."""

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError for one longer than the model allows."""

    def step(self) -> list[Trajectory]:
        """One decode step; the trajectories that finished in it, unscored."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""

    def unfinished(self) -> int:
        """Requests queued or running."""

    def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor], on_publish: OnPublish) -> None:
        """Load a whole set of weights (Hugging Face names) as `version`, atomically between two steps."""

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Checksums of the weights as the engine holds them, under their Hugging Face names."""


class WeightTransport(Protocol):
    """Carries one published set of weights from the learner to every actor."""

    def publish(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Learner side. Returns a handle that `receive` understands and that is cheap to send."""

    def receive(self, manifest: WeightManifest, handle: Any) -> dict[str, torch.Tensor]:
        """Actor side. Raises if the payload does not hold exactly the manifest's names, shapes and dtype."""


class Reduce(Protocol):
    """Reductions over data-parallel ranks. Every rank makes the same calls in the same order, whatever its data."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the ranks."""

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the ranks."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a correction wants computed. The learner computes the union and nothing more."""

    topk: bool = False  # the learner's own top k and its log-probs on the actor's top k: of p_new if `new`, else p_ref
    new: bool = False  # p_new over the whole batch before the backward pass of every step
    batch_stats: bool = False  # statistics over the whole batch before the backward pass
    safe_set_rho: float | None = None  # constrain the learner's log-probs (DVP)
    short_circuit: bool = False  # PPO's ratio is p_new / SG(p_new), so its clip never binds (TIS-adjusted, RAPID)


@dataclass(slots=True)
class Corrected:
    """A correction's verdict: values the loss multiplies by, never a branch inside the loss."""

    weight: torch.Tensor  # [B, T] float32, multiplies the per-token objective
    mask: torch.Tensor  # [B, T] bool, tokens that stay in the loss
    metrics: dict[str, float]  # global, already reduced; keys without the "correction/" prefix


class Correction(Protocol):
    """Up to four hooks, each pure and each optional (the base class makes every one the identity).

    Which samples of a finished group are kept (oversampling) is the buffer's to say: `algorithm.keep_best`.
    """

    name: str
    needs: Needs

    def constrain_sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        """Hook 1: what the actor samples from (DVP's min-p)."""

    # Hook 2, constraining the learner's log-probs, is declared by `needs.safe_set_rho`.

    def advantages(self, step: StepTensors, reduce: Reduce) -> torch.Tensor | None:
        """Hook 3: replace the advantages, [B, T]; None keeps them (RAPID)."""

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        """Hook 4: weights and masks on top of those so far (TIS, MIS, veto, Jackpot, AIS)."""


class Buffer(Protocol):
    """Admission, ledger, storage and sampling of groups."""

    def room(self, published_version: int) -> int:
        """How many groups may be admitted now without breaking the staleness bound."""

    def admit(self, prompt_ids: Sequence[str], published_version: int) -> list[int]:
        """Admit groups; returns their ids. Raises if there is no room."""

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Scored trajectories, in any order."""

    def take(self, step: int) -> list[Group] | None:
        """The groups for the step that turns version `step` into `step + 1`, or None if they are not there yet."""


class Learner(Protocol):
    """One data-parallel rank."""

    def train_step(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """One optimizer step on this rank's share; returns global metrics."""


Grader = Callable[[Item, str], Grade]


class Reporter(Protocol):
    """Where the loop's numbers and words go."""

    def row(self, row: Mapping[str, float | int | None]) -> None:
        """One object per learner step."""

    def samples(self, step: int, decoded: Sequence[Mapping[str, Any]]) -> None:
        """Readable trajectories of a step."""

    def note(self, text: str) -> None:
        """One line for the person who watches."""
