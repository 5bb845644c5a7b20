"""The causal LM as the learner runs it: the base model up to its last hidden state, then the chunked head pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from rlcore.attention.block_topk import BlockTopK
from rlcore.attention.learner import SparseRows, register
from rlcore.errors import UserError
from rlcore.learner.head import Head, HeadSpec, KlTarget
from rlcore.learner.packing import MicroBatch
from rlcore.types import TokenScores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Attention = Literal["sdpa", "flash_attention_2"]


def load_causal_lm(path: str | Path, dtype: str, attention: Attention, *, sparse: bool = False) -> nn.Module:
    """A local Hugging Face causal LM in `dtype`, able to attend sparsely too if `sparse`.

    Raises UserError where its head is not a plain linear map.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    if not Path(path).is_dir():
        raise UserError(f"model.path={path} is not a folder: give a local Hugging Face model folder.")
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=DTYPES[dtype],
            attn_implementation=register(attention) if sparse else attention,
            local_files_only=True,
            use_safetensors=True,  # another format would be unpickled
        )
    except OSError as e:
        raise UserError(f"model.path={path} holds no loadable model: {str(e).splitlines()[0]}") from e
    except ImportError as e:
        raise UserError.choice("learner.attention", attention, ("sdpa",), str(e).splitlines()[0]) from e
    odd = [k for k in ("final_logit_softcapping", "logit_scale", "logits_scaling") if getattr(lm.config, k, None)]
    if odd or getattr(lm.get_output_embeddings(), "bias", None) is not None:
        raise UserError(f"model.path={path} is not supported: its LM head has {odd[0] if odd else 'a bias'}.")
    return lm


def sparse_rows(mb: MicroBatch, rule: BlockTopK) -> SparseRows:
    """How sparse attention is to read a micro-batch: several right-padded rows, or one of packed sequences."""
    length = mb.input_ids.shape[1]
    cu_seqlens = None
    if mb.input_ids.shape[0] == 1:
        cu_seqlens = [*torch.nonzero(mb.position_ids[0] == 0)[:, 0].tolist(), length]
    prompt_lens = None
    if not rule.sparse_prompt:
        first = mb.predict[mb.column == 0] if len(mb.sequences) else mb.predict
        prompt_lens = (mb.position_ids.flatten()[first] + 1).tolist()
    return SparseRows(rule, prompt_lens, cu_seqlens)


class Policy(nn.Module):
    """Hidden states of the response positions only go through the head; logits of a whole batch never exist."""

    def __init__(self, lm: nn.Module, sparse: BlockTopK | None = None) -> None:
        """`sparse`: the rule that every forward attends by; `lm` must have been loaded for it."""
        super().__init__()
        self.lm, self.sparse = lm, sparse
        self.head = Head(lm.get_output_embeddings().weight)  # type: ignore[operator]

    def hidden(self, mb: MicroBatch) -> Tensor:
        """[N, D]: the state that predicts each response token."""
        base = self.lm.base_model
        how = {} if self.sparse is None else {"sparse_rows": sparse_rows(mb, self.sparse)}
        states = base(  # type: ignore[operator]
            input_ids=mb.input_ids, position_ids=mb.position_ids, attention_mask=None, use_cache=False, **how
        ).last_hidden_state
        return states.flatten(0, 1).index_select(0, mb.predict)

    def forward(self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec, base: KlTarget | None = None) -> tuple:
        """KL to `base` or None, then the fields of TokenScores in order, all [N] or [N, k].

        ids [N, k'] int64 are the actor's top ids; base is another policy at the same positions.
        """
        return self.head(self.hidden(mb), mb.targets, ids, spec, base)


class FrozenPolicy:
    """The starting policy that KL is taken to: whole on every rank, without gradients."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.requires_grad_(False).eval()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights (Hugging Face names, tied ones once). Raises KeyError for a name that is missing."""
        for name, p in self.policy.lm.named_parameters():
            p.copy_(tensors[name])

    @torch.no_grad()
    def forward(self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec) -> TokenScores:
        """Scores of a micro-batch."""
        return TokenScores(*self.policy(mb, ids, spec)[1:])

    @torch.no_grad()
    def base(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        """What the full KL needs: hidden states [N, D] of the response positions and the head weight [V, D]."""
        return self.policy.hidden(mb), self.policy.head.weight
