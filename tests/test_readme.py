"""Commands, options, make targets and files named in the documents are accepted or exist."""

import json
import re
import shlex

import psutil
import pytest
from run_documented import ROOT, TAGS, Block, blocks, pages, run
from timing import wait_for_end

from rlcore.commands.sweep import jobs
from rlcore.config.compose import load
from rlcore.config.groups import setting_names, three_words
from rlcore.config.help_settings import of_verb
from rlcore.config.verbs import VERBS, parse

DOCUMENTS = pages()
FILES = {  # what pages of docs/ have their reader write
    "graders.py": "",
    "tasks.py": "class Reverse: pass",
    "corrections.py": "from rlcore.corrections.tis import TisSpec\n\n\n"
    "class PowerSpec(TisSpec):\n    power: float = 1.0",
    "train.jsonl": "",
}
PLACES = {
    "NAME": "quickstart",
    "key=value": "seed=1",
    "config_dir=imported": "seed=2",
    "experiment=verl": "seed=3",
    "HOST:PORT": "head:6379",
    "NAMES": "actor_killed",
}
NEEDS = {  # further options that one option requires
    "actor=draft": ["actor.draft.draft_path=folder"],
    "correction=[tis,opsm]": ["correction.opsm.delta=0.1"],
    "correction.opsm.delta=0.1": ["correction=opsm"],
    "correction.dvp.zero=trajectory": ["correction=[dvp,mis]"],
    "environment=endpoint": ["model=smollm2"],
    "algorithm.turn_share=0.5": ["environment=task"],
    "algorithm.turn_discount=0.9": ["environment=task", "algorithm.turn_share=0.5"],
    "correction=[dppo]": ["algorithm=dppo"],
    "correction=[rapid]": ["algorithm=rapid"],
    "algorithm.whitening=tokens": ["algorithm=reinforce_pp"],
    "learner.distill.lora.publish=adapter": ["actor=sparse"],
    "learner.distill={}": ["actor=sparse"],
    "learner.sequence_parallel=4": ["learner.ranks=4"],
    "cluster=ray": ["cluster.address=head:6379"],
    "algorithm.train_on_best_by=acceptance": ["algorithm.train_on_best=4"],
    "algorithm.train_on_best=8": ["rollout.samples_per_prompt=12"],
    "task.digits.weight=3": ["task=[digits,arithmetic]"],
    "task=lean": [
        "task.args.train_path=train.jsonl",
        "task.rewards.proof.lean.url=http://host:8000",
    ],
    "task=metamath_file": ["task.args.train_path=theorems.mm"],
    "task=file": ["task.args.train_path=train.jsonl", "task.args.grader=mine:grade"],
}


def text(name):
    return (ROOT / name).read_text()


def commands(name):
    """The words of every command in a bash block."""
    return [shlex.split(line) for block in blocks(name) for line in block.lines()]


def inline(name):
    """Words in backticks, outside blocks; "a|b" in a value means one of them."""
    prose = re.sub(r"```.*?```", "", text(name), flags=re.DOTALL).replace(r"\|", "|")
    for code in re.findall(r"`([^`\n]+)`", prose):
        yield from code.split()


def concrete(word):
    key, _equals, value = word.partition("=")
    if "|" in value:
        return concrete(f"{key}={value.split('|')[0]}")
    for place, real in PLACES.items():
        word = word.replace(place, real)
    return word


def test_every_bash_block_says_whether_it_is_run():
    for name in pages():
        found = blocks(name)
        fences = re.findall(r"^ *(?:```|~~~) *(?:ba)?sh\b", text(name), re.MULTILINE)
        assert len(found) == len(fences)
        for block in found:
            assert block.tag in TAGS, f"{name}: no tag, one of {', '.join(TAGS)}:\n{block.text}"
        assert not re.search(r"^    (rlcore|make|python) ", text(name), re.MULTILINE), (
            f"{name}: commands stand in bash blocks"
        )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_of_the_documents_are_accepted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, content in FILES.items():
        (tmp_path / file).write_text(content)
    for words in commands(name):
        if words[0] != "rlcore":
            continue
        rest = [concrete(w) for w in words[1:] if w not in ("...", "[DIR", "...]")]
        if rest[0] == "help":
            assert all(verb in VERBS for verb in rest[1:])
            continue
        if "--help" in rest:
            assert of_verb(VERBS[rest[0]], rest[rest.index("--help") + 1 :])
            continue
        given = parse(rest, setting_names())
        if given.verb.name == "sweep":
            assert len(jobs(given.settings)) > 1
        elif given.verb.settings and (given.settings or given.verb.name != "doctor"):
            own = [] if given.setting("run_dir") else ["run_dir=DIR"]
            settings = three_words(given.settings, given.own, None) or given.settings
            assert load([*settings, *own]).schedule.steps > 0, words


def test_options_named_where_choices_are_listed_are_accepted():
    seen = 0
    for word in [*inline("README.md"), *inline("docs/using.md")]:
        key, equals, value = word.rstrip(",;").partition("=")
        if (
            not equals
            or key in ("out", "run_dir", "resume", "k")
            or not key[0].islower()
            or not value
        ):
            continue
        for choice in value.split("|"):
            one = f"{key}={choice}".replace(".*.", ".bf16.")
            if key.startswith(("actor.", "task.args", "cluster.address")):
                continue  # valid only with their group, as in the commands
            assert load(["run_dir=DIR", one, *NEEDS.get(one, [])]), word
            seen += 1
    assert seen > 25


@pytest.mark.parametrize("name", DOCUMENTS)
def test_targets_and_files_named_in_the_documents_exist(name):
    targets = re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE)
    named = re.findall(r"`make ([a-z-]+)", text(name))
    named += [words[1] for words in commands(name) if words[0] == "make"]
    assert set(named) <= set(targets)
    for script in re.findall(
        r"\b((?:benchmarks|docs|tests|launchers|configs|rlcore)/[\w/.-]*\w\.\w+)", text(name)
    ):
        assert "NAME" in script or (ROOT / script).exists(), script


@pytest.mark.processes
def test_a_run_block_fails_with_its_first_failing_command_and_leaves_no_process(tmp_path):
    text = "sleep 1000000 &\necho $! > pid\npython -c 'raise SystemExit(3)'\ntouch later\n"
    assert run(Block("README.md", "run", text), tmp_path) == 3
    pid = int((tmp_path / "pid").read_text())
    wait_for_end([p for p in psutil.process_iter() if p.pid == pid], 10)
    assert not (tmp_path / "later").exists()


def test_the_readme_can_be_read_at_once():
    assert len(text("README.md").splitlines()) <= 110


def test_the_picture_is_of_the_present_quickstart(monkeypatch):
    """Else: `python docs/quickstart.py [RUN_DIR]`, with a new run where the experiment changed."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import quickstart

    kept = json.loads(quickstart.DATA.read_text())
    assert kept["experiment"] == quickstart.digest(quickstart.EXPERIMENT)
    assert quickstart.digest(*quickstart.DRAWN) in quickstart.PICTURE.read_text()
    ends = [f"{kept['rows'][at]['eval/digits/greedy']:.3g}" for at in (0, -1)]
    line = next(line for line in text("README.md").split("\n") if "digits/greedy" in line)
    assert [word.strip() for word in line.split("│")[1:]] == ends


def test_agents_md_names_targets_and_folders_that_there_are():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([a-z-]+)`", text))
    assert targets and targets <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    places = re.findall(r"`((?:rlcore|configs|docs|tests|benchmarks|launchers)/[\w./]*)`", text)
    assert len(places) > 15 and [p for p in places if not (ROOT / p).exists()] == []
