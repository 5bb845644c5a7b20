"""Keys reach the parts that they govern."""

from rlcore.config.compose import load
from rlcore.runtime import options


def test_a_grader_s_limits_are_those_of_its_task():
    config = load(["run_dir=runs/x", "task.grade_timeout_s=3", "task.grader_memory_mib=512", "task.grader_processes=2"])
    limits = options.scorer(config)
    assert (limits["timeout_s"], limits["memory_mib"], limits["processes"]) == (3.0, 512, 2)
