"""Noise on an actor's logits, to study mismatch."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from rlcore.seeding import derive_seed


class NoiseProcessor(LogitsProcessor):
    """Gaussian noise of `additional_config["logit_noise"]`; the processed log-probs include it.

    The noise depends on (request seed, position) alone, not on the batch or a recomputation.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._std = float(vllm_config.additional_config["logit_noise"])
        # batch row -> (request seed, its output tokens so far)
        self._rows: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(
            self._rows, batch_update, lambda params, _, out: (int(params.seed or 0), out)
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator()
        for row, (seed, output) in self._rows.items():
            generator.manual_seed(derive_seed(seed, "rollout/logit_noise", len(output)))
            noise = torch.randn(logits.shape[1], generator=generator)
            logits[row] += self._std * noise.to(logits.device, logits.dtype)
        return logits
