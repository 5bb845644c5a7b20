"""Settings that other settings make dead: a sentence on each that a run sets."""

from __future__ import annotations

from pathlib import Path

import pytest
from preset_files import given

from rlcore.config.checks import unread
from rlcore.config.compose import load
from rlcore.corrections.specs import CORRECTIONS
from rlcore.registry import load_object
from rlcore.spec import Spec

PAPERS = sorted((Path(__file__).parents[2] / "configs/experiment/paper").glob("*.yaml"))
JACKPOT = "correction=[jackpot]"
SEQUENCES = "algorithm.aggregation=seq-mean-token-mean"
KL = "algorithm.kl_coef=0.1"
KL_IN_REWARD = f"{KL} algorithm.kl_in=reward"
OFFLOADED = "learner.offload.optimizer=cpu learner.zero_stage=3"
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
    "checkpoint.best_is": [("min", "", "checkpoint.keep_best=eval/digits/accuracy")],
    "learner.lr_decay_steps": [("9", "", "learner.lr_schedule=linear")],
    "learner.lr_final": [("0.1", "", "learner.lr_schedule=linear")],
    "learner.offload.pin_memory": [("false", "", OFFLOADED)],
    **{
        f"correction.jackpot.{name}": [
            (value, f"{JACKPOT} correction.jackpot.mode=mask", JACKPOT),
            (value, f"{JACKPOT} correction.jackpot.normaliser=none", JACKPOT),
            (value, f"{JACKPOT} {SEQUENCES}", f"{JACKPOT} {SEQUENCES} {paper}"),
        ]
        for paper in ["correction.jackpot.normaliser=paper"]
        for name, value in [("alpha_hat", "bernoulli"), ("missing", "bound"), ("tail", "none")]
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
}


def sentences(words: str) -> list[str]:
    return unread(load(["run_dir=x", *words.split()]))


@pytest.mark.parametrize("key", PAIRS)
def test_a_run_is_told_of_a_setting_that_nothing_reads(key: str) -> None:
    for value, dead, alive in PAIRS[key]:
        word = f"{key}={value}"
        (found,) = sentences(f"{dead} {word}")
        assert found.startswith(f"{word} is not read, since ") and ": leave it at " in found
        assert sentences(f"{alive} {word}") == []
        assert sentences(dead) == []


def test_every_declared_pair_is_in_the_table() -> None:
    for name in CORRECTIONS:
        load_object(CORRECTIONS[name])
    declared = {name for spec in specs(Spec) for pair in spec.unread for name in pair.names}
    assert declared == {key.rpartition(".")[2] for key in PAIRS} - {"eps_low", "eps_high"}


def specs(cls: type[Spec]) -> set[type[Spec]]:
    return {cls}.union(*(specs(sub) for sub in cls.__subclasses__()))


@pytest.mark.parametrize("path", PAPERS, ids=lambda p: p.stem)
def test_presets_of_papers_set_nothing_that_is_not_read(path: Path) -> None:
    name = f"paper/{path.stem}"
    config = load(["run_dir=x", f"experiment={name}", *given(name)])
    assert unread(config) == []
    jackpot = config.correction.get("jackpot")
    assert jackpot is None or jackpot.normaliser == "paper"  # type: ignore[attr-defined]
