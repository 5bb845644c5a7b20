"""Renderers: the prefix of what was sampled stays bit for bit, or a new part begins."""

from __future__ import annotations

import pytest
from environment_fakes import ScriptedSampler, ask, make_job
from timing import deadline

from rlcore.agents.renderers import make_renderer
from rlcore.environments.play import Play
from rlcore.environments.protocol import Opening, ToolCall, answer_calls, tool_schema
from rlcore.models.fresh import build_char_tokenizer
from rlcore.models.specs import TemplateSpec
from rlcore.models.text import encode_prompt, load_tokenizer
from rlcore.tasks import make_task

# As Qwen3's: what an assistant thought is dropped once a user has answered.
STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = STRIPS.replace("{{ m.content }}{% endif %}", "{{ m.content | trim }}{% endif %}")


@pytest.fixture
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


def renderer(tokenizer, stop=(), system_prompt=None):
    return make_renderer(tokenizer, TemplateSpec(system_prompt=system_prompt), stop=stop)


def user(text):
    return [{"role": "user", "content": text}]


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def test_the_first_prompt_is_that_of_a_task_of_one_turn(tokenizer):
    for system in (None, "Be brief."):
        ids = renderer(tokenizer, system_prompt=system).open(Opening(user("Hello!")))
        one_turn = encode_prompt(tokenizer, "Hello!", TemplateSpec(system_prompt=system))
        assert ids == one_turn


@pytest.mark.parametrize("answer", ["Hi.", " Hi", "Hi there \n", "<think>so</think>Hi", "a  b"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_real_template_s_next_turn_keeps_every_token(tokenizer, answer, closed):
    """An unusual tokenisation of the answer stays, and so does one that was cut off."""
    r = renderer(tokenizer)
    ids = r.open(Opening(user("Hello!")))
    said = [t for char in answer for t in encode(tokenizer, char)]  # never what encode would give
    said += [tokenizer.eos_token_id] if closed else []
    for _ in range(2):
        assert r.parse(said).text == answer
        longer = r.extend([*ids, *said], user("And now?"))
        assert longer is not None and longer[: len(ids) + len(said)] == [*ids, *said]
        added = tokenizer.decode(longer[len(ids) + len(said) :])
        close = "" if closed else "<|im_end|>"
        expected = "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
        assert added == close + expected
        ids = longer


def test_a_template_that_strips_thoughts_begins_a_new_part(tokenizer):
    tokenizer.chat_template = STRIPS
    r = renderer(tokenizer)
    ids = r.open(Opening(user("2+2?")))
    said = [*encode(tokenizer, "<think>easy</think>4"), tokenizer.eos_token_id]
    r.parse(said)
    assert r.extend([*ids, *said], user("Sure?")) is None
    second = r.reopen()
    assert tokenizer.decode(second) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = [*encode(tokenizer, "Yes"), tokenizer.eos_token_id]
    r.parse(plain)
    longer = r.extend([*second, *plain], user("Really?"))
    assert longer is not None and longer[: len(second) + len(plain)] == [*second, *plain]


def test_white_space_that_a_template_trims_is_no_rewriting(tokenizer):
    tokenizer.chat_template = TRIMS
    r = renderer(tokenizer)
    ids = r.open(Opening(user("2+2?")))
    said = [*encode(tokenizer, "\n 4 "), tokenizer.eos_token_id]
    r.parse(said)
    longer = r.extend([*ids, *said], user("Sure?"))
    assert longer is not None and longer[: len(ids) + len(said)] == [*ids, *said]


def test_plain_text_goes_on_where_the_model_stopped():
    tokenizer = build_char_tokenizer("0123456789=")
    r = make_renderer(tokenizer, TemplateSpec(), stop=("9",))
    ids = r.open(Opening(user("12=")))
    assert ids == encode(tokenizer, "12=")
    said = encode(tokenizer, "349")
    assert r.parse(said).text == "34"
    assert r.extend([*ids, *said], user("7")) == [*ids, *said, *encode(tokenizer, "7")]


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    This is not shown.
    """
    return a + b


def test_tools_are_shown_and_called(tokenizer):
    schema = tool_schema(add)["function"]
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"]["properties"] == {
        "a": {"type": "integer"},
        "b": {"type": "integer"},
    }
    assert schema["parameters"]["required"] == ["a"]
    r = renderer(tokenizer)
    ids = r.open(Opening(user("2+2?"), [tool_schema(add)]))
    assert "Add two numbers." in tokenizer.decode(ids)

    def parse(text):
        return r.parse([*encode(tokenizer, text), tokenizer.eos_token_id])

    action = parse('I add.<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>')
    assert action.tool_calls == (ToolCall("add", {"a": 2, "b": 2}),) and action.text == "I add."
    for broken in (
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": "add"',
        "<tool_call>3</tool_call>",
    ):
        assert parse(broken).error.startswith("Error: ")
    assert parse("4").tool_calls == () and parse("4").error == ""


def test_a_tool_that_raises_answers_with_its_error():
    calls = [ToolCall("add", {"a": 1}), ToolCall("add", {"c": 1}), ToolCall("sub", {})]
    first, second, third = (m["content"] for m in answer_calls({"add": add}, calls))
    assert first == "1" and second.startswith("Error: TypeError")
    assert third == "Error: there is no tool sub; choose one of: add."
    with pytest.raises(ValueError, match="has no docstring"):
        tool_schema(lambda: 1)


def play(job, tokenizer, turns):
    playing = Play(job, tokenizer, ("bf16-0", "bf16"))
    try:
        playing.add(ask(1, max_new_tokens=64))
        (played,) = ScriptedSampler(
            playing, [[*encode(tokenizer, t), tokenizer.eos_token_id] for t in turns]
        ).run()
    finally:
        playing.close()
    return played


@pytest.mark.processes
def test_a_model_calls_a_tool_and_is_informed_of_its_mistakes(tokenizer):
    turns = [
        "<tool_call>oh no</tool_call>",
        '<tool_call>{"name": "divide", "arguments": {"a": 4, "b": 0}}</tool_call>',
        '<tool_call>{"name": "divide", "arguments": {"a": 4, "b": 2}}</tool_call>',
        "2",
    ]
    played = play(make_job("Calculator", max_len=2048), tokenizer, turns)
    assert played.score.reward == 1.0, played.score.error
    (record,) = played.parts
    text = tokenizer.decode(record.token_ids[~record.sampled].tolist())
    assert "cannot be read" in text and "ZeroDivisionError" in text and "2.0" in text
    assert tokenizer.decode(record.sampled_ids.tolist()) == "<|im_end|>".join([*turns, ""])


@pytest.mark.processes
def test_a_tool_that_sleeps_past_its_deadline_fails_the_episode_and_ends(tokenizer):
    turn = '<tool_call>{{"name": "divide", "arguments": {{"a": 6, "b": {}}}}}</tool_call>'
    args, limit_s = {"sleeps": 10.0**6}, deadline(2)
    job = make_job("Calculator", max_len=2048, args=args, step_timeout_s=limit_s)
    played = play(job, tokenizer, [turn.format(2), turn.format(3)])
    assert (played.score.status, played.score.reward) == ("timeout", None)
    assert played.score.error == f"step passed environment.step_timeout_s={limit_s:g}"
    # what was sampled before is kept, for display
    assert len(played.parts[0].turn_starts) == 2


@pytest.mark.processes
def test_programs_run_in_the_sandbox_from_an_environment_s_process(tokenizer):
    def call(code):
        return f'<tool_call>{{"name": "python", "arguments": {{"code": "{code}"}}}}</tool_call>'

    answer = make_task("digits", {}).item("train", 0).answer
    job = make_job("python_tool", max_len=2048)
    played = play(job, tokenizer, [call("x = 6"), call("x * 7"), answer])
    assert played.score.status == "ok", played.score.error
    assert played.score.reward == 1.0 and played.score.parts["programs"] == 2.0
    (record,) = played.parts
    assert "42" in tokenizer.decode(record.token_ids[~record.sampled].tolist())


@pytest.mark.processes
def test_stripped_thoughts_give_two_parts_and_nothing_corrupted(tokenizer):
    tokenizer.chat_template = STRIPS
    turns = ["<think>a</think>1", "2", "3"]
    played = play(make_job(max_len=512), tokenizer, turns)
    assert played.score.status == "ok" and played.score.reward == 3.0
    first, second = played.parts
    assert (played.score.parts["turns"], played.score.parts["parts"]) == (3, 2)
    assert (first.part, first.parts, second.part, second.parts) == (0, 2, 1, 2)
    assert first.draw_id == second.draw_id == played.score.draw_id
    assert [len(t.turn_starts) for t in (first, second)] == [1, 2]
    assert tokenizer.decode(first.sampled_ids.tolist()) == "<think>a</think>1<|im_end|>"
    assert tokenizer.decode(second.sampled_ids.tolist()) == "2<|im_end|>3<|im_end|>"
    assert "<|im_start|>assistant\n1<|im_end|>" in tokenizer.decode(second.prompt_ids.tolist())
    assert played.answer.tokens == len(first.sampled_ids) + len(second.sampled_ids)
