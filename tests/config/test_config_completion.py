"""Completion in real shells, by the script that `rlcore completion SHELL` prints."""

import shutil
import subprocess

import pytest

from rlcore.cli import main
from rlcore.config.completion import script
from rlcore.config.groups import groups
from rlcore.config.verbs import VERBS

# Each line of the input is completed at its end, as a key press would have bash do.
BASH = """source "$1"
while IFS= read -r line; do
    COMP_LINE=$line COMP_POINT=${#line} COMPREPLY=()
    _rlcore 2>/dev/null
    echo "${COMPREPLY[@]}"
done
"""
# zsh's own functions need a line editor: what they are given is printed instead.
ZSH = """compdef() { : }
compadd() { shift $(( ${@[(i)--]} )); print -rn -- "$* " }
compset() { : }
_files() { print -rn -- "_files $*" }
source $1
while IFS= read -r line; do
    words=(${(s: :)line}); [[ $line == *" " ]] && words+=("")
    CURRENT=$#words
    _rlcore
    print
done
"""
# Bash replaces only what follows "=", zsh the whole word.
CASES = [
    ("rlcore expo", "", {"export"}),
    ("rlcore train experiment=agent", "experiment=", {"agent_quickstart"}),
    (
        "rlcore train algorithm.loss=",
        "algorithm.loss=",
        {"ppo", "gspo", "gmpo", "sapo", "cispo", "reinforce"},
    ),
    ("rlcore export optimizer=", "optimizer=", {"true", "false"}),
    ("rlcore export opt", "", {"optimizer="}),
    ("rlcore sft learner.lr_fin", "", {"learner.lr_final="}),
    ("rlcore scale actor.fp8.", "", {"actor.fp8.count="}),
    ("rlcore plan measure r", "", {"runs="}),
    ("rlcore completion z", "", {"zsh"}),
    ("rlcore help impo", "", {"import-config"}),
]
pytestmark = pytest.mark.processes


def completed(shell, program, file, lines):
    command = [shell, *{"bash": ["--norc"], "zsh": ["-f"]}[shell], "-c", program, shell, str(file)]
    text = "\n".join(lines) + "\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.fixture(params=["bash", "zsh"])
def shell(request, tmp_path):
    """(name, function that completes lines)."""
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name}")
    file = tmp_path / f"completion.{name}"
    file.write_text(script(name))
    program = {"bash": BASH, "zsh": ZSH}[name]
    return name, lambda *lines: completed(name, program, file, lines)


def test_words_are_completed_in_the_shell(shell):
    name, complete = shell
    shown = complete(*(line for line, _, _ in CASES))
    for (line, key, wanted), answer in zip(CASES, shown):
        found = set(answer.split())
        if name == "zsh":  # which chooses among the candidates by itself
            assert {key + value for value in wanted} <= found, line
        else:
            assert found == wanted, line


def test_every_verb_key_and_option_is_a_candidate(shell):
    _, complete = shell
    verbs, train, options, *own = complete(
        "rlcore ",
        "rlcore train ",
        "rlcore train experiment=",
        *(f"rlcore {verb} " for verb in VERBS if VERBS[verb].operands is None),
    )
    assert {verb.split()[0] for verb in VERBS} | {"help"} == set(verbs.split())
    assert {f"{group}=" for group in groups()} | {"learner.lr=", "dry_run="} <= set(train.split())
    assert {o.removeprefix("experiment=") for o in options.split()} == set(groups()["experiment"])
    for verb, answer in zip((v for v in VERBS.values() if v.operands is None), own):
        keys = {f"{key.name}=" for key in verb.keys if "LABEL" not in key.name}
        assert keys <= set(answer.split()), verb.name


def test_paths_are_completed_where_a_key_names_one(shell, tmp_path, monkeypatch):
    name, complete = shell
    (tmp_path / "some_folder").mkdir()
    (tmp_path / "some_file").touch()
    monkeypatch.chdir(tmp_path)
    folder, file, operand = complete(
        "rlcore export out=some", "rlcore report out=some", "rlcore compare some"
    )
    if name == "zsh":
        assert [line.split() for line in (folder, file, operand)] == [
            ["_files", "-/"],
            ["_files"],
            ["_files", "-/"],
        ]
    else:
        assert folder == operand == "some_folder/"
        assert set(file.split()) == {"some_file", "some_folder"}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_installing_twice_leaves_one_line_in_the_start_file(shell, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    start = tmp_path / f".{shell}rc"
    start.write_text("alias x=y")  # without an end of line
    for _ in range(2):
        assert main(["completion", shell, "install=true"]) == 0
    assert str(start) in capsys.readouterr().out
    first, line = start.read_text().splitlines()
    assert first == "alias x=y" and line.count("completion") == 2
    if shell == "bash":
        found = subprocess.run(
            ["bash", "--rcfile", str(start), "-ic", "complete -p rlcore"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "-F _rlcore rlcore" in found.stdout, found.stderr
