"""What the learner reads of a model folder."""

import pytest
import torch
from safetensors.torch import load_file

from rlcore.errors import UserError
from rlcore.learner.policy import load_causal_lm
from rlcore.models import build_fresh_model

SHAPE = dict(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=32, max_len=32)


def test_weights_that_would_have_to_be_unpickled_are_not_read(tmp_path):
    folder = build_fresh_model(tmp_path, "01", seed=0, **SHAPE)
    load_causal_lm(folder, "float32", "sdpa")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.path=.* holds no loadable model"):
        load_causal_lm(folder, "float32", "sdpa")
