"""What learns in a run: the policy's ranks and, where one is trained beside it, those of its draft."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.runtime.fleet import Publication
from rlcore.runtime.ranks import Ranks, deal

DRAFT_METRICS = ("loss/policy", "loss/kl", "grad_norm", "entropy", "mismatch/kl_k1", "mismatch/abs_dlogp_mean")
Batch = tuple[list[tuple[int, int]], dict[str, float]]  # ((group id, response tokens) ..., statistics)


class Learners:
    """Every method is one collective call, on the policy and its draft together, under `timeout_s`."""

    def __init__(self, policy: Sequence[Any], draft: Sequence[Any] = (), *, timeout_s: float) -> None:
        self.policy = Ranks(list(policy), timeout_s=timeout_s)
        self.draft = Ranks(list(draft), timeout_s=timeout_s, name="draft learner") if draft else None

    def roles(self) -> list[tuple[Any, str]]:
        """Handles of all ranks, by the names that the user is told."""
        groups = [self.policy, *([self.draft] if self.draft else [])]
        return [(handle, f"{group.name} rank {i}") for group in groups for i, handle in enumerate(group.handles)]

    async def fetch(self, batches: dict[int, Batch]) -> None:
        """Deal whole groups to the ranks by tokens; they get them beside whatever they compute."""
        fetching = []
        for ranks in filter(None, (self.policy, self.draft)):
            shares: list[dict[int, list[int]]] = [{} for _ in ranks.handles]
            for step, (groups, _) in batches.items():
                for share, dealt in zip(shares, deal(groups, len(ranks.handles))):
                    share[step] = dealt
            arguments = [(share, ranks.timeout_s) for share in shares]
            fetching.append(ranks.call("fetch", what="a training batch to be fetched", per_rank=arguments))
        await asyncio.gather(*fetching)

    async def begin_phase(self, steps: list[int], *, keep_start: bool, resumed: str | None) -> None:
        """Have p_ref computed for the batches of these steps, which were fetched.

        `keep_start`: the phase has several steps, so that its first weights may be asked for again. `resumed`: the
        learner's folder of the checkpoint that was made in the middle of this phase.
        """
        what = "an update phase to begin"
        beginning = [self.policy.call("begin_phase", steps, keep_start, resumed, what=what)]
        if self.draft is not None:
            theirs = resumed and beside(resumed)
            beginning.append(self.draft.call("begin_phase", steps, keep_start, theirs, what=what))
        await asyncio.gather(*beginning)

    async def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step of the policy and of its draft; the draft's metrics are called `draft/...`."""
        what = f"optimizer step {step + 1}"
        if self.draft is None:
            return dict(await self.policy.call("train_step", step, what=what))
        mine = self.policy.call("train_step", step, what=what)
        metrics, drafts = await asyncio.gather(mine, self.draft.call("train_step", step, what=f"the draft's {what}"))
        return metrics | {f"draft/{name.replace('/', '_')}": drafts[name] for name in DRAFT_METRICS if name in drafts}

    async def publish(
        self, version: int, wire_dtype: str, full: bool, run_seed: int, *, resumed: str | None, sparse_copy: bool
    ) -> Publication:
        """Gather the weights for every kind of actor, and let the draft's learner follow the policy.

        `full`: a checksum of every tensor instead of a sample. `resumed`: as in `begin_phase`; the weights are then
        those that the phase began with. `sparse_copy`: theta + phi is published beside theta.
        """
        common = (version, wire_dtype, full, run_seed)
        what = f"weights of version {version}"
        manifest, handle = await self.policy.call("publish", *common, resumed, what=what)
        others = {}
        if sparse_copy:
            others["sparse"] = await self.policy.call("publish", *common, None, True, what=f"sparse {what}")
        if self.draft is not None:
            kept = resumed and beside(resumed)
            others["draft"] = await self.draft.call("publish", *common, kept, what=f"the draft's {what}")
            await self.draft.call("follow", manifest, handle, what=f"the draft's learner to take {what}")
        return Publication(manifest, handle, others)

    async def save(self, folder: str, *, in_phase: bool) -> None:
        """Have all ranks fix their state in memory; they write it to `folder` (and beside it) meanwhile."""
        await self.policy.call("save", folder, in_phase, what="a copy of the learner's state")
        if self.draft is not None:
            await self.draft.call("save", beside(folder), in_phase, what="a copy of the draft learner's state")

    async def saved(self) -> None:
        """Wait until what `save` fixed is written."""
        await self.policy.call("saved", what="the learner to write its checkpoint")
        if self.draft is not None:
            await self.draft.call("saved", what="the draft's learner to write its checkpoint")


def beside(learner_folder: str) -> str:
    """Where a co-trained draft's learner is in the checkpoint that holds the policy's."""
    return str(Path(learner_folder).with_name("draft"))
