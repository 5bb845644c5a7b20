"""A group's prompt computed once gives what computing it for every response gives."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_helpers import (
    SHARED,
    PlainEngine,
    make_batch,
    make_groups,
    make_job,
    make_update,
    small_model,
)
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

from rlcore.attention import varlen
from rlcore.attention.shared_tree import SharedTree
from rlcore.attention.specs import SparseSpec
from rlcore.learner import build
from rlcore.learner.batch import PolicyScores
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.lora import add_adapters
from rlcore.learner.packing import PassCosts, PrefixTree, pack
from rlcore.learner.policy import Policy, load_causal_lm
from rlcore.learner.probes import share_prefixes
from rlcore.learner.sequences import TokenSequence
from rlcore.learner.specs import LoraSpec
from rlcore.types import TokenScores

_SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 40}
_MLP = {"intermediate_size": 48, "num_key_value_heads": 1}
_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 40, "n_positions": 32}
_NO_DROP = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

TOKEN = st.integers(3, 14)
# a few letters only, so that responses begin alike or are equal
RESPONSE = st.lists(st.integers(3, 5), min_size=1, max_size=8)
PROMPT = st.lists(TOKEN, min_size=1, max_size=6)


@st.composite
def _parts(draw, prompt):
    """An episode: an answer, a dialogue of two turns, or one in two parts that begin alike."""
    answer = draw(RESPONSE)
    one = TokenSequence.of_answer(prompt, answer)
    kind = draw(st.sampled_from(["answer", "turns", "parts"]))
    if kind == "answer":
        return (one,)
    later, last = draw(PROMPT), draw(RESPONSE)
    if kind == "parts":
        kept = [*prompt, *answer[: draw(st.integers(0, len(answer)))]]
        return (one, TokenSequence.of_answer([*kept, *later], last))
    sampled = np.repeat([False, True] * 2, [len(prompt), len(answer), len(later), len(last)])
    return (TokenSequence(np.array([*prompt, *answer, *later, *last]), sampled),)


@st.composite
def _share(draw):
    """Groups, of which some prompts are prefixes of others; episodes in any order."""
    first = draw(PROMPT)
    prompts = [first, *draw(st.lists(st.one_of(PROMPT, PROMPT.map(lambda p: first + p))))][:4]
    episodes = [e for p in prompts for e in draw(st.lists(_parts(p), min_size=1, max_size=5))]
    return draw(st.permutations(episodes))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _policy(path):
    lm = load_causal_lm(path, "float32", "sdpa")
    assert share_prefixes(lm) is None
    return Policy(lm.train())


def _in_float64(*, lora=False, checkpointing=False):
    """A model whose norms do not round to float32."""
    torch.manual_seed(0)
    config = transformers.Starcoder2Config(**_SMALL, **_MLP)
    lm = transformers.AutoModelForCausalLM.from_config(config)
    assert share_prefixes(lm) is None
    if lora:
        add_adapters(lm, LoraSpec(rank=3), seed=1, key="learner.lora")
        for p in lm.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.1)
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(lm.double().train())


def _hidden(policy, batches, width):
    """Hidden states [B, T, D] of all sampled tokens, and gradients of a fixed function of them."""
    policy.zero_grad()
    total = sum(len(mb.episodes) for mb in batches)
    dim = policy.head.weight.shape[1]
    out = torch.zeros(total, width, dim, dtype=policy.head.weight.dtype)
    toward = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    for mb in batches:
        states = policy.hidden(mb)
        (states * mb.flat(toward)).sum().backward()
        out[mb.episodes[mb.row], mb.column] = states.detach()
    return out, {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


def _apart(found, expected):
    """Distance of two lists of tensors as a share of the length of the second."""
    return float(
        torch.stack([(a - b).norm() for a, b in zip(found, expected)]).norm()
        / torch.stack([b.norm() for b in expected]).norm()
    )


@pytest.mark.parametrize("how", [{}, {"lora": True}, {"checkpointing": True}])
def test_states_and_gradients_are_those_of_the_plain_way(how):
    policy = _in_float64(**how)

    @settings(max_examples=30, deadline=None)
    @given(episodes=_share(), budget=st.sampled_from([1, 12, 30, 1000]))
    def check(episodes, budget):
        width = max(sum(s.scored for s in parts) for parts in episodes)
        plain, gradients = _hidden(policy, pack(episodes, budget, "sorted"), width)
        batches = pack(episodes, budget, "sorted", costs=SHARED)
        shared, its_gradients = _hidden(policy, batches, width)
        assert _apart(shared, plain) < 1e-13
        assert gradients.keys() == its_gradients.keys()
        assert _apart(list(its_gradients.values()), list(gradients.values())) < 1e-13

    check()


BY_MASK = replace(SHARED, by_mask=True)
# what the device of a model is compared with is the CPU without a number: this one is another
OTHER_CPU = torch.device("cpu", 0)


@pytest.fixture
def flex_gradients(monkeypatch):
    """torch refuses gradients on CPUs by this check alone; its plain implementation has them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", [{}, {"lora": True}, {"checkpointing": True}])
def test_one_mask_over_the_tree_gives_states_and_gradients_of_the_plain_way(how, flex_gradients):
    policy = _in_float64(**how)
    dialogue = np.repeat([False, True] * 2, [20, 5, 4, 6])
    tokens = [*_group(20, 1, 1)[0][0].token_ids[:20], *range(3, 15), 5, 6, 7]
    episodes = [*_group(20, 11, 8), (TokenSequence(np.array(tokens), dialogue),), *_group(7, 9, 3)]
    plain, gradients = _hidden(policy, pack(episodes, 1000, "sorted"), 11)
    for budget in (60, 1000):
        batches = pack(episodes, budget, "sorted", costs=BY_MASK)
        assert all(isinstance(mb.shared, SharedTree) for mb in batches)
        shared, its_gradients = _hidden(policy, batches, 11)
        assert _apart(shared, plain) < 1e-13
        assert gradients.keys() == its_gradients.keys()
        assert _apart(list(its_gradients.values()), list(gradients.values())) < 1e-13


def test_the_packed_kernel_of_gpus_goes_on_beside_one_mask(model, monkeypatch, flex_gradients):
    """`varlen`, whose kernel CPUs lack: SDPA on each sequence in its place."""

    def kernel(q, k, v, bounds, *_, scale, window_size, enable_gqa):
        parts = []
        for a, z in pairwise(bounds.tolist()):
            one = (x[a:z].transpose(0, 1)[None] for x in (q, k, v))
            how = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
            parts.append(scaled_dot_product_attention(*one, **how)[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    lm = load_causal_lm(model, "float32", "varlen")
    assert share_prefixes(lm, device=OTHER_CPU) is None
    dense = Policy(load_causal_lm(model, "float32", "sdpa").train())
    episodes, policy = _group(20, 11, 4), Policy(lm.train())
    plain, gradients = _hidden(dense, pack(episodes, 1000, "sorted"), 11)
    for costs in (None, BY_MASK):
        states, its_gradients = _hidden(policy, pack(episodes, 1000, "packed", costs=costs), 11)
        assert _apart(states, plain) < 1e-5
        assert _apart(list(its_gradients.values()), list(gradients.values())) < 1e-5


def test_a_gpu_whose_mask_gives_other_states_computes_every_prompt_anew(model, monkeypatch):
    def wrong(self, q, k, v, scaling):
        return q.transpose(1, 2)

    monkeypatch.setattr(SharedTree, "attend", wrong)
    lm = load_causal_lm(model, "float32", "sdpa")
    assert "hidden states differ" in share_prefixes(lm, device=OTHER_CPU)
    monkeypatch.setattr(SharedTree, "attend", lambda *_: torch.zeros(2) @ torch.zeros(3))
    assert "size" in share_prefixes(lm, device=OTHER_CPU)


def test_one_mask_gathers_nothing_and_costs_a_score_for_each_pair():
    batches = pack(_group(50, 2, 100), 200, "sorted", costs=BY_MASK)
    assert max(len(mb.episodes) for mb in batches) > 100 - 15  # of which some are equal
    costs = PassCosts(position=1.0, score=0.5, key=9.0, query=9.0, by_mask=True)
    tree = PrefixTree.of([s for (s,) in [*_group(3, 2, 1), *_group(3, 2, 1)]])
    assert costs.shared(tree) == 4 + 0.5 * (1 + 2 + 3 + 4)


def _scores(policy, groups, costs):
    batch = make_batch(groups, 60, costs=costs)
    spec = HeadSpec(0.7, 1024, topk=4, safe_set_rho=0.01)
    ids = batch.sent.topk_ids_inf
    parts = [(mb, TokenScores(*policy(mb, mb.flat(ids), spec)[1:])) for mb in batch.micro]
    return batch, PolicyScores.collect(batch.sent.mask.shape, parts, torch.device("cpu"))


def test_scores_are_those_of_the_plain_way(model):
    policy = _policy(model)
    with torch.no_grad():  # distributions far from flat, so that no ranks are ties
        policy.head.weight.add_(0.3 * torch.randn(policy.head.weight.shape))
    groups = make_groups(6, samples=5)
    _, plain = _scores(policy, groups, None)
    batch, shared = _scores(policy, groups, SHARED)
    assert all(mb.shared is not None for mb in batch.micro) and len(batch.micro) > 1
    for name in ("logp", "entropy", "topk_logp", "logp_at_ids", "coverage"):
        torch.testing.assert_close(
            getattr(shared, name), getattr(plain, name), atol=2e-6, rtol=1e-6
        )
    assert torch.equal(shared.topk_ids, plain.topk_ids) and torch.equal(shared.inside, plain.inside)


@pytest.mark.parametrize(
    "options",
    [
        {"corrections": {"tis": {}}, "entropy_coef": 0.01},
        {"corrections": {"jackpot": {}, "veto": {}}},
        {"corrections": {"dvp": {"rho": 0.02}, "mis": {}}},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_estimator": "full", "corrections": {"rapid": {}}},
        {"loss": "gspo", "ref_pass": "always"},
    ],
)
@pytest.mark.parametrize("tokens", [40, 10_000])
def test_a_step_s_gradient_is_that_of_the_plain_way(model, options, tokens):
    results = []
    for costs in (None, SHARED):
        update = make_update(model, **options)
        for policy in (update.engine.policy, *([update.frozen.policy] if update.frozen else [])):
            assert share_prefixes(policy.lm) is None
        batch = make_batch(make_groups(4), tokens, costs=costs)
        assert all((mb.shared is not None) == (costs is not None) for mb in batch.micro)
        update.prepare([batch], first=True)
        found = update.run(batch, 0, first=True)
        results.append((update.engine.gradients(), found.metrics))
    (plain, metrics), (shared, its_metrics) = results
    norm = torch.stack([g.norm() for g in plain.values()]).norm()
    apart = torch.stack([(shared[name] - g).norm() for name, g in plain.items()]).norm()
    assert norm > 0.01 and apart / norm < 1e-6
    assert its_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def _group(prompt, response, samples, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 15, prompt)
    return [
        (TokenSequence.of_answer(tokens, rng.integers(3, 15, response)),) for _ in range(samples)
    ]


def test_a_prompt_is_computed_once_in_each_micro_batch():
    episodes = _group(20, 11, 8)
    (mb,) = pack(episodes, 1000, "sorted", costs=SHARED)
    assert 20 + 8 * 9 < mb.tokens <= 20 + 8 * 10
    split = pack(episodes, 60, "sorted", costs=SHARED)
    assert [len(mb.episodes) for mb in split] == [4, 4]
    assert all(20 + 4 * 9 < mb.tokens <= 60 for mb in split)


def test_what_attention_reads_again_is_bounded():
    batches = pack(_group(50, 2, 100), 200, "sorted", costs=SHARED)
    assert max(len(mb.episodes) for mb in batches) == 4 * 200 // 51


@pytest.mark.parametrize(
    ("prompt", "response", "samples", "shared"),
    [(7, 8, 8, True), (300, 120, 8, True), (7, 8, 1, False), (2, 900, 2, False)],
)
def test_prefixes_are_shared_where_that_is_less_work(model, prompt, response, samples, shared):
    costs = PassCosts.of(load_causal_lm(model, "float32", "sdpa"))
    batches = pack(_group(prompt, response, samples), 10_000, "sorted", costs=costs)
    assert [mb.shared is not None for mb in batches] == [shared] * len(batches)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("Llama", _SMALL | _MLP, None),
        ("Qwen2", _SMALL | _MLP, None),
        ("Qwen3", _SMALL | _MLP | {"head_dim": 16}, None),
        ("Mistral", _SMALL | _MLP | {"sliding_window": None}, None),
        ("Mistral", _SMALL | _MLP | {"sliding_window": 4}, "whole context"),
        ("Gemma2", _SMALL | _MLP | {"head_dim": 16}, "whole context"),
        ("GPT2", _GPT2 | _NO_DROP, None),
        ("GPT2", _GPT2, "dropout"),
        ("Bloom", {"n_layer": 2, "hidden_size": 32, "n_head": 2, "vocab_size": 40}, "its own"),
        ("Mamba", {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 40}, "whole context"),
    ],
)
def test_a_model_is_asked_whether_its_attention_follows(kind, options, reason):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options)
    lm = transformers.AutoModelForCausalLM.from_config(config)
    before, training = lm.config._attn_implementation, lm.training
    found = share_prefixes(lm)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")
    assert reason is None or lm.config._attn_implementation == before
    assert lm.training == training


def test_a_model_that_mixes_neighbours_outside_its_attention_shares_nothing():
    """As a short convolution does: a row's neighbours are not those of a tree of prefixes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_SMALL, **_MLP)
    lm = transformers.AutoModelForCausalLM.from_config(config)
    before = lm.config._attn_implementation
    lm.model.layers[0].mlp.register_forward_hook(lambda _, args, out: out + args[0].roll(1, 1))
    assert "hidden states differ" in share_prefixes(lm)
    assert lm.config._attn_implementation == before


@pytest.mark.parametrize(
    ("options", "may"),
    [
        ({}, True),
        ({"lora": {}, "gradient_checkpointing": True, "zero_stage": 3}, True),
        ({"share_prefix": "off"}, False),
        ({"train_sparse": True, "sparse": SparseSpec(blocks=2)}, True),
        ({"distill": {}, "sparse": SparseSpec(blocks=2)}, True),
        ({"distill": {}, "sparse": SparseSpec(blocks=2, prompt="dense")}, False),
        ({"num_gpus": 1, "dtype": "float32"}, True),
        ({"num_gpus": 1, "attention": "varlen"}, True),
        ({"num_gpus": 1, "attention": "fa4"}, True),
        ({"num_gpus": 1, "attention": "flash_attention_2"}, False),
        ({"num_gpus": 1, "train_sparse": True, "sparse": SparseSpec(blocks=2)}, False),
        ({"num_gpus": 1, "distill": {}, "sparse": SparseSpec(blocks=2)}, False),
    ],
)
def test_prompts_are_shared_where_attention_follows_a_tree(options, may):
    models = build._Models(make_job("nowhere", **options), PlainEngine, None, torch.device("cpu"))
    assert models._may_share() == may
