"""Prompts are made beside the engine, as they were checked before the run."""

import threading

import numpy as np
import pytest

from rlcore.errors import UserError
from rlcore.loop.prompts import PromptSource, RequestMaker
from rlcore.models.fresh import build_char_tokenizer
from rlcore.models.specs import TemplateSpec
from rlcore.models.text import encode_prompt, load_tokenizer
from rlcore.rollout.text import PromptEncoder, TextSettings
from rlcore.tasks import make_task
from rlcore.testing.records import make_sampling
from rlcore.types import Request

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}="


def asked(text, number=0, sample=0):
    empty, prompt_id = np.zeros(0, np.int32), f"digits/train/{number}"
    return Request(number, sample, prompt_id, empty, make_sampling(), 0, asked=text)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """As an actor loads it: from the folder that a fresh model is written to."""
    folder = tmp_path_factory.mktemp("model")
    build_char_tokenizer("0123456789+=usertym").save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("system", [None, "12"])
def test_the_tokens_are_those_that_were_checked_before_the_run(tokenizer, template, system):
    tokenizer.chat_template = template
    task = make_task("digits", {})

    def encode(text):
        return encode_prompt(tokenizer, text, TemplateSpec(system_prompt=system))

    source = PromptSource(task, encode, run_seed=0, max_prompt_tokens=64)
    maker = RequestMaker(source, sampling=make_sampling(), samples=2, run_seed=0)
    requests = [r for g in range(3) for r in maker.group(g, f"digits/train/{g}")]
    found = PromptEncoder(
        tokenizer, TextSettings("", {"digits": 64}, TemplateSpec(system_prompt=system))
    ).encoded(requests)
    for request in found:
        item = task.item("train", request.group_id)
        assert np.array_equal(request.prompt_ids, source.encode(item))
        assert request.prompt_ids.dtype == np.int32 and request.asked is None
    assert [(r.request_id, r.seed) for r in found] == [(r.request_id, r.seed) for r in requests]


def test_messages_are_encoded_as_a_conversation(tokenizer):
    tokenizer.chat_template = TEMPLATE
    messages = ({"role": "user", "content": "1"}, {"role": "user", "content": "2"})
    (found,) = PromptEncoder(tokenizer, TextSettings("", {"digits": 9})).encoded([asked(messages)])
    assert tokenizer.decode(found.prompt_ids.tolist()) == "u1u2="


def test_a_prompt_that_is_too_long_is_refused_by_name(tokenizer):
    tokenizer.chat_template = None
    encoder = PromptEncoder(tokenizer, TextSettings("", {"digits": 3, "other": 9}))
    with pytest.raises(UserError, match=r"model\.max_len: prompt digits/train/4 has 5 tokens"):
        encoder.encoded([asked("12345", 4)])
    with pytest.raises(UserError, match="digits/train/0 is empty"):
        encoder.encoded([asked("")])


def test_what_is_given_or_asked_by_an_environment_stays(tokenizer):
    given = Request(0, 0, "digits/train/0", np.ones(2, np.int32), make_sampling(), 0)
    played = asked(None)
    encoder = PromptEncoder(tokenizer, TextSettings("", {}))
    assert encoder.encoded([given, played]) == [given, played]


def test_one_encoding_a_prompt_from_one_thread_at_a_time(tokenizer):
    busy, calls = threading.Lock(), []

    class Counting:
        chat_template = None

        def encode(self, text, add_special_tokens, **_):
            assert busy.acquire(blocking=False)
            calls.extend([] if add_special_tokens else [text])
            busy.release()
            return [1]

    encoder = PromptEncoder(Counting(), TextSettings("", {"digits": 3}))

    def work():
        encoder.encoded([asked("1", 0, i) for i in range(8)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert calls == ["1"] * 4
