"""An FP32 head in the engine: logits that are not rounded to the model's bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helpers import build_model, drain, requests

pytestmark = pytest.mark.engine


def test_logits_are_rounded_to_bfloat16_unless_the_head_is_float32(tmp_path, start):
    model = build_model(tmp_path / "model", seed=1, tie_embeddings=False)
    off_grid = {}
    for fp32 in (False, True):
        engine = start(model, dtype="bfloat16", fp32_head=fp32)
        engine.add(requests(16))
        top = np.concatenate([t.topk_logp for t in drain(engine)])[:, :3].astype(np.float64)
        # log-probs of one position differ as its logits do, and bfloat16 numbers of at least 1/8
        # are multiples of 2^-10
        apart = (top - top[:, :1])[:, 1:] * 2**10
        off_grid[fp32] = float(np.abs(apart - np.round(apart)).mean())
    assert off_grid[False] < 0.02 and off_grid[True] > 0.15
