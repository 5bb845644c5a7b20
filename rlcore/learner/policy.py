"""The causal LM as the learner runs it: the base model up to its last hidden state, then the chunked head pass."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from rlcore.errors import UserError
from rlcore.learner.head import Head, HeadSpec
from rlcore.learner.packing import MicroBatch
from rlcore.types import TokenScores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Attention = Literal["sdpa", "flash_attention_2"]


def load_causal_lm(path: str | Path, dtype: str, attention: Attention) -> nn.Module:
    """A local Hugging Face causal LM in `dtype`. Raises UserError where its head is not a plain linear map."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    if not Path(path).is_dir():
        raise UserError(f"model.path={path} is not a folder: give a local Hugging Face model folder.")
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=DTYPES[dtype], attn_implementation=attention, local_files_only=True
        )
    except OSError as e:
        raise UserError(f"model.path={path} holds no loadable model: {str(e).splitlines()[0]}") from e
    except ImportError as e:
        raise UserError.choice("learner.attention", attention, ("sdpa",), str(e).splitlines()[0]) from e
    odd = [k for k in ("final_logit_softcapping", "logit_scale", "logits_scaling") if getattr(lm.config, k, None)]
    if odd or getattr(lm.get_output_embeddings(), "bias", None) is not None:
        raise UserError(f"model.path={path} is not supported: its LM head has {odd[0] if odd else 'a bias'}.")
    return lm


class Policy(nn.Module):
    """Hidden states of the response positions only go through the head; logits of a whole batch never exist."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        self.head = Head(lm.get_output_embeddings().weight)  # type: ignore[operator]

    def hidden(self, mb: MicroBatch) -> Tensor:
        """[N, D]: the state that predicts each response token."""
        base = self.lm.base_model
        states = base(  # type: ignore[operator]
            input_ids=mb.input_ids, position_ids=mb.position_ids, attention_mask=None, use_cache=False
        ).last_hidden_state
        return states.flatten(0, 1).index_select(0, mb.predict)

    def forward(
        self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec, base: tuple[Tensor, Tensor] | None = None
    ) -> tuple:
        """Full KL to `base` or None, then the fields of TokenScores in order, all [N] or [N, k].

        ids [N, k'] int64 are the actor's top ids; base, a frozen policy's hidden states [N, D'] and head weight.
        """
        return self.head(self.hidden(mb), mb.targets, ids, spec, base)


class FrozenPolicy:
    """The starting policy that KL is taken to: whole on every rank, without gradients."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.requires_grad_(False).eval()

    @torch.no_grad()
    def forward(self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec) -> TokenScores:
        """Scores of a micro-batch."""
        return TokenScores(*self.policy(mb, ids, spec)[1:])

    @torch.no_grad()
    def base(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        """What the full KL needs: hidden states [N, D] of the response positions and the head weight [V, D]."""
        return self.policy.hidden(mb), self.policy.head.weight
