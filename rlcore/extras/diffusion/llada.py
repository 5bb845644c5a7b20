"""The architecture of LLaDA (arXiv 2502.09992), a masked-diffusion language model: a Llama without
the causal mask. Written here, so that the remote code of its folders is never run.

Weights have the names of LLaDA's own folders, which load as they are. Importing this module
registers the architecture with transformers' AutoConfig and AutoModelForCausalLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from rlcore.extras.diffusion.folder import MODEL_TYPE
from rlcore.models.specs import FreshModelSpec


class LladaConfig(PreTrainedConfig):
    """LLaDA's config.json under its own keys; `folder.py` says which values are supported."""

    model_type = MODEL_TYPE
    attribute_map = {  # noqa: RUF012  # transformers reads it from the class
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "num_hidden_layers": "n_layers",
    }
    d_model: int = 128
    n_heads: int = 4
    n_kv_heads: int | None = None
    n_layers: int = 4
    mlp_hidden_size: int = 384
    vocab_size: int = 64
    max_sequence_length: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    weight_tying: bool = False
    mask_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: int | None = None
    initializer_range: float = 0.02


class LladaBlock(GradientCheckpointingLayer):
    """Attention over a whole sequence, in both directions, and a gated MLP."""

    def __init__(self, config: LladaConfig) -> None:
        super().__init__()
        width, inner, eps = config.d_model, config.mlp_hidden_size, config.rms_norm_eps
        self.head_dim = width // config.n_heads
        keys = (config.n_kv_heads or config.n_heads) * self.head_dim
        self.attn_norm = nn.RMSNorm(width, eps=eps)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_norm = nn.RMSNorm(width, eps=eps)
        self.ff_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.ff_out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """x [R, W, D]; `turns`: cosines and sines [R, 1, W, head_dim]. mask [R, 1, W, W] bool, True
        where a position attends to another, or None: to all of its row."""
        x = x + self.attn_out(self._attend(self.attn_norm(x), turns, mask))
        normed = self.ff_norm(x)
        return x + self.ff_out(silu(self.ff_proj(normed)) * self.up_proj(normed))

    def _attend(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        rows, width, _ = x.shape

        def heads(values: Tensor) -> Tensor:
            return values.view(rows, width, -1, self.head_dim).transpose(1, 2)

        q, k = (_turned(heads(p(x)), turns) for p in (self.q_proj, self.k_proj))
        out = scaled_dot_product_attention(
            q, k, heads(self.v_proj(x)), attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).reshape(rows, width, -1)


def _turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions, in float32 like LLaDA (rope_full_precision)."""
    cos, sin = turns
    whole = x.float()
    a, b = whole.chunk(2, dim=-1)
    return (whole * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


class LladaStack(nn.Module):
    """Embedding, blocks and last norm; holds the head, whose weight LLaDA's folders keep here."""

    def __init__(self, config: LladaConfig) -> None:
        super().__init__()
        self.config = config
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(config.vocab_size, config.d_model),
            "blocks": nn.ModuleList(LladaBlock(config) for _ in range(config.n_layers)),
            "ln_f": nn.RMSNorm(config.d_model, eps=config.rms_norm_eps),
        }
        if not config.weight_tying:
            parts["ff_out"] = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.transformer = nn.ModuleDict(parts)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        segments: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        """input_ids [R, W]. `segments` [R, W]: positions attend to positions of their row with the
        same number; None: to all. Further arguments of causal models are accepted and not read."""
        x = self.transformer["wte"](input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        turns, mask = self._turns(position_ids), None
        if segments is not None:
            mask = (segments[:, None, :, None] == segments[:, None, None, :]).contiguous()
        for block in self.transformer["blocks"].children():
            x = block(x, turns, mask)
        return BaseModelOutput(last_hidden_state=self.transformer["ln_f"](x))

    def _turns(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        size = self.config.d_model // self.config.n_heads
        steps = torch.arange(0, size, 2, device=position_ids.device, dtype=torch.float32) / size
        angles = position_ids[:, None, :, None].float() / self.config.rope_theta**steps
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


class LladaForMaskedDiffusion(PreTrainedModel):
    """The model with its head: logits of a position are of the token at that position."""

    config_class = LladaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["LladaBlock"]  # noqa: RUF012

    def __init__(self, config: LladaConfig) -> None:
        # what is saved again is no remote code's
        vars(config).pop("auto_map", None)
        super().__init__(config)
        self.model = LladaStack(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.transformer["wte"]

    def get_output_embeddings(self) -> nn.Module:
        parts = self.model.transformer
        return parts["wte"] if self.config.weight_tying else parts["ff_out"]

    def forward(self, input_ids: Tensor, **kwargs: Any) -> MaskedLMOutput:
        """Logits [R, W, V]; arguments as of `LladaStack`."""
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        head: Any = self.get_output_embeddings()
        return MaskedLMOutput(logits=hidden @ head.weight.t())


def fresh_llada(spec: FreshModelSpec, tokenizer: Any, max_len: int) -> LladaForMaskedDiffusion:
    """Random weights of the sizes of `spec`; `max_len`: positions."""
    config = LladaConfig(
        vocab_size=spec.vocab_size or len(tokenizer),
        d_model=spec.hidden_size,
        n_layers=spec.layers,
        n_heads=spec.heads,
        n_kv_heads=spec.kv_heads,
        mlp_hidden_size=spec.intermediate_size,
        max_sequence_length=max_len,
        weight_tying=spec.tie_embeddings,
        mask_token_id=tokenizer.mask_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    return LladaForMaskedDiffusion(config)


AutoConfig.register(MODEL_TYPE, LladaConfig, exist_ok=True)
AutoModelForCausalLM.register(LladaConfig, LladaForMaskedDiffusion, exist_ok=True)
