"""A DeepSpeed engine that keeps the gradient of its last step, for `gradient_equality.py`."""

from __future__ import annotations

import numpy as np
import torch

from rlcore.learner.engines.deepspeed import ZeroEngine


class RecordingEngine(ZeroEngine):
    """`gradients`: whole gradients before clipping, by name. `backwards`: micro-batches so far."""

    gradients: dict[str, np.ndarray]
    backwards = 0

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.backwards += 1
        super().backward(loss, last=last)

    def grad_norm(self) -> float:
        self.gradients = {name: g.numpy() for name, g in self.full_gradients()}
        return super().grad_norm()
