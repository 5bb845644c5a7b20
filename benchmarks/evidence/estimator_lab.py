"""Bias and variance of every correction's gradient on small worlds, and DVP under a floor (E0).

    python -m benchmarks.evidence.estimator_lab [--answers 4000]
        [--parts cells floors identity needle]

A world has 16 states and a vocabulary of 32 tokens, which choose the next state; an answer is T
tokens, its reward the share of good ones. Policies are tables of logits, so that the exact gradient
and the exact expectation of each estimator are sums over the table; variances are those of
`--answers` sampled answers. Weights are rlcore's own functions (`rlcore.corrections.functional`).
Beside the worlds, a bandit with a rare best action (`needle`): does an actor's error explore?
Everything is float64 from numpy's generator, whose draws are the same on every machine.

Writes `benchmarks/results/evidence/estimator_lab.json`, the block of results on
`benchmarks/results/evidence/estimator-lab.md`, and its figure.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.evidence.estimator_lab_page import MIXED, write_page
from rlcore.corrections import functional as F

STATES, VOCAB, SEEDS = 16, 32, tuple(range(8))
#: By length of answers: kinds of mismatch and their sizes.
GRID: dict[int, dict[str, tuple[float, ...]]] = {
    8: {
        "fixed": (0.1, 0.3, 0.6),
        "fresh": (0.1, 0.3, 0.6),
        "stale": (0.01, 0.1),
        "draft": (0.3, 0.6),
        "mixed": (0.05, 0.1, 0.25, 0.5),
    },
    64: {
        "fixed": (0.1, 0.3, 0.6),
        "fresh": (0.3, 0.6),
        "draft": (0.3,),
        "mixed": (0.05, 0.1, 0.25, 0.5),
    },
}
DRAWS = 2000  # of the noise, for expectations under fresh noise
BATCHES = (16, 128, 1024, math.inf)
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "evidence" / "estimator_lab.json"
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class World:
    """Tables [16, 32]: the next state, the quality (0 or 1) and a policy's logits of each token."""

    length: int
    following: Tensor
    quality: Tensor
    logits: Tensor

    @classmethod
    def drawn(cls, length: int, rng: np.random.Generator) -> World:
        following = rng.integers(STATES, size=(STATES, VOCAB))
        quality = (rng.random((STATES, VOCAB)) < 0.15).astype(float)
        logits = 2.0 * rng.standard_normal((STATES, VOCAB)) + quality
        return cls(length, *(torch.from_numpy(table) for table in (following, quality, logits)))

    def visits(self, p: Tensor) -> Tensor:
        """Probability [T, 16] of each state at each position, under token probabilities p."""
        at = torch.full((STATES,), 1 / STATES, dtype=torch.float64)
        found = []
        for _ in range(self.length):
            found.append(at)
            at = self._moved(at[:, None] * p)
        return torch.stack(found)

    def expected(self, p: Tensor, weighed: Tensor, target: Tensor) -> Tensor:
        """Expectation [16, 32] of `sum_t w A grad log target(x_t)` over answers drawn by p.

        weighed: p times the weight of each token; A: the reward less its mean under p."""
        values = [torch.zeros(STATES, dtype=torch.float64)]
        for _ in range(self.length):
            values.append((p * (self.quality + values[-1][self.following])).sum(-1))
        mean = values[-1].mean()
        earned = torch.zeros(STATES, dtype=torch.float64)  # expected reward so far, and being there
        total = torch.zeros(STATES, VOCAB, dtype=torch.float64)
        for at, to_go in zip(self.visits(p), values[-2::-1]):
            after = self.quality + to_go[self.following] - mean
            total += weighed * (earned[:, None] + at[:, None] * after) / self.length
            earned = self._moved((earned[:, None] + at[:, None] * self.quality) * p)
        return total - target * total.sum(-1, keepdim=True)

    def gradient(self, logits: Tensor) -> Tensor:
        p = logits.softmax(-1)
        return self.expected(p, p, p)

    def _moved(self, mass: Tensor) -> Tensor:
        moved = torch.zeros(STATES, dtype=torch.float64)
        return moved.scatter_add_(0, self.following.flatten(), mass.flatten())


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL(p || target) in nats, [...] over the last dimension."""
    logp = logits.log_softmax(-1)
    return (logp.exp() * (logp - target.log_softmax(-1))).sum(-1)


def mismatched(
    world: World, kind: str, size: float, sign: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor, float]:
    """Logits [16, 32] of the actor and of the learner, and the deviation of noise that is drawn
    anew at each token. Sizes of a kind share one error, which `sign` reverses."""
    base, error = world.logits, sign * torch.from_numpy(rng.standard_normal((STATES, VOCAB)))
    if kind == "fixed":
        return base + size * error, base, 0.0
    if kind == "fresh":
        return base, base, size
    if kind == "mixed":  # of deviation MIXED; `size` is the fixed part of its variance
        return base + MIXED * math.sqrt(size) * error, base, MIXED * math.sqrt(1 - size)
    if kind == "draft":
        return (1 - size) * base + 2 * size * error, base, 0.0
    ahead = base.clone()  # the learner, `size` nats of exact ascent later
    while divergence(base, ahead).mean() < size:
        step = world.gradient(ahead)
        ahead += 0.1 * math.sqrt(STATES) * step / step.norm()
    return base, ahead, 0.0


def averaged(logp: Tensor, inf: Tensor) -> Weights:
    """The weight of each token [N, M], for Jackpot the mean over its draws; `inf` may have further
    dimensions before the vocabulary."""
    on = torch.ones_like(inf, dtype=torch.bool)
    accepted = F.obrs_acceptance(logp, inf)
    z = (inf.exp() * accepted).sum(-1, keepdim=True).expand_as(inf)
    return {
        "none": torch.ones_like(inf),
        "tis C=2": F.tis(logp, inf, on, cap=2.0),
        "tis C=10": F.tis(logp, inf, on, cap=10.0),
        "mis": F.mis(logp, inf, on, low=0.5, high=2.0),
        "icepop": F.mis(logp, inf, on, low=0.5, high=5.0),
        "w5": F.tis(logp, inf, on, cap=5.0),  # what AIS mixes with no correction
        "jackpot": accepted * F.jackpot_weight(z, logp, logp, inf, target="ref"),
        "accepted": accepted,
    }


def sample(
    world: World, inf_logits: Tensor, noise: float, answers: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States and tokens [N, T], log p_inf over the vocabulary [N, T, 32], and rewards [N]."""
    state = torch.from_numpy(rng.integers(STATES, size=answers))
    states, tokens, logps = [], [], []
    reward = torch.zeros(answers, dtype=torch.float64)
    for _ in range(world.length):
        logits = inf_logits[state]
        if noise:
            logits = logits + noise * torch.from_numpy(rng.standard_normal(logits.shape))
        logp = logits.log_softmax(-1)
        uniform = torch.from_numpy(rng.random((answers, 1)))
        token = (logp.exp().cumsum(-1) < uniform).sum(-1).clamp(max=VOCAB - 1)
        states.append(state)
        tokens.append(token)
        logps.append(logp)
        reward += world.quality[state, token] / world.length
        state = world.following[state, token]
    return torch.stack(states, 1), torch.stack(tokens, 1), torch.stack(logps, 1), reward


def gradients(coefficients: Tensor, states: Tensor, tokens: Tensor, target: Tensor) -> Tensor:
    """`sum_t c_t grad log target(x_t)` of each answer, [N, 16 * 32]."""
    answers = len(coefficients)
    taken = torch.zeros(answers, STATES * VOCAB, dtype=torch.float64)
    taken.scatter_add_(1, states * VOCAB + tokens, coefficients)
    at = torch.zeros(answers, STATES, dtype=torch.float64).scatter_add_(1, states, coefficients)
    return taken - (at[:, :, None] * target).flatten(1)


def study(
    kind: str, size: float, length: int, answers: int, seed: int, sign: int = 1
) -> dict[str, Any]:
    """Figures of one world: of the mismatch, and of each estimator."""
    rng = np.random.default_rng([seed, length])
    world = World.drawn(length, np.random.default_rng(seed))
    inf_logits, target_logits, noise = mismatched(world, kind, size, sign, rng)
    logp, target = target_logits.log_softmax(-1), target_logits.softmax(-1)
    exact = world.gradient(target_logits)

    actor = inf_logits[None]
    if noise:  # and its negative, so that what is odd in the noise cancels
        half = torch.from_numpy(rng.standard_normal((DRAWS // 2, STATES, VOCAB)))
        actor = inf_logits + noise * torch.cat([half, -half])
    inf = actor.log_softmax(-1)
    table = averaged(logp.expand_as(inf), inf)
    p = inf.exp().mean(0)
    share = world.visits(p).mean(0)[:, None]
    weighed = {name: (inf.exp() * w).mean(0) for name, w in table.items()}
    kept = (share * weighed.pop("accepted")).sum().item()
    means = {name: world.expected(p, w, target).flatten() for name, w in weighed.items()}

    states, tokens, infs, rewards = sample(world, inf_logits, noise, answers, rng)
    advantages = rewards[:, None].expand_as(tokens) - rewards.mean()
    chosen = tokens[..., None]
    token_inf = infs.gather(-1, chosen)[..., 0]
    token_logp = logp[states, tokens]
    on = torch.ones_like(tokens, dtype=torch.bool)
    weights = {n: w.gather(-1, chosen)[..., 0] for n, w in averaged(logp[states], infs).items()}
    accepted = weights.pop("accepted")
    _, signals = F.ais(token_logp, token_inf, advantages, on)
    alpha = signals["alpha"]
    ess = F.mismatch_values(F.mismatch_accumulate(token_logp, token_inf, on))["ess"]
    again = F.fixed_share(token_logp, token_inf, on, states * VOCAB + tokens)
    own = {n: gradients(w * advantages, states, tokens, target) for n, w in weights.items()}
    drawn = torch.from_numpy(rng.random(accepted.shape)) < accepted
    z_max = torch.where(accepted > 0, weights["jackpot"] / accepted.clamp(min=1e-300), 0.0)
    own["jackpot, drawn"] = gradients(z_max * drawn * advantages, states, tokens, target)
    means["jackpot, drawn"] = means["jackpot"]
    for name in ("jackpot", "jackpot, drawn"):  # the mean is over the tokens that stay
        own[name], means[name] = own[name] / kept, means[name] / kept
    parts = _mixed_error(own, means, exact.flatten())
    for found in (own, means):
        full = found.pop("w5")
        found["ais"] = found["none"] + alpha * (full - found["none"])
    mass = share[:, 0] @ divergence(actor, target_logits.expand_as(actor)).mean(0)
    return {
        "kl": mass.item(),
        "acceptance": kept,
        "ess": ess,
        "fixed_share": again["fixed_share"],
        "alpha": alpha,
        "mixing": [_best_share(parts, batch) for batch in BATCHES],
        "mixed_error": parts,
        "n_star_seen": F.batch_worth_correcting(own["none"], own["tis C=10"]),
        "scale": exact.square().sum().item(),
        "arms": {
            name: {
                "bias2": (means[name] - exact.flatten()).square().sum().item(),
                "variance": (g - means[name]).square().sum(1).mean().item(),
                "cosine": torch.cosine_similarity(means[name], exact.flatten(), 0).item(),
            }
            for name, g in own.items()
        },
    }


def _mixed_error(own: Weights, means: Weights, exact: Tensor) -> dict[str, list[float]]:
    """Squared bias and variance of no correction, of that with C = 5, and their product: at share x
    and N answers the mean squared error is `bias + variance / N` of (1-x)^2, x^2 and 2 x (1-x)."""
    pairs = (("none", "none"), ("w5", "w5"), ("none", "w5"))
    errors = {n: means[n] - exact for n in ("none", "w5")}
    spread = {n: own[n] - means[n] for n in ("none", "w5")}
    return {
        "bias": [(errors[a] @ errors[b]).item() for a, b in pairs],
        "variance": [(spread[a] * spread[b]).sum(1).mean().item() for a, b in pairs],
    }


def _best_share(parts: dict[str, list[float]], batch: float) -> float:
    """The share of correction with the least mean squared error."""
    a, b, c = (bias + vary / batch for bias, vary in zip(parts["bias"], parts["variance"]))
    curve = a - 2 * c + b
    return min(max((a - c) / curve, 0.0), 1.0) if curve > 0 else 0.0


def cell(kind: str, size: float, length: int, answers: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Means over worlds of one kind and size of mismatch; squared biases and variances relative to
    the mean |gradient|^2.

    Errors of logits also count reversed: what is odd in them, such as an actor that happens to be
    the more certain one, is no matter of size."""
    signs = (1, -1) if kind in ("fixed", "draft", "mixed") else (1,)
    worlds = [study(kind, size, length, answers, s, sign) for s in seeds for sign in signs]

    def mean(get: Callable[[dict[str, Any]], Any]) -> Any:
        return np.mean([get(w) for w in worlds], axis=0).tolist()

    scale = mean(lambda w: w["scale"])
    arms = {}
    for name in worlds[0]["arms"]:
        bias2, variance, cosine = (
            mean(lambda w, n=name, k=key: w["arms"][n][k])
            for key in ("bias2", "variance", "cosine")
        )
        arms[name] = {"bias2": bias2 / scale, "variance": variance / scale, "cosine": cosine}
    figures = ("kl", "acceptance", "ess", "fixed_share", "alpha", "mixing")
    parts = {k: mean(lambda w, k=k: w["mixed_error"][k]) for k in ("bias", "variance")}
    return {
        **{"kind": kind, "size": size, "length": length},
        **{name: mean(lambda w, n=name: w[n]) for name in figures},
        "mixed_error": {k: [v / scale for v in values] for k, values in parts.items()},
        "n_star_seen": sorted(w["n_star_seen"] for w in worlds),
        "arms": arms,
    }


def identity(states: int = 5000, vocab: int = 64, cap: float = 3.0) -> list[dict[str, float]]:
    """Jackpot averaged over its draws, in its own functions, against min(Z rho, C1) written out."""
    rng, found = np.random.default_rng(0), []
    for size in (0.1, 0.3, 0.6, 1.0, 1.5):
        logits = 2.0 * torch.from_numpy(rng.standard_normal((states, vocab)))
        error = size * torch.from_numpy(rng.standard_normal((states, vocab)))
        logp, inf = logits.log_softmax(-1), (logits + error).log_softmax(-1)
        ids = torch.arange(vocab).expand(states, 1, vocab)
        top = (logp[:, None], inf[:, None])
        z, _ = F.obrs_normalizer(ids, top[1], ids, top[0], top[0])
        drawn = F.obrs_acceptance(logp, inf) * F.jackpot_weight(
            z.expand_as(inf), logp, logp, inf, target="ref", c1=cap
        )
        p, q = logits.softmax(-1), (logits + error).softmax(-1)
        product = (torch.minimum(p, q).sum(-1, keepdim=True) * p / q).clamp(max=cap)
        found.append({"size": size, "difference": (drawn - product).abs().max().item()})
    return found


FLOORS = (1e-7, 3.2e-7, 5e-7, 7e-7, 1e-6)
FLOOR_TOKENS, FLOOR_LENGTH, FLOOR_SEEDS = 49_152, 64, (0, 1, 2)
FLOOR_ARMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor] | None] = {
    "none": lambda ref, inf, on: torch.ones_like(ref),
    "tis": lambda ref, inf, on: F.tis(ref, inf, on, cap=2.0),
    "mis": lambda ref, inf, on: F.mis(ref, inf, on, low=0.5, high=2.0),
    "dvp": None,  # its min-p draws nothing from the floor, so that nothing is left to weigh
}


def under_floor(floor: float, arm: str, seed: int, steps: int = 150) -> tuple[float, float]:
    """Success of the learner after training under a floor, and the T*m that samples show.

    Answers of 64 tokens, all of which must be right; a policy of {right, 3 wrong} at each position,
    from 0.90 to 0.99 right, beside a tail of 49,152 tokens that the learner gives 1e-9 each."""
    rng = np.random.default_rng(seed)
    right = torch.from_numpy(0.90 + 0.09 * rng.random(FLOOR_LENGTH))
    rest = ((1 - right) / 3).log()[:, None].expand(-1, 3)
    z = torch.cat([right.log()[:, None], rest], 1)
    m = 0.0 if arm == "dvp" else FLOOR_TOKENS * floor / (1 + FLOOR_TOKENS * floor)
    floored = []
    for step in range(steps):
        p = z.softmax(-1)
        actor = torch.cat([p * (1 - m), torch.full((FLOOR_LENGTH, 1), m, dtype=p.dtype)], 1)
        uniform = torch.from_numpy(rng.random((128, FLOOR_LENGTH, 1)))
        token = (actor.cumsum(-1) < uniform).sum(-1).clamp(max=4)
        inf = torch.cat(
            [actor[:, :4], torch.full((FLOOR_LENGTH, 1), floor, dtype=p.dtype)], 1
        ).log()
        ref = torch.cat([p, torch.full((FLOOR_LENGTH, 1), 1e-9, dtype=p.dtype)], 1).log()
        at = torch.arange(FLOOR_LENGTH).expand_as(token)
        on = torch.ones_like(token, dtype=torch.bool)
        tokens_ref, tokens_inf = ref[at, token], inf[at, token]
        weigh = FLOOR_ARMS[arm]
        weight = torch.ones_like(tokens_ref) if weigh is None else weigh(tokens_ref, tokens_inf, on)
        keep = F.veto(tokens_ref, tokens_inf, on)
        floored.append(F.floor_tokens(tokens_ref, tokens_inf, token == 4, on).mean().item())
        reward = (token == 0).all(1).double()
        coefficient = weight * ((reward - reward.mean()) * keep)[:, None]
        taken = torch.nn.functional.one_hot(token, 5)[..., :4] - p
        step_size = 0.015 * (1 - step / steps)
        g = (coefficient[..., None] * taken).sum(0) / max(int(keep.sum()), 1)
        z = z + step_size * g / (g.square().mean().sqrt() + 1e-8)
    return z.softmax(-1)[:, 0].prod().item(), float(np.mean(floored))


def floors() -> list[dict[str, Any]]:
    rows = []
    for floor in FLOORS:
        found = {arm: [under_floor(floor, arm, s) for s in FLOOR_SEEDS] for arm in FLOOR_ARMS}
        rows.append(
            {
                "floor": floor,
                "expected": FLOOR_LENGTH * FLOOR_TOKENS * floor / (1 + FLOOR_TOKENS * floor),
                "counted": float(np.mean([counted for _, counted in found["none"]])),
                "success": {arm: [success for success, _ in f] for arm, f in found.items()},
            }
        )
    return rows


def _ais(logp: Tensor, inf: Tensor, advantages: Tensor) -> Tensor:
    """The weights [N] of one batch."""
    on = torch.ones_like(logp)
    statistics = F.ais_accumulate(logp, inf, advantages, on)
    return F.ais_weight(statistics, logp, inf, on)[0]


#: Actions of the bandit: the needle pays 1, the decoy less, the others nothing. These numbers were
#: chosen by the matched arm alone, which finds the needle in some 0.4 of the runs.
ACTIONS, NEEDLE, DECOY, DECOY_PAYS = 64, 0.01, 0.05, 0.3
NEEDLE_SEEDS, NEEDLE_STEPS, NEEDLE_BATCH, NEEDLE_RATE = 1000, 300, 16, 4.0
#: Errors of the actor: KL of 0.13 and 0.3
NEEDLE_ERRORS = (("fresh", 0.6), ("fresh", 1.0), ("fixed", 0.6))
NEEDLE_ARMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "none": lambda logp, inf, advantages: torch.ones_like(logp),
    "tis C=5": lambda logp, inf, advantages: F.tis(logp, inf, torch.ones_like(logp), cap=5.0),
    "ais": torch.func.vmap(_ais),
}


def needle_found(kind: str, size: float, arm: str, seeds: int = NEEDLE_SEEDS) -> Tensor:
    """[seeds], 1 for each learner that ends with more than half of its probability on the needle.

    Plain policy gradient, the batch's mean reward as baseline; the actor's logits have an error of
    deviation `size`, anew for each draw (fresh) or once for all (fixed)."""
    rng = np.random.default_rng(0)
    p = torch.full((ACTIONS,), (1 - NEEDLE - DECOY) / (ACTIONS - 2), dtype=torch.float64)
    p[0], p[1] = NEEDLE, DECOY
    pays = torch.zeros(ACTIONS, dtype=torch.float64)
    pays[0], pays[1] = 1.0, DECOY_PAYS
    z, shape = p.log().expand(seeds, -1), (seeds, NEEDLE_BATCH, ACTIONS)
    error = size * torch.from_numpy(rng.standard_normal((seeds, 1, ACTIONS)))
    for _ in range(NEEDLE_STEPS):
        if kind == "fresh" and size:
            error = size * torch.from_numpy(rng.standard_normal(shape))
        logits = (z[:, None] + error).expand(shape)
        reached = logits.exp().cumsum(-1)  # logits stay small: no maximum need be taken off
        total = reached[..., -1:]
        uniform = torch.from_numpy(rng.random((seeds, NEEDLE_BATCH, 1)))
        chosen = (reached < uniform * total).sum(-1).clamp(max=ACTIONS - 1)
        advantages = pays[chosen] - pays[chosen].mean(1, keepdim=True)
        taken = logits.gather(-1, chosen[..., None])[..., 0] - total[..., 0].log()
        logp = z.log_softmax(-1)
        weight = NEEDLE_ARMS[arm](logp.gather(1, chosen), taken, advantages)
        c = weight * advantages / NEEDLE_BATCH
        gradient = torch.zeros(seeds, ACTIONS, dtype=torch.float64).scatter_add_(1, chosen, c)
        z = z + NEEDLE_RATE * (gradient - c.sum(1, keepdim=True) * logp.exp())
    return (z.softmax(-1)[:, 0] > 0.5).double()


def needle() -> list[dict[str, Any]]:
    """By error of the actor the share of runs that find the needle, and what each arm finds more
    than the matched actor's (paired by seed), with half of its 95% interval."""
    matched = needle_found("fresh", 0.0, "none")
    rows: list[dict[str, Any]] = [{"kind": "none", "size": 0.0, "matched": matched.mean().item()}]
    for kind, size in NEEDLE_ERRORS:
        found = {arm: needle_found(kind, size, arm) for arm in NEEDLE_ARMS}
        pairs = {"none": matched, "tis C=5": matched, "ais": found["tis C=5"]}
        more = {a: _more(found[a], other) for a, other in pairs.items()}
        more["ais above none"] = _more(found["ais"], found["none"])
        shares = {arm: own.mean().item() for arm, own in found.items()}
        rows.append({"kind": kind, "size": size, "found": shares, "more": more})
    return rows


def _more(own: Tensor, other: Tensor) -> list[float]:
    difference = own - other
    return [difference.mean().item(), 1.96 * difference.std().item() / math.sqrt(len(own))]


def computed(part: str, answers: int) -> Any:
    if part == "cells":
        return [
            cell(kind, size, length, answers, SEEDS)
            for length, kinds in GRID.items()
            for kind, sizes in kinds.items()
            for size in sizes
        ]
    return {"floors": floors, "identity": identity, "needle": needle}[part]()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["cells", "floors", "identity", "needle"]
    parser.add_argument("--answers", type=int, default=4000, help="for each variance")
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts, help="none: the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in args.parts:
        found[part] = rounded(computed(part, args.answers))
        found |= {"answers": args.answers} if part == "cells" else {}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    write_page(found)


def rounded(value: Any) -> Any:
    """Floats to four significant digits, which are the same on every machine; infinity as null."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    if isinstance(value, float):
        return None if math.isinf(value) else float(f"{value:.4g}")
    return value


if __name__ == "__main__":
    main()
