"""Metamath databases (Megill and Wheeler, "Metamath", second edition), and the program that
verifies proofs against them."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rlcore.errors import UserError

COMMENT = re.compile(r"\$\(.*?(?:\$\)|\Z)", re.DOTALL)
STATEMENT = re.compile(
    r"\$(?P<brace>[{}])|(?:(?P<label>[\w.-]+)\s+)?\$(?P<kind>[cvdfeap])\s(?P<body>[^$]*)"
    r"\$(?:\.|=[^$]*\$\.)"
)
GOAL = "rlcore-goal"  # the theorem in the small database: no label of a database has this form
FIRST_PART = 2 << 20  # characters; of a database of which the beginning may be enough


# A Metamath database (Megill and Wheeler, "Metamath", second edition, section 4.1): what its
# statements say, and the small database that one proof needs.
#
# A proof depends on the statements whose labels it names and on nothing else, so it is checked
# against those alone: each is copied with its hypotheses and disjoint conditions, as an axiom,
# since its own proof is the database's. The checker then reads a few lines and not forty megabytes.


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Example: Hypothesis("min", "|- ph")"""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Assertion:
    """A statement with its conditions. Example: Assertion("idi", "|- ph", (Hypothesis("idi.1", "|-
    ph"),))"""

    label: str
    text: str
    hypotheses: tuple[Hypothesis, ...] = ()
    disjoint: tuple[tuple[str, ...], ...] = ()
    place: int = 0  # number of assertions before it in its database

    @property
    def symbols(self) -> set[str]:
        """All symbols of its statement and hypotheses."""
        return {s for text in (self.text, *(h.text for h in self.hypotheses)) for s in text.split()}


class UnknownSymbol(ValueError):
    """A symbol or a label that the database does not have; the message says which."""


class Database:
    """The declarations of a database. Variables have one type each for all of it, as in set.mm."""

    def __init__(self, text: str) -> None:
        self.constants: set[str] = set()
        self.types: dict[str, Hypothesis] = {}  # variable -> its $f statement
        self.variables: dict[str, str] = {}  # label of a $f statement -> variable
        self.assertions: dict[str, Assertion] = {}
        self._read(COMMENT.sub(" ", text))

    def _read(self, text: str) -> None:
        hypotheses: list[tuple[Hypothesis, ...]] = [()]
        disjoint: list[tuple[tuple[str, ...], ...]] = [()]
        for found in STATEMENT.finditer(text):
            brace, label, kind, body = found.groups()
            if brace == "{":
                hypotheses.append(hypotheses[-1])
                disjoint.append(disjoint[-1])
            elif brace == "}":
                hypotheses.pop()
                disjoint.pop()
            elif kind == "c":
                self.constants.update(body.split())
            elif kind == "d":
                disjoint[-1] += (tuple(body.split()),)
            elif kind == "e":
                hypotheses[-1] += (Hypothesis(label, " ".join(body.split())),)
            elif kind == "f":
                variable = body.split()[1]
                self.types[variable] = Hypothesis(label, " ".join(body.split()))
                self.variables[label] = variable
            elif kind in "ap":
                place = len(self.assertions)
                says = " ".join(body.split())
                self.assertions[label] = Assertion(label, says, hypotheses[-1], disjoint[-1], place)

    def check(self, theorem: Assertion) -> None:
        """Raise UnknownSymbol for what a theorem holds and the database does not."""
        unknown = sorted(theorem.symbols - self.constants - self.types.keys())
        if unknown:
            raise UnknownSymbol(f"uses {unknown[0]}, which the database does not have")
        for hypothesis in theorem.hypotheses:
            if hypothesis.label in self.assertions or hypothesis.label in self.variables:
                raise UnknownSymbol(f"has a hypothesis {hypothesis.label}, a label of the database")

    def arity(self, label: str) -> int:
        """How many steps an assertion takes off the stack: its variables and its hypotheses."""
        assertion = self.assertions[label]
        variables = assertion.symbols & self.types.keys()
        return len(variables) + len(assertion.hypotheses)

    def needed(self, theorem: Assertion, labels: Iterable[str], proof: str) -> str:
        """The small database: the statements that the labels of a proof name, and the theorem GOAL.

        Variables of the proof that the theorem does not have are disjoint from all others: the
        theorem does not contain them.
        """
        used = [
            self.assertions[label] for label in dict.fromkeys(labels) if label in self.assertions
        ]
        named = {self.variables[label] for label in labels if label in self.variables}
        symbols = set().union(named, *(a.symbols for a in (theorem, *used)))
        symbols |= {self.types[v].text.split()[0] for v in symbols & self.types.keys()}
        variables = [v for v in self.types if v in symbols]
        lines = [f"$c {' '.join(sorted(symbols - set(variables)))} $."]
        if variables:
            lines.append(f"$v {' '.join(variables)} $.")
        lines += [f"{self.types[v].label} $f {self.types[v].text} $." for v in variables]
        for number, assertion in enumerate(used):
            lines += _block(assertion, f"e..{number}.", variables, f"$a {assertion.text} $.")
        dummies = sorted(named - theorem.symbols)
        others = [(d, v) for d in dummies for v in variables if v != d]
        shown = Assertion(GOAL, theorem.text, theorem.hypotheses, (*theorem.disjoint, *others))
        lines += _block(shown, "", variables, f"$p {theorem.text} $=\n{proof}\n$.")
        return "\n".join([*lines, ""])


def _block(assertion: Assertion, prefix: str, variables: Sequence[str], says: str) -> list[str]:
    """An assertion in its own scope. prefix: of new labels for its hypotheses, which several
    assertions of a database may share; "": they keep theirs."""
    lines = ["${"]
    for group in assertion.disjoint:
        held = [v for v in group if v in variables]
        if len(held) > 1:
            lines.append(f"$d {' '.join(held)} $.")
    for number, hypothesis in enumerate(assertion.hypotheses):
        label = f"{prefix}{number}" if prefix else hypothesis.label
        lines.append(f"{label} $e {hypothesis.text} $.")
    return [*lines, f"{assertion.label} {says}", "$}"]


@lru_cache(maxsize=4)
def database(path: Path, labels: tuple[str, ...] = ()) -> Database:
    """The database of a file; with labels, perhaps only its beginning, which has these. Raises
    OSError, UnicodeDecodeError, or UnknownSymbol for a label that it has not."""
    with path.open(encoding="ascii") as file:
        text = file.read(FIRST_PART) if labels else file.read()
        made = Database(text)
        if any(label not in made.assertions for label in labels):
            made = Database(text + file.read())
    for label in labels:
        if label not in made.assertions:
            raise UnknownSymbol(f"has no statement {label}")
    return made


DATABASES = Path("/usr/share/metamath/databases")  # where Debian's package has them
SET_MM = DATABASES / "set.mm"
INSTALL = "apt-get install metamath metamath-databases"
READ = "No errors were found.  However, proofs were not checked."
PROVED = re.compile(rf"MM> verify proof {GOAL}\s+{GOAL}\s+MM> exit\s*\Z")
SAID = re.compile(r"\n\?(?:Error|Warning)[^\n]*\n.*", re.DOTALL)
END_S = 10.0  # a killed process that still exists after this is stuck in the kernel
MIB = 2**20


class CheckerError(RuntimeError):
    """A failure of the checker itself, not a verdict on a proof."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Example: Checked(False, "no proof within 5 s", late=True)"""

    proved: bool
    why: str = ""  # what the checker says to a proof that is none
    late: bool = False


class Checker:
    """Runs `metamath` for one small database at a time, under a deadline and a memory limit.

    Raises UserError if the program is not installed. key: whose argument needs it.
    """

    def __init__(self, name: str, *, timeout_s: float, memory_mib: int) -> None:
        found = shutil.which("metamath")
        if found is None:
            raise UserError(
                f"task {name} has proofs checked by the program metamath, which this machine does "
                f"not have: {INSTALL} (Debian's packages), on every machine with graders."
            )
        self._program = found
        self._timeout_s = timeout_s
        self._memory = memory_mib * MIB

    def check(self, small: str) -> Checked:
        """Return whether the proof of GOAL in a small database is valid. A proof past the deadline
        or the memory limit is invalid. Raises CheckerError."""
        with tempfile.TemporaryDirectory(prefix="proof-") as folder:
            (Path(folder) / "proof.mm").write_text(small, encoding="ascii")
            return self._verdict(*self._run(folder))

    def _run(self, folder: str) -> tuple[int | None, str]:
        """(exit code, None past the deadline; what it printed)."""
        command = [self._program, "read proof.mm", f"verify proof {GOAL}", "exit"]
        with subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"LANG": "C", "PATH": os.environ.get("PATH", "/usr/bin:/bin")},
        ) as process:
            try:
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    resource.prlimit(process.pid, resource.RLIMIT_AS, (self._memory, self._memory))
                said, _ = process.communicate(timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                return None, ""
            finally:  # a grader's own deadline, too
                process.kill()
        return process.returncode, said.decode("ascii", "replace")

    def _verdict(self, code: int | None, said: str) -> Checked:
        if code is None:
            return Checked(False, f"no proof within {self._timeout_s:g} s", late=True)
        if code or "FATAL ERROR" in said:
            return Checked(False, f"the checker ended with code {code}, as without memory")
        if READ not in said:
            raise CheckerError(f"metamath could not read a proof's statements: {said[-300:]}")
        if PROVED.search(said):
            return Checked(True)
        why = SAID.search(said)
        return Checked(False, why[0].strip() if why else "the proof is not complete")
