"""The base classes and protocols of rlcore. Implementations inherit them; a base class refuses one
that lacks a method (`rlcore.registry`), and a method with a body is optional.

Stages import these and `types`. The protocols of the clients of the loop are in
`loop/role_protocols.py`, the contracts inside the learner in `learner/protocols.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from rlcore.engine_facts import EngineFacts
from rlcore.errors import UserError
from rlcore.types import (
    Grade,
    Item,
    OnPublish,
    Request,
    SamplingSpec,
    StepTensors,
    Trajectory,
    WeightManifest,
)

if TYPE_CHECKING:
    import torch

Split = Literal["train", "heldout"]
Wake = Literal["weights", "all"]  # the memory that a sleeping engine takes back
GivenTokens = tuple[np.ndarray, np.ndarray]  # token ids [L], and which were sampled [L] bool
TeacherAnswer = tuple[np.ndarray, np.ndarray, np.ndarray]  # as `types.TEACHER` names them


class Task(ABC):
    """Problems and their grader. Built from plain keyword arguments; cheap to rebuild in another
    process."""

    name: str

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """Number of problems in a split; None if they are generated without limit."""

    @abstractmethod
    def item(self, split: Split, index: int) -> Item:
        """Problem `index` of a split: equal for equal arguments, in every process."""

    @abstractmethod
    def grade(self, item: Item, response: str) -> Grade:
        """Judge a response. Raise when it cannot be judged: that is a failed score, not a 0."""

    def worked_answer(self, item: Item) -> str | None:
        """Optional. A correct response for supervised warm-up; None if the task has none."""
        return None

    def alphabet(self) -> str | None:
        """Optional. Characters of prompts and worked answers, from which a fresh model's tokenizer
        is built; None: natural text."""
        return None


@dataclass(frozen=True, slots=True)
class WeightStream:
    """A set of weights on its way into an engine: announced whole, loaded in buckets.

    Example: WeightStream({"w": (2,)}, [{"w": torch.ones(2)}])
    """

    shapes: Mapping[str, tuple[int, ...]]  # Hugging Face names, tied weights once
    # Taken once and in order; an engine keeps no bucket once it asks for the next.
    buckets: Iterable[Mapping[str, torch.Tensor]]
    # names whose checksums will be asked for after the load; None: any of them may be
    proven: Sequence[str] | None = None
    # decoder layers that an actor with rounded weights keeps precise; None: as before
    precise_layers: int | None = None


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The work of one engine step. Example: StepLoad(tokens=4, context_tokens=90,
    prompt_tokens=20)"""

    tokens: int = 0  # sampled
    context_tokens: int = 0  # before the sampled ones, over all requests that sampled
    prompt_tokens: int = 0  # of these: of requests that sampled for the first time since queued
    proposed: int = 0  # tokens that another model proposed (`ActorSpec.speculate`)
    accepted: int = 0  # of these

    def __add__(self, other: StepLoad) -> StepLoad:
        return StepLoad(
            self.tokens + other.tokens,
            self.context_tokens + other.context_tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.proposed + other.proposed,
            self.accepted + other.accepted,
        )


class Callback(ABC):
    """Code of a user that a run of `rlcore.train` calls, in the driver's process and between two
    steps. A class overrides the methods that it needs; all values are plain. An exception ends the
    run. A method that returns False ends the run after the present step, with a checkpoint."""

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> bool | None:
        """After an optimizer step, with its row of metrics.jsonl."""
        return None

    def on_evaluation(self, step: int, results: Mapping[str, float | None]) -> bool | None:
        """After a step whose row has results of an evaluation, the metrics `eval/...`."""
        return None

    def on_checkpoint(self, step: int, folder: str) -> bool | None:
        """After a checkpoint was written whole."""
        return None

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """At the end: steps and seconds, or the `error` that ended the run."""


class RolloutEngine(ABC):
    """A sampler whose weights change between two decode steps. One thread owns it.

    Built as Engine(job), with a `rollout.specs.EngineJob`.
    """

    #: the settings of an actor that it reads besides, and its memory; read without an instance
    facts: ClassVar[type[EngineFacts]] = EngineFacts

    @property
    @abstractmethod
    def version(self) -> int:
        """Policy version that the tokens sampled now carry."""

    @abstractmethod
    def add(self, requests: Sequence[Request], begun: Sequence[Trajectory] = ()) -> None:
        """Queue requests, all or none. Raises ValueError for one that the engine cannot serve.

        `begun`: tokens of some of these requests that another engine sampled and returned by `cut`;
        the requests continue from them.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""

    @abstractmethod
    def cut(self, request_ids: Iterable[str]) -> list[Trajectory]:
        """Drop requests and return their records so far (finish_reason "abort"), also those
        without a token; unknown ids are ignored."""

    @abstractmethod
    def step(self) -> list[Trajectory]:
        """One decode step; the trajectories that finished in it, unscored."""

    @abstractmethod
    def unfinished(self) -> int:
        """Requests queued, running or held back."""

    @abstractmethod
    def running(self) -> int:
        """Requests in the current batch."""

    @abstractmethod
    def load_of_step(self) -> StepLoad:
        """Return the work of the last step."""

    @abstractmethod
    def decoding_s(self) -> dict[str, float]:
        """Seconds of decode steps since the first token of each request that has one; waiting and
        loading weights do not count."""

    def hold_newer(self, full: float) -> None:
        """Optional. From now on requests of newer versions wait while one of an older version is
        unfinished and at least `full` are in the batch (infinity: none waits). Answers for the next
        step are whole sooner, at the price of smaller steps."""

    @abstractmethod
    def begin_drain(self) -> None:
        """Let the requests that have sampled a token finish; hold back all others and all new."""

    @abstractmethod
    def end_drain(self) -> None:
        """Queue what was held back, in order, under the current version."""

    @abstractmethod
    def drained(self) -> bool:
        """True if a drain has begun and no request is running."""

    @abstractmethod
    def update_weights(self, version: int, weights: WeightStream, on_publish: OnPublish) -> None:
        """Load a whole set of weights as `version`, atomically between two steps."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Have tokens carry `version` from the next step on; the weights stay (a frozen draft)."""

    @abstractmethod
    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Checksums of the weights as the engine holds them, under their Hugging Face names."""

    def sleep(self) -> float:
        """Optional: schedule.colocated needs it. Free the memory that another process is to use;
        returns the bytes freed. Requests that run, and new ones, are held until `wake`, and nothing
        may be decoded."""
        raise UserError(
            f"schedule.colocated=true needs an engine that frees its memory, and the actor's "
            f"engine {type(self).__name__} has no sleep and wake: choose false, or engine=vllm."
        )

    def wake(self, what: Wake) -> None:
        """Optional, with `sleep`. Take memory back: first for the "weights", which may then be
        loaded, then for "all"."""
        raise RuntimeError(f"{type(self).__name__} was never asleep")

    @abstractmethod
    def close(self) -> None:
        """Stop the engine and free its memory."""


@dataclass(frozen=True, slots=True)
class TransportEnds:
    """The arguments of a weight transport's constructor, equal at both of its ends. All fields are
    set at both ends.

    Example: TransportEnds(store.put, store.get, Path("run/weights"), 512 << 20, 1)
    """

    put: Callable[[Any], Any]  # into the cluster's object store; the result is cheap to send
    get: Callable[[Any], Any]  # what `put` returned -> the object, on any node
    folder: Path  # that both ends share; it may not exist yet
    bucket_bytes: int  # of the buckets that `receive` gives
    full_weights_every: int  # publications from one whole set of weights to the next


class WeightTransport(ABC):
    """Carries one published set of weights from the learner to every actor."""

    @classmethod
    @abstractmethod
    def between(cls, ends: TransportEnds) -> WeightTransport:
        """One end of the transport, for one process that sends or receives."""

    @abstractmethod
    def publish(self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Learner side: takes the tensors one at a time, in the manifest's order. Returns a handle
        that `receive` understands and that is cheap to send."""

    @abstractmethod
    def receive(
        self, manifest: WeightManifest, handle: Any
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Actor side, in buckets. Raises if the payload does not hold exactly the manifest's names,
        shapes and dtype."""


class Reduce(Protocol):
    """Reductions over data-parallel ranks. Every rank makes the same calls in the same order,
    whatever its data."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the ranks."""

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the ranks."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The quantities that a correction requires. The learner computes the union and nothing more.

    Example: Needs(topk=True, batch_stats=True) (Jackpot towards p_ref)
    """

    # the learner's own top k, and its log-probs on the actor's: of p_new if `new`, else of p_ref
    topk: bool = False
    new: bool = False  # p_new over the whole batch before the backward pass of every step
    batch_stats: bool = False  # statistics over the whole batch before the backward pass
    safe_set_rho: float | None = None  # constrain the learner's log-probs (DVP)
    short_circuit: bool = False  # PPO's ratio is p_new / SG(p_new), so that its clip never binds


# log p_new, log p_ref (as `Correction.correct` has it) and log p_inf of n other tokens at each
# position, [B, T, n] each -> the weight that the correction would have given them
WeighAt = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


@dataclass(slots=True)
class Corrected:
    """A correction's verdict: values the loss multiplies by, never a branch inside the loss.

    Example: Corrected(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), {"acceptance": 1.0})
    """

    weight: torch.Tensor  # [B, T] float32, multiplies the per-token objective
    mask: torch.Tensor  # [B, T] bool, tokens that stay in the loss
    metrics: dict[str, float]  # global, already reduced; keys without the "correction/" prefix
    # multiplies the learning rate of this step, the same on every rank; the pipeline multiplies
    # what its corrections return
    step_scale: float = 1.0
    kinds: torch.Tensor | None = None  # [B], as in the step, where corrections differ by kind
    # [B, T] float32, or None: the loss gains `score * log p_new` of each token that stays, whatever
    # its weight (a penalty's gradient); the pipeline adds up what its corrections return
    score: torch.Tensor | None = None
    # [B, T] float32 of at least 1, or None: what the upper bound of PPO's clip is multiplied by
    # where the advantage is positive; the pipeline multiplies what its corrections return
    widen: torch.Tensor | None = None
    # of a correction whose weight is a function of the token alone, in this batch: None elsewhere,
    # and where it is 1
    weigh_at: WeighAt | None = None
    # [B, T, k + 1] float32, or None: `Correction.centre`
    centre: torch.Tensor | None = None

    def rows(self, chosen: torch.Tensor) -> Corrected:
        """The same of some of the sequences, as `StepTensors.rows` takes them."""
        optional = (self.kinds, self.score, self.widen, self.centre)
        kinds, score, widen, centre = (None if v is None else v[chosen] for v in optional)
        return Corrected(
            self.weight[chosen],
            self.mask[chosen],
            {},
            kinds=kinds,
            score=score,
            widen=widen,
            centre=centre,
        )


class Correction(ABC):
    """Up to five hooks, each optional and by default the identity, and pure but for what `state`
    returns.

    The buffer decides which samples of a finished group are kept: `algorithm.train_on_best`.
    """

    needs: Needs = Needs()

    def __init__(self, spec: Any, run_seed: int) -> None:
        """`spec`: the `CorrectionSpec` that names this method. Draws derive from `run_seed`."""

    def constrain_sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        """Hook 1: what the actor samples from (DVP's min-p)."""
        return sampling

    # Hook 2, constraining the learner's log-probs, is declared by `needs.safe_set_rho`.

    def advantages(self, step: StepTensors, reduce: Reduce) -> torch.Tensor | None:
        """Hook 3: replace the advantages, [B, T]; None keeps them (RAPID)."""
        return None

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        """Hook 4: weights and masks on top of the current ones (TIS, MIS, veto, Jackpot, AIS).

        To a method that weighs (`CorrectionSpec.weighs`), `step.logp_ref` and its top k are of the
        policy that weights must lead to: p_ref, or p_new where the loss carries no p_new/p_ref.
        """
        return current

    def centre(self, step: StepTensors, weigh_at: WeighAt | None) -> torch.Tensor | None:
        """Hook 5: the weighted probabilities [B, T, k + 1] of the actor's stored tokens and of all
        others together. Their expected gradient leaves the loss (score centering); None: nothing
        does. `weigh_at`: the product of all weights of the list; None: they are 1."""
        return None

    def state(self) -> Mapping[str, Any]:
        """Return all that later steps depend on, equal on all ranks, as JSON holds it. Checkpoints
        keep it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; {} where a checkpoint has none."""


# Who, what, start and end in seconds of training time since step 0, share of it spent at work.
# Example: ("bf16-0", "decode", 12.5, 17.5, 0.83)
Span = tuple[str, str, float, float, float]


class Reporter(Protocol):
    """Receives metrics, samples and messages of the loop."""

    def row(self, row: Mapping[str, float | int | None]) -> frozenset[str]:
        """One object per learner step; returns the names of the warnings that hold at it
        (`logging.warnings`)."""
        return frozenset()

    def samples(self, step: int, decoded: Sequence[Mapping[str, Any]]) -> None:
        """Readable trajectories of a step."""

    def evaluation_samples(
        self, version: int, label: str, verdicts: Sequence[Mapping[str, Any]]
    ) -> None:
        """Some verdicts of an evaluation of `version`, `label` "<task>/<mode>"."""

    def note(self, text: str) -> None:
        """One line for the user."""

    def activity(self, name: str, waits_for: str, step: int) -> None:
        """Record the run's activity and the object of its wait from now on, after `step` steps."""
        return None

    def fleet(self, actors: Sequence[Mapping[str, Any]]) -> None:
        """Every rollout actor as it is now: "name", and what `Fleet.states` lists."""
        return None

    def timeline(self, step: int, spans: Sequence[Span]) -> None:
        """The work and the waits of every process between the rows of `step - 1` and `step`."""
        return None
