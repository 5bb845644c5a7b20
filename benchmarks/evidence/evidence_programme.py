"""Studies E1 to E12, registered before their first run: hypotheses, gates and stopping rules.

    python -m benchmarks.evidence.evidence floor_64 --background --minutes 600

runs what is missing of one, detached and at low priority; the same command continues it.
`results/evidence/programme.md` lists all of them with the verdicts of their runs so far. What is
changed here after a study's first run is a deviation, and is said on that page.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.evidence.evidence_gates import (
    Bound,
    Gate,
    difference,
    first,
    late,
    mean,
    over,
    ratio,
    seconds,
)
from benchmarks.evidence.evidence_studies import MOVED, UNCORRECTED, UPDATE, Held, Study, Words
from benchmarks.evidence.evidence_tables import ACCEPTANCE, LEAST, Line, final, interval, paired

_JACKPOT_NEW = (
    *("correction=[jackpot]", "correction.jackpot.target=new"),
    "correction.jackpot.short_circuit=true",
)


@dataclass(frozen=True)
class Hypothesis:
    """`arm` against each of `others` at a size: by `at_least` above them, or `within` a margin.

    Supported: the 95% interval of each difference lies above 0 (above `at_least` where that is
    negative) and its mean is at least `at_least`, or it lies within the margin. Refuted: an
    interval lies below `at_least`, or beyond the margin.
    """

    arm: str
    others: tuple[str, ...]
    size: str
    at_least: float | None = None
    within: float | None = None
    gate: Gate | None = None  # in place of the study's, of one that joined after the first run

    def __str__(self) -> str:
        said = "at least {0} above" if self.within is None else "within {1} of"
        said = said.format(self.at_least, self.within)
        return f"{self.arm} {said} {', '.join(self.others)} at {self.size}"

    def verdict(self, lines: Sequence[Line]) -> str:
        """supported, refuted, open, or not run."""
        found = [paired(lines, self.arm, other, self.size).values for other in self.others]
        if any(len(values) < LEAST for values in found):
            return "not run"
        single = [self._of(*interval(values)) for values in found]
        if "refuted" in single:
            return "refuted"
        return "supported" if set(single) == {"supported"} else "open"

    def _of(self, mean: float, low: float, high: float) -> str:
        if self.within is not None:
            if -self.within <= low and high <= self.within:
                return "supported"
            return "refuted" if low > self.within or high < -self.within else "open"
        assert self.at_least is not None
        if low > min(self.at_least, 0.0) and mean >= self.at_least:
            return "supported"
        return "refuted" if high < self.at_least else "open"


@dataclass(frozen=True)
class Registered:
    """A study with what was decided before its first run. `stopping`: beside all seeds being done,
    which ends each of them."""

    number: str
    study: Study
    hypotheses: tuple[Hypothesis, ...]
    gate: Gate  # unless it is met, the study says nothing about its hypotheses
    stopping: str = "none"


#: The same start on every machine, so that runs of several can be paired.
_COMMON: Words = ("model.warmup.precision=float64",)


def _floor_study(
    digits: int,
    vocabulary: int = 16384,
    floors: Sequence[str] = ("0.5e-6", "1.5e-6"),
    rho: Words = (),
) -> Study:
    """T*m is the number of new tokens times V e: at 64 digits 0.5 and 1.6, at 32 half of that.
    `rho`: of DVP, whose default of 2.3e-6 must be above the floors."""
    task = (
        *_COMMON,
        *(f"task.args.min_digits={digits}", f"task.args.max_digits={digits}"),
        *("task.args.credit=digits", f"rollout.max_new_tokens={digits + 2}", "model.max_len=160"),
        *(f"model.fresh.vocab_size={vocabulary}", "actor.bf16.logit_noise=0"),
    )
    return Study(
        experiment="evidence/dvp",
        knob="floor e",
        matched=("0", (*task, "correction=none")),
        sizes={e: (*task, f"actor.bf16.probability_floor={e}", "correction=none") for e in floors},
        arms={
            "tis": ("correction=[tis]",),
            "mis": ("correction=[mis]",),
            "dvp": ("correction=[dvp]", *rho),
            "dvp + mis": ("correction=[dvp,mis]", *rho),
            UNCORRECTED: (),
        },
        swept=False,
        figure=("matched", UNCORRECTED, "mis", "dvp"),
        watched=("mismatch/outside_share", "mismatch/unlikely_share", "mismatch/floor_tokens"),
    )


_WIDE = "dvp rho=1e-3"
_SHORT = _floor_study(10, 2048, ("12e-6", "65e-6"), ("correction.dvp.rho=1e-4",))
# T*m of 12 new tokens: 0.3 and 1.6. The wide arm joined when rho was seen to be too near the floor,
# and an arm that drops the answers in which TIS gives a token a weight near 0, since TIS ends below
# none
_SHORT_STUDY = replace(
    _SHORT,
    arms={**_SHORT.arms, _WIDE: ("correction=[dvp]", "correction.dvp.rho=1e-3")},
    further={
        "65e-6": {"tis + veto at 0.5": ("correction=[tis,veto]", "correction.veto.threshold=0.5")}
    },
    figure=("matched", UNCORRECTED, "mis", _WIDE),
    shown="65e-6",
    contrasts=(
        *((_WIDE, other, "65e-6") for other in ("tis", "mis", "dvp")),
        ("tis + veto at 0.5", "tis", "65e-6"),
    ),
)

_PHASES = (
    *_COMMON,
    *("schedule.steps_per_publish=64", "schedule.steps=768", "schedule.groups_per_step=4"),
    "learner.lr_decay_steps=768",
)
_LARGE = Study(
    experiment="evidence/jackpot",
    knob="learning rate",
    matched=("H = 1", (*_PHASES, "schedule.steps_per_publish=1", "learner.lr=3e-5")),
    sizes={lr: (*_PHASES, f"learner.lr={lr}") for lr in ("3e-5", "1e-4")},
    arms={
        "no weights": ("algorithm.loss=reinforce", "correction=none"),
        "ppo 0.2/0.2": ("algorithm.eps_low=0.2", "algorithm.eps_high=0.2"),
        "ppo 0.4/0.7": ("algorithm.eps_low=0.4", "algorithm.eps_high=0.7"),
        "token IS": ("algorithm.eps_low=1.0", "algorithm.eps_high=1000.0"),
        "tis adjusted": (
            *("correction=[tis]", "correction.tis.adjusted=true", "correction.tis.cap=3"),
        ),
        "jackpot new": _JACKPOT_NEW,
        "jackpot averaged": (*_JACKPOT_NEW, "correction.jackpot.mode=expected"),
    },
    swept=False,
    shown="3e-5",
    figure=("matched", "no weights", "ppo 0.4/0.7", "jackpot new"),
    stepped=True,
    against="p_new",
    contrasts=(
        ("token IS", "no weights", "3e-5"),
        ("jackpot new", "no weights", "3e-5"),
        ("jackpot new", "tis adjusted", "3e-5"),
        # chosen after the runs: what the clip is worth at a larger step
        ("ppo 0.4/0.7", "token IS", "1e-4"),
        ("ppo 0.4/0.7", "ppo 0.2/0.2", "1e-4"),
        ("jackpot new", "no weights", "1e-4"),
        ("jackpot new", "tis adjusted", "1e-4"),
    ),
    watched=("correction/jackpot/acceptance", "entropy"),
)

# equal samples in all: 24,576
_BATCHES = {"16": (2, 1536), "128": (16, 192), "512": (64, 48)}
_ERRORS: Mapping[str, Words] = {
    "int3": ("actor=[fp8]", "actor.fp8.rounding=int3"),
    "noise": ("actor=[bf16]", "actor.bf16.logit_noise=0.75"),
}


def _batch(groups: int, steps: int) -> Words:
    return (
        *_COMMON,
        *(f"schedule.groups_per_step={groups}", f"schedule.steps={steps}"),
        *(f"learner.lr_decay_steps={steps}", f"evaluation.every={steps // 6}"),
    )


_BATCH_ARMS: Mapping[str, Words] = {
    UNCORRECTED: (),
    "tis C=5": ("correction=[tis]", "correction.tis.cap=5"),
    "ais": ("correction=[ais]",),
}
_BY_SIZE: Words = ("correction=[ais]", "correction.ais.alpha=n_star")
_BATCH_STUDY = Study(
    experiment="evidence/ais",
    knob="error of the actor, answers in a batch",
    matched=("none, 128", (*_batch(16, 192), "actor=[bf16]")),
    sizes={
        f"{name}, {answers}": (*_batch(*shape), *words)
        for name, words in _ERRORS.items()
        for answers, shape in _BATCHES.items()
    },
    arms=_BATCH_ARMS,
    further={
        **{
            f"int3, {answers}": {"ais by size": (*_batch(*shape), *_ERRORS["int3"], *_BY_SIZE)}
            for answers, shape in _BATCHES.items()
        },
        # as far from the learner as INT3 at the first step, which noise of 0.75 is not
        "noise of 1, 512": {
            arm: (*_batch(*_BATCHES["512"]), "actor=[bf16]", "actor.bf16.logit_noise=1", *words)
            for arm, words in {**_BATCH_ARMS, "ais by size": _BY_SIZE}.items()
        },
    },
    swept=False,
    shown="int3, 512",
    figure=("matched", UNCORRECTED, "tis C=5", "ais by size"),
    watched=("mismatch/kl_k3", "mismatch/ess", "mismatch/ais_alpha"),
)
_RAPID_STUDY = Study(
    experiment="evidence/rapid",
    knob="H",
    matched=("1", (*_COMMON, "schedule.steps_per_publish=1", "correction=[rapid]")),
    sizes={"8": (*_COMMON, "schedule.steps_per_publish=8")},
    arms={"rapid": ("correction=[rapid]",)},
    seeds=tuple(range(5, 15)),
    swept=False,
    timed=True,
    alone=True,
    figure=("matched", "rapid"),
    stepped=True,
    against="p_new",
)
_REAL_STUDY = Study(
    experiment="demo",
    knob="rounding of the actor's weights",
    matched=("none", ()),
    # a scale a channel: with one a tensor the actor is no language model (KL of 8)
    sizes={
        "int4": (
            *("actor=[fp8]", "actor.fp8.rounding=int4", "actor.fp8.scales=channel"),
            *("actor.fp8.dtype=float32", "evaluation.dense_actor=true"),
        )
    },
    arms={
        UNCORRECTED: ("correction=none",),
        "tis C=5": ("correction=[tis]", "correction.tis.cap=5"),
        "ais": ("correction=[ais]",),
        "jackpot averaged": ("correction=[jackpot]", "correction.jackpot.mode=expected"),
    },
    metric="eval/arithmetic/greedy",
    seeds=(0, 1, 2),
    sources=(*UPDATE[:-1], "rlcore/tasks/arithmetic.py"),
    swept=False,
    figure=("matched", UNCORRECTED, "tis C=5", "ais"),
    watched=("mismatch/kl_k3", "mismatch/ess", "mismatch/ais_alpha"),
)

_OTHERS = (UNCORRECTED, "tis", "mis")
_TOKEN_WEIGHTS = ("token IS", "tis adjusted", "jackpot new", "jackpot averaged")
_AIS_BOTH = ("correction=[ais]", "actor.fp8.correction=[ais]")
_STRATA_STUDY = Study(
    experiment="mixed_fleet",
    knob="rounding of half of the groups",
    matched=("none", ("actor=[bf16]", "correction=[tis]")),
    sizes={"int3": ("actor.fp8.rounding=int3",)},
    arms={
        "by kind": _AIS_BOTH,
        "pooled": (*_AIS_BOTH, "correction.strata=none"),
        "own lists": (),
        UNCORRECTED: ("correction=none", "actor.fp8.correction=[none]"),
    },
    swept=False,
    figure=("matched", UNCORRECTED, "by kind", "pooled"),
    watched=(
        *("mismatch/kl_k3@bf16", "mismatch/kl_k3@fp8"),
        *("mismatch/ess@bf16", "mismatch/ess@fp8"),
    ),
)
# admitted staleness: bounds that stay, and a set-point under the largest of them
_SET_POINT_STUDY = Study(
    experiment="quickstart",
    knob="schedule.max_staleness",
    matched=("1", ("schedule.max_staleness=1", "correction=none")),
    sizes={eta: (f"schedule.max_staleness={eta}",) for eta in ("8", "32")},
    arms={"set-point": ("actor.bf16.target={value: 0.86}",), "tis": ("correction=[tis]",)},
    swept=False,
    replaced=("first controller",),  # the set-point's
    contrasts=(("set-point", "tis", "32"), ("set-point", "first controller", "32")),
    figure=("matched", "set-point", "first controller", "tis"),
    watched=("mismatch/agreement_p5", "control/bf16/staleness", "staleness/mean"),
    held=Held(
        "5th percentile of min(r, 1/r)",
        *(0.86, 0.02),
        statistic={"all": "mismatch/agreement_p5"},
        moved={"all": "control/bf16/staleness"},
        unit="steps admitted",
        arm="set-point",
    ),
)


def _pages(pages: int | str, step: int, *words: str) -> Words:
    """Actors that begin with this many pages at all positions, which have an entry every `step`
    tokens; prompts are attended to densely."""
    rule = {
        "block_size": 16,
        "blocks": "null",
        "blocks_by_length": f"[{', '.join([str(pages)] * 4)}]",
        "length_step": step,
        "prompt": "dense",
    }
    given = ", ".join(f"{key}: {value}" for key, value in rule.items())
    return (f"actor.sparse.sparse={{{given}}}", *words)


def _sorted(digits: int, tokens: int, context: int) -> Words:
    """On-policy runs that sort so many digits, with so many new tokens and positions at most."""
    return (
        *("schedule=on_policy", "correction=[tis]", "task.args.op=sort"),
        *(f"task.args.min_digits={digits}", f"task.args.max_digits={digits}"),
        *(f"rollout.max_new_tokens={tokens}", f"model.max_len={context}"),
    )


def _held_pages(stretches: Mapping[str, int]) -> Held:
    """Pages that a set-point holds an agreement of 0.86 with; `stretches`: entries, by name."""
    return Held(
        "5th percentile of min(r, 1/r)",
        *(0.86, 0.02),
        statistic={at: f"mismatch/stretch_{n}/agreement_p5" for at, n in stretches.items()},
        moved={at: f"control/sparse/pages_{n}" for at, n in stretches.items()},
        unit="pages",
        arm="set-point",
    )


_DENSE: Words = ("actor=[bf16]", "evaluation.dense_actor=null")
_SET_POINT: Words = ("actor.sparse.target={moves: pages, value: 0.86}",)

# 64 digits: nine pages of 16 tokens, the answer in the entries 3 and 4 of positions
_SHORT_PAGES: Words = (*_sorted(64, 72, 144), "schedule.steps=24", "evaluation.every=6")
_HELD_SHORT = _held_pages({"64 to 95": 3, "96 to 143": 4})
_PAGES_STUDY = Study(
    experiment="sparse_training_free",
    knob="attention of the actors",
    matched=("dense", (*_SHORT_PAGES, *_DENSE)),
    sizes={"sparse": _SHORT_PAGES},
    arms={
        "set-point": _pages(4, 32, *_SET_POINT),
        "few pages": _pages(4, 32),
        "equal pages": _pages(MOVED, 32),
    },
    swept=False,
    metric="eval/digits/greedy_reward",
    figure=("matched", "few pages", "equal pages", "set-point"),
    watched=(
        *("mismatch/agreement_p5", "mismatch/kl_k3"),
        *(*_HELD_SHORT.statistic.values(), *_HELD_SHORT.moved.values()),
    ),
    held=_HELD_SHORT,
)

# 128 digits: seventeen pages, all of the answer in the entries 3 and 4
_LONG: Words = (
    *_COMMON,
    *_sorted(128, 130, 272),
    *("model.fresh.layers=4", "schedule.steps=48", "learner.lr=1e-4"),
    *("learner.lr_schedule=linear", "learner.lr_decay_steps=48", "learner.lr_final=0.1"),
    *("evaluation.every=12", "evaluation.samples=2", "evaluation.greedy=false"),
)
_HELD_LONG = _held_pages({"128 to 191": 3, "192 to 271": 4})
_DISTILL: Words = ("learner.distill={}",)
_SPARSE_STUDY = Study(
    experiment="sparse_training_free",
    knob="pages that a token attends to",
    matched=("all", (*_LONG, *_DENSE)),
    sizes={"3": (*_LONG, *_pages(3, 64))},
    arms={
        UNCORRECTED: ("correction=none",),
        "training-free": (),
        "distillsparse": _DISTILL,
        "set-point": _SET_POINT,
        "both": (*_DISTILL, *_SET_POINT),
    },
    swept=False,
    metric="eval/digits/sampled_reward",
    figure=("matched", "training-free", "distillsparse", "set-point"),
    contrasts=tuple(
        (arm, other, "3")
        for arm, other in (
            ("training-free", UNCORRECTED),
            ("distillsparse", "training-free"),
            ("set-point", "training-free"),
            ("both", "set-point"),
        )
    ),
    deployed=("policy", "policy/sparse"),
    watched=(
        *("reward/mean", "mismatch/kl_k3", "mismatch/agreement_p5", "loss/distill_kl"),
        *(*_HELD_LONG.statistic.values(), *_HELD_LONG.moved.values()),
    ),
    held=_HELD_LONG,
)

_FEW_STEPS: Words = (
    *("schedule.steps=6", "schedule.groups_per_step=4"),
    *("evaluation.every=6", "evaluation.prompts=40"),
)
# a real model of two attempts, with few steps: a run takes some minutes of one core
_SELF_STUDY = Study(
    experiment="self_distillation",
    knob="context of the teacher",
    matched=("none", (*_FEW_STEPS, "algorithm=grpo", "teacher=none")),
    sizes={"best answer": _FEW_STEPS},
    arms={"distilled": (), "both": ("algorithm=grpo",)},
    metric="eval/arithmetic/greedy",
    seeds=(0, 1, 2),
    sources=(*UPDATE[:-1], "rlcore/tasks/arithmetic.py", "rlcore/environments/attempts.py"),
    swept=False,
    figure=("matched", "distilled", "both"),
    watched=("teacher/token_share", "teacher/divergence", "teacher/top1_agreement"),
)

KL = "mismatch/kl_k3"


def _floor_gate(size: str, arm: str = "dvp") -> Gate:
    # what is outside is counted by rho where DVP is on, and by its default where it is off
    pruned = mean(arm, size, over("mismatch/outside_share"))
    compared = ratio(pruned, mean(UNCORRECTED, size, over("mismatch/unlikely_share")))
    return Gate(
        f"{arm}'s share of tokens outside is below 10% of the uncorrected arm's",
        (Bound(compared, at_most=0.1),),
    )


def _kl_gate(noise: str) -> Gate:
    compared = ratio(*(mean(UNCORRECTED, f"{e}, 512", first(KL)) for e in (noise, "int3")))
    return Gate(
        f"the first step's KL of the {noise} is within 20% of INT3's",
        (Bound(compared, 0.8, 1.2),),
    )


PROGRAMME: dict[str, Registered] = {
    "floor_64": Registered(
        "E1",
        _floor_study(64),
        (Hypothesis("dvp", _OTHERS, "1.5e-6", at_least=0.10),),
        _floor_gate("1.5e-6"),
    ),
    "floor_32": Registered(
        "E1",
        _floor_study(32),
        (Hypothesis("dvp", _OTHERS, "0.5e-6", within=0.05),),
        _floor_gate("0.5e-6"),
    ),
    "floor_short": Registered(
        "E12",
        _SHORT_STUDY,
        (
            Hypothesis("dvp", _OTHERS, "65e-6", at_least=0.10),
            Hypothesis(_WIDE, _OTHERS, "65e-6", at_least=0.10, gate=_floor_gate("65e-6", _WIDE)),
            Hypothesis("dvp", _OTHERS, "12e-6", within=0.05),
        ),
        _floor_gate("65e-6"),
        "the smaller floor last",
    ),
    "large_phases": Registered(
        "E2",
        _LARGE,
        (
            *(
                Hypothesis(arm, (other,), "3e-5", within=0.05)
                for arm, other in itertools.pairwise(_TOKEN_WEIGHTS)
            ),
            *(Hypothesis(arm, ("no weights",), "3e-5", at_least=0.10) for arm in _TOKEN_WEIGHTS),
            Hypothesis("jackpot new", ("tis adjusted",), "3e-5", at_least=0.05),
        ),
        Gate(
            "acceptance by p_new of at least 0.93 at 3e-5",
            (Bound(mean("jackpot new", "3e-5", over(ACCEPTANCE)), at_least=0.93),),
        ),
        "1e-4 is left out if the matched arm collapses in most seeds",
    ),
    "batch_and_noise": Registered(
        "E3",
        _BATCH_STUDY,
        (
            Hypothesis("tis C=5", ("ais",), "int3, 512", at_least=0.03),
            Hypothesis("tis C=5", (UNCORRECTED,), "int3, 512", at_least=0.10),
            Hypothesis("tis C=5", (UNCORRECTED,), "noise, 512", within=0.05),
            Hypothesis(
                "tis C=5",
                (UNCORRECTED,),
                "noise of 1, 512",
                within=0.05,
                gate=_kl_gate("noise of 1"),
            ),
            Hypothesis(
                "ais by size",
                (UNCORRECTED,),
                "int3, 512",
                at_least=0.05,
                gate=_kl_gate("noise of 1"),
            ),
            Hypothesis(
                "ais by size",
                (UNCORRECTED,),
                "noise of 1, 512",
                within=0.03,
                gate=_kl_gate("noise of 1"),
            ),
            # below N* as little is corrected as pays, and above it as much
            *(
                Hypothesis(
                    "ais by size", (other,), size, at_least=least, gate=_kl_gate("noise of 1")
                )
                for other, size, least in (
                    (UNCORRECTED, "int3, 16", -0.03),
                    ("tis C=5", "int3, 16", 0.05),
                    (UNCORRECTED, "int3, 128", 0.05),
                )
            ),
        ),
        _kl_gate("noise"),
    ),
    "rapid_seeds": Registered(
        "E5",
        _RAPID_STUDY,
        (Hypothesis("rapid", ("matched",), "8", at_least=-0.03),),
        Gate(
            "training takes at least 15% less time at H = 8",
            (Bound(ratio(mean("rapid", "8", seconds), mean("matched", "1", seconds)), None, 0.85),),
        ),
    ),
    "sparse_long": Registered(
        "E6",
        _SPARSE_STUDY,
        (
            Hypothesis("distillsparse", ("training-free",), "3", at_least=0.03),
            Hypothesis("set-point", ("training-free",), "3", at_least=0.03),
            Hypothesis("both", ("set-point",), "3", at_least=-0.03),
        ),
        Gate(
            "the uncorrected arm's samples get 0.7 to 0.9 of the matched arm's reward over the "
            "second half, and KL is 0.05 to 0.3",
            (
                Bound(
                    ratio(
                        mean(UNCORRECTED, "3", late("reward/mean")),
                        mean("matched", "all", late("reward/mean")),
                    ),
                    *(0.7, 0.9),
                ),
                Bound(mean(UNCORRECTED, "3", over(KL)), 0.05, 0.3),
            ),
        ),
        "pages are chosen by a seed that is none of the study's",
    ),
    "real_model": Registered(
        "E7",
        _REAL_STUDY,
        (
            Hypothesis("tis C=5", (UNCORRECTED,), "int4", at_least=0.05),
            Hypothesis("tis C=5", ("ais",), "int4", within=0.05),
        ),
        Gate(
            "the uncorrected arm ends at least 0.05 below the matched one",
            (
                Bound(
                    difference(mean("matched", "none", final), mean(UNCORRECTED, "int4", final)),
                    at_least=0.05,
                ),
            ),
        ),
    ),
    "strata": Registered(
        "E8",
        _STRATA_STUDY,
        (Hypothesis("by kind", ("pooled",), "int3", at_least=-0.03),),
        Gate(
            "the INT3 half's mismatch/ess is at least 0.1 below the other's",
            (
                Bound(
                    difference(
                        *(
                            mean("by kind", "int3", over(f"mismatch/ess@{k}"))
                            for k in ("bf16", "fp8")
                        )
                    ),
                    at_least=0.1,
                ),
            ),
        ),
    ),
    "set_point": Registered(
        "E9",
        _SET_POINT_STUDY,
        (
            Hypothesis("set-point", ("matched",), "32", at_least=-0.03),
            Hypothesis("set-point", ("tis",), "32", at_least=0.10),
        ),
        Gate(
            "agreement_p5 is within 0.02 of 0.86 over the second half of the set-point's runs",
            (Bound(mean("set-point", "32", late("mismatch/agreement_p5")), 0.84, 0.88),),
        ),
    ),
    "sparse_pages": Registered(
        "E10",
        _PAGES_STUDY,
        (
            Hypothesis("set-point", ("matched",), "sparse", at_least=-0.03),
            Hypothesis("matched", ("few pages",), "sparse", at_least=0.10),
            Hypothesis("set-point", ("equal pages",), "sparse", at_least=-0.03),
        ),
        Gate(
            "the set-point's statistic is within 0.02 of 0.86 over the second half, at both "
            "entries of positions (mean over seeds)",
            tuple(
                Bound(mean("set-point", "sparse", late(name)), 0.84, 0.88)
                for name in _HELD_SHORT.statistic.values()
            ),
        ),
    ),
    "self_distillation": Registered(
        "E11",
        _SELF_STUDY,
        (
            Hypothesis("distilled", ("matched",), "best answer", at_least=-0.05),
            Hypothesis("both", ("matched",), "best answer", at_least=0.05),
        ),
        Gate(
            "teacher/token_share is at least 0.2 over the first three steps of the distilled arm "
            "(mean over seeds)"
        ),
    ),
}
