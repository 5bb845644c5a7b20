"""The warm-up in float64: equal files under every instruction set, and what it learns."""

import os
import subprocess
import sys

import numpy as np
import pytest

from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.models.exact_warmup import ExactWarmUp
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

SPEC = FreshModelSpec(hidden_size=32, layers=2, heads=4, intermediate_size=64)
STEPS = 30


def examples(rng, count=16):
    """Two digits and their copy."""
    drawn = rng.integers(3, 13, size=(count, 3))
    return [([*row, 13, *row, 1], [False] * 4 + [True] * 4) for row in drawn.tolist()]


def warmed(folder):
    """A model that has learned for some steps, its first and its last loss."""
    build_fresh_model(folder, "0123456789=", SPEC, seed=0, max_len=16)
    model = ExactWarmUp(folder, seed=3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    rng = np.random.default_rng(0)
    losses = [model.step(examples(rng), 3e-3, 1.0) for _ in range(STEPS)]
    return model, losses[0], losses[-1]


def test_it_learns_and_is_saved_in_float32(tmp_path):
    from safetensors.torch import load_file

    model, first, last = warmed(tmp_path / "fresh")
    assert last < 0.8 * first
    model.save(tmp_path / "made")
    saved = load_file(tmp_path / "made" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in saved.values()} == {"torch.float32"}


def test_its_forward_pass_is_that_of_the_plain_model(tmp_path):
    import torch
    from transformers import Qwen3ForCausalLM

    model, *_ = warmed(tmp_path / "fresh")
    model.save(tmp_path / "made")
    plain = Qwen3ForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    ids = torch.tensor([[5, 9, 13, 5, 9, 1]])
    wanted = plain(ids).logits
    torch.testing.assert_close(
        ExactWarmUp.widened(plain.double())(ids).logits.float(), wanted, atol=1e-4, rtol=1e-4
    )


def test_a_batch_in_pieces_trains_as_the_whole_one(tmp_path, monkeypatch):
    """Answers of several lengths, of which a piece holds one or some."""
    import torch

    from rlcore.models import exact_warmup

    build_fresh_model(tmp_path / "fresh", "0123456789=", SPEC, seed=0, max_len=16)
    batch = [*examples(np.random.default_rng(0), 5), ([5, 13, 5, 1], [False, False, True, True])]
    found = []
    for logits in (1 << 23, 600, 1):
        monkeypatch.setattr(exact_warmup, "LOGITS", logits)
        model = ExactWarmUp(
            tmp_path / "fresh", seed=3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01
        )
        losses = [model.step(batch, 3e-3, 1.0) for _ in range(3)]
        found.append([torch.tensor(losses), *model.model.state_dict().values()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-10, rtol=0)


ASK = """
import hashlib, sys, tempfile
from pathlib import Path
import test_exact_warmup as t
model, *_ = t.warmed(Path(tempfile.mkdtemp()) / "fresh")
made = Path(tempfile.mkdtemp())
model.save(made)
print(hashlib.sha256((made / "model.safetensors").read_bytes()).hexdigest())
"""


@pytest.mark.processes
def test_two_instruction_sets_end_at_the_same_file():
    here = os.path.dirname(__file__)
    found = set()
    for capability, mkl in (("default", "SSE4_2"), ("avx2", "AVX2")):
        environment = {
            **os.environ,
            "ATEN_CPU_CAPABILITY": capability,
            "MKL_ENABLE_INSTRUCTIONS": mkl,
            "PYTHONPATH": os.pathsep.join([here, *sys.path]),
        }
        done = subprocess.run(
            [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout.split()[-1])
    assert len(found) == 1


def test_a_masked_diffusion_model_is_refused(tmp_path):
    words = ["experiment=diffusion", "model.warmup.precision=float64", f"run_dir={tmp_path}"]
    with pytest.raises(UserError, match=r"model\.warmup\.precision=float64 cannot be combined"):
        load(words)
