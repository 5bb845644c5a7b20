"""Mathematical answers as trees: `parse`.

Nesting is bounded; text outside of the grammar raises `Unreadable`."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from rlcore.graders.mathematics.math_tokens import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_EXPONENT,
    Lexeme,
    Unreadable,
    tokens_of,
)
from rlcore.graders.mathematics.math_words import CURRENCIES, NUMBER_WORDS, words


class Node(NamedTuple):
    """A tree. Kinds of expressions: num (value, text), sym (name), unit (word), add, mul, div, pow,
    neg, fn (name, arguments...), pm (left or None, right, sign). Of answers: list (items, seps),
    set (items), tuple (open, items, close), matrix (rows, fence), rel (operators, sides), ratio
    (parts), based (digits, base), union, cap, minus, builder (variable, conditions), reals."""

    kind: str
    args: tuple[Any, ...]


def parse(text: str) -> Node:
    """The answer in `text`, cleaned by `math_answers.clean`. Raises Unreadable."""
    tokens = tokens_of(text)
    if all(token.kind == "word" for token in tokens):
        raise Unreadable("words only")
    return _Parser(tokens).whole()


RELATIONS = tuple(words("= < > \\le \\ge \\neq \\in \\approx \\equiv \\sim \\notin"))
SEPARATORS = (",", ";", "\\and", "\\or", "and", "or")
SETS = {"\\cup": "union", "\\cap": "cap", "\\setminus": "minus"}
STARTS = frozenset(
    words(
        "( [ { \\{ \\langle \\frac \\binom \\infty \\emptyset \\lfloor \\lceil \\angle \\triangle"
    )
)
MATRICES = frozenset(words("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array"))


class _Parser:
    def __init__(self, tokens: list[Lexeme]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._bars = 0  # open |

    def whole(self) -> Node:
        node = self._listing(())
        if self._at < len(self._tokens):
            raise Unreadable("something follows the answer")
        return node

    def _peek(self, ahead: int = 0) -> Lexeme:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else Lexeme("end", "", False)

    def _is(self, *texts: str) -> bool:
        token = self._peek()
        return token.kind == "op" and token.text in texts

    def _accept(self, *texts: str) -> str:
        if self._is(*texts):
            self._at += 1
            return self._tokens[self._at - 1].text
        return ""

    def _expect(self, *texts: str) -> str:
        found = self._accept(*texts)
        if not found:
            raise Unreadable(f"{texts[0]} is missing")
        return found

    def _listing(self, stops: tuple[str, ...]) -> Node:
        items, separators = [self._relation()], set()
        while self._is(*SEPARATORS):
            while self._is(*SEPARATORS):
                separators.add(self._accept(*SEPARATORS).strip("\\"))
            if self._peek().kind == "end" or self._is(*stops):
                break
            items.append(self._relation())
        if len(items) == 1:
            return items[0]
        return Node("list", (tuple(items), frozenset(separators - {",", ";"})))

    def _relation(self, *, ratio: bool = True) -> Node:
        if self._is(*RELATIONS):  # "= 5" behind a phrase
            self._accept("=", "\\approx")
        sides, operators = [self._sets()], []
        while self._is(*RELATIONS):
            operators.append(self._accept(*RELATIONS))
            sides.append(self._sets())
        if operators:
            return Node("rel", (tuple(operators), tuple(sides)))
        if ratio and self._is(":"):
            while self._accept(":"):
                sides.append(self._sets())
            return Node("ratio", tuple(sides))
        return sides[0]

    def _sets(self) -> Node:
        node = self._sum()
        while self._is(*SETS):
            kind = SETS[self._accept(*SETS)]
            node = Node(kind, (node, self._sum()))
        return node

    def _sum(self) -> Node:
        self._deeper(1)
        if self._is("\\pm", "\\mp"):
            sign = 1 if self._accept("\\pm", "\\mp") == "\\pm" else -1
            node = Node("pm", (None, self._term(), sign))
        else:
            node = self._term()
        while self._is("+", "-", "\\pm", "\\mp"):
            operator = self._accept("+", "-", "\\pm", "\\mp")
            right = self._term()
            if operator in "+-":
                node = Node("add", (node, right if operator == "+" else Node("neg", (right,))))
            else:
                node = Node("pm", (node, right, 1 if operator == "\\pm" else -1))
        self._deeper(-1)
        return node

    def _deeper(self, by: int) -> None:
        self._depth += by
        if self._depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")

    def _term(self) -> Node:
        node = self._signed()
        while True:
            if self._accept("*"):
                node = Node("mul", (node, self._signed()))
            elif self._accept("/"):
                node = Node("div", (node, self._signed()))
            elif self._starts_factor():
                if self._peek().kind == "num" and not _is_currency(node):
                    raise Unreadable("a number follows a factor")
                node = Node("mul", (node, self._power()))
            else:
                return node

    def _signed(self) -> Node:
        minus = False
        while self._is("+", "-"):
            minus ^= self._accept("+", "-") == "-"
        node = self._power()
        if _is_currency(node) and self._accept("-"):  # $-5
            minus = not minus
        return Node("neg", (node,)) if minus else node

    def _starts_factor(self) -> bool:
        token = self._peek()
        if token.kind in ("num", "let", "word", "fn"):
            return True
        opens_bar = token.text in ("|", "\\vert") and not self._bars
        return token.kind == "op" and (
            token.text in STARTS or token.text.startswith("begin:") or opens_bar
        )

    def _power(self) -> Node:
        node = self._primary()
        while True:
            if self._accept("^"):
                node = Node("pow", (node, self._exponent()))
            elif self._accept("!"):
                if self._is("!"):
                    raise Unreadable("double factorial")
                node = Node("fn", ("factorial", node))
            elif self._accept("\\%"):
                node = Node("mul", (node, Node("unit", ("%",))))
            elif self._accept("\\degree"):
                node = Node("mul", (node, Node("unit", ("degree",))))
            elif self._is("_"):
                node = self._subscript(node)
            elif self._is("'") and node.kind == "sym":
                self._accept("'")
                node = Node("sym", (node.args[0] + "'",))
            else:
                return node

    def _exponent(self) -> Node:
        self._deeper(1)
        minus = bool(self._accept("-"))
        node = self._primary()
        if self._is("^"):  # 9^9^9, as plain text has it
            self._accept("^")
            node = Node("pow", (node, self._exponent()))
        self._deeper(-1)
        return Node("neg", (node,)) if minus else node

    def _subscript(self, node: Node) -> Node:
        self._accept("_")
        if self._is("{"):
            inside = []
            depth = 0
            while self._peek().kind != "end":
                token = self._peek()
                self._at += 1
                depth += (token.text == "{") - (token.text == "}")
                if depth == 0:
                    break
                inside.append(token)
            else:
                raise Unreadable("a subscript is not closed")
            inside = inside[1:]
        else:
            inside = [self._peek()]
            self._at += 1
        if node.kind == "sym":
            return Node("sym", (f"{node.args[0]}_{''.join(t.text for t in inside)}",))
        inside = [t for t in inside if t.text.lower() not in ("base", "(", ")")]
        if node.kind != "num" or len(inside) != 1 or "." in node.args[1]:
            raise Unreadable("a subscript of no symbol and no number")
        text = inside[0].text.lower()
        base = int(text) if text.isdecimal() and len(text) < 4 else NUMBER_WORDS.get(text)
        if base is None:
            raise Unreadable("no base")
        return Node("based", (node.args[1].lstrip("0") or "0", base))

    def _primary(self) -> Node:
        self._deeper(1)
        token = self._peek()
        self._at += 1
        if token.kind == "num":
            node = self._mixed(token.text)
        elif token.kind == "let":
            node = Node("reals", ()) if token.text == "bb:R" else Node("sym", (token.text,))
        elif token.kind == "word":
            node = Node("unit", (token.text,))
        elif token.kind == "fn":
            node = self._function(token.text)
        elif token.kind == "op":
            node = self._structure(token.text)
        else:
            raise Unreadable("the answer ends too early")
        self._deeper(-1)
        return node

    def _mixed(self, text: str) -> Node:
        """A number, with the fraction that may follow it: 1\\frac{4}{5} or 1 4/5."""
        whole = Node("num", (number(text), text))
        start, tokens = self._at, self._tokens  # digits are taken from a copy of the tokens
        if not text.isdecimal():
            return whole
        if self._accept("\\frac"):
            top, bottom = self._single(), self._single()
            if _proper(top, bottom):
                return Node("add", (whole, Node("div", (top, bottom))))
        elif self._peek().kind == "num" and self._peek().spaced and self._peek(1).text == "/":
            over, under = self._peek(), self._peek(2)
            if under.kind == "num" and over.text.isdecimal() and under.text.isdecimal():
                self._at += 3
                nodes = [Node("num", (number(t.text), t.text)) for t in (over, under)]
                if _proper(*nodes):
                    return Node("add", (whole, Node("div", tuple(nodes))))
        self._at = start
        self._tokens = tokens
        return whole

    def _single(self, *, digits: bool = True) -> Node:
        """An argument of a command: a group, or one token; of a number its first digit."""
        if self._accept("{"):
            node = self._listing(("}",))
            self._expect("}")
            return node
        token = self._peek()
        if token.kind == "num" and digits and len(token.text) > 1:
            self._tokens = list(self._tokens)
            self._tokens[self._at] = Lexeme("num", token.text[1:], False)
            return Node("num", (number(token.text[0]), token.text[0]))
        return self._primary()

    def _function(self, name: str) -> Node:
        if name == "sqrt":
            degree = None
            if self._accept("["):
                degree = self._sum()
                self._expect("]")
            inside = self._single(digits=False)
            return Node("fn", ("root", inside, degree) if degree else ("sqrt", inside))
        base = power = None
        while self._is("^", "_"):
            if self._accept("_"):
                base = self._single()
            else:
                self._accept("^")
                power = self._exponent()
        argument = self._application()
        if base is not None and name != "log":
            raise Unreadable(f"{name} with a subscript")
        if name in ("gcd", "lcm", "min", "max") and argument.kind != "tuple":
            raise Unreadable(name)
        parts = argument.args[1] if argument.kind == "tuple" else (argument,)
        if power == Node("neg", (Node("num", (Fraction(1), "1")),)):
            return Node("fn", (f"arc{name}", *parts))
        node = Node("fn", (name, *parts, *((base,) if base is not None else ())))
        return node if power is None else Node("pow", (node, power))

    def _application(self) -> Node:
        """Parse the argument of a function: a bracket alone, else factors up to the next
        operator."""
        if self._is("(", "[", "{", "|"):
            return self._power()
        node = self._signed()
        while self._starts_factor() and self._peek().kind not in ("fn", "num", "word"):
            if self._is("("):
                break
            node = Node("mul", (node, self._power()))
        return node

    def _structure(self, text: str) -> Node:
        if text in ("(", "[", "\\langle"):
            return self._bracket(text)
        if text == "{":
            node = self._listing(("}",))
            if self._accept("\\over"):
                node = Node("div", (node, self._listing(("}",))))
            elif self._accept("\\choose"):
                node = Node("fn", ("binom", node, self._listing(("}",))))
            self._expect("}")
            return Node("set", node.args[0]) if node.kind == "list" else node
        if text == "\\{":
            return self._set()
        if text == "\\frac":
            return Node("div", (self._single(), self._single()))
        if text == "\\binom":
            return Node("fn", ("binom", self._single(), self._single()))
        if text in ("|", "\\vert", "\\lfloor", "\\lceil"):
            return self._bars_of(text)
        if text.startswith("begin:"):
            return self._matrix(text[6:])
        if text in ("\\infty", "\\angle", "\\triangle"):
            return Node("sym", (text[1:],))
        if text == "\\emptyset":
            return Node("set", ())
        raise Unreadable(f"{text} begins nothing")

    def _bracket(self, opened: str) -> Node:
        bars, self._bars = self._bars, 0
        node = self._listing((")", "]", "\\rangle"))
        closed = self._expect(")", "]", "\\rangle")
        self._bars = bars
        if node.kind != "list":
            if opened == "[" and node.kind == "tuple" and closed == "]":  # [[1, 2]]
                return Node("tuple", ("[", (node,), "]"))
            if (opened == "[") != (closed == "]"):
                raise Unreadable("brackets do not match")
            return node
        opened, closed = opened.replace("\\langle", "("), closed.replace("\\rangle", ")")
        return Node("tuple", (opened, node.args[0], closed))

    def _set(self) -> Node:
        if self._accept("\\}"):
            return Node("set", ())
        bars, self._bars = self._bars, 1
        first = self._relation(ratio=False)
        self._bars = 0
        if self._accept(":", "|", "\\mid", "\\vert"):
            node = Node("builder", (first, self._listing(("\\}",))))
        else:
            items = [first]
            while self._accept(*SEPARATORS):
                items.append(self._relation())
            node = Node("set", tuple(items))
        self._expect("\\}")
        self._bars = bars
        return node

    def _bars_of(self, text: str) -> Node:
        ends = {"\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}.get(text, text)
        bars, self._bars = self._bars, int(text in ("|", "\\vert"))
        node = self._sum()
        self._expect(ends)
        self._bars = bars
        return Node("fn", ({"\\lfloor": "floor", "\\lceil": "ceil"}.get(text, "abs"), node))

    def _matrix(self, name: str) -> Node:
        if name not in MATRICES:
            raise Unreadable(name)
        rows: list[list[Node]] = [[]]
        while not self._is(f"end:{name}"):
            if self._accept("\\row"):
                rows.append([])
            elif not self._accept("&"):
                rows[-1].append(self._relation())
        self._expect(f"end:{name}")
        cells = tuple(tuple(row) for row in rows if row)
        if not cells or len({len(row) for row in cells}) > 1:
            raise Unreadable("rows of a matrix differ in length")
        return Node("matrix", (cells, "v" if name.lower() == "vmatrix" else ""))


def number(text: str) -> Fraction:
    """The exact value of a decimal number. Raises Unreadable where it is too long."""
    mantissa, _, exponent = text.lower().partition("e")
    if len(text) > MAX_DIGITS or (exponent and abs(int(exponent)) > MAX_EXPONENT):
        raise Unreadable("a number is too long")
    whole, _, decimals = mantissa.partition(".")
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    return value * Fraction(10) ** int(exponent) if exponent else value


def _is_currency(node: Node) -> bool:
    inner = node.args[0] if node.kind == "neg" else node
    return inner.kind == "unit" and inner.args[0].lower() in CURRENCIES


def _proper(top: Node, bottom: Node) -> bool:
    return (
        top.kind == bottom.kind == "num"
        and top.args[1].isdecimal()
        and bottom.args[1].isdecimal()
        and top.args[0] < bottom.args[0]
    )
