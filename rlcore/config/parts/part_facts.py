"""The base of the parts that a learner may have besides the plain policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from rlcore.config.schema import RunConfig
from rlcore.learner.specs import LearnerJob, LoraSpec
from rlcore.models.sizes import ModelSizes, Parts
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import Spec

#: entries that adapters of the policy's model train; None for None: all
Adapted = Callable[[LoraSpec | None], float | None]
#: parameters of the policy's model that are published with adapters; None: it is trained whole
Sent = Callable[[LoraSpec | None], int]


class Work(NamedTuple):
    """The work of a part in the learner's ranks. Example, a critic of the policy's size P:
    Work(trained=P, step_flops=6 * P, phase_flops=2 * P)"""

    trained: float = 0.0  # further parameters with an optimizer
    step_flops: float = 0.0  # a token, of every step
    phase_flops: float = 0.0  # a token, before a phase

    def plus(self, other: Work) -> Work:
        """Both together."""
        return Work(*(a + b for a, b in zip(self, other)))


NO_WORK = Work()


class HeldEngine(NamedTuple):
    """An engine that a part has besides the run's actors."""

    role: str  # in the list of nodes
    key: str  # of its settings
    spec: ActorSpec
    folder: str | None  # None: the policy's


class PartFacts:
    """A part as a run without it has it: the base of the classes in this folder.

    Each reader is a loop over `PARTS`: the rules (`config/checks.py`), the pairs of
    `config/combinations.py`, roles and nodes, memory, the dry run, the forecast, the warm-up, jobs
    of ranks. `adapters`, `check` and methods that return nothing for a run without the part are
    asked of every run; `check_used`, `described`, `published`, `job`, `own_job` and `plain`, where
    it is used.
    """

    name: ClassVar[str]  # in the table of combinations
    without: ClassVar[str] = ""  # a setting without the part
    #: whether a test has shown it with a mixture of experts
    with_experts: ClassVar[bool] = False
    #: whether a file of rates holds for runs with the same settings of this part alone
    in_rates: ClassVar[bool] = False
    #: optional methods of a training engine that the part calls
    methods: ClassVar[tuple[str, ...]] = ()
    #: the kind of actors that load the part's weights instead of the policy's, and these by name
    kind: ClassVar[str] = ""
    weights: ClassVar[str] = ""

    def setting(self, c: RunConfig) -> str:
        """The setting by which a run uses the part; empty: it does not.

        Example: "critic.kind=model"
        """
        raise NotImplementedError

    def check(self, c: RunConfig) -> None:
        """Raise UserError for a run that cannot have the part so, or needs it and lacks it."""
        if self.setting(c):
            self.check_used(c)

    def check_used(self, c: RunConfig) -> None:
        """`check`, for a run that uses the part."""

    def described(self, c: RunConfig) -> Mapping[str, Spec]:
        """Sections that the dry run's description of the learner shows, by title."""
        return {}

    def memory(self, c: RunConfig, sizes: ModelSizes, adapted: Adapted) -> Parts:
        """Bytes that the part adds to each learner rank. `sizes`: of the policy's model."""
        return {}

    def work(self, c: RunConfig, parameters: float) -> Work:
        """Its FLOPs in the ranks: 2 a parameter and token for a pass, 6 with its gradient.
        `parameters`: of the policy."""
        return NO_WORK

    def unplanned(self, c: RunConfig, *, by_gpu: bool) -> str:
        """A sentence if no forecast of the run can be made; `by_gpu`: by a GPU's figures alone."""
        return ""

    def adapters(self, c: RunConfig) -> LoraSpec | None:
        """The adapters that `weights` are of, if they are the policy's with some."""
        return None

    def published(self, c: RunConfig, sent: Sent, alphabet: int) -> int:
        """Parameters of `weights`. `alphabet`: entries of the policy's tokenizer."""
        return 0

    def job(self, c: RunConfig) -> Mapping[str, Any]:
        """Fields of the policy's `LearnerJob` by which its ranks have the part."""
        return {}

    def own_job(self, c: RunConfig, policy: LearnerJob) -> LearnerJob | None:
        """The job of ranks that train `weights` by themselves. `policy`: the policy's ranks'."""
        return None

    def ranks(self, c: RunConfig) -> int:
        """Learner ranks that it has besides the policy's."""
        return 0

    def engines(self, c: RunConfig) -> Iterator[HeldEngine]:
        """Its engines."""
        return iter(())

    def models(self, c: RunConfig) -> Mapping[str, str]:
        """Folders by key of models whose tokens have to be the policy's."""
        return {}

    def plain(self, c: RunConfig) -> RunConfig:
        """The run as its warm-up trains: without the part, if that would change the model."""
        return c
