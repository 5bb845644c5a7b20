"""A rule on what text may do in the process that scores it: be evaluated as arithmetic, no more.

Scorers call `eval`, or parsers that end in it (sympy's), on text that a model wrote. An audit hook
sees every piece of code before Python runs it. Code that does not come from a module's file may
hold constants, containers, operators, and calls of elementary functions. Anything else is refused
before its first instruction, and the answer counts as wrong. That includes attributes, subscripts,
assignments, imports, lambdas, loops, and names of the scorer's variables, such as the reference
answer. So the process that computes a score executes nothing that could change it.

Also refused are what neither arithmetic nor a scorer needs: processes, sockets, writing of files,
classes named by a pickle.

What it does not cover: text that an extension module interprets without the interpreter of Python.
The confinement of the process holds for that as well, yet it could change its own score.
"""

from __future__ import annotations

import dis
import os
import sys
from types import CodeType, FrameType
from typing import Any

_OPERATIONS = """
RESUME CACHE NOP PRECALL CALL KW_NAMES PUSH_NULL LOAD_CONST LOAD_NAME LOAD_GLOBAL BUILD_LIST
BUILD_TUPLE BUILD_SET BUILD_MAP BUILD_CONST_KEY_MAP LIST_EXTEND LIST_APPEND LIST_TO_TUPLE SET_UPDATE
DICT_UPDATE DICT_MERGE UNARY_NEGATIVE UNARY_POSITIVE UNARY_NOT UNARY_INVERT BINARY_OP COMPARE_OP
CONTAINS_OP IS_OP RETURN_VALUE POP_TOP COPY SWAP JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP
POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE JUMP_FORWARD
"""
_FUNCTIONS = """
abs bool ceil comb complex cos cosh acos acosh acot acsc asec asin asinh atan atan2 atanh cbrt cot
coth csc csch deg degrees dict exp expm1 factorial float floor frozenset gcd hypot int isqrt lcm
list ln log log10 log1p log2 max min perm pow radians round sec sech set sign sin sinh sqrt str sum
tan tanh tuple trunc Decimal Fraction
"""
# which sympy's parser writes into the text or knows as numbers, and its forms of the above
_SYMPY = """
Symbol Integer Float Rational Function Add Mul Pow Abs Max Min E I pi oo zoo nan GoldenRatio
EulerGamma binomial ceiling conjugate erf erfc factorial2 gamma im re root sinc Eq Ne Lt Le Gt Ge
And Or Not Xor Tuple Matrix true false
"""
# audit events, or how their names begin
_REFUSED = """
os.exec os.fork os.forkpty os.posix_spawn os.spawn os.system os.kill os.killpg subprocess. pty.
socket. pickle.find_class ctypes.dlopen code.__new__ function.__new__ sys.addaudithook sys.settrace
sys.setprofile sys._current_frames gc. os.remove os.rename os.mkdir os.rmdir os.link os.symlink
os.chmod os.chown os.truncate os.putenv
"""
OPERATIONS = frozenset(_OPERATIONS.split())
FUNCTIONS = frozenset(_FUNCTIONS.split())
SYMPY = FUNCTIONS | frozenset(_SYMPY.split())
REFUSED = tuple(_REFUSED.split())
SYMPY_EVAL = os.path.join("sympy", "parsing", "sympy_parser.py"), "eval_expr"
# (file, function) that executes source which it made itself
OWN_SOURCE = (
    (os.path.join("collections", "__init__.py"), "namedtuple"),
    ("dataclasses.py", "_create_fn"),
    (os.path.join("sympy", "parsing", "sympy_parser.py"), "parse_expr"),
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SHOWN = 80  # characters


class ExecutionRefused(PermissionError):
    """Raised in place of an event that the rule refuses."""


class ArithmeticOnly:
    """The rule, in force in this process from `install` until its end. `why`: the first refusal
    that makes an answer wrong, "" without one."""

    def __init__(self) -> None:
        self.why = ""

    def install(self) -> None:
        """Hooks cannot be removed: for a process that scores one answer."""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "exec":
            if isinstance(args[0], CodeType):
                self._check(args[0], sys._getframe(1))
        elif event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & WRITES and path != os.devnull:
                self._refuse("writes a file")
        elif event.startswith(REFUSED):
            self._refuse(f"asks for {event}")

    def _check(self, code: CodeType, caller: FrameType) -> None:
        if _is_module(code) or any(_is(caller, *known) for known in OWN_SOURCE):
            return
        if _imports(caller):  # source that a module makes as it is imported, which no text can ask
            return
        used = {instruction.opname for instruction in dis.get_instructions(code)}
        nested = any(isinstance(constant, CodeType) for constant in code.co_consts)
        if not used <= OPERATIONS or nested:
            self._refuse(
                f"executes text that is not arithmetic ({min(used - OPERATIONS, default='')})"
            )
        unknown = [name for name in code.co_names if not _known(name, caller)]
        if unknown and "CALL" in used:
            self._refuse(f"executes text that names {unknown[0]}"[:SHOWN])
        if unknown:  # of a word it is the usual error, and nothing was called
            raise NameError(f"name {unknown[0]!r} is not defined")

    def _refuse(self, why: str) -> None:
        self.why = self.why or why
        raise ExecutionRefused(f"isolation: it {why}")


def _is_module(code: CodeType) -> bool:
    """True for the code of a module that is being imported."""
    name = code.co_filename
    return code.co_name == "<module>" and (os.path.isabs(name) or name.startswith("<frozen "))


def _imports(frame: FrameType | None) -> bool:
    """True if a frame, or one that called it, imports a module."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _is(caller: FrameType, path: str, function: str) -> bool:
    code = caller.f_code
    return code.co_name == function and code.co_filename.endswith(os.sep + path)


def _known(name: str, caller: FrameType) -> bool:
    """True for a name that text may use: an elementary function, or a variable that a scorer gave
    to sympy's parser. A name that the calling scorer has given to anything else is its own."""
    if _is(caller, *SYMPY_EVAL):
        return name in SYMPY or name in (caller.f_locals.get("local_dict") or {})
    own = caller.f_locals.get(name, caller.f_globals.get(name))
    return name in FUNCTIONS and (own is None or callable(own))
