"""The parts that a learner may have besides the plain policy. Each declares what the readers of a
configuration ask of it (`part_facts.py: PartFacts`)."""

from rlcore.config.parts.bitwise_facts import BitwisePart
from rlcore.config.parts.companion_facts import DraftPart, SparseCopyPart, SparseTrainingPart
from rlcore.config.parts.critic_facts import CriticPart
from rlcore.config.parts.layer_facts import CompiledPart, Fp8Part, LigerPart, RoundingPart
from rlcore.config.parts.part_facts import PartFacts
from rlcore.config.parts.teacher_facts import TeacherPart

#: in the order in which their rules are tried
PARTS: tuple[PartFacts, ...] = (
    SparseTrainingPart(),
    SparseCopyPart(),
    DraftPart(),
    CriticPart(),
    BitwisePart(),
    RoundingPart(),
    TeacherPart(),
    LigerPart(),
    CompiledPart(),
    Fp8Part(),
)
