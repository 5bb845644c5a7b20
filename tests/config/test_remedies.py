"""Each remedy that the sentence of a refusal names is applied: the run is accepted, or refused for
another reason."""

import pytest
from remedies import refusal, remedies, works
from test_config_refusals import REFUSED

from rlcore.config.compose import load

VALUE = "the value is one of the user's: a path, a name, a number"
FORM = "it says which form a word has, and nothing tells which word was meant"
RULE = "it says the rule that the values break, and several of them can be changed"
# (words of a sentence that names no change which could be applied as it stands, the reason). Every
# other refusal of the list has a remedy; an entry that no refusal needs any more fails the test.
WITHOUT = {
    "names several: only actor, correction and task take a list": RULE,
    "none stands alone": RULE,
    "removes a key that the run does not have": FORM,
    "write key=value or group=option": FORM,
    "only keys of a run are accepted (see --help)": FORM,
    "not found": VALUE,
    "each k must lie between 1 and the samples": RULE,
    "must name a class that inherits": VALUE,
    "keys of correction.also: .": "the class has no settings",
    "is required and was not given": VALUE,
    "both must be at least 0 and below 1": RULE,
    "it should have at least 1 item": VALUE,
    "give a subclass of": VALUE,
    "every class like": VALUE,
    "correction.clip_cov.low must be below correction.clip_cov.high": RULE,
    "it must begin with eval/": VALUE,
    "there is no file": VALUE,
    "evaluation.tasks.more.grader_text is meant": "the key is within a value in braces",
    "give exactly one of them, the budget in pages": RULE,
    "must not fall and must be at least 2": RULE,
    "use a sparse actor and give the pages to begin with": VALUE,
    "least=1.0 must be at least 2 with moves=pages": "the key is within a value in braces",
    "which must be set, for another kind of actors": VALUE,
    "least=1.0 must be below 1 with moves=share": "the key is within a value in braces",
    "choose a format": VALUE,
    "the most layers that may be precise": VALUE,
    "raise schedule.max_staleness": VALUE,
    "needs exactly one of draft_path": VALUE,
    "only a draft actor has its own model": RULE,
    "or choose one of none (of vLLM's own FP8": VALUE,
    "or choose one of q (of vLLM's own FP8": VALUE,
    "raise learner.ranks instead": VALUE,
    "must be such shares too": RULE,
    "give both the same number, or whole GPUs": RULE,
    "give it another label": VALUE,
    "with one and the same actor.*.sparse section": VALUE,
    "lower the first or raise the second": RULE,
    "set learner.offload.nvme_path": VALUE,
    "name layers of the blocks": VALUE,
    "give actor.draft.draft_path": VALUE,
}


def _reasons(sentence):
    return [part for part in WITHOUT if part in sentence]


def _faults(refused):
    """(sentence, remedy) where a remedy does not work; (sentence, None) without remedy or reason.
    Second value: the entries of `WITHOUT` that were needed."""
    faults, needed = [], set()
    for words, _ in refused:
        sentence = refusal(words)
        found = remedies(words, sentence)
        faults += [(sentence, remedy) for remedy in found if not works(sentence, remedy)]
        if not found:
            needed.update(_reasons(sentence))
            faults += [(sentence, None)] if not _reasons(sentence) else []
    return faults, needed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_remedy_changes_the_next_sentence():
    faults, needed = _faults(REFUSED)
    assert not faults
    assert needed == set(WITHOUT)


@pytest.mark.parametrize("start", range(3))
def test_the_remedies_of_a_tenth_change_the_next_sentence(start):
    assert not _faults(REFUSED[10 * start :: 30])[0]


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["learner.num_gpus=1"], "learner.dtype=float32"),
        (["algorithm.whitening=tokens"], "algorithm.whitening=episodes"),
        (["learner.lr=-1"], "learner.lr=1"),
        (["modle=tiny"], "model=tiny"),
        (["correction.mis.low=1"], "correction=[tis,mis]"),
        (["correction=[tis,veto,mis]"], "correction=[tis,veto]"),
        (["rollout.max_new_tokens=128"], "rollout.max_new_tokens=127"),
        (["schedule.max_uses=2"], "schedule.sampling=uniform"),
        (["algorithm=gspo", "correction.tis.adjusted=true"], "algorithm.loss=ppo"),
        (["learner.ranks=2", "learner.tensor_parallel=2", "learner=zero3"], "learner.zero_stage=0"),
    ],
)
def test_a_remedy_is_found_in_its_sentence_and_works(words, changed):
    sentence = refusal(words)
    meant = [one for one in remedies(words, sentence) if any(changed in after for after in one)]
    assert len(meant) == 1, sentence
    assert works(sentence, meant[0])


def test_a_remedy_that_does_not_work_is_noticed():
    words = ["learner.lr=-1"]
    said = refusal(words)
    for value, reason in (("-1", "the same sentence"), ("fast", "a value that cannot be read")):
        assert not works(said, [[f"learner.lr={value}"]]), reason
    assert works(said, [["learner.lr=1e-3"]])
    # the present state is no remedy, and another value is
    assert not remedies(words, "learner.lr=-1 does not fit model.max_len=128: it has seed=0.")
    assert remedies(words, "learner.lr=-1 does not fit: set learner.lr=2.") == [[["learner.lr=2"]]]


@pytest.mark.parametrize("text", ["${x", "cost ${x now", "a ${", "数 ${x"])
def test_an_open_interpolation_names_two_remedies_that_work(text):
    sentence = refusal([f"model.system_prompt={text}"])
    assert r"close it by }, or write \${" in sentence
    escaped = text.replace("${", r"\${")
    config = load(["run_dir=x", f"model.system_prompt={escaped}"])
    assert config.model.system_prompt == text
    closed = load(["run_dir=x", f"model.system_prompt={text.partition('$')[0]}a ${{seed}}"])
    assert closed.model.system_prompt == f"{text.partition('$')[0]}a 0"
