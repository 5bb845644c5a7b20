"""Checksums are read from the engine's own weights, also if vLLM quantises them (stand-ins for
vLLM, no engine)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rlcore.rollout.engines.vllm import worker_extension
from rlcore.rollout.engines.vllm.weight_loader import WeightLoader
from rlcore.rollout.engines.vllm.worker_extension import WeightExtension
from rlcore.rollout.specs import ActorSpec
from rlcore.weights.manifest import ArrivalError, make_manifest, verify_checksums
from rlcore.weights.stream import announced, in_buckets, whole

HEADS = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
NAMES = ["model.norm.weight", *(f"model.attn.{part}.weight" for part in HEADS)]


class Fp8Method:
    """Like vLLM's: one scale for a fused weight, stored transposed."""

    def process_weights_after_loading(self, layer):
        scale = layer.weight.abs().amax().reshape(1) / 448
        quantised = (layer.weight / scale).to(torch.float8_e4m3fn).t()
        for name, tensor in (("weight", quantised), ("weight_scale", scale)):
            setattr(layer, name, nn.Parameter(tensor, requires_grad=False))


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.logical_widths, self.input_size_per_partition = list(HEADS.values()), 6
        self.quant_method = Fp8Method()


class Engine(WeightExtension):
    """A worker of one rank with one fused layer, and the core that would call it. `dropped` names
    are not loaded."""

    def __init__(self, tensors):
        self.model = nn.Module()
        self.model.model = nn.ModuleDict(
            {"attn": nn.ModuleDict({"qkv_proj": Fused()}), "norm": nn.RMSNorm(6)}
        )
        self.model.packed_modules_mapping = {"qkv_proj": list(HEADS)}
        self.model.config = SimpleNamespace(tie_word_embeddings=False)
        config = SimpleNamespace(dtype=torch.float32)
        self.model_runner = SimpleNamespace(model=self.model, model_config=config)
        self.full, self.dropped = {}, ()
        self.model.load_weights = self.take
        self.take(tensors.items())
        self.rl_end_relayout()

    def take(self, tensors):
        self.full |= {n: t for n, t in tensors if n not in self.dropped}
        return set(dict(self.model.named_parameters()))

    def rl_begin_relayout(self):
        self.begun = True

    @torch.no_grad()
    def rl_end_relayout(self):
        layer = self.model.model["attn"]["qkv_proj"]
        layer.weight = nn.Parameter(
            torch.cat([self.full[n] for n in NAMES[1:]]), requires_grad=False
        )
        layer.quant_method.process_weights_after_loading(layer)
        self.model.model["norm"].weight.copy_(self.full[NAMES[0]])

    def rpc(self, method, *args):
        return getattr(self, method)(*args)

    send = rpc


def weights(seed):
    gen = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(*((6,) if "norm" in n else (HEADS[n.split(".")[2]], 6)), generator=gen)
        for n in NAMES
    }


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_extension.dist, "get_world_size", lambda: 1)

    def start():
        save_file(weights(0), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text('{"vocab_size": 8}')
        engine = Engine(weights(0))
        actor = ActorSpec(kind="fp8", num_gpus=1, dtype="float32", keep_high_precision=())
        return engine, WeightLoader(str(tmp_path), engine, actor)

    return start


def verify(held, tensors):
    manifest = make_manifest(1, tensors, full=True, seed=0)
    verify_checksums(manifest, held.checksums(manifest.names))


def test_quantised_weights_that_arrived_are_proven_from_the_start_on(start):
    engine, held = start()
    verify(held, weights(0))
    before = [p.data_ptr() for p in engine.model.parameters()]
    held.load(whole(weights(1)))
    layer = dict(engine.model.named_parameters())
    verify(held, weights(1))
    assert layer.keys() == dict(engine.model.named_parameters()).keys() and len(before) == len(
        layer
    )
    assert all(
        p is layer[n] for n, p in engine.model.named_parameters()
    )  # the proof leaves the engine alone
    assert set(held.checksums(NAMES)) == set(NAMES)  # asked again: what was proven stays proven


def test_weights_that_the_engine_holds_otherwise_are_named(start):
    engine, _ = start()
    shapes = {n: tuple(w.shape) for n, w in weights(0).items()}
    assert engine.rl_unmatched(shapes) == ""  # the quantised ones have a kernel's layout
    bias = {"model.attn.o_proj.bias": (8,)}
    assert engine.rl_unmatched(shapes | bias) == "it holds no weight model.attn.o_proj.bias"
    found = engine.rl_unmatched(shapes | {NAMES[0]: (7,)})
    assert found == "it holds model.norm.weight as (6,), the files as (7,)"
    few = {n: shape for n, shape in shapes.items() if n != NAMES[0]}
    found = engine.rl_unmatched(few)
    assert found == "it holds model.norm.weight, for which the files have no weight"


@pytest.mark.parametrize("lost", [NAMES, NAMES[2:3], NAMES[:1]])
def test_weights_that_were_lost_on_the_way_are_seen(start, lost):
    engine, held = start()
    engine.dropped = lost
    held.load(whole(weights(1)))
    with pytest.raises(ArrivalError, match="|".join(lost)):
        verify(held, weights(1))


def test_a_scale_that_went_wrong_is_seen(start):
    engine, held = start()
    held.load(whole(weights(1)))
    engine.model.model["attn"]["qkv_proj"].weight_scale.data.mul_(1.01)
    with pytest.raises(ArrivalError, match="q_proj"):
        verify(held, weights(1))


def test_a_weight_that_the_model_did_not_take_ends_the_load(start):
    _, held = start()
    with pytest.raises(RuntimeError, match="did not load model"):
        held.load(whole(weights(1) | {"model.other.weight": torch.ones(2)}))


def test_buckets_are_loaded_as_they_come_and_only_what_will_be_proven_is_kept(start):
    """Of a set in buckets the engine keeps nothing but the fused weights the manifest names."""
    _, held = start()
    sent = weights(1)
    manifest = make_manifest(1, sent, full=False, seed=0, sample=1)
    seen = []

    def buckets():
        for bucket in in_buckets(sent.items(), 100):
            seen.append(list(bucket))
            yield bucket

    held.load(announced(manifest, buckets()))
    assert len(seen) == len(NAMES)  # each weight is larger than half a bucket
    assert set(held.checksums(manifest.checksums)) == set(manifest.checksums)
    verify_checksums(manifest, held.checksums(manifest.checksums))


def test_nan_that_patches_leave_behind_is_found():
    """As a loader leaves it that does not write by `Tensor.copy_`."""
    engine = Engine(weights(1))
    loaded = [n for n, _ in engine.model.named_parameters()]
    engine.rl_check_patched(loaded)
    with torch.no_grad():
        engine.model.model["norm"].weight[2] = float("nan")
    with pytest.raises(RuntimeError, match=r"NaN into model\.norm\.weight"):
        engine.rl_check_patched(loaded)
    engine.rl_check_patched([n for n in loaded if "norm" not in n])


class Ranks:
    """Takes whatever it is sent."""

    def __init__(self):
        self.held = {}

    def rpc(self, method, *args):
        return None

    def send(self, method, tensors, *args):
        self.held |= {n: t.clone() for n, t in tensors.items()}


def test_layers_stay_precise_from_the_publication_on_that_says_so(tmp_path):
    gen = torch.Generator().manual_seed(0)
    names = [f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1, 10)]
    sent = {n: torch.randn(4, 6, generator=gen) for n in names}
    save_file(sent, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    ranks = Ranks()
    actor = ActorSpec(kind="fp8", rounding="int3", precise_layers=1)
    loader = WeightLoader(str(tmp_path), ranks, actor)

    def precise():
        return [n for n in names if torch.equal(ranks.held[n], sent[n])]

    assert precise() == names[2:]  # as configured
    for layers, expected in ((2, names[1:]), (None, names[1:]), (0, []), (9, names)):
        loader.load(replace(whole(sent), precise_layers=layers))
        assert precise() == expected
