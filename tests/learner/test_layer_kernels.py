"""RMS norms with a backward pass written here, and Liger's kernels, give what transformers' layers
give."""

import copy
import json
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
from learner_helpers import small_model, trained
from timing import deadline
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rlcore.errors import UserError
from rlcore.learner.cpu.norms import own_norms, rms_norm
from rlcore.learner.layer_kernels import compiled_layers, float8_layers, liger_layers
from rlcore.learner.policy import load_causal_lm
from rlcore.learner.specs import LoraSpec


def _plain(x, weight, epsilon):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("shape", [(3, 7, 24), (2, 5, 3, 16)])
def test_a_norm_is_the_same_to_the_bit_and_its_gradient_to_rounding(kind, shape):
    torch.manual_seed(0)
    own = kind(shape[-1])
    torch.nn.init.normal_(own.weight)
    plain = copy.deepcopy(own)
    assert own_norms(own) == 1
    x, grad = torch.randn(shape), torch.randn(shape).transpose(1, 2).contiguous().transpose(1, 2)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [module(one) for module, one in zip((own, plain), inputs)]
    assert torch.equal(*outputs)
    for out in outputs:
        out.backward(grad)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(own.weight.grad, plain.weight.grad, atol=2e-5, rtol=2e-5)


def test_its_gradient_is_that_of_the_formula():
    torch.manual_seed(1)
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6), (x, weight))
    frozen = weight.detach()
    (d_x,) = torch.autograd.grad(rms_norm(x, frozen, 1e-6).sum(), x)
    (expected,) = torch.autograd.grad(_plain(x, frozen, 1e-6).sum(), x)
    torch.testing.assert_close(d_x, expected)


def test_a_norm_that_does_more_stays_as_it_is():
    module = Gemma3RMSNorm(8)
    assert own_norms(module) == 0 and "forward" not in vars(module)


def test_a_copied_model_reads_its_own_weights(tmp_path):
    lm = load_causal_lm(small_model(tmp_path), "float32", "sdpa")
    ids = torch.tensor([[3, 4, 5]])
    before = lm(ids).logits
    assert own_norms(lm) == 2 * 4 + 1  # two layers: their own two, queries' and keys'; the last
    assert torch.equal(lm(ids).logits, before)
    other = copy.deepcopy(lm)
    with torch.no_grad():
        lm.model.norm.weight.zero_()
    assert torch.equal(other(ids).logits, before) and not lm(ids).logits.any()


def test_what_liger_s_kernels_are_not_proven_for_is_refused(tmp_path):
    lm = load_causal_lm(small_model(tmp_path), "float32", "sdpa")
    with pytest.raises(UserError, match=r"liger-kernel .* install rlcore\[gpu\]"):
        liger_layers(lm)
    lm.config.hidden_act = "gelu"
    with pytest.raises(UserError, match=r"qwen3 and llama with SiLU, .* of qwen3 with gelu"):
        liger_layers(lm)


def test_fp8_products_need_their_package_and_sides_that_gpus_multiply(tmp_path, monkeypatch):
    lm = load_causal_lm(small_model(tmp_path), "float32", "sdpa")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"fp8=row needs the package torchao .*rlcore\[fp8\]"):
        float8_layers(lm, "row", emulate=True)
    stand_in = types.ModuleType("torchao.float8")
    stand_in.Float8LinearConfig = stand_in.convert_to_float8_training = None
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", stand_in)
    with pytest.raises(UserError, match=r"multiples of 16, and the model has .*q_proj of 66 to 32"):
        float8_layers(lm, "tensor", emulate=True)


def test_norms_and_mlps_are_compiled_once_and_a_missing_compiler_is_a_sentence(
    tmp_path, monkeypatch
):
    lm = load_causal_lm(small_model(tmp_path), "float32", "sdpa")
    asked = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda m, **how: asked.append((m, how)))
    monkeypatch.setattr(torch, "compile", lambda f, **how: f)  # the slow test compiles
    assert compiled_layers(lm, torch.device("cpu")) == len(asked) == 2 * 5 + 1
    assert len({m for m, _ in asked}) == len(asked)
    assert all(how == {"dynamic": True} for _, how in asked)

    def broken(f, **how):
        raise RuntimeError("no C++ compiler found\n at all")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(
        UserError, match=r"compiled .* cpu \(no C\+\+ compiler found\).*layers=torch"
    ):
        compiled_layers(lm, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.ranks
def test_compiled_layers_train_as_transformers_layers(tmp_path):
    """By torch's compiler for CPUs; a program for all layers, and few for all lengths."""
    from torch._dynamo.utils import counters

    model = small_model(tmp_path / "model")
    plain = trained(model, COMPILED, layers="torch")
    start = trained(model, {"start": {"zero_stage": 0}}, layers="torch", steps=0)["start"]
    counters.clear()
    for name, weights in trained(model, COMPILED, layers="compiled").items():
        apart = max(float((w - plain[name][n]).abs().max()) for n, w in weights.items())
        moved = max(float((w - start[n]).abs().max()) for n, w in weights.items() if n in start)
        assert apart < 2e-4 < 1e-3 < moved, (name, apart, moved)
    assert 0 < counters["stats"]["unique_graphs"] < 40


@pytest.mark.ranks
def test_a_rank_without_fast_paths_loads_none_and_trains_alike(tmp_path, monkeypatch):
    model = small_model(tmp_path / "model")
    own = trained(model, {"own": {}})["own"]
    for name in ("norms", "spare_cores"):  # an import of either would fail
        monkeypatch.setitem(sys.modules, f"rlcore.learner.cpu.{name}", None)
    plain = trained(model, {"plain": {"cpu_fast_paths": False}})["plain"]
    start = trained(model, {"start": {"cpu_fast_paths": False}}, steps=0)["start"]
    apart, moved = (
        max(float((w - other[n]).abs().max()) for n, w in plain.items()) for other in (own, start)
    )
    assert apart < 2e-4 < 1e-3 < moved


COMPILED = {
    "ZeRO-0": {"zero_stage": 0},
    "ZeRO-1": {"zero_stage": 1},
    "ZeRO-2": {"zero_stage": 2},
    "recomputed": {"gradient_checkpointing": True},
    "reference": {"kl_coef": 0.1},
    "sorted": {"layout": "sorted"},
    "adapters": {"lora": LoraSpec(rank=2)},
}
LIGER, TORCHAO = "liger-kernel==0.8.5", "torchao==0.18.0"


def installed(package: str, file: str) -> str:
    """A folder that holds a package, kept between runs of the tests."""
    folder = Path(tempfile.gettempdir()) / f"rlcore-{package.replace('==', '-')}"
    if not (folder / file).is_file():
        words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        done = subprocess.run(
            [*words, str(folder), package], capture_output=True, text=True, timeout=deadline(300)
        )
        if done.returncode:
            pytest.skip(f"{package} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return str(folder)


@pytest.fixture
def liger() -> str:
    return installed(LIGER, "liger_kernel/ops/swiglu.py")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_fp8_products_train_as_their_definition(scales, tmp_path):
    """By torchao, which is in no lock, emulated: against the three products of a layer written
    here, over two optimizer steps of a rank."""
    folder, here = installed(TORCHAO, "torchao/float8/__init__.py"), Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *sys.path, folder])
    done = subprocess.run(
        [sys.executable, str(here / "fp8_jobs.py"), scales, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=deadline(280),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.rpartition("FOUND")[2])
    assert found["maps"] == 2 * 7
    for name, apart in found["apart"].items():
        assert apart < 1e-6, (name, apart)
    assert found["without"] > 1e-3  # rounding does change what is learned
    assert found["compiled"] < 2e-4


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_liger_s_kernels_in_the_interpreter_train_as_transformers_layers(
    liger, architecture, tmp_path
):
    """Kernels run in triton's interpreter, which must be chosen before triton is imported."""
    here = Path(__file__).parent
    paths = os.pathsep.join([liger, str(here), str(here.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(here / "liger_jobs.py"), architecture, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=deadline(280),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.rpartition("FOUND")[2])
    assert found["replaced"] > 0
    for name, apart in found["apart"].items():
        assert apart < 1e-4, (name, apart)
    assert found["moved"] > 1e-3
