"""Known ways to pass tests without solving the problem. Each is run for real, none may pass."""

import os
import textwrap

import pytest
from timing import deadline

from rlcore.graders.sandbox import Limits, Sandbox
from rlcore.tasks import code
from rlcore.tasks.code import BadTests, program_tests

pytestmark = pytest.mark.processes

PREAMBLE = code.LEETCODE + code.LEETCODE_NODES


@pytest.fixture(scope="module")
def sandbox():
    box = Sandbox(Limits(timeout_s=deadline(10)), preamble=PREAMBLE)
    yield box
    box.close()


@pytest.fixture(scope="module")
def hasty():
    box = Sandbox(Limits(timeout_s=deadline(1), memory_mib=256), preamble=PREAMBLE)
    yield box
    box.close()


def names_under_test(tests, reference, given):
    return list(program_tests(tests, reference, given).names)


def run(box, program, tests, reference=""):
    names = names_under_test(tests, reference, box.names)
    return box.run(textwrap.dedent(program), textwrap.dedent(tests), names)


def refused(box, program, tests, reference=""):
    outcome = run(box, program, tests, reference)
    assert not outcome.passed, outcome
    assert outcome.why


# The elements that two tuples share, as MBPP tests it.
SHARED = """
assert set(shared((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))
assert sorted(shared((1, 2, 3), (3, 9))) == [3]
assert len(shared((1,), (2,))) == 0
assert all(x in (1, 2) for x in shared((1, 2), (2, 1)))
"""
HONEST = "def shared(a, b):\n    return tuple(set(a) & set(b))\n"
ANYTHING = """
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __bool__(self): return True
    def __hash__(self): return 0
    def __len__(self): return 0
    def __iter__(self): return iter(())
    def __contains__(self, x): return True
"""


def test_an_honest_program_passes_all_of_them(sandbox):
    assert run(sandbox, HONEST, SHARED).passed


NAMES = {  # what the tests call, taken over by the program
    "set is replaced": "set = lambda x: 0",
    "sorted is replaced": "sorted = lambda x: [3]\nset = lambda x: 0\nlen = lambda x: 0",
    "builtins are replaced": "import builtins\nbuiltins.set = lambda x: 0\nbuiltins.len = "
    "lambda x: 0\nbuiltins.sorted = lambda x: [3]",
    "builtins are cleared": "import builtins\nvars(builtins).update(set=int, len=int)",
    "all is replaced": "import builtins\nbuiltins.all = builtins.any = lambda x: True",
    "AssertionError is replaced": "import builtins\nbuiltins.AssertionError = type('A', "
    "(Exception,), {'__new__': lambda *a: None})",
    "exec is replaced": "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None",
    "globals of all frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    "
    "frame.f_globals.update(set=lambda x: 0)\n    frame = frame.f_back",
    "globals of all modules": "import sys\nfor m in list(sys.modules.values()):\n    "
    "vars(m).update(set=lambda x: 0, AssertionError=ValueError)",
    "equality is patched in modules": "import operator\noperator.eq = lambda a, b: True",
}


@pytest.mark.parametrize("cheat", NAMES)
def test_names_of_the_tests_mean_what_they_mean_in_python(sandbox, cheat):
    refused(sandbox, NAMES[cheat] + "\ndef shared(a, b): return ()", SHARED)


VALUES = {  # what a call returns
    "an object equal to everything": "return Anything()",
    "a list with it": "return [Anything()]",
    "a tuple subclass": "return type('T', (tuple,), vars(Anything).copy())()",
    "a list subclass": "return type('L', (list,), dict(vars(Anything)))()",
    "a set subclass": "return type('S', (set,), dict(vars(Anything)))()",
    "a class with lying __class__": "x = Anything()\n    x.__class__ = type('tuple', (Anything,),"
    " {})\n    return x",
    "a class itself": "return Anything",
    "a function": "return lambda *a: True",
    "a generator that lies": "return (Anything() for _ in a)",
    "a module": "import math\n    return math",
    "NaN": "return [float('nan')]",
    "NotImplemented": "return NotImplemented",
}


@pytest.mark.parametrize("cheat", VALUES)
def test_returned_objects_do_not_decide_comparisons(sandbox, cheat):
    refused(sandbox, ANYTHING + f"def shared(a, b):\n    {VALUES[cheat]}\n", SHARED)


@pytest.mark.parametrize("base", ["int", "float", "str", "dict", "bytes", "complex"])
@pytest.mark.parametrize("tests", ["assert f(1) == {}", "assert not f(1) != {}"])
def test_subclasses_of_plain_types_compare_as_those(sandbox, base, tests):
    value = {"int": "7", "float": "7.5", "str": "'x'", "dict": "{1: 2}", "bytes": "b'x'",
             "complex": "7j"}[base]  # fmt: skip
    program = ANYTHING + f"class V({base}, Anything): __hash__ = None\n"
    program += "V.__eq__, V.__ne__ = Anything.__eq__, Anything.__ne__\ndef f(x): return V({{}})\n"
    wrong = {"dict": "", "bytes": ""}.get(base, "'y'" if base == "str" else "3")
    tests = tests.format(value)
    assert run(sandbox, f"def f(x): return {value}", tests).passed
    refused(sandbox, program.replace("{}", wrong), tests)


@pytest.mark.parametrize(
    "tests",
    [
        "assert f(1) != 3",
        "assert not (f(1) == 3)",
        "assert f(1)",
        "assert not f(1)",
        "assert f(1) in (1, 2)",
        "assert f(1) > 0",
        "assert f(1) == f(1)",
        "assert 0 <= f(1) <= 9",
        "assert isinstance(f(1), int)",
        "assert abs(f(1) - 2) < 0.1",
    ],
)
def test_an_opaque_object_is_neither_equal_nor_unequal_true_nor_false(sandbox, tests):
    assert run(sandbox, "class E: pass\ndef f(x): return 2", tests).passed or "not f" in tests
    refused(sandbox, ANYTHING + "def f(x): return Anything()", tests)


ENDS = {  # control of the process
    "exit 0": "import os\nos._exit(0)",
    "exit 0 in the call": "def shared(a, b):\n    import os\n    os._exit(0)",
    "sys.exit in the call": "def shared(a, b):\n    import sys\n    sys.exit(0)",
    "SystemExit": "raise SystemExit(0)",
    "KeyboardInterrupt": "def shared(a, b): raise KeyboardInterrupt",
    "GeneratorExit": "def shared(a, b): raise GeneratorExit",
    "StopIteration": "def shared(a, b): raise StopIteration",
    "an exception with a lying type": "class E(BaseException):\n    __name__ = 'ok'\n"
    "def shared(a, b): raise E()",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)",
    "closed descriptors": "import os\nos.closerange(0, 256)\ndef shared(a, b): return ()",
    "killed by itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "a trace function": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)"
    "\ndef shared(a, b): return ()",
    "assertions off": "import sys\nsys.flags = type('F', (), {'optimize': 2})\n__debug__x = False\n"
    "def shared(a, b): return ()",
}


@pytest.mark.parametrize("cheat", ENDS)
def test_ending_early_is_no_success(sandbox, cheat):
    refused(sandbox, ENDS[cheat], SHARED)


FRAME = """
import json, os, struct, threading
def frame(message):
    data = json.dumps(message).encode()
    return struct.pack('>I', len(data)) + data
VERDICT = json.dumps({'passed': True, 'ended': False, 'why': '', 'clean': True}).encode() + b'\\n'
def to_all(data):
    for fd in range(1024):
        try:
            os.write(fd, data)
        except OSError:
            pass
"""
MESSAGES = {  # the channel to the judge
    "a verdict on every descriptor": "to_all(VERDICT)",
    "a framed verdict": "to_all(frame({'passed': True}))",
    "replies in advance": "to_all(frame('ready') + frame({'value': {'shared': {'x': 0}}}) + "
    "frame({'value': [4, 5]}) * 9)",
    "no reply to anything": "to_all(frame('ready') + frame({'value': {}}) * 9)",
    "garbage": "to_all(b'\\xff' * 4096)",
    "a huge length": "to_all(struct.pack('>I', 2**32 - 1))",
    "replies from a thread": "threading.Thread(target=lambda: [to_all(frame({'value': True})) for "
    "_ in range(100)]).start()",
    "unknown tags": "to_all(frame('ready') + frame({'value': {'eval': ['True']}}) * 9)",
    "its own reader and writer are replaced": "import sys\nfor m in list(sys.modules.values()):\n"
    "    if hasattr(m, 'Channel'):\n        m.Channel.send = lambda *a: to_all(frame('passed'))",
    "encode is replaced": "import sys\nfor m in list(sys.modules.values()):\n"
    "    if hasattr(m, 'encode') and hasattr(m, 'decode') and hasattr(m, 'Channel'):\n"
    "        m.encode = lambda *a: {'t': True}",
}


@pytest.mark.parametrize("cheat", MESSAGES)
def test_no_message_of_a_program_is_a_verdict(sandbox, cheat):
    program = FRAME + "def shared(a, b): return ()\n" + MESSAGES[cheat]
    refused(sandbox, program, SHARED)
    assert run(sandbox, HONEST, SHARED).passed  # nor does it disturb the program after it


@pytest.fixture(scope="module")
def crowded():
    """A sandbox whose links have high numbers, since its parent has many descriptors."""
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
    box = Sandbox(Limits(timeout_s=deadline(10)), preamble=PREAMBLE)
    yield box
    box.close()
    for fd in held:
        os.close(fd)


@pytest.mark.parametrize("cheat", MESSAGES)
def test_a_parent_with_many_descriptors_leaves_none_to_a_program(crowded, cheat):
    program = FRAME + "def shared(a, b): return ()\n" + MESSAGES[cheat]
    refused(crowded, program, SHARED)
    assert run(crowded, HONEST, SHARED).passed


@pytest.mark.parametrize("which", ["sandbox", "crowded"])
def test_a_program_has_its_channel_and_no_other_descriptor(request, which):
    program = """
    import os
    def is_open(fd):
        try:
            os.fstat(fd)
        except OSError:
            return False
        return True
    def f(x):
        return [fd for fd in range(2048) if is_open(fd)]
    """
    # standard streams, the channel, and the rules of its confinement where those are kept
    tests = "assert f(1) in ([0, 1, 2, 3], [0, 1, 2, 3, 4])"
    outcome = run(request.getfixturevalue(which), program, tests)
    assert outcome.passed, outcome


SECRET = "assert f(3) == 'zebra-73194' and f(4) == 'zebra-55120'"
SEARCH = """
import ctypes, gc, os, re, sys
pattern = re.compile(b'z' + b'ebra-[0-9]{5}')
def memory():
    # write() says of an address that it is not there, where reading it would end the program
    write = ctypes.CDLL(None).write
    source, end = os.pipe()
    middle = id(object()) & ~0xfff
    for page in range(middle - (32 << 20), middle + (32 << 20), 4096):
        if write(end, ctypes.c_void_p(page), 4096) == 4096:
            yield os.read(source, 4096)
def found():
    for o in gc.get_objects():
        for x in (o.values() if type(o) is dict else o if type(o) in (list, tuple) else ()):
            if type(x) is str and pattern.search(x.encode(errors='replace')):
                return x
    frame = sys._getframe()
    while frame:
        if m := pattern.search(repr((frame.f_locals, frame.f_globals)).encode()):
            return m[0].decode()
        frame = frame.f_back
    for page in memory():
        if m := pattern.search(page):
            return m[0].decode()
def f(x):
    return found()
"""


def test_expected_values_are_not_in_a_programs_memory(sandbox):
    honest = "def f(x): return 'zebra-73194' if x == 3 else 'zebra-55120'"
    assert run(sandbox, honest, SECRET).passed
    outcome = run(sandbox, SEARCH, SECRET)
    assert not outcome.passed and outcome.why.startswith("AssertionError")
    # nor what an earlier program was or returned
    assert run(sandbox, SEARCH, "assert f(3) is None").passed
    # which that program would have found
    held = SEARCH + "kept = ['ze' + 'bra-' + str(10**4 + n) for n in range(3)]\n"
    held += "def found(): return next(m[0].decode() for p in memory() if (m := pattern.search(p)))"
    assert run(sandbox, held, "assert f(3).startswith('zebra-1000')").passed


def test_nothing_is_left_for_the_next_program(sandbox):
    keep = "open('answer', 'w').write('4')\nimport os\nos.mkdir('d')\ndef f(): return 1"
    refused(sandbox, keep, "assert f() == 2")
    look = "import os\ndef f(): return os.listdir('.') + os.listdir(os.environ['TMPDIR'])"
    assert run(sandbox, look, "assert f() == []").passed


LISTS = "assert is_same_list(turned(list_node([1, 2, 3])), list_node([3, 2, 1]))"
TREES = "assert is_same_tree(mirrored(tree_node([1, 2, 3])), tree_node([1, 3, 2]))"
NODES = {
    "is_same_list is replaced": ("is_same_list = lambda a, b: True\n{} = lambda x: x", LISTS),
    "list_node is replaced": ("list_node = lambda v: None\n{} = lambda x: None", LISTS),
    "values equal to everything": (
        ANYTHING + "def {}(h):\n    return ListNode(Anything(), h)", LISTS,
    ),
    "a ListNode of its own": (
        "class ListNode:\n    val = next = None\n    def __eq__(self, other): return True\n"
        "{} = lambda x: ListNode()", LISTS,
    ),
    "a cyclic list": ("def {}(h):\n    h.next = h\n    return h", LISTS),
    "is_same_tree is replaced": ("is_same_tree = lambda a, b: True\n{} = lambda x: x", TREES),
    "a cyclic tree": ("def {}(t):\n    t.left = t\n    return t", TREES),
}  # fmt: skip


@pytest.mark.parametrize("cheat", NODES)
def test_lists_and_trees_are_compared_by_the_judge(sandbox, cheat):
    program, tests = NODES[cheat]
    name = "turned" if tests is LISTS else "mirrored"
    refused(sandbox, program.replace("{}", name), tests)


def test_honest_lists_and_trees_pass_with_classes_of_their_own(sandbox):
    own = (
        "class ListNode:\n    def __init__(self, x):\n        self.val, self.next = x, None\n"
        "def turned(head):\n    last = None\n    while head:\n"
        "        head.next, last, head = last, head, head.next\n    return last\n"
    )
    assert run(sandbox, own, LISTS).passed
    tree = "def mirrored(t):\n    t.left, t.right = t.right, t.left\n    return t"
    assert run(sandbox, tree, TREES).passed


LOOPS = "assert all(map(lambda c: f(c[0]) == c[1], [(1, 2), (2, 4)]))"


def test_control_exceptions_do_not_end_the_loops_of_the_tests(sandbox):
    assert run(sandbox, "def f(x): return 2 * x", LOOPS).passed
    for kind in ("StopIteration", "StopAsyncIteration", "GeneratorExit"):
        refused(sandbox, f"def f(x): raise {kind}", LOOPS)


def test_an_end_is_not_the_exception_that_tests_expect(sandbox):
    tests = "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\n"
    assert run(sandbox, "def f(x): raise ValueError('negative')", tests).passed
    refused(sandbox, "def f(x): return 1", tests)
    anyhow = tests.replace("ValueError", "BaseException").replace("assert False", "pass")
    refused(sandbox, "def f(x):\n    import os\n    os._exit(0)", anyhow)


def test_expected_values_that_are_computed_from_arguments_stay(sandbox):
    tests = "xs = [3, 1, 2]\nassert f(xs) == sorted(xs)"
    assert run(sandbox, "def f(xs): return sorted(xs)", tests).passed
    refused(sandbox, "def f(xs):\n    xs.clear()\n    return []", tests)


def test_a_call_for_its_effect_changes_its_arguments(sandbox):
    tests = "xs = [3, 1, 2]\nd = {1: 2}\nf(xs, d)\nassert xs == [1, 2, 3] and d == {}"
    assert run(sandbox, "def f(xs, d):\n    xs.sort()\n    d.clear()", tests).passed
    refused(sandbox, "def f(xs, d):\n    xs.clear()", tests)
    refused(sandbox, ANYTHING + "def f(xs, d):\n    xs[:] = [Anything()] * 3", tests)


def test_what_is_inside_a_changed_argument_stays_the_object_that_it_was(sandbox):
    tests = "row = [1]\ngrid = [row]\nf(grid)\nrow.append(3)\nassert grid == [[2, 3]]"
    assert run(sandbox, "def f(grid): grid[0][0] = 2", tests).passed


def test_names_of_the_preamble_do_not_stand_in_for_the_program(sandbox):
    tests = "assert gcd(12, 18) == 6"
    assert names_under_test(tests, "", sandbox.names) == ["gcd"]
    assert run(sandbox, "def gcd(a, b): return math.gcd(a, b)", tests).passed
    assert run(sandbox, "from math import gcd", tests).passed
    refused(sandbox, "", tests)
    summed = "assert sum(10, 15) == 25"
    solution = "def sum(a, b): return a + b"
    assert run(sandbox, solution, summed, solution).passed
    refused(sandbox, "", summed, solution)
    # a builtin that would pass the tests
    ordered = "assert sorted([2, 1]) == [1, 2]"
    solution = "def sorted(xs):\n    xs.sort()\n    return xs"
    assert run(sandbox, solution, ordered, solution).passed
    undefined = run(sandbox, "", ordered, solution)
    assert not undefined.passed and undefined.why == "NameError: name 'sorted' is not defined"


def test_a_function_that_tests_use_beside_the_one_under_test_is_pythons(sandbox):
    tests = "assert Counter(f([1, 1, 2])) == Counter([1, 2, 1])"
    assert names_under_test(tests, "def f(x): return x", sandbox.names) == ["f"]
    refused(sandbox, "Counter = lambda x: 0\ndef f(x): return []", tests)


def test_classes_keep_their_state_between_calls(sandbox):
    tests = "s = Stack()\ns.push(3)\ns.push(4)\nassert s.pop() == 4 and s.size == 1\nassert len(s)"
    program = """
    class Stack:
        def __init__(self): self.items = []
        def push(self, x): self.items.append(x)
        def pop(self): return self.items.pop()
        def __len__(self): return len(self.items)
        size = property(__len__)
    """
    assert run(sandbox, program, tests).passed
    refused(sandbox, program.replace("size = property", "other = property"), tests)
    refused(
        sandbox, ANYTHING + "class Stack:\n    def __getattr__(self, n): return Anything()", tests
    )


HUGE = {
    "too much data": "def f(x): return 'x' * (1 << 27)",
    "deep nesting": "def f(x):\n    y = []\n    for _ in range(100000):\n        y = [y]\n"
    "    return y",
    "an endless iterator": "def f(x):\n    while True:\n        yield 1",
    "a number with a million digits": "def f(x): return 10 ** 3000000",
    "an endless call": "def f(x):\n    while True: pass",
    "a number as a fraction": "import fractions\ndef f(x): return fractions.Fraction(10) ** 10**6",
}


@pytest.mark.parametrize("cheat", HUGE)
def test_data_that_is_too_much_for_the_judge_is_a_failure(hasty, cheat):
    refused(hasty, HUGE[cheat], "assert list(f(1)) == [1]")
    assert run(hasty, "def f(x): return [x]", "assert list(f(1)) == [1]").passed


def test_tests_that_change_python_change_it_for_themselves_alone(sandbox):
    run(sandbox, HONEST, "import builtins\nbuiltins.set = lambda x: 0\nassert shared(1, 2) == 0")
    refused(sandbox, "def shared(a, b): return ()", SHARED)
    assert run(sandbox, HONEST, SHARED).passed


def test_tests_are_confined_too(sandbox):
    tests = "import os\nassert f() and os.listdir('/etc')"
    refused(sandbox, "def f(): return 1", tests)


@pytest.mark.parametrize("tests", ["assert True", "assert sorted", "x = 1", "assert f(", "print 1"])
def test_tests_that_test_nothing_are_refused(tests):
    if tests == "assert sorted":
        assert names_under_test(tests + "([1]) == [1]", "", ()) == ["sorted"]
    with pytest.raises(BadTests):
        names_under_test(tests, "", ())
