"""Which outputs are equal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.graders.sandbox.outputs import Failed, judge, same_output, same_token, same_value

EQUAL = [
    *(("10", "10"), ("10", "10.0"), ("1000000000000000000", "1e+18"), ("0", "-0.0")),
    *(("0.5", "0.50"), ("0.5", ".5".rjust(3, "0")), ("2.0", "2"), ("0.50", "0.5000000001")),
    *(("1.5e-05", "0.000015"), ("100000.5", "100000.50001"), ("-3.25", "-3.25000001")),
    *(("00101", "00101"), ("1e9", "1e9"), ("1_0", "1_0"), ("yes", "yes")),
]
OTHER = [
    *(("10", "1_0"), ("10", "\uff11\uff10"), ("10", "\u0661\u0660"), ("10", "010"), ("10", "+10")),
    *(("10", "10.0000001"), ("10", "0xA"), ("10", "1e"), ("0", "nan"), ("0", ""), ("101", "0101")),
    *(("00101", "101"), ("00101", "101.0"), ("1e9", "1000000000"), ("1_0", "10"), ("+5", "5")),
    *(("0.5", "0.51"), ("0.5", "0_.5"), ("0.5", "nan"), ("nan", "NaN"), ("inf", "infinity")),
    *(("1.5", "1.5 1"), ("007.50", "7.5"), ("0x10", "16"), ("\uff11", "1"), ("1.0", "1e9999")),
    *(("12345678901234567890", "12345678901234567891"), ("True", "1"), ("YES", "yes")),
]


@pytest.mark.parametrize(("expected", "found"), EQUAL)
def test_equal_tokens(expected, found):
    assert same_token(expected, found, 1e-6)


@pytest.mark.parametrize(("expected", "found"), OTHER)
def test_other_tokens(expected, found):
    assert not same_token(expected, found, 1e-6)


@given(st.integers(), st.integers())
def test_integers_are_equal_exactly(one, other):
    for printed in (str(other), f"{other}.0", f"{other}e0"):
        assert same_token(str(one), printed, 1.0) == (one == other)


@given(st.text("01_.+-eE \u0661\uff11", max_size=6))
def test_no_text_is_a_number_but_as_a_program_prints_it(text):
    if same_token("1", text, 0.0):
        assert set(text) <= set("01.+-eE") and text[0] == "1" and float(text) == 1.0


def test_spaces_do_not_count_and_tokens_do():
    assert same_output(" 1  2\n", "1\n2", 0.0)
    for found in ("1", "1 2 3", "12", None, 12, "1\xa02", "1\u20032", "1\x1c2", "\ufeff1 2"):
        assert not same_output("1 2", found, 0.0)


def test_values_of_calls():
    equal = [(3, 3.0), (0.5, 0.5 + 1e-9), ([1, [2]], (1, (2,))), ("a", "a"), (2.0, 2)]
    other = [(3, 3 + 1e-9), (1, True), (True, 1), ("1", 1), ([1], [1, 1]), (0.5, None)]
    assert [same_value(*pair, 1e-6) for pair in equal + other] == [True] * 5 + [False] * 6


def test_the_first_failure_is_told():
    def answer(given):
        if given == 2:
            raise Failed("exit code 3")
        return given

    judge(answer, [(1, [1]), (3, [4, 3])], same_value, 0.0)
    with pytest.raises(AssertionError, match="passed 1 of 3 tests; test 2: exit code 3"):
        judge(answer, [(1, [1]), (2, [2]), (3, [4])], same_value, 0.0)
