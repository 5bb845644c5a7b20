"""Forms in which families of models write thoughts and tool calls, and one reader for each.

A family is known by texts of its chat template. Thoughts are split off first, so that a call that
is only considered is none. What looks like a call and cannot be read is an error for the model; a
mere mention of a family's marks is text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.environments.protocol import ToolCall
from rlcore.errors import UserError

KEY = "model.tool_parser"
Tools = Sequence[Mapping[str, Any]]  # in OpenAI's form, as in `protocol.Opening`
Found = tuple[str, list[ToolCall]]  # the text around the calls, and these


class UnreadableCall(ValueError):
    """A call that cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Said:
    """A turn of the model, taken apart.

    Example: Said("The sum is 4.", reasoning="2 and 2 make 4.")
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    error: str = ""  # why its calls cannot be read; the model receives this sentence


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """A form of tool calls."""

    name: str
    form: str  # shown in the answer to a call that cannot be read
    read: Callable[[str, Tools], Found]  # raises UnreadableCall
    write: Callable[[str, Mapping[str, Any]], str] | None  # one call; None: only its template can
    # special tokens that are part of the form; None: all may be
    special: tuple[str, ...] | None = ("<tool_call>", "</tool_call>")


def _call(name: Any, arguments: Any) -> ToolCall:
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise UnreadableCall("a call has a name and an object of arguments")
    return ToolCall(name, dict(arguments))


def _json_call(text: str, arguments: Sequence[str] = ("arguments",)) -> ToolCall:
    """The call of a JSON object, whose arguments are the first present of these fields."""
    try:
        call = json.loads(text)
        given = [call[name] for name in arguments if name in call]
        return _call(call["name"], given[0] if given else {})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableCall(f"{type(error).__name__}: {error}") from error


def _types(tools: Tools, name: str) -> Mapping[str, Any]:
    """Declared parameters of a tool -> their schemas."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {p: s for p, s in properties.items() if isinstance(s, Mapping)}
    return {}


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """A value that stands bare between tags: text where its schema says so, else JSON, else text,
    which the tool then refuses."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


# -- readers and writers ---------------------------------------------------------------------------

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def _in_blocks(text: str, begins: str, read: Callable[[str], ToolCall]) -> Found:
    """Calls between <tool_call> tags, whose inside begins with `begins`, a pattern."""
    calls = [read(body) for body in _BLOCK.findall(text)]
    rest = _BLOCK.sub("", text)
    if re.search(rf"<tool_call>\s*{begins}", rest):
        raise UnreadableCall("the tool call has no </tool_call>")
    return (rest.strip() if calls else text), calls


def _read_hermes(text: str, tools: Tools) -> Found:
    return _in_blocks(text, r"\{", _json_call)


def _write_hermes(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _read_xml(text: str, tools: Tools) -> Found:
    """As Qwen3-Coder, Qwen3.5 and Nemotron 3 write calls."""

    def read(body: str) -> ToolCall:
        function = _FUNCTION.fullmatch(body)
        if function is None:
            raise UnreadableCall("there is no <function=NAME>...</function> between the tags")
        name = function[1].strip()
        schemas = _types(tools, name)
        if _PARAMETER.sub("", function[2]).strip():
            raise UnreadableCall("a function holds only <parameter=NAME>...</parameter>")
        given = _PARAMETER.findall(function[2])
        return ToolCall(name, {key: _typed(value, schemas.get(key, {})) for key, value in given})

    return _in_blocks(text, "<function=", read)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _write_xml(name: str, arguments: Mapping[str, Any]) -> str:
    given = "".join(f"<parameter={k}>\n{_bare(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _read_glm(text: str, tools: Tools) -> Found:
    """As GLM-4.5 writes calls."""

    def read(body: str) -> ToolCall:
        name, opened, _ = body.partition("<arg_key>")
        name, given = name.strip(), body[len(name) :]
        if not re.fullmatch(r"[\w.\-]+", name) or (opened and _PAIR.sub("", given).strip()):
            raise UnreadableCall("between the tags are a name and pairs of arg_key and arg_value")
        schemas = _types(tools, name)
        pairs = [(key.strip(), value) for key, value in _PAIR.findall(given)]
        return ToolCall(name, {key: _typed(value, schemas.get(key, {})) for key, value in pairs})

    return _in_blocks(text, r"[\w.\-]+\s*<arg_key>", read)


def _write_glm(name: str, arguments: Mapping[str, Any]) -> str:
    given = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{_bare(v)}</arg_value>\n" for k, v in arguments.items()
    )
    return f"<tool_call>{name}\n{given}</tool_call>"


PYTHON_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder()


def _read_llama(text: str, tools: Tools) -> Found:
    """As Llama 3 writes calls: the answer is a JSON object, or several with semicolons between."""
    before, tagged, after = text.partition(PYTHON_TAG)
    body = (after if tagged else text).replace(PYTHON_TAG, ";").strip()
    if not tagged and not re.match(r'\{\s*"(name|type|parameters)"', body):
        return text, []  # a sentence, or JSON that is the answer itself
    calls: list[ToolCall] = []
    at = 0
    while at < len(body):
        try:
            call, end = _DECODER.raw_decode(body, at)
        except (ValueError, RecursionError) as error:
            raise UnreadableCall(f"{type(error).__name__}: {error}") from error
        if not tagged and not calls and not _names_a_call(call):
            return text, []
        calls.append(_json_call(body[at:end], ("parameters", "arguments")))
        at = end + len(re.match(r"[\s;]*", body[end:])[0])  # type: ignore[index]
    return before.strip() if tagged else "", calls


def _names_a_call(value: Any) -> bool:
    given = {"parameters", "arguments"}
    return isinstance(value, dict) and "name" in value and bool(given & {*value})


def _write_llama(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments})


TOOL_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def _read_mistral(text: str, tools: Tools) -> Found:
    """As Mistral's models write calls: a JSON list behind one mark, or, by later versions, a name
    and a JSON object behind each."""
    before, *bodies = text.split(TOOL_CALLS)
    calls: list[ToolCall] = []
    for body in bodies:
        named = _NAMED.fullmatch(body)
        try:
            if named is not None:
                calls.append(_call(named[1], json.loads(named[2])))
                continue
            listed = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise UnreadableCall(f"{type(error).__name__}: {error}") from error
        if not isinstance(listed, list) or not listed:
            raise UnreadableCall(f"{TOOL_CALLS} is followed by no list of calls")
        calls += [_json_call(json.dumps(call)) for call in listed]
    return (before.strip() if calls else text), calls


def _write_mistral(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{TOOL_CALLS}{json.dumps([{'name': name, 'arguments': arguments}])}"


LFM_OPEN, LFM_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_LFM = re.compile(f"{re.escape(LFM_OPEN)}(.*?){re.escape(LFM_CLOSE)}", re.DOTALL)
_LITERALS = {"true": True, "false": False, "null": None}


def _read_lfm2(text: str, tools: Tools) -> Found:
    """As LFM2 writes calls: a Python list of calls between two special tokens, or a JSON list where
    a template shows one."""
    calls = [call for body in _LFM.findall(text) for call in _listed_calls(body.strip())]
    rest = _LFM.sub("", text)
    if LFM_OPEN in rest:
        raise UnreadableCall(f"the tool call has no {LFM_CLOSE}")
    return (rest.strip() if calls else text), calls


def _listed_calls(text: str) -> list[ToolCall]:
    if not re.match(r"\[?\s*\{", text):
        return _python_calls(text)
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableCall(f"{type(error).__name__}: {error}") from error
    return [_json_call(json.dumps(c)) for c in (listed if isinstance(listed, list) else [listed])]


def _python_calls(text: str) -> list[ToolCall]:
    try:
        listed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableCall(f"{type(error).__name__}: {error}") from error
    made = listed.elts if isinstance(listed, ast.List) else [listed]
    return [_python_call(call) for call in made]


def _python_call(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise UnreadableCall("a call is written name(argument=value)")
    try:
        given = {str(k.arg): _literal(k.value) for k in call.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UnreadableCall(f"{type(error).__name__}: {error}") from error
    return ToolCall(ast.unparse(call.func), given)


def _literal(value: ast.expr) -> Any:
    if isinstance(value, ast.Name) and value.id in _LITERALS:
        return _LITERALS[value.id]
    found = ast.literal_eval(value)
    json.dumps(found)  # sets and bytes are no arguments
    return found


def _write_lfm2(name: str, arguments: Mapping[str, Any]) -> str:
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{LFM_OPEN}[{name}({given})]{LFM_CLOSE}"


# -- families --------------------------------------------------------------------------------------

_XML_FORM = (
    "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
)
_GLM_FORM = "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
HERMES = ToolFamily(
    "hermes",
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    _read_hermes,
    _write_hermes,
)
FAMILIES = {
    family.name: family
    for family in (
        HERMES,
        ToolFamily("qwen3_xml", _XML_FORM, _read_xml, _write_xml),
        ToolFamily("glm45", _GLM_FORM, _read_glm, _write_glm),
        ToolFamily(
            "llama3_json",
            '{"name": ..., "parameters": {...}}',
            _read_llama,
            _write_llama,
            (PYTHON_TAG,),
        ),
        ToolFamily(
            "mistral",
            '[TOOL_CALLS][{"name": ..., "arguments": {...}}]',
            _read_mistral,
            _write_mistral,
            (TOOL_CALLS, "[ARGS]", "[CALL_ID]"),
        ),
        ToolFamily(
            "lfm2",
            f"{LFM_OPEN}[NAME(KEY=VALUE)]{LFM_CLOSE}",
            _read_lfm2,
            _write_lfm2,
            (LFM_OPEN, LFM_CLOSE),
        ),
    )
}
# Texts that a chat template must all hold -> a family, or the name of a tool parser of vLLM. The
# first that fits is taken, so that what has <tool_call> and more comes before what has it alone.
MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|tool_list_start|>",), "lfm2"),
    (("<arg_key>",), "glm45"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "<parameter="), "qwen3_xml"),
    ((TOOL_CALLS,), "mistral"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<start_function_call>",), "functiongemma"),
    (("<function_calls>",), "olmo3"),
    (("<|tool_call|>", "<|start_of_role|>"), "granite"),
    (("<|tool_call|>",), "phi4_mini_json"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<tool_call>",), "hermes"),
    ((PYTHON_TAG,), "llama3_json"),
    (('"parameters": dictionary',), "llama3_json"),
)


def named_by(template: str) -> str | None:
    """The family or parser that a chat template's text shows; None: it is unknown."""
    return next((name for marks, name in MARKS if all(m in template for m in marks)), None)


def family_of(
    template: str, tokenizer: Any, name: str = "auto", *, shows_tools: bool = True
) -> ToolFamily:
    """The family of a chat template's text, or the one that `model.tool_parser` names.

    A template that does not show tools has Hermes' form, in which rlcore then describes them.
    Raises UserError for an unknown one.
    """
    chosen = (named_by(template) if shows_tools else "hermes") if name == "auto" else name
    if chosen is None:
        raise UserError(
            f"{KEY}=auto does not know the form in which the chat template shows tools: name one "
            f"of {', '.join(FAMILIES)}, or a tool parser of vLLM."
        )
    return FAMILIES.get(chosen) or _of_vllm(chosen, tokenizer, chosen_by_user=name != "auto")


def _of_vllm(name: str, tokenizer: Any, *, chosen_by_user: bool) -> ToolFamily:
    """A tool parser of vLLM as a family. vLLM is imported, for seconds, at the first turn or to
    check a name that a user has chosen."""
    from rlcore.rollout.engines.vllm import platform

    known = platform.tool_parsers() if chosen_by_user else (name,)
    if name not in known:
        raise UserError(
            f"{KEY}={name} is not a form of tool calls: choose one of "
            f"{', '.join([*FAMILIES, *sorted(set(known) - set(FAMILIES))])}."
        )

    def read(text: str, tools: Tools) -> Found:
        # Outside: a tokenizer without the form's tokens is no mistake of the model's.
        around, found = platform.read_tool_calls(name, tokenizer, text, tools)
        try:
            return around, [_call(called, arguments) for called, arguments in found]
        except ValueError as error:
            raise UnreadableCall(f"{type(error).__name__}: {error}") from error

    return ToolFamily(name, "the form that the first message shows", read, None, None)


# gpt-oss writes thoughts, answers and calls into channels of one turn, and ends turns in its own
# ways; the names of channels would be read as text of the answer.
HARMONY = ("<|start|>", "<|channel|>", "<|message|>")
OF_HARMONY = "openai"  # vLLM's parser of it, which reads tokens and no text


def refuse_harmony(template: str, parser: str) -> None:
    """Raise UserError for gpt-oss's form, by a chat template's text or the named parser."""
    if parser == OF_HARMONY:
        raise UserError(
            f"{KEY}={parser} is not accepted: it reads gpt-oss's harmony, whose channels rlcore "
            "does not keep apart. Choose a model of another family, and tool_parser=auto."
        )
    if all(mark in template for mark in HARMONY):
        raise UserError(
            "model.path's chat template writes gpt-oss's harmony, whose channels rlcore does not "
            "keep apart: thoughts would be taken for the answer, and calls for text. Choose a "
            "model of another family, or environment=none."
        )


# -- thoughts --------------------------------------------------------------------------------------

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def thoughts_of(template: str) -> tuple[str, str] | None:
    """The marks around a thought that a chat template knows of; None: it knows none."""
    return next((marks for marks in THOUGHTS if marks[1] in template or marks[0] in template), None)


def split_thought(text: str, marks: tuple[str, str], *, opened: bool = False) -> tuple[str, str]:
    """(thought, what follows it). `opened`: the prompt ends inside the thought.

    A thought without its end is all that there is: the answer was cut off in it.
    """
    head, closed, rest = text.partition(marks[1])
    before, began, thought = head.partition(marks[0])
    if not closed:
        if opened or (began and not before.strip()):
            return (thought if began and not before.strip() else text).strip(), ""
        return "", text
    if not began:
        before, thought = "", head
    return thought.strip(), (before + rest).strip() if before.strip() else rest.lstrip()


def read_turn(
    family: ToolFamily,
    text: str,
    *,
    tools: Tools = (),
    marks: tuple[str, str] | None = None,
    opened: bool = False,
) -> Said:
    """A turn of the model, taken apart. Calls are read only where there are tools.

    `marks`: around thoughts, where they are kept apart; None: a thought stays in the content, but
    a call in it is none. `opened`: the prompt ends inside the thought.
    """
    thought, rest = split_thought(text, marks or THOUGHTS[0], opened=opened)
    if marks is None:
        content, thought = text, ""
    else:
        content = rest
    if not tools:
        return Said(content, thought)
    try:
        around, calls = family.read(rest, tools)
    except UnreadableCall as error:
        sentence = f"Error: this tool call cannot be read ({error}): write {family.form}"
        return Said(content, thought, error=sentence)
    return Said(around if calls else content, thought, tuple(calls))
