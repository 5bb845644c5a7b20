"""Each remedy that a specification's refusal names is applied: the run is accepted, or refused for
another reason; and every such refusal has a remedy that is tried, or a reason why not."""

import re
from pathlib import Path

import pytest
from refusals import changed, patterns
from remedies import refusal
from section_remedies import SECTIONS, WITHOUT
from test_config_refusals import REFUSED

import rlcore

FILES = re.compile(r"(\w+_)?specs\.py|checks\.py|centre\.py|jackpot\.py|tis\.py")


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
    package = Path(rlcore.__file__).parent
    untried = {
        re.sub(r"\\(.)", r"\1", pattern): f"{folder.name}/{where}"
        for folder in package.iterdir()
        if folder.is_dir() and folder.name not in ("config", "commands")
        for pattern, where in patterns(folder).items()
        if FILES.fullmatch(where.partition(":")[0])
        if not any(re.fullmatch(pattern, sentence) for sentence in found)
    }
    assert {
        where: pattern
        for pattern, where in untried.items()
        if not any(re.search(reason, pattern) for reason in WITHOUT)
    } == {}
    assert [w for w in WITHOUT if not any(re.search(w, pattern) for pattern in untried)] == []
