"""Procedural tasks: splits that cannot overlap, the same problem everywhere, correct graders."""

import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing import deadline

from rlcore.extras.metamath_checker import SET_MM
from rlcore.registry import resolve
from rlcore.tasks import TASKS, make_task, parse_prompt_id
from rlcore.tasks.countdown import evaluate
from rlcore.tasks.procedural import Permutation, ProblemSpace, ProceduralTask
from rlcore.tasks.sudoku4x4 import reduced_grids, unique_puzzles
from rlcore.types import Item

CASES = [
    ("digits", {}),
    ("digits", {"op": "reverse", "min_digits": 1, "max_digits": 3}),
    ("arithmetic", {"ops": "+-*", "min_digits": 1, "max_digits": 3}),
    ("countdown", {}),
    ("countdown", {"style": "short", "max_number": 9, "max_target": 99, "use_all": True}),
    ("sudoku4x4", {}),
    ("sudoku4x4", {"style": "short", "min_empty": 1, "max_empty": 6}),
    ("digits", {"op": "copy", "min_digits": 96, "max_digits": 96, "credit": "digits"}),
    ("arithmetic", {"question": "What is {a} {op} {b}?"}),
    ("progression", {}),
]
FIRST_HELDOUT = [
    ("75025=", "02557"),
    ("339+89=", "428"),
    ("1,9,1=10:", "1*(1+9)"),
    ("2.43/4321/1234/341.=", "2143/4321/1234/3412"),
]
few = settings(max_examples=30, deadline=None)


@given(size=st.integers(1, 3000), key=st.integers(0, 100))
@few
def test_a_permutation_is_a_bijection(size, key):
    permutation = Permutation(size, key)
    assert sorted(permutation(i) for i in range(size)) == list(range(size))


@given(counts=st.lists(st.integers(2, 60), min_size=1, max_size=5), seed=st.integers(0, 9))
@few
def test_the_two_sides_are_a_partition_of_the_space_and_the_same_for_every_seed(counts, seed):
    strata = {str(i): count for i, count in enumerate(counts)}
    space, other = ProblemSpace("t", strata, seed), ProblemSpace("t", strata, seed + 1)
    everything = {(i, rank) for i, count in enumerate(counts) for rank in range(count)}
    sides = {}
    for split in ("train", "heldout"):
        located = [space.locate(split, i) for i in range(space.size(split))]
        assert len(set(located)) == len(located)
        assert {other.locate(split, i) for i in range(other.size(split))} == set(located)
        assert space.locate(split, space.size(split)) == located[0]
        sides[split] = set(located)
    assert not sides["train"] & sides["heldout"]
    assert sides["train"] | sides["heldout"] == everything


def test_a_problem_is_on_the_same_side_whatever_the_range_of_difficulty():
    narrow = make_task("digits", {"min_digits": 3, "max_digits": 3})
    wide = make_task("digits", {"min_digits": 2, "max_digits": 4, "seed": 5})
    held = {narrow.item("heldout", i).question for i in range(narrow.size("heldout"))}
    trained = {wide.item("train", i).question for i in range(3000)}
    assert len(held) == 90
    assert (
        sum(len(question) == 4 for question in trained) == 810
    )  # every three-digit number that is not held out
    assert not held & trained


@pytest.mark.parametrize(("name", "args"), CASES)
def test_items_are_disjoint_distinct_and_their_worked_answers_are_right(name, args):
    task = make_task(name, args)
    held = [task.item("heldout", i) for i in range(min(150, task.size("heldout")))]
    train = [task.item("train", i) for i in range(400)]
    assert task.size("train") is None
    assert len({item.question for item in held}) == len(held)
    assert not {item.question for item in held} & {item.question for item in train}
    assert parse_prompt_id(train[7].prompt_id) == (name, "train", 7)
    alphabet = task.alphabet()
    for item in held + train:
        worked = task.worked_answer(item)
        assert task.grade(item, worked).reward == 1.0
        assert task.grade(item, worked + "1").parts["correct"] == 0.0 or "<answer>" in worked
        assert task.grade(item, "").reward == 0.0
        assert alphabet is None or set(item.question + worked) <= set(alphabet)


def test_a_progression_rewards_each_token_by_the_digit_before_it():
    task = make_task("progression", {"length": 4})
    item = Item("progression/train/0", "7+3=", "0369")
    right = task.grade(item, "0369", tokens=list("0369"))
    assert right.token_rewards == (0.25,) * 4 and right.parts == {"correct": 1.0, "share": 1.0}
    # 5 is wrong after 0, and 8 is right after 5; what is beyond the length has no reward
    slip = task.grade(item, "058147", tokens=["05", "8", "1", "4", "7", ""])
    assert slip.token_rewards == (0.25, 0.25, 0.25, 0.0, 0.0, 0.0)
    assert slip.parts["correct"] == 0.0
    whole = task.grade(item, "03")
    assert whole.reward == 0.5 and not whole.token_rewards


# Settings with many difficulties, and the difficulty of an item: batches are compared by it.
DIFFICULTIES = {
    "digits": ({"min_digits": 64, "max_digits": 127}, lambda item: len(item.answer)),
    "arithmetic": (
        {"ops": "+-*", "min_digits": 1, "max_digits": 6},
        lambda item: len(item.question),
    ),
    "countdown": ({"min_numbers": 2, "max_numbers": 8}, lambda item: len(item.meta["numbers"])),
    "sudoku4x4": ({"min_empty": 1, "max_empty": 9}, lambda item: item.question.count(".")),
    "metamath": ({"min_steps": 1, "max_steps": 3}, lambda item: len(item.answer)),
    "alphabet_sort": ({}, lambda item: len(item.question)),
    "progression": ({}, lambda item: len(item.question)),
}


def test_every_procedural_task_has_its_batches_compared():
    classes = {name: resolve(TASKS, name, key="task.name") for name in TASKS}
    procedural = {name for name, cls in classes.items() if issubclass(cls, ProceduralTask)}
    assert procedural == set(DIFFICULTIES)


@pytest.mark.parametrize("name", DIFFICULTIES)
@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("batch", [8, 32])
def test_every_batch_is_a_mixture_of_all_difficulties(name, split, batch):
    # Not worse than independent draws; slices of 64 lengths are 5 standard deviations off.
    args, difficulty = DIFFICULTIES[name]
    if name == "metamath" and not SET_MM.is_file():
        pytest.skip(f"{SET_MM} is not installed")
    task = make_task(name, args)
    measured = np.array([difficulty(task.item(split, i)) for i in range(40 * 8)], float)
    means = measured.reshape(-1, batch).mean(axis=1)
    drawn = measured.std() / batch**0.5  # the standard deviation of independent draws' means
    assert means.std() <= 1.5 * drawn + 1e-9
    assert np.abs(means - measured.mean()).max() <= 3.5 * drawn + 1e-9


def test_the_mixture_follows_the_seed_and_goes_on_after_a_round():
    args = {"min_digits": 64, "max_digits": 127}
    lengths = {}
    for seed in (0, 1):
        task = make_task("digits", {**args, "seed": seed})
        lengths[seed] = [len(task.item("train", i).answer) for i in range(256)]
        for start in range(0, 256, 64):  # a round has every length once
            assert sorted(lengths[seed][start : start + 64]) == list(range(64, 128))
        assert lengths[seed][:64] != lengths[seed][64:128]
    assert lengths[0] != lengths[1]


@pytest.mark.parametrize(("name", "args"), CASES)
def test_the_seed_changes_the_order(name, args):
    first, second = make_task(name, args), make_task(name, {**args, "seed": 1})
    a = [first.item("train", i).question for i in range(20)]
    assert a != [second.item("train", i).question for i in range(20)]
    assert a == [make_task(name, args).item("train", i).question for i in range(20)]


@pytest.mark.processes
def test_items_are_the_same_in_another_process():
    code = "from rlcore.tasks import make_task\n" + "".join(
        f"print(make_task({name!r}, {args!r}).item('heldout', 5).question)\n"
        for name, args in CASES
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=deadline(60),
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )
    assert run.stdout.splitlines() == [
        make_task(name, args).item("heldout", 5).question for name, args in CASES
    ]


def test_problems_have_not_moved():
    # Runs are compared over months: a change of the order of problems must be deliberate.
    items = [
        make_task(name, {**args}).item("heldout", 0)
        for name, args in (CASES[0], CASES[2], CASES[4], CASES[6])
    ]
    assert [(item.question, item.answer) for item in items] == FIRST_HELDOUT


def test_digits_credit_is_the_share_of_digits_that_stand_right():
    task = make_task(
        "digits", {"op": "copy", "min_digits": 40, "max_digits": 40, "credit": "digits"}
    )
    item = task.item("train", 0)
    wrong = "".join("1" if d == "0" else "0" for d in item.answer)
    for right in (0, 13, 39):
        verdict = task.grade(item, item.answer[:right] + wrong[right:])
        assert verdict.reward == pytest.approx(right / 40) and verdict.parts == {"correct": 0.0}
    assert task.grade(item, item.answer[:10]).reward == pytest.approx(10 / 40)
    too_long = task.grade(item, item.answer + "00000")
    assert too_long.reward == pytest.approx(40 / 45) and too_long.parts == {"correct": 0.0}


def test_countdown_expressions():
    assert evaluate("(7-3)*4/2")[0] == 8
    assert evaluate("1/3*3")[0] == 1
    for refused in (
        "2**3",
        "7//2",
        "-3",
        "1/0",
        "0x10",
        "1_0",
        "f(1)",
        "1 2",
        "",
        "(" * 150 + "1",
        "1,2",
        "()",
    ):
        assert evaluate(refused) is None, refused


def test_countdown_grades_rules_and_format():
    task = make_task("countdown", {"format_reward": 0.1})
    item = task.item("train", 0)
    numbers, target = item.meta["numbers"], item.meta["target"]
    wrong = task.grade(item, f"I think <answer>{numbers[0]}+{numbers[1]}</answer>")
    assert wrong.parts == {"correct": 0.0, "format": 1.0} and wrong.reward == pytest.approx(0.1)
    twice = task.grade(
        item, f"<answer>{target}</answer> <answer>{'+'.join([str(numbers[0])] * 9)}</answer>"
    )
    assert twice.reward == 0.0
    assert task.grade(item, item.answer).reward == 0.0  # no tags
    assert task.grade(item, f"so <answer>{item.answer} = {target}</answer>").reward == 1.0
    assert task.grade(item, f"so <answer>{item.answer} = {target + 1}</answer>").reward == 0.0


def test_every_sudoku_has_exactly_one_solution():
    labels = [str.maketrans("1234", "".join(p)) for p in permutations("1234")]
    grids = {grid.translate(p) for grid in reduced_grids() for p in labels}
    assert len(grids) == 288
    for empty in (1, 8, 12):
        for grid, clues in unique_puzzles(empty)[:: max(1, len(unique_puzzles(empty)) // 50)]:
            cells = [i for i in range(16) if clues >> i & 1]
            assert len(cells) == 16 - empty
            assert sum(all(g[i] == reduced_grids()[grid][i] for i in cells) for g in grids) == 1


def test_sudoku_grades_cells_and_format():
    task = make_task("sudoku4x4", {"style": "short", "format_reward": 0.2})
    item = task.item("train", 0)
    assert task.grade(item, item.answer).reward == 1.0
    empty = item.meta["puzzle"].index(".")
    other = "1" if item.answer[empty] != "1" else "2"
    slip = item.answer[:empty] + other + item.answer[empty + 1 :]
    grade = task.grade(item, slip)
    assert grade.reward == pytest.approx(0.2) and grade.parts["correct"] == 0.0
    count = item.meta["puzzle"].count(".")
    assert grade.parts["cells"] == pytest.approx((count - 1) / count)
    assert task.grade(item, item.answer.replace("/", "")).reward == 0.0


def test_arithmetic_in_words_asks_for_the_same_sums():
    short = make_task("arithmetic", {"ops": "-"})
    words = make_task("arithmetic", {"ops": "-", "question": "Take {b} from {a} ({a} {op} {b})."})
    for index in range(20):
        a, b = short.item("train", index).question.rstrip("=").split("-")
        asked = words.item("train", index)
        assert asked.question == f"Take {b} from {a} ({a} - {b})."
        assert asked.answer == short.item("train", index).answer
        assert set(asked.question) <= set(words.alphabet())


def test_arithmetic_pays_a_wrong_number_for_its_right_digits_and_words_nothing():
    task = make_task("arithmetic", {"credit": "digits", "min_digits": 2})
    item = Item("arithmetic/train/0", "47+85=", "132")
    for response, reward in (
        (" 132 ", 1.0),
        ("142", 0.1 + 0.4 * 2 / 3),
        ("32", 0.1 + 0.4 * 2 / 3),
        ("7", 0.1),
        ("132.", 0.0),
        ("47+85=132", 0.0),
        ("", 0.0),
    ):
        grade = task.grade(item, response)
        assert grade.reward == pytest.approx(reward)
        assert grade.parts == {"correct": float(reward == 1.0)}


def test_free_tokens_after_the_digits_are_not_judged_and_random_in_worked_answers():
    task = make_task("digits", {"min_digits": 10, "max_digits": 10, "free": 16})
    item = task.item("train", 3)
    worked = task.worked_answer(item)
    assert worked == task.worked_answer(item) and worked.startswith(item.answer)
    assert len(worked) == 26 and len(set(worked[10:])) > 3
    assert worked[10:] != task.worked_answer(task.item("train", 4))[10:]
    for response in (worked, item.answer, item.answer + "=="):
        assert task.grade(item, response).reward == 1.0
    for response in ("x" + worked, item.answer[:-1], ""):
        assert task.grade(item, response).reward == 0.0
    assert make_task("digits", {}).grade(item, item.answer + "1").reward == 0.0
