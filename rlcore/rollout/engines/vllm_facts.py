"""Facts of vLLM as a rollout engine: the settings that it reads, and its memory. No torch."""

from __future__ import annotations

from typing import ClassVar

from rlcore.engine_facts import EngineFacts
from rlcore.models.sizes import ModelSizes, Parts
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse

# Widths of a head that vLLM's attention has on CPU.
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


class VllmFacts(EngineFacts):
    """vLLM reads every setting of an actor."""

    reads: ClassVar[frozenset[str]] = frozenset(ActorSpec.engine_settings)
    provides: ClassVar[frozenset[str]] = frozenset(
        {"adapters", "group transports", "expert routes", "sleep", "bits"}
    )
    cpu_heads: ClassVar[tuple[int, ...]] = CPU_HEADS

    @classmethod
    def refuse(cls, spec: ActorSpec, key: str) -> None:
        _check_runner(spec, key)
        _check_speculation(spec, key)
        refuse(
            spec.activations != "none" and not spec.eager,
            f"{key}.activations={spec.activations} rounds between vLLM's modules, which {key}."
            "enforce_eager=false compiles as one: leave it null.",
        )

    @classmethod
    def actor_memory(
        cls, sizes: ModelSizes, spec: ActorSpec, *, bucket_bytes: float, max_len: int
    ) -> Parts:
        """Least bytes on the GPU of one rank of an engine: its weights, a sequence of the longest
        kind, and the buckets of weights that arrive."""
        width = 1.0 if spec.kind == "fp8" and spec.rounding == "none" else 2.0
        if spec.compute_dtype == "float32":
            width = 4.0
        keys = sizes.key_bytes(max_len, 1 if spec.fp8_kv_cache else 2)
        return {
            "weights": width * sizes.parameters / spec.tensor_parallel,
            "keys of one sequence": keys / spec.tensor_parallel,
            "arriving weights": 2 * max(bucket_bytes, sizes.largest * 2),
        }


def _check_runner(actor: ActorSpec, key: str) -> None:
    for name, wanted, why in (
        ("second_runner", actor.second_runner, "the second runner's kernels are written for GPUs"),
        ("async_scheduling", actor.async_scheduling, "vLLM schedules ahead on GPUs only"),
    ):
        refuse(
            bool(wanted) and actor.on_cpu,
            f"{key}.{name}=true cannot be combined with {key}.num_gpus=0: {why}, so leave it null "
            f"or set {key}.num_gpus=1.",
        )
        refuse(
            bool(wanted) and bool(actor.wrong_logits),
            f"{key}.{name}=true cannot be combined with {key}.{actor.wrong_logits}="
            f"{getattr(actor, actor.wrong_logits or 'logit_noise'):g}, which is put on the logits "
            "of the first runner, so leave it null.",
        )


def _check_speculation(actor: ActorSpec, key: str) -> None:
    """Beside a model that proposes, only what a test has shown to leave the distribution right."""
    if actor.speculate is None:
        return
    wrong = actor.wrong_logits or "logit_noise"
    for name, used, why in (
        ("kind", actor.kind not in ("bf16", "fp8"), "proposals are accepted by a dense policy"),
        ("tensor_parallel", actor.tensor_parallel > 1, "it is not proven over several ranks"),
        ("second_runner", bool(actor.second_runner), "it is proven on vLLM's first runner"),
        ("async_scheduling", bool(actor.async_scheduling), "it is not proven so"),
        ("fp8_kv_cache", actor.fp8_kv_cache, "it is not proven so"),
        ("activations", actor.activations != "none", "it is not proven so"),
        (wrong, bool(actor.wrong_logits), "vLLM then puts no errors on the logits"),
    ):
        value = getattr(actor, name)
        shown = str(value).lower() if isinstance(value, bool) else value
        refuse(
            used,
            f"{key}.speculate cannot be combined with {key}.{name}={shown}: {why}, so leave "
            f"{key}.speculate null or {name} at its default.",
        )
