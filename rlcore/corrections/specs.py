"""Settings of each correction. No torch.

A correction is three things: a specification here (or in a user's own module), its method, which
the specification names, and its line in `corrections/registry.py`. Facts about a method that other
packages need are class variables of its specification:

    class MySpec(CorrectionSpec):
        method: ClassVar[str] = "my_package.my_method:MyMethod"     # MyMethod(spec, run_seed)
        weighs: ClassVar[bool] = True
        cap: float = setting(2.0, "largest weight", ge=1)
"""

from __future__ import annotations

from math import exp
from typing import ClassVar, Literal

from rlcore.objectives.bias import WIDE, Bias
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.spec import Spec, refuse, setting


class CorrectionSpec(Spec):
    """Base of all specifications: facts about the method."""

    #: "package.module:Class" of the method, built as Class(spec, run_seed)
    method: ClassVar[str] = ""
    #: whether it multiplies the objective by an importance ratio towards the learner's policy:
    #: two of those would correct the same mismatch twice and are refused
    weighs: ClassVar[bool] = False
    #: whether a sequence's weights and mask depend on its own tokens alone and reject none, so that
    #: a micro-batch can be corrected on its own
    sequence_wise: ClassVar[bool] = False

    #: whether its weights already correct towards p_new, so that the loss must not contain
    #: p_new/p_ref
    leads_to_new: ClassVar[bool] = False
    #: name of the advantage that it replaces, or ""
    replaces_advantage: ClassVar[str] = ""

    @property
    def inner_clip_off(self) -> str:
        """Name of the setting that switches PPO's inner clip off here, or ""."""
        return ""

    @property
    def corrects(self) -> Literal["token", "sequence"]:
        """What its weights lead to the learner's policy: each token alone, or whole sequences."""
        return "token"

    @property
    def biases(self) -> tuple[Bias, ...]:
        """How the expected gradient departs from its reference under these settings."""
        return ()

    @property
    def needs_topk(self) -> bool:
        """Whether actors must store top log-probs (rollout.logprobs_k of at least 1)."""
        return False

    @property
    def rejects(self) -> bool:
        """Whether it draws which tokens stay: those do not follow p_inf, and only its weights lead
        from them to a policy."""
        return False

    # Asked by the pipeline before it builds the method, so that a method never sees an objective.
    def under(self, objective: ObjectiveSpec) -> CorrectionSpec:
        """This specification with what depends on the objective decided."""
        return self


class TisSpec(CorrectionSpec):
    """Truncated importance sampling (Jackpot eq. 6; adjusted: Jackpot B.1).

    Biased by the truncation at `cap`."""

    method: ClassVar[str] = "rlcore.corrections.tis:Tis"
    weighs: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    cap: float = setting(2.0, "C: weights are min(p_ref/p_inf, C)", ge=1)
    level: Literal["token", "sequence"] = setting("token", "of the ratio")
    adjusted: bool = setting(False, "min(SG(p_new)/p_inf, C), inner clip off (Jackpot B.1)")

    @property
    def inner_clip_off(self) -> str:
        return "adjusted" if self.adjusted else ""

    @property
    def corrects(self) -> Literal["token", "sequence"]:
        return self.level

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("truncation", {"cap": WIDE}),)


class MisSpec(CorrectionSpec):
    """Masked importance sampling (DVP section 6).

    Biased by the mask outside [low, high]; level=geometric also by the geometric mean, which is the
    ratio of no sequence longer than one token."""

    method: ClassVar[str] = "rlcore.corrections.mis:Mis"
    weighs: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    low: float = setting(0.5, "ratios below weigh 0", ge=0, le=1)
    high: float = setting(2.0, "ratios above weigh 0", ge=1)
    level: Literal["token", "sequence", "geometric"] = setting("token", "of the ratio")

    @property
    def corrects(self) -> Literal["token", "sequence"]:
        return "token" if self.level == "token" else "sequence"

    @property
    def biases(self) -> tuple[Bias, ...]:
        mask = Bias("mask", {"low": 0.0, "high": WIDE})
        geometric = Bias("geometric mean", where="one token")
        return (mask, geometric) if self.level == "geometric" else (mask,)


class IcePopSpec(CorrectionSpec):
    """Masked importance sampling per token with its own usual bounds (DistillSparse 2.1).

    Biased by the mask outside [low, high]."""

    method: ClassVar[str] = "rlcore.corrections.icepop:IcePop"
    weighs: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    low: float = setting(0.5, "ratios below weigh 0", ge=0, le=1)
    high: float = setting(5.0, "ratios above weigh 0", ge=1)

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("mask", {"low": 0.0, "high": WIDE}),)


class VetoSpec(CorrectionSpec):
    """Drops a sequence that holds a token to which the learner assigns almost no probability.

    Biased by the dropped sequences, which leave the denominators too."""

    method: ClassVar[str] = "rlcore.corrections.veto:Veto"

    threshold: float = setting(
        1e-4, "a token with p_ref/p_inf below drops its sequence", gt=0, lt=1
    )

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("dropped sequences", {"threshold": 1e-300}),)


class OpsmSpec(CorrectionSpec):
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9).

    Biased by the mask: a sequence that did badly and is far from p_inf is not made less likely."""

    method: ClassVar[str] = "rlcore.corrections.opsm:Opsm"
    sequence_wise: ClassVar[bool] = True

    delta: float = setting(
        meaning="sequences with A < 0 and a mean log p_inf - log p_new above weigh 0", ge=0
    )
    target: Literal["ref", "new"] = setting("new", "ref: log p_ref in the place of log p_new")

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("mask", {"delta": WIDE}),)


class DppoSpec(CorrectionSpec):
    """DPPO's truncated weights and trust region (arXiv 2602.04879).

    Biased by the truncation at `cap` and by the mask outside the trust region."""

    method: ClassVar[str] = "rlcore.corrections.dppo:Dppo"
    weighs: ClassVar[bool] = True
    leads_to_new: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    divergence: Literal["tv", "kl"] = setting(
        "tv", "of the sampled token against all others, between p_inf and p_new"
    )
    low: float = setting(0.15, "A < 0: further below p_inf weighs 0 (kl: 0.05 is usual)", ge=0)
    high: float = setting(0.15, "A > 0: further above p_inf weighs 0 (kl: 0.05 is usual)", ge=0)
    cap: float = setting(10.0, "C: weights are min(p_new/p_inf, C)", ge=1)

    @property
    def biases(self) -> tuple[Bias, ...]:
        region = Bias("mask", {"low": WIDE, "high": WIDE})
        return (region, Bias("truncation", {"cap": WIDE}))


class JackpotSpec(CorrectionSpec):
    """Optimal budgeted rejection sampling and reweighting (papers/jackpot.txt).

    Biased by the truncation at c1 and c2. normaliser=paper also by states of acceptance: a state
    counts by the share of its tokens that stay, and a mean that is not over all tokens at once
    shrinks. The ablations mode=mask and mode=reweight by half a correction: tokens that stay follow
    another distribution than p_t, or the weights are those of tokens that stay."""

    method: ClassVar[str] = "rlcore.corrections.jackpot:Jackpot"
    weighs: ClassVar[bool] = True

    mode: Literal["mask", "reweight", "both"] = setting(
        "both", "reject tokens, weigh them, or both"
    )
    target: Literal["ref", "new"] = setting("ref", "p_t: ref without staleness, new with it")
    lam: float = setting(1.0, "lambda: accept with min(1, p_t/(lambda p_inf))", gt=0)
    c1: float = setting(3.0, "cap of Z * max(lambda, p_t/p_inf)", ge=1)
    c2: float = setting(3.0, "cap of p_ref/p_new, target new", ge=1)
    alpha_hat: Literal["bernoulli", "expected"] = setting(
        "expected", "the accepted share: drawn, or its expectation"
    )
    missing: Literal["zero", "bound"] = setting("zero", "p_inf of tokens the actor did not return")
    tail: Literal["none", "residual"] = setting("residual", "mass outside the stored top k")
    short_circuit: bool = setting(False, "switch the inner PPO clip off, as TIS-adjusted does")
    normaliser: Literal["auto", "paper", "none"] = setting(
        "auto",
        "paper: weights carry Z, rejected tokens leave the denominator; none: no Z, they stay in "
        "it with weight 0; auto: paper under token-mean, else none",
    )

    @property
    def inner_clip_off(self) -> str:
        return "short_circuit" if self.short_circuit else ""

    @property
    def needs_topk(self) -> bool:
        return self.mode != "mask" and self.normaliser != "none"  # Z is estimated from them

    @property
    def rejects(self) -> bool:
        return self.mode != "reweight"

    @property
    def biases(self) -> tuple[Bias, ...]:
        if self.mode == "mask":
            return (Bias("half a correction", where="matched"),)
        caps = Bias("truncation", {"c1": WIDE, "c2": WIDE})
        if self.mode == "reweight":
            return (caps, Bias("half a correction", where="matched"))
        states = Bias("states of acceptance", {"normaliser": "none"})
        return (caps, states) if self.normaliser != "none" else (caps,)

    def under(self, objective: ObjectiveSpec) -> JackpotSpec:
        if self.normaliser != "auto":
            return self
        # Weights with Z are exact in a mean over all tokens kept. A constant denominator they
        # shrink by the acceptance rate, a mean of each sequence's kept tokens they bias.
        drop = objective.aggregation != "token-mean" and self.mode == "both"
        return self.model_copy(update={"normaliser": "none" if drop else "paper"})

    def check(self, key: str) -> None:
        refuse(
            self.normaliser == "none" and self.mode != "both",
            f"{key}.normaliser=none with {key}.mode={self.mode} is not accepted: without Z, tokens "
            f"are both rejected and weighed; use {key}.mode=both or {key}.normaliser=auto.",
        )
        refuse(
            self.short_circuit and self.target != "new",
            f"{key}.short_circuit=true with {key}.target={self.target} leaves nothing that leads "
            f"to p_new: use {key}.target=new.",
        )


class VcpoSpec(CorrectionSpec):
    """VCPO's step size from the effective sample size (arXiv 2602.17616).

    It scales a whole step, and leaves the expected gradient's direction as it is."""

    method: ClassVar[str] = "rlcore.corrections.vcpo:Vcpo"
    sequence_wise: ClassVar[bool] = True

    rule: Literal["sqrt", "linear"] = setting(
        "sqrt", "of the share of effective samples: sqrt for Adam"
    )
    base: float = setting(1.0, "share of effective samples that takes the whole step", gt=0, le=1)
    cap: float | None = setting(
        None, "sequence ratios count as at most this; null: as they are", ge=1
    )
    target: Literal["ref", "new"] = setting("new", "ref: p_ref in the place of p_new")


class AisSpec(CorrectionSpec):
    """Adaptive importance sampling (papers/ais.txt).

    Biased by the truncation at `cap` and by partial correction: it corrects the share alpha, and
    its gradient lies between that of no correction and that of tis."""

    method: ClassVar[str] = "rlcore.corrections.ais:Ais"
    weighs: ClassVar[bool] = True

    cap: float = setting(5.0, "C: w = min(p_ref/p_inf, C)", ge=1)
    delta: float = setting(0.02, "mean |dlogp| at which the correction is full", gt=0)
    gamma: float = setting(1.2, "growth of std(A*w)/std(A) that is tolerated", gt=0)
    beta: float = setting(1.0, "how much more growth damps the correction", ge=0)
    eps: float = setting(1e-6, "guards a division", gt=0)

    @property
    def biases(self) -> tuple[Bias, ...]:
        caps = Bias("truncation", {"cap": WIDE})
        return (caps, Bias("partial correction", where="matched"))


class DvpSpec(CorrectionSpec):
    """Dynamic vocabulary pruning (papers/dvp.txt).

    Its reference is the policy constrained to its safe set. Biased by the safe set of p_ref where
    it lacks a token of p_new's: that token has weight 0, from a phase's second step on. With
    zero=trajectory and weights per token also by the sequences that a token outside takes out."""

    method: ClassVar[str] = "rlcore.corrections.dvp:Dvp"
    sequence_wise: ClassVar[bool] = True

    rho: float = setting(exp(-13.0), "safe set: p >= rho * max p", gt=0, lt=1)
    zero: Literal["token", "trajectory"] = setting(
        "token", "what a token outside the learner's set takes out: itself, or all of its sequence"
    )

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("safe set", {"rho": 1e-300}),)


class RapidSpec(CorrectionSpec):
    """RAPID's sequence weights and weighted baseline (papers/rapid.txt).

    Biased by the truncation at `eta`; with advantages taken as random, also by each sample's own
    term in its baseline, which `leave_one_out` removes."""

    method: ClassVar[str] = "rlcore.corrections.rapid:Rapid"
    weighs: ClassVar[bool] = True
    leads_to_new: ClassVar[bool] = True
    replaces_advantage: ClassVar[str] = "group_mean"

    eta: float = setting(2.0, "cap of the sequence weight", ge=1)
    leave_one_out: bool = setting(False, "leave a sample out of its own baseline")

    @property
    def corrects(self) -> Literal["token", "sequence"]:
        return "sequence"

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("truncation", {"eta": WIDE}),)
