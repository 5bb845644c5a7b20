"""Each remedy that a rule over several sections or the reader of the command line names is applied:
the words are accepted, or refused for another reason; and every such refusal has a remedy that is
tried, or a reason why not."""

import contextlib
import io

import pytest
from refusals import changed, untried
from remedies import refusal
from settings_remedies import SETTINGS, WITHOUT, WORDS
from test_config_refusals import REFUSED

from rlcore.cli import main

FEW = {id(case) for case in SETTINGS[::9]}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def said(words):
    """The sentence that a command line is refused with."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        main(words)
    return told.getvalue().strip().removeprefix("rlcore: ")


@pytest.mark.parametrize(
    ("words", "told", "change"),
    [pytest.param(*c, marks=() if id(c) in FEW else pytest.mark.slow) for c in SETTINGS],
)
def test_a_remedy_of_a_rule_changes_the_next_sentence(words, told, change):
    sentence = refusal(words.split())
    assert "\n" not in sentence and told.lower() in sentence.lower(), sentence
    assert refusal(changed(words.split(), change.split())) != sentence


@pytest.mark.parametrize(("words", "told", "change"), WORDS)
def test_a_remedy_of_the_command_line_changes_the_next_sentence(words, told, change):
    found = faults(said(words.split()))
    sentence = next(line for line in found if told.lower() in line.lower())
    assert sentence not in faults(said(changed(words.split(), change.split())))


def faults(text):
    """The sentences of a refusal: one alone, or the numbered lines below their count."""
    lines = text.splitlines()
    return [line.strip().split(". ", 1)[1] for line in lines[1:]] if len(lines) > 1 else lines


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_refusal_of_the_configuration_has_a_remedy_that_is_tried_or_a_reason():
    found = [refusal(words) for words, _ in REFUSED]
    found += [refusal(words.split()) for words, _, _ in SETTINGS]
    found += [line for words, _, _ in WORDS for line in faults(said(words.split()))]
    forgotten, idle = untried("settings", found, WITHOUT)
    assert (forgotten, idle) == ({}, [])
