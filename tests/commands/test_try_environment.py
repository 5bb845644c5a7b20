"""`rlcore try` of environments: episodes of a scripted model, with tokens, masks and parts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.cli import main
from rlcore.commands.try_environment import runs

pytestmark = pytest.mark.processes

BROKEN = """
class Broken:
    def reset(self, item, seed):
        raise ValueError("no game today")
    def step(self, action): ...
    def grade(self): ...
"""


def tried(capsys, *words):
    code = main(["try", "model=tiny", *words])
    out, err = capsys.readouterr()
    return code, out + err


def test_worked_turns_are_played_and_shown_with_their_masks(capsys):
    code, shown = tried(capsys, "experiment=tools_quickstart", "environment.args.taught=1", "n=2")
    assert code == 0, shown
    assert shown.count("part 1 of 1:") == 2 and "sampled in 2 turns" in shown
    lines = [line.strip() for line in shown.split("\n") if line.startswith("    ")]
    assert [line.split()[0] for line in lines[:4]] == ["given", "model", "given", "model"]
    question = lines[0].partition(": ")[2].strip('"')
    assert lines[1].endswith(f'"={question[:-1]}<eos>"')
    assert shown.count("reward 1 (correct 1, calls 1") == 2


def test_a_scripted_model_says_what_it_is_told_until_a_limit_ends_it(capsys):
    words = ["task=higher_lower", "environment=higher_lower", "environment.args.guesses=2"]
    code, shown = tried(capsys, *words, "say=x", "n=1")
    assert code == 0, shown
    assert "reward 0 (correct 0, guesses 2" in shown and shown.count("model ") == 2


def test_a_failing_environment_is_shown_and_counted(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    code, shown = tried(capsys, "task=digits", f"environment={tmp_path}/mine.py:Broken", "n=1")
    assert code == 1 and "FAILED (error): reset raised ValueError: no game today" in shown


def test_words_without_an_environment_are_refused(capsys):
    code, shown = tried(capsys, "task=digits", "say=x")
    assert code == 2 and "add environment=NAME" in shown


@given(st.lists(st.booleans(), min_size=1))
def test_runs_cover_the_mask_and_alternate(mask):
    found = runs(np.array(mask))
    assert [v for first, end, v in found for _ in range(first, end)] == mask
    assert all(a[2] != b[2] for a, b in pairwise(found))
