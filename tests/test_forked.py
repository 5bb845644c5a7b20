"""The server that tests fork processes from."""

from __future__ import annotations

import os
import sys

import forked
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.ranks]


def look(*modules: str) -> None:
    print(*(name in sys.modules for name in modules), os.environ["LOOKED_FOR"])


def fail() -> int:
    print("no such thing")
    return 3


def test_a_process_has_the_imports_of_an_engine_and_a_rank_and_the_environment(monkeypatch):
    monkeypatch.setenv("LOOKED_FOR", "found")
    text = forked.call(look, "vllm.v1.worker.cpu_worker", "deepspeed", "peft", seconds=60)
    assert text.split() == ["True", "True", "True", "found"]


def test_what_a_process_that_fails_printed_is_shown():
    with pytest.raises(AssertionError, match="exit code 3:\nno such thing"):
        forked.call(fail, seconds=60)
