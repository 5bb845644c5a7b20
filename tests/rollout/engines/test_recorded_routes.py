"""The tests of recorded experts, in a process of their own: vLLM makes the group of a mixture's
experts only for the first engine of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from timing import deadline


@pytest.mark.engine
def test_routes_are_recorded_as_the_engine_chose_them():
    file = Path(__file__).with_name("recorded_routes.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        timeout=deadline(600),
    )
    assert done.returncode == 0 and "[100%]" in done.stdout, done.stdout[-4000:]
