"""Ways in which the policy's layers compute: rounded as an actor's, by other libraries' kernels, in
products of FP8 numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore.config.parts.part_facts import PartFacts
from rlcore.config.schema import RunConfig
from rlcore.spec import refuse


class RoundingPart(PartFacts):
    """`learner.round_as`: exactly as the actor that it names."""

    name, without = "rounding learner", "round_as=null"

    def setting(self, c: RunConfig) -> str:
        return f"learner.round_as={c.learner.round_as}" if c.learner.round_as else ""

    def check_used(self, c: RunConfig) -> None:
        label, key = c.learner.round_as, self.setting(c)
        rounding = [name for name, actor in c.actor.items() if actor.rounding != "none"]
        actor = c.actor.get(label or "")
        refuse(
            actor is None or actor.rounding == "none",
            f"{key} is not an actor of this run with emulated rounding: set "
            f"actor.{label}.rounding, or choose one of {', '.join(rounding) or 'none'} (of vLLM's "
            "own FP8 the learner would have to repeat the kernels).",
        )
        assert actor is not None
        for whose, spec in (("learner", c.learner), (f"actor.{label}", actor)):
            refuse(
                spec.compute_dtype != "float32",
                f"{key} is exact in float32, and {whose} computes in {spec.compute_dtype}: use "
                f"{whose}.dtype=float32, or round_as=null.",
            )
        refuse(
            actor.activations != "none",
            f"{key} rounds weights alone, and actor.{label}.activations={actor.activations} rounds "
            "what its layers read: use activations=none, or round_as=null.",
        )
        refuse(
            actor.target is not None and actor.target.moves == "layers",
            f"{key} rounds the same layers throughout, and actor.{label}.target.moves=layers "
            "changes them: move something else, or use round_as=null.",
        )

    def job(self, c: RunConfig) -> Mapping[str, Any]:
        return {"rounding": c.actor[c.learner.round_as or ""].alone}

    def unplanned(self, c: RunConfig, *, by_gpu: bool) -> str:
        if not (by_gpu and self.setting(c)):
            return ""
        return (
            f"{self.setting(c)} cannot be planned by gpu=, which knows no time of rounding: give "
            "rates=FILE, of a run that rounds, or plan with round_as=null."
        )

    def plain(self, c: RunConfig) -> RunConfig:
        learner = c.learner.model_copy(update={"round_as": None})
        return c.model_copy(update={"learner": learner})


class LigerPart(PartFacts):
    """`learner.layers=liger`."""

    name, without = "Liger's layers", "layers=torch"
    with_experts = True

    def setting(self, c: RunConfig) -> str:
        return "learner.layers=liger" if c.learner.layers == "liger" else ""

    def check_used(self, c: RunConfig) -> None:
        refuse(
            c.learner.num_gpus == 0,
            "learner.layers=liger is of GPU kernels, and learner.num_gpus=0: use "
            "learner.layers=torch.",
        )


class CompiledPart(PartFacts):
    """`learner.layers=compiled`."""

    name, without = "compiled layers", "layers=torch"
    with_experts = True

    def setting(self, c: RunConfig) -> str:
        return "learner.layers=compiled" if c.learner.layers == "compiled" else ""


class Fp8Part(PartFacts):
    """`learner.fp8`: products of FP8 numbers need a dtype that has them."""

    name, without = "FP8 products", "fp8=none"

    def setting(self, c: RunConfig) -> str:
        return f"learner.fp8={c.learner.fp8}" if c.learner.fp8 != "none" else ""

    def check_used(self, c: RunConfig) -> None:
        learner = c.learner
        refuse(
            learner.num_gpus > 0 and learner.compute_dtype == "float32",
            f"{self.setting(c)} gives products in the model's dtype, and learner.dtype="
            f"{learner.dtype} is float32, which GPUs' FP8 products lack: use "
            "learner.dtype=bfloat16, or fp8=none.",
        )
