"""`learner.attention=auto`: the fastest attention that this machine can compute."""

import importlib.util

import pytest

from rlcore.learner import build
from rlcore.learner.specs import LearnerSpec


@pytest.mark.parametrize(
    ("settings", "flash", "chosen", "layout"),
    [
        ({}, True, "sdpa", "sorted"),
        ({"num_gpus": 1}, True, "flash_attention_2", "packed"),
        ({"num_gpus": 1}, False, "varlen", "packed"),
        ({"num_gpus": 1, "dtype": "float32"}, True, "sdpa", "sorted"),
        ({"num_gpus": 1, "attention": "sdpa"}, True, "sdpa", "sorted"),
    ],
)
def test_auto(monkeypatch, settings, flash, chosen, layout):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if flash else None)
    spec = LearnerSpec(**settings)
    attention = build._attention(spec)
    assert (attention, build._layout(spec, attention)) == (chosen, layout)
