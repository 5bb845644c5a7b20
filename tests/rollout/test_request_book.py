"""Requests between the worker and a decoding core (a fake one: no model, no process)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_fakes import ALPHABET, JOB, VOCAB, FakeCore, FakeEngine, ask

from rlcore.errors import UserError
from rlcore.interfaces import StepLoad
from rlcore.models.fresh import build_char_tokenizer
from rlcore.rollout.request_book import Output, RequestBook
from rlcore.serialization import dump_trajectory, load_trajectory
from rlcore.types import PRECISE_LAYERS, PageRule, Trajectory


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


def make_book(core: FakeCore, salted: bool = False) -> RequestBook:
    return RequestBook(core, JOB, build_char_tokenizer(ALPHABET), vocab=VOCAB, salted=salted)


@pytest.fixture
def book(core) -> RequestBook:
    return make_book(core)


def drain(book: RequestBook) -> list[Trajectory]:
    done: list[Trajectory] = []
    while book.unfinished():
        done += book.decode()
    return sorted(done, key=lambda t: (t.group_id, t.sample_index))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": [5] * 64}, "model.max_len=64"),
        ({"prompt": []}, "a prompt of 0 tokens"),
        ({"prompt": [VOCAB]}, "prompt token ids"),
        ({"prompt": [-1]}, "prompt token ids"),
        ({"logprobs_k": 4}, "rollout.logprobs_k=4 is above the 3"),
    ],
)
def test_a_list_with_one_request_that_cannot_be_served_is_refused_whole(book, changes, words):
    with pytest.raises(ValueError, match=words):
        book.add([*ask(3), *ask(1, group=7, **changes)])
    assert book.unfinished() == 0


def test_a_request_id_is_unique_among_unfinished_requests(book):
    book.add(ask(2))
    with pytest.raises(ValueError, match="train:0:0 is not"):
        book.add(ask(1))
    with pytest.raises(ValueError, match="unique"):
        book.add([*ask(1, group=1), *ask(1, group=1)])
    drain(book)
    book.add(ask(1))
    assert len(drain(book)) == 1


def test_every_drawing_of_a_sample_has_an_id_of_its_own(book):
    ids = set()
    for other in (book, make_book(FakeCore())):  # as after a restart of the process
        for _ in range(2):
            other.add(ask(3))
            ids |= {t.draw_id for t in drain(other)}
    assert len(ids) == 12 and all(i.startswith("bf16-0:") for i in ids)


def test_aborted_requests_leave_nothing_behind(book):
    book.add(ask(4))
    book.decode()
    book.abort(["train:0:1", "unknown"])
    assert [t.sample_index for t in drain(book)] == [0, 2, 3]


def test_a_response_fits_the_episode(book):
    book.add(ask(1, prompt=[5] * 60, max_new_tokens=30))
    assert [len(t.sampled_ids) for t in drain(book)] == [4]


def test_a_stop_string_ends_a_response_and_keeps_its_tokens(core, book):
    tokenizer = build_char_tokenizer(ALPHABET)
    book.add(ask(1, max_new_tokens=30))
    (whole,) = drain(book)
    text = tokenizer.decode(whole.sampled_ids)
    book.add(ask(1, max_new_tokens=30, stop=(text[4:7],)))
    (stopped,) = drain(book)
    assert tokenizer.decode(stopped.sampled_ids) == text[: text.index(text[4:7]) + 3]
    assert stopped.finish_reason == "stop" and not core.queue


class ThreeAtOnce(FakeCore):
    """Up to three tokens of a request in a step, as where another model proposes some."""

    def step(self):
        found: dict[str, Output] = {}
        for out in (out for _ in range(3) for out in super(ThreeAtOnce, self).step()):
            before = found.get(out.request_id)
            if before is not None:
                rows = tuple(np.concatenate(pair) for pair in zip(before.rows, out.rows))
                out = out._replace(tokens=before.tokens + out.tokens, rows=rows)
            found[out.request_id] = out
        return list(found.values())


@pytest.mark.parametrize("tokens", [29, 30])
def test_of_several_tokens_in_a_step_those_beyond_the_stop_string_are_dropped(book, tokens):
    tokenizer, several = build_char_tokenizer(ALPHABET), ThreeAtOnce()
    book.add(ask(1, max_new_tokens=tokens))
    (whole,) = drain(book)
    text = tokenizer.decode(whole.sampled_ids)
    for place in range(tokens - 1):  # also in a step at whose end the core ends the request
        stop = text[place : place + 2]
        records = []
        for each in (book, make_book(several)):
            each.add(ask(1, max_new_tokens=tokens, stop=(stop,)))
            records += drain(each)
        one, three = records
        assert three.sampled_ids.tolist() == one.sampled_ids.tolist()
        assert three.finish_reason == one.finish_reason
        assert len(three.logp_inf) == len(one.logp_inf) and not several.queue


def test_withdrawn_requests_keep_their_tokens_and_get_other_draws(core, book):
    book.add(ask(2))
    whole = drain(book)
    book.add(ask(2))
    for _ in range(2):
        book.decode()
    draws = book.withdraw(started=True)
    assert not core.queue and [d.tokens for d in draws] == [
        t.sampled_ids[:2].tolist() for t in whole
    ]
    book.set_version(5)
    book.resubmit(draws)
    again = core.added[-2:]
    assert [r.prompt_len for r in again] == [2, 2] and [len(r.token_ids) for r in again] == [4, 4]
    assert [r.max_tokens for r in again] == [4, 4]
    done = drain(book)
    assert all(t.token_version.tolist() == [0, 0, 5, 5, 5, 5] for t in done)
    assert [t.prompt_ids.tolist() for t in done] == [[5, 9], [5, 9]]
    assert any(
        a.sampled_ids.tolist() != w.sampled_ids.tolist() for a, w in zip(done, whole, strict=True)
    )


def elsewhere(trajectories: list[Trajectory]) -> list[Trajectory]:
    """As another process receives them."""
    return [load_trajectory(dump_trajectory(t)) for t in trajectories]


@pytest.mark.parametrize("draining", [False, True])
def test_another_engine_goes_on_with_what_was_cut(core, book, draining):
    book.add(ask(2))
    book.decode()
    book.set_version(3)
    book.decode()
    cut = book.cut(["train:0:0", "train:0:1", "unknown"])
    assert book.unfinished() == 0 and not core.queue
    assert [t.finish_reason for t in cut] == ["abort", "abort"]

    other_core = FakeCore()
    other = make_book(other_core)
    other.set_version(5)
    if draining:
        other.begin_drain()
    other.add(ask(2), elsewhere(cut))
    if draining:
        assert not other_core.queue
        other.set_version(6)
        other.end_drain()
    done = drain(other)
    last = 6 if draining else 5
    for t, had in zip(done, cut, strict=True):
        assert t.token_version.tolist() == [0, 3, last, last, last, last]
        assert t.sampled_ids[:2].tolist() == had.sampled_ids.tolist()
        assert np.array_equal(t.logp_inf[:2], had.logp_inf)
        assert np.array_equal(t.topk_ids[:2], had.topk_ids)
        assert np.array_equal(t.topk_logp[:2], had.topk_logp)
        assert t.timings["generate_s"] >= had.timings["generate_s"]
    (first, _) = other_core.added
    assert len(first.token_ids) == 4 and first.max_tokens == 4
    assert first.seed != core.added[0].seed  # it must not repeat the draws that were made


def test_what_has_no_token_or_is_newer_than_the_engine_begins_anew(core, book):
    book.set_version(4)
    book.add(ask(6))  # the core runs four
    book.decode()
    cut = elsewhere(book.cut([f"train:0:{i}" for i in range(6)]))
    assert sorted(len(t.token_version) for t in cut) == [0, 0, 1, 1, 1, 1]
    behind = make_book(FakeCore())
    behind.set_version(3)
    behind.add(ask(6), cut)
    assert {v for t in drain(behind) for v in t.token_version.tolist()} == {3}


def test_a_stop_string_is_found_across_a_cut(core, book):
    (whole,) = (book.add(ask(1)), drain(book))[1]
    text = "".join(ALPHABET[i - 3] for i in whole.sampled_ids.tolist()[:2])
    book.add(ask(1, stop=(text,)))
    book.decode()
    cut = elsewhere(book.cut(["train:0:0"]))
    other = make_book(FakeCore())
    other.add(ask(1, stop=(text,)), cut)
    draw = other.active["train:0:0"]
    assert draw.watcher.push(int(whole.sampled_ids[1]))


def test_an_unstarted_request_that_is_resubmitted_keeps_its_seed(core, book):
    book.add(ask(1))
    book.resubmit(book.withdraw(started=False))
    assert [r.seed for r in core.added] == [7, 7]


def test_a_drain_finishes_what_has_started_and_holds_back_the_rest(core, book):
    book.add(ask(6))  # the core runs four
    book.decode()
    book.begin_drain()
    book.add(ask(2, group=1))
    done: list[Trajectory] = []
    while not book.drained():
        done += book.decode()
    assert [t.sample_index for t in done] == [0, 1, 2, 3] and book.unfinished() == 4
    book.set_version(2)
    book.end_drain()
    rest = drain(book)
    assert [t.request_id for t in rest] == ["train:0:4", "train:0:5", "train:1:0", "train:1:1"]
    assert all(set(t.token_version) == {2} for t in rest)
    assert [r.request_id for r in core.added[-4:]] == [t.request_id for t in rest]


def running(book: RequestBook) -> set[int]:
    """The versions at which the requests in the core were asked for."""
    return {draw.version for draw in book.active.values()}


def test_newer_requests_wait_for_older_ones_and_begin_under_the_version_of_then(core, book):
    book.full_for_newer = 0
    book.add(ask(2))
    book.decode()
    book.set_version(1)
    book.add(ask(2, group=1))
    book.set_version(2)
    book.add(ask(1, group=2))
    assert running(book) == {0} and book.unfinished() == 5
    book.abort(["train:0:1"])
    while running(book) == {0}:
        book.decode()
    assert running(book) == {1} or not running(book)
    book.decode()
    assert running(book) == {1}
    done = drain(book)
    assert [t.request_id for t in done] == ["train:1:0", "train:1:1", "train:2:0"]
    assert all(set(t.token_version) == {2} for t in done)
    order = [r.request_id for r in core.added]
    assert order == ["train:0:0", "train:0:1", "train:1:0", "train:1:1", "train:2:0"]


def test_newer_requests_join_older_ones_while_these_are_few(book):
    book.full_for_newer = 3
    book.add(ask(2))
    book.set_version(1)
    book.add(ask(3, group=1))
    assert [*book.active] == ["train:0:0", "train:0:1", "train:1:0"]
    book.set_version(2)
    book.add(ask(2, group=2))
    book.abort(["train:0:0", "train:0:1"])
    book.decode()
    assert [*book.active] == [f"train:1:{i}" for i in range(3)]


COMMANDS = st.lists(
    st.sampled_from(["add", "decode", "decode", "publish", "drain", "go on", "abort", "cut", "any"])
)


@given(commands=COMMANDS)
def test_older_first_loses_nothing_and_never_runs_two_versions(commands):
    """Whatever happens between: every request that is not dropped ends, and those that begin while
    the order holds never begin beside an older one."""
    core = FakeCore()
    book = make_book(core)
    book.full_for_newer = 0
    asked, done = set(), set()
    for group, command in enumerate(commands):
        if command == "add":
            book.add(ask(2, group=group))
            asked |= {f"train:{group}:{i}" for i in range(2)}
        elif command == "decode":
            done |= {t.request_id for t in book.decode()}
        elif command == "publish":
            book.set_version(book.version + 1)
        elif command == "drain":
            book.begin_drain()
        elif command == "go on":
            book.end_drain()
        elif command == "any":
            book.resubmit(book.withdraw(started=True))
        elif unfinished := sorted(asked - done):
            dropped = unfinished[:1]
            asked -= set(dropped)
            book.abort(dropped) if command == "abort" else book.cut(dropped)
        assert len(running(book)) <= 1
    book.end_drain()
    assert book.unfinished() == len(asked - done)
    assert done | {t.request_id for t in drain(book)} == asked


def test_salted_requests_share_prefixes_only_within_a_version(core):
    book = make_book(core, salted=True)
    book.add(ask(1))
    book.set_version(4)
    book.add(ask(1, group=1))
    assert [r.cache_salt for r in core.added] == ["v0", "v4"]


def test_a_request_keeps_its_pages_and_shares_prefixes_only_with_its_like(core, book):
    """Through a withdrawal, another engine's start and into its record."""
    rules = [PageRule(1, 16, (2, 4)), PageRule(2, 16, (3, 4)), PageRule(7, 16, (2, 4))]
    book.add([replace(r, page_rule=rule) for r, rule in zip(ask(3), rules)])
    book.add(ask(1, group=1))
    salts = [r.cache_salt for r in core.added]
    assert salts[0] == salts[2] != salts[1] and salts[3] is None and None not in salts[:3]
    book.decode()
    book.resubmit(book.withdraw(started=True))
    assert [r.page_rule for r in core.added[-4:]] == [*rules, None]
    kept = [load_trajectory(dump_trajectory(t)) for t in drain(book)]
    assert [PageRule.of_record(t.extras) for t in kept] == [*rules, None]


def test_a_record_names_the_layers_that_were_precise_at_each_version(core, book):
    book.add(ask(1))
    book.set_version(3)  # no set-point moves them yet
    book.set_version(4, 2)
    book.decode()
    book.set_version(5, 3)
    (record,) = drain(book)
    assert set(record.token_version) == {4, 5}
    assert load_trajectory(dump_trajectory(record)).extras[PRECISE_LAYERS].tolist() == [
        [4, 2],
        [5, 3],
    ]


def test_what_a_step_had_to_do_is_counted():
    engine = FakeEngine()
    engine.add(ask(6))
    engine.step()
    # four run, of a prompt of two tokens each
    assert engine.load_of_step() == StepLoad(4, context_tokens=8, prompt_tokens=8)
    assert np.isclose(engine.running(), 4)
    engine.step()
    assert engine.load_of_step() == StepLoad(4, context_tokens=12, prompt_tokens=0)


def test_only_decoding_counts_towards_a_requests_time(book, core, monkeypatch):
    clock = iter(range(0, 1000, 10))  # ten seconds pass within every step
    monkeypatch.setattr("rlcore.rollout.request_book.time.monotonic", lambda: next(clock))
    book.add(ask(6))  # the core runs four
    for _ in range(2):
        book.decode()
    assert book.decoding_s() == {f"train:0:{i}": 20.0 for i in range(4)}
    draws = book.withdraw(started=True)
    book.add(ask(4, group=1))
    book.decode()  # the withdrawn ones wait
    book.resubmit(draws)
    assert book.decoding_s()["train:0:0"] == 20.0
    book.abort([f"train:1:{i}" for i in range(4)])
    book.decode()
    assert book.decoding_s()["train:0:0"] == 30.0
    assert len(drain(book)) == 6 and book.decoding_s() == {}


class AheadCore(FakeCore):
    """Gives with each step what the step before sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[Output] = []

    def step(self) -> list[Output]:
        given, self.under_way = self.under_way, list(super().step())
        return given

    def settle(self) -> list[Output]:
        given, self.under_way = self.under_way, []
        return given


def test_tokens_under_way_carry_the_version_that_sampled_them():
    core = AheadCore()
    book = make_book(core)
    book.add(ask(2, max_new_tokens=4))
    for _ in range(3):
        assert book.decode() == []
    assert book.settle() == [] and core.under_way == []
    book.set_version(1)
    done = drain(book)
    assert [t.token_version.tolist() for t in done] == [[0, 0, 0, 1]] * 2


def test_tokens_of_a_settled_step_count_with_the_next_one():
    core = AheadCore()
    book = make_book(core)
    book.add(ask(2, max_new_tokens=3))
    counts = []
    book.decode()
    book.settle()
    while book.unfinished():
        book.decode()
        counts.append(book.step_load.tokens)
    assert sum(counts) == 6 and counts[0] == 2


def test_special_tokens_end_a_response_by_their_ids(tmp_path):
    tokenizer, core = build_char_tokenizer(ALPHABET), FakeCore()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    job = replace(JOB, model_path=str(tmp_path))
    book = RequestBook(core, job, tokenizer, vocab=VOCAB, salted=False)
    book.add(ask(1, stop=("<pad>", "zzzz")))
    book.add(ask(1, group=1))
    assert [r.stop_ids for r in core.added] == [(0, 1, 7), (1, 7)]
    with pytest.raises(UserError, match=r"rollout.stop='<pad>a' holds the special token <pad> and"):
        book.add(ask(1, group=2, stop=("<pad>a",)))
