"""The parts that a learner may have besides the plain policy. Each declares what the readers of a
configuration ask of it (`part.py: PartFacts`)."""

from rlcore.config.parts.bitwise import BitwisePart
from rlcore.config.parts.companions import DraftPart, SparseCopyPart, SparseTrainingPart
from rlcore.config.parts.critic import CriticPart
from rlcore.config.parts.layers import CompiledPart, Fp8Part, LigerPart, RoundingPart
from rlcore.config.parts.part import PartFacts
from rlcore.config.parts.teacher import TeacherPart

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
