"""Refusals of environments, chat templates, tasks and Python's front door with the remedies that
they name: cases of test_part_remedies.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlcore.tasks import make_task

Part = Callable[[Path], object]
Case = tuple[str, Part, Part]

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
DEAF = "nothing"
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    + CHATML
)
REWRITES = "{{ messages | length }}" + CHATML
SHOWS_TOOLS = "{% if tools %}[{{ tools[0].function.name }}]{% endif %}" + CHATML
WORKED = """
from rlcore.environments.protocol import Environment, Opening, Reply
class Plain(Environment):
    def reset(self, item, seed): return Opening([{"role": "user", "content": "q"}])
    def step(self, action): return Reply([{"role": "user", "content": "more"}], over=self.over)
    def grade(self): raise NotImplementedError
    over = True
class Works(Plain):
    def worked(self): return "a"
class Raises(Plain):
    def worked(self): return 1 / 0
class Turns(Works):
    over = False
class Numbers:
    def reset(self, **row): pass
    def guess(self, number: int) -> int:
        '''Guess.

        Args:
            number: a number
        '''
        return number
    def get_reward(self): return 1.0
MANY = {"a": Numbers}
class Bare:
    def reset(self, item, seed): pass
class Sized(Works):
    def __init__(self, size): assert size
"""


def tokenizer(at: Path) -> Any:
    from rlcore.models.fresh import build_fresh_model
    from rlcore.models.specs import FreshModelSpec
    from rlcore.models.text import load_tokenizer

    shape = {"hidden_size": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8}
    if not (at / "fresh").exists():
        letters = "".join(map(chr, range(32, 127)))
        build_fresh_model(at / "fresh", letters, FreshModelSpec(**shape), seed=0, max_len=32)
    return load_tokenizer(at / "fresh")


def settings(at: Path, text: str, **more: Any) -> Any:
    from rlcore.models.specs import TemplateSpec

    if text != "off":  # what a file holds is read once
        file = at / f"{len(list(at.iterdir()))}.jinja"
        file.write_text(text)
        text = str(file)
    return TemplateSpec(chat_template=text, **more)


def template(text: str, *, name: str = "task", tools: bool = False, **more: Any) -> Part:
    def part(at: Path) -> object:
        from rlcore.agents.renderers import check_template, make_renderer
        from rlcore.environments.protocol import Opening
        from rlcore.environments.specs import EnvironmentSpec

        given = settings(at, text, **more)
        check_template(EnvironmentSpec(name=name), tokenizer(at), given, tools=tools)
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        opening = Opening([{"role": "user", "content": "q"}], [tool] if tools else [])
        return make_renderer(tokenizer(at), given).open(opening)

    return part


def asked(*roles: str, text: str = STRICT) -> Part:
    def part(at: Path) -> object:
        from rlcore.models.text import encode_prompt

        messages = [{"role": role, "content": "q"} for role in roles]
        return encode_prompt(tokenizer(at), messages, settings(at, text))

    return part


def generation(text: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.models.text import end_ids

        tokenizer(at)
        (at / "fresh" / "generation_config.json").write_text(text)
        return end_ids(tokenizer(at), at / "fresh")

    return part


def worked(name: str, text: str = CHATML) -> Part:
    def part(at: Path) -> object:
        from rlcore.agents.renderers import worked_episode
        from rlcore.environments import environment_maker
        from rlcore.environments.specs import EnvironmentJob, EnvironmentSpec
        from rlcore.loop.specs import EvalTaskSpec

        (at / "w.py").write_text(WORKED)
        spec = EnvironmentSpec(name=f"{at}/w.py:{name}", max_turns=3)
        task = make_task("digits", {})
        template = settings(at, text)
        job = EnvironmentJob(spec, EvalTaskSpec(name="digits"), "digits", 64, template=template)
        played = environment_maker(spec, task)()
        return worked_episode(job, played, task.item("train", 0), tokenizer(at))

    return part


def environment(name: str, task: str = "digits", **args: Any) -> Part:
    def part(at: Path) -> object:
        from rlcore.environments import environment_maker
        from rlcore.environments.specs import EnvironmentSpec

        (at / "w.py").write_text(WORKED)
        filled = json.loads(json.dumps(args).replace("{at}", str(at)))
        spec = EnvironmentSpec(name=name.replace("{at}", str(at)), args=filled)
        return environment_maker(spec, make_task(task, {}))

    return part


def mcp(*tools: str, command: str = "{python} {here}/agents/mcp_stand_in.py") -> Part:
    def part(at: Path) -> object:
        from rlcore.agents.mcp import McpTools

        task = make_task("digits", {})
        words = command.format(python=sys.executable, here=Path(__file__).parent)
        played = McpTools(task, command=words, tools=tools or None)
        try:
            return played.reset(task.item("train", 0), 0)
        finally:
            played.close()

    return part


class Text:
    pass


class Discrete:
    def __init__(self, n: int) -> None:
        self.n = n


def gymnasium(id: str, *, installed: bool = True, **args: Any) -> Part:
    """With a stand-in of the package, which is no part of the locked ones: its spaces by id."""

    def make(name: str, **_: Any) -> Any:
        spaces = {"Words": Text(), "Four": Discrete(4), "Box": object()}
        return SimpleNamespace(action_space=spaces[name], close=lambda: None)

    def part(at: Path) -> object:
        package = ModuleType("gymnasium")
        package.make, package.spaces = make, SimpleNamespace(Text=Text, Discrete=Discrete)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "gymnasium", package if installed else None)
            return environment("gymnasium", id=id, **args)(at)

    return part


def textarena(game: str, *, installed: bool = True) -> Part:
    """With a stand-in of the package: two games of one player, one of two, one that does not
    begin."""

    def part(at: Path) -> object:
        package, envs = ModuleType("textarena"), ModuleType("textarena.envs.registration")
        package.SinglePlayerState = SimpleNamespace

        class Game:
            def __init__(self, name: str) -> None:
                self.state = SimpleNamespace() if name.startswith("One") else object()
                self._name = name

            def reset(self, num_players: int, seed: int) -> None:
                if self._name.startswith("Three"):
                    raise ValueError("3 players")

        package.make = lambda name, **_: Game(name)
        envs.ENV_REGISTRY = dict.fromkeys(("One-raw", "Two-raw", "Three-raw"))
        modules = {
            "textarena": package if installed else None,
            "textarena.envs": ModuleType("textarena.envs"),
            "textarena.envs.registration": envs,
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            return environment("textarena", game=game)(at)

    return part


def parser(name: str) -> Part:
    """A tool parser, of a vLLM that brings one."""

    def part(at: Path) -> object:
        from rlcore.agents.families import family_of

        platform = ModuleType("rlcore.rollout.engines.vllm.platform")
        platform.tool_parsers = lambda: ("xlam",)
        with pytest.MonkeyPatch.context() as patch:
            import rlcore.rollout.engines.vllm as package

            patch.setitem(sys.modules, platform.__name__, platform)
            patch.setattr(package, "platform", platform, raising=False)
            return family_of("{{ tools }}", None, name)

    return part


def harmony(text: str) -> Part:
    def part(at: Path) -> None:
        from rlcore.agents.families import refuse_harmony

        refuse_harmony(text, "auto")

    return part


AGENTS: list[Case] = [
    ("choose one of", parser("none"), parser("xlam")),
    ("another family", harmony("<|start|><|channel|><|message|>"), harmony(CHATML)),
    (
        "name a family",
        template(SHOWS_TOOLS, tools=True),
        template(SHOWS_TOOLS, tools=True, tool_parser="hermes"),
    ),
    ("choose a chat model", template("off", name="endpoint"), template(CHATML, name="endpoint")),
    ("or another template", template(DEAF), template(CHATML)),
    ("change the data", asked("system", "user"), asked("user")),
    ("chat_template=off", asked("system", "user"), asked("system", "user", text="off")),
    ("copy it again", generation("{"), generation("{}")),
    ("correct it", worked("Raises"), worked("Works")),
    ("set model.path to a trained", worked("Plain"), worked("Works")),
    ("model.chat_template=off", worked("Turns", REWRITES), worked("Turns", "off")),
    ("name a class", environment("{at}/w.py:MANY"), environment("{at}/w.py:Numbers")),
    ("it lacks", environment("{at}/w.py:Bare"), environment("{at}/w.py:Works")),
    (
        "correct the arguments",
        environment("{at}/w.py:Sized", sise=1),
        environment("{at}/w.py:Sized", size=1),
    ),
    (
        "set task=alphabet_sort",
        environment("alphabet_sort"),
        environment("alphabet_sort", "alphabet_sort"),
    ),
    ("choose out of: add", mcp("sub"), mcp("add")),
    ("cannot be started", mcp(command="/nowhere/server"), mcp()),
    ("pip install gymnasium", gymnasium("Absent", installed=False), gymnasium("Words")),
    ("cannot be made", gymnasium("Nothing"), gymnasium("Words")),
    ("choose one of Text or Discrete", gymnasium("Box"), gymnasium("Four")),
    (
        "give one for each",
        gymnasium("Four", actions=["a"]),
        gymnasium("Four", actions=["a", "b", "c", "d"]),
    ),
    ("pip install 'rlcore[textarena]'", textarena("Absent", installed=False), textarena("One")),
    ("choose one of: One", textarena("None"), textarena("One")),
    ("choose one for one", textarena("Two"), textarena("One")),
    ("does not begin", textarena("Three"), textarena("One")),
]


# -- Python's front door, tasks, referee -----------------------------------------------------------


def graded(item: Any, response: str) -> float:
    return 1.0


def words(data: Any = None, reward: Any = None, run_dir: str = "run") -> Part:
    def part(at: Path) -> object:
        from rlcore.api_inputs import Inputs

        (at / "old").mkdir(exist_ok=True)
        (at / "old" / "metrics.jsonl").touch()
        return Inputs(None, data, reward).words(at / run_dir)

    return part


def run(ask: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.api import RunResult

        (at / "metrics.jsonl").write_text('{"step": 1}\n')
        (at / "config.yaml").touch()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "pandas", None)
            return getattr(RunResult(at), ask)

    return part


def task(name: str, args: dict[str, Any], label: str | None = None) -> Part:
    return lambda at: make_task(
        name, json.loads(json.dumps(args).replace("{at}", str(at))), label=label
    )


def judged(loss: Callable[..., Any]) -> Part:
    def part(at: Path) -> object:
        from rlcore.referee import form_of, judge

        form_of(loss)
        return next(iter(judge(loss)))

    return part


def by_batch(batch: Any) -> Any:
    return -(batch.advantages * batch.logp_new * batch.mask).sum()


def by_others(a: Any, b: Any) -> Any:
    return a


def fails(batch: Any) -> Any:
    return batch.nothing


def detached(batch: Any) -> Any:
    return by_batch(batch).detach()


def text(batch: Any) -> Any:
    return "0.5"


def named(name: str, like: str = "Correction") -> Part:
    """A class of a user's in the place of a correction or a task."""

    def part(at: Path) -> object:
        from rlcore import interfaces
        from rlcore.registry import load_object, require_whole

        (at / "c.py").write_text(
            "'none'\nfrom rlcore.interfaces import Correction, Task\n"
            "from rlcore.tasks.digits import Digits\n"
            "class Idle(Correction): pass\n"
            "class Half(Task): pass\n"
            "class Whole(Digits): pass\n"
            "class Works(Correction):\n"
            "    def advantages(self, *_): pass\n"
        )
        require_whole(load_object(f"{at}/c.py:{name}"), getattr(interfaces, like), f"k={name}")
        return name

    return part


FILE = {"grader": "{at}/grade.py:grade", "train_path": "{at}/rows.jsonl"}
SPACE: dict[str, Any] = {}
exec("def f(item, response): return 1.0", SPACE)
ROWS = [{"question": "q", "answer": "1"}]
FRONT: list[Case] = [
    ("choose another folder", words(ROWS, run_dir="old"), words(ROWS)),
    ("give a path", words([]), words(ROWS)),
    ("a list of dictionaries", words(["q"]), words(ROWS)),
    ("holds a value that is", words([{"a": object()}]), words(ROWS)),
    ("defined with def", words(reward=lambda item, response: 1.0), words(reward=graded)),
    ("or FILE.py:FUNCTION", words(reward=print), words(reward="grade.py:grade")),
    ("give FILE.py:FUNCTION", words(reward=SPACE["f"]), words(reward="g.py:grade")),
    ("use run.rows", run("metrics"), run("rows")),
    ("must not be empty", task("file", FILE, "a/b"), task("file", FILE, "a")),
    ("its arguments are", task("file", {}), task("file", FILE)),
    ("known forms are", judged(by_others), judged(by_batch)),
    ("failed with", judged(fails), judged(by_batch)),
    ("has no gradient", judged(detached), judged(by_batch)),
    ("finite scalar", judged(text), judged(by_batch)),
    ("override at least one of", named("Idle"), named("Works")),
    ("is not accepted: it is no", named("__doc__"), named("Works")),
    ("lacks", named("Half", "Task"), named("Whole", "Task")),
]
CASES = [*AGENTS, *FRONT]
