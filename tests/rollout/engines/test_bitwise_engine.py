"""The test of log-probs that are equal to the bit, in a process of its own: such an engine computes
on one thread, and the first engine of a process settles how many there are."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
from equal_bits import skip_where_they_differ


@pytest.mark.engine
def test_an_engine_and_a_learner_agree_to_the_bit():
    skip_where_they_differ()
    file = Path(__file__).with_name("bitwise_log_probs.py")
    text = forked.call(pytest.main, ["-p", "no:cacheprovider", str(file)], seconds=600)
    assert "[100%]" in text, text[-4000:]
