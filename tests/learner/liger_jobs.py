"""Optimizer steps of a learner with transformers' layers and with Liger's kernels, one after the
other in this process; prints how far they are apart. Runs with TRITON_INTERPRET=1.

    python liger_jobs.py qwen3|llama FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from learner_helpers import VOCAB, small_model, trained

from rlcore.learner.layer_kernels import liger_layers
from rlcore.learner.policy import load_causal_lm
from rlcore.learner.specs import LoraSpec

CASES = {
    "ZeRO-0": {"zero_stage": 0},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-3": {"zero_stage": 3},
    "recomputed": {"gradient_checkpointing": True},
    "adapters": {"lora": LoraSpec(rank=2)},
}


def make_model(architecture: str, folder: Path) -> str:
    if architecture == "qwen3":
        return small_model(folder / "model")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 66, "intermediate_size": 63, "num_hidden_layers": 2, "head_dim": 16}
    config = LlamaConfig(
        vocab_size=VOCAB, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return str(folder / "model")


class Scalar(float):
    """A float that can be cast, as in compiled kernels; triton's interpreter passes Python's."""

    def to(self, dtype: object) -> "Scalar":
        return self


def as_compiled() -> None:
    """Give kernels in the interpreter what only compiled ones have: numbers that can be cast, the
    square root of CUDA, and frozen weights without a gradient."""
    from liger_kernel.ops import rms_norm
    from triton.language import math
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt
    interpreter._implicit_cvt = lambda a: Scalar(a) if isinstance(a, float) else convert(a)
    # looked up when it is called, since the interpreter replaces it then
    rms_norm.rsqrt = lambda x: math.rsqrt(x)
    backward = rms_norm.rms_norm_backward
    rms_norm.rms_norm_backward = lambda *args, **_: backward(*args, needs_dw=True)


def main(architecture: str, folder: Path) -> None:
    model = make_model(architecture, folder)
    before = dict(load_causal_lm(model, "float32", "sdpa").named_parameters())
    plain = trained(model, CASES, layers="torch")
    as_compiled()
    own = trained(model, CASES, layers="liger")
    lm = load_causal_lm(model, "float32", "sdpa")
    liger_layers(lm)
    moved = max(float((w - before[n].detach()).abs().max()) for n, w in plain["ZeRO-0"].items())
    apart = {
        case: max(float((w - own[case][name]).abs().max()) for name, w in weights.items())
        for case, weights in plain.items()
    }
    replaced = sum("forward" in vars(module) for module in lm.modules())
    print("FOUND" + json.dumps({"apart": apart, "moved": moved, "replaced": replaced}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
