"""Figures that the decision table and pages of the docs take from studies are those of the studies'
lines."""

from pathlib import Path

import pytest

from benchmarks.evidence import evidence
from benchmarks.evidence.evidence_studies import UNCORRECTED
from benchmarks.evidence.evidence_tables import (
    LEVEL,
    family,
    final,
    holm,
    interval,
    on_actors,
    paired,
)

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (
    "rlcore/corrections/decisions.yaml",
    *("docs/evidence.md", "benchmarks/results/evidence/claims.md", "docs/mismatch.md"),
    "docs/cheap-actors.md",
)
LARGE, SMALL = "int3, 512", "int3, 128"

# a text, and the study, arms and size whose difference it states; {-mean} is {mean} without its
# sign
CLAIMS = [
    ("dvp ends {mean} above none", "floor_short", "dvp rho=1e-3", UNCORRECTED, "65e-6"),
    ("none in training [{low}, {high}]", "floor_short", "dvp rho=1e-3", UNCORRECTED, "65e-6"),
    ("tis alone {-mean} below", "floor_short", "tis", UNCORRECTED, "65e-6"),
    ("tis ends {mean} above none at 512", "batch_and_noise", "tis C=5", UNCORRECTED, LARGE),
    ("at 512 answers a batch and {mean} at 128", "batch_and_noise", "tis C=5", UNCORRECTED, SMALL),
    ("end {-mean} to", "real_model", "tis C=5", "matched", "int4"),
    ("to {-mean} below float32 actors", "real_model", "ais", "matched", "int4"),
    ("decoupled PPO ends {mean} above tis", "staleness", "decoupled ppo", "tis", "64"),
    ("PPO ends {mean} above the same ratio", "large_phases", "ppo 0.4/0.7", "token IS", "1e-4"),
    ("TIS ends {mean} and AIS", "batch_and_noise", "tis C=5", UNCORRECTED, LARGE),
    ("and AIS {mean} above none", "batch_and_noise", "ais by size", UNCORRECTED, LARGE),
    ("AIS by N\\* {-mean} below TIS", "batch_and_noise", "ais by size", "tis C=5", SMALL),
    ("without weights {-mean} lower", "large_phases", "no weights", "token IS", "3e-5"),
    ("runs end {-mean} below PPO", "jackpot", "no weights", UNCORRECTED, "64"),
    ("ends {mean} above a bound of 1", "set_point", "set-point", "matched", "32"),
    ("and {mean} above TIS at 32", "set_point", "set-point", "tis", "32"),
    ("tis ends {-mean} below dense actors", "sparse_long", "training-free", "matched", "3"),
    ("ends {mean} above tis, and", "sparse_long", "set-point", "training-free", "3"),
    ("Jackpot end {mean} above none", "draft", "tis", UNCORRECTED, "frozen"),
    ("above none and {-mean} below", "draft", "tis", "matched", "frozen"),
    (
        "in INT3, {mean} above no correction [{low}, {high}]",
        "round_as",
        "round_as",
        UNCORRECTED,
        "int3",
    ),
    ("distill) {mean}", "sparse_long", "distillsparse", "training-free", "3"),
    ("TIS and {-mean} below dense", "sparse_long", "distillsparse", "matched", "3"),
    ("TIS and {-mean} below dense", "sparse_long", "set-point", "matched", "3"),
    ("and {mean} above TIS [{low}, {high}]", "round_as", "round_as", "tis C=5", "int3"),
]
SERVED = ("round_as",)  # studies whose figures are those of the policy on its actors


@pytest.mark.parametrize(("said", "study", "arm", "other", "size"), CLAIMS)
def test_a_figure_of_the_advice_is_that_of_its_study(said, study, arm, other, size):
    of = on_actors if study in SERVED else final
    found = paired(evidence.lines(evidence.results(study)), arm, other, size, of)
    mean, low, high = interval(found.values)
    shown = {"mean": f"{mean:.2f}", "low": f"{low:+.2f}", "high": f"{high:+.2f}"}
    text = said.format(**shown, **{"-mean": f"{-mean:.2f}"})
    assert any(text in " ".join((ROOT / file).read_text().split()) for file in TEXTS), text


# a row of docs/evidence.md, and the differences whose status it states
STATUSES = [
    ("another policy", "draft", "tis", UNCORRECTED, "frozen"),
    ("another policy", "draft", "jackpot", UNCORRECTED, "frozen"),
    ("a moderate error", "batch_and_noise", "tis C=5", UNCORRECTED, LARGE),
    ("a moderate error", "batch_and_noise", "tis C=5", UNCORRECTED, SMALL),
    ("samples four steps old and more", "staleness", "decoupled ppo", "tis", "64"),
    ("few effective samples", "real_model", "jackpot averaged", "matched", "int4"),
    ("sparse actors far from the policy", "sparse_long", "set-point", "training-free", "3"),
    ("sparse actors far from the policy", "sparse_long", "distillsparse", "training-free", "3"),
    ("weights that will be served rounded", "round_as", "round_as", UNCORRECTED, "int3"),
    ("weights that will be served rounded", "round_as", "round_as", "tis C=5", "int3"),
]


@pytest.mark.parametrize(("row", "study", "arm", "other", "size"), STATUSES)
def test_a_status_is_that_of_the_p_value_after_holm(row, study, arm, other, size):
    rows = (ROOT / "docs" / "evidence.md").read_text().splitlines()
    (said,) = [line.split("|")[-2] for line in rows if row in line and line.startswith("| ")]
    definition, lines = evidence.STUDIES[study], evidence.lines(evidence.results(study))
    of = on_actors if study in SERVED else final
    references = (definition.reference, UNCORRECTED)
    adjusted = holm(family(lines, references, definition.contrasts, of=of))
    assert ("shown after Holm" in said) == (adjusted[arm, other, size] < LEVEL)
