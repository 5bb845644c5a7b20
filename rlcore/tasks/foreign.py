"""Scorers of other packages: isolated, proven before a run, and credited only where they can tell
right from wrong.

A proof tries a scorer on the first problems of its data set. The reference must have full credit.
The empty answer, `nan`, `{}`, a word, an answer that would write a file, and another problem's
answer must have less. Answers that raise, exceed a limit or would be executed are wrong. A scorer
that gives one of those texts full credit is asked about that text on every problem, and an answer
of its kind counts only above it. A scorer that does not recognise its references, or that credits
other problems' answers, is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from rlcore.files import replace_file
from rlcore.tasks.isolation import IsolatedGrader, IsolatedVerdict
from rlcore.types import Item

FULL = 1.0
AGAIN = 2  # a crowded machine may stop a reference that it judges in time otherwise
WORD, EMPTY, NAN, BRACES = "banana", "", "nan", "{}"
PROBES = (EMPTY, NAN, BRACES, WORD)
CLOSE = 0.01  # numbers that differ by more, relative to the larger and to 1, are not the same
KEPT = 4096  # credits of texts on problems
REASONS = ("raised", "stopped", "executed")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScorerProof:
    """The result of a proof. `refused`: why the scorer is not proven, "": it is.

    Example: ScorerProof(problems=4, references=4, fooled_by=("nan",), failed=("raised",))
    """

    problems: int = 0
    references: int = 0  # of these problems that have a reference answer
    fooled_by: tuple[str, ...] = ()  # of PROBES, those with full credit somewhere
    failed: tuple[str, ...] = ()  # of REASONS, those that a wrong answer met
    slowest_s: float = 0.0
    refused: str = ""

    def remarks(self) -> list[str]:
        """Lines for `rlcore try`."""
        lines = [f"the scorer is isolated and proven on {self.problems} problems"]
        if not self.references:
            lines.append("the problems have no reference answers: only wrong answers were tried")
        if self.fooled_by:
            shown = ", ".join(text or "the empty answer" for text in self.fooled_by)
            lines.append(f"it gives full credit to {shown}: such answers are counted as wrong")
        if self.failed:
            words = {
                "raised": "raises on wrong answers",
                "stopped": "exceeds its limits on wrong answers",
                "executed": "would execute answers",
            }
            told = ", ".join(words[reason] for reason in self.failed)
            lines.append(f"it {told}: such answers are counted as wrong")
        return lines


@dataclass(frozen=True, slots=True)
class Credit:
    """`failed`: one of REASONS, "" where the scorer gave the credit."""

    reward: float
    failed: str = ""
    why: str = ""


class ForeignScorer:
    """The credit of answers by an isolated scorer, which grades an answer's text alone.

    Example: ForeignScorer(grader, proof).credit(item, "3 + 4i").reward
    """

    def __init__(self, grader: IsolatedGrader, proof: ScorerProof) -> None:
        self._proof = proof

        @lru_cache(KEPT)  # the answers of a group repeat
        def ask(prompt_id: str, text: str) -> Credit:
            return credit_of(grader.grade(prompt_id, text))

        self._ask: Callable[[str, str], Credit] = ask

    def credit(self, item: Item, answer: str) -> Credit:
        """The credit of an answer. Raises IsolationError where the isolation fails, and where a
        machine is too busy to judge."""
        if item.answer and answer.strip() == item.answer.strip():
            return Credit(FULL)
        credit = self._ask(item.prompt_id, answer)
        if credit.reward >= FULL and not alike(answer, item.answer):
            return Credit(0.0)
        probes = [text for text in self._proof.fooled_by if is_like(answer, text)]
        most = max((self._ask(item.prompt_id, text).reward for text in probes), default=-1.0)
        return Credit(0.0) if 0 < credit.reward <= most else credit


def credit_of(verdict: IsolatedVerdict) -> Credit:
    """A verdict as credit: failures of a proven scorer are the answer's."""
    if verdict.grade is None:
        return Credit(0.0, verdict.status, verdict.why)
    return Credit(verdict.grade.reward)


def alike(answer: str, reference: str) -> bool:
    """False only for two numbers that differ."""
    a, b = number(answer), number(reference)
    if a is None or b is None:
        return True
    return abs(a - b) <= CLOSE * max(1.0, abs(a), abs(b))  # NaN compares as False


def number(text: str) -> complex | None:
    """The number that a text is, complex in any of the usual forms; None if it is none."""
    plain = text.strip().replace(" ", "").replace(",", "").rstrip(".")
    if re.fullmatch(r"[-+]?\d{1,300}/\d{1,300}", plain):
        try:
            return complex(float(Fraction(plain)))
        except (ZeroDivisionError, OverflowError):
            return complex(math.nan)
    plain = re.sub(r"(?<![a-z])i$", "1j", re.sub(r"(?<=\d)i$", "j", plain))
    plain = re.sub(r"(?<=[nf])i$", "j", plain)  # as in nani
    try:
        return complex(plain)
    except ValueError:
        return None


def is_like(answer: str, probe: str) -> bool:
    """True if an answer says no more than a text that fools the scorer: any answer, of a word."""
    if probe == NAN:
        return bool(re.search(r"(?i)(?<![a-z])[-+]?(nan|inf|infinity)", answer)) or _infinite(
            answer
        )
    if probe in (EMPTY, BRACES):
        return not any(map(str.isalnum, answer))
    return True


def _infinite(answer: str) -> bool:
    tokens = re.findall(r"\d[\d.]*[eE][-+]?\d{2,}|\d{309,}", answer)
    return any(math.isinf(float(token)) for token in tokens if token.count(".") < 2)


# -- the proof -------------------------------------------------------------------------------------


def prove(items: Sequence[Item], grader: IsolatedGrader, content: str, folder: Path) -> ScorerProof:
    """The proof of a scorer on these problems, kept in `folder` by `content`, all that it depends
    on besides the sources of rlcore."""
    digest = hashlib.sha256(f"{_version()}\n{content}".encode(errors="surrogatepass"))
    kept = folder / f"scorer-{digest.hexdigest()}.json"
    try:
        found = json.loads(kept.read_text())
        found |= {name: tuple(found[name]) for name in ("fooled_by", "failed")}
        return ScorerProof(**found)
    except (OSError, ValueError, TypeError, KeyError):  # none yet, or not whole
        pass
    proof = tried(items, grader)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(kept, json.dumps(asdict(proof)))
    except OSError as error:
        logger.warning("the proof of a scorer is not kept: %s", error)
    return proof


def tried(items: Sequence[Item], grader: IsolatedGrader) -> ScorerProof:
    """Try a scorer on problems. Raises IsolationError."""
    failed: set[str] = set()
    fooled: set[str] = set()
    slowest = 0.0

    def credit(item: Item, text: str, wrong: bool = True) -> Credit:
        nonlocal slowest
        verdict = grader.grade(item.prompt_id, text)
        found = credit_of(verdict)
        if wrong and found.failed:
            failed.add(found.failed)
        slowest = max(slowest, verdict.seconds)
        return found

    references = [item for item in items if item.answer]
    for item in references:
        own = credit(item, item.answer, wrong=False)
        for _ in range(AGAIN):
            if own.failed == "stopped":
                own = credit(item, item.answer, wrong=False)
        if own.reward < FULL:
            why = f"its own reference has {own.reward:g}" + (f" ({own.why})" if own.why else "")
            return ScorerProof(len(items), len(references), refused=why)
    for item in items:
        for probe in PROBES:
            if probe != item.answer and credit(item, probe).reward >= FULL:
                fooled.add(probe)
    written = _writes(items, lambda item, text: credit(item, text))
    scorer = ForeignScorer(grader, ScorerProof(fooled_by=tuple(sorted(fooled))))
    pairs = [(a, b.answer) for a in references for b in references if a.answer != b.answer]
    credited = [text for item, text in pairs if scorer.credit(item, text).reward >= FULL]
    refused = "an answer wrote a file" if written else ""
    if not refused and pairs and 2 * len(credited) > len(pairs):
        refused = "it gives full credit to other problems' answers"
    return ScorerProof(
        len(items),
        len(references),
        tuple(sorted(fooled)),
        tuple(sorted(failed)),
        round(slowest, 3),
        refused,
    )


def _writes(items: Sequence[Item], credit: Callable[[Item, str], Credit]) -> bool:
    """True if a scorer lets an answer write a file."""
    with tempfile.TemporaryDirectory(prefix="rlcore-canary-") as folder:
        canary = os.path.join(folder, "written")
        for item in items[:1]:
            credit(item, f"open({canary!r}, 'w')")
            credit(item, f"[open({canary!r}, 'w')]")
        return os.path.exists(canary)


def _version() -> str:
    """Hash of the sources that decide a proof."""
    folder = Path(__file__).parent
    paths = [Path(__file__), folder / "reasoning_gym.py", *(folder / "isolation").glob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()
