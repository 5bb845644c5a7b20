"""Recurrent layers on the CPU: the gated delta rule is that of transformers whether positions come
together or one by one, and a parameter that holds a function of a weight tells the weight."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import silu
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from rlcore.rollout.engines.vllm import recurrent_cpu
from rlcore.rollout.engines.vllm.worker_extension import WeightExtension, keep_published
from rlcore.weights.manifest import tensor_checksum

KEYS, VALUES, WIDTH, VALUE_WIDTH, SLOTS = 2, 4, 8, 6, 5  # heads, widths of heads
CHANNELS = 2 * KEYS * WIDTH + VALUES * VALUE_WIDTH


class Net(nn.Module):
    """A gated delta net with the names that vLLM's has, and the states of its slots."""

    prefix, activation = "net", "silu"

    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(CHANNELS, CHANNELS, 4, groups=CHANNELS, bias=False)
        self.A_log, self.dt_bias = (nn.Parameter(torch.randn(VALUES)) for _ in range(2))
        junk = (
            torch.full((SLOTS, 3, CHANNELS), 7.0),
            torch.full((SLOTS, VALUES, VALUE_WIDTH, WIDTH), 7.0),
        )
        self.kv_cache = junk

    def rearrange_mixed_qkv(self, x):
        q, k, v = x.split([KEYS * WIDTH, KEYS * WIDTH, VALUES * VALUE_WIDTH], dim=-1)
        widths = (q, WIDTH), (k, WIDTH), (v, VALUE_WIDTH)
        return [part.reshape(1, len(x), -1, width).contiguous() for part, width in widths]

    def plain(self, x, b, a):
        """One sequence [T, channels] by transformers."""
        padded = nn.functional.pad(x.T, (3, 0))
        x = silu(nn.functional.conv1d(padded, self.conv1d.weight, groups=CHANNELS)).T
        q, k, v = self.rearrange_mixed_qkv(x)
        q, k = (part.repeat_interleave(VALUES // KEYS, dim=2) for part in (q, k))
        g = -self.A_log.exp() * nn.functional.softplus(a + self.dt_bias)
        given = {"g": g[None], "beta": b.sigmoid()[None], "use_qk_l2norm_in_kernel": True}
        return torch_chunk_gated_delta_rule(q, k, v, **given)[0][0]


@torch.no_grad()
def test_a_prompt_then_a_token_at_a_time_is_a_sequence(monkeypatch):
    torch.manual_seed(0)
    net = Net()
    lengths, first = [9, 7, 4], [6, 1, 4]  # of sequences, and of their prompts
    whole = [tuple(torch.randn(n, width) for width in (CHANNELS, VALUES, VALUES)) for n in lengths]
    expected = [net.plain(*one) for one in whole]
    slots = torch.tensor([3, 1, 4], dtype=torch.int32)

    def step(parts, decoding):
        """Compute positions [start, end) of each sequence; the first `decoding` have states."""
        ids = [i for i, _, _ in parts]
        given = [torch.cat([whole[i][x][s:e] for i, s, e in parts]) for x in range(3)]
        bounds = torch.tensor([0, *(e - s for _, s, e in parts)]).cumsum(0)
        its = SimpleNamespace(
            num_decodes=decoding,
            num_prefills=len(parts) - decoding,
            non_spec_state_indices_tensor=slots[ids],
            non_spec_query_start_loc=bounds.int(),
            has_initial_state=torch.tensor([s > 0 for _, s, _ in parts]),
        )
        context = SimpleNamespace(attn_metadata={"net": its}, no_compile_layers={"net": net})
        monkeypatch.setattr(recurrent_cpu, "get_forward_context", lambda: context)
        out = torch.empty(len(given[0]), VALUES, VALUE_WIDTH)
        recurrent_cpu.gated_delta_rule(*given, out, "net")
        for (i, s, e), found in zip(parts, out.split(bounds.diff().tolist()), strict=True):
            torch.testing.assert_close(found, expected[i][s:e], rtol=1e-4, atol=1e-5)

    step([(0, 0, first[0]), (1, 0, first[1])], 0)  # both prompts meet the junk of their slots
    step([(0, 6, 7), (1, 1, 2), (2, 0, 4)], 2)
    step([(1, 2, 7), (0, 7, 9)], 0)  # computed on, as pieces of a prompt
    step([(2, 0, 4)], 0)  # again, as after an update


def test_the_library_of_images_is_there_for_the_import_alone():
    if recurrent_cpu.importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    with recurrent_cpu._without_images():
        from torchvision.transforms.v2 import functional

        assert functional is None
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"]


def write(param, loaded):
    param.data.copy_(loaded)


def publish(param, weight):
    """Load a weight of which the parameter holds a function, as vLLM sets its loader."""
    param.weight_loader = keep_published(write, lambda x: -torch.exp(x))
    param.weight_loader(param, weight)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.A = nn.Parameter(torch.zeros(3))
        self.in_proj_qkvz = nn.Linear(4, 6, bias=False)
        self.in_proj_qkvz.output_partition_sizes = [1, 1, 2, 2]


def worker():
    """A worker whose model has other names than the files: model.l.mixer for model.l.mamba."""
    model, mixer = nn.Module(), Mixer()
    model.model = nn.ModuleDict({"l": nn.ModuleDict({"mixer": mixer})})
    model.config = SimpleNamespace(tie_word_embeddings=False)
    model.packed_modules_mapping = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}
    from vllm.model_executor.models.utils import WeightsMapper

    model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={".mamba.": ".mixer."})
    stacked = {".in_proj_qkv": (".in_proj_qkvz", (0, 1, 2)), ".in_proj_z": (".in_proj_qkvz", 3)}
    model.model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked=stacked)
    found = WeightExtension()
    config = SimpleNamespace(dtype=torch.float32)
    found.model_runner = SimpleNamespace(model=model, model_config=config)
    return found, mixer


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 1)


def test_weights_under_other_names_have_their_checksums():
    found, mixer = worker()
    decays = torch.tensor([0.5, 1.0, -2.0])
    publish(mixer.A, decays)
    published = {
        "model.l.mamba.A_log": decays,
        "model.l.mamba.in_proj_qkv.weight": mixer.in_proj_qkvz.weight[:4],
        "model.l.mamba.in_proj_z.weight": mixer.in_proj_qkvz.weight[4:],
    }
    shapes = {name: tuple(w.shape) for name, w in published.items()}
    assert found.rl_unmatched(shapes) == ""
    expected = {name: tensor_checksum(w.detach()) for name, w in published.items()}
    assert found.rl_checksums(shapes, list(shapes)) == expected
    mixer.A.data[1] *= 1.001  # it no longer holds what was published
    assert (
        found.rl_checksums(shapes, list(shapes))["model.l.mamba.A_log"]
        != expected["model.l.mamba.A_log"]
    )
    assert "no weight model.l.mamba.other" in found.rl_unmatched({"model.l.mamba.other": (3,)})


def test_a_reload_by_way_of_the_meta_device_knows_what_was_published():
    """As vLLM's on GPUs: it counts on a meta tensor and loads into another than it copies from."""
    found, mixer = worker()
    publish(mixer.A, torch.zeros(3))
    load, new = mixer.A.weight_loader, torch.tensor([0.5, 1.0, -2.0])
    load(mixer.A.data.to("meta"), new)
    other = torch.empty(3)
    load(other, new)
    mixer.A.data.copy_(other)
    name = "model.l.mamba.A_log"
    assert found.rl_checksums({name: (3,)}, [name]) == {name: tensor_checksum(new)}


def test_a_patch_changes_the_weight_and_not_the_function_of_it():
    param = nn.Parameter(torch.zeros(2), requires_grad=False)
    seen = []
    load = keep_published(lambda p, w: seen.append(p.data.clone()) or write(p, w), torch.exp)
    load(param, torch.tensor([1.0, 2.0]))
    load(param, torch.tensor([1.0, 3.0]))
    assert seen[1].tolist() == [1.0, 2.0]  # what the second one is laid over
    torch.testing.assert_close(param.data, torch.tensor([1.0, 3.0]).exp())


def test_a_weight_that_is_held_wider_has_the_checksum_of_what_came():
    found, mixer = worker()
    found.model_runner.model_config.dtype = torch.bfloat16
    came = torch.randn(3).bfloat16()
    publish(mixer.A, came)
    name = "model.l.mamba.A_log"
    assert found.rl_checksums({name: (3,)}, [name]) == {name: tensor_checksum(came)}
