"""Small theorems in Metamath: the program metamath judges for real, where Debian's packages
metamath and metamath-databases are installed."""

import random
import shutil
import stat

import pytest
from timing import deadline

from rlcore.errors import UserError
from rlcore.extras.metamath import Proof, ProofJudge, read_proof
from rlcore.extras.metamath_checker import (
    GOAL,
    SET_MM,
    Assertion,
    Checker,
    CheckerError,
    Database,
    Hypothesis,
    UnknownSymbol,
)
from rlcore.extras.metamath_statements import LABELS, SCHEMAS, assertion, infix, theorems
from rlcore.tasks import make_task

NEEDED = pytest.mark.skipif(
    shutil.which("metamath") is None or not SET_MM.is_file(),
    reason="needs Debian's packages metamath and metamath-databases",
)


@pytest.fixture(scope="module")
def task():
    return make_task("metamath", {})


@NEEDED
def test_worked_proofs_of_every_form_are_verified(task):
    assert task.timeout_s == 5.0  # which is compared with the deadline of grading
    seen = set()
    for schema in SCHEMAS:
        says, proof = random.Random(schema.name).choice(theorems(1, 3)[schema.name])
        item = task.item("train", 0).__class__("", f"{says}=", proof)
        assert task.grade(item, f" {proof}\n").parts == {"correct": 1.0, "whole": 1.0}, schema
        seen.add(says)
    assert len(seen) == len(SCHEMAS)


@NEEDED
def test_another_proof_of_the_theorem_counts_as_well(task):
    item = task.item("train", 0).__class__("", ":pp>=", "pi")
    # id from ax-1 and ax-2, by two ax-mp
    longer = "ppp>>pp>pp1ppp>p>>ppp>>pp>>ppp>1ppp>p2mm"
    assert task.grade(item, longer).reward == 1.0 and task.grade(item, "pi").reward == 1.0


@NEEDED
@pytest.mark.parametrize(
    "answer",
    ["", "p", "qi", "i", "ppi", "pii", "px", "p?", "wph id", "pqn", "pp>i", "p i", "pi pi", "p$"],
)
def test_what_is_no_proof_of_the_theorem_is_worth_nothing(task, answer):
    item = task.item("train", 0).__class__("", ":pp>=", "pi")
    assert task.grade(item, answer).reward == 0.0


@NEEDED
def test_a_proof_of_one_theorem_is_none_of_another(task):
    items = [task.item("heldout", i) for i in range(17)]
    for item, other in zip(items, items[1:] + items[:1]):
        assert task.grade(item, item.answer).reward == 1.0
        assert task.grade(item, other.answer).reward == 0.0


def test_the_splits_share_no_theorem_and_no_form_repeats_one():
    found = [says for own in theorems(1, 3).values() for says, _ in own]
    assert len(set(found)) == len(found) > 20_000


@NEEDED
def test_items_are_the_same_everywhere_and_of_the_steps_asked_for(task):
    again = make_task("metamath", {})
    drawn = [task.item("train", i) for i in range(300)]
    assert drawn == [again.item("train", i) for i in range(300)]
    held = {task.item("heldout", i).question for i in range(task.size("heldout"))}
    assert not held & {item.question for item in drawn}
    assert {c for item in drawn for c in item.question + item.answer} <= set(task.alphabet())
    easy = make_task("metamath", {"max_steps": 1, "size": 0, "variables": 2})
    rules = set("m123iascnk")
    assert all(
        sum(letter in rules for letter in easy.item("train", i).answer) == 1 for i in range(40)
    )


def test_theorems_are_shown_to_metamath_as_set_mm_writes_them():
    assert infix("pq>r->") == "( ( ph -> ps ) -> -. ch )"
    found = assertion("p,pq>:q")
    assert [h.text for h in found.hypotheses] == ["|- ph", "|- ( ph -> ps )"]
    assert (found.label, found.text) == (GOAL, "|- ps")
    assert {LABELS["x"], LABELS["y"]} == {h.label for h in found.hypotheses}


@pytest.mark.parametrize(
    ("text", "labels", "normal"),
    [
        ("wph id", ("wph", "id"), True),
        ("$= wph\n id $.", ("wph", "id"), True),
        ("( id ) AB CZ", ("id",), False),
    ],
)
def test_proofs_are_read_with_and_without_their_keywords(text, labels, normal):
    proof = read_proof(text)
    assert (proof.labels, proof.normal) == (labels, normal)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "?",
        "wph ? ax-1",
        "( id ) A?B",
        "( id A",
        "( id )",
        "$[ x $]",
        "a $. b $a |- ph",
        "id $( x",
    ],
)
def test_what_holds_more_than_labels_is_no_proof(text):
    assert read_proof(text) is None


DISJOINT = """
$( constants $( $)
$c wff |- -> ( ) A. set $.
$v ph x y $.
wph $f wff ph $.  vx $f set x $.  vy $f set y $.
wi $a wff ( ph -> ph ) $.
wal $a wff A. x ph $.
${ $d x ph $.  gen.1 $e |- ph $.  gen $a |- A. x ph $. $}
true $a |- ( ph -> ph ) $.
${ $d x ph $.  drop.1 $e |- A. x ph $.  drop $a |- ph $. $}
later $a |- A. x A. y ph $.
"""


@NEEDED
def test_disjoint_conditions_are_those_of_database_and_theorem():
    checker = Checker("metamath", timeout_s=deadline(5), memory_mib=256)
    judge = ProofJudge(Database(DISJOINT), checker)
    hypothesis = Hypothesis("h", "|- ph")
    free = Assertion("t", "|- A. x ph", (hypothesis,))
    bound = Assertion("t", "|- A. x ph", (hypothesis,), (("x", "ph"),))
    proof = read_proof("wph vx h gen")
    assert not judge.judge(free, proof).proved
    assert "disjoint" in judge.judge(free, proof).why.lower()
    assert judge.judge(bound, proof).proved
    # x is no part of this theorem: a dummy variable, disjoint from the others without being said
    dummy = read_proof("wph vx wph vx h gen drop")
    assert judge.judge(Assertion("t", "|- ph", (hypothesis,)), dummy).proved


@NEEDED
def test_labels_that_may_not_be_used_and_unknown_ones_are_no_proof():
    database = Database(DISJOINT)
    checker = Checker("metamath", timeout_s=deadline(5), memory_mib=256)
    theorem = Assertion("t", "|- A. x A. y ph")
    proof = read_proof("wph vx vy later")
    assert ProofJudge(database, checker).judge(theorem, proof).proved
    before = ProofJudge(database, checker, lambda theorem, used: used.label != "later")
    assert before.judge(theorem, proof) is None
    assert ProofJudge(database, checker).judge(theorem, read_proof("wph vx vy cheat")) is None
    assert not ProofJudge(database, checker).judge(theorem, read_proof("( later ) ABC")).proved
    with pytest.raises(UnknownSymbol, match=r"uses \+"):
        database.check(Assertion("t", "|- ( x + y )"))


def fake(tmp_path, monkeypatch, script):
    program = tmp_path / "metamath"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Checker("metamath", timeout_s=deadline(0.5), memory_mib=256)


@pytest.mark.processes
def test_a_checker_that_hangs_or_dies_has_verified_nothing(tmp_path, monkeypatch):
    theorem, proof = assertion(":pp>"), Proof(("wph", "id"), "wph id", True)
    small = Database(DISJOINT).needed(Assertion("t", "|- ph"), [], "x")
    late = fake(tmp_path, monkeypatch, "sleep 1000000").check(small)
    assert (late.proved, late.late) == (False, True)
    assert not fake(tmp_path, monkeypatch, "kill -9 $$").check(small).proved
    with pytest.raises(CheckerError):  # it did not read the statements: no verdict on a proof
        fake(tmp_path, monkeypatch, "echo ?Error; exit 0").check(small)
    forged = f"MM> verify proof {GOAL}\\n{GOAL}\\nMM> exit"
    with pytest.raises(CheckerError):
        fake(tmp_path, monkeypatch, f"printf '{forged}'").check(small)
    assert theorem.text == "|- ( ph -> ph )" and proof.normal


def test_a_machine_without_the_program_is_told_the_packages(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="apt-get install metamath metamath-databases"):
        make_task("metamath", {})


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"min_steps": 3, "max_steps": 2}, r"task\.args\.max_steps=2 is below"),
        ({"size": 5}, r"task\.args\.size=5"),
        ({"timeout_s": 0}, r"task\.args\.timeout_s=0"),
    ],
)
def test_wrong_arguments_are_refused(args, said):
    with pytest.raises(UserError, match=said):
        make_task("metamath", args)
