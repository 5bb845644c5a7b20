"""The `correction` section: order, labels, a user's own correction."""

import itertools

import pytest

from rlcore.config.compose import load, to_yaml
from rlcore.config.schema import CorrectionList
from rlcore.corrections.specs import CORRECTIONS
from rlcore.corrections.tis import TisSpec
from rlcore.errors import UserError

MINE = '''
from typing import ClassVar

from rlcore.corrections.specs import CorrectionSpec
from rlcore.spec import refuse, setting


class MySpec(CorrectionSpec):
    """A correction of a user's own."""

    method: ClassVar[str] = "nowhere:MyMethod"
    cap: float = setting(2.0, "largest weight", ge=1)

    def check(self, key):
        refuse(self.cap == 7, f"{key}.cap=7 is unlucky: choose another.")
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return "correction.mine={name: 'mine.py:MySpec', cap: 3}"


def run(*words):
    return load(["run_dir=x", *words])


def test_specifications_by_label_in_order():
    corrections = run("correction=[veto,tis]", "correction.tis.cap=3").correction
    assert corrections.names == ("veto", "tis")
    assert corrections.get("tis") == TisSpec(cap=3) and corrections.get("mis") is None
    assert corrections == CorrectionList.model_validate({"veto": {}, "tis": {"cap": 3.0}})
    assert corrections != CorrectionList.model_validate({"tis": {"cap": 3.0}, "veto": {}})


def test_a_correction_of_a_users_own(mine, tmp_path):
    corrections = run("correction=[veto]", mine).correction
    assert corrections.names == ("veto", "mine")
    assert corrections.get("mine").cap == 3.0
    assert corrections.model_dump()["mine"] == {"name": f"{tmp_path}/mine.py:MySpec", "cap": 3.0}


def test_it_is_saved_and_resumed(mine, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(to_yaml(load([f"run_dir={tmp_path}", mine])))
    monkeypatch.chdir("/")  # another command may be started elsewhere
    resumed = load([f"run_dir={tmp_path}", "resume=auto", "correction.mine.cap=4"])
    assert resumed.correction.names == ("tis", "mine")
    assert resumed.correction.get("mine").cap == 4.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("cap: 0.5", r"correction\.mine\.cap=0\.5 .*greater than or equal to 1"),
        ("cap: high", r"correction\.mine\.cap=high .*number"),
        ("cup: 3", r"correction\.mine\.cup=3 is not a key"),
        ("cap: 7", r"correction\.mine\.cap=7 is unlucky"),
    ],
)
def test_its_settings_are_checked_as_any_other(mine, settings, said):
    with pytest.raises(UserError, match=said):
        run(f"correction.mine={{name: 'mine.py:MySpec', {settings}}}")


def test_a_shipped_correction_under_another_label():
    corrections = run("correction=[]", "correction.gentle={name: tis, cap: 1.5}").correction
    assert corrections.chosen() == {"gentle": TisSpec(cap=1.5)}


@pytest.mark.parametrize("pair", itertools.combinations(CORRECTIONS, 2), ids="-".join)
def test_pairs_that_the_door_accepts_build_and_no_others(pair):
    """The pipeline itself refuses what the configuration refuses."""
    from rlcore.corrections.pipeline import build

    whole = [name for name in ("rapid", "dppo") if name in pair]
    algorithm = f"algorithm={whole[0] if whole else 'grpo'}"
    required = {"opsm": "delta", "outliers": "threshold"}
    needed = [f"correction.{name}.{required[name]}=0.1" for name in pair if name in required]
    try:
        config = run(f"correction=[{','.join(pair)}]", algorithm, *needed)
    except UserError:
        return
    assert build(config.correction.chosen(), 0, config.algorithm) is not None


KINDS = ("actor=[bf16,fp8]", "correction=[tis]")


def test_kinds_of_actors_have_strata_and_lists_of_their_own():
    assert run("correction=[tis]").strata == ()
    config = run(*KINDS, "actor.fp8.correction=[veto,ais]")
    assert [(s.kinds, tuple(s.corrections)) for s in config.strata] == [
        (("bf16",), ("tis",)),
        (("fp8",), ("veto", "ais")),
    ]
    pooled = run(*KINDS, "correction.strata=none")
    assert [s.kinds for s in pooled.strata] == [("bf16", "fp8")]
    parted = run(*KINDS, "correction.strata=none", "actor.fp8.correction.tis.cap=3")
    assert [s.kinds for s in parted.strata] == [("bf16",), ("fp8",)]
    assert run(*KINDS, "actor.fp8.correction=[none]").strata[1].corrections == {}
    words = ["actor.fp8.correction.ais.cap=3", "actor.fp8.correction=[tis]"]
    replaced = run(*KINDS, *words, "actor.fp8.correction.tis.cap=4").strata[1].corrections
    assert replaced == {"tis": TisSpec(cap=4)}


def test_they_are_saved_and_resumed(tmp_path):
    words = [f"run_dir={tmp_path}", *KINDS, "actor.fp8.correction=[ais]", "correction.strata=none"]
    (tmp_path / "config.yaml").write_text(to_yaml(load(words)))
    assert load([f"run_dir={tmp_path}", "resume=auto"]).strata == load(words).strata


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["correction=[tis]", "actor.bf16.correction=[ais]"], "actor.bf16.correction is of one"),
        ([*KINDS, "actor.fp8.correction=[tis,ais]"], r"actor.fp8.correction=\[tis,ais\] would"),
        ([*KINDS, "actor.fp8.correction=[dvp,tis]"], "differ in dvp"),
        (["actor=[bf16,fp8]", "correction=[dvp]", "actor.fp8.correction=[]"], "differ in dvp"),
        ([*KINDS, "actor.fp8.correction={tis: {}, strata: none}"], "set correction.strata"),
        ([*KINDS, "actor.fp8.correction=[tiss]"], r"actor.fp8.correction.tiss"),
    ],
)
def test_what_all_actors_must_agree_on_is_refused(words, said):
    with pytest.raises(UserError, match=said):
        run(*words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["actor.bf16.share=0.5"], r"actor.bf16.share is about several kinds"),
        (["rollout.group_kinds=mixed"], r"rollout.group_kinds=mixed is about several kinds"),
        ([*KINDS, "actor.fp8.share=1.5"], r"actor.fp8.share.start=1.5"),
        ([*KINDS, "actor.fp8.share=0.5", "actor.bf16.share=0.4"], r"between 0.9 and 0.9"),
        ([*KINDS, "actor.fp8.share={shape: linear, start: 1.0}"], r"needs actor.fp8.share.end"),
        ([*KINDS, "actor.fp8.share={start: 1.0, steps: 5}"], r"takes no actor.fp8.share.end"),
    ],
)
def test_shares_that_do_not_add_up_are_refused(words, said):
    with pytest.raises(UserError, match=said):
        run(*words)


def test_shares_are_numbers_or_schedules():
    moving = "actor.fp8.share={shape: cosine, start: 1.0, end: 0.0, steps: 10}"
    assert run(*KINDS, moving).actor["fp8"].share.at(10) == 0
    assert run(*KINDS, "actor.fp8.share=0.25").actor["fp8"].share.at(3) == 0.25
    assert run(*KINDS, "actor.fp8.share=1").actor["fp8"].share.start == 1


SHADOWS = "correction.shadow=[[ais],[veto,tis],{tis: {cap: 3}},[],{veto: {}, tis: {cap: 4}}]"


def test_lists_are_measured_beside_the_run_s_own(tmp_path):
    config = load([f"run_dir={tmp_path}", "correction=[tis]", SHADOWS, "correction.shadow_every=2"])
    shadows = config.correction.shadows
    assert list(shadows.lists) == ["ais", "veto+tis", "tis", "none", "veto+tis-2"]
    assert shadows.lists["tis"] == {"tis": TisSpec(cap=3)} and shadows.every == 2
    assert config.correction.names == ("tis",)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load([f"run_dir={tmp_path}", "resume=auto"]).correction == config.correction
    other = run("experiment=quickstart", "correction=[jackpot]", "correction.shadow=[[tis]]")
    assert list(other.correction.shadows.lists) == ["tis"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["correction.shadow=[tis]"], r"write correction.shadow=\[\[tis\],\[veto,ais\]\]"),
        (["correction.shadow=[[tiss]]"], r"correction.shadow.0.tiss=.* perhaps tis is meant"),
        (["correction.shadow=[{tis: {cap: 0}}]"], r"correction.shadow.0.tis.cap=0"),
        (["correction.shadow=[[ais],[tis,ais]]"], r"correction.shadow.1=\[tis,ais\] would"),
        (["correction.shadow=[[dvp,tis]]"], r"differ in dvp, which decides what all actors sample"),
        (["correction=[dvp,tis]", "correction.shadow=[[tis]]"], r"differ in dvp"),
        (["correction.shadow=[[rapid]]"], r"differ in rapid, .* what the loss is of"),
        (["correction.shadow=[[jackpot]]", "rollout.logprobs_k=0"], r"rollout.logprobs_k=0 leaves"),
        (["actor=[bf16,fp8]", "actor.fp8.correction={tis: {}, shadow: [[ais]]}"], "actor.fp8.corr"),
    ],
)
def test_a_list_that_needs_more_than_the_run_has_is_refused(words, said):
    with pytest.raises(UserError, match=said):
        run(*words)
