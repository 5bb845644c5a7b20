"""What each study of `evidence.py` runs: data, no logic.

A study has one knob, the size of the mismatch. Which size the methods are compared at is found by
the uncorrected arm and the matched one alone (`evidence.choose`), before any method runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Words = tuple[str, ...]
UNCORRECTED = "uncorrected"  # the arm that a sweep runs at each size

#: Sources whose change makes a finished run old: what computes an update.
UPDATE = (
    "rlcore/corrections",
    "rlcore/objectives",
    "rlcore/learner/update.py",
    "rlcore/learner/metric_sums.py",
    "rlcore/learner/update.py",
    "rlcore/tasks/digits.py",
)


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
    drawn: tuple[str, ...] = ()  # sizes of `further` with a figure of their own
    #: Models that are evaluated on the actors after a run: the folder to export to, and folders
    #: in it, where they exist.
    deployed: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()  # metrics that lines keep over time, besides those of every study


def _phases(*lengths: int) -> dict[str, Words]:
    return {str(h): (f"schedule.steps_per_publish={h}",) for h in lengths}


_UNCLIPPED = ("algorithm.eps_low=1.0", "algorithm.eps_high=1000.0")
_STALENESS_ARMS: dict[str, Words] = {
    "clip off": _UNCLIPPED,
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
#: A veto drops every answer with a token outside DVP's set, whatever DVP would zero.
_WITHOUT_VETO: dict[str, Words] = {
    "no veto": ("correction=none",),
    "dvp + mis, no veto": ("correction=[dvp,mis]",),
    "dvp + mis, answers, no veto": ("correction=[dvp,mis]", "correction.dvp.zero=trajectory"),
}

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
        drawn=("64",),
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
        drawn=(_ON_OFF_ON,),
        watched=(
            *("mismatch/kl_k3", "mismatch/ess", "mismatch/ais_alpha", "mismatch/ais_alpha_ess"),
            *("mismatch/ais_alpha_mis", "mismatch/ais_alpha_var"),
        ),
    ),
    "dvp": Study(
        experiment="evidence/dvp",
        knob="standard deviation of the noise on the actor's logits",
        matched=("0", ("actor.bf16.logit_noise=0.0",)),
        sizes={f"{s:g}": (f"actor.bf16.logit_noise={s}",) for s in (1.0, 2.0, 3.0)},
        arms=_NOISE_ARMS,
        further={"2": {**_NOISE_ARMS, **_WITHOUT_VETO}},
        drawn=("2",),
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
        deployed=("policy", "policy/sparse"),
        watched=(
            *("mismatch/kl_k3", "mismatch/acceptance", "loss/distill_kl"),
            *("response_length/mean", "reward/mean", "throughput/rollout_tokens_per_s"),
        ),
    ),
    "staleness": Study(
        experiment="evidence/staleness",
        knob="eta",
        matched=("0", ("schedule=on_policy",)),
        sizes=_ASYNC_SIZES,
        arms=_ASYNC_ARMS,
        further={size: _ASYNC_ARMS for size in _ASYNC_SIZES},
        drawn=("1", "16", "64"),
        timed=True,
        alone=True,
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
        by_trl=("TRL",),
    ),
}
