"""Help on the command line, from the table of verbs. The help on a run's settings is in
`config/help_settings.py`, which is imported where it is asked for. Commands that read no settings,
and their help, need none of the packages that compose a run."""

from __future__ import annotations

from textwrap import wrap

from rlcore.config.verbs import VERBS, Key, Verb

WIDTH = 100
SHORT = 28  # characters of values that stand beside their key
ENDING = """Exit codes: 0 done, 1 the run failed, 2 a wrong command or configuration,
3 rlcore diagnose advises something, 4 the policy was lost (schedule.on_collapse),
130 stopped with a checkpoint."""


def overview() -> str:
    """`rlcore help`: every verb in a line."""
    lines = [
        "rlcore: asynchronous actor-learner reinforcement learning of language models",
        "",
        *beside({verb.name: verb.about for verb in VERBS.values()}),
        "",
        "rlcore VERB --help shows a command's keys; rlcore train --help TOPIC the keys of a group,",
        "such as algorithm. rlcore --version.",
        ENDING,
    ]
    return "\n".join(lines)


def of_verb(verb: Verb) -> str:
    """`rlcore VERB --help`, but for the settings of a run."""
    lines = [f"rlcore {verb.name}: {verb.about}", "", *(f"  {usage}" for usage in verb.usage)]
    if verb.keys:
        lines += ["", "Keys of the command:", *beside({form(k): meaning(k) for k in verb.keys})]
    if verb.settings and verb.name != "train":
        lines += [
            "",
            "It also takes the groups and settings of a run, group=option and key=value: rlcore",
            f"train --help lists them, rlcore {verb.name} --help TOPIC explains one group.",
        ]
    return "\n".join(lines)


def form(key: Key) -> str:
    values = "|".join(key.values)
    if not values or len(values) > SHORT:
        values = {"number": "N", "text": "VALUE"}.get(key.kind, key.kind.upper())
    return f"{key.name}={values}"


def meaning(key: Key) -> str:
    notes = ["required"] if key.required else [key.default] if key.default else []
    listed = f": {', '.join(key.values)}" if len("|".join(key.values)) > SHORT else ""
    with_ = f", with {key.needs}=true" if key.needs else ""
    return f"{key.meaning}{listed}{with_}{''.join(f' [{note}]' for note in notes)}"


def beside(rows: dict[str, str]) -> list[str]:
    """Names in one column, wrapped text in another."""
    width = min(max(map(len, rows), default=0), 34)
    lines: list[str] = []
    for name, text in rows.items():
        indent = " " * (width + 4)
        wrapped = wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent) or [indent]
        if len(name) > width:
            lines.append(f"  {name}")
        else:
            wrapped[0] = f"  {name:<{width}}  {wrapped[0].strip()}"
        lines += [line.rstrip() for line in wrapped]
    return lines
