"""Steps made from whole distributions, so that every formula can be compared with the sum over the
vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from timing import deadline

from rlcore.corrections.pipeline import Pipeline, build
from rlcore.corrections.specs import CORRECTIONS
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.registry import load_object
from rlcore.types import StepTensors


def pipeline_of(chosen: dict[str, dict[str, Any]], run_seed: int = 0, **objective: Any) -> Pipeline:
    """The pipeline of corrections given as name -> settings, under `algorithm` settings."""
    specs = {name: load_object(CORRECTIONS[name])(**args) for name, args in chosen.items()}
    return build(specs, run_seed, ObjectiveSpec(**objective))


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.double(), -1).float()


def make_step(
    logp_inf: torch.Tensor,
    logp_ref: torch.Tensor,
    logp_new: torch.Tensor | None = None,
    *,
    k: int = 20,
    seed: int = 0,
    mask: torch.Tensor | None = None,
    group: int = 2,
) -> StepTensors:
    """A step whose tokens are sampled from log-probs [B,T,V]; masked positions hold NaN wherever
    the type allows."""
    logp_new = logp_ref if logp_new is None else logp_new
    b, t, v = logp_inf.shape
    g = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(logp_inf.exp().flatten(0, 1), 1, generator=g).view(b, t, 1)
    mask = torch.ones(b, t, dtype=torch.bool) if mask is None else mask

    def taken(logp: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, logp.gather(-1, tokens)[..., 0], torch.nan)

    inf_top = logp_inf.topk(min(k, v), -1)
    ref_top, new_top = logp_ref.topk(min(k, v), -1), logp_new.topk(min(k, v), -1)
    return StepTensors(
        mask=mask,
        logp_inf=taken(logp_inf),
        logp_ref=taken(logp_ref),
        logp_new=taken(logp_new),
        rewards=torch.randint(0, 2, (b,), generator=g).float(),
        group_ids=torch.arange(b) // group,
        advantages=torch.where(mask, torch.randn(b, 1, generator=g).expand(b, t), torch.nan),
        token_version=torch.where(mask, torch.randint(0, 8, (b, t), generator=g), 99).int(),
        sample_ids=torch.arange(b) * 17 + 3,
        step=7,
        topk_ids_inf=inf_top.indices,
        topk_logp_inf=inf_top.values,
        ref_topk_ids=ref_top.indices,
        ref_topk_logp=ref_top.values,
        ref_logp_at_inf_ids=logp_ref.gather(-1, inf_top.indices),
        new_topk_ids=new_top.indices,
        new_topk_logp=new_top.values,
        new_logp_at_inf_ids=logp_new.gather(-1, inf_top.indices),
    )


def mismatched_step(
    b: int = 8, t: int = 11, v: int = 40, noise: float = 0.5, seed: int = 0, **kw: Any
) -> StepTensors:
    g = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(b, t, v, generator=g)
    off = [log_softmax(logits + noise * torch.randn(b, t, v, generator=g)) for _ in range(2)]
    lengths = torch.randint(1, t + 1, (b, 1), generator=g)
    return make_step(log_softmax(logits), *off, mask=torch.arange(t) < lengths, seed=seed, **kw)


class ThreadRanks:
    """A real exchange between threads that each play one data-parallel rank."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=deadline(30))
        self.slots: list[Any] = [None] * ranks

    def _all(
        self, rank: int, values: torch.Tensor, how: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        self.slots[rank] = values
        self.barrier.wait()
        result = how(torch.stack(self.slots))
        self.barrier.wait()
        return result

    def reduce(self, rank: int) -> Any:
        ranks = self

        class OfRank:
            def __call__(self, values: torch.Tensor) -> torch.Tensor:
                return ranks._all(rank, values, lambda stacked: stacked.sum(0))

            def max(self, values: torch.Tensor) -> torch.Tensor:
                return ranks._all(rank, values, lambda stacked: stacked.amax(0))

        return OfRank()


def on_ranks(work: Callable[[int, Any], Any], ranks: int) -> list[Any]:
    """`work(rank, reduce)` in one thread per rank; the results in rank order, or the first
    error."""
    exchange, results, errors = ThreadRanks(ranks), [None] * ranks, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, exchange.reduce(rank))
        except Exception as error:
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results
