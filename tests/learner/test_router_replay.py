"""Router replay: nothing changes where the experts are the learner's own, and log-probs move to the
actor's where they are not."""

import copy

import numpy as np
import pytest
import torch
from learner_helpers import make_job
from tiny_mixture import tiny_mixture

from rlcore.learner.build import reader_of
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.packing import dummy, pack
from rlcore.learner.parts.replay import Replay
from rlcore.learner.policy import Policy
from rlcore.learner.sequences import TokenSequence
from rlcore.models.routes import ROUTES
from rlcore.testing.records import make_trajectory

SPEC = HeadSpec(1.0, 64)
ANSWERS = [(3, 9), (5, 4), (2, 14)]  # tokens of prompts and of answers
VOCABULARY = 15


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    lm = tiny_mixture(tmp_path_factory.mktemp("mixture"), "0123456789+=", seed=3)
    with torch.no_grad():  # experts that differ, so that a choice shows
        for p in lm.parameters():
            if p.dim() > 1:
                p.mul_(4.0)
    return lm.train()


def sequences(routes=None, lengths=ANSWERS):
    rng = np.random.default_rng(1)
    drawn = [rng.integers(3, VOCABULARY - 1, sum(n)) for n in lengths]
    given = routes or [None] * len(lengths)
    return [
        TokenSequence(ids, np.arange(len(ids)) >= prompt, routes=r)
        for ids, (prompt, _), r in zip(drawn, lengths, given)
    ]


def chosen(lm, s):
    """[L, layers, k]: the experts that a model chooses of each token that a pass computes."""
    found = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
        for layer in lm.model.layers
    ]
    with torch.no_grad():
        lm(torch.tensor(s.inputs[None]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).numpy().astype(np.uint8)


def passed(lm, parts, layout="sorted", replay=False):
    """Log-probs of all answers in order, and the gradient of their sum by name."""
    policy = Policy(lm, None, Replay(lm) if replay else None)
    lm.zero_grad()
    (mb,) = pack([(s,) for s in parts], 1000, layout)
    scores = policy(mb, None, SPEC)[1]
    scores.sum().backward()
    dense = mb.dense(scores.detach(), max(s.scored for s in parts))[mb.episodes.argsort()]
    return dense, {n: p.grad.clone() for n, p in lm.named_parameters()}, policy.replay


@pytest.mark.parametrize("layout", ["sorted", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_learners_own_experts_change_no_bit(mixture, layout, checkpointing):
    """Whatever their order is."""
    lm = copy.deepcopy(mixture)
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    plain, gradient, _ = passed(copy.deepcopy(mixture), sequences(), layout)
    own = [chosen(mixture, s)[:, :, ::-1].copy() for s in sequences()]
    logp, replayed, replay = passed(lm, sequences(own), layout, replay=True)
    assert torch.equal(logp, plain)
    assert all(torch.equal(replayed[n], g) for n, g in gradient.items())
    assert float(gradient["model.layers.0.mlp.gate.weight"].abs().max()) > 0
    assert replay.metrics(lambda x: x) == {"mismatch/routes_differ": 0.0}


def test_positions_without_routes_choose_by_themselves(mixture):
    """Those behind the tokens that the engine read, dummies, and records of other lengths."""
    plain, _, _ = passed(copy.deepcopy(mixture), sequences())
    some = [chosen(mixture, s)[:n] for s, n in zip(sequences(), (0, 4, 100))]
    logp, _, _ = passed(copy.deepcopy(mixture), sequences(some), replay=True)
    assert torch.equal(logp, plain)
    lm = copy.deepcopy(mixture)
    assert torch.isfinite(Policy(lm, None, Replay(lm))(dummy(), None, SPEC)[1]).all()


@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_other_experts_are_weighed_by_live_scores(mixture, layout):
    """Against routers that are told by hand, and gradients that reach what they score."""
    rng = np.random.default_rng(2)
    other = [
        np.stack([rng.permutation(4)[:2] for _ in range(2 * len(s))]).reshape(len(s), 2, 2)
        for s in sequences()
    ]
    logp, gradient, replay = passed(
        copy.deepcopy(mixture), sequences([r.astype(np.uint8) for r in other]), layout, replay=True
    )
    for i, s in enumerate(sequences()):
        by_hand = told(copy.deepcopy(mixture), other[i])
        states = by_hand.model(torch.tensor(s.inputs[None])).last_hidden_state[0]
        expected = (states @ by_hand.lm_head.weight.T).log_softmax(-1)
        at = torch.tensor(s.predicting)
        expected = expected[at, torch.tensor(s.targets)].detach()
        assert torch.allclose(logp[i, : s.scored], expected, atol=2e-5)
    assert all(float(g.abs().max()) > 0 for n, g in gradient.items() if "gate.weight" in n)
    share = replay.metrics(lambda x: x)["mismatch/routes_differ"]
    pairs = [
        set(a) != set(b)
        for s, r in zip(sequences(), other)
        for a, b in zip(chosen_with(mixture, s, r).reshape(-1, 2), r.reshape(-1, 2))
    ]
    assert share == pytest.approx(sum(pairs) / len(pairs)) and 0.5 < share < 1


def told(lm, routes):
    """Its routers compute the experts `routes` [L, layers, k] of one sequence."""
    for i, layer in enumerate(lm.model.layers):
        experts = torch.tensor(routes[:, i])

        def choose(gate, args, output, experts=experts):
            odds = output[0].softmax(-1)
            weights = torch.stack([odds[torch.arange(len(odds)), experts[:, j]] for j in (0, 1)], 1)
            gate.live = output[2]
            return output[0], weights / weights.sum(-1, keepdim=True), experts

        layer.mlp.gate.register_forward_hook(choose)
    return lm


def chosen_with(lm, s, routes):
    """What routers would have chosen where they were told `routes`."""
    lm = told(copy.deepcopy(lm), routes)
    with torch.no_grad():
        lm(torch.tensor(s.inputs[None]))
    return torch.stack([layer.mlp.gate.live for layer in lm.model.layers], dim=1).numpy()


def test_log_probs_come_nearer_to_an_engine_that_chose_otherwise(mixture):
    """An engine with rounded weights chooses other experts for one pair in two hundred, and these
    are its largest differences."""
    lengths = [(5, 95)] * 8
    engine = copy.deepcopy(mixture).bfloat16().float()
    theirs, _, _ = passed(copy.deepcopy(engine), sequences(None, lengths))
    routes = [chosen(engine, s) for s in sequences(None, lengths)]
    live, _, _ = passed(copy.deepcopy(mixture), sequences(None, lengths))
    lm = copy.deepcopy(mixture)
    replayed, _, replay = passed(lm, sequences(routes, lengths), replay=True)
    assert 0.001 < replay.metrics(lambda x: x)["mismatch/routes_differ"] < 0.02
    gaps, before = ((a - theirs).abs() for a in (replayed, live))
    assert float(gaps.max()) < 0.2 * float(before.max())
    assert float(gaps.mean()) < 0.8 * float(before.mean())


def test_a_record_without_routes_is_refused(tmp_path):
    read = reader_of(make_job(str(tmp_path), router_replay=True))
    routes = np.zeros((3, 2, 2), np.uint8)
    assert read(make_trajectory(extras={ROUTES: routes}), 1.0).routes is routes
    with pytest.raises(ValueError, match="sampled without learner"):
        read(make_trajectory(), 1.0)
    failed = make_trajectory(turns=(((3, 4), ()),))
    assert read(failed, 1.0).routes is None


def test_a_dense_model_has_no_router_to_replay():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    with pytest.raises(ValueError, match="no router"):
        Replay(Qwen3ForCausalLM(config))
