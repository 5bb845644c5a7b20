"""Jackpot's two normalisers under token-mean: variance of the gradient, with Z and without.

    python -m benchmarks.evidence.jackpot_variance [--states 2000] [--vocab 100]

Random states, an actor whose logits are the policy's plus Gaussian noise. The estimated quantity is
the mean over states of `E_{p_t}[A grad log p_t]` along a random direction, with an advantage that
does not depend on the token, and with one that does. Variances are exact in each state (a sum over
the vocabulary and the acceptance draw) and asymptotic in the number of tokens, per proposed token,
relative to sampling from p_t itself. No cap binds.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks.harness import machine, table
from rlcore.corrections.functional import jackpot_weight, obrs_acceptance

NO_CAP = 1e9


def states(count: int, vocab: int, noise: float) -> tuple[Tensor, Tensor]:
    """log p_t and log p_inf, [count, vocab] float64."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(count, vocab, generator=g, dtype=torch.float64)
    off = noise * torch.randn(count, vocab, generator=g, dtype=torch.float64)
    return logits.log_softmax(-1), (logits + off).log_softmax(-1)


def scores(target: Tensor, *, informed: bool) -> Tensor:
    """A grad log p_t along a random direction, [count, vocab]."""
    g = torch.Generator().manual_seed(1)
    direction = torch.randn(target.shape, generator=g, dtype=torch.float64)
    score = direction - (target.exp() * direction).sum(-1, keepdim=True)
    if informed:
        return score * score.sign()
    return score * torch.randn(len(target), 1, generator=g, dtype=torch.float64)


def variances(noise: float, count: int, vocab: int, *, informed: bool) -> dict[str, str]:
    """One row: acceptance, the variance of each estimator, and the bias of the paper's."""
    target, actor = states(count, vocab, noise)
    f = scores(target, informed=informed)
    accept = obrs_acceptance(target, actor)
    z = (actor.exp() * accept).sum(-1, keepdim=True)
    plain = jackpot_weight(
        torch.ones_like(f), target, target, actor, target="ref", c1=NO_CAP, c2=NO_CAP
    )
    kept = actor.exp() * accept
    truth = (target.exp() * f).sum(-1).mean()
    on_policy = (target.exp() * f**2).sum(-1).mean() - truth**2
    without = (kept * (plain * f) ** 2).sum(-1).mean() - truth**2
    # a ratio of two sums: its influence is accepted * (weight * f - mean) / mean Z
    mean = (kept * z * plain * f).sum(-1).mean() / z.mean()
    paper = (kept * (z * plain * f - mean) ** 2).sum(-1).mean() / z.mean() ** 2
    ratio = (target - actor).exp()
    tis = (actor.exp() * (ratio * f) ** 2).sum(-1).mean() - truth**2
    # states count by their acceptance under Z: only that moves the mean
    bias = f"{(mean - truth) / truth:+.2%}" if informed else "0 in expectation"
    return {
        "logit noise": f"{noise:g}",
        "advantage": "depends on the token" if informed else "does not",
        "acceptance": f"{z.mean():.3f}",
        "variance, paper (Z)": f"{paper / on_policy:.3f}",
        "variance, none (no Z)": f"{without / on_policy:.3f}",
        "variance, uncapped TIS": f"{tis / on_policy:.3f}",
        "bias of the paper's mean over states": bias,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--states", type=int, default=2000)
    parser.add_argument("--vocab", type=int, default=100)
    args = parser.parse_args()
    print(machine())
    rows = [
        variances(noise, args.states, args.vocab, informed=informed)
        for informed in (False, True)
        for noise in (0.02, 0.1, 0.3, 0.6, 1.0, 1.5)
    ]
    print(table(rows))


if __name__ == "__main__":
    main()
