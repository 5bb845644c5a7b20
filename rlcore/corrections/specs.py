"""Settings of each correction. No torch.

A correction is three things: a specification here (or in a user's own module), its method, which
the specification names, and its line in `corrections/specs.py`. Facts about a method that other
packages need are class variables of its specification:

    class MySpec(CorrectionSpec):
        method: ClassVar[str] = "my_package.my_method:MyMethod"     # MyMethod(spec, run_seed)
        weighs: ClassVar[bool] = True
        cap: float = setting(2.0, "largest weight", ge=1)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.objectives.protocols import Bias
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.spec import Spec

#: figures of a batch by name: (unit, meaning)
Statistics = Mapping[str, tuple[str, str]]


class CorrectionSpec(Spec):
    """Base of all specifications: facts about the method."""

    #: "package.module:Class" of the method, built as Class(spec, run_seed)
    method: ClassVar[str] = ""
    #: what it records as `correction/<name>/<statistic>`
    statistics: ClassVar[Statistics] = {}
    #: whether it multiplies the objective by an importance ratio towards the learner's policy:
    #: two such corrections would correct the same mismatch twice and are refused
    weighs: ClassVar[bool] = False
    #: whether it judges tokens by the policy that the weights of others lead to, where others
    #: weigh; one that weighs does so anyway
    follows_weights: ClassVar[bool] = False
    #: whether it gives tokens the ratio 0 of the policy that weights lead to, also where none
    #: weighs
    zeroes: ClassVar[bool] = False
    #: whether a sequence's weights and mask depend on its own tokens alone and reject none, so that
    #: a micro-batch can be corrected on its own
    sequence_wise: ClassVar[bool] = False

    #: whether its weights already correct towards p_new, so that the loss must not contain
    #: p_new/p_ref
    leads_to_new: ClassVar[bool] = False
    #: whether its method has the hook `centre`, so that the loss gains a term
    centres: ClassVar[bool] = False
    #: whether its penalty is around p_ref, which the loss must hold
    around_ref: ClassVar[bool] = False
    #: name of the advantage that it replaces, or ""
    replaces_advantage: ClassVar[str] = ""

    @property
    def inner_clip_off(self) -> str:
        """Name of the setting that switches PPO's inner clip off here, or ""."""
        return ""

    @property
    def corrects(self) -> Literal["token", "sequence"]:
        """The unit whose distribution the weights correct to the learner's policy: each token
        alone, or whole sequences."""
        return "token"

    @property
    def token_alone(self) -> bool:
        """True if it weighs each token by a function of that token alone, which its method returns
        as `Corrected.weigh_at`, or neither weighs nor masks any."""
        return False

    @property
    def biases(self) -> tuple[Bias, ...]:
        """How the expected gradient departs from its reference under these settings."""
        return ()

    @property
    def needs_topk(self) -> bool:
        """True if actors must store top log-probs (rollout.logprobs_k of at least 1)."""
        return False

    @property
    def rejects(self) -> bool:
        """True if the correction draws which tokens stay: the kept tokens do not follow p_inf, and
        only the correction's weights lead from them to a policy."""
        return False

    def beside(
        self, key: str, chosen: Mapping[str, CorrectionSpec], objective: ObjectiveSpec
    ) -> None:
        """Refuse, as UserError, the other corrections of its list or the objective, where it is not
        right with them. `key`: of the list."""

    def cautions(self, *, critic: bool, stored: int, floor: float) -> Iterator[str]:
        """Sentences on what a run with this correction should know. `critic`: it trains one;
        `stored`: top log-probs of a token; `floor`: the largest probability floor of its actors."""
        return iter(())

    # Asked by the pipeline before it builds the method, so that a method never sees an objective.
    def under(self, objective: ObjectiveSpec) -> CorrectionSpec:
        """This specification with its choices that depend on the objective made."""
        return self


@dataclass(frozen=True, slots=True)
class Stratum:
    """Kinds of actors whose samples share a list of corrections and its statistics of the batch.

    Example: Stratum(("bf16", "fp8"), {"tis": TisSpec()})
    """

    kinds: tuple[str, ...]  # labels of actors
    corrections: Mapping[str, CorrectionSpec]  # by name, in the order in which they apply


@dataclass(frozen=True, slots=True)
class Shadow:
    """Lists of corrections whose weights are measured in addition to the run's, and how often.

    Example: Shadow({"tis": {"tis": TisSpec()}}, every=10)
    """

    # by label; each in the order of application
    lists: Mapping[str, Mapping[str, CorrectionSpec]] = field(default_factory=dict)
    every: int = 1  # steps from one measured batch to the next


CORRECTIONS: dict[str, str] = {
    "tis": "rlcore.corrections.tis:TisSpec",
    "mis": "rlcore.corrections.mis:MisSpec",
    "icepop": "rlcore.corrections.mis:IcePopSpec",
    "veto": "rlcore.corrections.veto:VetoSpec",
    "opsm": "rlcore.corrections.opsm:OpsmSpec",
    "m2po": "rlcore.corrections.m2po:M2poSpec",
    "outliers": "rlcore.corrections.outliers:OutliersSpec",
    "clip_cov": "rlcore.corrections.covariance:ClipCovSpec",
    "kl_cov": "rlcore.corrections.covariance:KlCovSpec",
    "minpro": "rlcore.corrections.minpro:MinproSpec",
    "vesp": "rlcore.corrections.vesp:VespSpec",
    "dppo": "rlcore.corrections.dppo:DppoSpec",
    "jackpot": "rlcore.corrections.jackpot:JackpotSpec",
    "vcpo": "rlcore.corrections.vcpo:VcpoSpec",
    "ais": "rlcore.corrections.ais:AisSpec",
    "dvp": "rlcore.corrections.dvp:DvpSpec",
    "centre": "rlcore.corrections.centre:CentreSpec",
    "rapid": "rlcore.corrections.rapid:RapidSpec",
}
