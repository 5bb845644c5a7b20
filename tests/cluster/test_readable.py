"""Verdicts and samples as a person reads them: their keys are read by reports and by users."""

from rlcore.cluster.sample_text import first_shown, pieces, readable, verdict, without_texts
from rlcore.serialization import StoredEpisode, dump_trajectory
from rlcore.testing.records import make_answer, make_score, make_trajectory


def text(ids):
    return "".join(map(str, ids))


def test_a_verdict():
    t = make_trajectory(-1, 3)
    answer = make_answer(
        -1, 3, "56", prompt_id="digits/heldout/4", tokens=2, versions=(5, 6), prompt="34"
    )
    assert verdict(answer, make_score(t, 0.5, parts={"correct": 1.0}, answer="5")) == {
        "prompt_id": "digits/heldout/4",
        "sample": 3,
        "status": "ok",
        "reward": 0.5,
        "correct": 1.0,
        "answer": "5",
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
        "group_id": 2,
        "sample": 1,
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
        "token_versions": [[3, 1], [4, 1]],
        "pieces": [["5", "6"]],
    }


def test_a_sample_of_several_turns_shows_what_was_observed_between_them():
    t = make_trajectory(2, 1, turns=[((1, 2), (5, 6)), ((9,), (7,))])
    found = readable(StoredEpisode(make_score(t), (dump_trajectory(t),)), text)
    assert (found["prompt"], found["response"], found["tokens"]) == ("12", "5697", 3)
    assert found["turns"] == [
        {"part": 0, "observed": "", "said": "56"},
        {"part": 0, "observed": "9", "said": "7"},
    ]
    assert found["pieces"] == [["5", "6"], ["7"]]


def test_turns_of_further_parts_show_their_prompt_and_rewards_are_by_turn():
    shapes = [[((1, 2), (5, 6))], [((1, 3), (7,)), ((4, 4), (8, 9))]]
    parts = [make_trajectory(2, 1, turns=s, part=i, parts=2) for i, s in enumerate(shapes)]
    score = make_score(parts[0], 2.5, turn_rewards=(0.5, -1.0, 3.0))
    found = readable(StoredEpisode(score, tuple(map(dump_trajectory, parts))), text)
    assert [tuple(turn.values()) for turn in found["turns"]] == [
        (0, "", "56", 0.5),
        (1, "13", "7", -1.0),
        (1, "44", "89", 3.0),
    ]
    assert found["pieces"] == [["5", "6"], ["7"], ["8", "9"]]


def test_pieces_join_to_the_text_and_a_character_of_several_tokens_is_whole():
    def decode(ids):
        return bytes(ids).decode(errors="replace")

    ids = list("aé€b".encode())
    assert pieces(ids, decode) == ["a", "", "é", "", "", "€", "b"]
    assert "".join(pieces(ids[:2], decode)) == decode(ids[:2])  # cut in the middle of one

    def spaced(ids):  # as SentencePiece: no space before the first word
        return " ".join("xyz"[i] for i in ids)

    assert pieces([0, 1, 2], spaced) == ["x", " y", " z"]


def test_the_loop_is_told_of_a_verdict_without_its_texts():
    t = make_trajectory(-1, 0)
    said = verdict(make_answer(-1, 0, "56", prompt="34"), make_score(t, 0.5))
    assert said.keys() - without_texts(said).keys() == {"prompt", "response"}


def test_the_verdicts_that_are_shown_are_the_first_in_whatever_order_they_came():
    made = [{"prompt_id": p, "sample": i} for p in "cab" for i in (1, 0)]
    assert first_shown(made, 3) == [made[3], made[2], made[5]]
