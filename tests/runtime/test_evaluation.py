import asyncio
from types import SimpleNamespace

import numpy as np

from rlcore.runtime.evaluation import EvalPlan, Evaluator, summarise
from rlcore.runtime.shells.scorer import ScorerShell
from rlcore.types import SamplingSpec, Trajectory


def _verdict(prompt, correct, status="ok"):
    return {
        "prompt_id": prompt,
        "status": status,
        "reward": None if status != "ok" else correct,
        "correct": None if status != "ok" else correct,
        "length": 4,
    }


def test_mean_and_pass_at_k_leave_failed_scores_out_and_count_them():
    verdicts = [_verdict("a", 1.0), _verdict("a", 0.0), _verdict("b", 0.0), _verdict("b", None, "timeout")]
    got = summarise("t", "sampled", verdicts, 2)
    assert got["eval/t/mean@2"] == 1 / 3
    assert got["eval/t/pass@2"] == 0.5
    assert got["eval/t/sampled_failed_scores"] == 1


def test_nothing_judged_gives_no_accuracy():
    got = summarise("t", "greedy", [_verdict("a", None, "error")], 1)
    assert got == {"eval/t/greedy_failed_scores": 1.0}


def test_a_partial_reward_is_not_correct():
    assert summarise("t", "greedy", [_verdict("a", 0.9), _verdict("b", 1.0)], 1)["eval/t/greedy"] == 0.5


def test_when_an_evaluation_is_due():
    def plan(every, at_start=True):
        plan = EvalPlan(every, at_start, 4, 1, True, 1.0, 10.0)
        return Evaluator(
            plan, tasks={}, sampling=SamplingSpec(), fleet=None, scorer=None, run_seed=0, on_samples=lambda *a: None
        )

    assert [s for s in range(11) if plan(5).wants(s, 9)] == [0, 5, 9, 10]
    assert [s for s in range(11) if plan(0, at_start=False).wants(s, 9)] == [9]


def _sample(number, versions):
    none = np.zeros(len(versions), np.int32)
    return Trajectory(
        *(none, none, none.astype(np.float32), none[:, None], none[:, None].astype(np.float32)),
        np.asarray(versions, np.int32),
        actor_id="bf16-0",
        actor_kind="bf16",
        group_id=-1,
        prompt_id="t/heldout/0",
        sample_index=number,
        finish_reason="stop",
        reward=1.0,
        score_status="ok",
    )


class _Task:
    def size(self, split):
        return 1

    def item(self, split, index):
        return SimpleNamespace(prompt_id=f"t/{split}/{index}")


def _remote(function):
    async def answer(*args):
        return function(*args)

    return SimpleNamespace(remote=answer)


def test_an_evaluation_names_the_versions_that_really_sampled_it():
    """Requests that queued while weights were published are of later versions than the one it was asked for."""
    shell = ScorerShell.__new__(ScorerShell)
    shell._decode = lambda ids: ""
    verdicts = [shell._verdict(_sample(0, [5, 5])), shell._verdict(_sample(1, [6, 8])), shell._verdict(_sample(2, []))]

    async def assign(groups):
        pass

    async def scenario():
        evaluator = Evaluator(
            EvalPlan(1, True, 1, 3, False, 1.0, 10.0),
            tasks={"t": SimpleNamespace(task=_Task(), encode=lambda item: np.zeros(1, np.int32))},
            sampling=SamplingSpec(),
            fleet=SimpleNamespace(assign=assign, forget_evaluation=lambda: None),
            scorer=SimpleNamespace(evaluation_progress=_remote(lambda p: 3), evaluation=_remote(lambda p: verdicts)),
            run_seed=0,
            on_samples=lambda *a: None,
        )
        await evaluator.start(4)
        assert evaluator.awaited == 4
        return await evaluator.collect(wait=True)

    found = asyncio.run(scenario())
    assert (found["eval/policy_version"], found["eval/version_span"]) == (5, 3)
