"""Refusals of learners, loops, launchers, records and clusters with the remedies that they name:
cases of test_part_remedies.py."""

from __future__ import annotations

import gzip
import json
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MIB = 1 << 20
Part = Callable[[Path], object]
Case = tuple[str, Part, Part]


def without(module: str, part: Part) -> Part:
    """The part where a package cannot be imported."""

    def lacking(at: Path) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            return part(at)

    return lacking


# -- models of a learner -------------------------------------------------------------------------


def loaded(
    *, config: dict[str, Any] | None = None, rounding: Any = None, bitwise: int = 0, **settings: Any
) -> Part:
    """The policy of a learner, loaded from a small folder; `config`: entries of its config.json."""

    def part(at: Path) -> object:
        from rlcore.learner import build
        from rlcore.learner.protocols import TrainEngine
        from rlcore.learner.specs import LearnerJob, LearnerSpec
        from rlcore.models.fresh import build_fresh_model
        from rlcore.models.specs import FreshModelSpec
        from rlcore.objectives.specs import ObjectiveSpec
        from rlcore.rollout.specs import RoundingSpec
        from rlcore.testing.records import make_sampling

        shape = {"hidden_size": 12, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8}
        spec = FreshModelSpec(**shape, intermediate_size=16, tie_embeddings=False)
        folder = build_fresh_model(
            at / f"m{len(list(at.iterdir()))}", "ab ", spec, seed=0, max_len=32
        )
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
        job = LearnerJob(
            model_path=str(folder),
            learner=LearnerSpec(**{"lr": 1e-3, "lr_warmup_steps": 0} | settings),
            objective=ObjectiveSpec(),
            corrections={},
            sampling=make_sampling(),
            total_steps=1,
            run_seed=0,
            pad_id=0,
        )
        rounded = None if rounding is None else RoundingSpec(**rounding)
        job = replace(job, rounding=rounded, bitwise_positions=bitwise or job.bitwise_positions)
        return build._Models(job, TrainEngine, None, build.CPU).policy()

    return part


def float8() -> ModuleType:
    stand_in = ModuleType("torchao.float8")
    stand_in.Float8LinearConfig = stand_in.convert_to_float8_training = None
    return stand_in


def with_modules(modules: dict[str, Any], part: Part) -> Part:
    def given(at: Path) -> object:
        with pytest.MonkeyPatch.context() as patch:
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            return part(at)

    return given


def uncompiled(part: Part) -> Part:
    """The part on a machine without a compiler."""

    def given(at: Path) -> object:
        import torch

        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("no C++ compiler found")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", broken)
            return part(at)

    return given


def jitter(amount: float) -> Part:
    def part(at: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from rlcore.learner.probes import CPU, refuse_odd_passes

        sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
        sizes |= {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 16}
        config = AutoConfig.for_model(
            "phimoe", **sizes, num_hidden_layers=1, num_local_experts=4, router_jitter_noise=amount
        )
        torch.manual_seed(0)
        refuse_odd_passes(AutoModelForCausalLM.from_config(config), "M", divided=False, device=CPU)

    return part


def positions(most: int | str) -> Part:
    def part(at: Path) -> object:
        from rlcore.learner.build import layer_sizes
        from rlcore.learner.limits import most_positions
        from rlcore.learner.specs import LearnerSpec

        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=8))
        spec = LearnerSpec(lr=1.0, micro_batch_tokens=most)
        return most_positions(spec, partial(layer_sizes, SimpleNamespace(config=config)))

    return part


INT4 = {"rounding": "int4", "keep_high_precision": ("embed_tokens",)}
WHOLE = {"rounding": "int4", "keep_high_precision": ("embed_tokens", "lm_head")}
GELU = {"hidden_act": "gelu"}
TORCHAO = {"torchao": ModuleType("torchao"), "torchao.float8": float8()}
LEARNERS: list[Case] = [
    ("of qwen3 with gelu", loaded(config=GELU, layers="liger"), loaded(config=GELU)),
    (
        "use learner.layers=torch",
        without("liger_kernel", loaded(layers="liger")),
        without("liger_kernel", loaded(layers="torch")),
    ),
    (
        "use learner.fp8=none",
        without("torchao", loaded(fp8="row")),
        without("torchao", loaded(fp8="none")),
    ),
    (
        "multiples of 16",
        with_modules(TORCHAO, loaded(fp8="row")),
        with_modules(TORCHAO, loaded(fp8="none")),
    ),
    ("or use learner.layers=torch", uncompiled(loaded(layers="compiled")), uncompiled(loaded())),
    (
        "choose out of down_proj",
        loaded(lora={"targets": ["x"]}),
        loaded(lora={"targets": ["down_proj"]}),
    ),
    ("keep_high_precision", loaded(rounding=INT4), loaded(rounding=WHOLE)),
    ("round_as=null", loaded(rounding=INT4), loaded()),
    ("leave it false", loaded(bitwise=32), loaded()),
    ("switch off dropout or jitter", jitter(0.5), jitter(0.0)),
    ("give a number of positions", positions("auto"), positions(64)),
]


# -- loops -----------------------------------------------------------------------------------------


class Ten:
    """Ten problems; the prompt of problem i has i + 1 tokens."""

    name = "ten"

    def size(self, split: str) -> int:
        return 10

    def item(self, split: str, index: int) -> Any:
        from rlcore.types import Item

        return Item(f"ten/{split}/{index}", "x" * (index + 1), "")


def source(most: int = 100, overlong: str = "refuse") -> Any:
    from rlcore.loop.prompts import PromptSource

    more: dict[str, Any] = {"run_seed": 0, "max_prompt_tokens": most, "overlong": overlong}
    return PromptSource(Ten(), lambda text: list(range(len(text))), **more)


def checked(most: int, overlong: str) -> Part:
    return lambda at: source(most, overlong).check("train", 10)


def mixture(before: str, now: dict[str, float]) -> Part:
    def part(at: Path) -> None:
        from rlcore.loop.prompts import Mixture

        first = source()
        if before:
            first = Mixture(dict.fromkeys(before, first), dict.fromkeys(before, 1.0), run_seed=0)
        Mixture(dict.fromkeys(now, source()), now, run_seed=0).restore(first.state())

    return part


def single(state_of: str) -> Part:
    def part(at: Path) -> None:
        from rlcore.loop.prompts import Mixture

        both = Mixture(dict.fromkeys("ab", source()), {"a": 1.0, "b": 1.0}, run_seed=0)
        source().restore((both if state_of == "several" else source()).state())

    return part


def plan(**changes: Any) -> Part:
    """A schedule that goes on with a run at step 5, in phases of 4 batches, twice each."""

    def part(at: Path) -> None:
        from rlcore.loop.run_plan import Plan, Progress
        from rlcore.loop.specs import ScheduleSpec

        settings = {"steps": 24, "max_staleness": 3, "epochs": 2, "steps_per_phase": 4}
        spec = ScheduleSpec(**settings | changes)
        given = dict.fromkeys(Plan.__dataclass_fields__)
        before = Progress(step=5, phase_batches=4, phase_epochs=2, max_staleness=3, in_phase=True)
        Plan(**given | {"schedule": spec}).check_resume(before)

    return part


def checkpoints(which: str) -> Part:
    """The checkpoint that a run goes on from, where its only one was damaged."""

    def part(at: Path) -> object:
        from rlcore.loop.checkpoint import PARTS, STATE, new_checkpoint, resume_from

        root = at / which / "checkpoints"
        if which != "other":
            with new_checkpoint(root, 1) as folder:
                (folder / STATE).write_text('{"progress": {"step": 1}}')
                for place in PARTS:
                    (folder / place).parent.mkdir()
                    (folder / place).write_text("{}")
            if which == "damaged":
                (next(root.iterdir()) / PARTS[0]).write_text("changed")
        return resume_from(root, lambda _: None)

    return part


def filtered(limit: int) -> Part:
    def part(at: Path) -> None:
        from rlcore.buffer.ledger import TaskAccounts

        accounts = TaskAccounts()
        for _ in range(3):
            accounts.judged("t", filtered=True, reward=0.0)
        accounts.check(limit)

    return part


LOOPS: list[Case] = [
    ("raise it, or", checked(0, "skip"), checked(10, "skip")),
    ("truncate_left", checked(0, "skip"), checked(1, "truncate_left")),
    ("resume with that one", mixture("", {"a": 1.0}), single("one")),
    ("task.b.weight=0", mixture("ab", {"a": 1.0}), mixture("ab", {"a": 1.0, "b": 0.0})),
    ("resume with these", single("several"), mixture("ab", {"a": 1.0, "b": 1.0})),
    ("resume with epochs=2", plan(epochs=1), plan()),
    ("and steps_per_phase=4", plan(steps_per_phase=2), plan()),
    ("resume with at least 3", plan(max_staleness=0), plan(max_staleness=3)),
    ("restore one of them", checkpoints("damaged"), checkpoints("whole")),
    ("choose another run_dir", checkpoints("damaged"), checkpoints("other")),
    ("raise algorithm.filter_limit=3", filtered(3), filtered(4)),
]


# -- launchers, clusters ---------------------------------------------------------------------------


def rendered(run_dir: str = "/data/a", **settings: Any) -> Part:
    def part(at: Path) -> object:
        from rlcore.launch.job import render
        from rlcore.launch.specs import LaunchSpec

        return render(LaunchSpec(**settings), [], run_dir)

    return part


def launched(dry_run: bool) -> Part:
    def part(at: Path) -> object:
        from rlcore.launch.job import launch
        from rlcore.launch.specs import LaunchSpec

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(at))
            return launch(LaunchSpec(kind="slurm"), [], str(at / "run"), dry_run=dry_run)

    return part


KUBE = {"kind": "kubernetes", "memory_gib_per_node": 8, "image": "i", "claim": "c"}
LAUNCHES: list[Case] = [
    (
        "choose fewer",
        rendered(kind="slurm", nodes=2, learner_nodes=2),
        rendered(kind="slurm", nodes=2, learner_nodes=1),
    ),
    (
        "0 to share all",
        rendered(kind="slurm", nodes=2, learner_nodes=2),
        rendered(kind="slurm", nodes=2, learner_nodes=0),
    ),
    ("claim is missing", rendered(**KUBE | {"claim": None}), rendered(**KUBE)),
    ("a run_dir under /data", rendered("runs/a", **KUBE), rendered("/data/a", **KUBE)),
    ("add dry_run=true", launched(False), launched(True)),
]


def cluster(
    *,
    address: str | None = "local",
    env: dict[str, str] | None = None,
    cpus: float = 1,
    gpus: float = 0,
    store: int = 0,
    clusters: int = 0,
    **settings: Any,
) -> Part:
    """The checks of a run's cluster. {port}: one that listens; {free}: one that does not."""

    def part(at: Path) -> None:
        import psutil

        from rlcore.cluster import ray_cluster
        from rlcore.cluster.specs import RaySpec

        raylet = {"name": "raylet", "username": psutil.Process().username()}
        found = [
            SimpleNamespace(info=raylet | {"cmdline": [f"{ray_cluster.GCS_WORD}127.0.0.1:{n}"]})
            for n in range(clusters)
        ]
        with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            if address and "{port}" in address:
                taken.listen()
            patch.delenv("RAY_ADDRESS", raising=False)
            patch.setattr(psutil, "process_iter", lambda *_: found)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            for name, value in (env or {}).items():
                patch.setenv(name, value.replace("{at}", str(at)))
            where = address and address.replace("{port}", str(port)).replace("{free}", str(port))
            needs = {"needed_cpus": cpus, "needed_gpus": gpus, "store_bytes": store}
            ray_cluster.check_cluster(RaySpec(address=where, **settings), **needs)

    return part


def joined(cpus: float = 1, store: int = 0) -> Part:
    """What is checked of a cluster of one CPU that holds 1 MiB."""

    def part(at: Path) -> None:
        import ray

        from rlcore.cluster import ray_cluster

        node = {"Alive": True, "Resources": {"object_store_memory": MIB}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray, "nodes", lambda: [node])
            patch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0})
            ray_cluster._check_capacity(cpus, 0)
            ray_cluster._check_joined_store(store)

    return part


LONG = {"RAY_TMPDIR": "/tmp/" + "x" * 60}
NONE = {"RAY_TMPDIR": "/nowhere"}
CLUSTERS: list[Case] = [
    ("set RAY_TMPDIR=/tmp", cluster(env=LONG), cluster(env={"RAY_TMPDIR": "/tmp"})),
    ("use at most 39 characters", cluster(env=LONG), cluster(env={"RAY_TMPDIR": "/var/tmp"})),
    ("RAY_TMPDIR=/nowhere", cluster(env=NONE), cluster(env={"RAY_TMPDIR": "/tmp"})),
    (
        "use 240 or more",
        cluster(store=120 * MIB, object_store_mib=100),
        cluster(store=120 * MIB, object_store_mib=240),
    ),
    ("transport=disk", cluster(store=120 * MIB, object_store_mib=100), cluster(store=0)),
    ("lower actor", cluster(cpus=3, num_cpus=2), cluster(cpus=2, num_cpus=2)),
    ("learner.num_gpus=0", cluster(gpus=1), cluster(gpus=0)),
    ("HOST:PORT", cluster(address="auto"), cluster(address="127.0.0.1:{port}")),
    ("or local for", cluster(address="auto", clusters=2), cluster(clusters=2)),
    ("names no port", cluster(address="head"), cluster(address="127.0.0.1:{port}")),
    ("names no port", cluster(env={"RAY_ADDRESS": "head"}, address=None), cluster()),
    (
        "start that cluster",
        cluster(address="127.0.0.1:{free}"),
        cluster(address="127.0.0.1:{port}"),
    ),
    ("cluster.address=local", cluster(address="127.0.0.1:{free}"), cluster()),
    ("lower actor.*.count", joined(cpus=2), joined()),
    ("a larger --object-store-memory", joined(store=2 * MIB), joined(store=MIB)),
]


# -- records, packages, files ----------------------------------------------------------------------


def dumped(name: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.dumps.files import Read, read

        row = b'{"logp_inf": [-1.0], "logp_ref": [-1.1], "advantage": 1.0}\n'
        (at / name).write_bytes(gzip.compress(row) if name.endswith(".gz") else row)
        return list(read([at / name], Read()))

    return part


def wandb(mode: str | None) -> Part:
    def part(at: Path) -> object:
        import importlib.metadata

        from rlcore.metrics.sinks import wandb_mode
        from rlcore.metrics.specs import LoggingSpec

        def absent(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.metadata, "version", absent)
            return wandb_mode(LoggingSpec(wandb=mode))

    return part


def tracker(*names: str) -> Part:
    def part(at: Path) -> object:
        import importlib.metadata

        from rlcore.metrics import trackers

        def absent(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.metadata, "version", absent)
            return [trackers.TensorboardSink._require() for _ in names]

    return part


def compared(*names: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.report.compare import compare

        for number, name in enumerate(names):
            (at / name).mkdir(exist_ok=True)
            (at / name / "config.yaml").write_text(f"learner: {{lr: {number}}}\nrun_dir: {name}\n")
            (at / name / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        return compare([str(at / name) for name in names], as_json=True)

    return part


def figure(form: str, *labels: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.report.curves import Asked, write_curves

        (at / "config.yaml").touch()
        (at / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        asked = Asked("step", ("reward/mean",), ylabel=labels)
        return write_curves([str(at)], form, asked, str(at / f"a.{form}"))

    return part


def imported(text: str, out: str = "new") -> Part:
    def part(at: Path) -> object:
        from rlcore.extras.foreign import import_config

        (at / "old" / "experiment").mkdir(parents=True, exist_ok=True)
        (at / "old" / "experiment" / "c.yaml").touch()
        (at / "c.yaml").write_text(text)
        return import_config(str(at / "c.yaml"), str(at / out))

    return part


def masked(**config: Any) -> Part:
    def part(at: Path) -> None:
        from rlcore.extras.diffusion.folder import check_masked

        sizes = ("d_model", "n_heads", "n_layers", "mlp_hidden_size", "max_sequence_length")
        whole = dict.fromkeys(sizes, 8) | {"model_type": "llada", "vocab_size": 8}
        check_masked(whole | {"mask_token_id": 7} | config, whose="model.path=M")

    return part


def blocks(side: int, form: str = "compressed-tensors") -> Part:
    def part(at: Path) -> None:
        from rlcore.rollout.specs import RoundingSpec
        from rlcore.weights.compressed import check_layout

        if form == "compressed-tensors":
            check_layout({"l.q_proj.weight": (side, side)}, RoundingSpec(rounding="mxfp4"))

    return part


def key(name: str | None, **env: str) -> Part:
    def part(at: Path) -> object:
        from rlcore.tasks.rewards.requests import api_key

        with pytest.MonkeyPatch.context() as patch:
            for variable, value in env.items():
                patch.setenv(variable, value)
            return api_key("k", SimpleNamespace(api_key_env=name))

    return part


def threads(counts: bool) -> Part:
    def part(at: Path) -> object:
        from rlcore.learner.cpu import spare_cores

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spare_cores, "STAT", at / "none")
            return spare_cores.SpareCores(1, 1) if counts else None

    return part


def clipped(low: float) -> Part:
    def part(at: Path) -> None:
        from rlcore.corrections.covariance import ClipCovSpec

        ClipCovSpec(low=low, high=5.0).check("correction.clip_cov")

    return part


TRL = "learning_rate: 1e-6\nnum_generations: 8\nbeta: 0.0\nmax_completion_length: 64\n"
FILES: list[Case] = [
    ("decompress it first", dumped("a.jsonl.gz"), dumped("a.jsonl")),
    (
        "or write JSONL",
        without("pyarrow.parquet", dumped("a.parquet")),
        without("pyarrow.parquet", dumped("a.jsonl")),
    ),
    ("logging.wandb=disabled", wandb("online"), wandb("disabled")),
    ("use format=csv", without("matplotlib", figure("svg")), without("matplotlib", figure("csv"))),
    ("or leave it out", tracker("tensorboard"), tracker()),
    ("name the run to compare", compared("a"), compared("a", "b")),
    ("takes two runs, or the seeds", compared("a", "b", "c"), compared("a", "b")),
    ("one label for each", figure("svg", "a", "b"), figure("svg", "a")),
    ("out=FOLDER", imported(TRL, "old"), imported(TRL)),
    ("cannot be read", imported("a: ["), imported(TRL)),
    ("give a YAML", imported("a: 1\n"), imported(TRL)),
    ("or give a file of verl", imported("gconfig: {n_samples: 4}"), imported(TRL)),
    ("model_type=llada", masked(model_type="x"), masked()),
    ("only scale_logits=False", masked(scale_logits=True), masked(scale_logits=False)),
    ("must be equal", masked(embedding_size=16), masked(embedding_size=8)),
    ("outside its vocab_size", masked(mask_token_id=8), masked(mask_token_id=7)),
    ("has no mask_token_id", masked(mask_token_id=None), masked()),
    ("choose format=rounded", blocks(20), blocks(20, "rounded")),
    ("Export it before", key("RL_KEY"), key("RL_KEY", RL_KEY="x")),
    ("leave the setting null", key("RL_KEY"), key(None)),
    ("learner.max_threads=null", threads(True), threads(False)),
    ("low must be below", clipped(5.0), clipped(1.0)),
]
CASES = [*LEARNERS, *LOOPS, *LAUNCHES, *CLUSTERS, *FILES]
