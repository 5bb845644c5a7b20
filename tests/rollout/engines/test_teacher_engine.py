"""The test of a teacher's engine, in a process of its own: vLLM reads environment variables once,
and one is set for this engine."""

from pathlib import Path

import forked
import pytest

pytestmark = pytest.mark.engine


def test_scores_are_those_of_a_float64_forward():
    file = Path(__file__).with_name("teacher_log_probs.py")
    text = forked.call(pytest.main, ["-p", "no:cacheprovider", str(file)], seconds=300)
    assert " passed" in text, text[-4000:]
