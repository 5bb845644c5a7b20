"""Router replay: a mixture's layers compute the experts that the actor's engine chose, weighed by
the learner's own scores.

A layer has the router's logits z = W x of a token x over E experts, and the k experts I that the
engine chose for it. It computes

    sum over i in I of g_i expert_i(x),   g_i = softmax(z)_i [ / sum over j in I of softmax(z)_j ]

divided where the model normalises its top k. A plain pass has I = top k of z. Gradients reach W
through g; the choice itself has none in either. Where I is the learner's own top k, the pass is
the plain one to the bit. Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers" (2025), "rollout routing replay".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.interfaces import Reduce
from rlcore.learner.parts.part import LearnerPart

NONE = -1  # in place of experts: the token's are chosen by the learner itself


class Replay(LearnerPart):
    """Makes a model take the argument `routes` [R, W, layers, k] int16, the experts of each
    position, NONE where it chooses by itself."""

    def __init__(self, lm: nn.Module) -> None:
        """Raises ValueError for a model without a router that this can replay."""
        self._now: dict[nn.Module, Tensor | None] = {}  # of each router, in the pass that runs
        self.routers: dict[int, nn.Module] = {}  # by the index of their layer
        self._differing: Tensor | int = 0
        self._pairs: Tensor | int = 0
        for index, layer in enumerate(lm.base_model.layers):  # type: ignore[union-attr, arg-type]
            router = getattr(getattr(layer, "mlp", None), "gate", None)
            if not hasattr(router, "norm_topk_prob"):
                router = None
            # a hook of the layer, so that a recomputation of its activations passes it too
            layer.register_forward_pre_hook(partial(self._enter, router, index), with_kwargs=True)
            if router is not None:
                router.register_forward_hook(self._choose)
                self._now[router] = None
                self.routers[index] = router
        if not self._now:
            raise ValueError(f"{type(lm).__name__} has no router whose choices can be replayed")

    def _enter(
        self, router: nn.Module | None, index: int, layer: nn.Module, args: Any, given: Any
    ) -> tuple[Any, Any]:
        """Set the choice of experts for the layer's router; the rest of the layer does not see
        it."""
        del layer
        kept = {name: value for name, value in given.items() if name != "routes"}
        if router is not None:
            routes = given.get("routes")
            self._now[router] = None if routes is None else routes[:, :, index].flatten(0, 1).long()
        return args, kept

    def _choose(self, router: nn.Module, args: Any, output: Any) -> Any:
        """Replaces the router's result (logits [N, E], weights [N, k], experts [N, k])."""
        del args
        logits, weights, live = output
        routes = self._now[router]
        if routes is None:
            return output
        given = routes[:, 0] != NONE
        differs = given & (routes.sort(-1).values != live.sort(-1).values).any(-1)
        if torch.is_grad_enabled():
            self._differing = self._differing + differs.sum()
            self._pairs = self._pairs + given.sum()
        # in the learner's own order where the experts are equal, so that the pass is then unchanged
        experts = torch.where(differs[:, None], routes, live)
        scores = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, experts)
        if router.norm_topk_prob:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return logits, scores.to(weights.dtype), experts

    def metrics(self, reduce: Reduce) -> dict[str, float]:
        """Metrics of the differentiated passes since the last call, over all ranks. Collective."""
        counts = [torch.as_tensor(n, dtype=torch.float64) for n in (self._differing, self._pairs)]
        self._differing = self._pairs = 0
        differing, pairs = reduce(torch.stack([n.cpu() for n in counts])).tolist()
        return {"mismatch/routes_differ": differing / max(pairs, 1.0)}
