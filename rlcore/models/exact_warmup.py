"""Supervised warm-up in float64, whose rounded result is the same on every machine.

In float32 the order of sums depends on the instruction set, and a warm-up of some dozen steps ends
at different weights. In float64 60 steps of the quickstart's model end within 1e-12 of each other
(torch's default kernels against AVX2). So 303 of 1.6 million weights differ as float32, and none as
multiples of 2^-16, to which the result is rounded. Everything is drawn by numpy, and what
transformers computes in float32 whatever a model's dtype is (rotary positions, norms) is computed
in float64 here. CPU, small Qwen3 models of `models/fresh.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# token ids, and which of them are scored
Example = tuple[np.ndarray | Sequence[int], np.ndarray | Sequence[bool]]
GRID = 2.0**-16
SPREAD = 0.02  # standard deviation of fresh matrices, as of transformers' Qwen3
LOGITS = 1 << 23  # at most at once (64 MiB), of which a pass holds several copies


class ExactWarmUp:
    """One model and its optimizer.

    Example: warm_up = ExactWarmUp(folder, seed=0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """`folder`: a Qwen3 model, whose weights are drawn anew from `seed`."""
        from transformers import Qwen3ForCausalLM

        self.model: Any = Qwen3ForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="sdpa"
        )
        _draw(self.model, seed)
        self.widened(self.model)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps, foreach=False)

    def step(self, examples: Sequence[Example], lr: float, grad_clip: float) -> float:
        """One step of cross-entropy over all scored tokens; the mean loss before it."""
        self.optimizer.zero_grad()
        total = sum(int(np.sum(scored[1:])) for _, scored in examples)
        positions = sum(len(ids) for ids, _ in examples) / len(examples)
        at_once = max(1, int(LOGITS / (positions * self.model.config.vocab_size)))
        loss = 0.0
        for start in range(0, len(examples), at_once):
            part = self._summed(examples[start : start + at_once]) / total
            part.backward()
            loss += float(part.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), grad_clip, foreach=False)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return loss

    def _summed(self, examples: Sequence[Example]) -> Tensor:
        """The sum of cross-entropy over the scored tokens, whose logits alone are computed."""
        ids, scored = _padded(examples)
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        on = scored[:, 1:]
        logits = self.model.lm_head(hidden[:, :-1][on])
        return nn.functional.cross_entropy(logits, ids[:, 1:][on], reduction="sum")

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write the model in float32, its weights rounded to multiples of `GRID`."""
        for parameter in self.model.parameters():
            parameter.copy_((parameter / GRID).round() * GRID)
        self.model.to(torch.float32).save_pretrained(folder)

    @staticmethod
    def widened(model: Any) -> Any:
        """A float64 Qwen3 model whose norms and rotary positions are computed in float64, too."""
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                module.forward = _norm(module)
        powers = np.arange(0, model.config.head_dim, 2) / model.config.head_dim
        base = float(model.config.rope_parameters["rope_theta"])
        frequencies = torch.from_numpy(base**-powers)

        def positions(x: Tensor, position_ids: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
            angles = position_ids[..., None].double() * frequencies
            angles = torch.cat([angles, angles], -1)
            return angles.cos(), angles.sin()

        model.model.rotary_emb.forward = positions
        return model


def _draw(model: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            drawn = SPREAD * rng.standard_normal(tuple(parameter.shape))
            parameter.data.copy_(torch.from_numpy(drawn))
        else:
            parameter.data.fill_(1.0)  # norms


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    def forward(hidden: Tensor) -> Tensor:
        mean = hidden.square().mean(-1, keepdim=True)
        scaled: Tensor = module.weight * (hidden * torch.rsqrt(mean + module.variance_epsilon))
        return scaled

    return forward


def _padded(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Ids and scored tokens [B, L], padded on the right, where causal attention never looks."""
    longest = max(len(ids) for ids, _ in examples)
    ids = np.zeros((len(examples), longest), dtype=np.int64)
    scored = np.zeros((len(examples), longest), dtype=bool)
    for row, (own, on) in enumerate(examples):
        ids[row, : len(own)] = own
        scored[row, : len(on)] = on
    return torch.from_numpy(ids), torch.from_numpy(scored)
