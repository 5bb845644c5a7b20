"""Probes of chat templates: what one loses is mapped and said, or the template is refused."""

from __future__ import annotations

import functools

import pytest
from family_fakes import (
    GEMMA,
    LFM2,
    LLAMA,
    MARKUP,
    MISTRAL,
    PHI3,
    QWEN,
    SPECIAL,
    TEMPLATES,
    XML,
    add,
    tokenizer_with,
)
from hypothesis import given
from hypothesis import strategies as st

from rlcore.agents.families import FAMILIES
from rlcore.agents.renderers import (
    check_template,
    conversation_form,
    lost_roles,
    make_renderer,
)
from rlcore.agents.templates import probed
from rlcore.environments.protocol import Opening, tool_schema
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.models.specs import TemplateSpec
from rlcore.models.text import encode_prompt

AUTO = TemplateSpec()
REMARKS = {
    QWEN: ["developer as system"],
    XML: ["later system messages as user", "developer as system"],
    LLAMA: [],
    LFM2: [],
    PHI3: ["developer as system", "answers of tools as user", "tools described in the first"],
    GEMMA: [
        "later system messages as user",
        "developer as system",
        "answers of tools as user",
        "neighbours of one role merged",
        "tools described in the first",
    ],
    MISTRAL: [
        "later system messages as user",
        "developer as system",
        "neighbours of one role merged",
    ],
}


@pytest.mark.parametrize("template", REMARKS)
def test_a_template_is_known_by_what_it_loses(template):
    found = probed(tokenizer_with(template), AUTO).remarks()
    assert len(found) == len(REMARKS[template])
    for remark, expected in zip(found, REMARKS[template], strict=True):
        assert remark.startswith(expected)
    lines = lost_roles(tokenizer_with(template), AUTO)
    assert len(lines) == bool(found) and all(remark in lines[0] for remark in found)


CONVERSATION = [
    {"role": "system", "content": "S-one"},
    {"role": "developer", "content": "D-two"},
    {"role": "user", "content": "U-three"},
    {"role": "user", "content": "U-four"},
]
FURTHER = [
    {"role": "tool", "name": "add", "content": "T-five"},
    {"role": "tool", "name": "add", "content": "T-six"},
    {"role": "system", "content": "S-seven"},
    {"role": "developer", "content": "D-eight"},
    {"role": "user", "content": "U-nine"},
]


@pytest.mark.parametrize("template", [t for t in REMARKS if t != MISTRAL])
def test_every_word_of_every_role_reaches_the_model_in_order(template):
    tokenizer = tokenizer_with(template)
    renderer = make_renderer(tokenizer, AUTO)
    ids = renderer.open(Opening(CONVERSATION))
    end = "<|end|>" if template == PHI3 else "<end_of_turn>" if template == GEMMA else "<|im_end|>"
    end = "<|eot_id|>" if template == LLAMA else end
    said = tokenizer.encode(f"no</think>said{end}", add_special_tokens=False)
    renderer.parse(said)
    longer = renderer.extend([*ids, *said], FURTHER)
    shown = tokenizer.decode(renderer.reopen() if longer is None else longer)
    words = ["S-one", "D-two", "U-three", "U-four", "said", "T-five", "T-six", "S-seven", "D-eight"]
    places = [shown.index(word) for word in [*words, "U-nine"]]
    assert places == sorted(places)


PIECES = [*SPECIAL, *MARKUP, "a", " ", "\n", "<", "|>", "\U000f0000"]
SPELLED = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@functools.cache
def spoken(name, foreign):
    """(ids of a conversation in which a tool's answer and description are `foreign`, their text,
    which of them are added tokens)."""
    template, end = TEMPLATES[name]
    tokenizer = tokenizer_with(template)
    renderer = make_renderer(tokenizer, AUTO)
    schema = tool_schema(add)
    schema["function"]["description"] = foreign
    ids = renderer.open(Opening([{"role": "user", "content": "2?"}], [schema]))
    call = FAMILIES[name].write("add", {"a": 1})
    thought = "so</think>" if name == "qwen3_xml" else ""
    said = tokenizer.encode(f"{thought}{call}{end}", add_special_tokens=False)
    renderer.parse(said)
    told = {"role": "tool", "name": "add", "content": f"[{foreign}]"}
    ids = renderer.extend([*ids, *said], [told]) or renderer.reopen()
    added = tokenizer.added_tokens_decoder
    return tokenizer.decode(ids), [i for i in ids if i in added]


@given(foreign=SPELLED, name=st.sampled_from([*TEMPLATES]))
def test_what_a_tool_answers_or_is_described_by_never_becomes_a_control_token(foreign, name):
    """All control tokens are the template's and the model's; the text is there to the letter."""
    text, added = spoken(name, foreign)
    assert added == spoken(name, "b")[1]
    if name != "mistral":  # which shows an answer as JSON
        assert f"[{foreign}]" in text


def test_a_template_that_carries_no_conversation_is_refused():
    lost = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    raises = "{{ raise_exception('never') }}"
    for template, why in ((lost, "is lost"), (raises, "never")):
        with pytest.raises(UserError, match=rf"model\.chat_template=auto: .*{why}"):
            check_template(EnvironmentSpec(name="rooms"), tokenizer_with(template), AUTO)


def test_an_unknown_form_of_calls_is_refused_where_an_environment_has_tools():
    tokenizer = tokenizer_with(QWEN.replace("tool_call>", "call>"))
    spec = EnvironmentSpec(name="python_tool")
    check_template(spec, tokenizer, AUTO)
    with pytest.raises(UserError, match=r"model\.tool_parser=auto"):
        check_template(spec, tokenizer, AUTO, tools=True)
    assert "unknown form" in conversation_form(tokenizer, AUTO)
    known = conversation_form(tokenizer_with(XML), AUTO)
    assert known == "model.chat_template=auto: tool calls qwen3_xml; thoughts kept apart (<think>)"


def test_harmony_is_refused_by_name():
    """A template in gpt-oss's form, of a few lines."""
    harmony = (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
        "<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    spec = EnvironmentSpec(name="higher_lower")
    with pytest.raises(UserError, match="gpt-oss's harmony, whose channels rlcore does not keep"):
        check_template(spec, tokenizer_with(harmony), AUTO)
    with pytest.raises(UserError, match=r"model\.tool_parser=openai is not accepted"):
        check_template(spec, tokenizer_with(QWEN), TemplateSpec(tool_parser="openai"))


def test_a_template_of_one_s_own_and_its_arguments_are_used(tmp_path):
    """The tokenizer's own drops thoughts of earlier turns; one that keeps them makes one part."""
    file = tmp_path / "keeps.jinja"
    file.write_text(XML)
    tokenizer = tokenizer_with(TEMPLATES["hermes"][0])
    own = TemplateSpec(chat_template=str(file))
    quiet = own.model_copy(update={"chat_template_args": {"enable_thinking": False}})
    asked = "2+2?"
    texts = [tokenizer.decode(encode_prompt(tokenizer, asked, s)) for s in (AUTO, own, quiet)]
    assert [text.endswith("assistant\n") for text in texts] == [True, False, False]
    assert texts[1].endswith("<think>\n") and texts[2].endswith("<think>\n\n</think>\n\n")
    kept = {}
    for name, settings in (("auto", AUTO), ("own", own)):
        renderer = make_renderer(tokenizer, settings)
        ids = renderer.open(Opening([{"role": "user", "content": asked}]))
        thought = "so</think>4" if name == "own" else "<think>so</think>4"
        said = tokenizer.encode(f"{thought}<|im_end|>", add_special_tokens=False)
        renderer.parse(said)
        kept[name] = renderer.extend([*ids, *said], [{"role": "user", "content": "Sure?"}])
    assert kept["auto"] is None and kept["own"] is not None


def test_a_file_that_is_none_and_arguments_that_are_taken_are_refused(tmp_path):
    missing = TemplateSpec(chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(UserError, match=r"model\.chat_template=.*none\.jinja cannot be read"):
        encode_prompt(tokenizer_with(QWEN), "1", missing)
    with pytest.raises(UserError, match=r"model\.chat_template_args=.* sets tools"):
        TemplateSpec(chat_template_args={"tools": []}).check("model")
