"""The expected gradient of a loss function, enumerated, next to the policy gradient.

A bandit of two to five tokens is small enough that every batch of a few answers can be tried, with
its probability: the expectation is exact, without a sample. A verdict holds up to the ratios, the
answers and the groups of its world, which it names. Every batch is passed twice: a function that
answers the second time in another way is not deterministic, and nothing more is said of it. A
function is judged unchanged: one of rlcore's form (`LossBatch`), or a loss with the signature of
verl, OpenRLHF, SkyRL or TRL.

    from rlcore.referee import judge
    for verdict in judge(my_loss):
        print(verdict)
"""

from __future__ import annotations

import inspect
import itertools
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import UserError
from rlcore.registry import LoadError, load_object

START = 3  # the state before the first token; others are the last token
EXACT = 1e-6  # a departure below is none
SAME = 1e-9  # of two answers to one batch, relative to the largest slope
FAR = 3.0  # times the noise of a far actor
CAP = 2.0  # of the truncated ratio

# Logits by state (after token 0, 1, 2; at the start) of p_ref, and what is added to them for the
# policy after a step, and for the actor. No two ratios are equal, some are above 1.2, some below
# 0.8 and one above CAP; nothing else is in these numbers.
_REF = torch.tensor(
    [[0.4, -0.3, 0.1], [-0.2, 0.5, 0.0], [0.3, 0.2, -0.6], [0.2, -0.1, 0.3]], dtype=torch.float64
)
_STEP = torch.tensor(
    [[0.3, -0.2, 0.1], [-0.3, 0.2, 0.2], [0.1, 0.3, -0.4], [0.35, -0.25, -0.1]], dtype=torch.float64
)
_NOISE = torch.tensor(
    [[0.5, -0.9, 0.2], [-0.4, 0.6, -0.3], [0.2, -0.5, 0.7], [-0.3, 0.6, -0.4]], dtype=torch.float64
)
_REWARDS: dict[tuple[int, ...], float] = {
    (0, 0): 1.0,
    (0, 1): -0.5,
    (0, 2): 0.4,
    (1, 0): 0.2,
    (1, 1): 2.0,
    (1, 2): -1.0,
}
_REWARDS |= {(2, 0): 0.6, (2, 1): -0.8, (2, 2): 1.3, (2,): 1.5}
# what a later token adds, by the first one
_LATER = ((0.9, -0.7, 0.3), (-0.4, 1.1, -0.9), (0.5, -1.2, 0.8))


@dataclass(frozen=True, slots=True)
class LossBatch:
    """The argument of a loss of rlcore's form: `loss(batch)` returns a scalar to minimise.

    [B, T] float64 unless said; what `mask` leaves out is 0. The answers of a group are neighbours.
    """

    logp_new: Tensor  # log p_new of the sampled tokens; carries the gradient
    logp_ref: Tensor  # log p_ref, of the learner as the batch arrived
    logp_inf: Tensor  # log p_inf, of the actor
    advantages: Tensor
    mask: Tensor  # bool
    rewards: Tensor  # [B]
    group_ids: Tensor  # [B], int64
    weights: Tensor | None  # of the kind that is judged, such as min(p_ref / p_inf, 2); or None


Loss = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class World:
    """Conditions that a loss is judged under.

    The default: actor and learner are one policy, all answers are of two tokens, and a batch is a
    group of two answers, whose mean reward is subtracted.
    """

    # or "mismatch"; "far": ratios of a token above 10; "truncated": it never samples its rarest
    actor: str = "matched"
    later_step: bool = False  # the second step on a batch: p_new is not p_ref
    lengths: str = "equal"  # or "mixed": the last token of the vocabulary ends an answer
    group: int = 2  # answers of a group
    groups: int = 1  # groups of a batch
    advantage: str = "centred"  # or "normalised" by the group's deviation, too; or "reward"
    tokens: int = 2  # of the longest answer: a vocabulary of three, of two from four tokens on

    @property
    def vocabulary(self) -> int:
        return 3 if self.tokens < 4 else 2

    def __str__(self) -> str:
        words = [f"actor {self.actor}"]
        words += ["later step"] * self.later_step + ["lengths mixed"] * (self.lengths == "mixed")
        words += [f"{self.tokens} tokens"] * (self.tokens != 2)
        if (self.group, self.groups) != (2, 1):
            words.append(f"{self.groups} x {self.group} answers")
        words += [f"advantage {self.advantage}"] * (self.advantage != "centred")
        return ", ".join(words)


WORLDS = (
    *(
        World(actor, later, lengths)
        for actor in ("matched", "mismatch", "truncated")
        for later in (False, True)
        for lengths in ("equal", "mixed")
    ),
    *(
        World(lengths=lengths, **changed)
        for lengths in ("equal", "mixed")
        for changed in (
            {"advantage": "reward"},
            {"advantage": "normalised", "group": 3},
            {"group": 3},
        )
    ),
    World(lengths="mixed", groups=2),
    *(World(actor, tokens=3) for actor in ("matched", "mismatch")),
    World("mismatch", tokens=5),
    *(World("far", later) for later in (False, True)),
)


def _token(new: Tensor, inf: Tensor, _: Tensor) -> Tensor:
    return (new - inf).exp()


def _truncated(new: Tensor, inf: Tensor, _: Tensor) -> Tensor:
    return (new - inf).exp().clamp(max=CAP)


def _sequence(new: Tensor, inf: Tensor, mask: Tensor) -> Tensor:
    return (new - inf).where(mask, 0.0).sum(1, keepdim=True).exp().expand_as(new)


# Weights p_ref / p_inf that a trainer hands to its loss.
WEIGHTS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor] | None] = {
    "none": None,
    "truncated": _truncated,
    "token": _token,
    "sequence": _sequence,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far an expected gradient g is from the policy gradient r of p_new.

    `scale` is <g, r> / <r, r>, `departure` is |g - scale r| / |scale r|, and `cosine` is between g
    and r. A learning rate makes up for a scale, not for a departure. All of it holds in its world:
    up to `ratio`, the largest p_new/p_inf of an answer or of its inverse, `world.tokens` and
    `world.group`. `deterministic`: a batch that was passed twice had the same gradient.
    """

    world: World
    weights: str  # of WEIGHTS
    aggregation: str  # of the loss, where it takes one
    scale: float
    departure: float
    cosine: float
    ratio: float = 1.0
    deterministic: bool = True

    @property
    def exact(self) -> bool:
        return self.deterministic and self.departure < EXACT and self.scale > 0

    def __str__(self) -> str:
        found = f"exact up to {extent([self])}" if self.exact else self._departure
        return (
            f"{self.world}; weights {self.weights}; {self.aggregation or 'its own mean'}: {found}, "
            f"scale {self.scale:.3g}, cosine {self.cosine:.4f}"
        )

    @property
    def empty(self) -> bool:
        """True if the gradient is 0 in every batch."""
        return self.scale == 0 and self.departure == 0

    @property
    def _departure(self) -> str:
        return self.fault or f"departs by {self.departure:.3g}"

    @property
    def fault(self) -> str:
        """The reason why a departure says nothing, or ""."""
        if not self.deterministic:
            return "not deterministic"
        if self.empty:
            return "no gradient"
        return "wrong sign" if self.scale < 0 else ""


def extent(verdicts: Sequence[Verdict]) -> str:
    """How far verdicts reach: "ratios of 2.9, answers of 2 tokens, groups of 2"."""
    ratio = max(v.ratio for v in verdicts)
    tokens, group = (max(getattr(v.world, n) for v in verdicts) for n in ("tokens", "group"))
    return f"ratios of {ratio:.3g}, answers of {tokens} tokens, groups of {group}"


def judge(
    loss: Loss, worlds: Sequence[World] = WORLDS, weights: Sequence[str] | None = None
) -> Iterator[Verdict]:
    """Verdicts on a loss function in every world, with every kind of weights and every aggregation
    that its form accepts. Raises UserError for a function of no known form, and where the loss is
    not a finite scalar, or has no gradient in the first world."""
    form = form_of(loss)
    for world in worlds:
        table = _Table(world)
        kinds = weights if weights is not None else _kinds(world, form)
        for kind in kinds:
            if world.actor == "matched" and kind != "none":
                continue  # the weights are one
            for aggregation in form.aggregations:
                verdict = table.verdict(form.adapted(aggregation), kind, aggregation)
                if verdict.empty and world == worlds[0]:
                    raise UserError(
                        "the loss function is not accepted: it has no gradient by the log-probs "
                        f"of p_new ({world}): return a loss that is not detached from them, and "
                        "leave the batch as it is."
                    )
                yield verdict


def _kinds(world: World, form: LossForm) -> tuple[str, ...]:
    """The kinds of weights of a world: weights of tokens, which are biased for two tokens, are not
    asked of longer or farther answers."""
    if not form.takes_weights:
        return ("none",)
    usual = world.tokens == 2 and world.actor != "far"
    return tuple(WEIGHTS) if usual else ("none", "sequence")


class _Table:
    """All answers of a world and all batches of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        size, longest = world.vocabulary, world.tokens
        self.answers = _answers(size, longest, ends=world.lengths == "mixed")
        self.tokens = torch.tensor([(*a, *(0,) * longest)[:longest] for a in self.answers])
        lengths = torch.tensor([len(a) for a in self.answers])
        self.mask = torch.arange(longest) < lengths[:, None]
        before = torch.full((len(self.answers), 1), START)
        self.states = torch.cat([before, self.tokens[:, :-1]], 1)
        self.rewards = torch.tensor([_reward(a) for a in self.answers], dtype=torch.float64)
        self.ref = _REF[:, :size].log_softmax(-1)
        self.new = (_REF + _STEP * world.later_step)[:, :size].log_softmax(-1)
        self.inf = _actor(world.actor, size)

    @cached_property
    def ratio(self) -> float:
        """The largest p_new/p_inf of an answer that the actor samples, or of its inverse."""
        logs = (self.at(self.new) - self.at(self.inf)).sum(1)
        return float(logs[logs.isfinite()].abs().max().exp())

    def at(self, logp: Tensor) -> Tensor:
        """[A, T]: log-probs of the answers' tokens by a table [V + 1, V]."""
        return logp[self.states, self.tokens].where(self.mask, 0.0)

    @cached_property
    def policy_gradient(self) -> Tensor:
        """[V + 1, V]: of the expected reward of p_new, by its logits."""
        logits = self.new.clone().requires_grad_()
        logp = self.at(logits.log_softmax(-1)).sum(1)
        return torch.autograd.grad((logp.exp() * self.rewards).sum(), logits)[0]

    def verdict(self, loss: Callable[[LossBatch], Any], kind: str, aggregation: str) -> Verdict:
        expected, deterministic = self._expected(loss, kind)
        ascent, truth = -expected.flatten(), self.policy_gradient.flatten()
        scale = float(ascent @ truth / (truth @ truth))
        off = ascent - scale * truth
        departure = float(off.norm() / (abs(scale) * truth.norm()).clamp(min=1e-30))
        cosine = float(ascent @ truth / (ascent.norm() * truth.norm()).clamp(min=1e-30))
        how = (self.world, kind, aggregation)
        return Verdict(*how, scale, departure, cosine, self.ratio, deterministic)

    def _expected(self, loss: Callable[[LossBatch], Any], kind: str) -> tuple[Tensor, bool]:
        """The gradient [V + 1, V] of the loss by the logits of p_new, over all batches, and whether
        it was the same when a batch was passed again."""
        probability = self.at(self.inf).sum(1).exp()
        size = self.world.group * self.world.groups
        by_token = torch.zeros(self.mask.shape, dtype=torch.float64)
        deterministic = True
        for rows in itertools.product(range(len(self.answers)), repeat=size):
            index = torch.tensor(rows)
            p = float(probability[index].prod())
            if p:
                slope, again = (self._slope(loss, index, kind) for _ in range(2))
                same = torch.allclose(slope, again, rtol=0, atol=SAME * float(slope.abs().max()))
                deterministic &= same
                by_token.index_add_(0, index, p * slope)
        # d log p[s, v] / d logits[s] = one_hot(v) - p[s]
        here = by_token.where(self.mask, 0.0)
        found = torch.zeros(self.new.shape, dtype=torch.float64)
        found.index_put_((self.states, self.tokens), here, accumulate=True)
        return found - found.sum(1, keepdim=True) * self.new.exp(), deterministic

    def _slope(self, loss: Callable[[LossBatch], Any], index: Tensor, kind: str) -> Tensor:
        """[B, T]: the derivative of one batch's loss by log p_new of its tokens."""
        mask = self.mask[index]
        new = self.at(self.new)[index].requires_grad_()
        ref, inf = self.at(self.ref)[index], self.at(self.inf)[index]
        weigh = WEIGHTS[kind]
        group_ids = torch.arange(len(index)) // self.world.group
        batch = LossBatch(
            logp_new=new,
            logp_ref=ref,
            logp_inf=inf,
            advantages=self._advantages(self.rewards[index])[:, None].where(mask, 0.0),
            mask=mask,
            rewards=self.rewards[index],
            group_ids=group_ids,
            weights=None if weigh is None else weigh(ref, inf, mask),
        )
        value = _scalar(self._called(loss, batch))
        if not value.requires_grad:
            return torch.zeros(mask.shape, dtype=torch.float64)  # such as a batch without a signal
        return torch.autograd.grad(value, new)[0].double()

    def _called(self, loss: Callable[[LossBatch], Any], batch: LossBatch) -> Any:
        try:
            return loss(batch)
        except Exception as error:  # whatever a user's function raises
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"the loss function failed with {self.world}: {why[:300].rstrip('.')}."
            ) from error

    def _advantages(self, rewards: Tensor) -> Tensor:
        if self.world.advantage == "reward":
            return rewards
        groups = rewards.view(-1, self.world.group)
        centred = groups - groups.mean(1, keepdim=True)
        if self.world.advantage == "normalised":
            centred = centred / (groups.std(1, keepdim=True) + 1e-6)
        return centred.flatten()


def _answers(size: int, longest: int, *, ends: bool) -> list[tuple[int, ...]]:
    """All answers of at most `longest` tokens; with `ends` the last of the vocabulary ends one."""
    found: list[tuple[int, ...]] = [()]
    for _ in range(longest):
        found = [
            answer
            for begun in found
            for answer in (
                [begun]
                if ends and begun and begun[-1] == size - 1
                else [(*begun, token) for token in range(size)]
            )
        ]
    return found


def _reward(answer: tuple[int, ...]) -> float:
    later = sum(_LATER[answer[0]][token] * (1 + i / 4) for i, token in enumerate(answer[2:]))
    return _REWARDS[answer[:2]] + later


def _actor(kind: str, size: int) -> Tensor:
    """[V + 1, V]: log-probs of the actor; -inf where it never samples."""
    if kind == "truncated":
        logp = _REF[:, :size].log_softmax(-1)
        kept = logp > logp.amin(-1, keepdim=True)
        return logp.masked_fill(~kept, -torch.inf).log_softmax(-1)
    noise = {"matched": 0.0, "mismatch": 1.0, "far": FAR}[kind]
    return (_REF + _NOISE * noise)[:, :size].log_softmax(-1)


def _scalar(found: Any) -> Tensor:
    """The loss out of what a function returned. Raises UserError."""
    value = found[0] if isinstance(found, tuple) else found
    if not isinstance(value, Tensor) or value.numel() != 1 or not bool(torch.isfinite(value)):
        raise UserError(
            "the loss function is not accepted: it returns no finite scalar tensor (or a tuple "
            f"that begins with one) but {str(value)[:80]}."
        )
    return value.reshape(())


# ----- the forms of others -----


@dataclass(frozen=True, slots=True)
class Names:
    """The parameters of a loss that is called by them. `weights`: "" where it weighs by itself."""

    new: str
    ref: str
    mask: str
    inf: str = ""
    weights: str = ""
    aggregation: str = ""


# The names that verl 0.9, OpenRLHF 0.11 and SkyRL 0.3 document; advantages are "advantages" in all.
FORMS: Mapping[str, Names] = {
    "verl": Names(
        "log_prob",
        "old_log_prob",
        "response_mask",
        weights="rollout_is_weights",
        aggregation="loss_agg_mode",
    ),
    "OpenRLHF": Names("log_probs", "old_log_probs", "action_mask", "rollout_log_probs"),
    "SkyRL": Names("log_probs", "old_log_probs", "loss_mask", "rollout_logprobs"),
}
VERL_AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass(frozen=True)
class LossForm:
    """A loss by its signature."""

    name: str
    call: Callable[[LossBatch, str], Any]
    takes_weights: bool
    aggregations: tuple[str, ...] = ("",)

    def adapted(self, aggregation: str) -> Callable[[LossBatch], Any]:
        return lambda batch: self.call(batch, aggregation)


def form_of(loss: Loss) -> LossForm:
    """The form of a loss function, by the names of its parameters. Raises UserError."""
    try:
        taken = inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss)
    except (TypeError, ValueError) as error:
        raise UserError(f"the loss function is not accepted: {error}.") from error
    parameters = taken.parameters
    if "batch" in parameters:
        return LossForm("rlcore", lambda batch, _: loss(batch), takes_weights=True)
    if {"model", "inputs"} <= set(parameters):
        return LossForm("TRL", lambda batch, _: _trl(loss, batch), takes_weights=True)
    for form, names in FORMS.items():
        if {names.new, names.ref, names.mask, "advantages"} <= set(parameters):
            given = parameters.get(names.aggregation)
            # functools.partial makes what it fixes by name a keyword-only parameter
            asked = given is not None and given.kind is not given.KEYWORD_ONLY
            return LossForm(
                form,
                partial(_named, loss, names, set(parameters)),
                names.weights in parameters,
                VERL_AGGREGATIONS if asked else ("",),
            )
    known = {"rlcore": "batch", "TRL": "model, inputs"}
    known |= {form: ", ".join((n.new, n.ref, "advantages", n.mask)) for form, n in FORMS.items()}
    raise UserError(
        f"the loss function is not accepted: its parameters are {', '.join(parameters)}, and the "
        f"known forms are {'; '.join(f'{form}: {names}' for form, names in known.items())}."
    )


def _named(
    loss: Loss, names: Names, parameters: set[str], batch: LossBatch, aggregation: str
) -> Any:
    further = {names.inf: batch.logp_inf, names.weights: batch.weights}
    words: dict[str, Any] = {
        name: value for name, value in further.items() if name in parameters and value is not None
    }
    if aggregation:
        words[names.aggregation] = aggregation
    words |= {names.new: batch.logp_new, names.ref: batch.logp_ref}
    return loss(advantages=batch.advantages, **words, **{names.mask: batch.mask.double()})


def _trl(loss: Loss, batch: LossBatch) -> Any:
    """`GRPOTrainer._compute_loss(self, model, inputs)`, bound to what stands for its trainer."""
    no_prompt = torch.zeros(len(batch.mask), 0, dtype=torch.int64)
    ones = torch.ones_like(batch.logp_ref)
    inputs = {
        "prompt_ids": no_prompt,
        "prompt_mask": no_prompt,
        "completion_ids": torch.zeros(batch.mask.shape, dtype=torch.int64),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages[:, 0],
        "old_per_token_logps": batch.logp_ref,
        "sampling_per_token_logps": batch.logp_inf,
        "importance_sampling_ratio": ones if batch.weights is None else batch.weights,
        "num_items_in_batch": batch.mask.sum(),
        "logp_new": batch.logp_new,  # of the bandit: see TrlTrainer
    }
    return loss(model=inputs, inputs=inputs)


class TrlTrainer:
    """Stands for a GRPOTrainer: `TrlTrainer(GRPOTrainer, config)._compute_loss` can be judged.

    What the method asks of its trainer in addition to `args` (a GRPOConfig, or any object with
    these fields) is as in one process which accumulates nothing. Log-probs are the bandit's.
    """

    def __init__(self, owner: type, args: Any) -> None:
        self._owner = owner
        self.args = args
        for name in (
            *("loss_type", "beta", "importance_sampling_level", "top_entropy_quantile"),
            *("off_policy_mask_threshold", "vllm_importance_sampling_correction"),
            "max_completion_length",
        ):
            setattr(self, name, getattr(args, name))
        self.epsilon_low = args.epsilon
        self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        self.use_vllm = True
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self.current_gradient_accumulation_steps = 1
        self.num_generations = 2
        self.model = types.SimpleNamespace(training=False)
        self.accelerator = types.SimpleNamespace(
            num_processes=1, gather=lambda value: value, reduce=lambda value, **_: value
        )
        self._metrics: Any = {"train": _Anything(), "eval": _Anything()}

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> Any:
        return model["logp_new"], torch.zeros_like(model["logp_new"]), None

    def __getattr__(self, name: str) -> Any:
        found = inspect.getattr_static(self._owner, name)
        bound: Any = found.__get__(self, type(self))
        return bound


class _Anything(dict[str, list[float]]):
    """Metrics by any name."""

    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


# ----- the command -----


def referee(word: str, *, as_json: bool) -> int:
    """`rlcore referee FILE.py:loss`: print verdicts. Raises UserError."""
    try:
        loss = load_object(word)
    except LoadError as error:
        raise UserError(f"{word} {error}") from error
    form = form_of(loss)
    verdicts = list(judge(loss))
    if as_json:
        print(json.dumps([_row(v) for v in verdicts], indent=2))
        return 0
    print(f"{word} has the form of {form.name}. Departure of its expected gradient from the policy")
    print(
        "gradient of p_new, enumerated; 0 is exact, up to a scale that the learning rate absorbs.\n"
    )
    print("\n".join(lines(verdicts)))
    exact = [v for v in verdicts if v.exact]
    reach = extent(exact) if exact else "nothing"
    print(f"\nWhat is exact is so up to {reach}: larger ones were not tried.")
    return 0


def _row(verdict: Verdict) -> dict[str, Any]:
    world = {n: getattr(verdict.world, n) for n in World.__dataclass_fields__}
    names = ("scale", "departure", "cosine", "exact", "ratio", "deterministic")
    numbers = {n: getattr(verdict, n) for n in names}
    return {**world, "weights": verdict.weights, "aggregation": verdict.aggregation, **numbers}


def lines(verdicts: Sequence[Verdict]) -> list[str]:
    """A table in Markdown: a row a world and kind of weights, a column an aggregation."""
    modes = list(dict.fromkeys(v.aggregation for v in verdicts))
    cells = {(str(v.world), v.weights, v.aggregation): v for v in verdicts}
    heads = ["world", "weights", *(mode or "departure (scale)" for mode in modes)]
    found = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for world, kind in dict.fromkeys((str(v.world), v.weights) for v in verdicts):
        words = [_cell(cells[world, kind, mode]) for mode in modes]
        found.append(f"| {' | '.join([world, kind, *words])} |")
    return found


def _cell(verdict: Verdict) -> str:
    if verdict.fault in ("not deterministic", "no gradient"):
        return verdict.fault
    found = "exact" if verdict.exact else verdict.fault or f"{verdict.departure:.3f}"
    return f"{found} ({verdict.scale:.2f})"


__all__ = ["WORLDS", "LossBatch", "TrlTrainer", "Verdict", "World", "judge", "referee"]
