"""Specifications: what they refuse, and how a user's own becomes a stage of the pipeline."""

from __future__ import annotations

from typing import ClassVar

import pytest
from correction_helpers import mismatched_step, pipeline_of
from pydantic import ValidationError

from rlcore.corrections.jackpot import JackpotSpec
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.corrections.specs import CorrectionSpec
from rlcore.errors import UserError
from rlcore.interfaces import Corrected, Correction, Reduce
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.types import StepTensors


class HalfSpec(CorrectionSpec):
    """A user's own correction, as a test may write it."""

    method: ClassVar[str] = f"{__name__}:Half"

    factor: float = 0.5


class Half(Correction):
    def __init__(self, spec: HalfSpec, run_seed: int) -> None:
        self.factor = spec.factor

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        return Corrected(current.weight * self.factor, current.mask, {"factor": self.factor})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tis", {"cap": 0.5}),
        ("mis", {"low": 1.5}),
        ("icepop", {"high": 0.5}),
        ("veto", {"threshold": 0.0}),
        ("jackpot", {"c1": 0.5}),
        ("jackpot", {"c2": 0.5}),
        ("ais", {"cap": 0.9}),
        ("dvp", {"rho": 1.5}),
        ("rapid", {"eta": 0.0}),
    ],
)
def test_settings_that_would_correct_matched_distributions_are_refused(
    name: str, settings: dict[str, float]
) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        pipeline_of({name: settings})


def test_jackpot_without_the_ratio_must_lead_to_p_new() -> None:
    with pytest.raises(UserError, match=r"correction\.jackpot\.target=new"):
        JackpotSpec(short_circuit=True).check("correction.jackpot")
    JackpotSpec(short_circuit=True, target="new").check("correction.jackpot")


def test_a_user_s_own_is_built_from_its_specification_and_measured_under_its_label() -> None:
    step = mismatched_step()
    corrected = build({"mine": HalfSpec(factor=0.25)}, 0, ObjectiveSpec()).correct(step, ONE_RANK)
    assert (corrected.weight[step.mask] == 0.25).all()
    assert corrected.metrics["correction/mine/factor"] == 0.25


def test_a_method_that_cannot_be_loaded_is_named() -> None:
    class Lost(CorrectionSpec):
        method: ClassVar[str] = "rlcore.corrections.tis:Tiss"

    with pytest.raises(UserError, match=r"correction\.mine: method=rlcore.corrections.tis:Tiss"):
        build({"mine": Lost()}, 0, ObjectiveSpec())
