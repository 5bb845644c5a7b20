"""Queries of the installed vLLM: its hardware, and its parsers of tool calls by the names that its
server takes as --tool-call-parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.platforms import current_platform

from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse


def on_cpu() -> bool:
    """Return whether vLLM runs on the CPU here."""
    return bool(current_platform.is_cpu())


def check_platform(actor: ActorSpec, key: str) -> None:
    """Raise UserError if the actor asks for other hardware than vLLM has here."""
    refuse(
        actor.on_cpu != on_cpu(),
        f"{key}.num_gpus={actor.num_gpus:g} does not fit this machine, where vLLM runs on "
        f"{'the CPU: use 0' if on_cpu() else 'GPUs: use 1'}.",
    )


def tool_parsers() -> tuple[str, ...]:
    """The parsers that the installed vLLM brings."""
    from vllm.tool_parsers import ToolParserManager

    return tuple(ToolParserManager.list_registered())


def read_tool_calls(
    name: str, tokenizer: Any, text: str, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, list[tuple[str, str]]]:
    """(the text around the calls, [(name, arguments as JSON)]) of one turn.

    A parser that cannot read a call takes it for text. Raises KeyError for an unknown `name`, and
    RuntimeError for a tokenizer without the special tokens of the form.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    asked = {"model": "policy", "messages": [{"role": "user", "content": ""}], "tools": list(tools)}
    request = ChatCompletionRequest.model_validate(asked)
    shown: list[Any] = list(request.tools or [])
    parser = ToolParserManager.get_tool_parser(name)(tokenizer, shown)
    found = parser.extract_tool_calls(text, request)
    if not found.tools_called:
        return text, []
    calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
    return (found.content or "").strip(), calls
