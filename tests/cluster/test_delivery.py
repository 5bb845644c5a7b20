"""How finished trajectories leave a rollout actor."""

import threading
from functools import partial

import numpy as np
import pytest
from timing import deadline

from rlcore.cluster.delivery import Delivery, Outlets
from rlcore.models.fresh import build_char_tokenizer
from rlcore.models.text import decode_response
from rlcore.rollout.text import StopStrings, read_answer
from rlcore.serialization import load_trajectory, read_header
from rlcore.testing.records import make_score, make_trajectory
from rlcore.types import Played

NONE = StopStrings()


class Sent:
    """What a delivery sent, and where."""

    def __init__(self, stop=NONE, records=None, decode=None, taught=None, **more):
        self.records, self.answers, self.scored, self.delivered = [], [], [], []
        outlets = Outlets(
            records or self.records.extend,
            self.answers.extend,
            self.scored.extend,
            self.delivered.extend,
            taught,
        )
        decode = decode or (lambda ids: "".join(map(str, ids)))
        self.delivery = Delivery(outlets, decode, stop, **more)


def test_training_records_go_to_the_buffer_and_text_to_the_graders():
    sent = Sent(stop=StopStrings(("8",)))
    trained = make_trajectory(4, 1, turns=[((3, 4), (5, 6, 8, 9))])
    shown = make_trajectory(-1, 0, purpose="eval/3/digits/greedy", prompt_id="digits/heldout/0")
    sent.delivery.put([trained])
    sent.delivery.put([shown])
    sent.delivery.close(10)
    (record,) = map(load_trajectory, sent.records)
    assert record.draw_id == trained.draw_id and record.sampled_ids.tolist() == [5, 6, 8, 9]
    first, second = sent.answers
    assert (first.text, first.tokens, first.prompt) == ("56", 4, "")  # cut at the stop string
    assert (second.text, second.prompt) == ("56", "34")
    assert [t.group_id for t in sent.delivered] == [4, -1]


def test_a_teacher_scores_what_is_trained_on_before_it_is_sent():
    """Not what the buffer will refuse anyway."""
    broken = make_trajectory(5)
    broken.logp_inf[0] = np.nan

    def taught(trajectories):
        for t in trajectories:
            t.extras["teacher"] = t.logp_inf

    sent = Sent(taught=taught)
    episode_parts = episode(6, "train")
    shown = make_trajectory(-1, 0, purpose="eval/3/digits/greedy")
    sent.delivery.put([make_trajectory(4), broken, shown, episode_parts])
    sent.delivery.close(10)
    headers = [read_header(r) for r in sent.records]
    assert [bool(h.problem) for h in headers] == [False, True, False, False]
    whole = [load_trajectory(r) for r, h in zip(sent.records, headers) if not h.problem]
    assert [t.group_id for t in whole] == [4, 6, 6]
    assert all(t.extras["teacher"].tolist() == t.logp_inf.tolist() for t in whole)
    assert "teacher" not in broken.extras and "teacher" not in shown.extras


def test_each_task_s_text_is_cut_at_its_own_stop_strings():
    sent = Sent(stop=StopStrings(("8",), {"sums": ("6",), "free": ()}))
    ids = ["digits/train/0", "sums/train/0", "free/train/0"]
    turns = [((3, 4), (5, 6, 8, 9))]
    sent.delivery.put([make_trajectory(i, 0, turns=turns, prompt_id=p) for i, p in enumerate(ids)])
    sent.delivery.close(10)
    assert [a.text for a in sent.answers] == ["56", "5", "5689"]


def test_graders_see_special_tokens_where_their_task_asks_for_them(tmp_path):
    tokenizer = build_char_tokenizer("0123456789")
    ids = [*tokenizer.encode("42", add_special_tokens=False), tokenizer.eos_token_id]
    sent = Sent(decode=partial(decode_response, tokenizer), raw=frozenset({"raw"}))
    for group, prompt in enumerate(["raw/train/0", "digits/train/0"]):
        turns = [(tuple(ids), tuple(ids))]
        sent.delivery.put([make_trajectory(group, 0, turns=turns, prompt_id=prompt)])
    sent.delivery.close(10)
    assert [a.text for a in sent.answers] == ["42" + tokenizer.eos_token, "42"]


def episode(group_id, purpose):
    """One of two parts, with its score."""
    parts = [make_trajectory(group_id, part=i, parts=2, purpose=purpose) for i in range(2)]
    answer = read_answer(parts[1], lambda ids: "5", ())
    return Played(parts, answer, make_score(parts[0], 0.5))


def test_an_episode_s_parts_go_to_the_buffer_and_its_score_past_the_graders():
    sent = Sent()
    sent.delivery.put([episode(4, "train"), episode(-1, "eval/3/digits/greedy")])
    sent.delivery.put([make_trajectory(5)])
    sent.delivery.close(10)
    assert sorted(load_trajectory(r).part for r in sent.records) == [0, 0, 1]
    assert [a.group_id for a in sent.answers] == [5]
    assert [(a.group_id, s.reward) for a, s in sent.scored] == [(4, 0.5), (-1, 0.5)]
    assert len(sent.delivered) == 5


def test_the_engine_thread_never_waits_for_a_slow_receiver():
    held = threading.Event()
    sent = Sent(records=lambda records: held.wait(deadline(30)))
    for i in range(100):
        sent.delivery.put([make_trajectory(i)])
    assert sent.answers == []
    held.set()
    sent.delivery.close(10)
    assert [a.group_id for a in sent.answers] == list(range(100))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"logp_inf": np.array([-0.5, np.nan], np.float32)}, "1 log-probs are not finite"),
        ({"logp_inf": np.zeros(2)}, "logp_inf must be a 1-d array of float32"),
        ({"topk_ids": np.full((2, 2), 99, np.int32)}, "topk_ids has 99 to 99"),
        ({"turn_starts": np.array([], np.int32)}, "turns begin at"),
        ({"token_version": np.array([3, 2], np.int32)}, "versions of tokens go back"),
        ({"extras": {"routes": np.array(["a"])}}, "extra array routes"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "episode"])
def test_what_nothing_can_be_trained_on_is_its_sample_s_failure_alone(fields, why, kind):
    sent = Sent(vocab_size=10)
    bad = make_trajectory(4)
    for name, value in fields.items():
        setattr(bad, name, value)
    played = Played([bad], read_answer(make_trajectory(4), str, ()), make_score(bad, 0.5))
    sent.delivery.put([bad if kind == "plain" else played])
    sent.delivery.put([make_trajectory(4, 1)])
    sent.delivery.close(10)
    assert sent.delivery.error is None
    headers = map(read_header, sent.records)
    failed, whole = sorted(headers, key=lambda header: header.sample_index)
    assert (failed.request_id, failed.draw_id) == (bad.request_id, bad.draw_id)
    assert why in failed.problem and not whole.problem


@pytest.mark.parametrize("purpose", ["train", "eval/3/digits/greedy"])
def test_tokens_that_no_tokenizer_knows_are_a_failed_score(purpose):
    def decode(ids):
        if 9 in ids:
            raise OverflowError("out of range")
        return "x"

    sent = Sent(decode=decode)
    odd = make_trajectory(4, 0, turns=[((3, 4), (9,))], purpose=purpose)
    sent.delivery.put([odd, make_trajectory(4, 1, purpose=purpose)])
    sent.delivery.close(10)
    assert sent.delivery.error is None and [a.sample_index for a in sent.answers] == [1]
    ((answer, score),) = sent.scored
    assert (answer.purpose, score.status, score.draw_id) == (purpose, "error", odd.draw_id)
    assert "out of range" in score.error


def test_what_ends_the_thread_is_kept_for_the_heartbeat():
    def refuse(records):
        raise RuntimeError("the buffer is gone")

    sent = Sent(records=refuse)
    sent.delivery.put([make_trajectory()])
    sent.delivery.close(10)
    assert "the buffer is gone" in str(sent.delivery.error)


@pytest.mark.parametrize("purpose", ["train", "eval/0/digits/greedy"])
def test_an_answer_names_its_drawing_and_versions(purpose):
    sent = Sent()
    sent.delivery.put([make_trajectory(7, 2, version=[3, 5], purpose=purpose)])
    sent.delivery.close(10)
    (answer,) = sent.answers
    assert (answer.group_id, answer.sample_index, answer.versions) == (7, 2, (3, 5))
    assert answer.draw_id and answer.purpose == purpose
