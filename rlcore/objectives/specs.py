"""Settings of advantages, policy losses, KL and aggregation. No torch."""

from __future__ import annotations

from math import ceil
from typing import ClassVar, Literal

from rlcore.objectives.protocols import WIDE, Advantage, Bias, PolicyLoss
from rlcore.registry import resolve
from rlcore.spec import DeclaredMetric, Spec, Unread, refuse, setting

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3", "full"]


class ObjectiveSpec(Spec):
    """The objective of a step: advantages, loss, aggregation, regularisers.

    A sampled KL is biased by the truncation of the ratio that it carries, and by k3's bound. Both
    kinds of KL and the entropy bonus are biased as the corrections are, since a token of weight 0
    has neither KL nor bonus. The overlong filter biases all terms towards responses that end by
    themselves.
    """

    #: of the KL term; the policy loss's own are on its class
    kl_biases: ClassVar[tuple[Bias, ...]] = (Bias("truncation", {"kl_ratio_cap": WIDE}),)

    #: of every term
    biases: ClassVar[tuple[Bias, ...]] = (Bias("overlong filter", {"overlong_filter": False}),)

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("kl_estimator", "kl_ratio_cap", "kl_in", "kl_target", "kl_horizon"),
            lambda spec: spec.kl_coef == 0,
            "kl_coef=0 leaves no KL",
        ),
        Unread(
            ("kl_estimator", "kl_ratio_cap"),
            lambda spec: spec.kl_in_reward,
            "kl_in=reward takes k1 and carries no ratio",
        ),
        Unread(
            ("kl_ratio_cap",),
            lambda spec: spec.kl_in_loss and spec.kl_estimator == "full",
            "kl_estimator=full carries no ratio",
        ),
        Unread(
            ("kl_target", "kl_horizon"),
            lambda spec: spec.kl_in_loss,
            "kl_in=loss has a fixed coefficient",
        ),
        Unread(
            ("kl_horizon",),
            lambda spec: spec.kl_in_reward and spec.kl_target is None,
            "kl_target=null fixes the coefficient",
        ),
        Unread(
            ("overlong_penalty",),
            lambda spec: spec.overlong_share == 0,
            "overlong_share=0 leaves no penalty",
        ),
    )

    advantage: str = setting(
        "grpo", "how rewards become advantages, or file.py:Class", names="code"
    )
    whitening: Literal["episodes", "tokens"] = setting(
        "episodes", "reinforce_pp: what the batch's mean and deviation are over"
    )
    turn_share: float = setting(
        0.0,
        "share of a token's advantage that is of its turn's reward to go; the rest is of its "
        "episode's reward",
        ge=0,
        le=1,
    )
    turn_discount: float = setting(
        1.0, "turn_share: what a reward counts for the turn before it", ge=0, le=1
    )
    credit: Literal["turn", "token"] = setting(
        "turn",
        "turn_share, or a critic: what a reward to go or a value is of; token: every token is a "
        "turn, and a whole turn's reward is its last token's",
    )
    loss: str = setting("ppo", "policy loss, or file.py:Class", names="code")
    reward_weight: float = setting(
        1.0, "weight of the policy loss; 0: rewards train nothing, with a teacher alone", ge=0
    )
    eps_low: float = setting(0.2, "clip the ratio below 1 - eps_low", ge=0)
    eps_high: float = setting(0.2, "clip the ratio above 1 + eps_high", ge=0)
    ratio_to: Literal["p_ref", "p_inf"] = setting(
        "p_ref",
        "policy that p_new is divided by in the loss; p_inf: no p_ref is held, each step's is "
        "p_new, and the clipped ratio corrects the mismatch, too",
    )
    dual_clip: float | None = setting(
        None, "ppo: a negative advantage counts with a ratio of at most this; null: off", gt=1
    )
    sapo_tau_pos: float = setting(1.0, "sapo: temperature of the gate where A > 0", gt=0)
    sapo_tau_neg: float = setting(1.05, "sapo: temperature of the gate elsewhere", gt=0)
    pass_k: int = setting(4, "passk: k, the attempts of which the best counts", ge=2)
    aggregation: Aggregation = setting("token-mean", "of token losses over the global batch")
    kl_coef: float = setting(0.0, "weight of the KL to the frozen starting policy", ge=0)
    kl_in: Literal["loss", "reward"] = setting(
        "loss",
        "loss: a separate term; reward: of every token, by k1 under p_ref, taken off the rewards "
        "to go",
    )
    kl_target: float | None = setting(
        None,
        "kl_in=reward: KL of an answer that kl_coef is adapted to, from its value on; null: fixed",
        unit="nats",
        gt=0,
    )
    kl_horizon: int = setting(
        10_000, "kl_target: answers over which kl_coef follows, by 20% of itself at most", gt=0
    )
    kl_estimator: KlEstimator = setting(
        "k3", "of that KL; gradients: k1, k2 and full the reverse KL's, k3 the forward KL's"
    )
    kl_ratio_cap: float = setting(
        2.0, "truncates the ratio p_new/p_inf that a sampled KL carries", ge=1
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus")
    overlong_share: float = setting(
        0.0, "DAPO's soft overlong penalty: over this share of max_new_tokens; 0: off", ge=0, lt=1
    )
    overlong_filter: bool = setting(
        False, "DAPO's overlong filtering: responses cut off at the limit leave the loss"
    )
    overlong_penalty: float = setting(1.0, "its largest value", ge=0)

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    def overlong_buffer(self, max_new_tokens: int) -> int:
        """Tokens before the limit over which the overlong penalty rises; 0: off."""
        return ceil(self.overlong_share * max_new_tokens)


class ValueSpec(Spec):
    """Targets of a critic and advantages from its values (`objectives/values.py`)."""

    discount: float = setting(1.0, "gamma, of a reward a token or turn later", ge=0, le=1)
    lam: float = setting(0.95, "lambda of the advantages and the targets", ge=0, le=1)
    traces: Literal["vtrace", "gae"] = setting(
        "vtrace",
        "vtrace: what was sampled after a state counts by p_ref/p_inf; gae: as if the learner had "
        "sampled it",
    )
    rho_cap: float = setting(1.0, "vtrace: largest p_ref/p_inf of a temporal difference", ge=1)
    c_cap: float = setting(1.0, "vtrace: largest p_ref/p_inf of a trace", ge=1)
    clip: float | None = setting(
        None, "values change within a phase by at most this in the loss; null: no clip", gt=0
    )
    whiten: bool = setting(
        True, "advantages of a batch have mean 0 and deviation 1 over its tokens that have a target"
    )
    bootstrap: bool = setting(
        False,
        "an answer that the length limit cut off goes on: its last state's value replaces its "
        "last reward; false: its reward counts",
    )


class TeacherSpec(Spec):
    """A policy that the trained one is led to on its own samples (`objectives/distillation.py`)."""

    metrics: ClassVar[tuple[DeclaredMetric, ...]] = (
        DeclaredMetric(
            "loss/teacher",
            "nats",
            "distance to the teacher as the loss has it, before `teacher.weight`",
            healthy="falls",
            otherwise="raise `teacher.weight` or `learner.lr`",
        ),
        DeclaredMetric(
            "teacher/divergence",
            "nats",
            "mean distance to the teacher, weighted as in the loss, of tokens that have one",
            healthy="falls",
            otherwise="raise `teacher.weight` or `learner.lr`; [Distillation](distillation.md)",
        ),
        *(
            DeclaredMetric(
                f"teacher/divergence_quarter_{n}",
                "nats",
                f"the same for the {name} quarter of each answer's tokens",
            )
            for n, name in enumerate(("first", "second", "third", "last"), 1)
        ),
        DeclaredMetric(
            "teacher/top1_agreement",
            "share",
            "tokens at which policy and teacher find the same one likeliest",
            healthy="rises",
            otherwise="the teacher may be too far away: a warm-up on its answers comes first",
        ),
        DeclaredMetric(
            "teacher/tail_mass",
            "share",
            "the teacher's probability outside of `teacher.top_k`",
            healthy="below 0.05",
            otherwise="raise `teacher.top_k`, or use `teacher.tail=sampled`",
        ),
        DeclaredMetric(
            "teacher/token_share",
            "share",
            "tokens of the loss that have a teacher; with a context that some episodes lack below "
            "1",
        ),
        DeclaredMetric(
            "teacher/unscored",
            "episodes",
            "of the step, with a token that has no teacher: no context, or no score of the "
            "teacher's engine in time",
            "sum",
            healthy="0 without `teacher.context`",
            otherwise="`teacher=engine`: raise `teacher.engine.count` or "
            "`teacher.engine.timeout_s`; log.jsonl says which engines were replaced",
        ),
        DeclaredMetric(
            "time/learner_teacher_s",
            "s",
            "the learner computing the teacher's scores, of a phase in the row of its first step",
            "sum",
        ),
        DeclaredMetric(
            "time/teacher_engine_s",
            "s",
            "a teacher's engines computing the scores of the batch's records",
            "sum",
        ),
    )

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("divergence", "js_weight", "top_k", "tail", "ratio_cap", "weight", "context"),
            lambda spec: not spec.used,
            "kind=none has no teacher",
        ),
        Unread(
            ("refresh_steps",),
            lambda spec: spec.kind != "previous",
            "only kind=previous is refreshed",
        ),
        Unread(
            ("js_weight",),
            lambda spec: spec.used and spec.divergence != "js",
            "divergence is not js",
        ),
        Unread(
            ("tail",), lambda spec: spec.used and spec.top_k is None, "top_k=null leaves no tail"
        ),
        Unread(
            ("ratio_cap",),
            lambda spec: spec.used and (spec.top_k is None or spec.tail != "sampled"),
            "no tail is sampled",
        ),
    )

    kind: Literal["none", "frozen", "previous", "policy", "engine"] = setting(
        "none",
        "frozen: a fixed model; previous: the policy some steps ago; policy: the policy as each "
        "phase begins, with another context; engine: a model in a separate engine, which scores "
        "arriving records",
    )
    path: str | None = setting(
        None,
        "kind=frozen or engine: its Hugging Face folder; frozen, null: the starting policy",
        names="model",
    )
    paths: dict[str, str] = setting(
        default_factory=dict,
        meaning="kind=frozen: folders by task, in the place of path",
        names="model",
    )
    actor: str | None = setting(
        None, "kind=engine: in the place of path, the draft actor whose model it is, by its label"
    )
    refresh_steps: int = setting(
        20, "kind=previous: it becomes the policy of the moment after so many", unit="steps", gt=0
    )
    context: Literal["none", "best", "feedback"] = setting(
        "none",
        "what the teacher alone reads before the episode; best: the prompt and the best answer of "
        "the group; feedback: the prompt and all later observations of the episode itself",
    )
    divergence: Literal["reverse", "forward", "js"] = setting(
        "reverse", "from the policy p to the teacher q: KL(p||q), KL(q||p), or Jensen-Shannon"
    )
    js_weight: float = setting(0.5, "js: the teacher's share of the mixture", gt=0, lt=1)
    top_k: int | None = setting(
        32, "tokens of the teacher that are compared; null: the whole vocabulary, exactly", ge=0
    )
    tail: Literal["bucket", "drop", "sampled"] = setting(
        "bucket",
        "what becomes of all other tokens; bucket: one outcome; drop: both are conditioned on the "
        "top k; sampled: reverse alone, estimated from the sampled token",
    )
    ratio_cap: float = setting(
        2.0, "sampled: truncates the ratio p_new/p_inf that the token carries", ge=1
    )
    weight: float = setting(
        1.0, "of the divergence, next to algorithm.reward_weight of the policy loss", gt=0
    )

    def _check_engine(self, key: str) -> None:
        if self.kind != "engine":
            return
        refuse(
            (self.path is None) == (self.actor is None),
            f"{key}.kind=engine needs one model: give either {key}.path, a folder, or {key}.actor, "
            "a draft actor.",
        )
        refuse(
            self.context != "none",
            f"{key}.context={self.context} is known when a group is whole, and {key}.kind=engine "
            "scores each record as it arrives: use kind=frozen, previous or policy.",
        )
        refuse(
            self.top_k is None,
            f"{key}.top_k=null compares hidden states, and {key}.kind=engine gives log-probs: give "
            "a number; one of the vocabulary's size is exact, too.",
        )

    @property
    def used(self) -> bool:
        """True if the run has a teacher."""
        return self.kind != "none"

    def check(self, key: str) -> None:
        owners = {"path": ("frozen", "engine"), "paths": ("frozen",), "actor": ("engine",)}
        for name, kinds in owners.items():
            refuse(
                bool(getattr(self, name)) and self.kind not in kinds,
                f"{key}.{name} names a model that {key}.kind={self.kind} does not have: use "
                f"{key}={' or '.join(kinds)}, or leave it out.",
            )
        self._check_engine(key)
        refuse(
            self.path is not None and bool(self.paths),
            f"{key}.path={self.path} and {key}.paths contradict each other: give one of them.",
        )
        own = self.kind == "frozen" and self.path is None and not self.paths
        refuse(
            self.context == "none" and (self.kind == "policy" or own),
            f"{key}.kind={self.kind} without {key}.path and with {key}.context=none is led to "
            "itself: set a context (best, feedback), a path, or algorithm.kl_coef for a KL to the "
            "starting policy.",
        )
        refuse(
            self.top_k is None and (self.context != "none" or bool(self.paths)),
            f"{key}.top_k=null takes the teacher's logits in the policy's own pass, which "
            f"{key}.context and {key}.paths do not have: give a number; one of the vocabulary's "
            "size is exact, too.",
        )
        sampled = self.tail == "sampled"
        refuse(
            sampled and self.top_k is not None and self.divergence != "reverse",
            f"{key}.tail=sampled estimates the reverse KL, and {key}.divergence="
            f"{self.divergence}: use tail=bucket or drop, or divergence=reverse.",
        )
        refuse(
            self.top_k == 0 and not sampled,
            f"{key}.top_k=0 has the sampled token alone, and {key}.tail={self.tail}: use "
            f"{key}.tail=sampled, or a top_k above 0.",
        )


ADVANTAGES: dict[str, str] = {
    "gae": "rlcore.objectives.advantages:Gae",
    "grpo": "rlcore.objectives.advantages:Grpo",
    "dr_grpo": "rlcore.objectives.advantages:GroupMean",
    "rloo": "rlcore.objectives.advantages:Rloo",
    "reinforce_pp": "rlcore.objectives.advantages:ReinforcePp",
    "reinforce_pp_baseline": "rlcore.objectives.advantages:ReinforcePpBaseline",
    "reinforce": "rlcore.objectives.advantages:ReinforceAdvantage",
    "group_mean": "rlcore.objectives.advantages:GroupMean",
    "opo": "rlcore.objectives.advantages:Opo",
    "gpg": "rlcore.objectives.advantages:Gpg",
    "passk": "rlcore.objectives.advantages:PassK",
}
LOSSES: dict[str, str] = {
    "ppo": "rlcore.objectives.losses:Ppo",
    "gspo": "rlcore.objectives.losses:Gspo",
    "gmpo": "rlcore.objectives.losses:Gmpo",
    "sapo": "rlcore.objectives.losses:Sapo",
    "cispo": "rlcore.objectives.losses:Cispo",
    "reinforce": "rlcore.objectives.losses:Reinforce",
}


def advantage_class(name: str, key: str = "algorithm.advantage") -> type[Advantage]:
    """The advantage of a name or "file.py:Class". Raises UserError naming `key`."""
    cls: type[Advantage] = resolve(ADVANTAGES, name, key=key, like=Advantage)
    return cls


def loss_class(name: str) -> type[PolicyLoss]:
    """The policy loss of a name or "file.py:Class". Raises UserError naming algorithm.loss."""
    cls: type[PolicyLoss] = resolve(LOSSES, name, key="algorithm.loss", like=PolicyLoss)
    return cls


def make_advantage(spec: ObjectiveSpec, key: str = "algorithm.advantage") -> Advantage:
    """The advantage that `spec.advantage` names; `key`: where a run names it."""
    return advantage_class(spec.advantage, key)(spec)


def make_loss(spec: ObjectiveSpec) -> PolicyLoss:
    """The policy loss that `spec.loss` names."""
    return loss_class(spec.loss)(spec)
