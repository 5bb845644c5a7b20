"""Log-probs that the engine's are held against: the learner's own path, on weights (and for FP8
activations, keys and values) rounded as the engine rounds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from setting import Row, Setting

E4M3_MAX = 448.0
# mean |dlogp| up to which engine and learner agree whatever the model: float32, and a bfloat16
# loop on a small model
LIMITS = {"cpu": 1e-3, "cuda": 0.05}


class Reference:
    """The learner's forward (its attention, then `head_pass`) for one kind of actor."""

    def __init__(
        self, s: Setting, kind: str, *, model: str | None = None, precise: bool = False
    ) -> None:
        """`kind`: an actor's, or dense: the plain one; `precise`: in float32 throughout."""
        from transformers import AutoModelForCausalLM

        from rlcore.attention.implementation import register
        from rlcore.attention.varlen import register_varlen

        self._s, self._kind = s, kind
        self._varlen = not s.small and not precise and kind in ("bf16", "dense")
        attention = register_varlen() if self._varlen else register()
        if kind == "fp8 + fp8 kv":
            attention = _register_plain("fp8_kv", _e4m3)
        elif precise and not kind.startswith("sparse"):
            attention = _register_plain("float32", torch.Tensor.float)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model or s.model,
            dtype=torch.float32 if precise else s.dtype,
            attn_implementation=attention,
        ).to(s.device)
        if kind.startswith("fp8"):  # on the device: the host takes minutes to round a real shape
            round_linears(self._model)
            if not s.small:  # the emulation on CPU rounds weights alone
                round_activations(self._model)
        self._model.eval()

    @torch.no_grad()
    def logp(self, t: Any) -> torch.Tensor:
        """[S] float32 on the CPU: log-probs of a trajectory's sampled tokens."""
        from rlcore.learner.lm_head import HeadSpec, head_pass
        from rlcore.learner.specs import LearnerSpec

        n = len(t.prompt_ids)
        ids = torch.tensor(t.token_ids, device=self._s.device).long()[None]
        places = torch.arange(ids.shape[1], device=self._s.device)[None]
        hidden = self._model.model(
            input_ids=ids, position_ids=places, use_cache=False, **self._extra(n, places)
        ).last_hidden_state[0, n - 1 : -1]
        spec = HeadSpec(1.0, LearnerSpec().head_chunk_tokens)
        return head_pass(hidden, self._model.lm_head.weight, ids[0, n:], spec).logp.float().cpu()

    def _extra(self, prompt: int, places: torch.Tensor) -> Row:
        from rlcore.attention.implementation import SparseRows
        from rlcore.attention.varlen import Sequences

        if self._kind.startswith("sparse"):
            return {"sparse_rows": SparseRows(self._s.rule_of(self._kind), [prompt])}
        return {"sequences": Sequences.of(places)} if self._varlen else {}

    def gaps(self, samples: list[Any]) -> Row:
        """|log-prob of the actor - reference| over the samples' tokens: mean and largest."""
        found = torch.cat([(self.logp(t) - torch.tensor(t.logp_inf)).abs() for t in samples])
        return {"mean |dlogp|": float(found.mean()), "max |dlogp|": float(found.max())}


class Judge:
    """Whether an actor agrees with the learner, by what rounding alone explains.

    Random weights of a deep model turn the rounding of bfloat16 into differences that no fixed
    limit fits, most of all where pages are selected by scores that nearly tie. So the learner's
    path is also computed in float32: an actor as precise as the learner's path differs from it by
    at most the two errors together, about twice the learner's own.
    """

    def __init__(self, s: Setting, kind: str, *, model: str | None = None) -> None:
        self._learner = Reference(s, kind, model=model)
        # on the CPU everything is float32 already
        self._exact = None if s.small else Reference(s, kind, model=model, precise=True)

    def row(self, samples: list[Any], speeds: Row | None = None) -> Row:
        """The gaps of some samples, with `speeds` where they are small enough."""
        gaps, largest = self._learner.gaps(samples), LIMITS["cpu"]
        if self._exact is not None:
            own = [(self._learner.logp(t) - self._exact.logp(t)).abs() for t in samples]
            gaps["learner's to float32"] = float(torch.cat(own).mean())
            gaps["actor's to float32"] = self._exact.gaps(samples)["mean |dlogp|"]
            largest = max(largest, 2 * gaps["learner's to float32"])
        return where_they_agree(gaps, largest, speeds or {})


def where_they_agree(gaps: Row, largest: float, speeds: Row) -> Row:
    """A row of speeds with its gaps, the speeds withheld where they would be of something else."""
    if gaps["mean |dlogp|"] <= largest:
        return gaps | speeds
    return gaps | {"speed": f"withheld: mean |dlogp| is above {largest:g}"}


@torch.no_grad()
def round_linears(model: Any) -> None:
    """Round linear weights through E4M3, one scale a fused tensor, and keep them dequantised."""
    from rlcore.weights.rounding import round_weights
    from rlcore.weights.specs import RoundingSpec

    params = dict(model.named_parameters())
    for name, rounded in round_weights(params, RoundingSpec(rounding="fp8")).items():
        params[name].copy_(rounded)


def round_activations(model: Any) -> None:
    """Round the inputs of the linears in the layers through E4M3, one scale a token, as vLLM's FP8
    with dynamic scales does."""

    def rounded(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = inputs[0].float()
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
        return ((_e4m3(x / scale) * scale).to(inputs[0].dtype), *inputs[1:])

    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _register_plain(name: str, rounded: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """SDPA on queries, keys and values rounded in some way: E4M3 for FlashAttention 3's FP8 cache
    with its scale of 1."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from rlcore.attention.varlen import no_mask

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        group = query.shape[1] // key.shape[1]
        q, k, v = (rounded(x.float()).to(x.dtype) for x in (query, key, value))
        # for float32, torch's kernels without the whole matrix of scores take no groups
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=kwargs.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, no_mask)
    return name
