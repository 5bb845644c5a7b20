"""Protocols of the processes that the loop talks to, implemented by `cluster` over Ray and by
`testing` as fakes in one process.

The implementation sets a deadline for every call. A call raises DeadlineExceeded when it passes,
RoleLost when the process has died, and otherwise what the process raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Protocol, TypeVar

from rlcore.interfaces import Wake
from rlcore.types import OnPublish, Request, WeightManifest

SampleKey = tuple[int, int]  # group id, sample index
# in nats, one a token; None where there is none that is finite, as outside a safe set
SampleDetails = dict[str, Any]  # of one sample, by the name that `samples/` gives it
Missing = dict[int, tuple[str, tuple[int, ...]]]  # group id -> (prompt id, samples not arrived)


@dataclass(frozen=True, slots=True)
class Batch:
    """A training batch, as the loop sees it. Example: Batch([(17, 40)], {"reward/mean": 0.5})"""

    groups: list[tuple[int, int]]  # (group id, sampled tokens)
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Sent:
    """The size and duration of a publication. Example: Sent(120.5, 0.03)"""

    mib: float = 0.0  # to an actor that has the version before
    changed_share: float = 1.0  # share of all entries that was sent as changed; 1: whole sets


@dataclass(frozen=True, slots=True)
class Publication:
    """One version's weights: a manifest and a handle for each set, the policy's under POLICY."""

    version: int
    sets: Mapping[str, tuple[WeightManifest, Any]] = field(default_factory=dict)
    sent: Sent = field(default_factory=Sent)  # nothing yet by a group transport: see `send`


Method = TypeVar("Method", bound=Callable[..., Any])
Client = TypeVar("Client", bound=type)


def waits_for(what: str) -> Callable[[Method], Method]:
    """Declare what a call of this method waits for, as messages name it."""

    def declare(method: Method) -> Method:
        method.__dict__["waits_for"] = what
        return method

    return declare


def derived(protocol: type) -> Callable[[Client], Client]:
    """Give a client every method of `protocol` that declares what it waits for and that the client
    does not write itself. The method awaits `self._forward(name, what, args, given)`, the call of
    the process's method of that name. Raises TypeError for a method that is neither."""

    def forwarding(declared: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(declared)
        async def forward(self: Any, *args: Any, **given: Any) -> Any:
            what = declared.__dict__["waits_for"]
            return await self._forward(declared.__name__, what, args, given)

        return forward

    def derive(client: Client) -> Client:
        for name, declared in vars(protocol).items():
            if name in vars(client) or not iscoroutinefunction(declared):
                continue
            if "waits_for" not in vars(declared):
                raise TypeError(f"{client.__name__} lacks {protocol.__name__}.{name}")
            setattr(client, name, forwarding(declared))
        return client

    return derive


class BufferClient(Protocol):
    """The replay buffer. Its process has the same methods; clients are `derived` from these."""

    @waits_for("places in the buffer")
    async def wait_room(self, timeout_s: float, *, all_done: bool, total: int) -> int:
        """Groups that may be admitted now, of `total` over the whole run; waits for some.

        `all_done` asks that nothing is in flight first (synchronous schedules admit in waves).
        """

    @waits_for("an admission")
    async def admit(self, prompt_ids: Sequence[str]) -> list[int]:
        """Admit one group for each of the first prompts, as many as fit now; their ids."""

    @waits_for("the groups in flight")
    async def in_flight(self, group_ids: Sequence[int] | None = None) -> Missing:
        """Groups that were admitted and are incomplete: of these, or all."""

    @waits_for("the groups that are complete")
    async def landed(self) -> list[int]:
        """Ids of the groups that have ceased to be in flight since the last call, finished or
        dropped."""

    @waits_for("recording lost groups")
    async def lost(self, group_ids: Sequence[int], limit: int) -> tuple[Missing, dict[int, str]]:
        """Count a loss of each group: (their missing samples, groups given up at `limit`)."""

    @waits_for("the loss of a shard")
    async def shard_lost(self, shard: str) -> Missing:
        """The records of a shard are gone with its node; returns the missing samples of its
        groups."""

    @waits_for("the pass rates of groups")
    async def outcomes(self) -> list[tuple[str, float]]:
        """(prompt id, pass rate) of the groups that have arrived since the last call, of tasks
        whose pass rates are remembered."""

    @waits_for("the number of failed scores")
    async def failed_scores(self) -> tuple[int, int, str]:
        """Samples that could not be scored so far; how many these are if they are all and failed
        for one reason, else 0; and the reason of the last one."""

    @waits_for("setting the buffer's versions")
    async def set_versions(self, published: int, learner: int) -> None:
        """The version that every actor serves, and the learner's."""

    @waits_for("setting the admitted staleness")
    async def limit_staleness(self, bound: int) -> None:
        """Admit groups as with this `schedule.max_staleness`, at most the schedule's own."""

    @waits_for("the samples of a version")
    async def wait_sampled(self, timeout_s: float, total: int) -> bool:
        """Wait up to `timeout_s` until all groups that may be admitted at the published version, of
        `total` over the whole run, are complete; return whether they are."""

    @waits_for("a training batch")
    async def wait_ready(self, step: int, timeout_s: float, wave: int | None) -> bool:
        """Wait up to `timeout_s` for the batch of `step`; return whether it can be taken.

        `wave`: groups of the whole run, in synchronous schedules: all that may be admitted must
        have arrived first.
        """

    @waits_for("a training batch")
    async def take(self, step: int) -> Batch:
        """The batch of `step`, which is ready."""

    @waits_for("a commit")
    async def commit(self, step: int) -> None:
        """The batch of `step` was trained on."""

    @waits_for("giving up all samples")
    async def give_up(self, reason: str) -> int:
        """Evict all groups that no step was trained on, also in batches that were taken; their
        number."""

    @waits_for("the buffer's state")
    async def waiting_for(self, step: int) -> str:
        """One line: what is missing for the batch of `step`."""

    @waits_for("the buffer's counts")
    async def metrics(self) -> dict[str, float]:
        """`buffer/*` and `ledger/*`; also checks that every account matches."""

    @waits_for("a snapshot of the buffer")
    async def snapshot(self) -> None:
        """Take the snapshot that `save` will write."""

    async def save(self, folder: str, *, timeout_s: float) -> None:
        """Write the snapshot while the run continues. Raises DeadlineExceeded after `timeout_s`:
        the disk is slow, which is not a fault of the buffer."""


class LearnerClient(Protocol):
    """The ranks of the policy's learner, and the ranks of companions."""

    async def fetch(self, batches: Mapping[int, Batch]) -> None:
        """Have the ranks fetch their shares of these steps' batches, in parallel to computing."""

    async def begin_phase(
        self, steps: Sequence[int], *, batches: int, keep_start: bool, resumed: str | None
    ) -> None:
        """Compute p_ref for the batches of the first `batches` of these steps, which were fetched.
        The other steps, of later epochs, train on them again in the same order.

        `keep_start`: the phase has several steps, so that its first weights may be asked for again.
        `resumed`: the learner's folder of a checkpoint that was made in the middle of this phase.
        """

    async def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step of the policy and its companions; metrics."""

    async def sample_details(
        self, samples: Sequence[SampleKey]
    ) -> Mapping[SampleKey, SampleDetails]:
        """Details of some samples of the current phase, after its first step: "log_ratio", log
        p_ref - log p_inf of the sampled tokens, and "advantage". Samples that it does not train on
        are left out."""
        return {}

    async def release(self) -> dict[str, float]:
        """Free memory for engines on the same GPUs: "release_s", "freed_gib",
        "peak_gib" (held since the last call). Weights can still be published and saved."""
        return {}

    async def reclaim(self) -> dict[str, float]:
        """Take the memory back, to train: "reclaim_s"."""
        return {}

    async def publish(self, version: int, *, full: bool, resumed: str | None) -> Publication:
        """Gather the weights of every set; with a group transport, announce them. `full`: a
        checksum of each tensor, not of a sample."""

    async def send(self, publication: Publication, receivers: Sequence[ActorClient]) -> Sent:
        """Group transports: send the weights that `publish` announced to actors that have stopped
        for them (`prepare_weights`). Until it returns the learner must not train."""

    async def save(self, folder: str, *, in_phase: bool) -> None:
        """Copy the state to host memory; the ranks then write it to `folder` (companions next to
        it) in the background."""

    async def saved(self, *, timeout_s: float) -> None:
        """Return when the state of the last `save` is written. Raises DeadlineExceeded after
        `timeout_s`: the disk is slow, which is not a fault of the ranks."""


class ActorClient(Protocol):
    """One process of a rollout actor."""

    async def submit(self, requests: Sequence[Request], begun: Any = None) -> None:
        """Queue requests. Raises UserError for what the engine cannot serve. `begun`: from `cut` of
        another actor; these requests keep their tokens."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; unknown ids are ignored."""

    async def cut(self, request_ids: Sequence[str]) -> tuple[list[str], Any]:
        """Drop requests: (ids of the unfinished ones, a handle to their tokens so far, for
        `submit`)."""

    async def open_requests(self) -> list[str]:
        """Requests taken and not finished."""

    async def update_weights(
        self, manifest: WeightManifest, handle: Any, on_publish: OnPublish
    ) -> dict[str, float]:
        """Receive, load and verify a set of weights; seconds of each part."""

    async def prepare_weights(self, manifest: WeightManifest, on_publish: OnPublish) -> None:
        """Group transports: stop between two steps for weights that the learner will send."""

    async def finish_weights(self, version: int) -> dict[str, float]:
        """Go on with the weights that were sent, verified; seconds of each part."""

    async def set_version(self, version: int) -> dict[str, float]:
        """Note a new version of the policy while this actor's own weights stay."""

    async def sleep(self) -> dict[str, float]:
        """Free the engine's memory, and decode nothing until it is awake: "sleep_s", "freed_gib".
        Requests that it has are held."""
        return {}

    async def awaken(self, what: Wake) -> dict[str, float]:
        """Take the memory back: for the "weights", so that they can be loaded, then for "all", to
        go on decoding: "wake_s"."""
        return {}

    async def status(self) -> dict[str, Any]:
        """A heartbeat. The loop reads "error" (None, or what ended the engine), "heartbeat_age_s"
        (seconds since the engine's thread last turned), "pid", "steps" and "busy_s" (seconds inside
        engine steps). It also reads "decoding_s" (request id -> seconds, once it has sampled a
        token). If there, it reads "costs" (of an engine step, seconds by name), "proposed" and
        "accepted" (tokens, of another model)."""

    def kill(self) -> None:
        """End the process at once. Does not wait."""


class ScorerClient(Protocol):
    """The graders."""

    async def evaluation_progress(self, purpose: str) -> int:
        """Verdicts of an evaluation that have come so far."""

    async def evaluation(self, purpose: str) -> list[dict[str, Any]]:
        """All verdicts of an evaluation, without their texts."""

    async def evaluation_shown(self, purpose: str, count: int) -> list[dict[str, Any]]:
        """The first verdicts of an evaluation by prompt and sample, with their texts. The
        evaluation is then forgotten."""

    async def samples(self, step: int, count: int) -> list[dict[str, Any]]:
        """Up to `count` readable samples of the batch of `step`."""


class RoleWatch(Protocol):
    """Heartbeats of everything but the rollout actors."""

    async def run(
        self,
        scorer_restarted: Callable[[], Awaitable[None]],
        shard_lost: Callable[[str], Awaitable[None]],
    ) -> None:
        """Poll every role until cancelled. Raises RoleLost for one the run cannot do without.
        `shard_lost`: is given the name of a shard that is gone."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """A new actor process that is starting."""

    client: ActorClient
    placed: Awaitable[None]  # done when the cluster has placed it and its process runs
    started: Awaitable[None]  # done when its engine is ready; raises what kept it from starting


Spawn = Callable[[str], Spawned]  # starts a process of one kind under a name


@dataclass(frozen=True, slots=True)
class Clients:
    """Every process of a run but its rollout actors."""

    buffer: BufferClient
    learner: LearnerClient
    scorer: ScorerClient
    watch: RoleWatch
