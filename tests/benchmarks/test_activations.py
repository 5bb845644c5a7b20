"""Rounded weights and activations of SmolLM2: the page's table, and what an actor rounds."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.evidence.activations import FILE, FORMATS, WHAT, lines, rounded, shown
from benchmarks.harness import table
from rlcore.weights.rounding import round_rows, round_tensor


class Small(nn.Module):
    """A map and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.lm_head = nn.Linear(32, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return self.map(x), self.lm_head(x)


def test_the_page_shows_every_block():
    found = lines()
    assert table(shown(found)) in FILE.with_suffix(".md").read_text()
    for block in {line["block"] for line in found}:
        assert sum(line["block"] == block for line in found) == len(FORMATS) * len(WHAT)


def test_an_actor_rounds_weights_activations_or_both():
    torch.manual_seed(0)
    lm, x = Small(), torch.randn(5, 32)
    weight, inputs = round_tensor(lm.map.weight, "nvfp4", "tensor"), round_rows(x, "nvfp4")
    expected = {
        "weights": x @ weight.T,
        "activations": inputs @ lm.map.weight.T,
        "both": inputs @ weight.T,
    }
    for what, product in expected.items():
        found, head = rounded(lm, "nvfp4", what)(x)
        torch.testing.assert_close(found, product)
        assert torch.equal(head, lm(x)[1])
    assert not torch.allclose(expected["both"], expected["weights"], atol=1e-3)
