from rlcore.runtime.evaluation import EvalPlan, Evaluator, summarise
from rlcore.types import SamplingSpec


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
