"""Each setting that the sentence of a refusal names as its remedy is applied: the next sentence
differs."""

import pytest
from remedies import refusal, remedies, without
from test_config_refusals import REFUSED

# What a sentence says after its colon that is the present state, and no remedy.
STATED = (
    "must be a multiple of",
    "it must stay below",
    "it must be below",
    "it must be at least",
    "must be at least",
    "must be such shares too",
    "which must be set",
    "it has ",
    "raise rollout.logprobs_k=",
    "write key=value or group=option",
)
# Refusals of the list whose sentence names no setting that can be applied as it stands: a choice
# among listed values, a bound, a word to leave out. The number only falls.
WITHOUT = 174


def _applied(words, sentence):
    """(remedy, next sentence) of each remedy that a sentence names."""
    stated = any(part in sentence for part in STATED)
    for remedy in [] if stated else remedies(sentence):
        yield remedy, refusal([*without(words, remedy), remedy])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_remedy_changes_the_next_sentence():
    same, bare = [], 0
    for words, _ in REFUSED:
        sentence = refusal(words)
        bare += not remedies(sentence)
        applied = _applied(words, sentence)
        same += [(words, remedy) for remedy, after in applied if after == sentence]
    assert not same
    assert bare <= WITHOUT


@pytest.mark.parametrize(
    "words",
    [
        ["learner.lr_schedule=cosine", "learner.lr_warmup_steps=20", "learner.lr_decay_steps=10"],
        ["cluster.full_weights_every=8", "cluster.transport=disk"],
        ["learner.num_gpus=1"],
        ["algorithm.whitening=tokens"],
    ],
)
def test_a_remedy_is_found_in_its_sentence_and_works(words):
    sentence = refusal(words)
    applied = list(_applied(words, sentence))
    assert applied and all(after != sentence for _, after in applied), sentence


def test_a_remedy_that_does_not_work_is_noticed():
    said = "learner.lr=-1 is not accepted: set learner.lr=-1."
    assert remedies(said) == ["learner.lr=-1"]
    first = refusal(["learner.lr=-1"])
    assert refusal([*without(["learner.lr=-1"], "learner.lr=-1"), "learner.lr=-1"]) == first != ""
