"""Exports in the layout of compressed-tensors: its own reader finds what an actor serves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from timing import deadline

from rlcore.errors import UserError
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.weights.compressed import check_layout, round_folder
from rlcore.weights.rounding import round_weights
from rlcore.weights.specs import RoundingSpec

SPECS = [
    RoundingSpec(rounding=kind, scales=scales)
    for kind, scales in (
        *(("fp8", "tensor"), ("fp8", "channel"), ("fp8", "block")),
        *(("int8", "tensor"), ("int4", "channel"), ("int4", "block")),
        *(("mxfp4", "tensor"), ("nvfp4", "tensor")),
    )
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spec = FreshModelSpec(
        hidden_size=128, layers=1, heads=4, kv_heads=4, head_dim=32, intermediate_size=256
    )
    return build_fresh_model(tmp_path / "model", "0123456789", spec, seed=1, max_len=64)


def _read(files: dict[str, torch.Tensor], stem: str, shape: torch.Size) -> torch.Tensor:
    """The weight that the layout's codes and scales stand for, by compressed-tensors' functions."""
    scale = files[f"{stem}weight_scale"]
    if "weight" in {n.removeprefix(stem) for n in files}:
        codes = files[f"{stem}weight"].float()
    elif scale.dtype == torch.float32:
        packed = files[f"{stem}weight_packed"]
        bits = 32 * packed.shape[1] // shape[1]
        assert files[f"{stem}weight_shape"].tolist() == list(shape)
        codes = unpack_from_int32(packed, bits, shape).float()
    else:
        codes = unpack_fp4_from_uint8(files[f"{stem}weight_packed"], *shape, torch.float32)
        if scale.dtype == torch.uint8:
            scale = 2.0 ** (scale.float() - 127)
        else:
            scale = scale.float() / files[f"{stem}weight_global_scale"]
    if scale.ndim == 2:
        rows, columns = (n // m for n, m in zip(shape, scale.shape, strict=True))
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return codes * scale


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.rounding} {s.scales}")
def test_the_layouts_own_reader_finds_the_weights_of_an_actor(folder, spec):
    before = load_file(folder / "model.safetensors")
    served = round_weights(before, spec)
    assert round_folder(folder, spec, "compressed-tensors") == 7
    files = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(config)
    assert read.format == config["format"] and read.ignore == ["lm_head", "model.embed_tokens"]
    for name, weight in before.items():
        if served[name] is weight:
            assert torch.equal(files[name], weight)
            continue
        found = _read(files, name.removesuffix("weight"), weight.shape)
        torch.testing.assert_close(found, served[name], rtol=1e-6, atol=0.0)
    small = sum(t.nbytes for t in files.values()) / sum(t.nbytes for t in before.values())
    assert small < (0.36 if "8" in spec.rounding else 0.25)


def test_the_plain_form_holds_the_rounded_weights(folder):
    spec = RoundingSpec(rounding="int3", precise_layers=0)
    served = round_weights(load_file(folder / "model.safetensors"), spec)
    assert round_folder(folder, spec, "rounded") == 7
    for name, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(weight, served[name])
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("shape", "spec", "said"),
    [
        ((64, 64), RoundingSpec(rounding="int3"), "no layout of int3"),
        ((64, 72), RoundingSpec(rounding="mxfp4"), "1 x 32, and l.q_proj.weight is 64 x 72"),
        ((64, 128), RoundingSpec(rounding="fp8", scales="block"), "128 x 128"),
        ((64, 64), RoundingSpec(rounding="int8", scales="block"), "1 x 128"),
    ],
)
def test_what_the_layout_lacks_is_refused(shape, spec, said):
    with pytest.raises(UserError, match=said):
        check_layout({"l.q_proj.weight": shape}, spec)


@pytest.mark.engine
@pytest.mark.slow  # a plain vLLM in a process of its own
def test_vllm_on_cpu_loads_int4_and_serves_the_rounded_policy(folder):
    from transformers import AutoModelForCausalLM

    file, ids = folder / "model.safetensors", list(range(3, 12))
    sharp = {n: t * 4 if t.ndim == 2 else t for n, t in load_file(file).items()}

    def logp(tensors):
        save_file(tensors, file, metadata={"format": "pt"})
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = lm(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].detach()

    spec = RoundingSpec(rounding="int4")
    rounded, full = logp(round_weights(sharp, spec)), logp(sharp)
    round_folder(folder, spec, "compressed-tensors")
    script = Path(__file__).with_name("load_compressed.py")
    command = [sys.executable, str(script), str(folder), json.dumps(ids)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=deadline(150), check=False
    )
    [line] = [n for n in done.stdout.splitlines() if n.startswith("found")] or [done.stderr[-2000:]]
    served = torch.tensor(json.loads(line.removeprefix("found")))
    assert (served - rounded).abs().max() < 0.1 < (served - full).abs().max()
