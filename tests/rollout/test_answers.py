from __future__ import annotations

import pytest

from rlcore.rollout.text import read_answer
from rlcore.testing.records import make_trajectory


def decode(ids) -> str:
    return "".join(chr(97 + i) for i in ids)


@pytest.mark.parametrize(
    ("stop", "text"), [((), "hijk"), (("jk", "j"), "hi"), (("z",), "hijk"), (("h",), "")]
)
def test_the_text_is_cut_before_the_first_stop_string(stop, text):
    t = make_trajectory(3, 1, turns=[((1, 2), (7, 8, 9, 10))], version=(4, 4, 5, 6))
    answer = read_answer(t, decode, stop, prompt="bc")
    assert (answer.text, answer.tokens, answer.versions, answer.prompt) == (text, 4, (4, 6), "bc")
    assert (answer.draw_id, answer.request_id) == (t.draw_id, t.request_id)


def test_a_response_without_tokens_has_no_versions():
    answer = read_answer(make_trajectory(turns=[((1, 2), ())]), decode, ())
    assert (answer.text, answer.tokens, answer.versions) == ("", 0, None)
