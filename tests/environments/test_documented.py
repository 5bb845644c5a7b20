"""The environments that docs/environments.md shows work as they stand there."""

import re
from pathlib import Path

import pytest
from environment_fakes import ScriptedSampler, ask

from rlcore.agents.renderers import worked_episode
from rlcore.environments import environment_maker
from rlcore.environments.play import Play
from rlcore.environments.protocol import Action, ToolCall
from rlcore.environments.specs import EnvironmentJob, EnvironmentSpec
from rlcore.errors import UserError
from rlcore.models.fresh import build_char_tokenizer
from rlcore.tasks import make_task
from rlcore.tasks.specs import EvalTaskSpec

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
TASK = EvalTaskSpec(name="digits", args={"min_digits": 1, "max_digits": 1})
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def test_the_first_example_has_twenty_lines_of_code():
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 20


def test_the_example_with_a_tool_plays(tmp_path):
    (tmp_path / "mine.py").write_text(EXAMPLES[1])
    task = make_task("arithmetic", {})
    item = task.item("train", 0)
    spec = EnvironmentSpec(name=f"{tmp_path}/mine.py:Calculator")
    environment = environment_maker(spec, task)()
    opening = environment.reset(item, 0)
    assert [t["function"]["name"] for t in opening.tools] == ["add"]
    calls = (ToolCall("add", {"a": 2, "b": 3}), ToolCall("add", {"a": 2}))
    right, wrong = environment.step(Action("", calls)).messages
    assert right["content"] == "5" and wrong["content"].startswith("Error: TypeError")
    assert environment.step(Action(item.answer)).over and environment.grade() == 1.0


@pytest.mark.processes
def test_the_example_plays(tmp_path):
    (tmp_path / "mine.py").write_text(EXAMPLES[0])
    spec = EnvironmentSpec(name=f"{tmp_path}/mine.py:Countdown", max_turns=20)
    tokenizer = build_char_tokenizer("0123456789")
    play = Play(EnvironmentJob(spec, TASK, "digits", max_len=500), tokenizer, ("bf16-0", "bf16"))
    number = int(make_task("digits", TASK.args).item("train", 0).answer)
    turns = [[*tokenizer.encode(str(n)), 1] for n in range(number - 1, -1, -1)]
    try:
        play.add(ask(1))
        (played,) = ScriptedSampler(play, turns).run()
    finally:
        play.close()
    assert played.score.reward == 1.0 and played.score.parts["turns"] == number


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "higher"}, "environment.name=higher"),
        ({"name": "higher_lower", "args": {"gueses": 3}}, "environment.args={'gueses': 3}"),
        ({"name": "higher_lower", "args": {"guesses": 0}}, "guesses must be at least 1"),
        ({"name": "rlcore.types:Item"}, "it lacks reset(self, item: Item, seed: int) -> Opening"),
    ],
)
def test_a_wrong_environment_is_refused_in_a_sentence(settings, words):
    with pytest.raises(UserError, match=re.escape(words)):
        environment_maker(EnvironmentSpec(**settings), make_task("higher_lower", {}))


@pytest.mark.parametrize("name", ["attempts", "higher_lower", "task"])
def test_worked_episodes_mark_what_a_model_would_have_sampled(name):
    task = make_task("higher_lower", {"digits": 2})
    spec = EnvironmentSpec(name=name, args={"guesses": 3} if name == "higher_lower" else {})
    job = EnvironmentJob(spec, EvalTaskSpec(name="higher_lower"), "higher_lower", max_len=99)
    tokenizer = build_char_tokenizer(task.alphabet())
    for index in range(20):
        item = task.item("train", index)
        ids, sampled = worked_episode(job, environment_maker(spec, task)(), item, tokenizer)
        texts = tokenizer.decode(ids[sampled]).split("<eos>")[:-1]
        assert all(len(t) == 2 and t.isdecimal() for t in texts) and len(texts) <= 3
        assert set(tokenizer.decode(ids[~sampled])) <= set("?<>")
        if name != "higher_lower":
            assert texts == [item.answer]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ValueError('no')", "raised ValueError: no in a worked episode of"),
        ("return None", "has no worked turns to warm up on"),
    ],
)
def test_an_environment_that_cannot_be_worked_is_refused_in_a_sentence(tmp_path, code, words):
    body = "from rlcore.environments.games import HigherLower\n\nclass Game(HigherLower):\n"
    (tmp_path / "game.py").write_text(f"{body}    def worked(self):\n        {code}\n")
    task = make_task("higher_lower", {})
    spec = EnvironmentSpec(name=f"{tmp_path}/game.py:Game")
    job = EnvironmentJob(spec, EvalTaskSpec(name="higher_lower"), "higher_lower", max_len=99)
    with pytest.raises(UserError, match=words):
        worked_episode(
            job,
            environment_maker(spec, task)(),
            task.item("train", 0),
            build_char_tokenizer(task.alphabet()),
        )


def test_worked_guesses_may_heed_the_hints():
    task = make_task("higher_lower", {"digits": 1})
    spec = EnvironmentSpec(name="higher_lower", args={"guesses": 10, "hinted": 1.0}, max_turns=10)
    job = EnvironmentJob(spec, EvalTaskSpec(name="higher_lower"), "higher_lower", max_len=99)
    tokenizer = build_char_tokenizer(task.alphabet())
    for index in range(20):
        item = task.item("train", index)
        ids, sampled = worked_episode(job, environment_maker(spec, task)(), item, tokenizer)
        guesses = tokenizer.decode(ids[sampled]).split("<eos>")[:-1]
        assert guesses[-1] == item.answer and len(set(guesses)) == len(guesses)
