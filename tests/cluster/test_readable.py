"""Verdicts and samples as a person reads them: their keys are read by reports and by users."""

from rlcore.cluster.readable import readable, verdict
from rlcore.serialization import StoredEpisode, dump_trajectory
from rlcore.testing.records import make_answer, make_score, make_trajectory


def text(ids):
    return "".join(map(str, ids))


def test_a_verdict():
    t = make_trajectory(-1, 3)
    answer = make_answer(
        -1, 3, "56", prompt_id="digits/heldout/4", tokens=2, versions=(5, 6), prompt="34"
    )
    assert verdict(answer, make_score(t, 0.5, parts={"correct": 1.0})) == {
        "prompt_id": "digits/heldout/4",
        "sample": 3,
        "status": "ok",
        "reward": 0.5,
        "correct": 1.0,
        "length": 2,
        "versions": [5, 6],
        "truncated": False,
        "prompt": "34",
        "response": "56",
    }


def test_a_verdict_without_a_score_or_tokens():
    answer = make_answer(-1, 0, "", tokens=0, versions=None, finish_reason="length")
    found = verdict(answer, make_score(make_trajectory(-1), status="timeout"))
    assert (found["reward"], found["correct"], found["versions"]) == (None, None, [])
    assert found["truncated"] and found["status"] == "timeout"


def test_a_sample_of_one_turn():
    t = make_trajectory(2, 1, version=[3, 4])
    episode = StoredEpisode(make_score(t, 1.0, parts={"correct": 1.0}), (dump_trajectory(t),))
    assert readable(episode, text) == {
        "prompt_id": "digits/train/2",
        "prompt": "34",
        "response": "56",
        "reward": 1.0,
        "score_status": "ok",
        "reward_parts": {"correct": 1.0},
        "finish_reason": "stop",
        "actor": "bf16-0",
        "actor_kind": "bf16",
        "versions": [3, 4],
        "tokens": 2,
    }


def test_a_sample_of_several_turns_shows_what_was_observed_between_them():
    t = make_trajectory(2, 1, turns=[((1, 2), (5, 6)), ((9,), (7,))])
    found = readable(StoredEpisode(make_score(t), (dump_trajectory(t),)), text)
    assert (found["prompt"], found["response"], found["tokens"]) == ("12", "5697", 3)
