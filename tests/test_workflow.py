"""The hosted checks run targets that the Makefile has."""

import re

import yaml
from structure import ROOT


def test_the_hosted_checks_are_make_targets_with_a_limit_of_time():
    (file,) = (ROOT / ".github/workflows").glob("*.yml")
    flow = yaml.safe_load(file.read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in flow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands == ["make lint", "make test-fast"]
        assert {command.split()[1] for command in commands} <= targets
