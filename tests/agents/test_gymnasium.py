"""Environments of gymnasium, with the package in a folder of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from timing import deadline

from rlcore.environments import environment_maker
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.tasks import make_task

HERE = Path(__file__).parent


def test_a_missing_package_is_named_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    spec = EnvironmentSpec(name="gymnasium", args={"id": "FrozenLake-v1"})
    with pytest.raises(UserError, match=re.escape("pip install gymnasium")):
        environment_maker(spec, make_task("digits", {}))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_texts_and_numbers_are_played_by_the_package(tmp_path):
    names = ["gymnasium>=1,<2", "cloudpickle", "farama-notifications"]  # numpy is there
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-t", tmp_path, *names]
    installed = subprocess.run(install, check=False, timeout=deadline(300), capture_output=True)
    if installed.returncode:
        pytest.skip("the package gymnasium cannot be installed: no package registry is reached")
    path = os.pathsep.join([str(tmp_path), str(HERE.parents[1])])
    done = subprocess.run(
        [sys.executable, HERE / "gymnasium_plays.py"],
        env={**os.environ, "PYTHONPATH": path},
        timeout=deadline(120),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    lake = found["lake"]
    assert "SFFF" in re.sub(r"\x1b\[[0-9]*m", "", lake["opening"])
    assert lake["rewards"] == [0.0, 0.0, None, 0.0, 0.0, 0.0, 1.0] and lake["over"]
    assert lake["answers"][2] == "That is not an action: answer 0 to 3, or left, down, right, up."
    assert lake["parts"] == {"correct": 1.0, "finished": 1.0, "invalid": 1.0}
    words = found["words"]
    assert words[0] == words[1] and words[0]["rewards"] == [None, 1.0]
    assert words[0]["answers"][0].startswith("That is not an action of Text")
    assert found["number"]["opening"] == "0" and found["number"]["parts"]["invalid"] == 1.0
    missing, continuous, few = found["refused"]
    assert "environment.args.id=Nothing-v0 cannot be made" in missing
    assert "choose one of Text or Discrete" in continuous
    assert "has 1 words for actions of Discrete(4)" in few
