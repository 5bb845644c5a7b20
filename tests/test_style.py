"""The shape of the code stays readable: sizes, parameters, columns, cycles.

The limits are those of docs/CONTRIBUTING.md. `python tests/structure.py` prints the figures.
"""

import json

import growth
import pytest
import structure
from structure import FOLDERS, ROOT

PACKAGE = ROOT / "rlcore"
PARAMETERS = 8

# "file: function" -> why it may have more than eight parameters
MANY_PARAMETERS = {
    "corrections/ais.py: ais": "a signature of the outside contract",
    "corrections/ais.py: ais_weight": "the tensors and settings of that signature",
    "corrections/drift.py: policy_drift_accumulate": "what other trainers have, by name",
    "learner/fused_head_gpu.py: _head_kernel": "a Triton kernel: no records",
    "rollout/engines/vllm/sparse_backend_gpu.py: SparseGPUImpl.forward": "vLLM's interface",
    "rollout/engines/vllm/sparse_backend_gpu.py: SparseGPUImpl._flash": "FlashAttention's own",
    "rollout/engines/vllm/sparse_cpu.py: SparseCPUImpl.forward": "vLLM's interface",
    "rollout/engines/vllm/sparse_rows_gpu.py: Flash.__call__": "FlashAttention's own",
    "rollout/engines/vllm/sparse_kernel_gpu.py: _score_kernel": "a Triton kernel: no records",
    "rollout/engines/vllm/sparse_kernel_gpu.py: _select_kernel": "a Triton kernel: no records",
    "rollout/engines/vllm/sparse_kernel_gpu.py: _summarise_kernel": "a Triton kernel: no records",
    "tasks/code.py: CodeTask.__init__": "a task's parameters are its settings, task.args",
    "tasks/countdown.py: Countdown.__init__": "a task's parameters are its settings, task.args",
    "tasks/file.py: FileTask.__init__": "a task's parameters are its settings, task.args",
    "tasks/reasoning_gym.py: ReasoningGym.__init__": "a task's parameters are its settings",
}


@pytest.fixture(scope="module")
def package():
    return structure.sources(PACKAGE)


@pytest.fixture(scope="module")
def routines(package):
    return [routine for source in package for routine in structure.routines(source)]


def test_no_line_is_longer_than_the_column_limit():
    over = [
        f"{folder}/{source.name}:{number}"
        for folder in FOLDERS
        for source in structure.sources(ROOT / folder)
        for number in structure.long_lines(source)
    ]
    assert over == []


def test_the_lists_of_exceptions_hold_what_is_true_and_only_shrink():
    """Where an entry is gone, `python tests/structure.py --write` drops it."""
    new, gone = structure.differences()
    assert new == [], "larger, smaller or named otherwise than code should be (CONTRIBUTING.md)"
    assert gone == [], "run python tests/structure.py --write"


def test_what_grows_with_every_feature_stays_within_its_bounds():
    """`python tests/growth.py --write` lowers the bounds, `--raise` raises them."""
    bounds = json.loads(growth.BOUNDS.read_text())
    found = growth.counts()
    assert {*found} == {*bounds} - {growth.COLUMNS}
    assert [f"{n}: {v} > {bounds[n]}" for n, v in found.items() if v > bounds[n]] == []


def test_what_a_run_imports_is_found_and_what_it_names_in_functions_is_not(tmp_path):
    package = tmp_path / "rlcore"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from rlcore.one import x\n"
        "if TYPE_CHECKING:\n    from rlcore import typed\n"
        "try:\n    from rlcore import two\nexcept ImportError:\n    pass\n"
        "def f():\n    import rlcore.later\n"
    )
    for name in ("one", "two", "typed", "later"):
        (package / f"{name}.py").write_text("x = spec.zero_stage\n")
    assert growth.loaded(tmp_path) == {"rlcore", "rlcore.cli", "rlcore.one", "rlcore.two"}
    assert list(growth.counts(tmp_path).values()) == [4, 12, 14, 4, 0, 0, 0]


def test_a_bound_falls_by_itself_and_rises_only_on_purpose():
    before = {"lines of rlcore": 300, "files": 5}
    now = {"lines of rlcore": 301, "files": 4}
    assert growth.written(now, before, up=False) == {"lines of rlcore": 300, "files": 4}
    assert growth.written(now, before, up=True) == {"lines of rlcore": 400, "files": 4}


def test_small_files_circles_and_repeated_names_are_found(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "small.py").write_text("class A:\n    pass\n")
    (package / "user.py").write_text("from pack import small\n\n\nclass A:\n    pass\n")
    (package / "one.py").write_text("def f():\n    from pack.two import g\n")
    (package / "two.py").write_text("from pack import one, small\n\n\ndef g():\n    pass\n")
    (package / "long.py").write_text("def f():\n" + "    pass\n" * 600)
    (package / "inner").mkdir()
    (package / "inner" / "long.py").touch()
    assert list(structure.exceptions(package).values()) == [
        ["long.py"],
        ["one.py", "two.py"],
        ["pack.one, pack.two"],
        ["A"],
        ["long.py"],
        ["long.py: f"],
    ]


def test_functions_take_few_parameters(routines):
    over = {r.where: r.parameters for r in routines if r.parameters > PARAMETERS}
    assert set(over) == set(MANY_PARAMETERS), over


def test_attributes_are_assigned_one_a_line(package):
    tuples = {s.name: lines for s in package if (lines := structure.tuple_assignments(s))}
    assert tuples == {}


def test_docstrings_begin_with_a_sentence_or_a_noun(package):
    """Not with What, Whether or Which: "Return whether ..." or "True if ..." instead."""
    assert [text for source in package for text in structure.unclear_docstrings(source)] == []


@pytest.mark.parametrize("folder", ["benchmarks", "benchmarks/gpu"])
def test_scripts_do_not_import_each_other_in_a_circle(folder):
    """The package's own imports are held by import-linter (test_import_rules.py)."""
    assert structure.import_cycle(ROOT / folder) == []


def test_the_cycle_check_finds_one(tmp_path):
    (tmp_path / "a.py").write_text("import b\n")
    (tmp_path / "b.py").write_text("def run():\n    from c import x\n")
    (tmp_path / "c.py").write_text("import json, a\n")
    assert structure.import_cycle(tmp_path) == ["a", "b", "c", "a"]


def test_no_two_test_modules_share_a_name():
    """pytest imports them by name alone: two of one name stop the whole suite."""
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(n for n in set(names) if names.count(n) > 1) == []
