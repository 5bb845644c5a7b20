"""A contribution is whole: what it adds is registered, declared and there."""

import ast
import re
from functools import cache

import contributions
import pytest
import structure
from structure import ROOT

from rlcore.config.groups import groups
from rlcore.metrics.names import METRICS, declared

PACKAGE = ROOT / "rlcore"
BASES = {*contributions.REGISTRIES, "GroupTransport", "Reward", "LogProbEstimator"}
# Of what a run is made of by other means than a name: adapters and wrappers
UNNAMED = {
    "rlcore.agents.trl:TrlEnvironment",
    "rlcore.tasks.rewards.requests:RequestReward",
    "rlcore.weights.deltas:DeltaTransport",
}
BUILDERS = ("rlcore.advisor.simulate.", "rlcore.testing.")


@cache
def trees():
    """Module -> its tree, of the package."""
    return {structure._module(s, PACKAGE): s.tree for s in structure.sources(PACKAGE)}


def classes():
    """ "module:Class" -> names of its bases."""
    return {
        f"{module}:{node.name}": {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for module, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def constants():
    return {n.value for t in trees().values() for n in ast.walk(t) if isinstance(n, ast.Constant)}


def test_every_implementation_is_registered():
    """One that no registry names can be chosen by nobody."""
    found = classes()
    inherited = {base for bases in found.values() for base in bases}
    by_name = {name.partition(":")[2]: bases for name, bases in found.items()}

    def ancestors(bases):
        return bases.union(*(ancestors(by_name.get(base, set())) for base in bases))

    last = [
        n for n, b in found.items() if n.partition(":")[2] not in inherited and ancestors(b) & BASES
    ]
    assert len(last) > 30
    unnamed = {name for name in last if not name.startswith(BUILDERS)} - constants()
    assert unnamed == UNNAMED, sorted(unnamed ^ UNNAMED)


def test_every_shipped_option_has_an_entry_and_the_reverse():
    assert "task" in groups()


def test_every_module_that_is_imported_exists():
    """Functions import too, when they are called: a command's file, for example."""
    named = {
        node.module
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rlcore")
    }
    assert named - trees().keys() == set()


def test_every_metric_that_is_recorded_is_declared():
    prefixes = {metric.name.partition("/")[0] for metric in METRICS if "/" in metric.name}
    keys = [
        key.value
        for tree in trees().values()
        for node in ast.walk(tree)
        for key in (node.keys if isinstance(node, ast.Dict) else [])
        if isinstance(key, ast.Constant) and re.fullmatch(r"[a-z_]+(/\w+)+", str(key.value))
    ]
    recorded = {key for key in keys if key.partition("/")[0] in prefixes}
    assert len(recorded) > 50
    # a forecast's, which has no row
    assert {key for key in recorded if declared(key) is None} == {"staleness/p90"}


def test_every_part_of_the_learner_is_built():
    """Each class of `learner/parts` that ranks call."""
    parts = {"LearnerPart", "Companion"}
    own = {
        n.partition(":")[2] for n, b in classes().items() if ".learner.parts." in n and b & parts
    }
    called = {
        node.func.id
        for node in ast.walk(trees()["rlcore.learner.build"])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert len(own) > 4
    assert own - called == set()


def test_a_contribution_has_at_most_six_files_of_the_package():
    for name, pieces in contributions.contributions().items():
        files = {piece.file for piece in pieces if piece.file.startswith("rlcore/")}
        assert len(files) <= 6, f"{name}: {sorted(files)}"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_forgotten_piece_of_a_contribution_is_named():
    assert {name for name, _ in contributions.rows()} == {*contributions.contributions()}


def test_the_table_of_forgotten_pieces_is_the_one_that_is_tried():
    page = (ROOT / "tests" / "contributions.md").read_text()
    after = page.partition("| contribution | forgotten piece |")[2]
    table = after.partition("\n\n")[0].splitlines()[2:]  # below the heading and its rule
    assert table == [contributions.line(*named) for named in contributions.pieces_named()]
