"""The line of another library's error that a person needs.

Errors arrive as chains and as texts: pydantic ends with the address of a page, Ray sends whole
tracebacks, NCCL puts the cause behind "Last error:", an assertion says nothing. `reason` finds the
message among them; the log keeps the rest.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

MOST = 400  # characters of a reason
_ASIDE = (
    re.compile(r"For further information visit \S+$"),
    re.compile(r"<?https?://\S+$"),
    re.compile(r"assertion error\.?$", re.IGNORECASE),
    re.compile(r"During handling of the above exception, another exception occurred:$"),
    re.compile(r"The above exception was the direct cause of the following exception:$"),
    re.compile(r"[\^~ ]+$"),
)
# messages that point at another one
_ELSEWHERE = re.compile(
    r"see (the )?(root cause|stack trace|logs?|error messages?) (above|below)|"
    r"unhandled errors in a TaskGroup",
    re.IGNORECASE,
)
_FRAME = re.compile(r'\s*File ".*", line \d+|Traceback \(most recent call last\):')
_RAISED = re.compile(
    r"(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Failed|Died|Lost)\w*)"
    r"(?:: (?P<said>.*))?$"
)
_VALIDATION = re.compile(r"\d+ validation errors? for (?P<model>\S+)$")
_PYDANTIC = re.compile(r"\s*\[type=.*$", re.DOTALL)
_OF_PYDANTIC = re.compile(r"^(Value error|Assertion failed), ")


def reason(error: BaseException) -> str:
    """Kind and message of the exception in a chain that says what went wrong, in one line.

    Example: "ValueError: max_model_len=4096 is above the model's 2048". An exception that wraps
    another one without its own message gives the wrapped one's; one that says nothing at all
    gives the place that raised it.
    """
    best = None
    for e in _chain(error):
        kind, said = _said(e)
        if said and not _ELSEWHERE.search(said):
            return _short(f"{kind}: {said}")
        best = best or (f"{kind}: {said}" if said else None)
    return _short(best or f"{type(error).__name__}{_place(error)}")


def message_of(text: str) -> str:
    """The message within a text: the last exception of a traceback, or the first line that says
    something; "" where none does."""
    kind, said = _of_text(text)
    return _short(f"{kind}: {said}" if kind and said else said or kind)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, then those that it wraps, each once."""
    seen: set[int] = set()
    queue = [error]
    while queue:
        e = queue.pop(0)
        if id(e) in seen:
            continue
        seen.add(id(e))
        remote = getattr(e, "cause", None)  # Ray's, of the process that was called
        if isinstance(remote, BaseException):
            queue.insert(0, remote)
            queue.append(e)
            continue
        yield e
        within = list(e.exceptions) if isinstance(e, BaseExceptionGroup) else []
        queue.extend([*within, *(x for x in (e.__cause__, e.__context__) if x is not None)])


def _said(e: BaseException) -> tuple[str, str]:
    """(kind, message in one line or "") of one exception."""
    kind, text = type(e).__name__, str(e)
    if isinstance(e, KeyError) and text:
        return kind, f"no {text}"
    found, said = _of_text(text)
    return found or kind, said


def _of_text(text: str) -> tuple[str, str]:
    """(kind where the text names one, message or "")."""
    written = (line.rstrip() for line in text.splitlines())
    lines = [x for x in written if x.strip() and not any(p.match(x.strip()) for p in _ASIDE)]
    if any(_FRAME.match(line) for line in lines):
        return _of_traceback(lines)
    return "", _of_block([line.strip() for line in lines])


def _of_traceback(lines: list[str]) -> tuple[str, str]:
    """The exception behind the last frame of a traceback."""
    last = max(i for i, line in enumerate(lines) if _FRAME.match(line))
    for i in range(last + 1, len(lines)):
        if match := _RAISED.match(lines[i]):
            block = [match["said"] or "", *(line.strip() for line in lines[i + 1 :])]
            return match["kind"].rpartition(".")[2], _of_block([line for line in block if line])
    return "", lines[-1].strip() if last < len(lines) - 1 else ""


def _of_block(lines: list[str]) -> str:
    """One line of a message of several."""
    if not lines:
        return ""
    if match := _VALIDATION.match(lines[0]):
        return _of_validation(match["model"], lines[1:])
    if "Last error:" in lines[:-1]:
        return f"{lines[0].rstrip('. ')}: {lines[lines.index('Last error:') + 1]}"
    if lines[0].endswith(":") and len(lines) > 1:
        return f"{lines[0]} {lines[1]}"
    return _without_pydantic(lines[0])


def _of_validation(model: str, lines: list[str]) -> str:
    """Pydantic's first error: the field, where there is one, then what is wrong with it."""
    field = ""
    for line in lines:
        if " " not in line and "[type=" not in line:
            field = line
            continue
        return f"{model}{f'.{field}' if field else ''}: {_without_pydantic(line)}"
    return f"{model} is not valid"


def _without_pydantic(line: str) -> str:
    return _OF_PYDANTIC.sub("", _PYDANTIC.sub("", line)).strip()


def _place(error: BaseException) -> str:
    """Where an exception without a message was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return " (no message)"
    last = frames[-1]
    return f" in {last.name}, {last.filename.rpartition('/')[2]}:{last.lineno}: {last.line}"


def _short(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST - 3]}..."
