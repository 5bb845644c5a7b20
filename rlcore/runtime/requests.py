"""From prompts to requests: token ids, sampling, and seeds that depend on nothing but (run seed, prompt, sample)."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.interfaces import Split
from rlcore.runtime.prompts import PromptSource
from rlcore.seeding import derive_seed
from rlcore.types import Request, SamplingSpec


class RequestMaker:
    """Builds the n requests of a training group and the requests of an evaluation."""

    def __init__(self, prompts: PromptSource, *, sampling: SamplingSpec, samples: int, run_seed: int) -> None:
        self.prompts, self.sampling, self.samples, self.run_seed = prompts, sampling, samples, run_seed

    def group(self, group_id: int, prompt_id: str) -> list[Request]:
        """One request a sample. The seed hangs on the admission, so a prompt seen again is sampled afresh."""
        split, index = split_and_index(prompt_id)
        item = self.prompts.task.item(split, index)
        ids = self.prompts.encode(item)
        return [
            Request(group_id, i, prompt_id, ids, self.sampling, derive_seed(self.run_seed, "sample", group_id, i))
            for i in range(self.samples)
        ]


def evaluation_requests(
    prompts: PromptSource, *, indices: Sequence[int], samples: int, sampling: SamplingSpec, run_seed: int, purpose: str
) -> list[list[Request]]:
    """Held-out requests by prompt. Group ids are negative; seeds depend on the prompt, not on when it is asked."""
    groups = []
    for index in indices:
        item = prompts.task.item("heldout", index)
        ids = prompts.encode(item)
        groups.append(
            [
                Request(
                    -1 - index,
                    i,
                    item.prompt_id,
                    ids,
                    sampling,
                    derive_seed(run_seed, "eval", item.prompt_id, i),
                    purpose=purpose,
                )
                for i in range(samples)
            ]
        )
    return groups


def split_and_index(prompt_id: str) -> tuple[Split, int]:
    """The last two parts of "<task>/<split>/<index>"."""
    _, split, index = prompt_id.rsplit("/", 2)
    assert split in ("train", "heldout"), prompt_id
    return split, int(index)  # type: ignore[return-value]
