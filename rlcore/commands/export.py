"""`rlcore export`: a checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from rlcore.commands.checkpoints import named_or_newest
from rlcore.commands.notes import note
from rlcore.commands.preflight import prepare
from rlcore.commands.session import Session, connected
from rlcore.commands.warm_up import with_drafts
from rlcore.config.schema import RunConfig
from rlcore.errors import UserError
from rlcore.loop import checkpoint
from rlcore.spec import refuse


def export(config: RunConfig, named: str | None, out: str, *, optimizer: bool = False) -> int:
    """Write a checkpoint's policy and its tokenizer to `out`.

    Beneath it: `adapter` (LoRA), `sparse` (DistillSparse's merged sparse model and its adapter),
    `draft` (co-trained), and with `optimizer` the learner's state as whole float32 tensors in
    `learner`. `named`: the checkpoint; None: the run's newest. Raises UserError.
    """
    folder = named_or_newest(config, named, note)
    if folder is None:
        raise UserError(f"run_dir={config.run_dir} holds no valid checkpoint to export.")
    refuse(Path(out).exists(), f"out={out} exists: choose another folder.")
    prepared = prepare(config, trains=False, evaluates=False)
    with connected(config, actors=False):
        model_path = str(checkpoint.state_of(folder)["model_path"])
        if config.learner.draft is not None:
            config = with_drafts(config, prepared, note)
        pad_id = prepared.pad_id
        session = Session(config, model_path, pad_id=pad_id, note=note, with_actors=False)
        try:
            assert session.learner is not None
            session.learner.load(str(folder / "learner"))
            session.learner.export(out)
        finally:
            session.close()
    # The ranks write models; a folder is only usable with its tokenizer.
    for sub in ("", "sparse", "draft"):
        if (Path(out) / sub).is_dir():
            prepared.tokenizer.save_pretrained(Path(out) / sub)
    if optimizer:
        from rlcore.learner.state_files import join_state

        join_state(folder / "learner", Path(out) / "learner")
    note(f"{folder.name} written to {out}")
    return 0
