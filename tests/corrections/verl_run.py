"""A batch through verl's hook with the page's module, and through verl's own weights:
`verl_run.py`, with verl and the module my_corrections on the path. Run by test_verl.py."""

from __future__ import annotations

import json

import torch
from verl import DataProto  # imports my_corrections
from verl.trainer.ppo import rollout_corr_helper as helper

from rlcore.corrections.plug_in import Corrector, in_verl
from rlcore.dumps.rows import write

rng = torch.Generator().manual_seed(0)
inf = -3 * torch.rand(6, 5, generator=rng) - 0.1
ref = inf + torch.randn(6, 5, generator=rng)
mask = (torch.arange(5) < torch.tensor([5, 4, 3, 5, 2, 1])[:, None]).long()
rewards = torch.zeros(6, 5)
rewards[:, 0] = torch.tensor([1.0, 0, 1, 1, 0, 0])


def batch() -> DataProto:
    return DataProto.from_dict(
        tensors={
            "rollout_log_probs": inf,
            "old_log_probs": ref,
            "response_mask": mask.clone(),
            "token_level_rewards": rewards,
        },
        non_tensors={"uid": ["a", "a", "b", "b", "c", "c"]},
    )


def own(threshold: object) -> torch.Tensor:
    """verl's own weights."""
    made = helper.compute_rollout_correction_weights(ref - inf, mask, "token", threshold)[0]
    return made * mask


def hooked() -> tuple[DataProto, dict[str, float]]:
    return helper.compute_rollout_correction_and_add_to_batch(batch(), {})


# the columns of docs/diagnose.md
own_rows = batch().batch
write(
    "rows.jsonl",
    logp_inf=own_rows["rollout_log_probs"],
    logp_ref=own_rows["old_log_probs"],
    mask=own_rows["response_mask"],
    advantages=own_rows["token_level_rewards"].sum(-1),
)
paged, metrics = hooked()  # the page's: tis with cap 2 and a veto
veto = (((ref - inf).exp() >= 1e-4) | (mask == 0)).all(-1, keepdim=True)
found = {
    "page": float((paged.batch["rollout_is_weights"] - own(2.0) * veto).abs().max()),
    "mask": bool((paged.batch["response_mask"] == mask * veto).all()),
    "metrics": sorted(metrics),
}
for name, settings, threshold in (
    ("tis", {"cap": 1.5}, 1.5),
    ("icepop", {"low": 0.5, "high": 2.0}, "0.5_2.0"),
):
    in_verl(Corrector({name: settings}))
    weights = hooked()[0].batch["rollout_is_weights"]
    found[name] = float((weights - own(threshold)).abs().max())
    found[name + " moved"] = float((weights - mask).abs().max())
in_verl(Corrector({"ais": {}}))
found["ais"] = float((hooked()[0].batch["rollout_is_weights"] - mask).abs().max())
print("RESULT" + json.dumps(found))
