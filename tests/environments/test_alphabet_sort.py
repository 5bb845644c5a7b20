"""alphabet_sort over several turns: what is asked, rewarded and graded."""

from dataclasses import replace

import pytest
from environment_fakes import ScriptedSampler, ask

from rlcore.environments.games import AlphabetSortGame
from rlcore.environments.play import Play
from rlcore.environments.protocol import Action
from rlcore.environments.specs import EnvironmentJob, EnvironmentSpec
from rlcore.errors import UserError
from rlcore.models.fresh import build_char_tokenizer
from rlcore.tasks import make_task
from rlcore.tasks.specs import EvalTaskSpec


@pytest.fixture
def begun():
    task = make_task("alphabet_sort", {"style": "letters", "turns": 2, "per_turn": 2})
    environment = AlphabetSortGame(task, power=2.0)
    item = task.item("train", 0)
    environment.reset(item, 0)
    return environment, [n for names in item.meta["lists"] for n in names]


def test_every_turn_adds_names_and_is_rewarded_for_the_whole_list(begun):
    environment, names = begun
    first = environment.step(Action("".join(sorted(names[:2]))))
    assert first.reward == 0.5 and not first.over
    assert first.messages[0]["content"] == f"+{''.join(names[2:])}="
    assert environment.worked() == "".join(sorted(names))
    last = environment.step(Action(environment.worked()))
    assert last.over and last.reward == 0.5
    assert environment.grade().reward == 0.0 and environment.grade().parts["correct"] == 1.0


def test_a_list_that_misses_names_is_worth_less_than_its_likeness(begun):
    environment, names = begun
    assert environment.step(Action("")).reward == 0.0
    half = "".join(sorted(names)[:2])
    # two of four and two: a ratio of 4/6
    assert environment.step(Action(half)).reward == pytest.approx((4 / 6) ** 2 / 2)
    assert environment.grade().parts == {"correct": 0.0, "right_lists": 0.0}


@pytest.mark.processes
def test_an_episode_has_the_rewards_of_its_turns():
    task = EvalTaskSpec(name="alphabet_sort", args={"style": "letters", "turns": 2, "per_turn": 2})
    item = make_task(task.name, task.args).item("train", 0)
    first, second = item.meta["lists"]
    tokenizer = build_char_tokenizer(make_task(task.name, task.args).alphabet())
    turns = [[*tokenizer.encode("".join(said)), 1] for said in (sorted(first), sorted(second))]
    spec = EnvironmentSpec(name="alphabet_sort", args={"power": 1.0})
    job = EnvironmentJob(spec, task, "alphabet_sort", max_len=64)
    playing = Play(job, tokenizer, ("bf16-0", "bf16"))
    try:
        playing.add([replace(r, prompt_id=item.prompt_id) for r in ask(1)])
        (played,) = ScriptedSampler(playing, turns).run()
    finally:
        playing.close()
    # both letters of the first list are right; of the second, as many as follow in order
    likeness = make_task(task.name, task.args).likeness("".join(sorted(second)), first + second)
    assert played.score.turn_rewards == (0.5, likeness / 2)
    assert played.score.reward == 0.5 + likeness / 2
    assert played.score.parts["correct"] == 0.0 and played.score.parts["right_lists"] == 1.0
    (record,) = played.parts
    shown = tokenizer.decode(record.token_ids[~record.sampled].tolist())
    assert shown == f"{''.join(first)}=+{''.join(second)}="


def test_other_tasks_and_powers_that_reward_nothing_are_refused(begun):
    with pytest.raises(UserError, match="set task=alphabet_sort"):
        AlphabetSortGame(make_task("digits", {}))
    with pytest.raises(ValueError, match="power must be above 0"):
        AlphabetSortGame(make_task("alphabet_sort", {}), power=0)
