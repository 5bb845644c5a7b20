"""What each study of `evidence.py` runs: data, no logic.

A study has one knob, the size of the mismatch. Which size the methods are compared at is found by
the uncorrected arm and the matched one alone (`evidence.choose`), before any method runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Words = tuple[str, ...]
UNCORRECTED = "uncorrected"  # the arm that a sweep runs at each size

#: Sources whose change makes a finished run old: all that samples, scores, warms up or updates.
UPDATE = (
    "rlcore/attention",
    "rlcore/commands/warm_up.py",
    "rlcore/corrections",
    "rlcore/learner",
    "rlcore/models",
    "rlcore/objectives",
    "rlcore/rollout",
    "rlcore/tasks/digits.py",
)
Deviation = tuple[str, str, str]  # of what, in the paper, here


MOVED = "<moved>"


@dataclass(frozen=True)
class Held:
    """A statistic that a set-point holds within a margin of its value, by stretch of positions.

    Example: Held("agreement", 0.86, 0.02, {"64 to 95": "mismatch/stretch_3/agreement_p5"},
    {"64 to 95": "control/sparse/pages_3"}, "pages", "set-point")

    Words of other arms may hold `MOVED`: the mean of what the set-point moved in the run with the
    study's first seed, over steps and stretches, as a whole number. They run after it."""

    name: str
    value: float
    within: float
    statistic: Mapping[str, str]  # the watched metric of each stretch
    moved: Mapping[str, str]  # that of what the set-point moves there
    unit: str  # of what it moves
    arm: str  # that has the set-point


@dataclass(frozen=True)
class Study:
    """One experiment over sizes of a mismatch.

    Example: jackpot; knob "H"; sizes {"16": ("schedule.steps_per_publish=16",)}; the matched arm
    has size "1"; arms {"tis": ("correction=[tis]",)}, the uncorrected one without words.

    A size in `switching` changes the mismatch within its runs, whose steps are divided evenly: the
    words of each part, with which the run is resumed. It is not swept, only run in `further`.

    A study that is not `swept` chooses no size: the arm `reference` runs at the matched size and
    `arms` at all sizes. Where no size was chosen, the figure shows the curves of the size `shown`.
    An arm in `by_trl` is run by TRL's trainer instead of rlcore. Times are shown of a `timed` study
    only. Each run of a study that runs `alone` needs the whole machine."""

    experiment: str
    knob: str
    matched: tuple[str, Words]  # its size as a label, and its words
    sizes: Mapping[str, Words]  # from small to large; the uncorrected arm runs at each
    arms: Mapping[str, Words]  # run at the chosen size
    further: Mapping[str, Mapping[str, Words]] = field(default_factory=dict)  # by size, then by arm
    switching: Mapping[str, tuple[Words, ...]] = field(default_factory=dict)
    metric: str = "eval/digits/greedy"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    sources: tuple[str, ...] = UPDATE
    reference: str = "matched"  # the arm at the matched size, with which others are compared
    swept: bool = True
    by_trl: tuple[str, ...] = ()
    timed: bool = False
    alone: bool = False
    shown: str | None = None
    figure: tuple[str, ...] = ("matched", UNCORRECTED)  # arms, at most four
    stepped: bool = False  # the policy that is evaluated changes at publications alone
    against: Literal["p_ref", "p_new"] = "p_ref"  # what KL and ESS compare p_inf with
    contrasts: tuple[tuple[str, str, str], ...] = ()  # arm, another one, size
    deviations: tuple[Deviation, ...] = ()  # from the paper
    #: Models that are evaluated on the actors after a run: the folder to export to, and folders
    #: in it, where they exist.
    deployed: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()  # metrics that lines keep over time, besides those of every study
    held: Held | None = None  # shown in a table and two panels
    replaced: tuple[str, ...] = ()  # arms whose lines are kept, and that nothing runs any more


def _phases(*lengths: int) -> dict[str, Words]:
    return {str(h): (f"schedule.steps_per_publish={h}",) for h in lengths}


# half of the steps that the experiment has
_SHORT = ("schedule.steps=96", "learner.lr_decay_steps=96", "evaluation.every=16")
_UNCLIPPED = ("algorithm.eps_low=1.0", "algorithm.eps_high=1000.0")
_STALENESS_ARMS: dict[str, Words] = {
    "token IS": _UNCLIPPED,
    "no weights": ("algorithm.loss=reinforce", "correction=none"),
    "tis": ("correction=[tis]",),
    "tis adjusted": ("correction=[tis]", "correction.tis.adjusted=true"),
    "jackpot ref": ("correction=[jackpot]", "correction.jackpot.target=ref"),
    "jackpot new": (
        "correction=[jackpot]",
        "correction.jackpot.target=new",
        "correction.jackpot.short_circuit=true",
    ),
    "jackpot new, clip on": ("correction=[jackpot]", "correction.jackpot.target=new"),
}
_JACKPOT = ("correction=[jackpot]",)
_JACKPOT_NEW = (*_JACKPOT, "correction.jackpot.target=new")


def _ablations(**values: tuple[str, ...]) -> dict[str, Words]:
    """An arm for each value of a setting, which differs from the paper's in that alone."""
    return {
        f"{label}={value}": (*_JACKPOT_NEW, f"{_ABLATED[label]}={value}")
        for label, tried in values.items()
        for value in tried
    }


_ABLATED = {
    "k": "rollout.logprobs_k",
    "lambda": "correction.jackpot.lam",
    "C1": "correction.jackpot.c1",
    "mode": "correction.jackpot.mode",
    "Z": "correction.jackpot.normaliser",
}
_DRAFT_ARMS: dict[str, Words] = {
    UNCORRECTED: (),
    "tis": ("correction=[tis]",),
    "jackpot": _JACKPOT,
}
_ROUNDING_ARMS: dict[str, Words] = {
    "tis C=2": ("correction=[tis]", "correction.tis.cap=2"),
    "tis C=5": ("correction=[tis]", "correction.tis.cap=5"),
    "tis C=10": ("correction=[tis]", "correction.tis.cap=10"),
    "ais": ("correction=[ais]",),
}
_WITH_EMBEDDINGS = ("actor.fp8.keep_high_precision=[]",)
_ROUNDINGS: dict[str, Words] = {
    **{name: (f"actor.fp8.rounding={name}",) for name in ("int8", "fp8", "int4")},
    "int4, all": ("actor.fp8.rounding=int4", *_WITH_EMBEDDINGS),
    "int3": ("actor.fp8.rounding=int3",),
    "int3, all": ("actor.fp8.rounding=int3", *_WITH_EMBEDDINGS),
}
_ON_OFF_ON = "int3, all; none; int3, all"
#: A resumed run keeps the actor of the part before it, so that each part names its own.
_ROUNDED_AGAIN = ("actor=[fp8]", *_ROUNDINGS["int3, all"])
_NOISE_ARMS: dict[str, Words] = {
    "tis": ("correction=[tis,veto]",),
    "mis": ("correction=[mis,veto]",),
    "dvp": ("correction=[dvp,veto]",),
    "dvp + mis": ("correction=[dvp,mis,veto]",),
}
_SMALL: Deviation = ("model", "of 1.5B to 14B parameters, pretrained", "1.6M, warmed up on answers")
_DIGITS: Deviation = (
    "task",
    "mathematics, answers of thousands of tokens",
    "digits to sort, 7 tokens",
)
_DECAY: Deviation = ("learning rate", "1e-6 or so, constant", "1e-4, decaying to a tenth")

_RAPID = ("correction=[rapid]",)
_BESIDE_RAPID: dict[str, Words] = {
    "no weights": (),
    "rapid, leave one out": (*_RAPID, "correction.rapid.leave_one_out=true"),
    "grpo": ("algorithm=grpo",),
}
_SPARSE_ARMS: dict[str, Words] = {
    "training-free": ("correction=[jackpot]",),
    "sparse training": ("correction=[jackpot]", "learner.train_sparse=true"),
    "distillsparse": ("correction=[jackpot]", "learner.distill={}"),
    "distillsparse, 8 of 12": (
        *("correction=[jackpot]", "learner.distill={}"),
        *("rollout.samples_per_prompt=12", "algorithm.train_on_best=8"),
    ),
    "distillsparse, 8 of 16": (
        *("correction=[jackpot]", "learner.distill={}"),
        *("rollout.samples_per_prompt=16", "algorithm.train_on_best=8"),
    ),
}
_ASYNC_ARMS: dict[str, Words] = {
    "tis": ("correction=[tis]",),
    "decoupled ppo": ("correction=[tis]", "schedule.steps_per_phase=4"),
    "jackpot new": ("correction=[jackpot]", "correction.jackpot.target=new"),
    "vcpo": ("correction=[tis,vcpo]",),
}
_ASYNC_SIZES: dict[str, Words] = {
    str(eta): (f"schedule.max_staleness={eta}",) for eta in (1, 4, 16, 64)
}

STUDIES: dict[str, Study] = {
    "jackpot": Study(
        experiment="evidence/jackpot",
        knob="H",
        matched=("1", ("schedule.steps_per_publish=1",)),
        sizes=_phases(16, 64, 128),
        arms=_STALENESS_ARMS,
        further={"64": _STALENESS_ARMS},
        figure=("matched", UNCORRECTED, "token IS", "jackpot new"),
        stepped=True,
        against="p_new",
        contrasts=tuple(
            (arm, other, size)
            for size in ("64", "128")
            for arm, other in (
                ("jackpot new", "token IS"),
                ("tis adjusted", "token IS"),
                ("jackpot new, clip on", "jackpot new"),
            )
        ),
        deviations=(
            _SMALL,
            _DIGITS,
            _DECAY,
            ("samples a step", "32", "128"),
            ("rollouts in a run", "many: 30,000 to 100,000 examples", "4 at H = 64, 2 at H = 128"),
            ("tokens accepted", "about 0.95", "0.7 to 0.8 in the first phase"),
            ("PPO clip", "0.4 / 0.7", "0.2 / 0.2"),
            ("Jackpot", "lambda = 1, C1 = C2 = 3, k = 20", "the same"),
        ),
        watched=("correction/jackpot/acceptance", "entropy"),
    ),
    "ablations": Study(
        experiment="evidence/jackpot",
        knob="H",
        matched=("64", ("schedule.steps_per_publish=64", *_JACKPOT_NEW)),
        sizes=_phases(64),
        arms=_ablations(
            **{"k": ("5", "10", "40"), "lambda": ("0.8", "0.9", "1.1", "1.2")},
            **{"C1": ("2", "4", "8"), "mode": ("mask", "reweight"), "Z": ("none",)},
        ),
        reference="k=20, lambda=1, C1=3",
        swept=False,
        shown="64",
        figure=("k=20, lambda=1, C1=3", "mode=mask", "mode=reweight", "Z=none"),
        stepped=True,
        against="p_new",
        deviations=(
            _SMALL,
            _DIGITS,
            _DECAY,
            ("PPO clip", "0.4 / 0.7, or short-circuited", "0.2 / 0.2 in every arm"),
            ("C1", "2 to 8, with ratios beyond it", "2 to 8; the clip stops gradients at 1.2"),
            ("vocabulary", "151,936", "64, of which k = 20 holds nearly all mass"),
            ("lambda", "another model samples, 9,000 examples", "the policy 64 steps ago samples"),
        ),
        watched=("correction/jackpot/acceptance", "entropy"),
    ),
    "draft": Study(
        experiment="evidence/draft",
        knob="the draft",
        matched=("the policy itself", ("actor=[bf16]",)),
        sizes={"frozen": (), "co-trained": ("learner.draft={lr: 1.5e-4}",)},
        arms=_DRAFT_ARMS,
        swept=False,
        shown="frozen",
        figure=("matched", UNCORRECTED, "tis", "jackpot"),
        contrasts=(("jackpot", "tis", "frozen"), ("jackpot", "tis", "co-trained")),
        deviations=(
            (
                "policy and draft",
                "3B and 1.5B, pretrained apart",
                "1.6M and 0.3M, same warm-up data",
            ),
            _DIGITS,
            _DECAY,
            (
                "co-trained draft",
                "not in table 2",
                "reverse KL to the policy beside its own reward",
            ),
            ("TIS", "its C is not given", "C = 2"),
        ),
        watched=("mismatch/kl_k3", "mismatch/acceptance", "mismatch/ess"),
    ),
    "ais": Study(
        experiment="evidence/ais",
        knob="rounding of the actor's weights",
        matched=("none", ("actor=[bf16]",)),
        sizes=_ROUNDINGS,
        arms=_ROUNDING_ARMS,
        further={_ON_OFF_ON: {UNCORRECTED: (), **_ROUNDING_ARMS}},
        switching={
            _ON_OFF_ON: (_ROUNDED_AGAIN, ("actor=[bf16]",), _ROUNDED_AGAIN),
        },
        figure=("matched", UNCORRECTED, "tis C=10", "ais"),
        contrasts=(
            ("ais", "tis C=2", "int3"),
            ("ais", "tis C=10", "int3"),
            ("ais", "tis C=2", _ON_OFF_ON),
            ("ais", "tis C=10", _ON_OFF_ON),
        ),
        deviations=(
            ("model", "of 8B and 9B parameters, pretrained", "1.6M, warmed up on answers"),
            _DIGITS,
            (
                "rounding",
                "FP8 W8A8 in hardware, per-tensor dynamic scales",
                "INT8 to INT3 of weights",
            ),
            ("learning rate", "1e-7 to 1e-5", "1e-4, decaying to a tenth"),
            ("KL to the start", "beta_kl above 0", "none"),
            ("AIS", "C = 5, delta = 0.02, gamma = 1.2; beta not given", "the same, beta = 1"),
        ),
        watched=(
            *("mismatch/kl_k3", "mismatch/ess", "mismatch/ais_alpha", "mismatch/ais_alpha_ess"),
            *("mismatch/ais_alpha_mis", "mismatch/ais_alpha_var"),
        ),
    ),
    "dvp": Study(
        experiment="evidence/dvp",
        knob="noise on the actor's logits (standard deviation)",
        matched=("0", ("actor.bf16.logit_noise=0.0",)),
        sizes={f"{s:g}": (f"actor.bf16.logit_noise={s}",) for s in (1.0, 2.0, 3.0)},
        arms=_NOISE_ARMS,
        figure=("matched", UNCORRECTED, "dvp", "dvp + mis"),
        contrasts=(("dvp + mis", "mis", "3"), ("dvp", "mis", "3")),
        deviations=(
            ("model", "of 14B parameters, pretrained", "1.6M, warmed up on answers"),
            ("task", "mathematics, answers up to 16,384 tokens", "digits to sort, 8 tokens"),
            ("mismatch", "rounding of two engines", "Gaussian noise on every logit of a token"),
            ("vocabulary", "151,936", "8,192, of which answers use 11"),
            ("TIS and MIS", "a threshold of 0.2, of what is not said", "C = 2; 0.5 to 2"),
            ("samples a step", "32", "128"),
        ),
        watched=(
            *("mismatch/kl_k3", "mismatch/abs_dlogp_max", "mismatch/coverage_mean"),
            *("mismatch/unlikely_share", "mismatch/outside_share", "mismatch/veto_share"),
        ),
    ),
    "rapid": Study(
        experiment="evidence/rapid",
        knob="H",
        matched=("1", ("schedule.steps_per_publish=1", *_RAPID)),
        sizes=_phases(2, 4, 8, 16),
        arms={"rapid": _RAPID},
        further={
            "1": {"grpo": ("algorithm=grpo",)},
            "8": _BESIDE_RAPID,
            "16": _BESIDE_RAPID,
        },
        swept=False,
        timed=True,
        shown="8",
        figure=("matched", "rapid", "no weights", "grpo"),
        stepped=True,
        against="p_new",
        contrasts=(
            ("rapid", "no weights", "8"),
            ("rapid", "grpo", "8"),
            ("rapid", "no weights", "16"),
            ("rapid", "grpo", "16"),
            ("rapid, leave one out", "rapid", "16"),
        ),
        deviations=(
            ("model", "of 0.5B to 1.5B parameters, pretrained", "1.6M, warmed up on answers"),
            ("task", "MATH, MBPP+, MiniF2F", "digits to sort, 7 tokens"),
            ("learning rate", "1e-6", "1e-4, decaying to a tenth"),
            ("samples a step, of a group", "32 (MATH) or 4, 4", "32, 4"),
            ("GRPO", "KL coefficient 0.04", "no KL"),
            ("eta", "2, printed as max in eq. 5", "2, as min"),
        ),
        watched=("correction/rapid/clipped_share", "entropy"),
    ),
    "distillsparse": Study(
        experiment="evidence/distillsparse",
        knob="pages that a token attends to",
        matched=("all", ("actor=[bf16]",)),
        sizes={str(pages): (f"actor.sparse.sparse.blocks={pages}",) for pages in (12, 8, 4, 2)},
        arms=_SPARSE_ARMS,
        further={"4": _SPARSE_ARMS},
        shown="4",
        metric="eval/hiddendigits/mean@4",
        sources=(*UPDATE[:-1], "benchmarks/evidence/hidden_digits.py"),
        figure=("matched", UNCORRECTED, "distillsparse", "distillsparse, 8 of 12"),
        contrasts=(
            ("distillsparse", "training-free", "4"),
            ("distillsparse, 8 of 12", "training-free", "4"),
            ("distillsparse, 8 of 12", "distillsparse", "4"),
        ),
        deviations=(
            ("model", "of 4B and 8B parameters, pretrained", "two layers, warmed up on answers"),
            (
                "context",
                "answers of 12,000 to 16,000 tokens",
                "prompts of 320 tokens, answers of 8",
            ),
            ("pages of 16 tokens", "24 or 32: 7% or 10%", "4 of 20: 20%"),
            ("success of the sparse actor", "close to dense", "a hundredth of dense"),
            ("samples kept", "8 of 8, 12, 16", "the same"),
        ),
        deployed=("policy", "policy/sparse"),
        watched=(
            *("mismatch/kl_k3", "mismatch/acceptance", "loss/distill_kl"),
            *("response_length/mean", "reward/mean", "throughput/rollout_tokens_per_s"),
        ),
    ),
    "round_as": Study(
        experiment="evidence/ais",
        knob="rounding of the actor's weights",
        matched=("none", (*_SHORT, "actor=[bf16]")),
        sizes={"int3": (*_SHORT, "actor.fp8.rounding=int3")},
        arms={
            UNCORRECTED: (),
            "tis C=5": ("correction=[tis]", "correction.tis.cap=5"),
            "round_as": ("learner.round_as=fp8",),
        },
        swept=False,
        shown="int3",
        figure=("matched", UNCORRECTED, "tis C=5", "round_as"),
        contrasts=(("round_as", "tis C=5", "int3"),),
        deviations=(
            ("model", "a mixture of experts of 30B, pretrained", "1.6M, warmed up on answers"),
            ("task", "mathematics, long answers", "digits to sort, 7 tokens"),
            ("format", "low-bit kernels", "INT3 weights, emulated"),
            ("loss", "bounds sequences of negative advantage (TBPO)", "PPO's clip"),
        ),
        deployed=("policy",),
        watched=("mismatch/kl_k3", "rounding/relative_error", "entropy"),
    ),
    "staleness": Study(
        experiment="evidence/staleness",
        knob="eta",
        matched=("0", ("schedule=on_policy",)),
        sizes=_ASYNC_SIZES,
        arms=_ASYNC_ARMS,
        further={size: _ASYNC_ARMS for size in _ASYNC_SIZES},
        timed=True,
        alone=True,
        figure=("matched", UNCORRECTED, "tis", "decoupled ppo"),
        contrasts=tuple(
            (arm, "tis", size)
            for size in ("4", "16", "64")
            for arm in ("decoupled ppo", "vcpo", "jackpot new")
        ),
        deviations=(
            _SMALL,
            _DIGITS,
            _DECAY,
            ("VCPO", "step size and a gradient-norm baseline", "step size alone"),
            ("decoupled PPO", "p_ref of the newest weights", "p_ref of every 4th step"),
        ),
        watched=("mismatch/kl_k3", "staleness/mean", "entropy"),
    ),
    "trl": Study(
        experiment="evidence/trl",
        knob="program",
        matched=("same", ()),
        sizes={"same": ()},
        arms={"TRL": (), "asynchronous": ("schedule=async",)},
        swept=False,
        shown="same",
        figure=("matched", "TRL", "asynchronous"),
        sources=(*UPDATE, "benchmarks/evidence/evidence_trl.py", "benchmarks/peers/peer_trl.py"),
        by_trl=("TRL",),
    ),
}
