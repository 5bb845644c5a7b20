"""Twelve contributions, tried in copies of the checkout with one piece of each forgotten at a time.

    python tests/contributions.py    the table of tests/contributions.md: what names each piece

It ends with an AssertionError where the test that is meant to name a piece does not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from structure import ROOT

REGISTERED = "tests/test_registrations.py::test_every_implementation_is_registered"
OPTIONS = "tests/test_registrations.py::test_every_shipped_option_has_an_entry_and_the_reverse"
MODULES = "tests/test_registrations.py::test_every_module_that_is_imported_exists"
METRICS = "tests/test_registrations.py::test_every_metric_that_is_recorded_is_declared"
WHOLE = "tests/test_contracts.py::test_every_registered_class_is_whole"
BUILT = "tests/test_contracts.py::test_every_correction_is_built_from_its_defaults"
PAGES = "tests/test_documentation.py::test_every_correction_has_a_page_and_shows_its_studies"
LOSSES = "tests/test_documentation.py::test_every_loss_advantage_and_algorithm_is_described"
CURRENT = "tests/test_architecture.py::test_the_generated_pages_are_current"
PARTS = "tests/config/test_parts.py::test_every_part_is_listed_and_whole"
FACTS = (
    "tests/config/test_engines.py"
    "::test_every_shipped_engine_has_facts_and_every_engines_setting_a_reader"
)
RESUMED = (
    "tests/config/test_config_resuming.py::test_every_key_is_known_to_be_fixed_or_free_on_resume"
)
MADE = "tests/test_registrations.py::test_every_part_of_the_learner_is_built"
KINDS = "tests/config/test_engines.py::test_every_kind_of_actor_is_reported_and_has_an_option"
VERBS = "tests/config/test_config_help.py::test_every_verb_is_listed_handled_and_explained"
READING = {REGISTERED, MODULES, METRICS, MADE}  # tests that read the code and load no configuration


@dataclass(frozen=True, slots=True)
class Piece:
    """One edit of a contribution, and the test that fails without it."""

    what: str
    file: str
    edit: Callable[[str], str]  # of the file's text, "" where there is no file
    test: str
    says: str  # in the failure
    alone: bool = False  # without it a file of tests cannot be loaded, which ends other tests, too

    def put(self, root: Path) -> None:
        path = root / self.file
        path.write_text(self.edit(path.read_text() if path.is_file() else ""))


def end(text: str) -> Callable[[str], str]:
    """Append."""
    return lambda old: old + text


def after(anchor: str, text: str) -> Callable[[str], str]:
    """Insert behind the first place of `anchor`, which must be there."""

    def edit(old: str) -> str:
        head, found, tail = old.partition(anchor)
        if not found:
            raise ValueError(f"{anchor!r} is not in the file")
        return head + found + text + tail

    return edit


def methods(names: Sequence[str]) -> str:
    """The bodies of a class that does nothing: `names`, as methods that raise."""
    lines = [
        f"    def {name}(self, *given, **named):\n        raise ValueError\n" for name in names
    ]
    return "\n".join(lines).replace("def between(self, ", "def between(cls, ")


def stub(base: str, module: str, file: str, line: Callable[[str], str], last: str) -> list[Piece]:
    """The pieces of a class that inherits `base` of `module`; `last`: the method that is forgotten.

    `line`: the edit that registers it, of the registry that `REGISTRIES` has for `base`.
    """
    from rlcore.registry import load_object, missing_methods

    names = missing_methods(type("Empty", (), {}), load_object(f"{module}:{base}"))
    kept = [name for name in names if name != last]
    name = f"My{base}"
    text = f'\n\nfrom {module} import {base}\n\n\nclass {name}({base}):\n    """Nothing."""\n\n'
    text += methods(kept)
    where = file.removesuffix(".py").replace("/", ".")
    return [
        Piece("the class", file, end(text), "", ""),
        Piece(
            f"its method `{last}`",
            file,
            end("\n" + methods([last])),
            WHOLE,
            f"{name} lacks {last}",
        ),
        Piece("its line in the registry", REGISTRIES[base], line, REGISTERED, f"{where}:{name}"),
    ]


REGISTRIES = {
    "Task": "rlcore/tasks/__init__.py",
    "Environment": "rlcore/environments/__init__.py",
    "RolloutEngine": "rlcore/rollout/specs.py",
    "TrainEngine": "rlcore/learner/specs.py",
    "Advantage": "rlcore/objectives/specs.py",
    "PolicyLoss": "rlcore/objectives/specs.py",
    "WeightTransport": "rlcore/weights/specs.py",
}
CORRECTION = '''"""A correction."""

from typing import ClassVar

from rlcore.corrections.specs import CorrectionSpec
from rlcore.interfaces import Correction


class MineSpec(CorrectionSpec):
    """Weight 1."""

    method: ClassVar[str] = "rlcore.corrections.mine:Mine"


class Mine(Correction):
    def __init__(self, spec, run_seed):
        self.spec = spec
'''
HOOK = "\n    def correct(self, step, current, reduce):\n        return current\n"
PAGE = "# Mine\n\n<!-- keys: correction.mine -->\n\n<!-- end of the keys -->\n"
SECTION = """## Mine: `algorithm.loss=mine`

**When**: x. **Watch**: x. **Does not help**: x. **Source**: x.

"""
RANK_PART = '''"""A part."""

from rlcore.learner.parts.part import LearnerPart


class MyPart(LearnerPart):
    def metrics(self, reduce):
        return {"loss/mine": 1.0}
'''
PART_SPEC = '''class MyPartSpec(Spec):
    """A part."""

    mine: int = setting(1, "x")


'''
PART_METRIC = '    metrics: ClassVar = (DeclaredMetric("loss/mine", "1", "x"),)\n'
PART_FIXED = '    fixed: ClassVar = {"mine": Fixed.WEIGHTS}\n'
PART = '''"""Facts of a part."""

from rlcore.config.parts.part_facts import PartFacts


class MinePart(PartFacts):
    name, without = "mine", "mine=null"
'''
SETTING = '\n    def setting(self, c):\n        return ""\n'
SPECS, BUILD = "rlcore/learner/specs.py", "rlcore/learner/build.py"
ENGINE_FACTS = '''"""Facts."""

from rlcore.engine_facts import EngineFacts
from rlcore.spec import Fixed, Spec, setting


class MySpec(Spec):
    mine: int = setting(1, "x")


class MyFacts(EngineFacts):
    settings = MySpec
'''
VERB = '        Verb("mine", "another command", ("rlcore mine",), settings=False),\n'
HANDLER = "\n\ndef _mine(given):\n    from rlcore.commands.mine import mine\n\n    return mine()\n"


def _entry(registry: str, line: str) -> Callable[[str], str]:
    return after(f"{registry}: dict[str, str] = {{", f"\n    {line},\n    ")


@cache  # pieces are equal by their edits, which each call would make anew
def contributions() -> dict[str, list[Piece]]:
    """Name -> pieces, in the order in which they are added."""
    interfaces, objectives = "rlcore.interfaces", "rlcore.objectives"
    task, environment = "rlcore/tasks/mine.py", "rlcore/environments/mine.py"
    return {
        "correction": [
            Piece("the class", "rlcore/corrections/mine.py", end(CORRECTION), "", ""),
            Piece("its hook", "rlcore/corrections/mine.py", end(HOOK), BUILT, "overrides nothing"),
            Piece(
                "its line in the registry",
                "rlcore/corrections/specs.py",
                _entry("CORRECTIONS", '"mine": "rlcore.corrections.mine:MineSpec"'),
                OPTIONS,
                r"correction/mine\.yaml has no entry: add mine to",
            ),
            _option("correction", "mine: {}"),
            Piece("its page", "docs/corrections/mine.md", end(PAGE), PAGES, "'mine'"),
            Piece(
                "its line in the overview",
                "docs/corrections/index.md",
                end("[x](mine.md)\n"),
                PAGES,
                r"\]\(mine\.md\)",
            ),
        ],
        "policy loss": [
            *stub(
                "PolicyLoss",
                f"{objectives}.protocols",
                "rlcore/objectives/losses.py",
                _entry("LOSSES", '"mine": "rlcore.objectives.losses:MyPolicyLoss"'),
                "__call__",
            ),
            Piece(
                "its section",
                "docs/losses.md",
                _before("## REINFORCE", SECTION),
                LOSSES,
                "no section of mine",
            ),
        ],
        "advantage": [
            *stub(
                "Advantage",
                f"{objectives}.protocols",
                "rlcore/objectives/advantages.py",
                _entry("ADVANTAGES", '"mine": "rlcore.objectives.advantages:MyAdvantage"'),
                "__call__",
            ),
            Piece(
                "its name on the page",
                "docs/losses.md",
                end("`mine`\n"),
                LOSSES,
                "AssertionError: mine",
            ),
        ],
        "task": [
            *stub(
                "Task",
                interfaces,
                task,
                _entry("TASKS", '"mine": "rlcore.tasks.mine:MyTask"'),
                "grade",
            ),
            _option("task", "name: mine"),
        ],
        "environment": [
            *stub(
                "Environment",
                "rlcore.environments.protocol",
                environment,
                _entry("ENVIRONMENTS", '"mine": "rlcore.environments.mine:MyEnvironment"'),
                "step",
            ),
            _option("environment", "name: mine"),
        ],
        "metric": [
            Piece(
                "what records it",
                "rlcore/learner/metric_sums.py",
                end('\n\ndef mine():\n    return {"policy/mine": 1.0}\n'),
                "",
                "",
            ),
            Piece(
                "its declaration",
                "rlcore/metrics/learner_metrics.py",
                after(
                    "LEARNER_METRICS: tuple[Metric, ...] = (\n",
                    '    Metric("policy/mine", "1", "x"),\n',
                ),
                METRICS,
                "policy/mine",
            ),
            Piece(
                "its line on the page", "docs/metrics.md", _generated, CURRENT, "run python docs"
            ),
        ],
        "rollout engine": [
            *stub(
                "RolloutEngine",
                interfaces,
                "rlcore/rollout/engines/mine.py",
                _entry("ENGINES", '"mine": "rlcore.rollout.engines.mine:MyRolloutEngine"'),
                "step",
            ),
            Piece(
                "the line of its facts",
                "rlcore/rollout/specs.py",
                _entry("ENGINE_FACTS", '"mine": "rlcore.engine_facts:EngineFacts"'),
                FACTS,
                "mine",
            ),
        ],
        "learner engine with a setting": [
            *stub(
                "TrainEngine",
                "rlcore.learner.protocols",
                "rlcore/learner/engines/mine.py",
                _entry("ENGINES", '"mine": "rlcore.learner.engines.mine:MyTrainEngine"'),
                "grad_norm",
            ),
            Piece(
                "the facts, with its setting",
                "rlcore/learner/engines/mine_facts.py",
                end(ENGINE_FACTS),
                "",
                "",
            ),
            Piece(
                "the line of its facts",
                "rlcore/learner/specs.py",
                _entry("ENGINE_FACTS", '"mine": "rlcore.learner.engines.mine_facts:MyFacts"'),
                FACTS,
                "mine",
            ),
            Piece(
                "why a resumed run keeps its setting",
                "rlcore/learner/engines/mine_facts.py",
                after("class MySpec(Spec):\n", '    fixed = {"mine": Fixed.WEIGHTS}\n'),
                RESUMED,
                "learner.engine_args.mine: name it in",
            ),
        ],
        "learner part": [
            Piece(
                "the class",
                "rlcore/learner/parts/mine.py",
                end(RANK_PART),
                MODULES,
                r"rlcore\.learner\.parts\.mine",
            ),
            Piece("its settings", SPECS, _before("class CriticSpec(", PART_SPEC), "", ""),
            Piece(
                "its section",
                SPECS,
                after(
                    "    draft: DraftLearnerSpec | None = None\n",
                    "    mine: MyPartSpec | None = None\n",
                ),
                METRICS,
                "loss/mine",
            ),
            Piece(
                "the metric in its settings",
                SPECS,
                after('class MyPartSpec(Spec):\n    """A part."""\n\n', PART_METRIC),
                METRICS,
                "loss/mine",
            ),
            Piece(
                "why a resumed run keeps its setting",
                SPECS,
                after('class MyPartSpec(Spec):\n    """A part."""\n\n', PART_FIXED),
                RESUMED,
                "learner.mine.mine: name it in",
            ),
            Piece("the line that builds it", BUILD, _built, MADE, "MyPart"),
            Piece("its facts", "rlcore/config/parts/mine_facts.py", end(PART), "", ""),
            Piece(
                "its method `setting`",
                "rlcore/config/parts/mine_facts.py",
                end(SETTING),
                PARTS,
                "MinePart lacks setting",
            ),
            Piece(
                "its line in `PARTS`",
                "rlcore/config/parts/__init__.py",
                _listed,
                PARTS,
                "MinePart is not in PARTS",
            ),
        ],
        "actor kind": [
            Piece(
                "its value",
                "rlcore/rollout/specs.py",
                after('    kind: Literal["bf16", "fp8", ', '"mine", '),
                KINDS,
                "mine",
            ),
            Piece(
                "its name on trajectories",
                "rlcore/types.py",
                after('ActorKind = Literal["bf16", "fp8", ', '"mine", '),
                KINDS,
                "mine",
            ),
            _option("actor", "mine:\n  kind: mine"),
        ],
        "transport": stub(
            "WeightTransport",
            interfaces,
            "rlcore/weights/mine.py",
            _entry("TRANSPORTS", '"mine": "rlcore.weights.mine:MyWeightTransport"'),
            "receive",
        ),
        "command": [
            Piece(
                "its keys",
                "rlcore/config/verbs.py",
                after("    for verb in (\n", VERB),
                VERBS,
                "'mine'",
            ),
            Piece(
                "its line in `HANDLERS`",
                "rlcore/cli.py",
                after(
                    "HANDLERS: Mapping[str, Callable[[Given], int]] = {\n",
                    '    "mine": _mine,\n',
                ),
                VERBS,
                "'mine'",
            ),
            Piece(
                "its file",
                "rlcore/commands/mine.py",
                end("def mine():\n    return 0\n"),
                MODULES,
                r"rlcore\.commands\.mine",
            ),
            Piece(
                "its handler",
                "rlcore/cli.py",
                _before("TRAINING = ", HANDLER.lstrip() + "\n\n"),
                VERBS,
                "_mine",
                alone=True,
            ),
        ],
    }


def _option(group: str, text: str) -> Piece:
    file = f"configs/{group}/mine.yaml"
    return Piece("its option", file, end(f"{text}\n"), OPTIONS, r"mine\.yaml is missing")


def _built(old: str) -> str:
    """Import the part and make it, in `learner/build.py`."""
    line = "from rlcore.learner.parts.mine import MyPart\n"
    made = "            (MyPart() if spec.mine else None),\n"
    return after("tuple(part for part in (", made.strip() + " ")(
        _before("from rlcore.learner.parts.part", line)(old)
    )


def _listed(old: str) -> str:
    """Import the part and list it, in `config/parts/__init__.py`."""
    line = "from rlcore.config.parts.mine_facts import MinePart\n"
    anchor = "PARTS: tuple[PartFacts, ...] = (\n"
    return after(anchor, "    MinePart(),\n")(
        _before("from rlcore.config.parts.part_facts", line)(old)
    )


def _before(anchor: str, text: str) -> Callable[[str], str]:
    def edit(old: str) -> str:
        head, found, tail = old.partition(anchor)
        if not found:
            raise ValueError(f"{anchor!r} is not in the file")
        return head + text + found + tail

    return edit


def _generated(old: str) -> str:
    """Written by docs/generate.py once all else is in place: see `_tried`."""
    return old


def _copy(folder: Path) -> Path:
    root = folder / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():  # generated pages read benchmarks/results, too
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    return root


def _run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "300"},
    )


def _tried(pieces: Iterable[Piece], tests: Iterable[str]) -> tuple[int, str]:
    """Exit code and output of some tests, in a copy with some pieces."""
    pieces, tests = list(pieces), list(dict.fromkeys(tests))
    with tempfile.TemporaryDirectory() as folder:
        root = _copy(Path(folder))
        for piece in pieces:
            piece.put(root)
        if CURRENT in tests and any(piece.edit is _generated for piece in pieces):
            done = _run(root, "docs/generate.py")
            assert done.returncode == 0, done.stderr
        # -vv: messages that name several pieces are not shortened
        words = ("-m", "pytest", "-vv", "-p", "no:cacheprovider", "-m", "not nightly")
        done = _run(root, *words, *tests)
        return done.returncode, done.stdout + done.stderr


def rounds(named: Sequence[tuple[str, Piece]]) -> list[list[tuple[str, Piece]]]:
    """What is forgotten together: pieces of different contributions, whose tests do not hide each
    other's failures."""
    found: list[list[tuple[str, Piece]]] = []
    for name, piece in named:
        for others in found:
            apart = name not in {n for n, _ in others}
            apart = apart and not any(p.alone for p in (piece, *(p for _, p in others)))
            own = piece.test in (WHOLE, REGISTERED) or piece.test not in {p.test for _, p in others}
            # without an option or its entry nothing loads a configuration, as other tests do
            together = {piece.test, *(p.test for _, p in others)}
            loads = OPTIONS in together or (REGISTERED in together and together - READING)
            if apart and own and not loads:
                others.append((name, piece))
                break
        else:
            found.append([(name, piece)])
    return found


def pieces_named() -> list[tuple[str, Piece]]:
    """(contribution, piece) of every piece that a test must name when it is forgotten."""
    return [(name, p) for name, pieces in contributions().items() for p in pieces if p.test]


def rows(say: Callable[[str], object] = print) -> Iterator[tuple[str, Piece]]:
    """(contribution, forgotten piece), once its test has failed and said what is missing. Raises
    AssertionError where it does not, or where the whole contributions do not pass."""
    everything = [(name, piece) for name, pieces in contributions().items() for piece in pieces]
    named = pieces_named()
    code, text = _tried((p for _, p in everything), (p.test for _, p in named))
    assert code == 0, f"the whole contributions do not pass:\n{text[-5000:]}"
    for number, forgotten in enumerate(rounds(named), 1):
        say(f"round {number}: {', '.join(f'{name}: {piece.what}' for name, piece in forgotten)}")
        left_out = [piece for _, piece in forgotten]
        _, text = _tried(
            (p for _, p in everything if p not in left_out), (p.test for p in left_out)
        )
        for name, piece in forgotten:
            file = re.escape(piece.test.partition("::")[0])
            assert re.search(f"^(FAILED|ERROR) {file}", text, re.M), f"{name}, {piece}:\n{text}"
            assert re.search(piece.says, text), f"{name}, {piece}:\n{text}"
    yield from named


def line(name: str, piece: Piece) -> str:
    """The row of tests/contributions.md that says which test names a forgotten piece."""
    file = re.sub(r"\bmine(?=[._])", "NAME", piece.file)
    place, _, test = piece.test.removeprefix("tests/").partition("::")
    return f"| {name} | {piece.what} | `{file}` | `{place}`: {test} |"


def main() -> None:
    """Print the rows, each once its test has failed without the piece."""
    for name, piece in rows(lambda text: print(text, file=sys.stderr)):
        print(line(name, piece), flush=True)


if __name__ == "__main__":
    main()
