"""The configuration answers at once: it loads nothing heavy."""

import subprocess
import sys

import pytest
from timing import deadline

HEAVY = {"torch", "ray", "vllm", "transformers", "deepspeed"}
pytestmark = pytest.mark.processes


def loaded(code):
    """Which heavy packages `code` has imported at its end."""
    code = f"import sys\n{code}\nprint(*({HEAVY} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(60), check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_configuration_loads_nothing_heavy():
    assert loaded("import rlcore.config.compose") == set()


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=quickstart"],
        ["correction=[dvp,mis,veto]"],
        ["correction=jackpot", "algorithm=gspo"],
        ["correction=rapid", "algorithm=rapid"],
    ],
    ids=" ".join,
)
def test_composing_and_checking_a_run_loads_nothing_heavy(words):
    assert loaded(f"from rlcore.config.compose import load\nload({['run_dir=x', *words]})") == set()


def test_help_loads_nothing_heavy():
    assert loaded("from rlcore.cli import main\nmain(['train', '--help', 'all'])") == set()
