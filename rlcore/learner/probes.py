"""Shortcuts of a learner's passes, each compared with the plain way on the run's own model.

Packed rows, shared prefixes, other kernels, replayed experts and parts of sequences are right for
the architectures that they were written with. Another one may mix positions where nobody looked:
in a recurrent state, a window, a router. So each shortcut that a run would take is tried on a few
tokens as the learner starts. One that differs by more than rounding is left off where the run
leaves the choice, and refused where it was asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.attention.shared_prefix import accept
from rlcore.attention.specs import SparseSpec
from rlcore.errors import UserError
from rlcore.learner.lora import adapted_layers, add_adapters, factors, merged
from rlcore.learner.packing import EpisodeTokens, Layout, MicroBatch, PassCosts, pack
from rlcore.learner.policy import Policy
from rlcore.learner.ranks import Shards
from rlcore.learner.sequences import TokenSequence
from rlcore.learner.specs import LoraSpec
from rlcore.reasons import reason as reason_of

# three answers to one prompt, of which two begin alike; modulo the vocabulary's size
_PROBE = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7), (1, 2, 3, 8, 2, 1, 5))
_PROMPT = 3
_WINDOW = 3  # of a small model whose layers attend to windows, so that the probe passes them
# shares of the largest hidden state by which two ways may differ: rounding
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
CPU = torch.device("cpu")
_ALWAYS = PassCosts(position=1.0, score=0.0, key=0.0, query=0.0)
_WINDOWS = ("sliding_window", "attention_chunk_size")
# kernels raise the first, architectures that are called otherwise the others
_FAILURES = (RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class ShortcutVerdict:
    """Example: ShortcutVerdict("learner.layout=packed", False, "hidden states differ by 1.3")"""

    shortcut: str  # the setting that asks for it, or that may take it
    taken: bool
    found: str  # what the comparison gave

    def __str__(self) -> str:
        return f"{self.shortcut} is {'' if self.taken else 'not '}taken: {self.found}"


def differing(lm: Any, difference: float) -> str | None:
    """The reason against a shortcut whose hidden states differ so, if it is one."""
    if difference <= TOLERANCE[lm.dtype]:
        return None
    return f"hidden states differ by {difference:.2g}"


def apart(found: Tensor, plain: Tensor) -> float:
    """The largest difference of two tensors, as a share of the largest entry of the second."""
    return float((found - plain).abs().max() / plain.abs().max())


# ---- the model that is tried, and what it is tried on --------------------------------------------


def tried_model(lm: Any, *, divided: bool, device: torch.device) -> nn.Module:
    """The model itself, or a small one. It is a small one where its parameters are `divided`, where
    it will be on another `device` than the CPU, or where a few tokens do not fill its windows."""
    if divided or device != CPU or _windowed(lm):
        return short_model(lm).to(device)
    return lm


def _windowed(lm: Any) -> bool:
    config = lm.config.get_text_config()
    return any(getattr(config, name, None) for name in _WINDOWS)


def short_model(lm: Any) -> nn.Module:
    """A random model of the same architecture and attention. It has the first layers up to one of
    every kind, at least two, and windows of three positions where the model has windows.

    States of its layers are near 1 in size, so that what leaks from one position into another is
    larger than rounding.
    """
    config = copy.deepcopy(lm.config)
    text = config.get_text_config()
    whole, count = text.num_hidden_layers, _layers_of_every_kind(lm)
    for name, value in list(vars(text).items()):
        of_layers = isinstance(value, list | tuple) and len(value) == whole
        if of_layers or (isinstance(value, str) and name.endswith("pattern")):
            setattr(text, name, value[:count])
    if text.num_hidden_layers != count:  # some count the entries of such a list
        text.num_hidden_layers = count
    for name in _WINDOWS:
        if getattr(text, name, None):
            setattr(text, name, _WINDOW)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = type(lm)(config).to(lm.dtype)
        for p in model.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
    return model


def _layers_of_every_kind(lm: Any) -> int:
    """How many of a model's first layers hold one of each kind, two or all of fewer."""
    layers = list(getattr(lm.base_model, "layers", ()))
    kinds = list(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    kinds += [None] * (len(layers) - len(kinds))
    parts = [sorted({type(m).__name__ for m in layer.modules()}) for layer in layers]
    made = [(kind, *names) for kind, names in zip(kinds, parts)]
    total = lm.config.get_text_config().num_hidden_layers
    needed = max((made.index(kind) + 1 for kind in set(made)), default=1)
    return min(max(2, needed), total)


def probe(policy: Policy) -> list[EpisodeTokens]:
    """Three short answers to one prompt, of tokens that the policy has."""
    tokens = [[t % policy.head.weight.shape[0] for t in s] for s in _PROBE]
    return [(TokenSequence.of_answer(s[:_PROMPT], s[_PROMPT:]),) for s in tokens]


def laid_out(
    policy: Policy, layout: Layout = "sorted", costs: PassCosts | None = None
) -> MicroBatch:
    """The probe's micro-batch, on the policy's device."""
    device = policy.head.weight.device
    (mb,) = pack(probe(policy), 1000, layout, device=device, costs=costs)
    return mb


def states_of(policy: Policy, mb: MicroBatch) -> Tensor:
    """Hidden states [3, T, D] of the probe's sequences, in their order, in training mode: as the
    model will run, so that random operations show as a difference."""
    with torch.no_grad(), _training(policy.lm):
        dense = mb.dense(policy.hidden(mb), max(map(len, _PROBE)))
    return dense[mb.episodes.argsort()]


@contextmanager
def _training(lm: nn.Module) -> Iterator[None]:
    was = lm.training
    lm.train()
    try:
        yield
    finally:
        lm.train(was)


# ---- packed rows ---------------------------------------------------------------------------------


def against_packing(
    lm: Any, rule: SparseSpec | None = None, *, divided: bool = False, device: torch.device = CPU
) -> str | None:
    """Why the sequences of a micro-batch cannot share one row, or None. `lm` is loaded with the
    attention that it will have."""
    try:
        tried = tried_model(lm, divided=divided, device=device)
        policy = Policy(tried, rule)
        plain = states_of(policy, laid_out(policy))
        return differing(lm, apart(states_of(policy, laid_out(policy, "packed")), plain))
    except _FAILURES as e:
        return reason_of(e)


# ---- shared prefixes -----------------------------------------------------------------------------


def share_prefixes(
    lm: nn.Module,
    rule: SparseSpec | None = None,
    *,
    divided: bool = False,
    device: torch.device = CPU,
) -> str | None:
    """Prepare a model for shared prefixes: loaded with SDPA, or, for a GPU, with torch's
    variable-length kernel; one that attends by `rule` with block top-k attention on top of SDPA.

    Returns None, or the reason why it cannot be prepared and is unchanged. Windows and chunks of
    attention are found in its configuration, everything else in a pass over a few tokens.
    """
    odd = odd_attention(lm)
    if odd is not None:
        return odd
    config: Any = lm.config.get_text_config()  # type: ignore[union-attr, operator]
    before = config._attn_implementation
    try:
        accept(lm)
        policy = Policy(tried_model(lm, divided=divided, device=device), rule)
        plain = states_of(policy, laid_out(policy))
        costs = replace(_ALWAYS, by_mask=device != CPU)
        reason = differing(lm, apart(states_of(policy, laid_out(policy, costs=costs)), plain))
    except _FAILURES as e:
        reason = reason_of(e)
    if reason is not None:
        lm.set_attn_implementation(before)  # type: ignore[operator]
    return reason


def odd_attention(lm: Any) -> str | None:
    """Why a model's attention cannot be replaced by one over whole contexts, if so."""
    config: Any = lm.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    kinds += [k for k in _WINDOWS if getattr(config, k, None)]
    if kinds:
        return f"not every layer attends to the whole context ({kinds[0]})"
    if not getattr(lm, "_supports_attention_backend", False):
        return f"{type(lm).__name__} has its own attention"
    return None


# ---- parts of sequences --------------------------------------------------------------------------

SplitAttention = Callable[[Any, Shards], None]


def hold_in_parts(lm: Any, shards: Shards, split: SplitAttention, device: torch.device) -> None:
    """Prepare a model, whose attention is set, for parts of sequences, in place. Collective. Raises
    UserError for a model that cannot be split. A pass over a few tokens of a random model of its
    kind then shows operations outside of attention that read other positions.
    """
    reason = odd_attention(lm)
    if reason is None:
        plain = short_model(lm).to(device)
        split(lm, shards)
        difference = _split_difference(plain, short_model(lm).to(device), shards)
        if difference > TOLERANCE[lm.dtype]:
            reason = f"its hidden states would differ by {difference:.2g}"
    if reason is not None:
        raise UserError.choice(shards.key, shards.count, ("1",), f"of this model, {reason}")


@torch.no_grad()
def _split_difference(plain: Any, parts: Any, shards: Shards) -> float:
    """Largest difference of a probe's hidden states, as a share of the largest of them."""
    whole, own = Policy(plain), Policy(parts, shards=shards)
    rows = laid_out(whole)
    mine = shards.tokens(shards.padded(rows))
    found = shards.joined(own.hidden(rows), mine, len(rows.targets))
    return apart(found, whole.hidden(rows))


# ---- the head, layers with other kernels, experts, repetition ------------------------------------


def refuse_odd_passes(lm: Any, path: str, *, divided: bool, device: torch.device) -> None:
    """Raise UserError for a model that the learner's passes would compute wrong.

    Its log-probs are not log_softmax(hidden @ weight.T) of its LM head, a second pass gives other
    states, or its attention computes more than the kernel it was loaded with."""
    tried = tried_model(lm, divided=divided, device=device)
    policy = Policy(tried)
    mb = laid_out(policy)
    states = states_of(policy, mb)
    noise = apart(states_of(policy, mb), states)
    # kernels of GPUs add in no fixed order, as over the experts of a mixture
    if noise > (0.0 if device == CPU else TOLERANCE[lm.dtype]):
        raise UserError(
            f"model.path={path} is not supported: two passes over the same tokens differ by "
            f"{noise:.2g}, so that ratios of policies would be "
            "noise; switch off dropout or jitter in its config.json."
        )
    weight = policy.head.weight
    with torch.no_grad(), _training(tried):
        own = tried(input_ids=mb.input_ids, use_cache=False, **_bounds(policy, mb)).logits
        made = policy.hidden(mb).to(weight.dtype) @ weight.t()
    own = own.flatten(0, 1)[mb.predict]
    off = (own.float().log_softmax(-1) - made.float().log_softmax(-1)).abs().max()
    if float(off) > _LOGP_TOLERANCE[lm.dtype]:
        raise UserError(
            f"model.path={path} is not supported: its LM head is not one product with its weights "
            f"(log-probs differ by {float(off):.2g}), as with scaled logits; choose another model."
        )
    _refuse_odd_attention(lm, path, device)


def _refuse_odd_attention(lm: Any, path: str, device: torch.device) -> None:
    """Raise UserError for attention that the model's kernel computes otherwise than transformers'
    eager one, which has every part of it: caps of its logits, sinks."""
    small: Any = short_model(lm).to(device)
    found = states_of(policy := Policy(small), laid_out(policy))
    name = small.config._attn_implementation
    small.set_attn_implementation("eager")
    reason = differing(lm, apart(found, states_of(policy, laid_out(policy))))
    if reason is not None:
        raise UserError(
            f"model.path={path} is not supported: with {name} its attention does not come from "
            f"transformers ({reason}), as with capped attention logits; choose another model."
        )


# nats; bfloat16 rounds logits of size 8 by 1/32
_LOGP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def _bounds(policy: Policy, mb: MicroBatch) -> dict[str, Any]:
    """The inputs of the policy's layers for a micro-batch, in addition to its tokens."""
    return {"position_ids": mb.position_ids, "attention_mask": None, **policy.attending(mb)}


def against_layers(
    lm: Any, change: Callable[[nn.Module], object], device: torch.device
) -> str | None:
    """Why layers that `change` gives other kernels, in place, compute something else than
    transformers' layers, or None: tried on a small model."""
    small = short_model(lm).to(device)
    plain_policy = Policy(small)
    mb = laid_out(plain_policy)
    plain = states_of(plain_policy, mb)
    try:
        change(small)
        return differing(lm, apart(states_of(Policy(small), mb), plain))
    except _FAILURES as e:
        return reason_of(e)


def against_rule(lm: Any, rule: SparseSpec) -> str | None:
    """Why a model on the CPU, loaded for sparse attention, does not attend by a rule, or None. With
    every page kept it computes what dense attention does, and with two pages it does not."""
    small = short_model(lm)
    policy = Policy(small)
    mb = laid_out(policy)
    plain = states_of(policy, mb)
    try:
        pages = {"block_size": 1, "share": None, "blocks_by_length": None, "prompt": "sparse"}
        every, two = (SparseSpec(**(rule.model_dump() | pages | {"blocks": n})) for n in (64, 2))
        all_kept, few_kept = (apart(states_of(Policy(small, r), mb), plain) for r in (every, two))
        reason = differing(lm, all_kept)
        if reason is None and differing(lm, few_kept) is None:
            reason = "its layers attend to everything, whatever the rule keeps"
    except _FAILURES as e:
        reason = reason_of(e)
    return reason


@torch.no_grad()
def against_replay(lm: Any, device: torch.device) -> str | None:
    """Why the choices of a mixture's routers cannot be replayed, or None. With the model's own
    experts a small model of its kind computes the plain pass, with others it does not."""
    from rlcore.learner.parts.replay import NONE, Replay

    small = short_model(lm).to(device)
    replay = Replay(small)
    policy = Policy(small, None, replay)
    mb = laid_out(policy)
    chosen: dict[int, Tensor] = {}
    hooks = [
        router.register_forward_hook(lambda _, __, output, i=i: chosen.update({i: output[2]}))
        for i, router in replay.routers.items()
    ]
    plain = states_of(policy, mb)
    for hook in hooks:
        hook.remove()
    config: Any = small.config
    shape = (*mb.input_ids.shape, config.get_text_config().num_hidden_layers)
    experts = next(iter(replay.routers.values())).weight.shape[0]  # type: ignore[index]
    k = next(iter(chosen.values())).shape[-1]
    own = torch.full((*shape, k), NONE, dtype=torch.int16, device=device)
    for i, ids in chosen.items():
        own[:, :, i] = ids.reshape(*mb.input_ids.shape, k).to(torch.int16)
    others = torch.where(own == NONE, own, (own + 1) % experts)
    replayed, moved = (states_of(policy, replace(mb, routes=r)) for r in (own, others))
    reason = differing(lm, apart(replayed, plain))
    if reason is None and differing(lm, apart(moved, plain)) is None:
        reason = "other experts change nothing"
    return reason


@torch.no_grad()
def against_merging(lm: Any, spec: LoraSpec, device: torch.device) -> str | None:
    """Why weights with adapters merged into them do not compute what the adapted layers do, or
    None: tried on a small model with random adapters."""
    small = short_model(lm).to(device)
    add_adapters(small, spec, seed=0, key="learner.lora")
    layers = adapted_layers(small)
    for layer in layers.values():
        for factor in factors(layer):
            nn.init.normal_(factor, std=factor.shape[1] ** -0.5)
    policy = Policy(small)
    mb = laid_out(policy)
    adapted = states_of(policy, mb)
    for layer in layers.values():
        weight: Any = layer.get_base_layer().weight
        weight.copy_(merged(weight, layer))
        factors(layer)[1].zero_()
    return differing(lm, apart(states_of(policy, mb), adapted))
