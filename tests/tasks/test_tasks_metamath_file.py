"""Theorems of a user's files, in the form of miniF2F's Metamath folder, proved against set.mm."""

import pytest
from test_tasks_metamath import NEEDED

from rlcore.errors import UserError
from rlcore.extras.metamath_statements import BadStatement, read_statements
from rlcore.tasks import make_task

RAW = """
${
  mine-chain.0 $e |- ( ph -> ps ) $.
  mine-chain.1 $e |- ( ps -> ch ) $.
  $( (Contributed by nobody.) $)
  mine-chain $p |- ( ph -> ch ) $= ( syl ) ABCDEF $.
$}
"""
# as miniF2F comments blocks without a proof out, in both of its ways
OPEN = """
$(
${
  mine-closed.0 $e |- ( ph -> X e. RR ) $.
  mine-closed $p |- ( ph -> ( X + 1 ) e. RR ) $=
$}
$)
$(
  @{
    mine-sum.0 @e |- X e. NN @.
    @( (Contributed by nobody.) @)
    mine-sum @p |- ( 2 + 2 ) = 4 @= ? @.
  @}
$)
"""
# of set.mm itself: what follows it there must not prove it
OLD = "id $p |- ( ph -> ph ) $= ? $.\n"


def test_blocks_are_read_plain_commented_out_and_escaped():
    chain, closed, summed = read_statements(RAW + OPEN)
    assert [h.label for h in chain.theorem.hypotheses] == ["mine-chain.0", "mine-chain.1"]
    assert (chain.theorem.text, chain.proof) == ("|- ( ph -> ch )", "( syl ) ABCDEF")
    assert closed.theorem.text == "|- ( ph -> ( X + 1 ) e. RR )" and closed.proof is None
    assert summed.theorem.hypotheses[0].text == "|- X e. NN" and summed.proof is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cheat $a |- ph $.", "declares cheat by"),
        ("$c new $.", r"has \$c"),
        ("t $p |- ph $.", r"\$= is expected"),
        ("t $p |- ph $= ?", r"ends where \$\. is expected"),
        ("$}", "without its"),
    ],
)
def test_what_declares_more_than_theorems_is_refused(tmp_path, text, said):
    with pytest.raises(BadStatement, match=said):
        read_statements(text)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theorems")
    (folder / "a.mm").write_text(RAW)
    (folder / "b.mm").write_text(OPEN)
    (folder / "c.mm").write_text(OLD)
    return make_task("metamath_file", {"train_path": str(folder), "heldout_path": f"{folder}/c.mm"})


def fenced(proof):
    return f"By the rules:\n```\n{proof}\n```"


@NEEDED
def test_a_file_s_theorems_are_proved_from_set_mm(task):
    assert (task.size("train"), task.size("heldout")) == (4, 1)
    chain, closed, summed, _ = (task.item("train", i) for i in range(4))
    assert "mine-chain.0 $e |- ( ph -> ps ) $." in chain.question
    assert task.grade(chain, task.worked_answer(chain)).reward == 1.0
    normal = "wph wps wch mine-chain.0 mine-chain.1 syl"
    assert task.grade(chain, fenced(f"$= {normal} $.")).reward == 1.0
    assert task.grade(chain, normal).parts == {"correct": 1.0, "whole": 1.0, "late": 0.0}
    assert task.worked_answer(closed) is None
    assert task.grade(summed, fenced("2p2e4")).reward == 1.0
    assert task.grade(closed, fenced("2p2e4")).reward == 0.0
    spelled = "wph cX cr wcel cX c1 caddc co cr wcel mine-closed.0 cX peano2re syl"
    assert task.grade(closed, fenced(spelled)).reward == 1.0


@NEEDED
@pytest.mark.parametrize("proof", ["?", "wph wps wch ? ? syl", "( syl ) ABC??F", "mine-chain", ""])
def test_holes_and_the_theorem_itself_prove_nothing(task, proof):
    assert task.grade(task.item("train", 0), fenced(proof)).reward == 0.0


@NEEDED
def test_a_theorem_of_the_database_is_proved_by_what_stands_before_it(task):
    item = task.item("heldout", 0)
    assert task.grade(item, fenced("wph id")).reward == 0.0  # itself
    assert task.grade(item, fenced("wph idALT")).reward == 0.0  # behind it
    before = (
        "wph wph wph wi wi wph wph wi wph wph ax-1 wph wph wph wi wph wi wi wph wph wph wi wi wph "
        "wph wi wi wph wph wph wi ax-1 wph wph wph wi wph ax-2 ax-mp ax-mp"
    )
    assert task.grade(item, fenced(before)).reward == 1.0


@NEEDED
def test_symbols_that_set_mm_does_not_have_are_named_or_skipped(tmp_path):
    path = tmp_path / "new.mm"
    path.write_text(OLD + "odd $p |- ( ph @@@ ph ) $= ? $.\n")
    with pytest.raises(UserError, match=r"train_path=.*new\.mm uses @@@, which the database"):
        make_task("metamath_file", {"train_path": str(path)})
    task = make_task("metamath_file", {"train_path": str(path), "skip_unknown": True})
    assert (task.size("train"), task.skipped["train"]) == (1, 1)
    path.write_text("${ syl.1 $e |- ph $. mine $p |- ph $= ? $. $}")
    assert make_task("metamath_file", {"train_path": str(path)}).size("train") == 1
    path.write_text("${ syl $e |- ph $. mine $p |- ph $= ? $. $}")
    with pytest.raises(UserError, match="hypothesis syl, a label of the database"):
        make_task("metamath_file", {"train_path": str(path)})


@NEEDED
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, r"task\.args\.train_path=None and"),
        ({"train_path": "none.mm"}, "names no file"),
        ({"train_path": "x.mm", "database_path": "no.mm"}, r"task\.args\.database_path=no\.mm"),
    ],
)
def test_missing_files_are_named(args, said):
    with pytest.raises(UserError, match=said):
        make_task("metamath_file", args)
