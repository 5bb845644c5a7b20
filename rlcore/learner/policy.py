"""The LM as the learner runs it: the base model up to its last hidden state, then the
chunked head pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from rlcore.attention.shared_prefix import NO_MASK, SHARED_PREFIX
from rlcore.attention.specs import SparseSpec
from rlcore.attention.varlen import NAMES as PACKED
from rlcore.attention.varlen import Sequences, register_fa4, register_varlen
from rlcore.errors import UserError
from rlcore.files import not_here
from rlcore.learner.lm_head import Head, HeadSpec, KlTarget
from rlcore.learner.packing import MicroBatch
from rlcore.learner.ranks import Shards
from rlcore.learner.recurrent import ARGUMENT as ROWS
from rlcore.learner.recurrent import SequenceRows, separate
from rlcore.models.folder import refuse_odd_logits, register_architecture, without_dropout
from rlcore.reasons import message_of
from rlcore.types import TokenScores

if TYPE_CHECKING:
    from rlcore.attention.implementation import SparseRows
    from rlcore.learner.parts.replay import Replay
    from rlcore.learner.parts.rounded import RoundedLayers
    from rlcore.learner.split_loading import Split

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Attention = Literal["sdpa", "varlen", "fa4", "flash_attention_2"]
# before the name of an attention, where it exchanges the positions that other ranks hold
IN_PARTS = "in_parts_"


def load_causal_lm(
    path: str | Path,
    dtype: str,
    attention: Attention,
    *,
    sparse: bool = False,
    split: Split | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """A local Hugging Face LM in `dtype`, able to attend sparsely too if `sparse`.

    `split`: each of its parameters is divided among the ranks as it is read, on `device`, where the
    folder names them as transformers does. Dropout of its configuration is set to 0, in exports as
    well. Raises UserError for a folder without a model, or a model whose head is not a plain linear
    map.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    register_architecture(path)
    if not Path(path).is_dir():
        raise UserError(
            f"model.path={path} is not a folder: give a local Hugging Face model folder; "
            f"{not_here(str(path), 'model')}."
        )
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        without_dropout(config)
        implementation = _implementation(attention, sparse)
        lm = None
        if split is not None:
            config.dtype = DTYPES[dtype]
            config._attn_implementation = implementation
            lm = _load_split(path, config, split, device or torch.device("cpu"))
        if lm is None:
            lm = AutoModelForCausalLM.from_pretrained(
                str(path),
                config=config,
                dtype=DTYPES[dtype],
                attn_implementation=implementation,
                local_files_only=True,
                use_safetensors=True,  # another format would be unpickled
            )
    except OSError as e:
        said = message_of(str(e))
        raise UserError(f"model.path={path} holds no loadable model: {said}") from e
    except ImportError as e:
        said = message_of(str(e))
        raise UserError.choice("learner.attention", attention, ("sdpa",), said) from e
    except ValueError as e:  # of no causal model, or of one without this attention
        said = message_of(str(e)).split(". ")[0].rstrip(".")
        raise UserError(
            f"model.path={path} cannot be loaded as a causal model with learner.attention="
            f"{attention}: {said}; choose another model."
        ) from e
    refuse_odd_logits(path, config.get_text_config().to_dict())
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:  # type: ignore[operator]
        raise UserError(
            f"model.path={path} is not supported: its LM head has a bias; choose another model."
        )
    return lm


def _load_split(
    path: str | Path, config: Any, split: Split, device: torch.device
) -> nn.Module | None:
    """The divided model, or None where each rank has to read it whole."""
    from rlcore.learner.split_loading import UnsplitNamesError, load_split

    try:
        return load_split(path, config, split, device)
    except UnsplitNamesError as e:
        logger.info("The engine reads the whole model in every rank: %s", e)
        return None


def _implementation(attention: Attention, sparse: bool) -> str:
    """The name of an attention in transformers."""
    if sparse:
        from rlcore.attention.implementation import register

        return register(attention)
    packed = {"varlen": register_varlen, "fa4": register_fa4}
    return packed[attention]() if attention in packed else attention


# families whose masks transformers makes without positions: packed sequences would attend to others
_WITHOUT_POSITIONS = ("granitemoehybrid",)


def sparse_rows(mb: MicroBatch, rule: SparseSpec) -> SparseRows:
    """How sparse attention reads a micro-batch: several right-padded rows, or one of packed
    sequences."""
    from rlcore.attention.implementation import SparseRows

    cu_seqlens = None
    if mb.input_ids.shape[0] == 1:
        found = mb.starts or torch.nonzero(mb.position_ids[0] == 0)[:, 0].tolist()
        cu_seqlens = [*found, mb.input_ids.shape[1]]
    prompt_lens = mb.prompt_lens if rule.needs_prompts else None
    rules = None if mb.page_rules is None else [rule.under(own) for own in mb.page_rules]
    return SparseRows(rule, prompt_lens, cu_seqlens, rules)


def _packed_mask(positions: Tensor, starts: Sized | None) -> Tensor | None:
    """[1, 1, W, W] bool, of one row of packed sequences: what each position attends to; None for a
    single sequence, which is plainly causal."""
    sequence = (positions == 0).cumsum(0)
    if (int(sequence[-1]) if starts is None else len(starts)) <= 1:
        return None
    same = sequence[:, None] == sequence[None, :]
    return same.tril()[None, None]


class Policy(nn.Module):
    """An LM of which only the positions that predict a sampled token go through the head:
    logits of a whole batch never exist."""

    def __init__(
        self,
        lm: nn.Module,
        sparse: SparseSpec | None = None,
        replay: Replay | None = None,
        shards: Shards | None = None,
        rounded: RoundedLayers | None = None,
    ) -> None:
        """`sparse`: the rule that every forward attends by; `lm` must have been loaded for it.
        `replay`: of its routers; None: it chooses experts by itself. `shards`: the ranks that hold
        parts of the sequences; its attention must exchange them. `rounded`: its layers that compute
        with rounded weights."""
        super().__init__()
        self.rounded = rounded
        self.lm = lm
        self.sparse = sparse
        self.shards = shards
        self.replay = replay
        self.recurrent = separate(lm)
        self.head = Head(lm.get_output_embeddings().weight)  # type: ignore[operator]

    def hidden(self, mb: MicroBatch) -> Tensor:
        """[N, D]: the state that predicts each sampled token, times its `sharper`: the head, which
        knows one temperature, then gives log-probs at the one that sampled the token. With
        `shards`, [n, D] for the tokens predicted on this rank."""
        if self.shards is None:
            return self._hidden(mb, self.attending(mb))
        whole = self.shards.padded(mb)
        return self._hidden(self.shards.own(whole), self.attending(whole))

    def _hidden(self, mb: MicroBatch, attending: dict[str, Any]) -> Tensor:
        base = self.lm.base_model
        replayed = self.replay is not None and mb.routes is not None
        routing = {"routes": mb.routes} if replayed else {}
        states = base(  # type: ignore[operator]
            input_ids=mb.input_ids,
            position_ids=mb.position_ids,
            use_cache=False,
            # no mask: padding is at the right, and positions separate packed sequences
            **{"attention_mask": None, **attending, **routing},
        ).last_hidden_state
        predicting: Tensor = states.flatten(0, 1).index_select(0, mb.predict)
        return predicting if mb.sharper is None else predicting * mb.sharper[:, None]

    def attending(self, mb: MicroBatch) -> dict[str, Any]:
        """Arguments of the model's forward pass that tell its layers of a micro-batch's sequences,
        made once for all of them."""
        rows = None
        if self.recurrent and mb.shared is None:
            rows = SequenceRows.of(mb.position_ids, mb.starts)
        told = {} if rows is None else {ROWS: rows}
        return told | self._attending(mb)

    def _attending(self, mb: MicroBatch) -> dict[str, Any]:
        if mb.segments is not None:
            return {"segments": mb.segments}
        name: Any = self.lm.config._attn_implementation  # type: ignore[union-attr]
        implementation = name.removeprefix(IN_PARTS)
        if mb.shared is not None:
            if not implementation.startswith(SHARED_PREFIX):
                raise RuntimeError(f"{implementation} attention takes no shared prefixes")
            dtype, rule = self.head.weight.dtype, self.sparse
            rows = mb.shared.ready(dtype) if rule is None else mb.shared.by(rule)
            return {"shared_prefix": rows, "attention_mask": NO_MASK}
        implementation = implementation.removeprefix(SHARED_PREFIX)
        if self.sparse is not None:
            return {"sparse_rows": sparse_rows(mb, self.sparse)}
        if implementation in PACKED:
            return {"sequences": Sequences.of(mb.position_ids, mb.starts)}
        if implementation == "flash_attention_2" and mb.input_ids.shape[0] == 1:
            # otherwise transformers finds them in the positions, in every layer again
            s = Sequences.of(mb.position_ids, mb.starts)
            bounds = {"cu_seq_lens_q": s.bounds, "cu_seq_lens_k": s.bounds}
            return {**bounds, "max_length_q": s.longest, "max_length_k": s.longest}
        if self.shards is not None and mb.input_ids.shape[0] == 1:
            # transformers would make it of the positions that this rank has
            return {"whole_mask": _packed_mask(mb.position_ids[0], mb.starts)}
        kind = self.lm.config.model_type  # type: ignore[union-attr]
        if kind in _WITHOUT_POSITIONS and mb.input_ids.shape[0] == 1:
            return {"attention_mask": _packed_mask(mb.position_ids[0], mb.starts)}
        return {}

    def forward(
        self,
        mb: MicroBatch,
        ids: Tensor | None,
        spec: HeadSpec | None,
        base: KlTarget | None = None,
    ) -> Any:
        """KL to `base` or None, then the fields of TokenScores in order, all [N] or [N, k].

        ids [N, k'] int64 are the actor's top ids; base is another policy at the same positions,
        with `shards` at this rank's positions. Without `spec`, the states `hidden` alone.
        """
        hidden = self.hidden(mb)
        if spec is None:
            return hidden
        if not spec.fp32:  # a product with `sharper` is float32
            hidden = hidden.to(self.head.weight.dtype)
        if self.shards is None:
            return self.head(hidden, mb.targets, ids, spec, base)
        mine = self.shards.tokens(self.shards.padded(mb))
        own_ids = None if ids is None else ids[mine]
        scores = self.head(hidden, mb.targets[mine], own_ids, spec, base)
        count = len(mb.targets)
        return tuple(None if s is None else self.shards.joined(s, mine, count) for s in scores)


class FrozenPolicy:
    """The starting policy that KL is taken to, without gradients: whole on every rank, unless the
    training engine divides it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.requires_grad_(False).eval()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace these weights (Hugging Face names, tied ones once).

        Raises KeyError for a name that the policy lacks.
        """
        # tied weights appear once among the parameters, as they do in what is published
        held = dict(self.policy.lm.named_parameters())
        for name, tensor in tensors.items():
            held[name].copy_(tensor)

    @torch.no_grad()
    def forward(self, mb: MicroBatch, ids: Tensor | None, spec: HeadSpec) -> TokenScores:
        """Scores of a micro-batch."""
        return TokenScores(*self.policy(mb, ids, spec)[1:])

    @torch.no_grad()
    def base(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the inputs of the full KL: hidden states [N, D] of the predicting positions, and
        the head's weight [V, D]."""
        return self.policy.hidden(mb), self.policy.head.weight
