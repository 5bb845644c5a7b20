"""RMS norms with a backward pass written here, and Liger's kernels, give what transformers' layers
give."""

import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from learner_helpers import small_model
from timing import deadline
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rlcore.errors import UserError
from rlcore.learner.layer_kernels import liger_layers, own_norms, rms_norm
from rlcore.learner.policy import load_causal_lm


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


LIGER = "liger-kernel==0.8.5"


@pytest.fixture
def liger() -> str:
    """A folder that holds liger-kernel, kept between runs of the tests."""
    folder = Path(tempfile.gettempdir()) / f"rlcore-{LIGER.replace('==', '-')}"
    if not (folder / "liger_kernel/ops/swiglu.py").is_file():
        words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        done = subprocess.run(
            [*words, str(folder), LIGER], capture_output=True, text=True, timeout=deadline(300)
        )
        if done.returncode:
            pytest.skip(f"{LIGER} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return str(folder)


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
