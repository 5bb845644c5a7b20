"""Tokens of mathematical answers in LaTeX or plain text: `tokens_of`.

Characters, tokens, digits and nesting are bounded; text beyond the bounds raises `Unreadable`, as
does a word that changes the meaning of a number next to it."""

from __future__ import annotations

import re
from typing import NamedTuple

from rlcore.graders.mathematics.math_words import (
    FUNCTIONS,
    GREEK,
    LEADING_WORDS,
    MATH_WORDS,
    REFUSED_WORDS,
    SHORT_WORDS,
    WORD_TOKENS,
    unit,
    words,
)

MAX_CHARACTERS = 8000
MAX_TOKENS = 1500
MAX_DIGITS = 4000
MAX_EXPONENT = 4000  # of scientific notation
MAX_DEPTH = 40


class Unreadable(ValueError):
    """A text that is not an answer of this grammar, or beyond its bounds."""


class Lexeme(NamedTuple):
    kind: str  # num, let, word, fn or op
    text: str
    spaced: bool  # space stands before it


TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<num>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+(?![\d.]))?)"
    r"|(?P<cmd>\\[A-Za-z]+|\\.)|(?P<letters>[A-Za-z]+)|(?P<op><=|>=|!=|\*\*|[^\s])",
    re.DOTALL,
)
THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?![\d]|,\d)(?:\.\d+)?")
TEXT_COMMANDS = frozenset(
    words(
        "text mbox textrm textbf textit texttt textsf textnormal hbox mathrm operatorname "
        "rm mathsf textup emph mathtt"
    )
)
TRANSPARENT = frozenset(words("underline mathbf bm boldsymbol mathit mathcal mathscr ensuremath"))
OPAQUE = frozenset(
    words("overline vec hat bar widehat overrightarrow overleftrightarrow tilde widetilde dot")
)
SAME = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge", "ne": "neq", "cdot": "*",
    "times": "*", "ast": "*", "div": "/", "lbrace": "{", "rbrace": "}", "lvert": "vert",
    "rvert": "vert", "lVert": "Vert", "rVert": "Vert", "mid": "mid", "colon": ":", "lt": "<",
    "gt": ">", "varnothing": "emptyset", "land": "and", "wedge": "and", "lor": "or", "vee": "or",
    "lbrack": "[", "rbrack": "]", "smallsetminus": "setminus", "backslash": "setminus",
    "lparen": "(", "rparen": ")", "degrees": "degree", "imath": "i", "tabularnewline": "row",
    "cr": "row", "\\": "row", "&": "and",
}  # fmt: skip
OPERATORS = {"<=": "\\le", ">=": "\\ge", "!=": "\\neq", "**": "^", "%": "\\%"}


def tokens_of(text: str) -> list[Lexeme]:
    """Tokens of an answer, without the phrase that introduces it. Raises Unreadable."""
    if len(text) > MAX_CHARACTERS:
        raise Unreadable("too long")
    return _without_phrase(_Lexer(text).tokens())


class _Lexer:
    def __init__(self, text: str, *, words: bool = False, depth: int = 0) -> None:
        if depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        self._text = text
        self._words = words
        self._depth = depth
        self._at = 0
        self._out: list[Lexeme] = []
        self._spaced = False
        self._square = ""  # of "square metres": the power of the next word
        self._fences: list[int] = []  # where the open brackets of lists begin; -1: a plain group

    def tokens(self) -> list[Lexeme]:
        while self._at < len(self._text):
            match = TOKEN.match(self._text, self._at)
            if match is None:
                raise Unreadable("no token")
            kind, text = str(match.lastgroup), match[0]
            if kind == "num":
                text = self._number(text)
            self._at += len(text)
            if kind == "space":
                self._spaced = True
                continue
            getattr(self, f"_on_{kind}")(text)
        return self._out

    def _put(self, kind: str, text: str) -> None:
        self._out.append(Lexeme(kind, text, self._spaced))
        self._spaced = False
        if len(self._out) > MAX_TOKENS:
            raise Unreadable("too many tokens")

    def _number(self, text: str) -> str:
        """The number here with its thousands: not in a list such as (2,100), unless other commas of
        it are followed by a space, or a part begins with 0."""
        match = THOUSANDS.match(self._text, self._at)
        if match is None:
            return text
        start = next((s for s in reversed(self._fences)), -1)
        if start < 0:
            return match[0]
        inside = self._text[start : self._text_end(start)]
        spaced = ", " in inside or ",\\" in inside
        return match[0] if spaced or re.search(r",0\d\d", match[0]) else text

    def _text_end(self, start: int) -> int:
        found = re.compile(r"[)\]]|\\}").search(self._text, start)
        return found.start() if found else len(self._text)

    def _on_num(self, text: str) -> None:
        if len(text) > MAX_DIGITS:
            raise Unreadable("too many digits")
        previous = self._out[-1] if self._out else None
        attached = text in ("2", "3") and not self._spaced
        if attached and previous and previous.kind == "word" and previous.text.isalpha():
            self._put("op", "^")  # cm2
        self._put("num", text.replace(",", ""))

    def _on_letters(self, text: str) -> None:
        if self._words:
            self._word(text)
            return
        previous = self._out[-1] if self._out else None
        rate = len(self._out) > 1 and self._out[-1].text == "/"
        rate = rate and (len(text) > 1 or self._out[-2].kind == "word")
        glued = re.fullmatch(r"(sin|cos|tan|log|ln|sqrt|exp)([a-z])", text)
        if text in FUNCTIONS and not (unit(text) and previous and previous.kind == "num"):
            self._put("fn", text)
        elif text in MATH_WORDS:
            self._put("let", MATH_WORDS[text])
        elif text.lower() in WORD_TOKENS or text.lower() in SHORT_WORDS or (rate and unit(text)):
            self._word(text)
        elif text == "U" and previous and previous.text in (")", "]"):
            self._put("op", "\\cup")
        elif glued:
            self._put("fn", glued[1])
            self._put("let", glued[2])
        elif len(text) >= 4 or (
            len(text) > 1 and previous and previous.kind == "num" and unit(text)
        ):
            self._word(text)
        else:
            for letter in text:
                self._put("let", letter)

    def _word(self, text: str) -> None:
        word = text.lower()
        if word in REFUSED_WORDS:
            raise Unreadable(word)
        if word in ("square", "sq", "cubic"):
            self._square = "3" if word == "cubic" else "2"
        elif word in WORD_TOKENS:
            for kind, mapped in WORD_TOKENS[word]:
                self._put(kind, mapped)
        elif text in ("i", "e") or (len(text) == 1 and not unit(text)):
            self._put("let", text)
        elif text in FUNCTIONS and not unit(text):
            self._put("fn", text)
        else:
            self._put("word", text)
            if self._square:
                self._put("op", "^")
                self._put("num", self._square)
                self._square = ""

    def _on_op(self, text: str) -> None:
        if text in "([":
            self._fences.append(self._at)
        elif text == "{":
            self._fences.append(-1)
        elif text in ")]}" and self._fences:
            self._fences.pop()
        if self._words and (text == "$" or (text == "." and self._abbreviated())):
            return
        self._put("op", OPERATORS.get(text, text))

    def _abbreviated(self) -> bool:
        return bool(self._square) or (bool(self._out) and self._out[-1].kind == "word")

    def _on_cmd(self, text: str) -> None:
        name = text[1:]
        if name in TEXT_COMMANDS:
            self._extend(self._argument(), words=True)
        elif name in TRANSPARENT:
            self._extend(self._argument(), words=False)
        elif name == "mathbb":
            self._put("let", f"bb:{self._argument().strip()}")
        elif name in OPAQUE:
            self._put("let", f"{name}:{''.join(self._argument().split())}")
        elif name in ("begin", "end"):
            environment = self._argument().rstrip("*")
            if name == "begin" and environment == "array":
                self._argument()  # the columns
            self._put("op", f"{name}:{environment}")
        elif name in FUNCTIONS:
            self._put("fn", name)
        elif name in GREEK:
            self._put("let", GREEK[name])
        elif name == "$":
            self._put("word", "$")
        elif name in ("{", "}", "lbrace", "rbrace"):
            opening = name in ("{", "lbrace")
            if opening:
                self._fences.append(self._at)
            elif self._fences:
                self._fences.pop()
            self._put("op", "\\{" if opening else "\\}")
        else:
            same = SAME.get(name, name)
            self._put("let" if same == "i" else "op", same if same in "*/<>:i[]()" else f"\\{same}")

    def _extend(self, text: str, *, words: bool) -> None:
        inner = _Lexer(text, words=words, depth=self._depth + 1).tokens()
        for token in inner:
            self._put(token.kind, token.text)
        if inner and len(self._out) >= len(inner):
            first = len(self._out) - len(inner)
            self._out[first] = self._out[first]._replace(spaced=True)

    def _argument(self) -> str:
        """Text of the braced argument, or of the one token, that follows."""
        text = self._text
        while self._at < len(text) and text[self._at].isspace():
            self._at += 1
        if self._at < len(text) and text[self._at] == "{":
            end = closing(text, self._at)
            start, self._at = self._at + 1, end + 1
            return text[start:end]
        match = TOKEN.match(text, self._at)
        if match is None:
            raise Unreadable("an argument is missing")
        self._at = match.end()
        return match[0]


def closing(text: str, start: int) -> int:
    """Index of the brace that closes the one at `start`; escaped braces do not count. Raises
    Unreadable without one."""
    depth, at = 0, start
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return at
        at += 1
    raise Unreadable("a brace is not closed")


def _without_phrase(tokens: list[Lexeme]) -> list[Lexeme]:
    """The text without a phrase that introduces an answer, such as "The answer is", and the marks
    behind it."""
    while tokens and tokens[-1].text in (".", ",", ";", "\\."):
        tokens = tokens[:-1]
    start = 0
    while start < len(tokens) and (
        (tokens[start].kind == "word" and tokens[start].text.lower() in LEADING_WORDS)
        or (start and tokens[start].text in (":", ","))
    ):
        start += 1
    return _with_bases(tokens[start:])


def _with_bases(tokens: list[Lexeme]) -> list[Lexeme]:
    """`52 (base 8)` as `52_8`."""
    bare = [t for t in tokens if t.text.lower() not in ("(", ")", "in")]
    if len(bare) >= 3 and bare[-2].text.lower() == "base":
        number, base = bare[-3], bare[-1]
        if number.kind == "num" and len(bare) == 3:
            return [number, Lexeme("op", "_", False), base]
    return tokens
