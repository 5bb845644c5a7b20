"""Whether a model may compute the common prefixes of its sequences once: asked of the model itself,
by running it in both ways."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.attention.shared_prefix import UnsharedAttentionError, accept
from rlcore.attention.specs import SparseSpec
from rlcore.learner.costs import PassCosts
from rlcore.learner.packing import EpisodeTokens, MicroBatch, pack
from rlcore.learner.policy import Policy
from rlcore.learner.sequences import TokenSequence

# three answers to one prompt, of which two begin alike; modulo the vocabulary's size
_PROBE = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7), (1, 2, 3, 8, 2, 1, 5))
_PROMPT = 3
# shares of the largest hidden state by which the two ways may differ: rounding
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
_ALWAYS = PassCosts(position=1.0, score=0.0, key=0.0, query=0.0)


def share_prefixes(
    lm: nn.Module, rule: SparseSpec | None = None, *, divided: bool = False
) -> str | None:
    """Prepare a model that was loaded with SDPA for shared prefixes; one that attends by `rule`
    with block top-k attention beside SDPA.

    Returns None, or why it cannot be: then it is as before. Windows and chunks of attention are
    found in its configuration, everything else in a pass over a few tokens. `divided`: its
    parameters are not whole here, so that a random model with the first layers of its kind answers
    for it.
    """
    odd = odd_attention(lm)
    if odd is not None:
        return odd
    config: Any = lm.config.get_text_config()  # type: ignore[union-attr, operator]
    before = config._attn_implementation
    try:
        accept(lm)
        difference = _difference(short_model(lm) if divided else lm, rule)
    except (UnsharedAttentionError, TypeError, ValueError) as e:
        reason = str(e).splitlines()[0]
    else:
        if difference <= TOLERANCE[lm.dtype]:  # type: ignore[index]
            return None
        reason = f"hidden states differ by {difference:.2g}"
    lm.set_attn_implementation(before)  # type: ignore[operator]
    return reason


def odd_attention(lm: Any) -> str | None:
    """Why a model's attention cannot be replaced by one over whole contexts, if so."""
    config: Any = lm.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    kinds += [k for k in ("sliding_window", "attention_chunk_size") if getattr(config, k, None)]
    if kinds:
        return f"not every layer attends to the whole context ({kinds[0]})"
    if not getattr(lm, "_supports_attention_backend", False):
        return f"{type(lm).__name__} has an attention of its own"
    return None


def short_model(lm: Any) -> nn.Module:
    """A random model of the same architecture with at most two layers, attending alike."""
    config = copy.deepcopy(lm.config)
    config.num_hidden_layers = min(2, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(lm)(config).to(lm.dtype)


@torch.no_grad()
def _difference(lm: nn.Module, rule: SparseSpec | None) -> float:
    """Largest difference of a probe's hidden states, as a share of the largest of them."""
    policy = Policy(lm, rule)
    episodes = probe(policy)
    (plain_rows,) = pack(episodes, 1000, "sorted")
    (shared_row,) = pack(episodes, 1000, "sorted", costs=_ALWAYS)
    with _training(lm):
        plain, shared = _states(policy, plain_rows), _states(policy, shared_row)
    return float((plain - shared).abs().max() / plain.abs().max())


def probe(policy: Policy) -> list[EpisodeTokens]:
    """Three short answers to one prompt, of tokens that the policy has."""
    tokens = [[t % policy.head.weight.shape[0] for t in s] for s in _PROBE]
    return [(TokenSequence.of_answer(s[:_PROMPT], s[_PROMPT:]),) for s in tokens]


def _states(policy: Policy, mb: MicroBatch) -> Tensor:
    """Hidden states [3, T, D] in the order of the probe's sequences."""
    dense = mb.dense(policy.hidden(mb), max(map(len, _PROBE)))
    return dense[mb.episodes.argsort()]


@contextmanager
def _training(lm: nn.Module) -> Iterator[None]:
    """In training mode, as the model will be: what is random there shows as a difference."""
    was = lm.training
    lm.train()
    try:
        yield
    finally:
        lm.train(was)
