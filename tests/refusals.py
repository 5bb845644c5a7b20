"""The sentences of refusals that a package's source can say, as patterns."""

import ast
import re
from pathlib import Path


def patterns(folder: Path) -> dict[str, str]:
    """{pattern that a sentence matches in full: where it is said}, of `UserError(...)` and
    `refuse(...)`. A value in a sentence is any text."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and (said := _sentence(node)) is not None:
                pattern = "".join(_parts(said))
                if re.sub(r"\.\*", "", pattern).strip(". "):  # else another's sentence, passed on
                    found[pattern] = f"{file.name}:{node.lineno}"
    return found


def _sentence(call: ast.Call) -> ast.expr | None:
    name = getattr(call.func, "id", "")
    if name == "UserError" and call.args:
        return call.args[0]
    return call.args[1] if name == "refuse" and len(call.args) > 1 else None


def _parts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant):
        return [re.escape(str(node.value)).replace("\\ ", " ")]
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in _parts(value)]
    return [".*"]


def changed(words, change):
    """Words of a command after a remedy: `key=value` replaces a key's, `-key` takes words away."""
    for word in change:
        if word.startswith("-"):
            words = [w for w in words if not w.startswith(word[1:])]
        else:
            key = word.partition("=")[0]
            words = [*(w for w in words if not w.startswith(f"{key}=")), word]
    return words
