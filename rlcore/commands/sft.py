"""`rlcore sft`: supervised warm-up alone."""

from __future__ import annotations

from pathlib import Path

from rlcore.commands.model_checks import require_end
from rlcore.commands.notes import note
from rlcore.commands.preflight import Prepared, open_run_dir, prepare
from rlcore.commands.session import connected
from rlcore.commands.warm_up import fresh_model, supervise
from rlcore.config.compose import to_yaml
from rlcore.config.schema import RunConfig
from rlcore.models.specs import WarmUpSpec
from rlcore.spec import refuse


def sft(config: RunConfig) -> int:
    """Warm up `model.path` or a fresh model on worked answers; writes `run_dir/model`, a Hugging
    Face folder."""
    prepared = prepare(config, evaluates=False)
    require_end(config, prepared.tokenizer)
    with open_run_dir(config, "rlcore sft") as owner:
        if owner.news:
            note(owner.news)
        _sft(config, prepared, owner.folder)
    return 0


def _sft(config: RunConfig, prepared: Prepared, run_dir: Path) -> None:
    out = run_dir / "model"
    refuse(out.exists(), f"run_dir={run_dir} already holds a model: choose another folder.")
    (run_dir / "config.yaml").write_text(to_yaml(config))
    start = config.model.path or str(fresh_model(config, prepared, run_dir / "fresh"))
    warmup = config.model.warmup or WarmUpSpec()
    with connected(config, actors=False):
        supervise(config, warmup, prepared, start=start, out=out, note=note)
    note(f"model written to {out}")
