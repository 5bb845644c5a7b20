"""The referee's verdicts on published losses, which writes the table of docs/referee.md.

    python -m benchmarks.peers.referee_peers --out docs/referee.md

Packages are installed from the registry into a folder of their own, at the versions below.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import again
from rlcore.referee import TrlTrainer, Verdict, World, judge

PACKAGES = {  # what each package imports that our environment lacks, too
    "verl": (
        *("verl==0.9.1", "tensordict==0.15.3", "pyvers==0.2.3", "orjson==3.13.0"),
        "codetiming==1.4.0",
    ),
    "trl": (
        *("trl==1.16.0", "datasets==5.2.0", "pandas==3.1.1", "multiprocess==0.70.19"),
        *("httpx==0.28.1", "python-dateutil==4.0.0", "six==1.17.0", "pytz==2026.6"),
        "tzdata==2026.6",
    ),
    "openrlhf": ("openrlhf==0.11.2",),
    "skyrl": ("skyrl==0.3.0", "jaxtyping==0.3.3", "wadler-lindig==0.1.7"),
    "areal": ("areal==1.0.4",),
}
# Losses that read the sampler's log-probs themselves: weights from outside do not apply.
WEIGH = ("OpenRLHF", "SkyRL", "AReaL")
# (world, weights) of the table's rows
ROWS = (
    (World(), "none"),
    (World(lengths="mixed"), "none"),
    (World(group=3, advantage="normalised"), "none"),
    (World("mismatch"), "none"),
    (World("mismatch"), "truncated"),
    (World("mismatch"), "token"),
    (World("mismatch"), "sequence"),
    (World("mismatch", lengths="mixed"), "sequence"),
    (World(later_step=True), "none"),
)


def folder_of(package: str) -> Path:
    """Where a package is installed; kept between runs. Raises CalledProcessError."""
    words = PACKAGES[package]
    folder = Path(tempfile.gettempdir()) / f"rlcore-referee-{words[0].replace('==', '-')}"
    if not (folder / package).is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *words], check=True, timeout=900, capture_output=True)
    return folder


def verl() -> dict[str, Any]:
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    class Config(dict[str, Any]):
        """Stands for ActorConfig, with its defaults."""

        __getattr__ = dict.__getitem__

    clip = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    config = Config(**clip, global_batch_info={})
    return {
        f"verl, {mode}": functools.partial(
            compute_policy_loss_vanilla, loss_agg_mode=mode, config=config
        )
        for mode in ("token-mean", "seq-mean-token-sum-norm")
    }


def trl() -> dict[str, Any]:
    from trl import GRPOConfig, GRPOTrainer

    found = {}
    for kind in ("dapo", "dr_grpo", "cispo"):
        args = GRPOConfig(
            output_dir=tempfile.gettempdir(), use_cpu=True, bf16=False, report_to=[],
            loss_type=kind, max_completion_length=2,
        )  # fmt: skip
        found[f"TRL, {kind}"] = TrlTrainer(GRPOTrainer, args)._compute_loss
    return found


def bare(package: str, *names: str) -> None:
    """Have packages without what they import as they are loaded, which is for GPUs."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(folder_of(package).joinpath(*name.split(".")))]
        sys.modules[name] = module


def openrlhf() -> dict[str, Any]:
    bare("openrlhf", "openrlhf", "openrlhf.models")
    from openrlhf.models.loss import PolicyLoss

    clipped = PolicyLoss(
        is_correction_level="token", is_correction_mode="clip", is_correction_threshold=(0.0, 2.0)
    )
    return {"OpenRLHF": PolicyLoss(), "OpenRLHF, ratio clipped at 2": clipped}


def skyrl() -> dict[str, Any]:
    inner = "skyrl.backends.skyrl_train"
    bare("skyrl", "skyrl", "skyrl.backends", inner, f"{inner}.utils", "skyrl.train")
    config = types.ModuleType("skyrl.train.config")
    config.AlgorithmConfig = Any  # type: ignore[attr-defined]  # of annotations alone
    sys.modules["skyrl.train.config"] = config
    from skyrl.backends.skyrl_train.utils.ppo_utils import (
        apply_loss_reduction_to_advantages_minibatch,
        ppo_policy_loss,
    )

    def made(reduction: str, ratio: str | None) -> Callable[..., Any]:
        off: dict[str, Any] = collections.defaultdict(lambda: None, tis_ratio_type=ratio)
        off |= {"token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0}

        class Off:
            """Stands for OffPolicyCorrectionConfig, with its defaults."""

            def __getattr__(self, name: str) -> Any:
                return off[name]

        settings = types.SimpleNamespace(
            policy_loss_type="regular",
            eps_clip_low=0.2,
            eps_clip_high=0.2,
            off_policy_correction=Off(),
        )

        def loss(
            log_probs: Any,
            old_log_probs: Any,
            advantages: Any,
            config: Any,
            loss_mask: Any,
            rollout_logprobs: Any,
        ) -> Any:
            """As SkyRL's trainer: the reduction is in the advantages."""
            scaled = apply_loss_reduction_to_advantages_minibatch(
                advantages, loss_mask, reduction, len(loss_mask), loss_mask.shape[1]
            )
            return ppo_policy_loss(
                log_probs, old_log_probs, scaled, config, loss_mask, rollout_logprobs
            )

        return functools.partial(loss, config=settings)

    return {
        "SkyRL, token_mean": made("token_mean", None),
        "SkyRL, seq_mean_token_sum_norm": made("seq_mean_token_sum_norm", None),
        "SkyRL, seq_mean_token_sum_norm, sequence ratio": made(
            "seq_mean_token_sum_norm", "sequence"
        ),
    }


def areal() -> dict[str, Any]:
    bare("areal", "areal", "areal.api", "areal.utils", "areal.utils.functional")
    for name, object_ in (
        ("areal.api.cli_args", "RejectionSamplingConfig"),  # of annotations alone
        ("areal.utils.data", "KLEstimator"),  # of metrics that are not asked for
    ):
        module = types.ModuleType(name)
        setattr(module, object_, Any)
        sys.modules[name] = module
    from areal.utils.functional.functional import ppo_actor_loss_fn

    def made(clamp: bool) -> Callable[..., Any]:
        bounds = types.SimpleNamespace(
            level="token", action="clamp", metric="ratio", agg="mean", upper=2.0, lower=None
        )

        def loss(
            log_probs: Any,
            old_log_probs: Any,
            advantages: Any,
            action_mask: Any,
            rollout_log_probs: Any,
        ) -> Any:
            return ppo_actor_loss_fn(
                log_probs,
                old_log_probs,
                rollout_log_probs,
                advantages,
                0.2,
                action_mask.bool(),
                rejection_sampling=bounds if clamp else None,
            )

        return loss

    return {"AReaL": made(False), "AReaL, ratio clamped at 2": made(True)}


PEERS: dict[str, Callable[[], dict[str, Any]]] = {
    "verl": verl,
    "trl": trl,
    "openrlhf": openrlhf,
    "skyrl": skyrl,
    "areal": areal,
}


def judged(package: str) -> dict[str, list[str]]:
    """Cells of the table's rows, by loss."""
    sys.path.append(str(folder_of(package)))
    found = {}
    for name, loss in PEERS[package]().items():
        verdicts = {
            (world, kind): next(judge(loss, [world], [kind]))
            for world, kind in ROWS
            if kind == "none" or not name.startswith(WEIGH)
        }
        found[name] = [_cell(verdicts.get(row)) for row in ROWS]
    return found


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    return "exact" if verdict.exact else f"{verdict.departure:.2f}"


def table() -> list[str]:
    """The table in Markdown, each package judged in a process of its own."""
    columns: dict[str, list[str]] = {}
    for package in PEERS:
        words = [*again(__spec__), "--package", package]
        done = subprocess.run(words, timeout=900, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{package}: {done.stderr}")
        columns |= json.loads(done.stdout.splitlines()[-1])
    lines = [f"| world | weights | {' | '.join(columns)} |", f"|{' --- |' * (2 + len(columns))}"]
    for i, (world, kind) in enumerate(ROWS):
        cells = " | ".join(column[i] for column in columns.values())
        lines.append(f"| {world} | {kind} | {cells} |")
    return lines


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="page whose table is rewritten")
    parser.add_argument("--package", choices=PEERS, help="print the cells of one package as JSON")
    asked = parser.parse_args(words)
    if asked.package:
        print(json.dumps(judged(asked.package)))
        return
    lines = "\n".join(table())
    if asked.out is None:
        print(lines)
        return
    text = asked.out.read_text(encoding="utf-8")
    marked = r"(?<=<!-- table -->\n).*?(?=<!-- end -->)"
    asked.out.write_text(re.sub(marked, f"{lines}\n", text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
