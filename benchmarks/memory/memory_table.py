"""Peak memory by role for models of 1.5B to 70B, counted on meta tensors; and what real ranks of a
small model hold beside what is counted for them.

    python -m benchmarks.memory.memory_table [--check]

The table needs no weights: shapes come from models on torch's meta device, bytes from
`learner/engines/deepspeed_facts.py`. Learners are ranks on GPUs in bfloat16, recomputed activations
and micro-batches of 16,384 tokens, the numbers GiB. `--check`: ranks on CPU, one and two, train a
model of 3M parameters at every stage, and the largest sum of live tensor storages is compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import table
from rlcore.learner.engines.deepspeed_facts import learner_host, learner_rank
from rlcore.learner.engines.deepspeed_specs import OffloadSpec
from rlcore.learner.specs import LearnerSpec
from rlcore.models.sizes import GIB, ModelSizes, total
from rlcore.rollout.engines.vllm_facts import VllmFacts
from rlcore.rollout.specs import ActorSpec
from rlcore.weights.experts import single_shapes

BUCKET = 512 << 20
OFFLOAD = OffloadSpec(optimizer="cpu", parameters="cpu")
COMMON = {"vocab_size": 151_936, "max_position_embeddings": 40_960}
# hidden, inner, layers, heads, key heads, head width, tied
MODELS = {
    "1.5B": (1536, 8960, 28, 12, 2, 128, True),
    "8B": (4096, 12_288, 36, 32, 8, 128, False),
    "32B": (5120, 25_600, 64, 64, 8, 128, False),
    "70B": (8192, 28_672, 80, 64, 8, 128, False),
}
RANKS = {"1.5B": (1, 4), "8B": (4, 8), "32B": (8, 12, 32), "70B": (16, 32, 64)}


def sizes(name: str) -> ModelSizes:
    """Of one of `MODELS`, of the Qwen3 architecture."""
    from transformers import Qwen3Config

    hidden, inner, layers, heads, keys, width, tied = MODELS[name]
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=width,
        tie_word_embeddings=tied,
        **COMMON,
    )
    return ModelSizes.of(config.to_dict(), meta_shapes(config))


def meta_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every weight of the causal LM of a transformers configuration,
    tied ones once, as a model folder names them."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    lm.tie_weights()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, p in lm.named_parameters():
        shapes |= single_shapes(name, tuple(p.shape))
    return shapes


def rows() -> list[dict[str, Any]]:
    """A row for each model and number of learner ranks."""
    found = []
    for name, counts in RANKS.items():
        one = sizes(name)
        for ranks in counts:
            spec = LearnerSpec(
                ranks=ranks,
                num_gpus=1,
                zero_stage=3,
                gradient_checkpointing=True,
                micro_batch_tokens=16_384,
            )
            other = spec.model_copy(update={"zero_stage": 2})
            moved = spec.model_copy(update={"offload": OFFLOAD})
            actor = ActorSpec(num_gpus=1, tensor_parallel=1 if name in ("1.5B", "8B") else 4)
            found.append(
                {
                    "model": f"{name} ({one.parameters / 1e9:.1f}e9)",
                    "learner ranks": ranks,
                    "rank, ZeRO-2": total(learner_rank(one, other)) / GIB,
                    "rank, ZeRO-3": total(learner_rank(one, spec)) / GIB,
                    "with KL": total(learner_rank(one, spec, kl=True)) / GIB,
                    "offloaded": total(learner_rank(one, moved)) / GIB,
                    "rank's host": total(learner_host(one, spec, bucket_bytes=BUCKET)) / GIB,
                    "offloaded host": total(learner_host(one, moved, bucket_bytes=BUCKET)) / GIB,
                    "engine rank": total(
                        VllmFacts.actor_memory(one, actor, bucket_bytes=BUCKET, max_len=16_384)
                    )
                    / GIB,
                    "engine GPUs": actor.tensor_parallel,
                }
            )
    return found


def checked() -> list[dict[str, Any]]:
    """Counted and held, of every stage and dtype, on one rank and on two."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "learner"))
    from memory_jobs import compared

    return [
        {
            "ranks": world,
            "stage": stage,
            "dtype": dtype,
            "offload": where,
            "counted": counted,
            "held": held,
        }
        for world in (1, 2)
        for (stage, dtype, where), (counted, held) in compared(world).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="also run small models")
    args = parser.parse_args()
    print(table(rows()))
    if args.check:
        found = checked()
        for row in found:
            row["counted - held"] = f"{row['counted'] / row['held'] - 1:+.1%}"
        print(f"\nMiB of live tensors:\n\n{table(found)}")


if __name__ == "__main__":
    main()
