"""The remedies that the sentences of refusals name, as changes of the words of the command line."""

import functools
import re

import yaml

from rlcore.config import compose
from rlcore.config.groups import groups, parse
from rlcore.config.sentences import keys
from rlcore.errors import UserError

_VALUE = r"([\w.:/+-]*[\w/+-]|\[[^\]]*\]|\{[^}]*\})"
_SET = re.compile(rf"(?<![\w.])([a-z_]+(?:\.[\w*]+)*)={_VALUE}")
_KEY = re.compile(r"[a-z_]+(?:\.\w+)+")
_PLACES = ("[a,b]", "NAME", "FOLDER", "VALUE", "DIR", "PATH", "N", "option", "value")
# Words of a sentence in the place of a value.
_WORDS = ("more", "less", "one", "out", "off", "or")
_LEAVES = {}
for _key in keys():
    _LEAVES.setdefault(_key.rpartition(".")[2], []).append(_key)

_LISTED = re.compile(r"(?:choose|use) (?:one of|among):? (.+)$|[Cc]hoose one of:? (.+)$")
_CHOICES = re.compile(r"(?:[Cc]hoose|use|leave it(?: at)?) (.+)$")
# (what a sentence says that a value should be, a value that is so)
_KINDS = (
    (r"should be a valid integer", lambda _: "1"),
    (r"should be a (?:valid|finite) number", lambda _: "1"),
    (r"should be a valid array", lambda _: "[]"),
    (r"should be an object|should be empty", lambda _: "{}"),
    (r"(?:greater|less) than or equal to ([\d.]+)", lambda bound: bound),
    (r"greater than ([\d.]+)", lambda bound: str(int(float(bound)) + 1)),
    (r"(?:less than|below) (?:[a-z_.]+=)?([\d.]+)", lambda bound: str(_below(float(bound)))),
    (r"at (?:least|most) (?:[a-z_.]+=)?(\d+)", lambda bound: bound),
    (r"must be a multiple of [a-z_.]+=(\d+)", lambda bound: bound),
)
_REMOVED = re.compile(
    r"leave (?:it|one of them|one|both|[\w.]+) (?:out|off)|use one or the other|choose one"
    r"(?:$| of the two)|at (?:its|their) defaults?|make one of them"
)


def remedies(words, sentence):
    """The remedies that a sentence names for a run of these words: a setting, a choice, a value
    within a bound, another name, or a word that is left out. Each is a list of changed words, one
    for each key that the sentence may mean."""
    sentence = sentence.rstrip(".")
    head, _, advice = sentence.rpartition(": ")
    needed = re.findall(rf"needs ([a-z_.]+)={_VALUE}", head)
    pairs = [_setting(words, sentence, *pair) for pair in [*_SET.findall(advice), *needed]]
    found = [[_with(words, *pair)] for pair in [*pairs, *_lists(sentence)] if pair]
    for meant, value in _values(sentence, head, advice):
        found.append([_with(words, key, value) for key in meant])
    if renamed := re.search(r"perhaps ([\w.]+) is meant|it is called ([\w.]+) now", sentence):
        wrong, new = sentence.partition("=")[0], renamed[1] or renamed[2]
        if "is not a key" in sentence or renamed[2]:
            found.append([[re.sub(rf"^\+?{re.escape(wrong)}(?=[=.])", new, w) for w in words]])
        else:
            found.append([_with(words, wrong, new)])
    if _REMOVED.search(advice):
        found += [[[w for w in words if w != word]] for word in words if _named(word, sentence)]
    changed = ([after for after in one if after != list(words)] for one in found)
    return [one for one in changed if one]


def _setting(words, sentence, key, value):
    """The full key and the value of a setting in a sentence; None for the present state of the run
    and for a place holder."""
    full = _full(key, sentence)
    if full is None or value in _PLACES or stated(words, full, value):
        return None
    return full, value


def _values(sentence, head, advice):
    """(keys that may be meant, value) of each value that a sentence gives without its key."""
    if raised := re.search(r"raise ([a-z_.]+)=\d+ to ([\w.]+)", advice):
        other = re.search(rf"{raised[2]}=(\d+)", head)
        yield [raised[1]], other[1] if other else raised[2]
        return
    subject = re.search(r"([a-z_]+(?:\.\w+)*)=\S+ must be", advice)
    meant = [subject[1]] if subject else _meant(sentence, head)
    for pattern, value in _KINDS:
        if (bound := re.search(pattern, advice)) and not ("=[" in head and bound.groups()):
            yield meant, value(bound[1] if bound.groups() else "")
            return
    if one := re.search(r"(?:keep|leave) one of them at (\w+)", advice):
        yield from (([named], one[1]) for named, _ in _SET.findall(head))
        return
    listed = _LISTED.search(sentence) or _CHOICES.search(advice)
    for choice in re.split(r", | or | and ", (listed[1] or listed[2]) if listed else "")[:3]:
        if re.fullmatch(r"\w+|[\d.]+", choice) and choice not in _WORDS:
            among = "=[" in head and meant[0] not in groups()
            yield meant, f"[{choice}]" if among else choice


def _meant(sentence, head):
    """The keys that a sentence sets, before its advice; at least its first."""
    first = sentence.lstrip("~").partition("=")[0].partition(" ")[0]
    named = [_full(key, sentence) for key, _ in _SET.findall(head)]
    return list(dict.fromkeys(key for key in [first, *named] if key))


def _lists(sentence):
    """(key, list) where a sentence says which names to add to a list, or to keep of it."""
    if more := re.search(r"it has (\w+)=\[([^\]]*)\]; add (\w+) to that list", sentence):
        yield more[1], f"[{more[2]},{more[3]}]"
    given = re.match(r"(\w+)=\[([\w,]+)\]", sentence)
    if given and (kept := re.search(r"keep one of ([\w, ]+)$", sentence)):
        rivals = kept[1].split(", ")
        for one in rivals:
            names = [n for n in given[2].split(",") if n == one or n not in rivals]
            yield given[1], f"[{','.join(names)}]"


def _below(bound):
    return int(bound) - 1 if bound > 1 else bound / 2


def _named(word, sentence):
    """Return whether a sentence speaks of the key that a word sets."""
    key = word.lstrip("+").partition("=")[0]
    return key in sentence or any(k.startswith(f"{key}.") for k in _KEY.findall(sentence))


def stated(words, key, value):
    """Return whether a setting in a sentence is what a run of these words has already."""
    try:
        composed = compose._composed(parse(["run_dir=x", *words], None), None)
    except UserError:  # the words do not compose: no state
        return False
    present = _at(composed, key)
    if present is None:
        present = _at(_plain(), key)
    if value.startswith("[") and hasattr(present, "keys"):  # a group of labels
        return list(present) == value.strip("[]").replace(" ", "").split(",")
    return present == yaml.safe_load(value)


@functools.cache
def _plain():
    return compose.load(["run_dir=x"]).model_dump(mode="json")


def _at(node, key):
    for name in key.split("."):
        node = node.get(name) if hasattr(node, "get") else None
    return node


def _full(key, sentence):
    """A key that a sentence shortens to its last part, in the section that it speaks of."""
    if "." in key or key in groups():
        return key if "*" not in key else None
    near = [k for k in _KEY.findall(sentence) if k.rpartition(".")[2] == key]
    own = near or [k for k in _LEAVES.get(key, []) if "LABEL" not in k]
    return own[0] if len(set(own)) == 1 else None


def refusal(words):
    """The sentence that refuses a run of these words; "" where it is accepted."""
    try:
        compose.load(["run_dir=x", *words])
    except UserError as error:
        return str(error)
    return ""


def works(sentence, remedy):
    """Return whether the words after a remedy are accepted, or refused for another reason than
    before, which is not that the remedy itself cannot be read."""
    return any(_works(sentence, after) for after in remedy)


def _works(sentence, after):
    last = "".join(after[-1:]).lstrip("+").partition("=")[0]
    then = refusal(after)
    unread = last and re.match(rf"{re.escape(last)}[= ].*is not (accepted|a key)", then)
    return then != sentence and not unread


def _with(words, key, value):
    """The words with a setting in the place of those of its key, or of its group's keys."""
    starts = (f"{key}.", f"{key}=") if key in groups() else (f"{key}=",)
    kept = [w for w in words if not f"{w.lstrip('+~').partition('=')[0]}=".startswith(starts)]
    return [*kept, f"{key}={value}"]
