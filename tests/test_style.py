"""The shape of the code stays readable: sizes, parameters, columns, cycles, plain English.

The limits are those of docs/CONTRIBUTING.md. `python tests/structure.py` prints the figures.
"""

import re
import statistics

import pytest
import structure
from structure import ROOT

PACKAGE = ROOT / "rlcore"
FOLDERS = ("rlcore", "tests", "benchmarks")
FILE_LINES, MEDIAN_LINES = 600, 120
FUNCTION_LINES, PARAMETERS = 60, 8

# "file: function" -> why it may have more than eight parameters
MANY_PARAMETERS = {
    "corrections/formulas/adaptive.py: ais": "a signature of the outside contract",
    "corrections/formulas/adaptive.py: ais_weight": "the tensors and settings of that signature",
    "rollout/engines/vllm/sparse_backend_gpu.py: SparseGPUImpl.forward": "vLLM's interface",
    "rollout/engines/vllm/sparse_backend_gpu.py: SparseGPUImpl._flash": "FlashAttention's own",
    "rollout/engines/vllm/sparse_layer_cpu.py: SparseCPUImpl.forward": "vLLM's interface",
    "rollout/engines/vllm/sparse_rows_gpu.py: Flash.__call__": "FlashAttention's own",
    "rollout/engines/vllm/sparse_kernel_gpu.py: _score_kernel": "a Triton kernel: no records",
    "rollout/engines/vllm/sparse_kernel_gpu.py: _select_kernel": "a Triton kernel: no records",
    "rollout/engines/vllm/sparse_kernel_gpu.py: _summarise_kernel": "a Triton kernel: no records",
    "tasks/code.py: CodeTask.__init__": "a task's parameters are its settings, task.args",
    "tasks/countdown.py: Countdown.__init__": "a task's parameters are its settings, task.args",
}
# "file: function" -> why it may be longer than sixty lines
LONG_FUNCTIONS = {
    # half of it is its docstring
    "corrections/formulas/obrs.py: obrs_normalizer": "a signature of the outside contract",
}

# Turns of phrase that have to be decoded, from the review of the first version. Lower case.
LITERARY = (
    "build not be found",
    "make their problems up",
    "made up",
    "made-up",
    "made_up",
    "what is wrong is said",
    "what somebody holds",
    "for ever",
    "wants company",
    "want company",
    "deadline of nobody",
    "without a word",
    "buffer to write its journal",
    "handed out",
    "hands out",
    "is told",
    "sicken",
)


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


def test_files_are_short(package):
    lengths = {source.name: len(source.lines) for source in package}
    assert {name: n for name, n in lengths.items() if n > FILE_LINES} == {}
    assert statistics.median(lengths.values()) < MEDIAN_LINES


def test_functions_are_short(routines):
    over = {r.where: r.length for r in routines if r.length > FUNCTION_LINES}
    assert set(over) == set(LONG_FUNCTIONS), over


def test_functions_take_few_parameters(routines):
    over = {r.where: r.parameters for r in routines if r.parameters > PARAMETERS}
    assert set(over) == set(MANY_PARAMETERS), over


def test_attributes_are_assigned_one_a_line(package):
    tuples = {s.name: lines for s in package if (lines := structure.tuple_assignments(s))}
    assert tuples == {}


@pytest.mark.parametrize("folder", ["benchmarks", "benchmarks/gpu"])
def test_scripts_do_not_import_each_other_in_a_circle(folder):
    """The package's own imports are held by import-linter (test_import_rules.py)."""
    assert structure.import_cycle(ROOT / folder) == []


def test_the_cycle_check_finds_one(tmp_path):
    (tmp_path / "a.py").write_text("import b\n")
    (tmp_path / "b.py").write_text("def run():\n    from c import x\n")
    (tmp_path / "c.py").write_text("import json, a\n")
    assert structure.import_cycle(tmp_path) == ["a", "b", "c", "a"]


def test_the_english_is_plain():
    texts = {p: p.read_text() for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    for folder in FOLDERS:
        texts |= {source.path: source.text for source in structure.sources(ROOT / folder)}
    del texts[ROOT / "tests" / "test_style.py"]
    phrase = re.compile(rf"\b(?:{'|'.join(LITERARY)})\b")
    found = []
    for path, text in texts.items():
        flowing = re.sub(r"\s+(?:# +)?", " ", text.lower())  # a phrase may span two lines
        found += [f"{path.relative_to(ROOT)}: {words}" for words in phrase.findall(flowing)]
    assert found == []


def test_no_two_test_modules_share_a_name():
    """pytest imports them by name alone: two of one name stop the whole suite."""
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(n for n in set(names) if names.count(n) > 1) == []
