"""Statements in Lean, the proof in an answer, and what no proof may hold. No Lean is run."""

import json

import pytest

from rlcore.errors import UserError
from rlcore.extras.lean import (
    NoStatement,
    Statement,
    axioms_of,
    checked_source,
    forbidden,
    proof_in,
)
from rlcore.tasks import make_task

TEXT = "theorem mathd_1 (x : ℝ) (h₀ : x = 2) :\n  x + 1 = 3 :="
STATEMENT = Statement.of(f"import Mathlib\n\n{TEXT} by\n")
ROW = {
    "name": "mathd_1",
    "split": "valid",
    "informal_prefix": "/-- If x is 2, what is x + 1? -/",
    "formal_statement": f"{TEXT} by\n  sorry",
    "header": "import Mathlib\nopen Real\n",
    "proof": "  rw [h₀]; norm_num",
}


def task(tmp_path, rows, **args):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_task("lean", {"train_path": str(path), **args})


def test_rows_of_minif2f_become_statements_and_splits(tmp_path):
    other = {**ROW, "name": "b", "split": "test", "formal_statement": "lemma b : 1 = 1 := sorry"}
    made = task(
        tmp_path,
        [ROW, other],
        heldout_path=str(tmp_path / "rows.jsonl"),
        train_split="valid",
        heldout_split="test",
        worked_field="proof",
    )
    assert made.size("train") == made.size("heldout") == 1
    item = made.item("train", 0)
    assert item.question.startswith("```lean\n/-- If x is 2") and "sorry" not in item.question
    assert item.answer == f"import Mathlib\nopen Real\n\n{TEXT} by\n"
    assert made.worked_answer(item) == f"```lean\n{TEXT} by\n{ROW['proof']}\n```"
    assert made.item("heldout", 0).answer.endswith("lemma b : 1 = 1 := by\n")


@pytest.mark.parametrize("ending", [":=", ":= by", ":= by\n  sorry", ":= sorry", ":= by admit"])
def test_a_statement_ends_where_its_proof_would_begin(ending):
    found = Statement.of(f"open Nat\ntheorem t : 1 = 1 {ending}\n")
    assert found == Statement("open Nat\n", "theorem t : 1 = 1 :=", "t")


@pytest.mark.parametrize("text", ["def x := 1", "theorem t : 1 = 1 := by\n  rfl", "theorem t"])
def test_what_states_no_open_theorem_is_refused(tmp_path, text):
    with pytest.raises(NoStatement):
        Statement.of(text)
    with pytest.raises(UserError, match=r"row 1: field formal_statement"):
        task(tmp_path, [{**ROW, "formal_statement": text}])


@pytest.mark.parametrize(
    ("response", "proof"),
    [
        (f"So:\n```lean4\nimport Mathlib\n{TEXT} by\n  norm_num\n```\nDone.", " by\n  norm_num"),
        (f"```lean\n{' '.join(TEXT.split())} by norm_num\n```", " by norm_num"),
        (f"```lean\n{TEXT} foo h₀\n```", " foo h₀"),
        ("```lean\nby\n  norm_num\n```", "by\n  norm_num"),
        ("norm_num\nsimp", " by\n  norm_num\n  simp"),
        (f"```lean\nx\n```\n```lean\n{TEXT} by simp\n```", " by simp"),
        ("```lean\ntheorem mathd_1 (x : ℝ) : True := by trivial\n```", None),
        ("```lean\ntheorem mathd_1 (x : ℝ) (h₀ : x = 2) :\n  x + 1 = 4 := by simp\n```", None),
        ("```lean\n```", None),
        (f"```lean\n{TEXT}\n```", None),
    ],
)
def test_the_proof_is_what_follows_the_statement_itself(response, proof):
    assert proof_in(STATEMENT, response) == proof


def test_what_is_checked_begins_with_the_tasks_own_statement():
    answer = "```lean\nlocal notation x = y => True\n" + TEXT + " by\n  norm_num\n```"
    proof = proof_in(STATEMENT, answer)
    source = checked_source(STATEMENT, proof)
    assert source.startswith(STATEMENT.before + STATEMENT.text + " by\n  norm_num")
    assert source.endswith("\n#print axioms mathd_1\n") and "notation" not in source


@pytest.mark.parametrize(
    "proof",
    [
        "by sorry",
        "by\n  norm_num\n  admit",
        "by native_decide",
        "by simp\naxiom cheat : False",
        "by simp\n\nend Foo\nnamespace Bar",
        "by\n  exact f ..axiom cheat : False",
        "by\n  exact g 1.axiom cheat : False",
        'by\n  simp\nmacro "#print" "axioms" ident : command => `(#eval 1)',
        'by have := "--"; simp\ninstance : Add Nat := ⟨fun _ _ => 0⟩',
        "by simp\n#eval 1",
        "by\n  run_tac Lean.Elab.Tactic.closeMainGoal",
        "by\n  set_option debug.skipKernelTC true in simp",
        "by simp\n@[simp] private def x := 1",
        "by\n  -- a comment\n  stop",
        "by\n  -- /-\n  sorry\n  -- -/",
        "by simp\ntheorem other : True := trivial",
    ],
)
def test_what_ends_the_theorem_or_gives_up_is_found(proof):
    assert forbidden(proof) is not None


@pytest.mark.parametrize(
    "proof",
    [
        "by\n  -- by the theorem of Lagrange, end of proof\n  norm_num",
        "by\n  /- sorry: an /- inner -/ axiom -/\n  nlinarith [sq_nonneg (x - 2)]",
        "by\n  exact h.end",
        "by\n  obtain ⟨a, rfl⟩ := ‹∃ a, _›\n  simp [Finset.sum_range_succ]",
        "by\n  have endpoint : 1 ≤ 2 := by decide\n  exact instDefault",
        "fun h => h.symm",
    ],
)
def test_proofs_and_their_comments_are_left_alone(proof):
    assert forbidden(proof) is None


def test_axioms_are_read_from_the_one_message_about_the_statement():
    own = "'mathd_1' depends on axioms: [propext,\n Classical.choice]"
    assert axioms_of(STATEMENT, ["a note", own]) == {"propext", "Classical.choice"}
    assert axioms_of(STATEMENT, ["'A.mathd_1' does not depend on any axioms"]) == frozenset()
    assert axioms_of(STATEMENT, ["'other' does not depend on any axioms"]) is None
    assert axioms_of(STATEMENT, [own, own]) is None
    assert axioms_of(STATEMENT, []) is None


def test_the_task_itself_does_not_judge(tmp_path):
    made = task(tmp_path, [ROW])
    with pytest.raises(RuntimeError, match=r"task\.rewards\.proof\.lean\.url"):
        made.grade(made.item("train", 0), "by norm_num")
