"""The sentences of refusals that a package's source can say, as patterns."""

import ast
import re
from pathlib import Path

import rlcore

PACKAGE = Path(rlcore.__file__).parent
SPECIFICATIONS = re.compile(
    r"(\w+_)?specs\.py|\w+_facts\.py|checks\.py|centre\.py|jackpot\.py|tis\.py"
)


def patterns(folder: Path) -> dict[str, str]:
    """{pattern that a sentence matches in full: where it is said}, of `UserError(...)` and
    `refuse(...)`. A value in a sentence is any text."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        module = ast.parse(file.read_text())
        named = dict(_named(module))
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and (said := _sentence(node)) is not None:
                pattern = "".join(_parts(said, named))
                if re.sub(r"\.\*", "", pattern).strip(". "):  # else another's sentence, passed on
                    found[pattern] = f"{file.relative_to(folder)}:{node.lineno}"
    return found


def untried(owner, found, reasons):
    """({where: pattern} of an owner's refusals without a tried remedy or a reason, the reasons that
    none needs). `found`: sentences whose remedies are tried."""
    left = {
        re.sub(r"\\(.)", r"\1", pattern): where
        for pattern, where in patterns(PACKAGE).items()
        if owner_of(where.partition(":")[0]) == owner
        and not any(re.fullmatch(pattern, sentence) for sentence in found)
    }
    forgotten = {
        where: pattern
        for pattern, where in left.items()
        if not any(re.search(reason, pattern) for reason in reasons)
    }
    idle = [r for r in reasons if not any(re.search(r, pattern) for pattern in left)]
    return forgotten, idle


def owner_of(file):
    """The test that tries the remedies of a file: commands, settings (rlcore/config),
    specifications, else parts."""
    top, name = file.partition("/")[0], file.rpartition("/")[2]
    if top in ("commands", "advisor", "cli.py"):
        return "commands"
    if top == "config":
        return "settings"
    return "specifications" if SPECIFICATIONS.fullmatch(name) else "parts"


def _named(module):
    """The sentences of a module that have names: its constants, and what its functions return."""
    for node in module.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(str()) as said):
                yield name, said
            case ast.FunctionDef(name, body=[*_, ast.Return(ast.JoinedStr() as said)]):
                yield name, said


def _sentence(call: ast.Call) -> ast.expr | None:
    name = getattr(call.func, "id", "")
    if name == "UserError" and call.args:
        return call.args[0]
    return call.args[1] if name == "refuse" and len(call.args) > 1 else None


def _parts(node: ast.expr, named: dict[str, ast.expr]) -> list[str]:
    if isinstance(node, ast.Constant):
        return [re.escape(str(node.value)).replace("\\ ", " ")]
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in _parts(value, named)]
    said = named.get(getattr(node.func if isinstance(node, ast.Call) else node, "id", ""))
    return [".*"] if said is None else _parts(said, {})


def changed(words, change):
    """Words of a command after a remedy: `key=value` replaces a key's, `-key` takes words away."""
    for word in change:
        if word.startswith("-"):
            words = [w for w in words if not w.startswith(word[1:])]
        else:
            key = word.partition("=")[0]
            words = [*(w for w in words if not w.startswith(f"{key}=")), word]
    return words
