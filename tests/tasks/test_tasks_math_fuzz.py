"""Published answers with one fault put in: none of them is right, and none stops the grader."""

import json
import random
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest

from rlcore.graders.mathematics.math_answers import equivalent
from rlcore.tasks import make_task
from rlcore.types import Item

DATA = Path(__file__).parent.parent / "data"
DIGIT = re.compile(r"\d")
# Numbers whose value `value` has too.
PLAIN = re.compile(r"-?(?:\d+(?:\.\d+)?|\\frac\{-?\d+\}\{\d+\})")
NOISE = [
    *(
        "{",
        "}",
        "\\frac",
        "\\sqrt",
        "^",
        "_",
        "-",
        "(",
        ")",
        "[",
        "|",
        "\\left",
        "\\right",
        "$",
        "%",
    ),
    *(
        "\\text{",
        ",",
        "!",
        "\\pm",
        "\\lfloor ",
        "\\rfloor",
        "'",
        "\\infty",
        "i",
        "0",
        "e9",
        "=",
        "<",
    ),
    *("\\begin{pmatrix}", "\\\\", "&", "\\cup", ":", " ", "\x00", "\u0661", "9" * 40),
]


def published():
    columns = {"math_train": "answer", "math_test": "answer", "math_answers": "reference"}
    found = [
        str(json.loads(line)[column])
        for name, column in columns.items()
        for line in (DATA / f"{name}.jsonl").read_text().splitlines()
    ]
    return sorted({answer for answer in found if answer.strip()})


def without(text, at):
    return text[:at] + text[at + 1 :]


def malformed(answer, rng):
    """Answers whose braces do not match or whose commands lack an argument."""
    braces = [m.start() for m in re.finditer(r"(?<!\\)[{}]", answer)]
    if braces:
        yield without(answer, rng.choice(braces))
        at = rng.randrange(len(answer) + 1)
        if not answer[:at].endswith("\\"):
            yield answer[:at] + rng.choice("{}") + answer[at:]
    for match in re.finditer(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}", answer):
        before, (top, bottom), after = (
            answer[: match.start()],
            match.groups(),
            answer[match.end() :],
        )
        for parts in (
            f"{{{top}{bottom}}}{{}}",
            f"{{}}{{{top}{bottom}}}",
            f"{{{top}}}",
            f"{{{top}}}{{}}",
        ):
            yield f"{before}\\frac{parts}{after}"
        yield f"{before}\\frac{{}}{{{top}}}{{{bottom}}}{after}"
    for match in re.finditer(r"\\sqrt\{([^{}]+)\}", answer):
        yield f"{answer[: match.start()]}\\sqrt{{}}{match[1]}{answer[match.end() :]}"


def other_values(answer, rng):
    """Plain numbers with another value."""
    if not PLAIN.fullmatch(answer) or not re.search("[1-9]", answer):
        return
    digits = [m.start() for m in DIGIT.finditer(answer)]
    at = rng.choice(digits)
    changed = answer[:at] + str((int(answer[at]) + rng.randrange(1, 10)) % 10) + answer[at + 1 :]
    candidates = [
        changed,
        answer[1:] if answer[0] == "-" else f"-{answer}",
        f"{answer}{rng.randrange(10)}",
    ]
    candidates += [without(answer, at), answer[:at] + rng.choice("123456789") + answer[at:]]
    candidates += [f"{answer}.5", f"{answer}/7", f"{answer} + 1", f"3{answer}"]
    if fraction := re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}", answer):
        sign, top, bottom = fraction.groups()
        candidates += [
            f"{sign}\\frac{{{bottom}}}{{{top}}}",
            f"{sign}\\frac{{{top[0]}}}{{{top[1:]}{bottom}}}",
        ]
        candidates += [
            f"{sign}\\frac{top}{bottom}",
            f"{sign}{top}{bottom}",
            f"{sign}\\frac{{{top}}}{bottom}1",
        ]
    for candidate in candidates:
        if value(candidate) is None or value(candidate) != value(answer):
            yield candidate


def value(text):
    """The value of a plain number, by other means than the grader's; None for any other text."""
    if re.fullmatch(r"-?(?:\d+\.?\d*|\.\d+)", text):
        return Fraction(text)
    found = re.fullmatch(r"(-?)\\frac(?:\{(-?\d+)\}|(\d))(?:\{(\d+)\}|(\d))", text)
    if not found or not int(found[4] or found[5]):
        return None
    return Fraction(f"{found[1]}1") * Fraction(int(found[2] or found[3]), int(found[4] or found[5]))


def noisy(answer, rng):
    """Any text near an answer: right or not, it is read."""
    for _ in range(4):
        text = answer
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(text) + 1)
            text = (
                text[:at]
                + rng.choice((rng.choice(NOISE), "", text[at : at + 3]))
                + text[at + rng.randrange(3) :]
            )
        yield text


def faults(answers, rng):
    """(answers tried, [(reference, answer)] that are accepted and should not be, raise, or take
    over ten seconds)."""
    path = DATA / "math_test.jsonl"
    task = make_task("math", {"train_path": str(path)})
    tried, wrong = 0, []
    for reference in answers:
        made = [
            (text, True) for text in (*malformed(reference, rng), *other_values(reference, rng))
        ]
        made += [(text, False) for text in noisy(reference, rng)]
        for text, is_wrong in made:
            tried += 1
            began = time.process_time()
            try:
                task.grade(Item("math/train/0", "q", answer=reference), f"\\boxed{{{text}}}")
                accepted = is_wrong and equivalent(reference, (text,))
            except Exception as error:
                accepted = repr(error)
            if accepted or time.process_time() - began > 10:
                wrong.append((reference, text, accepted))
    return tried, wrong


def test_no_mutant_of_a_sample_of_answers_is_right():
    rng = random.Random(1)
    tried, wrong = faults(rng.sample(published(), 60), rng)
    assert tried > 300 and wrong == []


@pytest.mark.parametrize("reference", [r"\text{no solution}", r"\text{A5}_{11}", r"\text{seven}"])
def test_words_whose_braces_do_not_match_are_wrong(reference):
    braces = [m.start() for m in re.finditer("[{}]", reference)]
    made = [without(reference, at) for at in braces]
    made += [reference[:at] + "{" + reference[at:] for at in range(len(reference))]
    assert not [text for text in made if equivalent(reference, (text,))]
    assert equivalent(reference, (reference,))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_mutant_of_any_answer_is_right():
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    tried = 0
    while tried < 100_000:
        more, wrong = faults(published(), rng)
        tried += more
        assert wrong == [], f"seed {seed}"
