"""Remedies that refusals of a run's parts name, applied: the part accepts what it is given then, or
refuses it for another reason. Specifications: tests/config; commands: tests/commands."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import remedies_of_agents
import remedies_of_runs
from refusals import untried

from rlcore.errors import UserError
from rlcore.tasks import make_task

Part = Callable[[Path], object]
Case = tuple[str, Part, Part]

PROGRAMS = """
def play(item, base_url): return 1.0
def needs(item, other): return 1.0
def may(item, other=None): return 1.0
LINE = "x"
def reward(completions): return [1.0]
def trained(completions, trainer_state): return [1.0]
class Untold:
    def reset(self, **row): pass
    def guess(self, number): return number
class Told:
    def reset(self, **row): pass
    def _guess(self, number): return number
class Row:
    def reset(self, level): pass
    def get_reward(self): return 1.0
"""
MODEL = {"vocab_size": 8, "hidden_size": 4, "model_type": "qwen3"}


def given(folder: Path) -> Path:
    """A folder with the files that cases name."""
    (folder / "p.py").write_text(PROGRAMS)
    (folder / "grade.py").write_text("def grade(item, response): return 1.0\n")
    rows = [{"question": f"q{i}", "answer": "1", "level": i} for i in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.txt").write_text("{{ messages }}")
    return folder


@pytest.fixture
def at(tmp_path: Path) -> Path:
    return given(tmp_path)


def sentence(part: Part, at: Path) -> str:
    """The sentence that refuses a part; "" where it is accepted."""
    try:
        part(at)
    except UserError as error:
        return str(error)
    return ""


def environment(name: str, **args: Any) -> Part:
    def part(at: Path) -> object:
        from rlcore.environments import environment_maker
        from rlcore.environments.specs import EnvironmentSpec

        filled = json.loads(json.dumps(args).replace("{at}", str(at)))
        meta = filled.pop("meta", [])
        rows = {"grader": f"{at}/grade.py:grade", "train_path": f"{at}/rows.jsonl"}
        task = make_task("file", {**rows, "meta_fields": meta})
        spec = EnvironmentSpec(name=name.replace("{at}", str(at)), args=filled)
        return environment_maker(spec, task)

    return part


def endpoint(**args: Any) -> Part:
    return environment("endpoint", **{"program": "{at}/p.py:play", **args})


AGENTS: list[Case] = [
    ("or a line for sh", endpoint(program=None), endpoint(program=None, command="true")),
    ("path/to/file.py:function", endpoint(program=None), endpoint()),
    ("give one of them", endpoint(command="true"), endpoint()),
    ("name one of the file", endpoint(program="{at}/p.py:LINE"), endpoint()),
    ("a default", endpoint(program="{at}/p.py:needs"), endpoint(program="{at}/p.py:may")),
    ("choose refuse or override", endpoint(sampling="all"), endpoint(sampling="override")),
    ("must be texts", endpoint(bind=1), endpoint(bind="127.0.0.1")),
    ("advertise.", endpoint(bind="0.0.0.0"), endpoint(bind="0.0.0.0", advertise="host")),
    (
        "one line for sh",
        endpoint(program=None, command=" "),
        endpoint(program=None, command="true"),
    ),
    ("such as", environment("mcp"), environment("mcp", command="python server.py")),
    (
        "such as http://",
        environment("openenv", url="nowhere"),
        environment("openenv", url="http://127.0.0.1:8000"),
    ),
    (
        "remote=true",
        environment("openenv", url="http://h.example:8000"),
        environment("openenv", url="http://h.example:8000", remote=True),
    ),
    (
        "begins with _",
        environment("{at}/p.py:Untold", rewards=["{at}/p.py:reward"]),
        environment("{at}/p.py:Told", rewards=["{at}/p.py:reward"]),
    ),
    (
        "a list of functions",
        environment("{at}/p.py:Told", rewards="x"),
        environment("{at}/p.py:Told", rewards=["{at}/p.py:reward"]),
    ),
    (
        "name one of the file",
        environment("{at}/p.py:Told", rewards=["{at}/p.py:LINE"]),
        environment("{at}/p.py:Told", rewards=["{at}/p.py:reward"]),
    ),
    (
        "is given prompts",
        environment("{at}/p.py:Told", rewards=["{at}/p.py:trained"]),
        environment("{at}/p.py:Told", rewards=["{at}/p.py:reward"]),
    ),
    (
        "rename one",
        environment("{at}/p.py:Told", rewards=["{at}/p.py:reward"] * 2),
        environment("{at}/p.py:Told", rewards=["{at}/p.py:reward"]),
    ),
    (
        "does not suit",
        environment("{at}/p.py:Row", size=3),
        environment("{at}/p.py:Row", meta=["level"]),
    ),
    (
        "task.args.meta_fields",
        environment("{at}/p.py:Row"),
        environment("{at}/p.py:Row", meta=["level"]),
    ),
]


def family(name: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.agents.families import family_of

        return family_of("{{ tools }}", None, name)

    return part


def harmony(parser: str) -> Part:
    def part(at: Path) -> None:
        from rlcore.agents.families import refuse_harmony

        refuse_harmony("", parser)

    return part


AGENTS += [
    ("name one of", family("auto"), family("hermes")),
    ("tool_parser=auto", harmony("openai"), harmony("auto")),
]


def folder(**files: Any) -> Part:
    """A model folder whose configuration, weights' files and tokenizer are read."""

    def part(at: Path) -> None:
        from rlcore.models.folder import read_config, weight_files

        model = at / f"model{len(list(at.iterdir()))}"
        model.mkdir()
        for name, content in files.items():
            file = model / name.replace("_json", ".json").replace("_safetensors", ".safetensors")
            file.write_text(content if isinstance(content, str) else json.dumps(content))
        read_config(model, key="k")
        weight_files(model, key="k")

    return part


WHOLE = {"config_json": MODEL, "model_safetensors": "x"}
INDEX = "model.safetensors.index_json"


def tokenizer(name: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.models.text import load_tokenizer

        fresh(None)(at)
        (at / "bare").mkdir(exist_ok=True)
        (at / "bare" / "config.json").write_text(json.dumps(MODEL))
        return load_tokenizer(at / name)

    return part


def fresh(size: int | None) -> Part:
    def part(at: Path) -> object:
        from rlcore.models.fresh import build_fresh_model, check_vocabulary
        from rlcore.models.specs import FreshModelSpec

        spec = FreshModelSpec(hidden_size=8, layers=2, heads=1, kv_heads=1, head_dim=8)
        spec = spec.model_copy(update={"vocab_size": size, "intermediate_size": 8})
        check_vocabulary(spec, 20)
        if not (at / "fresh").exists():
            build_fresh_model(at / "fresh", "ab ", spec, seed=0, max_len=32)
        return spec

    return part


def cut(layers: int) -> Part:
    def part(at: Path) -> object:
        from rlcore.models.fresh import cut_model

        fresh(None)(at)
        return cut_model(at / "fresh", at / f"cut{layers}", layers)

    return part


def template(file: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.models.specs import TemplateSpec
        from rlcore.models.text import template_text, uses_template

        settings = TemplateSpec(chat_template=file.replace("{at}", str(at)))
        return uses_template(None, settings) and template_text(None, settings)

    return part


def prompt(length: int, *, most: int = 4, cut: bool = False) -> Part:
    def part(at: Path) -> object:
        from rlcore.models.text import fitting_prompt

        return fitting_prompt(range(length), "t/train/0", most, cut=cut)

    return part


def stops(*texts: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.models.text import load_tokenizer, split_stops

        fresh(None)(at)
        return split_stops(load_tokenizer(at / "fresh"), texts)

    return part


MODELS: list[Case] = [
    ("give a local", folder(), folder(**WHOLE)),
    ("a language model's", folder(config_json={}), folder(**WHOLE)),
    ("save the model", folder(config_json=MODEL), folder(**WHOLE)),
    ("copy it again", folder(**WHOLE, **{INDEX: "{"}), folder(**WHOLE)),
    (
        "copy the whole folder",
        folder(config_json=MODEL, **{INDEX: {"weight_map": {"a": "a.safetensors"}}}),
        folder(
            config_json=MODEL,
            a_safetensors="x",
            **{INDEX: {"weight_map": {"a": "a.safetensors"}}},
        ),
    ),
    ("give a local", tokenizer("nowhere"), tokenizer("fresh")),
    ("copy the tokenizer's files", tokenizer("bare"), tokenizer("fresh")),
    ("needs 20; use that", fresh(19), fresh(20)),
    ("or null", fresh(19), fresh(None)),
    ("give 1 to 1", cut(2), cut(1)),
    ("name a file", template("{at}/none"), template("{at}/text.txt")),
    ("or off", template("{at}/none"), template("off")),
    ("raise it", prompt(5), prompt(5, most=5)),
    ("truncate_left", prompt(5), prompt(5, cut=True)),
    ("leave its row out", prompt(0), prompt(1)),
    ("by itself", stops("a<eos>"), stops("<eos>")),
]


def dumped(*lines: str, name: str = "d.jsonl") -> Part:
    def part(at: Path) -> object:
        from rlcore.dumps.files import Read, read

        for number, line in enumerate(lines):
            (at / f"{number}{name}").write_text(line)
        return [list(read([at / f"{number}{name}"], Read())) for number in range(len(lines))]

    return part


ROW = '{"logp_inf": [-1.0], "logp_ref": [-1.1], "advantage": 1.0}\n'


def columns(second: int) -> Part:
    def part(at: Path) -> object:
        from rlcore.dumps.rows import write

        return write(at / "w.jsonl", logp_inf=[[-1.0]] * 2, logp_ref=[[-1.0]] * second)

    return part


def metrics(*lines: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.metrics.rows import RowFile, read_rows

        (at / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        read_rows(at / "metrics.jsonl")
        return RowFile(at / "metrics.jsonl")

    return part


def listening(offset: int) -> Part:
    def part(at: Path) -> None:
        from rlcore.metrics.prometheus import require_free

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            require_free("127.0.0.1", taken.getsockname()[1] if offset == 0 else 0)

    return part


RECORDS: list[Case] = [
    ("in JSONL or Parquet", lambda at: dumped(ROW)(at) and _read(at / "no"), dumped(ROW)),
    ("rlcore.dumps.rows.write", dumped(ROW, name="d.pt"), dumped(ROW)),
    ("write it again", dumped("x", name="d.parquet"), dumped(ROW)),
    ("the columns are listed", dumped('{"logp_inf": [-1.0]}'), dumped(ROW)),
    ("for every sample", columns(1), columns(2)),
    ("delete the line", metrics('{"step": 1}', "{", '{"step": 2}'), metrics('{"step": 1}')),
    ("delete the line", metrics('{"a": 1}', '{"step": 2}'), metrics('{"step": 2}')),
    ("one of the two lines", metrics('{"step": 2}', '{"step": 2}'), metrics('{"step": 2}')),
    ("0 for no endpoint", listening(0), listening(1)),
]


def _read(path: Path) -> object:
    from rlcore.dumps.files import Read, read

    return list(read([path], Read()))


def drawn(**asked: Any) -> Part:
    def part(at: Path) -> object:
        from rlcore.report.curves import Asked, curves
        from rlcore.report.page import Family, Run

        rows = asked.get("rows", [{"step": 1, "reward/mean": 0.5}])
        arms = [Family(name, [Run(name, at, rows, "")]) for name in ("a", "b")]
        return curves(arms, Asked(**{k: v for k, v in asked.items() if k != "rows"}))

    return part


def capacity(mib: int, **more: int) -> Part:
    def part(at: Path) -> None:
        from rlcore.buffer.admission import check_capacity
        from rlcore.buffer.specs import BatchingSpec

        sizes = {"samples_per_group": 4, "longest": 1 << 20, **more}
        check_capacity(mib << 20, BatchingSpec(groups_per_step=2), **sizes)

    return part


def shadow(run: dict[str, Any], other: dict[str, Any], *, scores_once: bool = True) -> Part:
    def part(at: Path) -> None:
        from rlcore.corrections.pipeline import build
        from rlcore.corrections.shadow import refuse_further_needs
        from rlcore.corrections.specs import CORRECTIONS
        from rlcore.objectives.specs import ObjectiveSpec
        from rlcore.registry import load_object

        first, second = (
            build({n: load_object(CORRECTIONS[n])(**s) for n, s in chosen.items()}, 0, ONE)
            for chosen in (run, other)
            for ONE in [ObjectiveSpec()]
        )
        refuse_further_needs(first, {"other": second}, scores_once=scores_once)

    return part


def layout(kind: str) -> Part:
    def part(at: Path) -> None:
        from rlcore.rollout.specs import RoundingSpec
        from rlcore.weights.compressed import check_layout

        check_layout({"l.q_proj.weight": (64, 64)}, RoundingSpec(rounding=kind))

    return part


def checkpoint(name: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.loop.checkpoint import MANIFEST, PARTS, STATE, new_checkpoint, require

        if not (at / "checkpoints").exists():
            for step in (1, 2):
                with new_checkpoint(at / "checkpoints", step) as folder:
                    (folder / STATE).write_text('{"progress": {"step": 1}}')
                    for place in PARTS:
                        (folder / place).parent.mkdir()
                        (folder / place).write_text("{}")
            newest = max((at / "checkpoints").iterdir())
            (newest / PARTS[0]).write_text("changed")
            assert (newest / MANIFEST).is_file()
            (at / "damaged").symlink_to(newest)
        return require(str(at / name))

    return part


def port(offset: int) -> Part:
    def part(at: Path) -> object:
        from rlcore.cluster.placement import free_port

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            return free_port(taken.getsockname()[1] if offset == 0 else 0)

    return part


def called(*words: str) -> Part:
    """The configuration of a call from Python."""

    def part(at: Path) -> object:
        from rlcore.api import _config

        return _config("train", ["experiment=quickstart", *words], at / "run", None)

    return part


REST: list[Case] = [
    ("leave it out of the overrides", called("dry_run=true"), called()),
    ("names 1 configurations", drawn(labels=("x",)), drawn(labels=("x", "y"))),
    ("perhaps reward/mean", drawn(y=("reward/men",)), drawn(y=("reward/mean",))),
    ("finished a step", drawn(rows=[]), drawn()),
    ("use 8 or more", capacity(7), capacity(8)),
    ("a smaller rollout.max_new_tokens", capacity(7), capacity(7, longest=1 << 19)),
    ("in neither", shadow({"tis": {}}, {"dvp": {}}), shadow({"tis": {}}, {"tis": {}})),
    ("same settings in both", shadow({"tis": {}}, {"dvp": {}}), shadow({"dvp": {}}, {"dvp": {}})),
    (
        "steps_per_phase=1",
        shadow({"tis": {}}, {"jackpot": {"target": "new"}}),
        shadow({"tis": {}}, {"jackpot": {"target": "new"}}, scores_once=False),
    ),
    ("a rounding of fp8", layout("int3"), layout("fp8")),
    ("Give another one", checkpoint("damaged"), checkpoint(".")),
    ("give a run directory", checkpoint("none"), checkpoint(".")),
    ("0 for any free port", port(0), port(1)),
]


CASES = [*AGENTS, *MODELS, *RECORDS, *REST, *remedies_of_agents.CASES, *remedies_of_runs.CASES]

USER = "what to give is the user's: a package, a machine, a file"
MODEL = "another model is the remedy"
FACT = "it says what another's answer or folder lacks, and names no change"
NOTHING = "the remedy is not to ask for what is lacking, and then nothing is checked"
RULE = "a rule of the configuration refuses it before, whose remedies are tried in tests/config"
OTHER = "its own test applies the remedy: "
ENGINE = "the remedy is a number that engines of tests/rollout/engines start with"
# (words of the pattern of a sentence whose remedy is not applied here, the reason). Every other
# refusal of these packages is in a list above; an entry that none needs any more fails the test.
WITHOUT = {
    r"choose another model|choose a model of another family": MODEL,
    r"its LM head (has|is not one product)|holds no loadable model": MODEL,
    r"needs a decoder with full attention": MODEL,
    r"refused a request|holds no row that can be read|method=.* .*$": FACT,
    r"is not a run directory|cannot confine programs": FACT,
    r"report needs at least one run": "the command reads its words before: test_watch.py",
    r"needs the (database|package reasoning-gym)|the database|database_path=": USER,
    r"by the program metamath|ask for Slurm's jobs|needs libaio": USER,
    r"has no sleep and wake|has no outputs|no adapter_shapes|exchanges positions among": RULE,
    r"needs model\.diffusion: choose": RULE,
    r"does not give|which has no hold|leave it false\.$": NOTHING,
    r"FlashAttention 4 of vLLM's": "it needs a GPU: benchmarks/gpu_check",
    r"groups fill it": OTHER + "test_buffer_staleness.py",
    r"has (RayJob|job) .* already": OTHER + "test_launch_command.py",
    r"is too few to train with rollout\.top_p": OTHER + "test_kept_sets.py",
    r"was tried both ways": OTHER + "test_probes.py",
    r"TORCH_CUDA_ARCH_LIST": OTHER + "test_swap_folder.py",
    r"ties every rollout actor|count=.* is negative|at least one rollout actor": OTHER
    + "test_fleet.py",
    r"logging\.wandb=.* failed": OTHER + "test_metrics_logger.py",
    r"rounds nothing, since|cannot leave out .* alone|is computed in one kernel": OTHER
    + "test_rounded_inputs.py",
    r"whose facts declare no settings|is not accepted by .*; it has": OTHER + "test_engines.py",
    r"that cannot be written to a file": OTHER + "test_api_inputs.py",
    r"names entries by int32": OTHER + "test_command_remedies.py",
    r"does not fit this machine|does not match the engine's|a multiple of 16 for": ENGINE,
}


@pytest.mark.parametrize(("said", "refused", "remedied"), CASES)
def test_a_remedy_changes_the_next_sentence(said, refused, remedied, at):
    before = sentence(refused, at)
    assert "\n" not in before and said.lower() in before.lower(), before
    assert sentence(remedied, at) == ""


def test_every_refusal_of_a_part_has_a_remedy_that_is_tried_or_a_reason(tmp_path_factory):
    found = [sentence(refused, given(tmp_path_factory.mktemp("at"))) for _, refused, _ in CASES]
    forgotten, idle = untried("parts", found, WITHOUT)
    assert (forgotten, idle) == ({}, [])
