"""The fields that other trainers write, as rows of the schema (`dumps/rows.py`).

A layout is known by its fields. What a trainer's dump lacks is said with the setting that writes
it, or with the call that does (`dumps.rows.write`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.dumps.rows import REQUIRED, WrongRow

Fields = Mapping[str, Any]
PAGE = "docs/diagnose.md"


@dataclass(frozen=True, slots=True)
class Layout:
    """Fields that identify a trainer's dump, and how one becomes rows of the schema.

    Example: Layout("rlcore's schema", ("logp_inf", "logp_ref"), lambda fields: [fields])
    """

    name: str
    fields: tuple[str, ...]  # all are there
    rows: Callable[[Fields], list[Fields]]

    def fits(self, fields: Fields) -> bool:
        return all(fields.get(name) is not None for name in self.fields)


def _renamed(names: Mapping[str, str]) -> Callable[[Fields], list[Fields]]:
    """Rows whose columns have other names, {theirs: ours}."""
    return lambda fields: [
        {ours: fields[theirs] for theirs, ours in names.items() if fields.get(theirs) is not None}
    ]


def _nemo(fields: Fields) -> list[Fields]:
    """A line of NeMo-RL's train_data_stepN.jsonl: prompt and answer, padded on the right. Files
    before `token_loss_mask` was written do not say which tokens were sampled."""
    if fields.get("token_loss_mask") is None:
        raise WrongRow("token_loss_mask", "is missing: NeMo-RL writes it since version 0.5")
    if not fields.get("sample_loss_mask", 1):
        raise WrongRow("sample_loss_mask", "is 0: the trainer left the answer out")
    names = {
        "generation_logprobs": "logp_inf",
        "prev_logprobs": "logp_ref",
        "token_loss_mask": "mask",
        "advantages": "advantages",
        "rewards": "reward",
        "token_ids": "token_ids",
    }
    return _renamed(names)(fields)


VERL = {
    "rollout_log_probs": "logp_inf",
    "old_log_probs": "logp_ref",
    "response_mask": "mask",
    "advantages": "advantages",
    "uid": "group",
    "responses": "token_ids",
}
TRL = {
    "sampling_per_token_logps": "logp_inf",
    "old_per_token_logps": "logp_ref",
    "completion_mask": "mask",
    "advantages": "advantages",
    "completion_ids": "token_ids",
}
OPENRLHF = {
    "rollout_log_probs": "logp_inf",
    "action_log_probs": "logp_ref",
    "action_mask": "mask",
    "advantages": "advantages",
}
SKYRL = {
    "rollout_logprobs": "logp_inf",
    "action_log_probs": "logp_ref",
    "loss_mask": "mask",
    "advantages": "advantages",
}
#: in the order in which they are tried
LAYOUTS = (
    Layout("rlcore's schema", REQUIRED, lambda fields: [fields]),
    Layout("NeMo-RL", ("generation_logprobs", "prev_logprobs"), _nemo),
    Layout("verl", ("rollout_log_probs", "old_log_probs"), _renamed(VERL)),
    Layout("TRL", ("sampling_per_token_logps", "old_per_token_logps"), _renamed(TRL)),
    Layout("OpenRLHF", ("rollout_log_probs", "action_log_probs"), _renamed(OPENRLHF)),
    Layout("SkyRL", ("rollout_logprobs", "action_log_probs"), _renamed(SKYRL)),
)
#: dumps that lack a column, known by their fields, and what writes it
LACKING = (
    (
        ("input", "output", "score"),
        "verl's trainer.rollout_data_dir, which holds no log-probs: set "
        "actor_rollout_ref.rollout.calculate_log_probs=True and write rows in its process",
    ),
    (
        ("prompt", "completion", "advantage"),
        "TRL's log of completions, which holds no log-probs: write rows in its process, with "
        "use_vllm=True",
    ),
    (
        ("generation_logprobs", "rewards"),
        "NeMo-RL's without prev_logprobs, the learner's log-probs: use a version that writes them",
    ),
    (
        ("old_log_probs",),
        "verl's without rollout_log_probs, the actor's log-probs: set "
        "actor_rollout_ref.rollout.calculate_log_probs=True",
    ),
    (
        ("sampling_per_token_logps",),
        "TRL's without old_per_token_logps, the learner's log-probs: set "
        "vllm_importance_sampling_correction=True, with which TRL computes them",
    ),
    (
        ("old_per_token_logps",),
        "TRL's without sampling_per_token_logps, the actor's log-probs: set use_vllm=True",
    ),
    (
        ("action_log_probs",),
        "OpenRLHF's or SkyRL's without the actor's log-probs (rollout_log_probs, "
        "rollout_logprobs): set --algo.advantage.is_correction_level token, or "
        "generator.sampling_params.logprobs=1",
    ),
)


def layout_of(fields: Fields, before: Layout | None) -> Layout:
    """The layout of a row, by its fields; else the one of the rows `before`. Raises WrongRow with
    what a known dump lacks, or with the fields that were found."""
    for layout in LAYOUTS if before is None else (before, *LAYOUTS):
        if layout.fits(fields):
            return layout
    if before is not None:
        return before
    names = {name for name, value in fields.items() if value is not None}
    for known, lacking in LACKING:
        if names.issuperset(known):
            raise WrongRow("row", f"is {lacking} ({PAGE})")
    missing = [name for name in REQUIRED if name not in names]
    raise WrongRow(
        "row",
        f"has no column {' and no column '.join(missing)}: it has "
        f"{', '.join(sorted(map(str, names))[:12]) or 'none'}; the columns are listed in {PAGE}",
    )
