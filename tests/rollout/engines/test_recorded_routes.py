"""The tests of recorded experts, in a process of their own: vLLM makes the group of a mixture's
experts only for the first engine of a process."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest


@pytest.mark.engine
def test_routes_are_recorded_as_the_engine_chose_them():
    file = Path(__file__).with_name("recorded_routes.py")
    text = forked.call(pytest.main, ["-p", "no:cacheprovider", str(file)], seconds=600)
    assert "[100%]" in text, text[-4000:]
