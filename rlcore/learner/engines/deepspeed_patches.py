"""Every attribute of torch, transformers, PEFT and DeepSpeed that rlcore replaces. Imports none of
them."""

from __future__ import annotations

from rlcore.patching import Patch

# of modules of transformers that were found to compute what its replacement computes
NORM = Patch(
    "torch.nn:Module",
    "forward",
    "to compute norms in fewer passes over memory",
    ("2.11.", "2.13."),
)
_LIGER = "to compute it by one kernel of Liger"
# of MLPs whose activation is SiLU
SWIGLU = Patch("torch.nn:Module", "forward", _LIGER, ("2.11.", "2.13."))
ROTARY_QWEN3 = Patch(
    "transformers.models.qwen3.modeling_qwen3", "apply_rotary_pos_emb", _LIGER, ("5.19.",)
)
ROTARY_LLAMA = Patch(
    "transformers.models.llama.modeling_llama", "apply_rotary_pos_emb", _LIGER, ("5.19.",)
)
ADAPTED_LINEAR = Patch(
    "peft.tuners.lora:Linear",
    "forward",
    "to round the merged weight as it is rounded when it is published",
    ("0.21.",),
)
MOMENTS_LINKED = Patch(
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
    "_hp_optimizer_states_linked",
    "to find the moments of a checkpoint",
    ("0.19.",),
)
PATCHES = (NORM, SWIGLU, ROTARY_QWEN3, ROTARY_LLAMA, ADAPTED_LINEAR, MOMENTS_LINKED)
