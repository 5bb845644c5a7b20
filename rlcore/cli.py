"""The `rlcore` command: dispatches its verbs. Heavy imports happen inside them, so that `--help`
and a wrong key answer at once. The verbs and their keys are declared in `config/verbs.py`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import Collapsed, DeadlineExceeded, StageError, UserError
from rlcore.files import refusal
from rlcore.registry import load_object

if TYPE_CHECKING:
    from rlcore.config.schema import RunConfig
    from rlcore.config.verbs import Given

RUNS = Path("runs")  # holds the runs that are given no run_dir
HELP = ("-h", "--help", "help")


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
    try:
        if not words or words[0] in HELP or {"-h", "--help"} & set(words):
            return _help(words)
        if words[0] in ("--version", "-V", "version"):
            return _version()
        given = read(words)
        return HANDLERS[given.verb.name](given)
    except UserError as e:
        print(f"rlcore: {e}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        if find_spec("ray") is not None or not package or package == "rlcore":
            raise
        print(
            f"rlcore: rlcore {words[0]} needs the package {package}, and rlcore is installed "
            "without what trains: pip install 'rlcore[train]'.",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        raise
    except Collapsed as e:
        print(f"rlcore: the run ended: {e}", file=sys.stderr)
        return 4
    except (StageError, DeadlineExceeded) as e:
        print(f"rlcore: the run ended: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"rlcore: the run ended: {refusal(e)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rlcore: interrupted", file=sys.stderr)
        return 130


def read(words: Sequence[str]) -> Given:
    """A command's words by their keys; where no run begins, model=FOLDER, data= and reward= as the
    settings that they stand for. Raises UserError."""
    from rlcore.config.verbs import find

    find(words)
    try:
        return _read(words)
    except UserError as error:
        raise _with_others(words, error) from None


def _read(words: Sequence[str]) -> Given:
    from rlcore.config.verbs import find, parse

    if not find(words)[0].settings:
        return parse(list(words))
    from rlcore.config.groups import setting_names

    given = parse(list(words), setting_names(_config_dir(words)))
    return given if given.verb.name == "train" else _of_three_words(given)


def _with_others(words: Sequence[str], error: UserError) -> UserError:
    """An error that refuses some words of a command, with the faults of the others, which a start
    would refuse next."""
    from rlcore.config.verbs import find

    verb, rest = find(words)
    if verb.name not in CHECKS:
        return error
    from rlcore.config.others import all_faults

    def compose(left: list[str]) -> Callable[[], object]:
        given = _read([verb.name, *left])
        if verb.key("dry_run"):  # without trial answers
            given = replace(given, own={**given.own, "dry_run": "true"})
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return _checks(given)

    return all_faults(error, rest, compose)


def _help(words: list[str]) -> int:
    """`rlcore help [VERB [TOPIC ...]]` and `rlcore VERB ... --help [TOPIC ...]`."""
    from rlcore.config import help
    from rlcore.config.verbs import find

    if not words or (words[0] in HELP and not words[1:]):
        print(help.overview())
        return 0
    if words[0] in HELP:
        verb, topics = find(words[1:])
    else:
        verb, rest = find(words)
        at = next(i for i, word in enumerate(rest) if word in HELP)
        topics = rest[at + 1 :]  # the words before are of the command that was interrupted
    if not topics and not verb.settings:
        print(help.of_verb(verb))
        return 0
    from rlcore.config.help_settings import of_verb

    print(of_verb(verb, [topic.partition("=")[0] for topic in topics], _config_dir(words)))
    return 0


def _version() -> int:
    from importlib.metadata import version

    print(f"rlcore {version('rlcore')}")
    return 0


def _config_dir(words: Sequence[str]) -> str | None:
    values = [word.partition("=")[2] for word in words if word.startswith("config_dir=")]
    return values[-1] if values else None


def _require_run(given: Given) -> None:
    """Raise UserError if a run is to be resumed that is not there, by words that begin no other."""
    folder, more = given.setting("run_dir"), {w.partition("=")[0] for w in given.settings}
    resumes = given.setting("resume") == "auto" and more == {"run_dir", "resume"}
    if resumes and not (Path(str(folder)) / "config.yaml").is_file():
        raise UserError(
            f"run_dir={folder} holds no run to resume: it has no config.yaml; name the folder of a "
            "run, or the settings of a new one, such as experiment=quickstart."
        )


def _train(given: Given) -> int:
    _require_run(given)
    if given.flag("dry_run"):
        from rlcore.config.verbs import FORECAST

        config = config_of(given)
        from rlcore.commands.dry_run import dry_run

        return dry_run(config, given.among(FORECAST))
    config = config_of(given)
    from rlcore.commands.train import train

    return train(config)


def _sweep(given: Given) -> int:
    from rlcore.commands.sweep import jobs, sweep

    config_dir = given.text("config_dir")
    try:
        found = jobs(given.settings, config_dir)
    except UserError as error:
        raise _with_others(given.words, error) from None
    return sweep(found, config_dir, dry_run=given.flag("dry_run"), warm=given.flag("warm"))


def _try(given: Given) -> int:
    config = config_of(given)
    from rlcore.commands.try_environment import TriedModel
    from rlcore.commands.try_task import prompts_asked, try_task

    said = TriedModel(given.text("say"), given.text("url"), given.text("served"))
    return try_task(config, prompts_asked(given.text("n")), said)


def _sft(given: Given) -> int:
    config = config_of(given)
    from rlcore.commands.warm_up import sft

    return sft(config)


def _eval(given: Given) -> int:
    config = config_of(given)
    from rlcore.commands.evaluate import check, evaluate

    checkpoint, model_named = given.text("checkpoint"), given.setting("model.path") is not None
    if model_named and not os.path.isfile(os.path.join(config.run_dir, "config.yaml")):
        from rlcore.commands.choices import with_length

        # no trial answers of what is refused
        config, line = with_length(
            config, given.settings, lambda: check(config, checkpoint, model_named=True)
        )
        if line:
            print(f"rlcore: {line}", flush=True)
    return evaluate(config, checkpoint, model_named=model_named)


def _chat(given: Given) -> int:
    config = config_of(given)
    from rlcore.commands.chat import chat

    named = [given.setting(key) is not None for key in ("model.path", "rollout.max_new_tokens")]
    return chat(config, given.text("checkpoint"), model_named=named[0], length_named=named[1])


def _export(given: Given) -> int:
    config = config_of(given)
    from rlcore.commands.evaluate import export

    out = given.text("out")
    assert out is not None
    return export(
        config,
        given.text("checkpoint"),
        out,
        optimizer=given.flag("optimizer"),
        form=given.text("format") or "trained",
        dtype=given.text("dtype"),
    )


def _scale(given: Given) -> int:
    from rlcore.commands.scale import scale

    asked = {key: value for key, value in given.own.items() if key != "run_dir"}
    # Python converts no more than 4300 digits, and any number of 20 is refused
    counts = {key.split(".")[1]: int(value[:20]) for key, value in asked.items()}
    return scale(given.text("run_dir") or _newest_run(given), counts)


def _launch(given: Given) -> int:
    config = config_of(given)
    from rlcore.commands.launching import launch

    config_dir = given.text("config_dir")
    words = [*given.settings, *([f"config_dir={config_dir}"] if config_dir else [])]
    return launch(config, words, dry_run=given.flag("dry_run"))


def _jobs(given: Given) -> int:
    from rlcore.commands.launching import show_jobs

    return show_jobs(given.text("run_dir"))


def _cancel(given: Given) -> int:
    from rlcore.commands.launching import cancel_jobs

    return cancel_jobs(given.own["run_dir"])


def _watch(given: Given) -> int:
    run_dir = given.setting("run_dir")
    if run_dir is not None and not (Path(run_dir) / "config.yaml").is_file():
        raise UserError(f"run_dir={run_dir} holds no run: it has no config.yaml.")
    from rlcore.commands.watch import watch, watch_log

    config = config_of(given)
    if given.flag("log"):
        return watch_log(config.run_dir, once=given.flag("once"))
    return watch(config, once=given.flag("once"))


def _compare(given: Given) -> int:
    from rlcore.report.compare import compare

    return compare(given.operands, ci=_ci(given), as_json=given.flag("json"))


FIGURE = ("x", "y", "labels", "ylabel", "width", "smooth", "ci")  # keys of figures


def _report(given: Given) -> int:
    from rlcore.report.compare import report

    curves = None
    if (form := given.text("format") or "html") != "html":
        from rlcore.report.curves import Asked

        names = ("y", "labels", "ylabel")
        y, labels, ylabel = (tuple(filter(None, (given.text(k) or "").split(","))) for k in names)
        width, smooth = int(given.text("width") or 0), int(given.text("smooth") or 1)
        x = given.text("x") or "step"
        asked = Asked(x, y, _ci(given), labels, ylabel=ylabel, width_mm=width, smooth=smooth)
        curves = form, asked
    elif unread := [key for key in FIGURE if given.text(key)]:
        raise UserError(f"{unread[0]}= is of figures: add format=svg, pdf or csv.")
    return report(given.operands or [_newest_run(given)], given.text("out"), curves)


def _ci(given: Given) -> float:
    text = given.text("ci") or "95"
    percent = int(text[:4])
    if not 0 < percent < 100:
        raise UserError(f"ci={text} is not accepted: give a percentage between 1 and 99.")
    return float(percent)


def _fetch(given: Given) -> int:
    name, out = given.text("name") or next(iter(given.operands), None), given.text("out")
    if name is None:
        raise UserError("rlcore fetch needs OWNER/NAME of the Hugging Face Hub, or name=NAME.")
    if "/" not in name:
        from rlcore.commands.fetch import fetch

        return fetch(name, out)
    from rlcore.commands.fetch_hub import Wanted, fetch_repository

    fetch_repository(Wanted(name, given.text("kind"), given.text("revision"), out))
    return 0


def _import_config(given: Given) -> int:
    translate = load_object("rlcore.extras.foreign:import_config")
    return int(translate(given.operands[0], given.text("out") or "imported"))


def _plan(given: Given) -> int:
    from rlcore.advisor.plan import plan
    from rlcore.advisor.plan_split import split_plan

    words = {key: value for key, value in given.own.items() if key != "config_dir"}
    return (split_plan if "gpus" in words else plan)(config_of(given), words)


def _plan_measure(given: Given) -> int:
    from rlcore.advisor.plan import measure

    return measure(given.own["runs"], given.own["out"])


def _doctor(given: Given) -> int:
    from rlcore.config.verbs import FORECAST

    rates = given.among(FORECAST)
    if (run := given.text("run")) is not None:
        return _doctor_run(given, run)
    if rates and not given.settings:
        key, value = next(iter(rates.items()))
        raise UserError(f"{key}={value} forecasts a run: name its keys too, such as experiment=.")
    config = config_of(given) if given.settings else None
    from rlcore.advisor.doctor import doctor

    start, calibrate = given.flag("start"), given.flag("calibrate")
    if calibrate and (config is None or not start):
        raise UserError("calibrate=true starts steps of a run: name its keys, and no start=false.")
    return doctor(config, rates, start=start, calibrate=calibrate, as_json=given.flag("json"))


def _doctor_run(given: Given, run: str) -> int:
    others = [*given.settings, *(f"{k}={v}" for k, v in given.own.items() if k not in _OF_A_RUN)]
    if others:
        raise UserError(f"run={run} is judged by its own rows and settings: leave out {others[0]}.")
    if not (Path(run) / "config.yaml").is_file():
        raise UserError(f"run={run} holds no run: it has no config.yaml.")
    config = config_of(replace(given, settings=(f"run_dir={run}",)))
    from rlcore.advisor.doctor_run import doctor_run

    return doctor_run(config, as_json=given.flag("json"))


_OF_A_RUN = ("run", "json", "config_dir")  # keys of doctor


def _replay(given: Given) -> int:
    changed = [w for w in given.settings if w.partition("=")[0] not in ("run_dir", "config_dir")]
    own = replace(given, settings=tuple(w for w in given.settings if w not in changed))
    config = config_of(own)
    others = None
    if changed:
        others = config_of(replace(own, settings=(*changed, f"run_dir={config.run_dir}")))
    from rlcore.commands.replay import SHOWN, replay

    step, tokens = given.own["step"], given.text("tokens")
    return replay(
        config,
        others,
        int(step[:20]),
        tokens=SHOWN if tokens is None else int(tokens[:20]),
        out=given.text("out"),
        as_json=given.flag("json"),
    )


def _referee(given: Given) -> int:
    from rlcore.referee import referee

    return referee(given.operands[0], as_json=given.flag("json"))


def _diagnose(given: Given) -> int:
    from rlcore.dumps.diagnose import run

    answers = int((given.text("answers") or "0")[:20])
    return run(given.operands, answers=answers, as_json=given.flag("json"), out=given.text("out"))


def _completion(given: Given) -> int:
    from rlcore.config.completion import install, script

    shell = given.operands[0]
    print(install(shell, Path.home()) if given.flag("install") else script(shell))
    return 0


def config_of(given: Given) -> RunConfig:
    """The run of a command's words. Raises UserError, with all that a start would refuse."""
    try:
        return _config_of(given)
    except UserError as error:
        raise _with_others(given.words, error) from None


def _config_of(given: Given) -> RunConfig:
    from rlcore.config.compose import load

    given = _chosen(given) if given.verb.name == "train" else given
    words, config_dir = list(given.settings), given.text("config_dir")
    policy = given.verb.run_dir
    if policy == "required" or (policy == "new" and given.setting("run_dir") is not None):
        return load(words, config_dir)
    if policy == "new":
        folder = _new_run(given)
        config = load(words, config_dir, run_dir=folder)
        if config.run_dir == os.path.abspath(folder):  # else a config.yaml of the user's named one
            print(f"rlcore: run_dir={folder}", file=sys.stderr)
        return config
    if policy == "here":
        return load(_looked_at(words), config_dir)
    run_dir = given.setting("run_dir")
    if run_dir is None:
        run_dir = _run_meant(given)
        words = [*_of_a_folder(words), f"run_dir={run_dir}"]
    return load(_of_run(words), config_dir)


def _of_three_words(given: Given) -> Given:
    """The words with model=, data= and reward= as the settings that they stand for."""
    from rlcore.config.groups import three_words

    part = "heldout" if given.verb.name == "eval" else "train"
    words = three_words(given.settings, given.own, given.text("config_dir"), part)
    return given if words is None else replace(given, settings=tuple(words))


def _chosen(given: Given) -> Given:
    """The words of a new run of three words, and before them the settings that are chosen besides,
    which are printed with their reasons."""
    named = _of_three_words(given)
    if named is given or given.setting("resume") == "auto":
        return named
    from rlcore.commands.choices import completed

    by_user = [w for w in given.settings if w in named.settings]
    config_dir, trial = given.text("config_dir"), not given.flag("dry_run")
    words, lines = completed(named.settings, by_user, config_dir, str(RUNS / "new"), trial=trial)
    print("\n".join(lines), flush=True)
    return replace(named, settings=tuple(words))


def _new_run(given: Given) -> str:
    """The folder of a run that was given none. Raises UserError where one is to be continued."""
    if given.setting("resume") == "auto":
        raise UserError("run_dir= is missing: resume=auto goes on with the run in run_dir=DIR.")
    name = (given.setting("experiment") or given.verb.name).rpartition("/")[2]
    return str(RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _run_meant(given: Given) -> str:
    """The run that eval, export or watch is about where run_dir is not given."""
    checkpoint = given.text("checkpoint") if given.verb.key("checkpoint") else None
    if checkpoint is not None:
        run = Path(checkpoint).absolute().parent.parent  # DIR/checkpoints/step_N
        if (run / "config.yaml").is_file():
            print(f"rlcore: run_dir={run} (of the checkpoint)", file=sys.stderr)
            return str(run)
    if any(given.setting(key) for key in ("model", "model.path", "experiment")):
        return _new_run(given)  # not of a run: a model that the words name
    return _newest_run(given)


def _newest_run(given: Given) -> str:
    """The run under runs/ that was started last, said in a line. Raises UserError if none is."""
    found = [*RUNS.glob("*/config.yaml"), *RUNS.glob("*/*/config.yaml")]  # and those of a sweep
    if not found:
        raise UserError(
            f"run_dir= is missing, and {RUNS}/ holds no run for rlcore {given.verb.name} to take: "
            "give run_dir=DIR."
        )
    run = max(found, key=lambda file: file.stat().st_mtime_ns).parent
    print(f"rlcore: run_dir={run} (the newest run)", file=sys.stderr)
    return str(run)


def _looked_at(words: list[str]) -> list[str]:
    """The words of a run that is looked at and not made: nothing is written to its folder."""
    words = _of_a_folder(_of_run(words))
    named = any(word.startswith("run_dir=") for word in words)
    return words if named else [*words, "run_dir=."]


def _of_a_folder(words: list[str]) -> list[str]:
    """The words with model=path, where they name a folder and neither a run nor an option: a fresh
    model's short max_len would refuse most prompts."""
    given = {word.partition("=")[0] for word in words}
    alone = "model.path" in given and not given & {"model", "experiment", "run_dir"}
    return ["model=path", *words] if alone else words


def _of_run(words: list[str]) -> list[str]:
    """The words, completed so that a run directory's own configuration is what they change."""
    run_dir = next((w.partition("=")[2] for w in words if w.startswith("run_dir=")), None)
    if run_dir is not None and os.path.isfile(os.path.join(run_dir, "config.yaml")):
        return [*words, "resume=auto"]
    return words


TRAINING = ("train", "sweep", "sft", "eval")  # not done where their output cannot be written
HANDLERS: Mapping[str, Callable[[Given], int]] = {
    "train": _train,
    "try": _try,
    "sweep": _sweep,
    "sft": _sft,
    "eval": _eval,
    "chat": _chat,
    "export": _export,
    "scale": _scale,
    "launch": _launch,
    "jobs": _jobs,
    "cancel": _cancel,
    "watch": _watch,
    "compare": _compare,
    "report": _report,
    "fetch": _fetch,
    "plan": _plan,
    "plan measure": _plan_measure,
    "doctor": _doctor,
    "import-config": _import_config,
    "replay": _replay,
    "referee": _referee,
    "diagnose": _diagnose,
    "completion": _completion,
}

# verb -> the module of rlcore.commands that checks all before its start
CHECKS = {"train": "start_checks", "try": "try_task", "eval": "evaluate", "sweep": "sweep"}


def _checks(given: Given) -> Callable[[], object]:
    """The checks before the start of a command, of words that compose."""
    verb = given.verb.name
    check = load_object(f"rlcore.commands.{CHECKS[verb]}:check")
    if verb == "sweep":
        from rlcore.commands.sweep import jobs

        return partial(check, jobs(given.settings, given.text("config_dir")))
    config = _config_of(given)
    if verb != "eval":
        return partial(check, config)
    model_named = given.setting("model.path") is not None
    return partial(check, config, given.text("checkpoint"), model_named=model_named)


if __name__ == "__main__":
    sys.exit(main())
