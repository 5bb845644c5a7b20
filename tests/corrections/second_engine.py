"""A second engine: the gradient of one step in numpy and float64, written from METHODS.md and the
papers. It shares no code with rlcore and imports nothing of it.

The policies are tables of logits by the last token; answers are lists of tokens. Equations are
numbered as in the papers: Jackpot (OBRS), AIS, DVP, RAPID; others as named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

CLAMP = 20.0
Array = np.ndarray


@dataclass
class Case:
    """One step. Tables [S, V] of logits: row s follows token s, the last row the prompt."""

    ref: Array
    new: Array
    inf: Array
    base: Array
    answers: list[list[int]]
    rewards: list[float]
    groups: list[int]
    truncated: list[bool]
    longest: int  # tokens allowed
    corrections: dict[str, dict[str, Any]] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)


@dataclass
class Token:
    """One sampled token. `w` is its weight, `kept` whether it is in the loss."""

    row: int
    state: int
    id: int
    ref: float
    new: float
    inf: float
    base: float
    advantage: float
    w: float = 1.0
    kept: bool = True
    at: Callable[[float], float] = lambda d: 1.0  # weight of a token of log ratio d in its place


def log_softmax(z: Array) -> Array:
    shifted = z - z.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def safe_set(z: Array, rho: float | None) -> Array:
    """DVP: tokens with p >= rho max p."""
    return np.ones(z.shape, bool) if rho is None else z >= z.max(-1, keepdims=True) + math.log(rho)


def constrained(z: Array, rho: float | None) -> Array:
    """DVP: log-probs conditioned on the safe set, -inf outside."""
    return log_softmax(np.where(safe_set(z, rho), z, -np.inf))


def clipped_exp(d: float, bound: float = CLAMP) -> float:
    return math.exp(min(max(d, -bound), bound))


def gap(a: float, b: float) -> float:
    """log a/b of a token; -inf where a is impossible."""
    return -math.inf if a == -math.inf else a - b


def _averaged(z: float, lam: float, c1: float, alpha: float, d: float) -> float:
    """Jackpot's weight of an accepted token times the probability that it is accepted."""
    return min(z * max(lam, clipped_exp(d)), c1) * min(1.0, math.exp(d) / lam) / alpha


class Engine:
    """The whole computation of `Case`; `gradient` is d loss / d logits of p_new."""

    def __init__(self, case: Case) -> None:
        self.case = case
        o = {"eps_low": 0.2, "eps_high": 0.2, "kl_coef": 0.0, "entropy_coef": 0.0}
        o |= {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05}
        self.o = o | {"kl_estimator": "k3", "kl_ratio_cap": 2.0} | case.objective
        self.rho = case.corrections.get("dvp", {}).get("rho")
        self.tables = {
            name: constrained(getattr(case, name), self.rho) for name in ("ref", "new", "base")
        }
        self.tables["inf"] = log_softmax(case.inf)
        adjusted = case.corrections.get("tis", {}).get("adjusted", False)
        self.anchored = adjusted or self.o["loss"] == "reinforce"
        self.tokens = self._tokens()
        self.rows = [[t for t in self.tokens if t.row == i] for i in range(len(case.answers))]
        for name, settings in case.corrections.items():
            getattr(self, f"_{name}")(**settings)

    def _tokens(self) -> list[Token]:
        found = []
        advantages = self._advantages()
        for row, answer in enumerate(self.case.answers):
            state = len(self.case.ref) - 1
            for token in answer:
                logs = {n: float(self.tables[n][state, token]) for n in self.tables}
                found.append(Token(row, state, token, advantage=advantages[row], **logs))
                state = token
        return found

    def target(self, t: Token) -> float:
        """log of the policy that weights must lead to."""
        return t.new if self.anchored else t.ref

    # ----- advantages, by episode -----

    def _advantages(self) -> list[float]:
        name, r = self.o["advantage"], np.array(self.case.rewards)
        lengths = np.array([len(a) for a in self.case.answers], float)
        groups = np.array(self.case.groups)
        if "rapid" in self.case.corrections:
            return self._rapid_advantages(r, groups)
        out = np.zeros(len(r))
        for g in set(self.case.groups):
            mine = groups == g
            x, n = r[mine], mine.sum()
            centred = x - x.mean()
            std = x.std(ddof=1) if n > 1 else 0.0
            if name == "grpo":
                centred = centred / (std + 1e-6)
            elif name == "rloo":
                centred = np.array(
                    [x[i] - np.delete(x, i).mean() if n > 1 else 0 for i in range(n)]
                )
            elif name == "opo":
                centred = x - (lengths[mine] * x).sum() / lengths[mine].sum()
            out[mine] = centred
        if name in ("reinforce", "reinforce_pp", "reinforce_pp_baseline"):
            values = out if name == "reinforce_pp_baseline" else r
            count = lengths if name != "reinforce" else np.ones(len(r))
            mean = (count * values).sum() / count.sum()
            out = values - mean
            if name != "reinforce":
                out = out / math.sqrt(max((count * out**2).sum() / count.sum(), 1e-8))
        if name == "gpg":
            flat = sum(np.ptp(r[groups == g]) == 0 for g in groups)
            out = out * len(r) / max(len(r) - flat, 1)
        return list(out)

    def _rapid_advantages(self, r: Array, groups: Array) -> list[float]:
        """RAPID: A_n = R_n - (1/|K|) sum min(W, eta) R."""
        w = np.array(self._sequence_weights(self.case.corrections["rapid"]["eta"]))
        return [float(r[i] - (w * r)[groups == groups[i]].mean()) for i in range(len(r))]

    def _sequence_weights(self, eta: float) -> list[float]:
        found = []
        for answer in self.case.answers:
            state, total = len(self.case.ref) - 1, 0.0
            for token in answer:
                total += float(self.tables["new"][state, token] - self.tables["inf"][state, token])
                state = token
            found.append(min(clipped_exp(total), eta))
        return found

    # ----- corrections: weights and masks -----

    def _ratios(self, level: str) -> dict[int, float]:
        """Ratio to p_inf of each token, or of its sequence, by the token's identity."""
        found = {}
        for row in self.rows:
            logs = [max(min(gap(self.target(t), t.inf), 1e6), -1e6) for t in row]
            whole = {"sequence": sum(logs), "geometric": sum(logs) / max(len(logs), 1)}
            for t, d in zip(row, logs):
                found[id(t)] = clipped_exp(d if level == "token" else whole[level])
        return found

    def _tis(self, cap=2.0, floor=0.0, level="token", normalised=False, adjusted=False) -> None:
        found = {k: max(min(r, cap), floor) for k, r in self._ratios(level).items()}
        mean = 1.0
        if normalised:
            left = [[found[id(t)] for t in row if t.kept] for row in self.rows]
            one = [w for ws in left for w in (ws if level == "token" else ws[:1])]
            mean = sum(one) / len(one) if sum(one) > 0 else 1.0
        for t in self.tokens:
            t.w *= found[id(t)] / mean
            t.at = lambda d: max(min(clipped_exp(d), cap), floor) / mean

    def _mis(self, low=0.5, high=2.0, level="token") -> None:
        for t in self.tokens:
            r = self._ratios(level)[id(t)]
            t.w *= r if low <= r <= high else 0.0
            t.at = lambda d: clipped_exp(d) if low <= clipped_exp(d) <= high else 0.0

    def _icepop(self, low=0.5, high=5.0) -> None:
        self._mis(low, high)

    def _minpro(self, cap=2.0) -> None:
        """rho_t times the least ratio before t."""
        for row in self.rows:
            logs = [gap(self.target(t), t.inf) for t in row]
            for i, t in enumerate(row):
                t.w *= min(clipped_exp(logs[i] + min(logs[:i], default=0.0)), cap)

    def _vesp(self, k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0) -> None:
        ratios = self._ratios("sequence")
        for t in self.tokens:
            k, lam = (k_pos, lam_pos) if t.advantage >= 0 else (k_neg, lam_neg)
            t.w *= ratios[id(t)] ** k * math.exp(lam * (1 - ratios[id(t)]))

    def _dppo(self, divergence="tv", low=0.15, high=0.15, cap=10.0) -> None:
        for t in self.tokens:
            p, q = math.exp(t.new), math.exp(t.inf)
            far = abs(p - q)
            if divergence == "kl":
                far = q * min(t.inf - t.new, CLAMP) + (1 - q) * math.log(
                    max(1 - q, 1e-8) / max(1 - p, 1e-8)
                )
            out = (t.advantage > 0 and p > q and far > high) or (
                t.advantage < 0 and p < q and far > low
            )
            t.w *= 0.0 if out else min(clipped_exp(t.new - t.inf), cap)

    def _rapid(self, eta: float) -> None:
        weights = self._sequence_weights(eta)
        for t in self.tokens:
            t.w *= weights[t.row]

    def _ais(self, cap=5.0, delta=0.02, gamma=1.2, beta=1.0, eps=1e-6) -> None:
        """AIS eq. 12 to 18, over the tokens left, less those outside the safe set."""
        on = [t for t in self.tokens if t.kept and self.target(t) > -math.inf]
        w = np.array([min(clipped_exp(self.target(t) - t.inf), cap) for t in on])
        a = np.array([t.advantage for t in on])
        if len(on) == 0:
            return
        std = (lambda x: x.std(ddof=1)) if len(on) > 1 else (lambda x: 0.0)
        ess = (1 + (std(w) / w.mean()) ** 2) ** -0.5
        moved = np.mean([min(abs(self.target(t) - t.inf), CLAMP) for t in on])
        var = max(0.0, (std(a * w) / (std(a) + eps) - gamma) / gamma)
        alpha = min(max(ess - beta * var, 0.0), 1.0) * min(1.0, moved / delta)
        for t, r in zip(on, w):
            t.w *= 1 + alpha * (r - 1)
            t.at = lambda d: 1 + alpha * (min(clipped_exp(d), cap) - 1)

    def _jackpot(self, lam=1.0, c1=3.0, mode="expected", tail="residual", **_: Any) -> None:
        """The average over OBRS's draws, eq. 7 and 8, with the whole vocabulary known; a constant
        denominator needs no normaliser."""
        assert mode == "expected"
        on = [t for t in self.tokens if t.kept]
        if not on:
            return
        p, q = (np.exp(self.tables[n]) for n in ("new" if self.anchored else "ref", "inf"))
        z = [float(np.minimum(q[t.state], p[t.state] / lam).sum()) for t in on]
        rho = [clipped_exp(self.target(t) - t.inf) for t in on]
        accepted = [min(1.0, math.exp(self.target(t) - t.inf) / lam) for t in on]
        if self.o["aggregation"] != "token-mean":
            for t, r, a in zip(on, rho, accepted):
                t.w *= min(max(lam, r), c1) * a
                t.at = lambda d: min(max(lam, math.exp(d)), c1) * min(1.0, math.exp(d) / lam)
            return
        alpha, mean_z = float(np.mean(accepted)), float(np.mean(z))
        for t, zt, r, a in zip(on, z, rho, accepted):
            scaled = min(max(alpha / mean_z * zt, 1e-30), min(1.0, 1 / lam))
            t.w *= min(scaled * max(lam, r), c1) * a / alpha
            t.at = partial(_averaged, scaled, lam, c1, alpha)

    def _centre(self) -> None:
        """All is in `gradient`: every token of the vocabulary is stored."""

    def _centred(self, t: Token) -> Array:
        """By logits: the mean over the actor's tokens of the weighed slope that each would have."""
        m = np.zeros(len(self.case.new[0]))
        for v in range(len(m)):
            logs = {n: float(self.tables[n][t.state, v]) for n in self.tables}
            other = Token(t.row, t.state, v, advantage=t.advantage, **logs)
            weight = t.at(self.target(other) - other.inf)
            m[v] = math.exp(other.inf) * weight * self._slopes([other])[0]
        return m - m.sum() * np.exp(self.tables["new"][t.state])

    def _veto(self, threshold=1e-4) -> None:
        for row in self.rows:
            if any(gap(t.ref, t.inf) < math.log(threshold) for t in row):
                for t in row:
                    t.kept = False

    def _opsm(self, delta: float, target="new") -> None:
        for row in self.rows:
            logs = [max(min(gap(getattr(t, target), t.inf), 1e6), -1e6) for t in row]
            if row and -sum(logs) / len(row) > delta:
                for t in row:
                    t.w *= 0.0 if t.advantage < 0 else 1.0

    def _weighs(self) -> bool:
        weighing = {"tis", "mis", "icepop", "minpro", "vesp", "dppo", "rapid", "ais", "jackpot"}
        return bool(weighing & set(self.case.corrections))

    def _followed(self, t: Token) -> float:
        """The policy that others' weights lead to, where others weigh."""
        return self.target(t) if self._weighs() else t.ref

    def _m2po(self, budget=0.04, over="all") -> None:
        """Algorithm 1 of arXiv 2510.01161; over all tokens as AReaL has it."""
        left = [t for t in self.tokens if t.kept and self._followed(t) > -math.inf]
        for t in self.tokens:
            t.w *= 1.0 if t in left or not t.kept else 0.0
        if over == "harmful":
            left = [t for t in left if t.advantage * (self._followed(t) - t.inf) > 0]
        moment = {id(t): (self._followed(t) - t.inf) ** 2 for t in left}
        while left and np.mean([moment[id(t)] for t in left]) > budget:
            largest = max(moment[id(t)] for t in left) * (1 - 1e-6)
            for t in [t for t in left if moment[id(t)] >= largest]:  # equal ones go together
                t.w = 0.0
                left.remove(t)

    def _outliers(self, threshold: float, divergence="k3", over="mean") -> None:
        for row in self.rows:
            logs = [max(min(gap(self._followed(t), t.inf), CLAMP), -CLAMP) for t in row]
            size = {"k1": abs, "k2": lambda d: d * d / 2, "k3": lambda d: math.expm1(d) - d}
            each = [size[divergence](d) for d in logs]
            signed = logs if divergence == "k1" else each
            whole = {"sum": abs(sum(signed)), "worst": max(each, default=0.0)}
            whole["mean"] = whole["sum"] / max(len(row), 1)
            for t, own in zip(row, each):
                t.w *= float((own if over == "token" else whole[over]) <= threshold)

    def _dvp(self, rho: float) -> None:
        for t in self.tokens:
            t.w *= float(self.target(t) > -math.inf)

    # ----- the loss -----

    def _slopes(self, row: list[Token]) -> list[float]:
        """d f / d log p_new of each token of an answer: f = min(r A, clip(r) A) and others."""
        o, kind = self.o, self.o["loss"]
        low, high = 1 - o["eps_low"], 1 + o["eps_high"]
        on = [t.new > -math.inf and (self.anchored or t.ref > -math.inf) for t in row]
        logs = [0.0 if self.anchored or not ok else t.new - t.ref for t, ok in zip(row, on)]
        count = max(sum(on), 1)
        bounded = [
            min(d, math.log(high)) if t.advantage > 0 else max(d, math.log(low))
            for t, d in zip(row, logs)
        ]
        whole = math.exp(sum(logs if kind == "gspo" else bounded) / count)
        found = []
        for t, d, b, ok in zip(row, logs, bounded, on):
            a, r = t.advantage, clipped_exp(d)
            at = whole if kind == "gspo" else r
            stopped = (a > 0 and at > high) or (a < 0 and at < low)
            if kind == "gmpo":
                slope = a * whole if b == d else 0.0
            elif kind == "sapo":
                tau = o["sapo_tau_pos"] if a > 0 else o["sapo_tau_neg"]
                slope = a * r * (1 - math.tanh(tau * (r - 1) / 2) ** 2)
            elif kind == "cispo":
                slope = min(max(r, low), high) * a
            elif kind == "reinforce":
                slope = a
            else:  # ppo, gspo
                slope = 0.0 if stopped else at * a
            found.append(slope if ok else 0.0)
        return found

    def gradient(self) -> Array:
        """[S, V]: d loss / d logits of p_new."""
        out = np.zeros(self.case.new.shape)
        kept = [sum(t.kept for t in row) for row in self.rows]
        p = np.exp(self.tables["new"])
        for row, left in zip(self.rows, kept):
            for t, slope in zip(row, self._slopes(row)):
                if not t.kept:
                    continue
                coefficient = {
                    "token-mean": 1 / sum(kept),
                    "seq-mean-token-mean": 1 / (left * sum(k > 0 for k in kept)),
                    "seq-mean-token-sum-norm": 1 / (self.case.longest * sum(k > 0 for k in kept)),
                }[self.o["aggregation"]]
                token = coefficient * (self._kl_slope(t) - t.w * slope)
                if t.new > -math.inf:
                    out[t.state] += token * ((np.arange(p.shape[1]) == t.id) - p[t.state])
                if "centre" in self.case.corrections:
                    out[t.state] += coefficient * self._centred(t)
                if t.w != 0:
                    out[t.state] += coefficient * self._state_terms(t.state)
        return out

    def _kl_slope(self, t: Token) -> float:
        """Of k1, k2 (the reverse KL) and k3 (the forward one) on the actor's token, led to p_new by
        a truncated ratio."""
        kind = self.o["kl_estimator"]
        possible = t.new > -math.inf and t.base > -math.inf
        if kind == "full" or t.w == 0 or not possible or not self.o["kl_coef"]:
            return 0.0
        weight = min(clipped_exp(t.new - t.inf), self.o["kl_ratio_cap"])
        d = min(max(t.base - t.new, -CLAMP), CLAMP)
        slope = -math.expm1(min(d, math.log(10))) if kind == "k3" else -d
        return float(self.o["kl_coef"]) * weight * slope

    def _state_terms(self, state: int) -> Array:
        """By logits: the full KL over the whole vocabulary, and the entropy of the safe set."""
        out = np.zeros(self.case.new.shape[1])
        if self.o["kl_estimator"] == "full" and self.o["kl_coef"]:
            logs, base = log_softmax(self.case.new[state]), log_softmax(self.case.base[state])
            p, d = np.exp(logs), logs - base
            out += self.o["kl_coef"] * p * (d - (p * d).sum())
        if self.o["entropy_coef"]:
            logs = self.tables["new"][state]
            p = np.exp(logs)
            own = np.where(p > 0, np.where(p > 0, logs, 0.0), 0.0)
            out += self.o["entropy_coef"] * p * (own - (p * own).sum())
        return out
