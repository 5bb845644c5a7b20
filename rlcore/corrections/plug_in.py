"""Corrections by name inside another trainer, on the log-probs that it has of its sampler and its
learner. docs/plug-ins.md shows it in TRL's GRPOTrainer and in verl.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rlcore.corrections.pipeline import build
from rlcore.corrections.specs import CORRECTIONS, CorrectionSpec
from rlcore.errors import UserError
from rlcore.interfaces import Corrected
from rlcore.lazy import no_grad, torch
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.registry import load_object
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor

#: Corrections that need no more than both log-probs of the sampled tokens and the advantages, and
#: give no more than weights and a mask.
NAMES = ("tis", "mis", "icepop", "veto", "minpro", "vesp", "outliers", "m2po", "opsm", "ais")
LESS = "needs more than two log-probs a token, or gives more than weights and a mask"
VERL = ("verl.trainer.ppo.rollout_corr_helper", "verl.trainer.ppo.v1.trainer_base")
HOOK = "compute_rollout_correction_and_add_to_batch"


class Sum:
    """The reduction over the processes of another trainer, by a function that sums over them. The
    corrections of `NAMES` take no maximum."""

    def __init__(self, total: Callable[[Tensor], Tensor] | None) -> None:
        self._total = total

    def __call__(self, values: Tensor) -> Tensor:
        return values if self._total is None else self._total(values)

    def max(self, values: Tensor) -> Tensor:
        raise ValueError("a correction of another trainer asked for a maximum over processes")


class Corrector:
    """Weights and masks of a list of corrections; weights multiply, masks intersect.

    Example: Corrector({"tis": {"cap": 2.0}, "veto": {}})
    """

    def __init__(
        self,
        corrections: Mapping[str, Mapping[str, Any]],
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`corrections`: settings by name, as the section `correction` of a run has them, in the
        order in which they apply. `reduce`: sums a tensor over the processes that have parts of a
        batch; None: one process has it all. Raises UserError for a correction that needs more than
        a call gives, and for wrong settings."""
        self._reduce = Sum(reduce)
        self._pipeline = build(
            {name: _spec(name, own) for name, own in corrections.items()}, 0, ObjectiveSpec()
        )

    @no_grad
    def __call__(
        self,
        logp_inf: Tensor,
        logp_ref: Tensor,
        mask: Tensor,
        advantages: Tensor,
        groups: Tensor | None = None,
    ) -> Corrected:
        """Weights [B, T] float32 and mask [B, T] bool of a batch, with metrics.

        `logp_inf`, `logp_ref`: [B, T], log-probs of the sampled tokens by the sampler and by the
        learner before the update. `mask`: [B, T], 1 for sampled tokens. `advantages`: [B] or
        [B, T]; tokens of one that is not finite leave, and count in no statistic. `groups`: [B],
        equal for samples of one prompt; None: each is alone. Weights of tokens that leave are 0.
        """
        rows = len(mask)
        own = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(mask)
        on = (mask != 0) & torch.isfinite(own)
        index = torch.arange(rows, device=mask.device)
        step = StepTensors(
            mask=on,
            logp_inf=logp_inf.float(),
            logp_ref=logp_ref.float(),
            logp_new=logp_ref.float(),
            rewards=torch.zeros(rows, dtype=torch.float64, device=mask.device),
            group_ids=index if groups is None else groups,
            advantages=own.float(),
            token_version=torch.zeros_like(on, dtype=torch.int32),
            sample_ids=index,
            step=0,
        )
        found = self._pipeline.correct(step, self._reduce, measure=False)
        found.weight = torch.where(found.mask, found.weight, torch.zeros_like(found.weight))
        return found


def _spec(name: str, own: Mapping[str, Any]) -> CorrectionSpec:
    if name not in NAMES:
        why = f"{name} {LESS}" if name in CORRECTIONS else "it is not a correction of rlcore"
        raise UserError.choice("correction", name, NAMES, why)
    try:
        spec: CorrectionSpec = load_object(CORRECTIONS[name])(**own)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, ("correction", name, *first["loc"])))
        raise UserError(f"{key} is not accepted: {first['msg']}.") from error
    spec.check(f"correction.{name}")
    return spec


def group_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards [B] less the mean of their group [B]: the sign that corrections read. A reward that
    is not finite takes no part in the mean, and stays as it is."""
    _, index = groups.unique(return_inverse=True)
    finite = torch.isfinite(rewards)
    none = torch.zeros(int(index.max()) + 1, dtype=rewards.dtype, device=rewards.device)
    sums = none.index_add(0, index, rewards.where(finite, 0.0))
    count = none.index_add(0, index, finite.to(rewards.dtype))
    return rewards - (sums / count.clamp(min=1.0))[index]


def in_verl(corrector: Corrector) -> Callable[[Any, Any], tuple[Any, dict[str, float]]]:
    """Have verl take its `rollout_is_weights` and `response_mask` from `corrector`.

    verl computes them in its driver, for the whole batch, where `algorithm.rollout_correction` is
    set and `bypass_mode` is false; its own `rollout_is` and `rollout_rs` are not read then.
    Advantages do not exist there yet: rewards less their group's mean stand for them. Returns the
    function that takes the place of verl's `compute_rollout_correction_and_add_to_batch` in this
    process."""

    def correct(batch: Any, config: Any) -> tuple[Any, dict[str, float]]:
        own = batch.batch
        mask = own["response_mask"]
        rewards = (own["token_level_rewards"] * mask).sum(-1)
        names = {uid: i for i, uid in enumerate(dict.fromkeys(batch.non_tensor_batch["uid"]))}
        groups = torch.tensor([names[uid] for uid in batch.non_tensor_batch["uid"]])
        found = corrector(
            own["rollout_log_probs"],
            own["old_log_probs"],
            mask,
            group_advantages(rewards, groups.to(rewards.device)),
            groups.to(rewards.device),
        )
        own["rollout_is_weights"] = found.weight
        own["response_mask"] = mask * found.mask.to(mask.dtype)
        return batch, {f"rollout_corr/{name}": value for name, value in found.metrics.items()}

    setattr(importlib.import_module(VERL[0]), HOOK, correct)
    for name in VERL[1:]:  # has imported the function by its name
        if name in sys.modules:
            setattr(sys.modules[name], HOOK, correct)
    return correct
