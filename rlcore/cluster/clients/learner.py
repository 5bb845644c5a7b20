"""The learner's client: the policy's ranks, and the ranks of companions."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import ray

from rlcore.cluster.calls import LOST_RANK_GRACE_S, call, get, kill
from rlcore.cluster.clients.rollout import RayRolloutActor
from rlcore.cluster.specs import Hosting
from rlcore.errors import DeadlineExceeded, RoleLost
from rlcore.learner.sequences import ScoredSequence
from rlcore.loop.role_protocols import (
    ActorClient,
    Batch,
    LearnerClient,
    Publication,
    SampleDetails,
    SampleKey,
    Sent,
)
from rlcore.types import POLICY, WeightManifest
from rlcore.weights.adapters import InParts, together
from rlcore.weights.sending import Receivers, changed_share, sent_bytes

Share = TypeVar("Share")
KEY = "schedule.step_timeout_s"


class RankGroup:
    """The ranks of a learner, whose methods are collective, so that each is called on all of them.

    `name`: the set of weights that the group is for, "policy" or a companion's. `shares`: of a
    batch; neighbouring ranks have the same share where they are fewer than the ranks.
    """

    def __init__(
        self, name: str, handles: Sequence[Any], *, timeout_s: float, shares: int | None = None
    ) -> None:
        self.name = name
        self.handles = list(handles)
        self.shares = shares or len(self.handles)
        self.timeout_s = timeout_s
        self.title = "learner" if name == POLICY else f"{name} learner"

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Make the same call on every rank; returns the references of the answers."""
        return self.ask_each(method, [arguments] * len(self.handles))

    def ask_each(self, method: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Make a call with separate arguments for each rank; returns the references of the
        answers."""
        pairs = zip(self.handles, arguments, strict=True)
        return [getattr(handle, method).remote(*own) for handle, own in pairs]

    async def answers(self, refs: Sequence[Any], what: str) -> list[Any]:
        """The answers of all ranks. If several ranks fail, the loss of a rank takes precedence.

        Raises RoleLost for a rank that died or missed the deadline: it may hang in a collective,
        which nothing else can interrupt.
        """
        calls = [
            call(ref, timeout_s=self.timeout_s, what=what, key=KEY, who=f"{self.title} rank {i}")
            for i, ref in enumerate(refs)
        ]
        asked = [asyncio.create_task(one) for one in calls]
        try:
            _, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:  # a rank fails soon after another one dies, and its error may arrive first
                await asyncio.wait(waiting, timeout=LOST_RANK_GRACE_S)
            errors = [e for t in asked if t.done() and (e := t.exception()) is not None]
            for error in sorted(errors, key=lambda e: not isinstance(e, RoleLost)):
                if isinstance(error, DeadlineExceeded):
                    raise RoleLost(f"the {self.title} hangs: {str(error).rstrip('.')}") from error
                raise error
            return [task.result() for task in asked]
        finally:
            for task in asked:
                task.cancel()

    def answers_now(self, refs: Sequence[Any], what: str) -> list[Any]:
        """The blocking version, outside an event loop."""
        try:
            return list(get(list(refs), timeout_s=self.timeout_s, what=what, key=KEY))
        except DeadlineExceeded as e:
            raise RoleLost(f"the {self.title} hangs: {str(e).rstrip('.')}") from e

    def of_each(self, shares: Sequence[Share]) -> list[Share]:
        """The share of each rank, of all shares of a batch."""
        same = len(self.handles) // self.shares
        return [share for share in shares for _ in range(same)]

    def roles(self) -> list[tuple[Any, str]]:
        """Every rank's handle, by the name that messages give it."""
        return [(handle, f"{self.title} rank {i}") for i, handle in enumerate(self.handles)]

    def kill(self) -> None:
        """End all ranks at once."""
        for handle in self.handles:
            kill(handle)


def deal(groups: Sequence[tuple[int, int]], count: int) -> list[list[int]]:
    """Split (group id, tokens) into `count` lists of whole groups with near-equal tokens, longest
    first."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, place) for place in range(count)]  # a heap: of equal loads the first
    for group_id, tokens in sorted(groups, key=lambda g: (-g[1], g[0])):
        load, place = loads[0]
        shares[place].append(group_id)
        heapq.heapreplace(loads, (load + tokens, place))
    return [sorted(share) for share in shares]


@dataclass(frozen=True, slots=True)
class RayReceivers(Receivers):
    """Actors that have stopped for a publication. Travels to the learner's ranks."""

    handles: Sequence[Any]
    sizes: Sequence[int]  # processes that hold the model of each
    timeout_s: float

    @property
    def ranks(self) -> Sequence[int]:
        return self.sizes

    @property
    def members(self) -> Sequence[str]:
        """Ray's ids: a replacement has another."""
        return [handle._actor_id.hex() for handle in self.handles]

    def start(self, verb: str, payloads: Sequence[Any]) -> Callable[[], None]:
        refs = [h.transfer.remote(verb, p) for h, p in zip(self.handles, payloads, strict=True)]

        def wait() -> None:
            ray.get(refs, timeout=self.timeout_s)

        return wait


ANSWER_S = 5.0  # beyond its own deadline, for a rank to report that it has passed
# What a row shows of a companion's own step, as <companion>/<metric with "_" for "/">
COMPANION_METRICS = (
    "loss/policy",
    "loss/kl",
    "grad_norm",
    "entropy",
    "mismatch/kl_k1",
    "mismatch/abs_dlogp_mean",
)


class RayLearner(LearnerClient):
    """Every method is one collective call on all rank groups together, under
    `schedule.step_timeout_s`."""

    def __init__(
        self,
        groups: Sequence[RankGroup],
        started: Sequence[tuple[Any, str]],
        hosting: Hosting,
        *,
        wire_dtype: str,
    ) -> None:
        """`groups`: the policy's first. `wire_dtype`: of published weights."""
        self._publish_timeout_s = hosting.schedule.publish_timeout_s
        self.policy = groups[0]
        self.companions = list(groups[1:])
        self.starting = list(started)
        self._groups = list(groups)
        self._wire_dtype = wire_dtype
        # the sets that a group's ranks publish, and whether each is an adapter on the policy's
        self._sets: dict[str, dict[str, bool]] = {}

    def _folders(self, folder: str | None) -> Iterator[tuple[RankGroup, str | None]]:
        """Each group with its folder of a checkpoint whose policy part is `folder`."""
        for group in self._groups:
            beside = folder is not None and group is not self.policy
            own = str(Path(folder).with_name(group.name)) if folder and beside else folder
            yield group, own

    async def fetch(self, batches: Mapping[int, Batch]) -> None:
        """Deal whole groups to the ranks by tokens, the same ones to ranks that hold parts of the
        same sequences."""
        asked = []
        for group in self._groups:
            shares: list[dict[int, list[int]]] = [{} for _ in range(group.shares)]
            for step, batch in batches.items():
                for share, dealt in zip(shares, deal(batch.groups, len(shares)), strict=True):
                    share[step] = dealt
            arguments = [(share, group.timeout_s) for share in group.of_each(shares)]
            refs = group.ask_each("fetch", arguments)
            asked.append(group.answers(refs, "fetching a training batch"))
        await asyncio.gather(*asked)

    async def fetch_recorded(self, batches: Mapping[int, int], run_dir: str) -> None:
        """Have the ranks take batches from the recordings of a run: step -> the step that its batch
        was recorded at."""
        for group in self._groups:
            refs = group.ask("fetch_recorded", dict(batches), run_dir)
            await group.answers(refs, "reading recordings")

    async def traced_step(
        self, step: int, folder: str | None = None
    ) -> tuple[dict[str, float], dict[SampleKey, dict[str, list[float]]], dict[str, float]]:
        """The optimizer step of the policy alone: metrics, the part of every token in its loss, and
        the parameters' gradient against that in `folder` (`LearnerRank.traced_step`)."""
        refs = self.policy.ask("traced_step", step, folder)
        answers = await self.policy.answers(refs, f"optimizer step {step + 1}")
        tokens = {key: values for _, found, _ in answers for key, values in found.items()}
        metrics, _, gradient = answers[0]
        return dict(metrics), tokens, gradient

    async def begin_phase(
        self, steps: Sequence[int], *, batches: int, keep_start: bool, resumed: str | None
    ) -> None:
        asked = []
        for group, folder in self._folders(resumed):
            refs = group.ask("begin_phase", list(steps), batches, keep_start, folder)
            asked.append(group.answers(refs, "beginning an update phase"))
        await asyncio.gather(*asked)

    async def train_step(self, step: int) -> dict[str, float]:
        asked = []
        for group in self._groups:
            whose = "" if group is self.policy else f"the {group.name}'s "
            refs = group.ask("train_step", step)
            asked.append(group.answers(refs, f"{whose}optimizer step {step + 1}"))
        (metrics, *_), *others = await asyncio.gather(*asked)
        for group, (own, *_) in zip(self.companions, others, strict=True):
            shown = {name: own[name] for name in COMPANION_METRICS if name in own}
            metrics |= {f"{group.name}/{n.replace('/', '_')}": v for n, v in shown.items()}
        return dict(metrics)

    async def sample_details(self, samples: Sequence[SampleKey]) -> dict[SampleKey, SampleDetails]:
        refs = self.policy.ask("sample_details", list(samples))
        answers = await self.policy.answers(refs, "log-probs of the samples that are shown")
        return {key: values for answer in answers for key, values in answer.items()}

    async def release(self) -> dict[str, float]:
        return _largest(await self.policy.answers(self.policy.ask("release"), "freeing memory"))

    async def reclaim(self) -> dict[str, float]:
        refs = self.policy.ask("reclaim")
        return _largest(await self.policy.answers(refs, "taking its memory back"))

    async def publish(self, version: int, *, full: bool, resumed: str | None) -> Publication:
        """Gather the weights of every set; companions then follow the policy."""
        sets: dict[str, Any] = {}
        for group, folder in self._folders(resumed):
            sets |= await self._gather(group, version, full, folder)
        manifest, handle = sets[POLICY]
        for group in self.companions:
            refs = group.ask("follow", manifest, handle)
            await group.answers(refs, f"loading version {version} into the {group.name} learner")
        return Publication(version, sets, _sizes(sets))

    async def send(self, publication: Publication, receivers: Sequence[ActorClient]) -> Sent:
        """Only the policy's set: runs with several have other transports."""
        manifest, _ = publication.sets[POLICY]
        actors = cast(Sequence[RayRolloutActor], receivers)
        to = RayReceivers(
            [actor.handle for actor in actors],
            [actor.ranks for actor in actors],
            self._publish_timeout_s,
        )
        what = f"sending version {publication.version} to {len(actors)} rollout actors"
        sending, *_ = await self.policy.answers(self.policy.ask("send", manifest, POLICY, to), what)
        return _sizes({POLICY: (manifest, sending)})

    async def _gather(
        self, group: RankGroup, version: int, full: bool, resumed: str | None
    ) -> dict[str, Any]:
        """All sets of one group, whose ranks call their own model the policy."""
        if group.name not in self._sets:
            what = "reading the names of its weights"
            self._sets[group.name] = (await group.answers(group.ask("published"), what))[0]
        sets: dict[str, Any] = {}
        start = resumed
        for name, over_policy in self._sets[group.name].items():
            called = group.name if name == POLICY else name
            refs = group.ask("publish", version, name, self._wire_dtype, full, start)
            what = f"{called} weights of version {version}"
            sets[called] = (await group.answers(refs, what))[0]
            start = None  # the first call has loaded the weights kept at the phase's start, of all
            if over_policy:
                parts = [sets[group.name], sets[called]]
                sets[called] = together([manifest for manifest, _ in parts]), InParts(parts)
        return sets

    async def save(self, folder: str, *, in_phase: bool) -> None:
        for group, own in self._folders(folder):
            refs = group.ask("save", own, in_phase)
            await group.answers(refs, f"a copy of the {group.title}'s state")

    async def saved(self, *, timeout_s: float) -> None:
        key = "checkpoint.write_timeout_s"
        for group in self._groups:
            what = f"writing the checkpoint of the {group.title}"
            calls = [
                # the rank has the same deadline, and its error says what it waited for
                call(
                    handle.saved.remote(timeout_s),
                    timeout_s=timeout_s + ANSWER_S,
                    what=what,
                    key=key,
                    who=who,
                )
                for handle, who in group.roles()
            ]
            await asyncio.gather(*calls)

    # ---- outside an event loop, before and without a run -----------------------------------------

    def load(self, folder: str) -> None:
        """Continue from a checkpoint whose policy part is `folder`. Blocks."""
        for group, own in self._folders(folder):
            refs = group.ask("load", own)
            group.answers_now(refs, f"the {group.title} to load its checkpoint")

    def shortcuts(self) -> list[str]:
        """Return the verdicts on the shortcuts that the ranks might take, a sentence each."""
        return list(self.policy.answers_now(self.policy.ask("shortcuts"), "its shortcuts")[0])

    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder, and every companion beneath it. Blocks."""
        for group in self._groups:
            own = folder if group is self.policy else str(Path(folder) / group.name)
            group.answers_now(group.ask("export", own), f"the {group.title} to be written")

    def sft_step(self, step: int, shares: Sequence[Sequence[ScoredSequence]]) -> dict[str, float]:
        """One supervised step of the policy, in as many shares of examples as it has of a batch;
        metrics. Blocks."""
        each = [(step, list(share)) for share in self.policy.of_each(shares)]
        refs = self.policy.ask_each("sft_step", each)
        return dict(self.policy.answers_now(refs, f"warm-up step {step + 1}")[0])

    def roles(self) -> list[tuple[Any, str]]:
        """Every rank's handle, by the name that messages give it."""
        return [role for group in self._groups for role in group.roles()]

    def kill(self) -> None:
        """End all ranks at once."""
        for group in self._groups:
            group.kill()


def _largest(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


def _sizes(sets: Mapping[str, tuple[WeightManifest, Any]]) -> Sent:
    each = [
        part
        for manifest, handle in sets.values()
        for part in (handle.parts if isinstance(handle, InParts) else [(manifest, handle)])
    ]
    return Sent(sum(sent_bytes(*part) for part in each) / 2**20, changed_share(each))
