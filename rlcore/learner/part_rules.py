"""What ranks that hold parts of the same sequences or layers are accepted with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.spec import refuse

if TYPE_CHECKING:
    from rlcore.learner.specs import LearnerSpec

PARTS = ("sequence_parallel", "tensor_parallel", "expert_parallel")  # keys that say who holds parts


def check_parts(spec: LearnerSpec, key: str) -> None:
    """Raise UserError for a combination that does not work or is not proven."""
    _check_one(spec, key, "sequence_parallel", "sequences")
    _check_one(spec, key, "tensor_parallel", "layers")
    _check_together(spec, key)
    if spec.expert_parallel > 1:
        _check_experts(spec, key)


def _check_one(spec: LearnerSpec, key: str, name: str, what: str) -> None:
    count = getattr(spec, name)
    if count == 1:
        return
    parts = f"{key}.{name}={count}"
    _check_divides(spec, key, name)
    refuse(
        name == "sequence_parallel" and spec.attention == "flash_attention_2",
        f"{parts} has an attention of its own name, which transformers would take for a "
        f"package with {key}.attention=flash_attention_2: choose auto, varlen or sdpa.",
    )
    refuse(
        spec.keep_passes_mib > 0,
        f"{parts} and {key}.keep_passes_mib={spec.keep_passes_mib}: ranks with parts of the "
        f"same {what} might decide unequally what to keep; choose keep_passes_mib=0.",
    )
    refuse(
        spec.distill is not None or spec.train_sparse,
        f"{parts} splits dense attention only, and "
        f"{key}.{'train_sparse=true' if spec.train_sparse else 'distill'} attends sparsely: "
        f"use {name}=1.",
    )
    refuse(
        spec.draft is not None,
        f"{parts} would hold for the ranks of {key}.draft too, which have no use for it: use "
        f"{name}=1, or a draft that is not trained.",
    )


def _check_divides(spec: LearnerSpec, key: str, name: str) -> None:
    count = getattr(spec, name)
    divisors = [n for n in range(1, spec.ranks + 1) if spec.ranks % n == 0]
    refuse(
        count not in divisors,
        f"{key}.{name}={count} does not divide {key}.ranks={spec.ranks}: choose one of "
        f"{', '.join(map(str, divisors))}.",
    )


def _check_experts(spec: LearnerSpec, key: str) -> None:
    _check_divides(spec, key, "expert_parallel")
    parts = f"{key}.expert_parallel={spec.expert_parallel}"
    refuse(
        spec.zero_stage == 3,
        f"{parts} is not proven with {key}.zero_stage=3: choose 0, 1 or 2.",
    )
    others = {
        f"{key}.sequence_parallel={spec.sequence_parallel}": spec.sequence_parallel > 1,
        f"{key}.tensor_parallel={spec.tensor_parallel}": spec.tensor_parallel > 1,
        f"{key}.router=replay": spec.router == "replay",
        f"{key}.keep_passes_mib={spec.keep_passes_mib}": spec.keep_passes_mib > 0,
        f"{key}.offload_while_sampling=true": spec.offload_while_sampling,
        f"{key}.train_sparse=true": spec.train_sparse,
        f"{key}.lora": spec.lora is not None,
        f"{key}.distill": spec.distill is not None,
        f"{key}.draft": spec.draft is not None,
    }
    for other, used in others.items():
        refuse(used, f"{parts} is not proven with {other}: use expert_parallel=1, or leave it off.")


def _check_together(spec: LearnerSpec, key: str) -> None:
    refuse(
        spec.sequence_parallel > 1 and spec.router == "replay",
        f"{key}.sequence_parallel={spec.sequence_parallel} has no routes for parts of "
        f"sequences: use {key}.router=live, or sequence_parallel=1.",
    )
    for what in ("optimizer", "parameters"):
        place = getattr(spec.offload, what)
        refuse(
            spec.sequence_parallel > 1 and place != "none",
            f"{key}.sequence_parallel={spec.sequence_parallel} is not proven with "
            f"{key}.offload.{what}={place}: use none, or sequence_parallel=1.",
        )
    parts = f"{key}.tensor_parallel={spec.tensor_parallel}"
    split = spec.tensor_parallel > 1
    refuse(
        split and spec.sequence_parallel > 1,
        f"{parts} and {key}.sequence_parallel={spec.sequence_parallel} both divide the "
        "attention heads: leave one of them at 1.",
    )
    refuse(
        split and spec.zero_stage == 3,
        f"{parts} divides what {key}.zero_stage=3 divides too: choose 0, 1 or 2.",
    )
    refuse(
        split and spec.offload_while_sampling,
        f"{parts} gathers the masters that {key}.offload_while_sampling=true moves to the "
        "host: choose one of the two.",
    )
    refuse(
        split and spec.lora is not None,
        f"{parts} divides the layers that {key}.lora adapts: use tensor_parallel=1.",
    )
