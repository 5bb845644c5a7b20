"""Conversations as tokens: with a chat template and without, with system turns of their own."""

import pytest

from rlcore.environments.attempts import OneTurn
from rlcore.environments.renderers import make_renderer
from rlcore.errors import UserError
from rlcore.models.fresh import build_char_tokenizer
from rlcore.models.text import encode_prompt
from rlcore.types import Item

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
SYSTEM = {"role": "system", "content": "brief"}
USER = {"role": "user", "content": "one"}
SAID = {"role": "assistant", "content": "two"}


def made(template=None):
    tokenizer = build_char_tokenizer("<>abcdefghijklmnopqrstuvwxyz\n")
    tokenizer.chat_template = template
    return tokenizer


def text(tokenizer, asked, *, chat_template="auto", system_prompt=None):
    ids = encode_prompt(tokenizer, asked, chat_template=chat_template, system_prompt=system_prompt)
    return tokenizer.decode(ids)


def test_every_turn_goes_through_the_template():
    shown = text(made(TEMPLATE), (SYSTEM, USER, SAID, USER))
    assert shown == "<system>brief<user>one<assistant>two<user>one<a>"


def test_a_system_turn_of_the_data_takes_the_place_of_the_system_prompt():
    assert text(made(TEMPLATE), [SYSTEM, USER], system_prompt="own") == "<system>brief<user>one<a>"
    assert text(made(TEMPLATE), [USER], system_prompt="own") == "<system>own<user>one<a>"
    assert text(made(), [SYSTEM, USER], system_prompt="own") == "brief\none"


@pytest.mark.parametrize("off", [{"chat_template": "off"}, {}])
def test_without_a_template_the_texts_follow_one_another(off):
    tokenizer = made(TEMPLATE if off else None)
    assert text(tokenizer, [SYSTEM, USER, SAID, USER], **off) == "brief\nonetwoone"
    assert text(tokenizer, "one", system_prompt="own", **off) == "own\none"


def test_a_template_that_refuses_the_roles_is_a_user_error():
    picky = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    with pytest.raises(UserError) as error:
        text(made(picky), [SYSTEM, USER])
    for part in ("model.chat_template=auto", "system, user", "no system role"):
        assert part in str(error.value)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_an_environment_of_a_task_opens_with_the_same_tokens(template):
    tokenizer, item = made(template), Item("t/train/0", "one", "two", {}, (SYSTEM, USER))
    renderer = make_renderer(tokenizer, chat_template="auto", system_prompt="own", stop=())
    ids = renderer.open(OneTurn(None).reset(item, seed=0))
    settings = {"chat_template": "auto", "system_prompt": "own"}
    assert ids == encode_prompt(tokenizer, item.messages, **settings)
