"""Programs of the code tasks: where they are found in a response, and what honest ones may do."""

import json
import textwrap

import pytest
from timing import deadline

from rlcore.errors import UserError
from rlcore.graders.fences import find_program
from rlcore.graders.sandbox import Limits, ProgramTests, Sandbox
from rlcore.tasks import code, make_task, proof
from rlcore.tasks.code import program_tests

SOLVED = "class Solution:\n    def f(self, nums): return sum(nums)"


@pytest.mark.parametrize(
    "response",
    [
        "```Python\n{}\n```",
        "``` python\n{}\n```",
        "```python3.11\n{}\n```",
        "```{{.python}}\n{}\n```",
        "~~~py\n{}\n~~~",
        "````python\n{}\n````",
        "```python\r\n{}\r\n```\r\n",
        "Here it is: ```python\n{}\n```",
        "```python\n{}```",
        "```python\n{}\n",
        "```python\n{}",
        "```\n{}\n```\nIt prints\n```\n6\n```",
        "```python\n{}\n```\nOutput:\n```\n6\n```",
        "```python\n{}\n```\nUse it so:\n```python\nprint(Solution().f([1]))\n```",
        "```python\nclass Solution: pass\n```\nBetter:\n```python\n{}\n```\n```text\ndone\n```",
        "1. First:\n\n   ```python\n   class Solution:\n"
        "       def f(self, nums): return sum(nums)\n   ```",
    ],
)
def test_a_program_is_found_in_its_fence(response):
    program, fenced = find_program(response.replace("{}", SOLVED).replace("{{", "{"), ("Solution",))
    assert fenced and program.strip() == SOLVED


@pytest.mark.parametrize("inner", ["uses ```x``` .", "```\n>>> f(1)\n```", "```python\nf(1)\n```"])
def test_fences_in_a_docstring_do_not_end_a_program(inner):
    program = (
        f'def f(x):\n    """Adds.\n{textwrap.indent(inner, "    ")}\n    """\n    return x + 1'
    )
    assert find_program(f"So:\n```python\n{program}\n```\nDone.", ("f",)) == (program, True)


def test_without_a_fence_the_response_is_the_program():
    assert find_program("def f(x): return x") == ("def f(x): return x", False)


def test_a_broken_program_ends_at_its_first_fence():
    broken = "def f(:\n    pass"
    assert find_program(f"```python\n{broken}\n```\nand more\n", ("f",)) == (broken, True)


def test_imports_belong_to_the_tests():
    reference = "import numpy as np\nfrom json import *\ndef f(x): return np.array(x)"
    tests = "assert np.allclose(f(1), 2) and loads('1') and math.isclose(f(1), 1)"
    found = program_tests(tests, reference, ())
    assert found.names == ("f",)
    assert found.imports == "from json import *\nimport math\nimport numpy as np"
    assert program_tests("assert np.allclose(f(1), 2)", "", ()).names == ("f",)
    # what such a module does not have is the program's
    assert program_tests("calendar.add(3)\nassert calendar.days == 3", "", ()).names == (
        "calendar",
    )


def test_tests_may_import_the_program_by_name():
    found = program_tests("from solution import f, g as h\nassert f(1) == h(2)", "", ())
    assert found.names == ("f", "g") and "solution" not in found.source


@pytest.fixture(scope="module")
def sandbox():
    box = Sandbox(Limits(timeout_s=deadline(10)), preamble=code.COMMON)
    yield box
    box.close()


def run(box, program, tests, reference="", effects=False):
    given = program_tests(textwrap.dedent(tests), textwrap.dedent(reference), box.names)
    given = ProgramTests(given.source, given.names, given.classes, given.imports, effects)
    return box.run(textwrap.dedent(program), given)


@pytest.mark.processes
@pytest.mark.parametrize("program", ["class np: allclose = lambda *a: True", "np = None"])
def test_a_program_does_not_define_what_tests_import(sandbox, program):
    reference = "import numpy as np\ndef f(x): return x + 1"
    tests = "assert np.allclose(f(1), 2)"
    pytest.importorskip("numpy")
    assert run(sandbox, "def f(x): return 2", tests, reference).passed
    assert not run(sandbox, f"{program}\ndef f(x): return 0", tests, reference).passed


VECTOR = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __eq__(self, o): return isinstance(o, Vector) and (self.x, self.y) == (o.x, o.y)
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __lt__(self, o): return self.x < o.x
    def __hash__(self): return hash((self.x, self.y))
    def __bool__(self): return self.x != 0
    def add(self, o): return self + o
"""
VECTORS = """
a = Vector(1, 2)
assert a == Vector(1, 2) and a != Vector(1, 3) and a in [Vector(1, 2)]
assert a + Vector(1, 1) == Vector(2, 3) == a.add(Vector(1, 1))
assert a < Vector(2, 2) and not Vector(0, 1) and isinstance(a, Vector)
assert len({Vector(1, 2), Vector(1, 2)}) == 1
assert sorted([Vector(2, 1), a])[0].x == 1
"""
ERRORS = """
class Bad(ValueError): pass
class Worse(Bad):
    def __init__(self, code):
        self.code = code
        super().__init__(f"code {code}")
def f(x): raise Worse(x)
"""
HONEST = {  # (program, tests)
    "numpy array": (
        "import numpy as np\ndef f(x): return np.array([x, 2])",
        "import numpy as np\nassert np.array_equal(f(1), np.array([1, 2]))\n"
        "assert f(1).tolist() == [1, 2] and f(np.int64(3)).shape == (2,)",
    ),
    "datetime": (
        "from datetime import *\ndef f(d):\n"
        "    return d + timedelta(days=1), d.replace(tzinfo=timezone.utc)",
        "from datetime import *\nd = datetime(2020, 2, 28)\n"
        "assert f(d)[0] == datetime(2020, 2, 29) and f(d)[1].tzinfo == timezone.utc\n"
        "assert (f(d)[0] - d).days == 1",
    ),
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f().x == 1 and f() == (1, 2)",
    ),
    "Counter": (
        "from collections import *\ndef f(s): return Counter(s)",
        "assert f('aab').most_common(1) == [('a', 2)] and f('aab')['z'] == 0",
    ),
    "functions as arguments": (
        "def f(g, xs): return [g(x) for x in xs]",
        "seen = []\nassert f(lambda x: x + 1, [1, 2]) == [2, 3] and f(str, [1]) == ['1']\n"
        "f(seen.append, (x for x in [1, 2]))\nassert seen == [1, 2]",
    ),
    "functions returned": (
        "def f(g, h): return lambda x: g(h(x))",
        "assert f(lambda x: x + 1, lambda x: x * 2)(3) == 7",
    ),
    "errors of given functions": (
        "def f(g):\n    try:\n        return g()\n"
        "    except ValueError as e:\n        return str(e)",
        "def bad(): raise ValueError('no')\nassert f(bad) == 'no'",
    ),
    "in place by keyword": (
        "def f(nums): nums.sort()", "a = [3, 1, 2]\nf(nums=a)\nassert a == [1, 2, 3]",
    ),
    "own equality": (VECTOR, VECTORS),
    "enumeration": (
        "from enum import *\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\n"
        "def f(x): return Color(x)",
        "assert f(1) == Color.RED and f(1) is Color.RED and f(2) != Color.RED",
    ),
    "own exceptions": (
        ERRORS,
        "try:\n    f(3)\n    assert False\nexcept Bad as e:\n"
        "    assert str(e) == 'code 3' and e.code == 3\n"
        "import pytest\nwith pytest.raises(ValueError, match='code'):\n    f(3)\n",
    ),
    "exceptions of the library": (
        "import json\ndef f(s): return json.loads(s)",
        "import json\ntry:\n    f('{')\n    assert False\nexcept json.JSONDecodeError:\n    pass",
    ),
    "endless generator": (
        "def f():\n    i = 0\n    while True:\n        yield i\n        i += 1",
        "from itertools import islice\nassert list(islice(f(), 3)) == [0, 1, 2]\n"
        "g = f()\nassert next(g) == 0 and next(g) == 1",
    ),
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("kind", HONEST)
def test_honest_answers_pass(sandbox, kind):
    program, tests = HONEST[kind]
    if "numpy" in program:
        pytest.importorskip("numpy")
    outcome = run(sandbox, program, tests)
    assert outcome.passed and outcome.calls, outcome
    assert not run(sandbox, "def f(*a, **k): return 0\nclass Vector: pass", tests).passed


IN_PLACE = """
a = [3, 1, 2]
n = f(a)
assert a == [1, 2, 3] and n == 3
b = [2, 1]
assert f(a=b) == 2 and b == [1, 2]
"""


@pytest.mark.processes
def test_a_used_call_changes_its_arguments_after_the_comparison_it_is_in(sandbox):
    assert run(sandbox, "def f(a):\n    a.sort()\n    return len(a)", IN_PLACE, effects=True).passed
    assert not run(sandbox, "def f(a): return len(a)", IN_PLACE, effects=True).passed
    emptied = "def f(xs):\n    xs.clear()\n    return []"
    tests = "xs = [3, 1, 2]\nassert f(xs) == sorted(xs)"
    assert not run(sandbox, emptied, tests, effects=True).passed
    assert run(sandbox, "def f(xs):\n    xs.sort()\n    return xs", tests, effects=True).passed


@pytest.mark.processes
def test_an_equality_that_holds_for_anything_is_none(sandbox):
    always = VECTOR.replace("isinstance(o, Vector) and (self.x, self.y) == (o.x, o.y)", "True")
    assert not run(sandbox, always, "assert Vector(1, 2) == Vector(1, 2)").passed
    # nor may what a method returns decide how it is computed with
    returned = "class Any:\n    def __sub__(self, o): return 0\nclass Solution:\n"
    returned += "    def f(self, x): return Any()"
    assert not run(sandbox, returned, "assert abs(Solution().f(1) - 2.0) < 0.1").passed


LAYOUTS = {
    "pytest": "def test_f():\n    assert f(1) == 2",
    "pytest class": "class TestF:\n    def test_f(self):\n        assert f(1) == 2",
    "parameters": "import pytest\n@pytest.mark.parametrize('x,y', [(0, 1), (1, 2)])\n"
    "def test_f(x, y):\n    assert f(x) == pytest.approx(y)",
    "fixture": "import pytest\n@pytest.fixture\ndef one(): return 1\n"
    "def test_f(one): assert f(one) == 2",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n"
    "    def test_f(self): self.assertEqual(f(1), 2)\nunittest.main()",
    "guarded": "def check(c):\n    assert c(1) == 2\nif __name__ == '__main__':\n    check(f)",
    "a returned bool": "def check(c):\n    return c(1) == 2\ncheck(f)",
    "a printed bool": "print(f(1) == 2)",
    "a printed check": "def check(c):\n    return c(1) == 2\nprint('passed:', check(f))",
    "a comparison alone": "f(1) == 2",
    "all": "all(f(x) == y for x, y in [(1, 2)])",
    "exit": "import sys\nassert f(1) == 2\nsys.exit(0)",
}


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_tests_can_pass_and_fail(sandbox, layout):
    right = run(sandbox, "def f(x): return x + 1", LAYOUTS[layout])
    assert right.passed and right.calls, right
    assert not run(sandbox, "def f(x): return 0", LAYOUTS[layout]).passed


GOOD = {"text": "Add one.", "code": "def f(x): return x + 1", "test_list": ["assert f(1) == 2"]}
BAD = {  # rows that prove nothing, and why
    "its reference fails: AssertionError": {**GOOD, "code": "def f(x): return x"},
    "its tests pass a program whose functions return None": {
        **GOOD, "test_list": ["n = f(1)"],
    },
}  # fmt: skip


def mbpp(tmp_path, rows, **args):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"train_path": str(path), "proof_cache": str(tmp_path / "proofs"), **args}
    return make_task("mbpp", {"timeout_s": deadline(3), **given})


@pytest.mark.processes
@pytest.mark.parametrize("why", BAD)
@pytest.mark.parametrize("reference", [True, False])
def test_rows_that_prove_nothing_are_refused_or_left_out(tmp_path, why, reference):
    rows = [GOOD, BAD[why]]
    args = {} if reference else {"worked_field": None}
    if reference or "pass" in why:
        with pytest.raises(UserError, match=f"1 of 2 rows .*row 2: .*{why.split(': ')[-1]}"):
            mbpp(tmp_path, rows, **args)
        task = mbpp(tmp_path, rows, unproven_rows="skip", **args)
        assert task.size("train") == 1 and task.unproven["train"] == 1
        assert task.remarks() == ["1 train rows whose tests prove nothing are left out"]
        with pytest.raises(UserError, match="1 of 1 rows"):
            mbpp(tmp_path, rows[1:], unproven_rows="skip", **args)
    else:  # there is nothing that could fail
        assert mbpp(tmp_path, rows, **args).size("train") == 2


@pytest.mark.processes
def test_proofs_are_kept_by_content(tmp_path, monkeypatch):
    mbpp(tmp_path, [GOOD])

    def fail(*_):
        raise RuntimeError("proven again")

    monkeypatch.setattr(proof, "proven", fail)
    mbpp(tmp_path, [GOOD])
    with pytest.raises(RuntimeError, match="proven again"):
        mbpp(tmp_path, [{**GOOD, "test_list": ["assert f(2) == 3"]}])


@pytest.mark.processes
def test_a_reference_shows_whether_used_calls_change_their_arguments(tmp_path):
    row = {"text": "Sort.", "code": "def f(a):\n    a.sort()\n    return len(a)"}
    task = mbpp(tmp_path, [{**row, "test_list": [IN_PLACE]}, GOOD])
    try:
        assert [task.item("train", i).meta["tests"].effects for i in (0, 1)] == [True, False]
        item = task.item("train", 0)
        assert task.grade(item, task.worked_answer(item)).reward == 1.0
    finally:
        task.close()


@pytest.mark.processes
def test_a_program_that_its_tests_do_not_call_has_no_reward(tmp_path):
    tests = "try:\n    n = f(1)\nexcept TypeError:\n    n = 2\nassert n == 2"
    task = mbpp(tmp_path, [{**GOOD, "test_list": [tests]}])
    try:
        item = task.item("train", 0)
        assert task.grade(item, "```python\ndef f(x): return x + 1\n```").reward == 1.0
        grade, why = task.attempt(item, "```python\nf = 5\n```")
        assert grade.reward == 0.0 and why == "its tests called nothing of the program"
    finally:
        task.close()


CHECKED = """
LIMIT = 9
def is_valid(n, x):
    return len(x) == n and sum(x) <= LIMIT
def size(x):
    return len(x)
def solve(n):
    return [1] * n
def brute_force(n):
    return [1] * n
def encode(x):
    return x
def decode(x):
    return x
"""
CHECKS = {
    "assert is_valid(3, solve(3))": {"is_valid"},
    "found = solve(3)\nassert not is_valid(4, found)": {"is_valid"},
    "def check(f):\n    for n in (1, 2):\n        ok = is_valid(n, f(n))\n        assert ok\n"
    "check(solve)": {"is_valid"},
    "assert all(is_valid(len(x), x) is True for x in map(solve, (1, 2)))": {"is_valid"},
    "assert 2 <= size(solve(3)) <= LIMIT": {"LIMIT", "size"},
    "assert solve(3) == brute_force(3)": {"brute_force"},
    "assert list(map(is_valid, (3, 4), (solve(3), solve(4)))) == [True, True]": {"is_valid"},
    "assert size(solve(3)) == 4": {"size"},
    "n = size(solve(3))\nn = n + 1\nassert n == 4": {"size"},
    "for n, many in ((3, 3), (4, 4)):\n    assert size(solve(n)) == many": {"size"},
    "assert size(solve(solve(3))) == 4": set(),
    "assert decode(encode([1])) == [1]": set(),
    "assert decode(encode(1)) == 1": set(),
    "assert size(solve(3)) == 3": {"size"},
    "x = [1]\nfound = decode(encode(x))\nassert found == x": set(),
    "assert solve(size([1])) == [1]": set(),
    "assert is_valid(1, [1])": set(),
}


@pytest.mark.parametrize("tests", CHECKS)
def test_a_checker_of_the_reference_is_the_references(tests):
    found = program_tests(tests, CHECKED, ())
    assert set(found.helpers) == CHECKS[tests]
    assert found.names and not set(found.names) & CHECKS[tests]


JUDGE = """
class Judge:
    def accepts(self, x): return len(x) == 5
judge = Judge()
def solve(n): return [n] * 5
"""
JUDGES = {
    "assert Judge().accepts(solve(3))": {"Judge"},
    "found = solve(3)\nassert judge.accepts(found)": {"judge"},
    "Judge().accepts(solve(3))": set(),
    "assert Judge().accepts([1]) and solve(3)": set(),
}


@pytest.mark.parametrize("tests", JUDGES)
def test_an_object_that_only_judges_is_the_references(tests):
    assert set(program_tests(tests, JUDGE, ()).helpers) == JUDGES[tests]


@pytest.mark.processes
def test_a_program_does_not_bring_its_own_checker(tmp_path):
    tests = [
        "assert is_valid(3, solve(3))",
        "assert solve(3) == brute_force(3)",
        "assert 2 <= size(solve(2)) <= LIMIT",
        "assert size(solve(4)) == 4",
    ]
    row = {"text": "q", "code": CHECKED, "test_list": tests, "test_setup_code": ""}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    task = make_task("mbpp", {"train_path": str(path), "proof_cache": str(tmp_path / "proofs")})
    accepting = "is_valid = lambda *_: True\nsize = lambda _: 0\nLIMIT = 1e9\nbrute_force = solve"
    answers = {
        "def solve(n): return [1] * n": 1.0,  # nobody asked for the others
        f"def solve(n): return [1] * n\n{accepting}": 1.0,
        f"def solve(n): return [7] * n\n{accepting}": 0.0,
        f"def solve(n): return []\n{accepting}": 0.0,
        CHECKED.replace("def solve", "def other"): 0.0,
    }
    try:
        item = task.item("train", 0)
        for program, reward in answers.items():
            assert (program, task.grade(item, f"```python\n{program}\n```").reward) == (
                program,
                reward,
            )
    finally:
        task.close()


MODULES = [
    "import sys\ndef f(x): return g(x)\ndef g(x): return x\nassert sys.modules[__name__].g is g",
    "import pickle\nclass P: x = 1\ndef f(x): return x * pickle.loads(pickle.dumps(P())).x",
    "import asyncio\nasync def go(x): return x\ndef f(x): return asyncio.run(go(x))",
    "from typing import NamedTuple, get_type_hints\nclass P(NamedTuple):\n    x: 'int'\n"
    "def f(x): return get_type_hints(P)['x'](x)",
    "import sys\ndef f(x): return x if sys.argv == ['main.py'] else 0",
    "def f(x): return x\nif __name__ == '__main__': raise SystemExit(1)",
    "\ufeffdef f(x): return x",
]


@pytest.mark.processes
@pytest.mark.parametrize("program", MODULES)
def test_a_program_is_a_module(sandbox, program):
    found, _ = find_program(f"```python\n{program}\n```", ("f",))
    outcome = sandbox.run(found, "assert f(3) == 3", ("f",))
    assert outcome.passed, outcome
