"""Proving rows before training: the tests of a row must pass its reference and fail a mutant.

Without this, tests that never run, or that compare nothing, reward every program. Proofs are kept
in a folder, by the content of the rows and of the sandbox's own sources.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlcore.files import replace_file
from rlcore.graders.sandbox import Outcome, ProgramTests, Sandbox

MOST_THREADS = 16
REPORT_S = 5.0
SHOWN_ROWS = 5
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowProof:
    """The result for one row. Example: RowProof("its reference fails: AssertionError: ")"""

    why: str = ""  # the row is not proven; "": it is
    effects: bool = False  # see `ProgramTests`: its reference passes only so


@dataclass(frozen=True, slots=True)
class Claim:
    """One row that is to be proven. `content`: all that the proof depends on."""

    content: str
    check: Callable[[Sandbox], RowProof]


def default_folder(named: str | None = None) -> Path:
    """The folder of proofs; where none is named: of the user, not of a run."""
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "rlcore" / "proofs"


def prove(
    name: str, claims: Sequence[Claim], start: Callable[[], Sandbox], folder: Path
) -> list[RowProof]:
    """Check rows that no earlier call has, in parallel, each thread in a separate sandbox that
    `start` starts. `name`: the task's, for messages on progress. Raises SandboxError."""
    digest = hashlib.sha256(_version().encode())
    for claim in claims:
        digest.update(hashlib.sha256(claim.content.encode(errors="surrogatepass")).digest())
    kept = folder / f"{digest.hexdigest()}.json"
    try:
        return [RowProof(**found) for found in json.loads(kept.read_text())]
    except (OSError, ValueError, TypeError):  # none yet, or not whole
        pass
    proofs = _checked(name, claims, start)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(kept, json.dumps([asdict(proof) for proof in proofs]))
    except OSError as error:
        logger.warning("task %s: the proofs of its rows are not kept: %s", name, error)
    return proofs


def _checked(name: str, claims: Sequence[Claim], start: Callable[[], Sandbox]) -> list[RowProof]:
    own = threading.local()
    started: list[Sandbox] = []
    done = 0
    reported = time.monotonic()

    def check(claim: Claim) -> RowProof:
        nonlocal done, reported
        if not hasattr(own, "sandbox"):
            own.sandbox = start()
            started.append(own.sandbox)
        proof = claim.check(own.sandbox)
        done += 1
        if time.monotonic() - reported > REPORT_S:
            reported = time.monotonic()
            logger.warning("task %s: %d of %d rows are checked", name, done, len(claims))
        return proof

    threads = min(len(os.sched_getaffinity(0)), MOST_THREADS, -(-len(claims) // 4))
    try:
        with ThreadPoolExecutor(max(1, threads), thread_name_prefix="proof") as pool:
            return list(pool.map(check, claims))
    finally:
        for sandbox in started:
            sandbox.close()


def proven(sandbox: Sandbox, reference: str | None, tests: ProgramTests) -> RowProof:
    """RowProof of a row whose tests call functions; `reference` None: by the mutant alone."""
    effects = reference is None
    if reference is not None:
        outcome = patiently(sandbox, reference, tests)
        if not outcome.passed:
            effects = True
            with_effects = replace(tests, effects=True)
            if not patiently(sandbox, reference, with_effects).passed:
                return RowProof(f"its reference fails: {outcome.why.splitlines()[0]}")
            tests = with_effects
        elif not outcome.calls:
            return RowProof("its tests call nothing of its reference")
    outcome = sandbox.run(mutant(reference, tests), tests)
    if outcome.passed:
        return RowProof("its tests pass a program whose functions return None")
    if reference is None and not outcome.calls:
        return RowProof("its tests call nothing of a program")
    return RowProof(effects=effects)


def patiently(sandbox: Sandbox, program: str, tests: ProgramTests) -> Outcome:
    """Run a reference, and once more if it was too slow, which may be due to a busy machine."""
    outcome = sandbox.run(program, tests)
    return sandbox.run(program, tests) if outcome.why.startswith("time limit") else outcome


def mutant(reference: str | None, tests: ProgramTests) -> str:
    """The reference with functions that return None; without a reference, definitions of the tested
    names."""
    if reference is not None:
        tree = _ReturnsNone().visit(ast.parse(reference))
        return ast.unparse(ast.fix_missing_locations(tree))
    return "\n".join(
        f"class {name}:\n"
        "    def __init__(self, *args, **keywords): pass\n"
        "    def __getattr__(self, name): return lambda *args, **keywords: None\n"
        if name in tests.classes
        else f"def {name}(*args, **keywords): return None\n"
        for name in tests.names
    )


class _ReturnsNone(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [ast.Return(ast.Constant(None))]
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.body = [ast.Return(ast.Constant(None))]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.body = ast.Constant(None)
        return node


def unproven(proofs: Sequence[tuple[int, RowProof]]) -> str:
    """Rows that are not proven, of (row number, proof), in words."""
    bad = [(row, proof.why) for row, proof in proofs if proof.why]
    shown = "; ".join(f"row {row}: {why}" for row, why in bad[:SHOWN_ROWS])
    more = f"; and {len(bad) - SHOWN_ROWS} more" if len(bad) > SHOWN_ROWS else ""
    return f"{len(bad)} of {len(proofs)} rows that are not proven: {shown}{more}"


def _version() -> str:
    """Hash of the sources that decide a verdict."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*(folder / "sandbox").glob("*.py"), Path(__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
