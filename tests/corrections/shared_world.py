"""A policy whose output layer all states share, actors that are off by known errors, and the exact
curve of the gradient's mean squared error over the share of correction.

Prompts are fresh in every group. `measure` takes the curves that `WORLDS` holds (a minute each):
python tests/corrections/shared_world.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from rlcore.corrections.break_even import last_layer_sketch
from rlcore.types import StepTensors

VOCAB, LENGTH, STATE, PROMPT, CAP = 8, 8, 12, 6, 5.0
WIDE = torch.float64


_G = torch.Generator().manual_seed(5)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_G, dtype=WIDE)


INPUTS = PROMPT + VOCAB + 2
LAYER, OUTPUT = 0.6 * _drawn(STATE, INPUTS), 0.45 * _drawn(VOCAB, STATE)
OFFSET = _drawn(VOCAB)
BY_CONTEXT = 4 * _drawn(64, INPUTS + VOCAB), _drawn(VOCAB, 64) / 8


@dataclass(frozen=True)
class Curve:
    """Squared bias of no correction, of a whole one and their product, and the same of the variance
    of one answer; over the squared gradient."""

    bias: tuple[float, float, float]
    variance: tuple[float, float, float]

    def error(self, share: float, answers: int) -> float:
        a, b, c = (u + v / answers for u, v in zip(self.bias, self.variance))
        return (1 - share) ** 2 * a + share**2 * b + 2 * share * (1 - share) * c

    @property
    def n_star(self) -> float:
        gain = self.bias[0] - self.bias[1]
        return (self.variance[1] - self.variance[0]) / gain if gain > 0 else math.inf

    def excess(self, share: float, answers: int) -> float:
        """The error of a share over that of the best one, less 1."""
        best = min(self.error(x / 400, answers) for x in range(401))
        return self.error(share, answers) / best - 1


@dataclass(frozen=True)
class World:
    """An actor's error: an offset of the logits, a function of the context, and noise."""

    offset: float = 0.0
    context: float = 0.0
    noise: float = 0.0
    samples: int = 8  # of a group

    def actor(self, logits: Tensor, inputs: Tensor, g: torch.Generator) -> Tensor:
        """log p_inf from the policy's logits [..., V]."""
        first, second = BY_CONTEXT
        of_context = torch.sin(inputs @ first.T) * math.sqrt(2) @ second.T
        fresh = torch.randn(logits.shape, generator=g, dtype=WIDE)
        off = self.offset * OFFSET + self.context * of_context + self.noise * fresh
        return (logits + off).log_softmax(-1)

    def sample(self, groups: int, seed: int) -> tuple[Tensor, ...]:
        """(states [N, T, D], log p_ref [N, T, V], log p_inf of the tokens, tokens, advantages [N])
        of N = groups * samples answers."""
        g = torch.Generator().manual_seed(seed)
        answers = groups * self.samples
        prompt = torch.randn(groups, PROMPT, generator=g, dtype=WIDE)
        prompt = prompt.repeat_interleave(self.samples, 0)
        before = torch.zeros(answers, dtype=torch.long)
        count = torch.zeros(answers, VOCAB, dtype=WIDE)
        found: list[list[Tensor]] = [[], [], [], []]
        for place in range(LENGTH):
            at = torch.tensor([place / 4, 1.0], dtype=WIDE).expand(answers, 2)
            inputs = torch.cat([prompt, one_hot(before, VOCAB).to(WIDE), at], -1)
            state = torch.tanh(inputs @ LAYER.T)
            logits = state @ OUTPUT.T
            inf = self.actor(logits, torch.cat([inputs, count], -1), g)
            before = torch.multinomial(inf.exp(), 1, generator=g)[:, 0]
            count = count + one_hot(before, VOCAB)
            taken = inf.gather(1, before[:, None])[:, 0]
            for values, value in zip(found, (state, logits.log_softmax(-1), taken, before)):
                values.append(value)
        reward = count[:, 0] + 0.5 * count[:, 3] - 0.7 * count[:, 5] + (count[:, 1] >= 2).to(WIDE)
        reward = reward.view(groups, self.samples)
        others = self.samples / (self.samples - 1)
        advantages = (reward - reward.mean(1, keepdim=True)).flatten() * others
        return (*(torch.stack(values, 1) for values in found), advantages)

    def gradients(self, groups: int, seed: int) -> tuple[Tensor, Tensor]:
        """The plain and the corrected gradient of the output layer, of each group [groups, V D]."""
        states, ref, inf, tokens, advantages = self.sample(groups, seed)
        score = one_hot(tokens, VOCAB) - ref.exp()
        weight = (ref.gather(-1, tokens[..., None])[..., 0] - inf).exp().clamp(max=CAP)
        both = []
        for factor in (torch.ones_like(weight), weight):
            scale = (advantages[:, None] * factor)[..., None]
            each = (score * scale).transpose(1, 2) @ states
            both.append(each.view(groups, self.samples, -1).mean(1))
        return both[0], both[1]

    def step(self, groups: int, seed: int, *, version: int = 0, age: int = 0) -> StepTensors:
        """A step of the run at `version`, from the same samples."""
        states, ref, inf, tokens, advantages = self.sample(groups, seed)
        logp = ref.gather(-1, tokens[..., None])[..., 0].float()
        rows, one = tokens.flatten(), torch.ones(tokens.numel(), 1)
        sketch = last_layer_sketch(states.flatten(0, 1), ref.exp().flatten(0, 1).float(), one, rows)
        return StepTensors(
            mask=torch.ones_like(tokens, dtype=torch.bool),
            logp_inf=inf.float(),
            logp_ref=logp,
            logp_new=logp,
            rewards=torch.zeros(len(tokens)),
            group_ids=torch.arange(len(tokens)) // self.samples,
            advantages=advantages[:, None].expand_as(logp).float(),
            token_version=torch.full(tokens.shape, version - age, dtype=torch.int32),
            sample_ids=torch.arange(len(tokens)),
            step=version,
            sketch=sketch.view(*tokens.shape, -1),
        )

    def measure(self, groups: int, seed: int = 10**6) -> Curve:
        """The curve from as many groups, and as many of a matched actor, in chunks of 4,000."""
        matched = World(samples=self.samples)
        exact, _, (spread, _, _), n = _summed(matched, groups, 9 * 10**6)
        plain, corrected, spreads, n = _summed(self, groups, seed)
        noise = [v / n + spread / n for v in spreads]
        errors = (plain - exact, corrected - exact)
        pairs = ((0, 0), (1, 1), (0, 1))
        scale = float(exact @ exact) - spread / n
        bias = [float(errors[a] @ errors[b]) - e for (a, b), e in zip(pairs, noise)]
        a, b, c = (v / scale for v in bias)
        x, y, z = (v / scale for v in spreads)
        return Curve((a, b, c), (x, y, z))


Summed = tuple[Tensor, Tensor, tuple[float, ...], int]


@cache
def _summed(world: World, groups: int, seed: int) -> Summed:
    """Mean gradients, and variances and covariance of one answer."""
    sums, squares = [torch.zeros(VOCAB * STATE, dtype=WIDE) for _ in range(2)], [0.0] * 3
    for first in range(0, groups, 4000):
        a, b = world.gradients(4000, seed + first)
        sums = [sums[0] + a.sum(0), sums[1] + b.sum(0)]
        products = ((a * a).sum(), (b * b).sum(), (a * b).sum())
        squares = [s + float(p) for s, p in zip(squares, products)]
    a, b = (s / groups for s in sums)
    means = (float(a @ a), float(b @ b), float(a @ b))
    spread = tuple((q / groups - m) * world.samples for q, m in zip(squares, means))
    return a, b, spread, groups * world.samples


WORLDS: dict[str, World] = {
    "offset": World(offset=0.35),
    "context, small": World(context=0.5),
    "context": World(context=1.0),
    "offset and noise": World(offset=0.35, noise=0.7),
    "noise": World(noise=0.5),
    "offset, groups of 2": World(offset=0.35, samples=2),
    "context, groups of 2": World(context=1.0, samples=2),
}

# as `measure` gives them, of 320,000 answers (context: 1,280,000; groups of 2: 200,000 and 600,000)
CURVES: dict[str, Curve] = {
    "offset": Curve((0.09714, 0.005761, 0.01576), (48.98, 54.16, 48.73)),
    "context, small": Curve((0.0005495, -4.554e-05, 3.198e-05), (50.99, 57.55, 51.34)),
    "context": Curve((0.007097, 0.002487, 0.002951), (48.09, 66.13, 47.41)),
    "offset and noise": Curve((0.09016, 0.006304, 0.01795), (48.88, 63.37, 48.07)),
    "noise": Curve((-2.782e-05, -0.0001813, -0.0001831), (52.18, 58.02, 52.11)),
    "offset, groups of 2": Curve((0.09387, 0.004875, 0.01295), (51.87, 59.66, 52.24)),
    "context, groups of 2": Curve((0.007214, 0.003267, 0.003509), (52.73, 82.84, 51.35)),
}

if __name__ == "__main__":
    for name, world in WORLDS.items():
        curve = world.measure(200_000 * 8 // world.samples // 2)
        print(f'    "{name}": {curve},  # N* {curve.n_star:.0f}', flush=True)
