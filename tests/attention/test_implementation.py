"""The learner's attention against a token-by-token reference, and inside a transformers model."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlcore.attention.block_topk import page_budget
from rlcore.attention.implementation import SparseRows, attend_rows, register
from rlcore.attention.specs import SparseSpec
from rlcore.errors import UserError
from rlcore.types import PageRule

SPARSE = SparseSpec(block_size=4, blocks=3)


def tensors(b=2, heads=4, kv_heads=2, t=37, d=8, dtype=torch.float32):
    gen = torch.Generator().manual_seed(3)
    return [
        torch.randn(b, h, t, d, generator=gen, dtype=dtype) for h in (heads, kv_heads, kv_heads)
    ]


def reference(query, key, value, rule, prompt_lens=None):
    """One query and head at a time, straight from the definition."""
    out = torch.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    bs = rule.block_size
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            kv = h // group
            for t in range(query.shape[2]):
                own, chooser = t // bs, t
                if prompt_lens is not None and rule.prompt == "block" and t < prompt_lens[b]:
                    chooser = t // rule.prompt_block * rule.prompt_block
                after = set(range(chooser // bs, own + 1))
                own = chooser // bs
                mean_query = query[b, kv * group : (kv + 1) * group, chooser].mean(0)
                budget = int(page_budget(rule, torch.tensor(own + 1)))
                score = {
                    j: float(mean_query @ key[b, kv, j * bs : (j + 1) * bs].mean(0))
                    for j in range(1, own)
                }
                kept = {
                    0,
                    *after,
                    *sorted(score, key=lambda j: (-score[j], j))[: max(0, budget - 2)],
                }
                dense = prompt_lens is not None and rule.prompt == "dense" and t < prompt_lens[b]
                seen = [s for s in range(t + 1) if dense or s // bs in kept]
                p = torch.softmax(key[b, kv, seen] @ query[b, h, t] / math.sqrt(query.shape[-1]), 0)
                out[b, h, t] = p @ value[b, kv, seen]
    return out


@pytest.mark.parametrize(
    "rule",
    [
        SPARSE,
        SparseSpec(block_size=4, share=0.4),
        SparseSpec(block_size=4, blocks=2, prompt="dense"),
        SparseSpec(block_size=4, blocks=2, prompt="block", prompt_block=12),
        SparseSpec(block_size=4, share=0.4, prompt="block", prompt_block=8),
        SparseSpec(block_size=4, blocks=3, prompt="block", prompt_block=4),
        SparseSpec(block_size=4, blocks=100),
    ],
)
@pytest.mark.parametrize("chunk", [512, 7])
def test_forward_is_the_definition(rule, chunk, monkeypatch):
    monkeypatch.setattr("rlcore.attention.implementation.QUERY_CHUNK", chunk)
    q, k, v = tensors()
    prompts = [5, 32]
    got = attend_rows(q, k, v, SparseRows(rule, prompts))
    torch.testing.assert_close(got, reference(q, k, v, rule, prompts), atol=2e-6, rtol=1e-5)


def test_what_follows_a_block_of_a_prompt_changes_nothing_in_it():
    """The first position of a block chooses: a cached prefix serves every continuation."""
    rule = SparseSpec(block_size=4, blocks=2, prompt="block", prompt_block=12)
    q, k, v = tensors(b=1)
    whole = attend_rows(q, k, v, SparseRows(rule, [37]))
    for length in (26, 31):
        part = attend_rows(*(x[:, :, :length] for x in (q, k, v)), SparseRows(rule, [length]))
        torch.testing.assert_close(part, whole[:, :, :length])
    alone = attend_rows(q, k, v, SparseRows(SparseSpec(block_size=4, blocks=2)))
    first = torch.arange(37) % 12 == 0  # which chooses as every position does without blocks
    torch.testing.assert_close(whole[:, :, first], alone[:, :, first])
    assert not torch.allclose(whole, alone, atol=1e-2)


def test_gradient_is_that_of_attention_over_the_kept_pages():
    q, k, v = tensors(b=1, t=18, d=4, dtype=torch.float64)
    for x in (q, k, v):
        x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: attend_rows(*x, SparseRows(SPARSE)), (q, k, v), eps=1e-6, atol=1e-6
    )
    (grad,) = torch.autograd.grad(attend_rows(q, k, v, SparseRows(SPARSE))[0, :, 17].sum(), v)
    used = (grad.abs().sum(-1) > 0)[
        0
    ]  # [kv head, position]: 2 + 4 + 4 keys of page 0, the best page and the own one
    assert used.sum(-1).tolist() == [10, 10] and bool(used[:, [0, 1, 2, 3, 16, 17]].all())


@pytest.mark.parametrize("own", [None, (None, PageRule(1, 8, (2, 3)), PageRule(2, 4, (4,)))])
@pytest.mark.parametrize("prompt", ["dense", "block"])
def test_packed_and_padded_rows_equal_single_ones(own, prompt):
    """Also where every sequence was sampled by a rule of its own."""
    q, k, v = tensors(b=3, t=40)
    lens, prompts = [40, 17, 29], [6, 9, 23]
    rule = SparseSpec(block_size=4, blocks=2, prompt=prompt, prompt_block=8)
    rules = None if own is None else [rule.under(o) for o in own]
    alone = [
        attend_rows(
            *(x[i : i + 1, :, :n] for x in (q, k, v)),
            SparseRows(rule if rules is None else rules[i], [p]),
        )
        for i, (n, p) in enumerate(zip(lens, prompts))
    ]
    padded = attend_rows(q, k, v, SparseRows(rule, prompts, rules=rules))
    pack = [torch.cat([x[i : i + 1, :, :n] for i, n in enumerate(lens)], 2) for x in (q, k, v)]
    packed = attend_rows(*pack, SparseRows(rule, prompts, [0, 40, 57, 86], rules))
    torch.testing.assert_close(packed, torch.cat(alone, 2))
    for i, n in enumerate(lens):
        torch.testing.assert_close(padded[i : i + 1, :, :n], alone[i])


def test_wrong_rows_are_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="prompt lengths"):
        SparseRows(SparseSpec(blocks=2, prompt="dense"))
    with pytest.raises(ValueError, match="boundaries"):
        attend_rows(q, k, v, SparseRows(SPARSE, cu_seqlens=[0, 37]))
    with pytest.raises(UserError, match=r"learner\.attention"):
        register("flex")


@pytest.fixture(scope="module")
def model():
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=128,
    )
    config._attn_implementation = register()
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).float()


def batch():
    ids = torch.randint(0, 50, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 45:] = 0
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def test_one_module_is_dense_and_sparse_by_turns(model):
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("sdpa")
    with torch.no_grad():
        dense = model(**batch()).logits
        sparse = model(**batch(), sparse_rows=SparseRows(SPARSE)).logits
        again = model(**batch()).logits
        covering = model(
            **batch(), sparse_rows=SparseRows(SparseSpec(block_size=4, blocks=15))
        ).logits
        want = stock(**batch()).logits
    assert torch.equal(dense, want) and torch.equal(again, want)
    torch.testing.assert_close(covering[1, :45], want[1, :45], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sparse[:, :12], want[:, :12], atol=1e-5, rtol=1e-5)
    assert float((sparse - want)[0, 12:].abs().max()) > 1e-3


def test_a_model_for_flash_attention_loads_and_attends_sparsely_without_it(model, tmp_path):
    model.save_pretrained(tmp_path)
    name = register("flash_attention_2")
    assert "flash" not in name  # transformers imports what such a name says
    net = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation=name)
    assert net.config._attn_implementation == name
    ids = batch()["input_ids"][:1]
    packed = {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(25), torch.arange(35)])[None],
    }
    rows = SparseRows(SPARSE, cu_seqlens=[0, 25, 60])
    with torch.no_grad():
        got = net(**packed, use_cache=False, sparse_rows=rows).logits
        want = model(**packed, use_cache=False, sparse_rows=rows).logits
    torch.testing.assert_close(got, want)
    with pytest.raises(RuntimeError, match="sparsely only"):
        net(input_ids=ids, use_cache=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_forwards_attend_again_as_they_did(model, reentrant):
    def gradients(checkpoint):
        net = copy.deepcopy(model).train()
        if checkpoint:
            net.gradient_checkpointing_enable({"use_reentrant": reentrant})
            net.enable_input_require_grads()
        sparse = net(**batch(), sparse_rows=SparseRows(SPARSE)).logits[0].logsumexp(-1).sum()
        dense = net(**batch()).logits[0].square().mean()
        (sparse + dense).backward()  # both forwards are repeated here
        return {n: p.grad for n, p in net.named_parameters()}

    plain, repeated = gradients(False), gradients(True)
    for name, grad in plain.items():
        torch.testing.assert_close(repeated[name], grad, atol=1e-5, rtol=1e-4, msg=name)


def test_lora_alone_learns_from_a_sparse_forward(model):
    net = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    net(**batch(), sparse_rows=SparseRows(SPARSE)).logits.square().mean().backward()
    grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    assert grads and all("lora_" in n for n in grads)
    assert any(float(g.abs().max()) > 0 for g in grads.values())
