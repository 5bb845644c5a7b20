"""Each remedy that a specification's refusal names is applied: the run is accepted, or refused for
another reason; and every such refusal has a remedy that is tried, or a reason why not."""

import pytest
from refusals import changed, untried
from remedies import refusal
from section_remedies import SECTIONS, WITHOUT
from test_config_refusals import REFUSED

FEW = {id(case) for case in SECTIONS[::9]}


@pytest.mark.parametrize(
    ("words", "said", "change"),
    [pytest.param(*c, marks=() if id(c) in FEW else pytest.mark.slow) for c in SECTIONS],
)
def test_a_remedy_of_a_section_changes_the_next_sentence(words, said, change):
    sentence = refusal(words.split())
    assert "\n" not in sentence and said in sentence, sentence
    assert refusal(changed(words.split(), change.split())) != sentence


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_refusal_of_a_specification_has_a_remedy_that_is_tried_or_a_reason():
    found = [refusal(words) for words, _ in REFUSED]
    found += [refusal(words.split()) for words, _, _ in SECTIONS]
    forgotten, idle = untried("specifications", found, WITHOUT)
    assert (forgotten, idle) == ({}, [])
