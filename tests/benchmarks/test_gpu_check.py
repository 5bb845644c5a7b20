"""How the GPU check spends its time: order, budget, and rows for whatever was not measured."""

import contextlib
import json
import re
import subprocess
import sys
import time

import check
import loop
import page
import psutil
import pytest
import reference
import setting
from check import PARTS, Part, Rows
from timing import deadline, wait_for_end


def run(chosen, child, *, device="cuda", gpus=1, budget_s=check.BUDGET_S):
    rows = []
    check.check(chosen, child, rows.append, device=device, gpus=gpus, budget_s=budget_s)
    return [(r["part"], r["what"]) for r in rows]


def test_a_failing_part_is_a_row_and_the_next_one_is_tried():
    tried = []

    def child(part, deadline_s):
        tried.append(part.name)
        return "the engine did not start" if part.name == "a" else None

    assert run([Part("a", 9, 1, ()), Part("b", 9, 1, ())], child) == [
        ("a", "failed: the engine did not start")
    ]
    assert tried == ["a", "b"]


def test_what_needs_a_gpu_or_a_package_is_skipped_saying_so():
    chosen = [Part("a", 9, 1, (), cuda=True), Part("b", 9, 1, ("torch", "no_such_package"))]
    found = run(chosen, lambda *_: pytest.fail("nothing can run"), device="cpu")
    assert found == [("a", "skipped: needs a GPU"), ("b", "skipped: no_such_package not installed")]
    two = [Part("two", 9, 1, (), gpus=2)]
    assert run(two, lambda *_: pytest.fail("one GPU")) == [("two", "skipped: needs 2 GPUs")]
    assert run(two, lambda *_: None, gpus=2) == []
    assert run(two, lambda *_: None, device="cpu") == []


def test_calls_fit_into_commands_of_ten_minutes_and_half_an_hour_together():
    alone = {name: call for name, call in check.CALLS.items() if name != "two"}
    assert all(call.budget_s <= check.LONGEST_CALL_S for call in check.CALLS.values())
    assert sum(call.budget_s for call in alone.values()) < 1800
    parts = [name for call in check.CALLS.values() for name in call.parts]
    assert len({*parts}) == len(parts) and {*parts} <= {p.name for p in PARTS}
    for call in check.CALLS.values():  # the first part can run whatever its deadline
        first, *_ = check.in_order(call.parts, has_model=False)
        assert first.least_s < call.budget_s


def asked(*words):
    return check.chosen(check.parser().parse_args(words))


def test_a_call_has_its_parts_lengths_and_budget_and_the_rest_can_be_changed():
    assert asked("--call", "c") == check.CALLS["c"]
    assert asked("--call", "c", "--budget", "9").budget_s == 9
    assert asked("--call", "c", "--batches").batches == ()
    assert asked("--call", "c", "--device", "cpu").contexts == check.CONTEXTS["cpu"]
    assert asked().parts == tuple(p.name for p in PARTS)


def test_rows_of_earlier_calls_stay_and_are_not_shown_again(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    Rows(path).add({"part": "bf16", "context": 1, "decode tokens/s": 5.0})
    capsys.readouterr()
    again = Rows(path)
    again.add({"part": "sparse", "context": 1})
    assert len(path.read_text().splitlines()) == 2
    assert "bf16" not in capsys.readouterr().out
    assert again.of_this_call() == [{"part": "sparse", "context": 1}]


def test_the_page_says_what_was_shown_and_what_was_not():
    rows = [
        {"part": "machine", "device": "H100", "gpus": 1},
        {"part": "kernel", "batch": 16, "dense ms": 0.25},
        {"part": "kernel", "batch": 64, "dense ms": 0.5},
        {"part": "kernel", "what": "failed: time (60 s), after: batch 64"},
        {"part": "pair", "what": "skipped: needs 2 GPUs"},
    ]
    text = page.page(rows)
    assert "| batch | dense ms |\n| --- | --- |\n| 16 | 0.25 |\n| 64 | 0.5 |" in text
    assert "- `kernel`, in part: failed: time (60 s)" in text
    assert "- `pair`: skipped: needs 2 GPUs" in text and "- `loop`: did not run" in text
    everything = [{"part": name, "seconds": 1.0} for name in page.NAMES]
    assert "Nothing: every part ran." in page.page(everything)


def test_the_budget_holds_whatever_the_parts_take(monkeypatch):
    now, given = [0.0], {}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: name)

    def child(part, deadline_s):
        given[part.name] = deadline_s
        now[0] += deadline_s  # every part hangs until its deadline
        return "time"

    found = dict(run(PARTS, child))
    assert now[0] <= check.BUDGET_S <= 1800
    assert all(given[p.name] <= p.limit_s for p in PARTS if p.name in given)
    assert list(found) == [p.name for p in PARTS]
    last = PARTS[-1].name
    assert found[last].startswith("skipped: time")
    assert {"kernel", "model", "bf16", "sparse", "fp8", "update", "loop"} < set(given)


def test_parts_run_in_the_order_that_was_asked_for():
    def found(*names, has_model):
        return [p.name for p in check.in_order(names, has_model=has_model)]

    assert found("loop", "bf16", has_model=False) == ["model", "loop", "bf16"]
    assert found("loop", "bf16", has_model=True) == ["loop", "bf16"]
    assert found("kernel", "loop", has_model=False) == ["kernel", "loop"]  # neither reads it
    assert found("kernel", "model", "bf16", has_model=False) == ["kernel", "model", "bf16"]
    assert found(*(p.name for p in PARTS), has_model=False) == [p.name for p in PARTS]


@pytest.mark.processes
def test_a_child_past_its_deadline_is_killed_and_its_rows_stay(tmp_path, monkeypatch):
    stand_in = tmp_path / "parts.py"
    stand_in.write_text(
        "import subprocess, sys, time\n"
        'open(sys.argv[7], \'a\').write(\'{"part": "bf16", "context": 4096}\\n\')\n'
        "engine = subprocess.Popen(['sleep', '600'])\n"
        "print('began', engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(check, "HERE", tmp_path)
    rows = Rows(tmp_path / "rows.jsonl")
    why = check.run_child(Part("bf16", 9, 1, ()), deadline(3), rows, [str(tmp_path), *"abcd"])
    assert why is not None and re.match(r"time \(\d+ s\), after: began", why)
    assert [json.loads(line)["context"] for line in rows.path.read_text().splitlines()] == [4096]
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_for_end([psutil.Process(int(why.split()[-1]))], 10, "its own child")


@pytest.mark.processes
def test_a_child_that_dies_says_why(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text("raise ImportError('no kernel for this GPU')")
    monkeypatch.setattr(check, "HERE", tmp_path)
    rows = Rows(tmp_path / "rows.jsonl")
    why = check.run_child(Part("fp8", 30, 1, ()), deadline(30), rows, [str(tmp_path), *"abcd"])
    assert why == "exit code 1: ImportError: no kernel for this GPU"


def test_an_error_is_said_rather_than_what_libraries_print_after_it(tmp_path):
    log = tmp_path / "log"
    log.write_text("[rank0]: torch.OutOfMemoryError: CUDA\n[rank0]: Warning: not destroyed\n")
    assert check.last_line(log) == "[rank0]: torch.OutOfMemoryError: CUDA"


def test_shapes_are_those_that_can_be_asked_for():
    assert set(check.SHAPES) == set(setting.SHAPES)


def test_a_speed_is_printed_only_where_log_probs_agree():
    speeds = {"decode tokens/s": 10.0}
    close, far = {"mean |dlogp|": 0.01}, {"mean |dlogp|": 0.2}
    assert reference.where_they_agree(close, 0.05, speeds) == close | speeds
    assert reference.where_they_agree(far, 0.05, speeds) == {
        "mean |dlogp|": 0.2,
        "speed": "withheld: mean |dlogp| is above 0.05",
    }
    # what is no number agrees with nothing
    assert "speed" in reference.where_they_agree({"mean |dlogp|": float("nan")}, 0.05, speeds)


def test_speeds_are_compared_at_equal_contexts_and_only_if_printed():
    rows = [
        {"part": "bf16", "context": 4096, "decode tokens/s": 100.0},
        {"part": "bf16", "context": 8192, "speed": "withheld"},
        {"part": "bf16", "batch": 64, "seeded": True, "decode tokens/s": 900.0},
        {"part": "sparse", "context": 4096, "decode tokens/s": 250.0},
        {"part": "sparse", "context": 8192, "decode tokens/s": 250.0},
        {"part": "fp8", "context": 4096, "speed": "withheld"},
    ]
    assert check.speedups(rows) == [
        {"part": "sparse", "context": 4096, "decoding, times bf16": 2.5}
    ]


def test_a_run_and_its_resume_must_have_every_step_once_and_move_the_weights(tmp_path):
    row = {
        "grad_norm": 0.5,
        "mismatch/abs_dlogp_mean": 0.01,
        "time/step_s": 1.0,
        "time/publish_s": 0.1,
        "throughput/rollout_tokens_per_s": 5.0,
    }
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row | {"step": i}) + "\n" for i in range(1, 6)))
    assert loop.summary(path, 0.05)["steps"] == 5
    path.write_text("".join(json.dumps(row | {"step": i}) + "\n" for i in (1, 2, 3, 3, 4)))
    with pytest.raises(RuntimeError, match=r"steps \[1, 2, 3, 3, 4\], not 1 to 5"):
        loop.summary(path, 0.05)
    still = row | {"grad_norm": 0.0}
    path.write_text("".join(json.dumps(still | {"step": i}) + "\n" for i in range(1, 6)))
    with pytest.raises(RuntimeError, match="no step moved the weights"):
        loop.summary(path, 0.05)


def test_linears_are_rounded_and_stay_dequantised():
    import torch

    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.Linear(32, 8)})})
    before = model["model"]["layers"].weight.detach().clone()
    reference.round_linears(model)
    after = model["model"]["layers"].weight
    assert after.dtype == before.dtype and not torch.equal(after, before)
    torch.testing.assert_close(after, before, rtol=0.07, atol=1e-3)


def test_weights_are_rounded_on_the_device(tmp_path, monkeypatch):
    import random_model

    random_model.random_model(random_model.SHAPES["tiny"], "cpu").save_pretrained(
        tmp_path / "model"
    )
    found = set()

    def rounded(model):
        found.update(p.device.type for p in model.parameters())

    monkeypatch.setattr(reference, "round_linears", rounded)
    s = setting.Setting(tmp_path, "tiny", "meta", (), (), tmp_path / "rows")
    reference.Reference(s, "fp8")
    assert found == {"meta"}


@pytest.mark.parametrize("proposed, accepted", [(0, 0), (90, 0), (90, 44)])
def test_speculation_fails_unless_a_model_accepts_its_own_proposals(proposed, accepted):
    import rollouts

    rollouts.check_taken(90, 45)
    with pytest.raises(RuntimeError, match=f"{accepted} of {proposed} greedy proposals"):
        rollouts.check_taken(proposed, accepted)
    assert rollouts.taken(proposed, accepted)["proposed"] == proposed


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1800)  # a process for each part
def test_the_dry_run_runs_every_part_that_a_cpu_can(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, check.__file__, "--shape", "tiny", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=deadline(1700),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    # a setting of the offload part needs a library of the system
    said = [r for r in rows if "libaio" not in r.get("what", "libaio")]
    whole = [r for r in said if set(r) == {"part", "what"}]
    assert {r["what"] for r in whole} == {"skipped: needs a GPU"}, said
    assert {r["part"] for r in whole} == {p.name for p in PARTS if p.cuda}
    lacking = {setting.NO_LIGER, setting.NO_TORCHAO}
    assert {r["what"] for r in said if r not in whole} == lacking, said
    assert {r["part"] for r in rows} >= {p.name for p in PARTS}
    assert not [r for r in rows if "speed" in r]  # none was withheld
