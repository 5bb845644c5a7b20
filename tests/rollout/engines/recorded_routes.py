"""The experts that vLLM chose on the CPU, token by token, against transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_helpers import ALPHABET, Model, drain, requests
from safetensors.torch import load_file

pytest.importorskip("vllm")

from tiny_mixture import tiny_mixture

from rlcore.models.routes import ROUTES
from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine
from rlcore.weights.stream import whole

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    hf = tiny_mixture(folder, ALPHABET, seed=3, max_len=512)
    return Model(folder, load_file(folder / "model.safetensors"), hf)


@pytest.fixture(scope="module")
def llm(mixture):
    actor = ActorSpec(max_num_seqs=16, kv_cache_gib=0.05)
    engine = start_engine(EngineJob(actor, "bf16-0", str(mixture.path), 256, 20, routes=True))
    yield engine
    engine.close()


def chosen(model, t):
    """[L - 1, layers, k]: what transformers chooses for every token but the last, sorted."""
    found = []

    def note(module, args, output):
        found.append(output[2])

    hooks = [layer.mlp.gate.register_forward_hook(note) for layer in model.hf.model.layers]
    with torch.no_grad():
        model.hf(torch.tensor(t.token_ids[None, :-1].astype(np.int64)))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(found, dim=1).numpy(), axis=-1)


def same_share(model, t):
    """Share of (token, layer) pairs with transformers' own experts."""
    routes = t.extras[ROUTES]
    assert routes.dtype == np.uint8
    assert routes.shape == (len(t.token_ids) - 1, 2, 2)
    return float((np.sort(routes, axis=-1) == chosen(model, t)).all(-1).mean())


def test_every_token_has_the_experts_that_were_computed(llm, mixture):
    """Prompts of other lengths in one step, equal ones that are computed once, and a second wave
    whose first block of 128 tokens comes out of the prefix cache."""
    long = [3 + i % 20 for i in range(140)]
    for group, prompt in enumerate(([5, 6, 7], [5, 6, 7, 8, 9], long)):
        llm.add(requests(3, group=group, prompt=prompt, max_new_tokens=9))
    done = drain(llm)
    llm.add(requests(2, group=4, prompt=[*long, 7], seed=900, max_new_tokens=5))
    done += drain(llm)
    assert len(done) == 11
    assert min(same_share(mixture, t) for t in done) > 0.99
    assert len({t.extras[ROUTES].tobytes() for t in done}) > 6


def test_tokens_sampled_before_an_update_keep_their_experts(llm, mixture, tmp_path):
    llm.add(requests(3, prompt=[5, 6, 7, 8], seed=7, max_new_tokens=12))
    for _ in range(5):
        llm.step()
    tensors = {n: t + 0.02 * torch.randn_like(t) for n, t in mixture.tensors.items()}
    llm.update_weights(1, whole(tensors), "in_flight")
    done = drain(llm)
    llm.update_weights(0, whole(mixture.tensors), "in_flight")
    for t in done:
        before = 4 + int((t.token_version == 0).sum()) - 1
        routes = np.sort(t.extras[ROUTES][:before], axis=-1)
        assert 4 < before < len(t.token_ids) - 1 == len(t.extras[ROUTES])
        assert (routes == chosen(mixture, t)[:before]).all(-1).mean() > 0.99


def test_a_response_that_another_engine_goes_on_with_has_all_routes(llm, mixture):
    asked = requests(2, prompt=[5, 6, 7, 8], seed=17, max_new_tokens=12)
    llm.add(asked)
    for _ in range(4):
        llm.step()
    begun = llm.cut([r.request_id for r in asked])
    assert all(len(t.extras[ROUTES]) == len(t.token_ids) - 1 for t in begun)
    llm.add(asked, begun)
    for t in drain(llm):
        assert same_share(mixture, t) > 0.99
