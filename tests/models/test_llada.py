"""LLaDA's architecture and folders: both directions, its own names, what of its form is refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.errors import UserError
from rlcore.extras.diffusion.folder import check_masked, mask_token_id
from rlcore.extras.diffusion.llada import LladaConfig, LladaForMaskedDiffusion
from rlcore.models.folder import is_masked, read_config, read_shapes
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import DiffusionSpec, FreshModelSpec, ModelSpec
from rlcore.models.text import load_tokenizer

SPEC = FreshModelSpec(
    hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=48
)
# the values of GSAI-ML/LLaDA-8B-Instruct's config.json that say what the architecture is
LLADA_8B = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"},
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_size": 126464,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": 126464,
    "weight_tying": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("llada")
    untied = SPEC.model_copy(update={"tie_embeddings": False})
    return build_fresh_model(at, "0123456789=", untied, seed=0, max_len=64, masked=True)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_position_sees_those_behind_it(model):
    ids = torch.tensor([[3, 4, 5, 6]])
    other = torch.tensor([[3, 4, 5, 9]])
    with torch.no_grad():
        difference = (model(ids).logits - model(other).logits).abs().amax(-1)[0]
    assert (difference > 1e-6).all()


def test_segments_keep_sequences_of_a_row_apart(model):
    one, two = torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[8, 9, 3]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    segments = torch.tensor([[1] * 5 + [2] * 3])
    with torch.no_grad():
        row = torch.cat([one, two], dim=1)
        packed = model(row, position_ids=positions, segments=segments).logits
        alone = torch.cat([model(one).logits, model(two).logits], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=1e-5)


def test_a_fresh_folder_is_of_llada_s_form(folder):
    config = read_config(folder)
    assert is_masked(config)
    check_masked(config, whose="it")
    names = set(read_shapes(folder))
    parts = ("attn_norm", "q_proj", "k_proj", "v_proj", "attn_out")
    parts += ("ff_norm", "ff_proj", "up_proj", "ff_out")
    blocks = {f"model.transformer.blocks.{i}.{p}.weight" for i in (0, 1) for p in parts}
    ends = {f"model.transformer.{p}.weight" for p in ("wte", "ln_f", "ff_out")}
    assert names == blocks | ends
    assert mask_token_id(folder) == load_tokenizer(folder).mask_token_id == 14


def test_a_tied_head_is_the_embedding(tmp_path):
    at = build_fresh_model(tmp_path, "01", SPEC, seed=0, max_len=64, masked=True)
    assert "model.transformer.ff_out.weight" not in read_shapes(at)
    tied = AutoModelForCausalLM.from_pretrained(at)
    assert tied.get_output_embeddings() is tied.get_input_embeddings()


def test_code_in_a_folder_is_not_run(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"AutoConfig": "modeling_llada.C", "AutoModelForCausalLM": "modeling_llada.M"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    (tmp_path / "modeling_llada.py").write_text("raise SystemExit('run')\n")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__module__ == "rlcore.extras.diffusion.llada"


def test_llada_8b_s_own_configuration_is_supported():
    assert is_masked(LLADA_8B)
    check_masked(LLADA_8B, whose="it")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "dream"}, "model_type=dream"),
        ({"block_type": "sequential"}, "block_type=sequential"),
        ({"include_qkv_bias": True}, "include_qkv_bias=True"),
        ({"embedding_size": 126720}, "embedding_size=126720"),
        ({"mask_token_id": 126464}, "mask_token_id=126464"),
        ({"n_layers": None}, "no n_layers"),
    ],
)
def test_another_form_is_refused_by_name(change, said):
    with pytest.raises(UserError, match=said):
        check_masked(LLADA_8B | change, whose="model.path=m")


def test_a_fresh_model_s_heads_divide_its_width():
    spec = ModelSpec(fresh=SPEC.model_copy(update={"head_dim": 8}), diffusion=DiffusionSpec())
    with pytest.raises(UserError, match=r"model\.fresh\.hidden_size=32"):
        spec.check("model")


def test_logits_are_those_of_the_published_code():
    """Positions 1 and 4 of [3, 10, 7, 2, 10, 5] under weights sin(1.7 (j + i)) * 0.8, plus 1 in
    norms, for entry j of the i-th tensor by name: what LLaDA's own modeling_llada.py computes."""
    sizes = {"d_model": 16, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "mlp_hidden_size": 24}
    config = LladaConfig(**sizes, vocab_size=11, rope_theta=500000.0, mask_token_id=10)
    model = LladaForMaskedDiffusion(config).eval()
    for i, (_, p) in enumerate(sorted(model.named_parameters())):
        entries = torch.arange(p.numel(), dtype=torch.float64).add(i).mul(1.7).sin() * 0.8
        p.data = (entries.view(p.shape) + (p.dim() == 1)).float()
    with torch.no_grad():
        logits = model(torch.tensor([[3, 10, 7, 2, 10, 5]])).logits[0]
    published = [
        [0.3023, 0.2762, -0.5655, 0.2625, 0.3154, -0.5629, 0.2209, 0.3526, -0.5567, 0.1778],
        [-0.6827, -0.4112, 1.0744, -0.6123, -0.4911, 1.0801, -0.5379, -0.5677, 1.0787, -0.4599],
    ]
    assert logits.shape == (6, 11)
    torch.testing.assert_close(logits[[1, 4], :10], torch.tensor(published), atol=1e-4, rtol=0)
