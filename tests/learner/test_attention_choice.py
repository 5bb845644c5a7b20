"""`learner.attention=auto`: the fastest attention that this machine can compute."""

import importlib.machinery
import sys

import pytest
import transformers.utils

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
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: flash)
    spec = LearnerSpec(**settings)
    attention = build._attention(spec)
    assert (attention, build._layout(spec, attention)) == (chosen, layout)


def test_the_package_of_flash_attn_4_is_not_taken_for_flash_attn_2(monkeypatch):
    found = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setattr(sys, "meta_path", [_Finder(found), *sys.meta_path])
    owners = transformers.utils.import_utils.PACKAGE_DISTRIBUTION_MAPPING
    monkeypatch.setitem(owners, "flash_attn", ["flash-attn-4"])
    monkeypatch.setattr(transformers.utils.import_utils, "is_torch_cuda_available", lambda: True)
    assert build._attention(LearnerSpec(num_gpus=1)) == "varlen"


class _Finder:
    """Finds one module."""

    def __init__(self, spec):
        self.spec = spec

    def find_spec(self, name, path=None, target=None):
        return self.spec if name == self.spec.name else None
