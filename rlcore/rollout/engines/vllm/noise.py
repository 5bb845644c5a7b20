"""Errors on an actor's logits, to study mismatch: noise, and a floor of probabilities."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from rlcore.rollout.specs import ActorSpec
from rlcore.seeding import derive_seed


def processors(actor: ActorSpec) -> list[str | type[LogitsProcessor]] | None:
    """The errors that an actor's settings ask for, in the order in which they are applied."""
    noise = [NoiseProcessor] if actor.logit_noise else []
    floor = [FloorProcessor] if actor.probability_floor else []
    return [*noise, *floor] or None


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


class FloorProcessor(LogitsProcessor):
    """The floor e of `additional_config["probability_floor"]` under every token's probability.

    p_inf = (p + e)/(1 + V e) with p the distribution over all V tokens at the request's
    temperature. Top-p, top-k and min-p come after it and cut p_inf, as those of an engine do whose
    softmax has a floor; the processed log-probs include all of it.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._floor = float(vllm_config.additional_config["probability_floor"])
        self._temperatures: dict[int, float] = {}  # by batch row

    def is_argmax_invariant(self) -> bool:
        return False  # it is, but vLLM applies such processors after min-p

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(
            self._temperatures,
            batch_update,
            lambda params, *_: params.temperature or 1.0,  # greedy: the order alone counts
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        values = [self._temperatures.get(row, 1.0) for row in range(len(logits))]
        at = torch.tensor(values, device=logits.device, dtype=torch.float32)[:, None]
        # vLLM divides by the temperature next
        floored = at * ((logits.float() / at).softmax(-1) + self._floor).log()
        return floored.to(logits.dtype)
