"""Graders of several tasks: each answer to its own task's processes."""

import pytest
from timing import wait_until

from rlcore.errors import UserError
from rlcore.tasks import make_task
from rlcore.tasks.graders import GraderPool, Graders
from rlcore.tasks.specs import EvalTaskSpec, GradingSpec
from rlcore.types import Answer

pytestmark = pytest.mark.processes
SLOW = """
import time

def grade(item, response):
    time.sleep(10**6)
"""


def answer(prompt_id, text, number):
    return Answer(number, 0, "bf16-0:0", prompt_id, text, tokens=1)


def test_a_grader_that_hangs_does_not_hold_up_another_task_s(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    args = {"train_path": f"{tmp_path}/rows.jsonl", "grader": f"{tmp_path}/slow.py:grade"}
    pools = [
        GraderPool(
            {"slow": EvalTaskSpec(name="file", args=args)}, GradingSpec(grade_timeout_s=3600)
        ),
        # two labels of one task, each with its own arguments
        GraderPool(
            {
                "up": EvalTaskSpec(name="digits", args={"op": "copy"}),
                "sort": EvalTaskSpec(name="digits"),
            },
            GradingSpec(),
        ),
    ]
    scored = []
    graders = Graders(pools, on_scored=scored.extend, note=print)
    try:
        item = make_task("digits", {}).item("heldout", 3)
        asked = item.question.rstrip("=")
        ids = ["slow/train/0", "up/heldout/3", "sort/heldout/3", "up/heldout/3"]
        texts = ["", asked, item.answer, item.answer]
        graders.submit([answer(*pair, i) for i, pair in enumerate(zip(ids, texts))])
        wait_until(lambda: graders.check() or len(scored) == 3, 45, "the other task's scores")
        rewards = {a.group_id: s.reward for a, s in scored}
        assert rewards == {1: 1.0, 2: 1.0, 3: float(asked == item.answer)}
        with pytest.raises(ValueError, match="no task is labelled 'other', only slow, up, sort"):
            graders.submit([answer("other/train/0", "", 9)])
    finally:
        graders.close()


def test_a_pool_that_cannot_be_built_ends_those_before_it():
    good = GraderPool({"digits": EvalTaskSpec(name="digits")}, GradingSpec())
    bad = GraderPool({"b": EvalTaskSpec(name="digits", args={"op": "turn"})}, GradingSpec())
    with pytest.raises(UserError, match="op=turn"):
        Graders([good, bad], on_scored=print, note=print)
