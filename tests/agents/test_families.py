"""Tool calls and thoughts in the form of each family, through templates of these forms."""

from __future__ import annotations

import pytest
from family_fakes import GLM, LLAMA, TEMPLATES, UNKNOWN, XML, add, tokenizer_with
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.agents.families import (
    FAMILIES,
    THOUGHTS,
    family_of,
    named_by,
    read_turn,
    split_thought,
)
from rlcore.agents.renderers import make_renderer
from rlcore.environments.protocol import Opening, ToolCall, tool_schema
from rlcore.errors import UserError
from rlcore.models.specs import TemplateSpec

SCHEMA = tool_schema(add)
CALL = ToolCall("add", {"a": 2, "note": "so be it"})
USER = {"role": "user", "content": "2+2?"}
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>[]", exclude_categories=["C"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("if", "in", "is", "as", "or", "and", "not", "for", "from", "def")
)


@pytest.mark.parametrize("name", FAMILIES)
@given(arguments=st.dictionaries(NAMES, VALUES, max_size=3), called=NAMES)
def test_what_a_family_writes_it_reads(name, arguments, called):
    kinds = {
        k: {"type": "string" if isinstance(v, str) else "object"} for k, v in arguments.items()
    }
    parameters = {"type": "object", "properties": kinds}
    tools = [{"type": "function", "function": {"name": called, "parameters": parameters}}]
    family = FAMILIES[name]
    text = family.write(called, arguments)
    for before in ("", "I add. ") if name != "llama3_json" else ("",):
        said = read_turn(family, before + text, tools=tools, marks=THOUGHTS[0])
        assert said.calls == (ToolCall(called, arguments),) and said.content == before.strip()
    if name != "llama3_json":
        two = read_turn(family, f"{text}\n{text}" if name != "mistral" else text, tools=tools)
        assert set(map(str, two.calls)) == {str(ToolCall(called, arguments))}


@pytest.mark.parametrize("name", FAMILIES)
@given(text=st.text(st.sampled_from("<>[]{}()=\"',:;/ \nadtool_clfunrgsTOL|k")) | st.text())
def test_no_text_raises_in_a_reader(name, text):
    opens = {"mistral": "[TOOL_CALLS]", "lfm2": "<|tool_call_start|>", "llama3_json": '{"name"'}
    for given_ in (text, opens.get(name, "<tool_call>") + text):
        said = read_turn(FAMILIES[name], given_, tools=[SCHEMA], marks=THOUGHTS[0])
        assert not (said.calls and said.error)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=15)
@given(data=st.data())
def test_no_reply_of_a_model_raises_in_a_conversation(name, data):
    """Any tokens, control tokens among them, are read, and answered in the conversation."""
    tokenizer = tokenizer_with(TEMPLATES[name][0])
    renderer = make_renderer(tokenizer, TemplateSpec())
    ids = renderer.open(Opening([USER], [SCHEMA]))
    call = tokenizer.encode(FAMILIES[name].write("add", {"a": 2}), add_special_tokens=False)
    token = st.integers(0, len(tokenizer) - 1)
    for _ in range(2):
        said = data.draw(st.lists(token | st.sampled_from(call), min_size=1, max_size=12))
        said = [*call, *said] if data.draw(st.booleans()) else said
        calls = renderer.parse(said).tool_calls
        answers = [{"role": "tool", "name": call.name, "content": "4"} for call in calls]
        longer = renderer.extend([*ids, *said], answers or [USER])
        if longer is None:
            ids = renderer.reopen()
        else:
            assert longer[: len(ids) + len(said)] == [*ids, *said]
            ids = longer


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_with_a_tool_in_the_form_of_each_template(name):
    """The call is read, the sampled tokens stay, and the next prompt shows the answer."""
    template, end = TEMPLATES[name]
    tokenizer = tokenizer_with(template)
    assert named_by(template) == name
    renderer = make_renderer(tokenizer, TemplateSpec())
    ids = renderer.open(Opening([USER], [SCHEMA]))
    assert "Add to what was." in tokenizer.decode(ids)
    call = FAMILIES[name].write("add", {"a": 2, "note": "so be it"})
    # other white space than the template's: the same turn
    text = call.replace('": ', '":  ') if name in ("mistral", "llama3_json") else call
    thought = "so</think>\n\n" if name == "qwen3_xml" else ""  # which its prompt opens
    said = tokenizer.encode(thought + text + end, add_special_tokens=False)
    action = renderer.parse(said)
    assert (action.tool_calls, action.error) == ((CALL,), "")
    answer = {"role": "tool", "name": "add", "content": "four </s>"}
    longer = renderer.extend([*ids, *said], [answer])
    if name == "mistral":  # its template writes ids into calls, and tools behind the last user
        assert longer is None or longer[: len(ids) + len(said)] == [*ids, *said]
        longer = longer or renderer.reopen()
    else:
        assert longer is not None and longer[: len(ids) + len(said)] == [*ids, *said]
    shown = tokenizer.decode(longer)
    assert shown.index("so be it") < shown.index("four </s>")
    assert longer.count(tokenizer.convert_tokens_to_ids("</s>")) == (name == "mistral")
    # and an answer in plain words
    end = "<|user|>" if name == "glm45" else end
    last = tokenizer.encode(thought + "It is 4." + end, add_special_tokens=False)
    action = renderer.parse(last)
    assert (action.text, action.tool_calls) == ("It is 4.", ())
    final = renderer.extend([*longer, *last], [USER])
    assert final is not None and final[: len(longer) + len(last)] == [*longer, *last]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_client_s_own_history_is_shown_in_the_family_s_form(name):
    tokenizer = tokenizer_with(TEMPLATES[name][0])
    renderer = make_renderer(tokenizer, TemplateSpec())
    function = {"name": "add", "arguments": {"a": 2, "note": "so be it"}}
    for number in (1, 2):
        calls = [
            {"id": f"c{at:08d}", "type": "function", "function": function} for at in range(number)
        ]
        answers = [
            {"role": "tool", "name": "add", "content": "4", "tool_call_id": call["id"]}
            for call in calls
        ]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        shown = tokenizer.decode(renderer.open(Opening([USER, said, *answers], [SCHEMA])))
        told = shown[shown.index("2+2?") :]
        marks = {
            "hermes": '{"name": "add", "arguments"', "qwen3_xml": "<function=add>",
            "glm45": "<tool_call>add\n<arg_key>", "llama3_json": '{"name": "add", "parameters"',
            "mistral": '{"name": "add", "arguments"', "lfm2": "<|tool_call_start|>[add(a=2",
        }  # fmt: skip
        assert told.count(marks[name]) == number


def test_a_call_that_is_only_considered_is_none_and_a_mention_loses_no_answer():
    for name, family in FAMILIES.items():
        call = family.write("add", {"a": 2})
        considered = read_turn(
            family, f"<think>I could say {call}</think>\n\n4", tools=[SCHEMA], marks=THOUGHTS[0]
        )
        assert (considered.content, considered.calls, considered.error) == ("4", (), "")
        assert call in considered.reasoning
        whole = read_turn(family, f"<think>or {call}</think>4", tools=[SCHEMA])
        assert not whole.calls and whole.content.endswith(f"{call}</think>4")
        cut = read_turn(family, f"<think>or {call}", tools=[SCHEMA], marks=THOUGHTS[0])
        assert not cut.calls and not cut.content
        if name not in ("mistral", "lfm2"):  # whose marks are special tokens
            said = read_turn(family, "Without <tool_call> it is 4.", tools=[SCHEMA])
            assert (said.content, said.error) == ("Without <tool_call> it is 4.", "")
    answer = '{"name": "Bob"}'
    assert read_turn(FAMILIES["llama3_json"], answer, tools=[SCHEMA]).content == answer


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>a</think>b", False, ("a", "b")),
        ("a</think>\n\nb", True, ("a", "b")),
        ("a</think>b", False, ("a", "b")),
        ("a", True, ("a", "")),
        ("a", False, ("", "a")),
        ("<think>a", False, ("a", "")),
        ("b <think>", False, ("", "b <think>")),
        ("b<think>a</think>c", False, ("a", "bc")),
    ],
)
def test_a_thought_is_split_off(text, opened, expected):
    assert split_thought(text, THOUGHTS[0], opened=opened) == expected


def test_a_turn_with_other_white_space_than_the_template_s_stays():
    """GLM's history ends a turn with the token that begins the next message."""
    template = GLM.replace(
        "<|assistant|>\n{{ m.content }}", "<|assistant|>\n{{ m.content | trim }}"
    )
    tokenizer = tokenizer_with(template.replace("\n<tool_call>", "<tool_call>"))
    renderer = make_renderer(tokenizer, TemplateSpec())
    ids = renderer.open(Opening([USER], [SCHEMA]))
    call = FAMILIES["glm45"].write("add", {"a": 2}).replace("add\n", "add\n ")
    for text, kept in ((f"So.\n\n{call}", True), (f"So.\n\n{call} <think>", True)):
        said = tokenizer.encode(f"{text}<|observation|>", add_special_tokens=False)
        assert renderer.parse(said).tool_calls == (ToolCall("add", {"a": 2}),)
        longer = renderer.extend([*ids, *said], [{"role": "tool", "content": "4"}])
        assert (longer is not None and longer[: len(ids) + len(said)] == [*ids, *said]) == kept
        ids = longer


def test_calls_of_lfm2_may_be_json():
    text = '<|tool_call_start|>[{"name": "add", "arguments": {"a": 2}}]<|tool_call_end|>'
    assert read_turn(FAMILIES["lfm2"], text, tools=[SCHEMA]).calls == (ToolCall("add", {"a": 2}),)
    broken = text.replace("]<", "<")
    assert "cannot be read" in read_turn(FAMILIES["lfm2"], broken, tools=[SCHEMA]).error


def test_a_thought_that_the_prompt_opens_is_kept_apart_and_its_tokens_stay():
    tokenizer = tokenizer_with(XML)
    renderer = make_renderer(tokenizer, TemplateSpec())
    ids = renderer.open(Opening([USER], [SCHEMA]))
    call = FAMILIES["qwen3_xml"].write("add", {"a": 2})
    # the template would write an empty line behind the thought
    said = tokenizer.encode(f"or {call}? No.</think>4<|im_end|>", add_special_tokens=False)
    action = renderer.parse(said)
    assert (action.text, action.tool_calls) == ("4", ())
    assert action.reasoning == f"or {call}? No." and action.whole.startswith("or <tool_call>")
    longer = renderer.extend([*ids, *said], [USER])
    assert longer is not None and longer[: len(ids) + len(said)] == [*ids, *said]


def test_an_unknown_form_is_refused_where_there_are_tools_and_may_be_named():
    tokenizer = tokenizer_with(UNKNOWN)
    plain = make_renderer(tokenizer, TemplateSpec())
    assert plain.open(Opening([USER]))
    with pytest.raises(UserError, match=r"model\.tool_parser=auto does not know"):
        plain.open(Opening([USER], [SCHEMA]))
    named = make_renderer(tokenizer, TemplateSpec(tool_parser="hermes"))
    assert named.open(Opening([USER], [SCHEMA]))
    with pytest.raises(UserError, match=r"model\.tool_parser=auto"):
        family_of(UNKNOWN, tokenizer)


def test_a_call_that_cannot_be_read_is_told_in_the_family_s_form():
    renderer = make_renderer(tokenizer_with(LLAMA), TemplateSpec())
    renderer.open(Opening([USER], [SCHEMA]))
    tokenizer = tokenizer_with(LLAMA)
    error = renderer.parse(tokenizer.encode('{"name": "add", "param')).error
    assert error.startswith("Error: this tool call cannot be read") and '"parameters"' in error
