"""Completion of the `rlcore` command in bash and zsh: a script made from the table of verbs, the
groups' files and the schema. A key press starts no Python.

Both shells get the same function, which prints the candidates for a word; only the way to hand them
to the shell differs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlcore.config.groups import groups
from rlcore.config.help_settings import choices_of, settings
from rlcore.config.verbs import VERBS, Verb
from rlcore.files import replace_file

# What precedes the values of a key, or the keys of a verb, is a pattern of `case`.
COMMON = r"""# Completion of rlcore in {reader}, written by `rlcore completion {reader}`.
# _rlcore_words VERB WORD prints the candidates for WORD, one a line; "@files" and "@folders" alone
# stand for paths.
_rlcore_words() {{
    local verb=$1 word=$2
    case "$verb:$word" in
{values}    esac
    case "$word" in *=* | [./~]*) return ;; esac
    case "$verb" in
{keys}    esac
    case "$verb" in
{settings}    esac
}}
"""
BASH = r"""_rlcore() {
    local line=${COMP_LINE:0:COMP_POINT} word verb found before
    word=${line##*[[:space:]]}
    read -r _ verb before <<<"${line%"$word"}"
    [[ $verb == plan && $before == measure* ]] && verb="plan measure"
    found=$(_rlcore_words "$verb" "$word")
    local prefix=""
    [[ $word == *=* ]] && prefix=${word%%=*}=
    case "$found" in
        @files) found=$(compgen -f -P "$prefix" -- "${word#"$prefix"}") ;;
        @folders) found=$(compgen -d -S / -P "$prefix" -- "${word#"$prefix"}") ;;
        *) found=$(compgen -W "$found" -- "$word") ;;
    esac
    local IFS=$'\n'
    COMPREPLY=($found)
    # Nothing is to follow what goes on after "=" or "/".
    case "${COMPREPLY[0]}" in *= | */) compopt -o nospace 2>/dev/null ;; esac
    # Readline replaces only what follows the last "=", which breaks words.
    if [[ $COMP_WORDBREAKS == *=* ]]; then COMPREPLY=("${COMPREPLY[@]#"$prefix"}"); fi
}
complete -F _rlcore rlcore
"""
ZSH = r"""_rlcore() {
    local word=${words[CURRENT]} verb=${words[2]} found
    (( CURRENT == 2 )) && verb=""
    [[ $verb == plan && ${words[3]} == measure && CURRENT -gt 3 ]] && verb="plan measure"
    found=$(_rlcore_words "$verb" "$word")
    case "$found" in
        @files) compset -P '*='; _files ;;
        @folders) compset -P '*='; _files -/ ;;
        *)
            local -a open whole
            open=(${(M)${(f)found}:#*=})
            whole=(${${(f)found}:#*=})
            compadd -S '' -- $open
            compadd -- $whole
            ;;
    esac
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u; }
compdef _rlcore rlcore
"""
PLACES = {"file": "@files", "folder": "@folders"}
FILES = ("path", "_path", "_dir")  # endings of settings that name one


def script(shell: str) -> str:
    """The script for "bash" or "zsh"."""
    common = COMMON.format(
        reader=shell, values="".join(_values()), keys="".join(_keys()), settings=_settings_case()
    )
    return common + (BASH if shell == "bash" else ZSH)


def install(shell: str, home: Path) -> str:
    """Write the script below `home` and have the shell's start file read it; returns what was done.

    Installing again replaces the script and leaves the start file alone.
    """
    target = home / ".local" / "share" / "rlcore" / f"completion.{shell}"
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, script(shell))
    start = home / f".{shell}rc"
    line = f"[ -f {shlex.quote(str(target))} ] && source {shlex.quote(str(target))}\n"
    before = start.read_text() if start.exists() else ""
    if line not in before:
        gap = "\n" if before and not before.endswith("\n") else ""
        start.write_text(f"{before}{gap}{line}")
    return f"{target} written; {start} reads it: start a new {shell}, or source {target}."


def _values() -> Iterator[str]:
    """Cases for the values of keys: verbs' own keys first, since they come before settings."""
    for verb in VERBS.values():
        for key in verb.keys:
            where = f"{_pattern(verb)}:{key.name.replace('LABEL', '*')}"
            if key.values:
                yield _final(f"{where}=*", (f"{key.name}={value}" for value in key.values))
            elif key.kind in PLACES:
                yield _final(f"{where}=*", [PLACES[key.kind]])
        if verb.operands is not None:
            names = [key.name for key in verb.keys]
            place = PLACES.get(verb.operands.kind)
            if place is not None:  # a letter begins a key rather than a path
                keys = "|".join(f"{_pattern(verb)}:{name[0]}*" for name in names)
                yield _final(keys, (f"{name}=" for name in names))
                yield _final(f"{_pattern(verb)}:*", [place])
    for group, files in groups().items():
        yield _final(f"*:{group}=*", (f"{group}={option}" for option in files))
    for name, choices, is_path in _settings():
        if choices:
            yield _final(f"*:{name}=*", (f"{name}={choice}" for choice in choices))
        elif is_path:
            yield _final(f"*:{name}=*", ["@files"])


def _settings_case() -> str:
    """The case for groups and settings of the verbs that take them."""
    run = [*(f"{group}=" for group in groups()), *(f"{name}=" for name, _, _ in _settings())]
    return _case("|".join(_pattern(verb) for verb in VERBS.values() if verb.settings), run)


def _keys() -> Iterator[str]:
    """Cases for the verbs, and for each of them the keys that it reads itself."""
    yield _case("''|help", [*dict.fromkeys(name.partition(" ")[0] for name in VERBS), "help"])
    for verb in VERBS.values():
        own = [
            f"{key.name.replace('LABEL', label)}="
            for key in verb.keys
            for label in _labels(key.name)
        ]
        operands = verb.operands.choices if verb.operands is not None else ()
        further = ["measure"] if verb.name == "plan" else []
        yield _case(_pattern(verb), [*own, *operands, *further, "--help"])


def _labels(name: str) -> list[str]:
    """Labels that stand for LABEL in a key: the shipped kinds of actors."""
    return list(groups()["actor"]) if "LABEL" in name else [""]


def _settings() -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """(key, its values where they are few, names a path) of every setting with a known label."""
    for key, info in settings():
        if "LABEL" in key and not key.startswith("actor.LABEL."):
            continue  # labels that the user chooses
        choices = tuple(c for c in choices_of(key, info) if c != "file.py:Class")
        is_path = key.endswith(FILES)
        for label in _labels(key):
            yield key.replace("LABEL", label), choices, is_path


def _pattern(verb: Verb) -> str:
    return f'"{verb.name}"'


def _case(pattern: str, words: Iterable[str], then: str = "") -> str:
    """One case, which prints the words."""
    listed = " ".join(shlex.quote(word) for word in words)
    return f"        {pattern}) printf '%s\\n' {listed}{then} ;;\n"


def _final(pattern: str, words: Iterable[str]) -> str:
    """One case, after which no other candidates are printed."""
    return _case(pattern, words, "; return")
