"""The `rlcore` command. Heavy imports happen inside the verbs, so that `--help` and a wrong key answer at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from rlcore.errors import DeadlineExceeded, StageError, UserError

USAGE = """rlcore: asynchronous actor-learner reinforcement learning of language models

  rlcore train experiment=NAME run_dir=DIR [key=value ...]    train; resume=auto continues a run
  rlcore sft   experiment=NAME run_dir=DIR [key=value ...]    supervised warm-up; writes DIR/model
  rlcore eval  run_dir=DIR [checkpoint=PATH] [key=value ...]  evaluate a run's newest (or a named) checkpoint
  rlcore eval  model.path=FOLDER task=NAME run_dir=DIR ...    evaluate a Hugging Face folder
  rlcore export run_dir=DIR out=FOLDER [checkpoint=PATH]      a checkpoint as a plain Hugging Face folder
  rlcore scale run_dir=DIR actor.<label>.count=N              add or remove rollout actors of a running job
  rlcore launch cluster=slurm ... [dry_run=true]              start a run elsewhere (or print what would be started)
  rlcore report DIR [DIR ...] [out=FILE]                      report.html of one run, or of several overlaid
  rlcore doctor                                               what this machine has and lacks for a run

`rlcore train --help` lists groups, options, experiments and keys.
Exit codes: 0 done, 1 the run failed, 2 the command or configuration is wrong, 130 stopped with a checkpoint."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    verb, rest = words[0], words[1:]
    try:
        if verb not in VERBS:
            raise UserError.choice("rlcore", verb, VERBS, "there is no such command")
        if "-h" in rest or "--help" in rest:
            from rlcore.config.help import text

            print(text())
            return 0
        return VERBS[verb](rest)
    except UserError as e:
        print(f"rlcore: {e}", file=sys.stderr)
        return 2
    except (StageError, DeadlineExceeded, OSError) as e:
        print(f"rlcore: the run ended: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rlcore: interrupted", file=sys.stderr)
        return 130


def _train(words: list[str]) -> int:
    config = _config(words)
    from rlcore.runtime.train import train

    return train(config)


def _sft(words: list[str]) -> int:
    config = _config(words)
    from rlcore.runtime.commands import sft

    return sft(config)


def _eval(words: list[str]) -> int:
    checkpoint, words = _take(words, "checkpoint")
    config = _config(_of_run(words))
    from rlcore.runtime.commands import evaluate

    return evaluate(config, checkpoint, model_named=_take(words, "model.path")[0] is not None)


def _export(words: list[str]) -> int:
    checkpoint, words = _take(words, "checkpoint")
    out, words = _take(words, "out")
    if out is None:
        raise UserError("out= is missing: name the folder to write the model to.")
    config = _config(_of_run(words))
    from rlcore.runtime.commands import export

    return export(config, checkpoint, out)


def _scale(words: list[str]) -> int:
    run_dir, words = _take(words, "run_dir")
    if run_dir is None:
        raise UserError("run_dir= is missing: name the run to scale.")
    from rlcore.runtime.scale import ask, parse

    ask(run_dir, parse(words))
    return 0


def _launch(words: list[str]) -> int:
    dry_run, words = _take(words, "dry_run")
    if dry_run not in (None, "true", "false"):
        raise UserError.choice("dry_run", dry_run, ("true", "false"))
    config = _config(words)
    from rlcore.launch import LaunchSettings, launch

    return launch(
        LaunchSettings(**config.cluster.launch.model_dump()), words, config.run_dir, dry_run=dry_run == "true"
    )


def _report(words: list[str]) -> int:
    out, dirs = _take(words, "out")
    if not dirs:
        raise UserError("rlcore report: name at least one run directory.")
    from rlcore.metrics.report import write_report

    print(write_report(dirs, out))
    return 0


def _doctor(words: list[str]) -> int:
    if words:
        raise UserError(f"rlcore doctor takes no arguments, got {' '.join(words)}.")
    from rlcore.runtime.doctor import doctor

    return doctor()


def _config(words: list[str]):
    from rlcore.config.compose import load

    config_dir, words = _take(words, "config_dir")
    return load(words, config_dir)


def _of_run(words: list[str]) -> list[str]:
    """A run directory that holds a configuration is taken as it is: the other words change it."""
    run_dir = next((w.partition("=")[2] for w in words if w.startswith("run_dir=")), None)
    if run_dir is not None and os.path.isfile(os.path.join(run_dir, "config.yaml")):
        return [*words, "resume=auto"]
    return words


def _take(words: Sequence[str], key: str) -> tuple[str | None, list[str]]:
    """The value of `key=value` among the words, and the other words."""
    values = [w.partition("=")[2] for w in words if w.startswith(f"{key}=")]
    return (values[-1] if values else None), [w for w in words if not w.startswith(f"{key}=")]


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "sft": _sft,
    "eval": _eval,
    "export": _export,
    "scale": _scale,
    "launch": _launch,
    "report": _report,
    "doctor": _doctor,
}

if __name__ == "__main__":
    sys.exit(main())
