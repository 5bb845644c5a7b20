"""Gradients of a real model by answer: sketches, shared tokens, estimators and their statistics."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.evidence import real_gradients, real_gradients_page
from benchmarks.evidence.real_gradients import Actor, Drawn, Sketched
from rlcore.corrections import functional as F

VOCAB, ENDS = 30, torch.arange(30) == 7


@pytest.fixture(scope="module")
def lm():
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def sketched(lm):
    return Sketched(real_gradients.adapted(lm), size=64)


def gradient(lm, sequence):
    """With respect to every B, by autograd."""
    factors = [p for n, p in lm.named_parameters() if "lora_B" in n]
    for factor in factors:
        factor.requires_grad_(True)
    logp = lm(torch.tensor([sequence[:-1]])).logits[0, -1].log_softmax(-1)[sequence[-1]]
    found = torch.autograd.grad(logp, factors)
    for factor in factors:
        factor.requires_grad_(False)
    return found


def test_a_sketch_is_that_of_the_adapters_gradient_by_sequence(lm, sketched):
    sequences = [[1, 2, 3, 4], [5, 6, 2, 9], [1, 2, 3, 8]]
    whole = torch.tensor(sequences)
    found, logps = real_gradients.token_gradients(lm, sketched, whole[:, :-1], whole[:, -1])
    for sequence, sketch, logp in zip(sequences, found, logps):
        wanted = torch.zeros(64)
        for signs, own in zip(sketched.signs, gradient(lm, sequence)):
            signed = (own * signs).flatten()
            padded = nn.functional.pad(signed, (0, -len(signed) % 64))
            wanted += padded.view(-1, 64).sum(0)
        torch.testing.assert_close(sketch, wanted)
        torch.testing.assert_close(
            logp, lm(torch.tensor([sequence[:-1]])).logits[0, -1].log_softmax(-1)
        )


def drawn_by(lm, actor, prompts, seed=0):
    rng = np.random.default_rng(seed)
    uniforms = torch.from_numpy(rng.random((len(prompts), 3)))
    return real_gradients.draw(lm, actor, prompts, uniforms, ENDS)


def test_answers_share_the_gradients_of_their_first_tokens(lm, sketched):
    prompts = torch.tensor([[1, 2]] * 4)
    drawn = {name: drawn_by(lm, Actor(), prompts, seed) for seed, name in enumerate("ab")}
    counted = {"a": torch.ones(4, dtype=torch.bool), "b": torch.zeros(4, dtype=torch.bool)}
    found = real_gradients.shared_gradients(lm, sketched, prompts, drawn, counted)
    for name, own in drawn.items():
        vectors, ref = found[name]
        for i, t in own.mask.nonzero().tolist():
            torch.testing.assert_close(ref[i, t], own.logp[i, t], atol=1e-5, rtol=1e-4)
            if name == "a":
                whole = torch.cat([prompts[i], own.tokens[i, : t + 1]])[None]
                alone = real_gradients.token_gradients(lm, sketched, whole[:, :-1], whole[:, -1])
                torch.testing.assert_close(vectors[i, t], alone[0][0], atol=1e-5, rtol=1e-3)


def test_actors_have_their_floor_and_their_min_p(lm):
    logits = torch.tensor([[0.0, -1.0, -30.0]])
    plain = logits.double().softmax(-1)
    floored = real_gradients.distribution(logits, Actor(floor=1e-3)).exp()
    torch.testing.assert_close(floored.double(), (plain + 1e-3) / 1.003, atol=1e-6, rtol=1e-5)
    pruned = real_gradients.distribution(logits, Actor(floor=1e-3, min_p=0.01)).exp()
    assert pruned[0, 2] == 0 and pruned.sum() == pytest.approx(1)
    own = drawn_by(lm, Actor(), torch.tensor([[1, 2]] * 50))
    ended = (own.tokens == 7).cumsum(1)
    assert torch.equal(own.mask, (ended - (own.tokens == 7).long()) == 0)


def some_answers(seed=0, size=0.4):
    torch.manual_seed(seed)
    logits = torch.randn(12, 3, VOCAB)
    inf = (logits + size * torch.randn_like(logits)).log_softmax(-1)
    tokens = torch.distributions.Categorical(logits=inf).sample()
    return Drawn(tokens, torch.rand(12, 3) > 0.2, inf), logits.log_softmax(-1)


def test_estimators_are_rlcores_own_and_equal_without_a_mismatch():
    drawn, ref = some_answers()
    a = real_gradients.advantages(torch.rand(3, 4)).flatten()[:, None].expand(12, 3)
    found, figures = real_gradients.weights(drawn, ref, a)
    at = drawn.tokens[..., None]
    token_ref, inf = (x.gather(-1, at)[..., 0] for x in (ref, drawn.logp))
    assert torch.equal(found["tis C=2"], F.tis(token_ref, inf, drawn.mask, cap=2.0))
    z = torch.minimum(ref.exp(), drawn.logp.exp()).sum(-1)
    averaged = (z * (token_ref - inf).exp()).clamp(max=3.0)
    scale = (found["jackpot"] / averaged)[drawn.mask]  # calibration is one number
    assert scale.std() < 0.05 and figures["acceptance"] < 1
    same, _ = real_gradients.weights(Drawn(drawn.tokens, drawn.mask, ref), ref, a)
    for name, weight in same.items():
        if name not in ("dvp", "jackpot, k=20, no tail"):
            torch.testing.assert_close(weight[drawn.mask], torch.ones_like(weight)[drawn.mask])


def test_biases_are_seen_and_what_has_none_is_not():
    rng = np.random.default_rng(0)
    true, bias = np.zeros(50), np.zeros(50)
    true[0], bias[1] = 1.0, 0.5
    noise = rng.standard_normal((400, 50)) * 0.3
    names = ("none", "sequence IS", "tis C=10", "jackpot", "mis", "dvp")
    own = {f"fp8/{n}": true + noise + (bias if n == "none" else 0) for n in names}
    own |= {f"matched/{n}": true + rng.standard_normal((400, 50)) * 0.3 for n in names}
    found = real_gradients_page.summed_up(own, answers=8)
    fp8 = found["actors"]["fp8"]
    assert found["gradient2"] == pytest.approx(1.0, rel=0.1)
    assert fp8["arms"]["none"]["bias2"] == pytest.approx(0.25, rel=0.2)
    assert fp8["arms"]["tis C=10"]["bias2"] == 0
    assert fp8["arms"]["none"]["variance"] == pytest.approx(8 * 50 * 0.09, rel=0.1)
    check, error = fp8["unbiased against matched"]
    assert abs(check) < 3 * error


def test_a_ratio_of_variances_has_the_error_of_leaving_each_prompt_out():
    rng = np.random.default_rng(0)
    ones, others = rng.standard_normal((12, 5)) * 2 + 3, rng.standard_normal((12, 5))
    ratio, error = real_gradients_page.spread_ratio(ones, others)

    def plain(x, y):
        return x.var(0, ddof=1).sum() / y.var(0, ddof=1).sum()

    left = [plain(np.delete(ones, i, 0), np.delete(others, i, 0)) for i in range(12)]
    assert ratio == pytest.approx(plain(ones, others))
    assert error == pytest.approx(np.sqrt(11) * np.std(left))


def test_the_page_is_written_from_the_lines():
    page = real_gradients_page.PAGE.read_text()
    sizes = {n: part.prompts // real_gradients.BLOCK for n, part in real_gradients.PARTS.items()}
    assert real_gradients_page.block(real_gradients.lines(), sizes) in page
