"""The answer of a response, and whether it is the reference: one reader for `math` and `gsm8k`.

`final_answers` finds what a response answers: after its last `####`, in its last box, or behind
"the answer is". `equivalent` compares it with a reference, as docs/tasks.md lists. Neither raises
on any text, and both are bounded in time."""

from __future__ import annotations

import itertools
import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from rlcore.graders.fences import tagged_answer
from rlcore.graders.mathematics.math_numbers import symbols
from rlcore.graders.mathematics.math_parser import Node, parse
from rlcore.graders.mathematics.math_quantities import has_units, rational
from rlcore.graders.mathematics.math_tokens import (
    MAX_CHARACTERS,
    TEXT_COMMANDS,
    Unreadable,
    closing,
)
from rlcore.graders.mathematics.math_values import same
from rlcore.graders.mathematics.math_words import NUMBER_WORDS

# --------------------------------------------------------------------------- reading responses

BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(?:\[[^\[\]{}]*\]\s*)*")
# What may stand between boxes that are one answer together.
JOINT = re.compile(
    r"(?:[\s$,;&.*]|\\[()\[\],;:! ]|\\q?quad|\b(?:and|or|also)\b"
    r"|\\(?:text|mbox)\s*\{[\s,]*(?:and|or)?[\s,]*\}"
    r"|(?<![A-Za-z])[A-Za-z](?:_\{?\d+\}?)?\s*=)*"
)
MARK = re.compile(r"####")
ANSWER = re.compile(r"(?i)\banswer(?:\s+is)?\s*(?:is\b|:|=)[\s:*]*(.+)")
PLAIN = re.compile(r"[-−+]?\s?[$€£]?[-−]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+)?%?")
CLAUSE = re.compile(r"\.\s|\.$|,?\s(?:because|since|which|as|so)\b|\n")
CHOSEN = re.compile(rf"{PLAIN.pattern}\s*(?:\w+\s)?\s*(?:or|and|to|through|-|,|\d)")
FORMULA = re.compile(
    r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$(.+?)\$\$|(?<![\\$])\$([^$]+?)(?<!\\)\$", re.DOTALL
)
CONJUNCTION = re.compile(r"\s*,?\s*(?:and|or)\s*")
VALUE = re.compile(r"\s*([A-Za-z](?:_\{?\w\}?)?)\s*=")
MAX_BOXES = 50  # from the end
MAX_RESPONSE = 200_000  # characters from the end that are searched


@dataclass(frozen=True, slots=True)
class Found:
    """The answer found in a response. `texts`: the answer, or the answers of several joined boxes.
    `marked`: whether it stands in a box or behind ####, and `boxed` in a box."""

    texts: tuple[str, ...]
    marked: bool
    boxed: bool = False


def boxes(response: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of the boxes that hold something; one that is not closed ends with its
    line."""
    found: list[tuple[int, int, str]] = []
    for match in list(BOX.finditer(response))[-MAX_BOXES:]:
        start = match.end()
        if response[start : start + 1] == "{":
            try:
                end = closing(response, start)
            except Unreadable:
                end = _line_end(response, start)
            content = response[start + 1 : end].strip()
            end += 1
        else:
            token = re.compile(r"\\[A-Za-z]+|[^\s\\$]").match(response, start)
            content, end = (token[0], token.end()) if token else ("", start)
            if content.isdigit():  # \boxed 18
                digits = re.compile(r"\d+").match(response, start)
                assert digits is not None
                content, end = digits[0], digits.end()
        inner = BOX.match(content)
        if inner and content[inner.end() :].startswith("{"):  # a box in a box
            content = content[inner.end() :].strip("{} ")
        if content and not (found and start < found[-1][1]):
            found.append((match.start(), end, content))
    return found


def _line_end(text: str, start: int) -> int:
    end = re.compile(r"\n|\\\)|\\\]|(?<!\\)\$").search(text, start)
    return end.start() if end else len(text)


def last_boxed(response: str) -> str | None:
    """Content of the last box that holds something; None without one."""
    found = boxes(response[-MAX_RESPONSE:])
    return found[-1][2] if found else None


def boxed_answer(response: str) -> Found | None:
    """The last box, with the boxes before it that only "and", "or" or a comma separates."""
    found = boxes(response)
    if not found:
        return None
    texts = [found[-1][2]]
    for before, after in zip(reversed(found[:-1]), reversed(found[1:]), strict=True):
        if not JOINT.fullmatch(response[before[1] : after[0]]):
            break
        texts.insert(0, before[2])
    return Found(tuple(texts), True, True)


def final_answer(response: str) -> Found:
    """The answer of a mathematical response: its last box, else what follows its last ####, else
    what follows "the answer is", else its last formula or number."""
    response = _spoken(response[-MAX_RESPONSE:])
    boxed = boxed_answer(response)
    if boxed is not None:
        return boxed
    marked = marked_line(response)
    if marked:
        return Found((marked,), True)
    tagged = tagged_answer(response)
    if tagged:
        return Found((tagged,), False)
    said = ANSWER.findall(response)
    formulas = list(FORMULA.finditer(response))
    if said:
        inside = list(FORMULA.finditer(said[-1]))
        if inside:
            return Found(_together(said[-1], inside, 0), False)
        return Found((CLAUSE.split(said[-1])[0].strip(" *"),), False)
    if formulas:
        return Found(_together(response, formulas, len(formulas) - 1), False)
    return Found(_unmarked_answer(response.strip()), False)


def _together(text: str, formulas: list[re.Match[str]], at: int) -> tuple[str, ...]:
    """The formula at this place, with its neighbours where they are values of one variable that
    only "and" or "or" separates: `$x = 1$ and $x = -2$`."""
    groups = [[formulas[0]]]
    for before, after in itertools.pairwise(formulas):
        joined = CONJUNCTION.fullmatch(text[before.end() : after.start()])
        names = [VALUE.match(_formula(match)) for match in (before, after)]
        if joined and all(names) and len({name[1] for name in names if name}) == 1:
            groups[-1].append(after)
        else:
            groups.append([after])
    chosen = next(group for group in groups if formulas[at] in group)
    return tuple(map(_formula, chosen))


def _unmarked_answer(response: str) -> tuple[str, ...]:
    """A response of one word, or the formula without delimiters or the number that it ends with."""
    last = response.splitlines()[-1] if response else ""
    if not last or len(response.split()) == 1:
        return (response,) if response else ()
    if "\\" in last:
        after = last.rpartition("=")[2].strip()
        return (after if after != last else last[last.index("\\") :],)
    numbers = PLAIN.findall(response)
    return (numbers[-1].strip(),) if numbers else (last,)


def _spoken(response: str) -> str:
    """Return the text after the reasoning in <think>, if there is any reasoning."""
    _, closed, spoken = response.rpartition("</think>")
    answers = BOX.search(spoken) or ANSWER.search(spoken) or re.search(r"\d", spoken)
    return spoken if closed and answers else response


def _formula(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def marked_line(response: str) -> str:
    """The line after the last #### that one follows."""
    for part in reversed(MARK.split(response)[1:]):
        lines = part.strip().splitlines()
        if lines:
            return lines[0].strip()
    return ""


def final_number(response: str) -> Found:
    """The answer of a response that ends in a number: the line after its last ####, else its last
    box, else its last number."""
    response = _spoken(response[-MAX_RESPONSE:])
    marked = marked_line(response)
    if marked:
        return Found((marked,), True)
    found = boxes(response)
    if found:
        return Found((found[-1][2],), True, True)
    numbers = PLAIN.findall(unicodedata.normalize("NFKC", response))
    return Found((numbers[-1].strip(),) if numbers else (), False)


# --------------------------------------------------------------------------- normalising

SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r"\times ",
        "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "π": r"\pi ",
        "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\neq ",
        "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ", "°": r"\degree ",
        "√": r"\sqrt ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "θ": r"\theta ", "α": r"\alpha ",
        "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "⁄": "/", "∕": "/", "≈": r"\approx ",
        "€": r"\text{ euro }", "£": r"\text{ sterling }", "¥": r"\text{ yen }", "′": "'",
        "’": "'", "“": '"', "”": '"', "⟨": r"\langle ", "⟩": r"\rangle ", "∣": "|",
        "º": r"\degree ",
        "¢": r"\text{ cents }", "…": r"\ldots ", "₹": r"\text{ rupee }",
    }
)  # fmt: skip
SUPERSCRIPTS = re.compile("[⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ]+")
SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
FROM_SUPER = str.maketrans("⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ", "-+0123456789n")
FROM_SUB = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
VULGAR = re.compile(r"(?<!\d)(\d*)([¼½¾⅐-⅞])")
STYLE = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|mathstrut|strut|hfill?|noindent"
    r"|[bB]ig{1,2}[lrm]?|left|right|middle|bf|it|rm|sf|tt|large|Large|boldmath)(?![A-Za-z])\s?\.?"
)
PHANTOM = re.compile(
    r"\\(?:[hv]?phantom|hspace|vspace|kern|hskip|label|tag)\*?\s*(?:\{[^{}]*\}|(?=[-\s]))"
)
DECORATION = re.compile(
    r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:checkmark|blacksquare|square|qed)(?![A-Za-z])"
)
SEGMENT = re.compile(r"\\overline\s*\{\s*([A-Z]{2,})\s*\}")
SPACES = re.compile(
    r"~|\\[,;:> ]|\\(?:thinspace|medspace|quad|qquad|enspace|space|nobreakspace)(?![A-Za-z])"
)
CIRCLE = (
    r"(?:\\circ(?![A-Za-z])|\\degree(?![A-Za-z])|\\deg(?![A-Za-z])|°|\\(?:text|mathrm)\s*\{o\})"
)
DEGREES = re.compile(
    rf"(?:\{{\s*\}})?\^\s*(?:\{{\s*{CIRCLE}\s*\}}|{CIRCLE})|(?<=[\d}}])\^(?:\{{o\}}|o(?![A-Za-z(]))"
)
TEMPERATURE = re.compile(
    r"\\degree\s*(?:\\(?:text|mathrm|textrm|rm)\s*\{?\s*)?([CF])(?![A-Za-z])\s*\}?"
)
REPEATING = re.compile(
    r"(?<!\d)(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\))"
)
DOTTED = re.compile(
    r"(?<!\d)(\d*)\.(\d*?)(\d{1,12}?)\3{1,20}(?:\\[lcd]?dots[cb]?(?![A-Za-z])|\.{3})"
)
ROW = re.compile(r"\\\\(?:\s*\[[^\]]*(?:pt|em|ex|mm|cm)\])?")
GROUPED = r"(?=\d{3}(?!\d))"
# An empty group, which is nothing; but not that of a command, whose argument is missing.
EMPTY = re.compile(
    rf"((?:\\(?:[dtc]?frac|[dt]?binom|sqrt|{'|'.join(sorted(TEXT_COMMANDS))})(?![A-Za-z])|[}}\]^_])"
    r"\s*\{\s*\})|\{\}"
)
ORDINAL = re.compile(
    r"(?<![\d.,/^_{])(\d+)\s*\^?\s*(?:\{\s*)?(?:\\(?:text|textrm|textit|mathrm|rm|mbox)\s*\{?\s*)?"
    r"(st|nd|rd|th)(?![A-Za-z])\s*\}{0,2}"
)


def clean(text: str) -> str:
    """An answer's text with one spelling for characters, spaces, thousands, degrees and repeating
    decimals, and without delimiters and style."""
    text = ROW.sub(r"\\cr ", text.strip())
    boxed = boxes(text)
    if boxed and BOX.match(text):
        text = boxed[-1][2]
    text = DECORATION.sub("", text).replace("\\textdollar", "\\$").replace("+/-", "\\pm ")
    text = SEGMENT.sub(r"\1", VULGAR.sub(_vulgar, text))
    text = SUPERSCRIPTS.sub(lambda m: f"^{{{m[0].translate(FROM_SUPER)}}}", text)
    text = SUBSCRIPTS.sub(lambda m: f"_{{{m[0].translate(FROM_SUB)}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(SIGNS)).translate(SIGNS)
    text = _undelimited(text)
    text = STYLE.sub(_style, text)
    text = PHANTOM.sub("", text).replace("\\!", "\0")
    text = re.sub(r"(?<=\d)(?:\{,\}|,\s*\0|\0\s*,|,\\,)\s*" + GROUPED, "", text)
    text = re.sub(r"(?<=\d)\{[,.]\}(?=\d)", ".", text).replace("{,}", ",").replace("\0", "")
    text = re.sub(r"(?<=\d)(?:\\[,;: ]|~|\\thinspace ?|'|_)" + GROUPED, "", text)
    text = re.sub(r"(?<=\d)\\,(?=\d{4}(?:\\,\d{4})*_)", "", text)  # of binary numbers
    text = SPACES.sub(" ", text)
    text = re.sub(
        r"(?<![\d.,/])[1-9]\d{0,2}(?: \d{3})+(?![\d/])", lambda m: m[0].replace(" ", ""), text
    )
    text = re.sub(
        r"(?<![\d.])[1-9]\d{0,2}(?:\.\d{3}){2,}(?![\d.])", lambda m: m[0].replace(".", ""), text
    )
    text = DEGREES.sub(r"\\degree ", text)
    text = TEMPERATURE.sub(
        lambda m: r"\text{ celsius}" if m[1] == "C" else r"\text{ fahrenheit}", text
    )
    if "dots" in text or "..." in text:
        text = DOTTED.sub(r"\1.\2\\overline{\3}", text)
    text = REPEATING.sub(_repeating, text)
    text = re.sub(r"\b([apAP])\.\s?[mM]\.?", r"\1m", text)
    text = ORDINAL.sub(_ordinal, EMPTY.sub(r"\1", text))
    text = re.sub(r"(?<=\d)\{:\}(?=\d)", ":", text)
    return " ".join(_french(text).split()).strip().rstrip(".").strip()


def _vulgar(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[2]).partition("⁄")
    return f"{match[1]}\\frac{{{top}}}{{{bottom}}}"


def _ordinal(match: re.Match[str]) -> str:
    """4^{\\text{th}} as 4, where that is how the number's ordinal ends."""
    number = match[1]
    ending = (
        "th" if number[-2:-1] == "1" else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th")
    )
    whole = match[0].count("{") == match[0].count("}")
    return f"{number} " if match[2] == ending and whole else match[0]


def _style(match: re.Match[str]) -> str:
    """The replacement of a command of style: nothing. A dot behind it stays, except in
    `\\left.` and `\\right.`, where it is part of the command."""
    dot = match[0].endswith(".") and not match[0].startswith(("\\left", "\\right"))
    return ". " if dot else " " if match[0].endswith(" ") else ""


def _undelimited(text: str) -> str:
    """The text without the delimiters of a formula and Markdown's bold."""
    before = None
    while text != before:
        before = text
        text = text.strip()
        for opened, closed in (
            ("$$", "$$"),
            ("\\(", "\\)"),
            ("\\[", "\\]"),
            ("**", "**"),
            ("`", "`"),
        ):
            inside = text[len(opened) : -len(closed)]
            if text.startswith(opened) and text.rstrip(".").endswith(closed) and inside:
                text = text.rstrip(".")[len(opened) : -len(closed)]
        if re.fullmatch(r"\$[^$]*(?<!\\)\$\.?", text):
            text = text.rstrip(".")[1:-1]
    if text.count("$") > text.count("\\$"):
        text = _currency(text)
    return text


def _currency(text: str) -> str:
    """Bare dollar signs: money next to a number, delimiters where they come in pairs."""
    bare = [m.start() for m in re.finditer(r"(?<!\\)\$", text)]
    if len(bare) % 2 == 0 and bare:
        return re.sub(r"(?<!\\)\$", "", text)
    return re.sub(r"(?<!\\)\$", r"\\$", text)


def _repeating(match: re.Match[str]) -> str:
    whole, fixed = match[1] or "0", match[2]
    block = match[3] or match[4] or match[5]
    if len(whole + fixed + block) > 200:
        return match[0]
    top = int(whole + fixed + block) - int(whole + fixed)
    bottom = (10 ** len(block) - 1) * 10 ** len(fixed)
    return f"{{\\frac{{{top}}}{{{bottom}}}}}"


def _french(text: str) -> str:
    """]a, b[ as (a, b)."""
    ends = r"([^\[\]()]*,[^\[\]()]*)"
    text = re.sub(rf"(^|[^\w)\]]\s*|\\(?:cup|in)\s*)\]{ends}\[", r"\1(\2)", text)
    text = re.sub(rf"(^|\\(?:cup|in)\s*)\]{ends}\]", r"\1(\2]", text)
    return re.sub(rf"\[{ends}\[(?=$|\s*\\cup)", r"[\1)", text)


# --------------------------------------------------------------------------- reading answers

CHOICE = re.compile(r"^\(?\s*([A-Z])\s*\)\s*[.:,]?\s*(.*)$|^([A-Z])\s*[.:]?$", re.DOTALL)
UNTEXT = re.compile(r"\\(?:" + "|".join(sorted(TEXT_COMMANDS | {"mathbf", "bf"})) + r")\s*(?=\{)")
BASED = re.compile(r"(\d+[A-Z][\dA-Z]*|[A-Z]+\d[\dA-Z]*)_(1[1-9]|2\d|3[0-6])")
GROUPING = re.compile(r"\\(?:[dtc]?frac|sqrt|[dt]?binom)|[\^_]")
PHRASE = re.compile(
    r"(?i)^(?:(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:is\b|:)|option\b|choice\b)\s*:?\s*"
)
NOTHING = frozenset(
    ("no solution", "no solutions", "empty set", "empty", "none", "no real solutions",
     "no real solution", "there are no solutions", "there is no solution")
)  # fmt: skip
ALL_REALS = frozenset(
    ("all real numbers", "all reals", "all real", "real numbers", "the real numbers")
)


@dataclass(frozen=True, slots=True)
class Reading:
    """A reading of an answer. `text`: its normal form as a text. `node`: its tree, None where it is
    only a text. `choice`: the letter of a multiple choice, with the tree of what follows it.
    `groups`: the text with its braces, where those decide what a command of it applies to."""

    text: str
    node: Node | None
    choice: str = ""
    groups: str = ""


@lru_cache(maxsize=8192)
def read(text: str) -> Reading:
    """An answer's reading; never raises."""
    if len(text) > MAX_CHARACTERS:
        return Reading(" ".join(text.split()), None)
    cleaned = clean(text)
    plain = _plain(cleaned)
    choice = CHOICE.match(PHRASE.sub("", _unmarked(cleaned)))
    if choice and _balanced(cleaned) and (letter := choice[1] or choice[3]):
        rest = (choice[2] or "").strip()
        if not rest or UNTEXT.match(cleaned) or cleaned.startswith(("(", "\\(")):
            return Reading(plain, _tree(rest), letter)
    return Reading(plain, _tree(cleaned), groups=_groups(cleaned))


def _tree(cleaned: str) -> Node | None:
    if not _balanced(cleaned):  # the words below have no braces
        return None
    plain = _plain(cleaned)
    if plain in NOTHING:
        return Node("set", ())
    if plain in ALL_REALS:
        return Node("reals", ())
    if plain in NUMBER_WORDS:
        cleaned = str(NUMBER_WORDS[plain])
    if re.fullmatch(r"[A-Z]{2,}", cleaned):  # such as an order of letters
        return None
    based = BASED.fullmatch(UNTEXT.sub("", cleaned).translate(str.maketrans("", "", "{}() ")))
    if based and re.search("[A-Z]", based[1]):
        return Node("based", (based[1], int(based[2])))
    try:
        return parse(cleaned) if cleaned else None
    except (ValueError, RecursionError, ArithmeticError):
        return None


def _unmarked(cleaned: str) -> str:
    """Without the commands and braces of text at the beginning, as in \\textbf{(C)}."""
    match = UNTEXT.match(cleaned)
    if not match:
        return cleaned
    try:
        end = closing(cleaned, match.end())
    except Unreadable:
        return cleaned
    return f"{cleaned[match.end() + 1 : end].strip()} {cleaned[end + 1 :].strip()}".strip()


def _plain(cleaned: str) -> str:
    """The text alone: no commands of text, no braces, one case for words, no space that does not
    part letters or digits."""
    text = UNTEXT.sub("", cleaned)
    worded = not re.search(r"\\[A-Za-z]", text) and not re.search(r"[=^_+*/|<>]", text)
    text = text.replace("{", "").replace("}", "").replace("\\", " ").strip(" .,;:!\"'")
    text = PHRASE.sub("", text)
    if worded and re.search(r"[A-Za-z]{2}", text):
        text = text.lower()
    return re.sub(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", "", text)


def _groups(cleaned: str) -> str:
    """The text with the braces around more than one character; "" where none has an effect."""
    if _balanced(cleaned) and not GROUPING.search(cleaned):
        return ""
    return re.sub(r"\{(\w|\\[A-Za-z]+)\}", r"\1", "".join(UNTEXT.sub("", cleaned).split()))


def _balanced(text: str) -> bool:
    text = re.sub(r"\\[{}]", "", text)
    return text.count("{") == text.count("}")


def spelled(answers: tuple[str, ...]) -> str:
    """Answers in one spelling for a majority's votes: numbers by their value, others by their text;
    "" without any."""
    found = (number_text(a) or read(a).text for a in answers)
    return " ; ".join(text for text in found if text)


# --------------------------------------------------------------------------- comparing


def equivalent(reference: str, answers: tuple[str, ...]) -> bool:
    """Return whether the answers together are the reference's, or each of them is. Never raises:
    answers without a computable value are compared as text."""
    if not answers:
        return False
    if len(answers) > 1:
        joined = ", ".join(answers)
        if _equivalent(reference, joined):
            return True
        node = read(reference).node
        if node is not None and node.kind == "tuple" and _equivalent(reference, f"({joined})"):
            return True
    return all(_equivalent(reference, answer) for answer in answers)


def _equivalent(reference: str, answer: str) -> bool:
    if reference.strip() == answer.strip():
        return bool(answer.strip())
    stated, given = read(reference), read(answer)
    if stated.choice and given.choice:
        return stated.choice == given.choice
    if stated.choice or stated.node is None:
        return bool(stated.text) and (stated.text, stated.groups) == (given.text, given.groups)
    if given.node is None:  # also one that differs from the reference in its braces alone
        return False
    try:
        return same(stated.node, _with_units(stated.node, given.node))
    except (ValueError, ArithmeticError, RecursionError, TypeError):
        return False


def _with_units(reference: Node, answer: Node) -> Node:
    """The answer with the reference's units where it writes them as letters: 4 m."""
    if not has_units(reference):
        return answer
    letters = frozenset(w for w in _unit_words(reference) if len(w) == 1) - symbols(reference)
    return _renamed(answer, letters) if letters else answer


def _unit_words(node: object) -> frozenset[str]:
    if isinstance(node, Node):
        if node.kind == "unit":
            return frozenset(node.args)
        node = node.args
    if isinstance(node, tuple):
        return frozenset().union(*(_unit_words(part) for part in node))
    return frozenset()


def _renamed(node: Node, letters: frozenset[str]) -> Node:
    if node.kind == "sym" and node.args[0] in letters:
        return Node("unit", node.args)
    parts = tuple(_renamed(p, letters) if isinstance(p, Node) else p for p in node.args)
    return Node(node.kind, parts)


# --------------------------------------------------------------------------- numbers of gsm8k


def number_text(text: str) -> str | None:
    """A reference's number, as an integer, a decimal or a fraction; None where it is none."""
    node = read(text).node
    if node is None:
        return None
    try:
        value = rational(node)
        if value.denominator == 1:
            return str(value.numerator)
        decimal = Decimal(value.numerator) / Decimal(value.denominator)
        return f"{decimal:f}" if Fraction(decimal) == value else str(value)
    except (ValueError, ArithmeticError, KeyError):  # none, or of too many digits
        return None


def is_number(reference: str, found: Found) -> bool:
    """Return whether a response's answer is the reference's number. In prose, its only number
    counts, or the first of several that no "or" joins."""
    if not found.texts:
        return False
    text = found.texts[-1].rstrip(" !")
    if read(text).node is not None:
        return equivalent(reference, (text,))
    prose = re.sub(r"\([^()]*\)", "", clean(text)).rpartition("=")[2]
    numbers = PLAIN.findall(prose)
    if not numbers or (len(set(numbers)) > 1 and CHOSEN.match(prose.strip())):
        return False
    return equivalent(reference, (numbers[0],))
