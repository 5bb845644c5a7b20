"""The program `metamath` (Debian's package of the same name), asked to verify one proof."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import UserError
from rlcore.tasks.proofs.database import GOAL

DATABASES = Path("/usr/share/metamath/databases")  # where Debian's package has them
SET_MM = DATABASES / "set.mm"
INSTALL = "apt-get install metamath metamath-databases"
READ = "No errors were found.  However, proofs were not checked."
PROVED = re.compile(rf"MM> verify proof {GOAL}\s+{GOAL}\s+MM> exit\s*\Z")
SAID = re.compile(r"\n\?(?:Error|Warning)[^\n]*\n.*", re.DOTALL)
END_S = 10.0  # a killed process that still exists after this is stuck in the kernel
MIB = 2**20


class CheckerError(RuntimeError):
    """The checker itself failed: not a verdict on a proof."""


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
        """Whether the proof of GOAL in a small database is one. A proof past the deadline or the
        memory limit is none. Raises CheckerError."""
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
