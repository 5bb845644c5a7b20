"""Help and the parser of the command line, both from the table of verbs."""

import re

import pytest

from rlcore.cli import HANDLERS, main
from rlcore.config.groups import groups, setting_names
from rlcore.config.help import overview
from rlcore.config.help_settings import of_verb
from rlcore.config.verbs import VERBS, parse
from rlcore.errors import UserError


def help_of(verb, *topics):
    return of_verb(VERBS[verb], topics)


def test_every_verb_is_listed_handled_and_explained():
    listed = overview()
    assert set(HANDLERS) == set(VERBS)
    for verb in VERBS.values():
        assert re.search(rf"^  {verb.name} +\S", listed, re.MULTILINE)
        shown = of_verb(verb)
        for key in verb.keys:
            assert f"  {key.name}=" in shown and key.meaning.split()[0] in shown


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "train"])
def test_the_help_of_a_verb_has_no_keys_of_others(verb):
    shown = help_of(verb)
    assert len(shown.splitlines()) < 30
    keys = set(re.findall(r"^  (\w+)=", shown, re.MULTILINE))
    assert keys <= {key.name for key in VERBS[verb].keys}


def test_the_help_of_train_fits_two_screens_and_has_every_name():
    shown = help_of("train")
    lines = shown.splitlines()
    assert len(lines) <= 112 and max(map(len, lines)) <= 100
    words = set(re.findall(r"[\w/]+", shown))
    assert {option for options in groups().values() for option in options} <= words
    assert {name for key in setting_names() for name in key.split(".")[:2]} <= words | {"LABEL"}
    assert "rlcore train --help algorithm" in shown


def test_a_group_is_explained_with_options_defaults_units_and_meanings():
    shown = help_of("train", "algorithm")
    assert "GSPO: one length-normalised ratio per sequence" in shown
    losses = "ppo|gspo|gmpo|sapo|cispo|reinforce|file.py:Class"
    assert f'algorithm.loss = "ppo"\n      {losses}: policy loss' in shown
    assert "learner.lr" not in shown
    assert "deadline of a publish [s]" in help_of("sft", "schedule")
    assert help_of("train", "learner.lr").count("\n  learner.") == 1
    assert "actor.LABEL.count" in help_of("train", "actor.bf16.count")
    assert "correction.jackpot.mode" in help_of("train", "correction.jackpot")
    assert "run_dir (required)" in help_of("train", "run")
    every = help_of("train", "all")
    assert all(f"  {key} " in every for key in setting_names() if "." in key)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tran"], "rlcore tran is not a command: perhaps train is meant; the commands are train"),
        (["train", "dry_ru=true"], "perhaps dry_run is meant"),
        (["train", "lr=1"], "perhaps learner.lr is meant"),
        (["export", "otu=x"], "otu=x is not a key of rlcore export: perhaps out is meant"),
        (["compare", "a", "b", "jsn=true"], "not a key of rlcore compare: perhaps json is meant"),
        (["scale", "actor.bf16.conut=2"], "perhaps actor.LABEL.count is meant"),
        (["scale", "actor.bf16.count=two"], "actor.bf16.count=two is not accepted: give a whole"),
        (["train", "dry_run=yes"], "dry_run=yes is not accepted; choose one of: true, false"),
        (["export", "out=x", "gpu=h100"], "gpu=h100 is not a key of rlcore export: it is a key of"),
        (["train", "rates=x"], "rates=x is used with dry_run=true alone"),
        (["train", "--dry_run"], "its words are key=value, such as dry_run=VALUE"),
        (["train", "quickstart"], "quickstart is not accepted by rlcore train"),
        (["plan", "gpu=h10"], "perhaps h100 is meant"),
        (["export", "run_dir=x"], "out= is missing: rlcore export needs the folder to write"),
        (["compare"], "rlcore compare takes DIR, and 0 were given"),
        (["completion", "fish"], "SHELL=fish is not accepted"),
        (["train", "--help", "algoritm"], "perhaps algorithm or"),
        (["compare", "--help", "learner"], "rlcore compare --help learner is not a topic"),
        (["plan", "measure", "runs=x"], "out= is missing: rlcore plan measure needs"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_one_sentence_with_the_nearest_choices(words, said, capsys):
    assert main(words) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("rlcore: ") and sentence.endswith(".") and said in sentence


def test_words_are_told_apart():
    words = ["train", "dry_run=false", "gpu=h100", "dry_run=true", "task=[a,b]", "~x", "+y.z=1"]
    given = parse(words, ["task", "y.z"])
    assert given.own == {"dry_run": "true", "gpu": "h100"} and given.flag("dry_run")
    assert given.settings == ("task=[a,b]", "~x", "+y.z=1")
    given = parse(["report", "a", "run_dir=b", "out=c"])
    assert given.operands == ("a", "b") and given.text("out") == "c"
    assert parse(["doctor"]).flag("start") and not parse(["doctor", "start=false"]).flag("start")
    with pytest.raises(UserError, match="learner"):
        parse(["compare", "a", "b", "learner.lr=1"], setting_names())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["help"], "import-config"),
        (["--help"], "import-config"),
        (["help", "plan", "measure"], "rlcore plan measure runs=DIR"),
        (["help", "train", "learner.lora"], "learner.lora.rank"),
        (["export", "run_dir=x", "-h"], "optimizer=true|false"),
        (["--version"], "rlcore "),
    ],
    ids=" ".join,
)
def test_help_is_asked_for_in_the_usual_ways(words, said, capsys):
    assert main(words) == 0
    assert said in capsys.readouterr().out
