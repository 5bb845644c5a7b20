"""Settings that other settings make dead: a sentence on each that a run sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from preset_files import given
from pydantic import BaseModel

from rlcore.config.compose import load
from rlcore.config.schema import RunConfig
from rlcore.config.sentences import sections
from rlcore.config.unread import unread
from rlcore.corrections.specs import CORRECTIONS
from rlcore.registry import load_object
from rlcore.spec import Spec

EXPERIMENTS = Path(__file__).parents[2] / "configs/experiment"
PRESETS = sorted(p for p in EXPERIMENTS.rglob("*.yaml") if p.parent.name != "evidence")
AIS = "correction=[ais]"
JACKPOT = "correction=[jackpot]"
DPPO, SMOOTH = "correction=[dppo] algorithm=dppo", "correction.dppo.region=smooth"
SEQUENCES = "algorithm.aggregation=seq-mean-token-mean"
KL = "algorithm.kl_coef=0.1"
KL_IN_REWARD = f"{KL} algorithm.kl_in=reward"
EXPECTED = "correction.jackpot.mode=expected"
OFFLOADED = "learner.offload.optimizer=cpu learner.zero_stage=3"
GPU = "actor.bf16.num_gpus=1"
IN_FLIGHT = "schedule=async schedule.on_publish=in_flight"
BY_LENGTH = "actor=sparse actor.sparse.sparse={blocks:null,blocks_by_length:[4]}"
DISTILL = "experiment=distill_sparse"
SHARED = {  # of slurm and kubernetes
    "nodes": "2",
    "cpus_per_node": "4",
    "memory_gib_per_node": "9",
    "env": "{A:b}",
    "grace_s": "9",
    "retries": "1",
    "idle_gpus": "allow",
}
SLURM_IMAGE = "cluster.launch.kind=slurm cluster.launch.container_image=i"
SLURM_TWO = "cluster.launch.kind=slurm cluster.launch.nodes=2 cluster.launch.learner_nodes=1"
OWN_NODES = "cluster.launch.kind=kubernetes cluster.launch.learner_nodes=1"
LAUNCH = {
    "slurm": {
        "start_timeout_s": "9",
        "interface": "ib0",
        "sbatch": "{time:'1'}",
        "setup": "[ls]",
        "container_image": "mine",
    },
    "ray": {"job_address": "http://a:1"},
    "kubernetes": SHARED
    | {
        "image": "a/b",
        "namespace": "mine",
        "claim": "disk",
        "mount": "/mine",
        "secret": "keys",
        "node_selector": "{a:b}",
        "fs_group": "9",
        "tolerations": "[{key:a}]",
        "image_pull_secrets": "[a]",
        "labels": "{a:b}",
        "pod": "{spec:{hostNetwork:true}}",
        "head_cpus": "9",
        "head_memory_gib": "9",
    },
}
# Settings whose meaning names a condition, and which are refused without it or read anyway.
# of settings in another section
BETWEEN = {
    *("eps_low", "eps_high", "kv_on_update", "strata", "on_collapse"),
    *("max_threads", "cpu_fast_paths"),
}
OTHERWISE = {
    "fp8_kv_cache": "refused on CPUs",
    "draft_path": "refused of other kinds",
    "whitening": "refused under other advantages",
    "dual_clip": "refused under other losses",
    "turn_discount": "refused without turn_share",
    "credit": "refused without turn_share or a critic",
    "max_uses": "refused under other orders",
    "offload_while_sampling": "refused without schedule.colocated",
    "gpus_per_node": "read by `rlcore plan`, too",
}
CRITIC = "algorithm=ppo critic=model"
TEACHER = "teacher=frozen teacher.path=folder"
IN_ENGINE = "teacher=engine teacher.path=folder"
OF_A_TEACHER = {
    "divergence": ("forward", TEACHER),
    "top_k": ("9", TEACHER),
    "weight": ("2.0", TEACHER),
    "context": ("best", TEACHER),
}
OF_A_CRITIC = {
    "lr": "0.1",
    "warmup_steps": "3",
    "discount": "0.5",
    "lam": "0.5",
    "traces": "gae",
    "clip": "0.1",
    "whiten": "false",
    "bootstrap": "true",
    "lora": "{}",
}
# key: its value; words under which it is dead, word by word in place of ones that it lives under
PAIRS: dict[str, list[tuple[str, str, str]]] = {
    "algorithm.kl_estimator": [("k1", "", KL), ("k1", KL_IN_REWARD, KL)],
    "algorithm.kl_in": [("reward", "", KL)],
    "algorithm.kl_target": [("0.1", "", KL_IN_REWARD), ("0.1", KL, KL_IN_REWARD)],
    "algorithm.kl_horizon": [
        ("9", dead, f"{KL_IN_REWARD} algorithm.kl_target=0.1") for dead in ("", KL, KL_IN_REWARD)
    ],
    "algorithm.kl_ratio_cap": [
        ("3.0", "", KL),
        ("3.0", KL_IN_REWARD, KL),
        ("3.0", "algorithm.kl_coef=0.1 algorithm.kl_estimator=full", "algorithm.kl_coef=0.1"),
    ],
    "model.tool_parser": [("hermes", "model.chat_template=off", "")],
    "model.chat_template_args": [("{enable_thinking:false}", "model.chat_template=off", "")],
    "algorithm.overlong_penalty": [("0.5", "", "algorithm.overlong_share=0.2")],
    "algorithm.filter_limit": [("9", "", "algorithm.dynamic_sampling=true")],
    "algorithm.eps_low": [
        ("0.1", "algorithm.loss=reinforce correction=[tis]", "correction=[tis]"),
        ("0.1", "correction=[tis] correction.tis.adjusted=true", "correction=[tis]"),
    ],
    "algorithm.eps_high": [
        (
            "0.1",
            f"{JACKPOT} correction.jackpot.target=new correction.jackpot.short_circuit=true",
            "",
        )
    ],
    **{
        f"actor.bf16.{name}": [(value, dead, alive)]
        for name, value, dead, alive in [
            ("kv_cache_gib", "2.0", GPU, ""),
            ("gpu_memory_utilization", "0.5", "", GPU),
            ("fp32_head", "true", "", "actor.bf16.dtype=bfloat16"),
            ("keep_high_precision", "[]", "", "actor.bf16.rounding=fp8"),
            ("precise_layers", "1", "", "actor.bf16.rounding=fp8"),
            ("kv_on_update", "keep", "schedule=async schedule.on_publish=abort", IN_FLIGHT),
        ]
    },
    "learner.max_threads": [("2", "schedule=async cluster.cpu_fast_paths=false", "")],
    "cluster.cpu_fast_paths": [("false", f"learner=gpu {GPU}", GPU)],
    "actor.sparse.sparse.length_step": [("2048", "actor=sparse", BY_LENGTH)],
    "actor.sparse.sparse.prompt_block": [
        ("64", "actor=sparse", "actor=sparse actor.sparse.sparse.prompt=block")
    ],
    "correction.strata": [("none", "", "actor=[bf16,fp8]")],
    "correction.shadow_every": [("5", "", "correction.shadow=[[ais]]")],
    "schedule.on_publish": [
        ("abort", "schedule=on_policy", "schedule=async"),
        ("in_flight", "schedule=fixed_lag", "schedule=async schedule.on_publish=finish"),
    ],
    "schedule.on_collapse": [
        ("stop", f"logging.warnings.{rule}=0", "") for rule in ("fallen", "answer_kl")
    ],
    "schedule.max_rollbacks": [("9", "", "schedule.on_collapse=rollback")],
    "schedule.steps_per_publish": [
        (
            "2",
            "schedule=on_policy schedule.steps_per_phase=4",
            "schedule=on_policy schedule.steps_per_phase=2",
        )
    ],
    "cluster.num_cpus": [("64", "cluster.address=auto", "")],
    "cluster.object_store_mib": [("900", "cluster.address=auto", "")],
    **{
        f"cluster.launch.{name}": [
            (value, f"cluster.launch.kind={dead}", f"cluster.launch.kind={alive}")
            for dead in ["ray" if name in SHARED else "slurm" if alive != "slurm" else "kubernetes"]
        ]
        for alive, names in LAUNCH.items()
        for name, value in names.items()
    },
    **{
        f"cluster.launch.{name}": [
            (value, "cluster.launch.kind=slurm", SLURM_IMAGE),
            *[(value, "cluster.launch.kind=ray", SLURM_IMAGE)] * (name == "container_mounts"),
        ]
        for name, value in (
            ("container_mounts", "['/a:/b']"),
            ("container_runtime", "apptainer"),
        )
    },
    **{
        f"cluster.launch.learner_{name}_per_node": [
            ("9", f"cluster.launch.kind={kind} cluster.launch.learner_nodes={nodes}", OWN_NODES)
            for kind, nodes in (("ray", 1), ("kubernetes", 0))
        ]
        for name in ("cpus", "gpus", "memory_gib")
    },
    "cluster.launch.min_actor_nodes": [
        ("1", f"{SLURM_TWO} cluster.launch.learner_nodes=0", SLURM_TWO),
        ("1", f"{SLURM_TWO} cluster.launch.kind=kubernetes", SLURM_TWO),
    ],
    "cluster.launch.learner_sbatch": [
        ("{partition:a}", f"{SLURM_TWO} cluster.launch.learner_nodes=0", SLURM_TWO),
        ("{partition:a}", f"{SLURM_TWO} cluster.launch.kind=kubernetes", SLURM_TWO),
    ],
    "logging.project": [("mine", "logging.wandb=disabled", "logging.wandb=offline")],
    "logging.prometheus_host": [("0.0.0.0", "", "logging.prometheus_port=9090")],
    "logging.recorder.max_gib": [("9", "logging.recorder.steps=0", "logging.recorder.steps=4")],
    **{
        f"environment.{name}": [(value, "", "environment=higher_lower task=higher_lower")]
        for name, value in [
            ("args", "{high:9}"),
            ("max_turns", "5"),
            ("max_observation_tokens", "64"),
            ("step_timeout_s", "9.0"),
            ("episode_timeout_s", "99.0"),
            ("concurrency", "3"),
            ("memory_mib", "999"),
        ]
    },
    "learner.distill.kl": [("k1", f"{DISTILL} learner.distill.kl_coef=0", DISTILL)],
    "learner.fp32_head": [("true", "", "learner.dtype=bfloat16 learner.zero_stage=1")],
    "learner.overlap_comm": [("true", "", "learner=zero3")],
    "checkpoint.best_is": [("min", "", "checkpoint.keep_best=eval/digits/accuracy")],
    "learner.lr_decay_steps": [("9", "", "learner.lr_schedule=linear")],
    "learner.lr_final": [("0.1", "", "learner.lr_schedule=linear")],
    "learner.offload.pin_memory": [("false", "", OFFLOADED)],
    **{
        f"correction.jackpot.{name}": [
            (value, f"{JACKPOT} correction.jackpot.mode=mask", JACKPOT),
            (value, f"{JACKPOT} correction.jackpot.normaliser=none", JACKPOT),
            (value, f"{JACKPOT} {SEQUENCES}", f"{JACKPOT} {SEQUENCES} {paper}"),
            *[(value, f"{JACKPOT} {expected}", JACKPOT)] * (name == "alpha_hat"),
        ]
        for paper, expected in [("correction.jackpot.normaliser=paper", EXPECTED)]
        for name, value in [("alpha_hat", "bernoulli"), ("missing", "bound"), ("tail", "none")]
    },
    **{
        f"correction.ais.{name}": [(value, f"{AIS} correction.ais.alpha=n_star", AIS)]
        for name, value in [("delta", "0.1"), ("gamma", "2.0"), ("beta", "2.0"), ("eps", "0.1")]
    },
    "correction.dppo.delta": [("2.0", DPPO, f"{DPPO} {SMOOTH}")],
    **{
        f"correction.dppo.{name}": [(value, f"{DPPO} {SMOOTH}", DPPO)]
        for name, value in [("divergence", "kl"), ("low", "0.1"), ("high", "0.1")]
    },
    "correction.jackpot.c1": [("2.0", f"{JACKPOT} correction.jackpot.mode=mask", JACKPOT)],
    "correction.jackpot.c2": [
        ("2.0", f"{JACKPOT} correction.jackpot.{dead}", f"{JACKPOT} correction.jackpot.target=new")
        for dead in (
            "target=ref",
            "mode=mask",
            "target=new correction.jackpot.short_circuit=true",
        )
    ],
    "correction.jackpot.normaliser": [
        ("paper", f"{JACKPOT} correction.jackpot.mode=mask", JACKPOT)
    ],
    **{f"teacher.{name}": [(value, "", taught)] for name, (value, taught) in OF_A_TEACHER.items()},
    "teacher.tail": [("drop", dead, TEACHER) for dead in ("", f"{TEACHER} teacher.top_k=null")],
    **{
        f"teacher.engine.{name}": [(value, f"{IN_ENGINE}{dead}", f"{IN_ENGINE}{alive}")]
        for gpu in (" teacher.engine.num_gpus=1",)
        for name, value, dead, alive in (
            ("kv_cache_gib", "2.0", gpu, ""),
            ("gpu_memory_utilization", "0.5", "", gpu),
        )
    },
    "teacher.ratio_cap": [
        ("3.0", dead, f"{TEACHER} teacher.tail=sampled")
        for dead in ("", TEACHER, f"{TEACHER} teacher.top_k=null")
    ],
    "teacher.js_weight": [
        ("0.2", dead, f"{TEACHER} teacher.divergence=js") for dead in ("", TEACHER)
    ],
    "teacher.refresh_steps": [("9", dead, "teacher=previous") for dead in ("", TEACHER)],
    **{f"critic.{name}": [(value, "", CRITIC)] for name, value in OF_A_CRITIC.items()},
    **{
        f"critic.{name}": [("2.0", dead, CRITIC) for dead in ("", f"{CRITIC} critic.traces=gae")]
        for name in ("rho_cap", "c_cap")
    },
}


def sentences(words: str) -> list[str]:
    return unread(load(["run_dir=x", *words.split()]))


@pytest.mark.parametrize("key", PAIRS)
def test_a_run_is_told_of_a_setting_that_nothing_reads(key: str) -> None:
    for value, dead, alive in PAIRS[key]:
        word = f"{key}={value}"
        (found,) = sentences(f"{dead} {word}")
        assert found.startswith(f"{key}=") and "is not read, since " in found
        assert sentences(f"{alive} {word}") == []
        assert sentences(dead) == []


def test_every_declared_pair_is_in_the_table() -> None:
    for name in CORRECTIONS:
        load_object(CORRECTIONS[name])
    declared = {name for spec in specs(Spec) for pair in spec.unread for name in pair.names}
    assert declared == {key.rpartition(".")[2] for key in PAIRS} - BETWEEN


def specs(cls: type[Spec]) -> set[type[Spec]]:
    return {cls}.union(*(specs(sub) for sub in cls.__subclasses__()))


def test_a_setting_whose_meaning_begins_with_a_condition_is_declared_or_refused() -> None:
    """Such as "slurm: shell lines": the condition is another setting, or one of its values."""
    named = {key.rpartition(".")[2] for key in PAIRS} | OTHERWISE.keys()
    found = {name for model in set(models(RunConfig)) for name in conditional(model)}
    assert {"filter_limit", "setup", "turn_discount"} <= found <= named


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for info in model.model_fields.values():
        for inner, _ in sections(info.annotation):
            yield from models(inner)


def conditional(model: type[BaseModel]) -> Iterator[str]:
    fields = model.model_fields
    for name, info in fields.items():
        begin = re.match(r"([\w ,.]+):", info.description or "")
        conditions = begin[1].split(", ") if begin else []
        others: set[Any] = {"CPU", "GPU", "in flight", *fields} - {name}
        for other, its in fields.items():
            if other != name and get_origin(its.annotation) is Literal:
                others |= set(get_args(its.annotation)) - {"auto"}
        others -= set(get_args(info.annotation))  # "loss: a separate term" says what a value is
        if conditions and all(c.removeprefix("kind ") in others for c in conditions):
            yield name


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_presets_set_nothing_that_is_not_read(path: Path) -> None:
    name = path.relative_to(EXPERIMENTS).with_suffix("").as_posix()
    config = load(["run_dir=x", f"experiment={name}", *given(name)])
    assert unread(config) == []
    jackpot = config.correction.get("jackpot")
    paper = path.parent.name == "paper" and jackpot is not None
    assert not paper or jackpot.normaliser == "paper"  # type: ignore[union-attr]
