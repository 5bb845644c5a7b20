"""Dumps of any trainer: figures against direct computation, wrong rows, layouts, the command."""

from __future__ import annotations

import json
import math
import re
import resource
import subprocess
import sys

import pytest
import torch
from timing import deadline

import rlcore
from rlcore.cli import main
from rlcore.dumps.diagnose import diagnose
from rlcore.dumps.files import Read, read
from rlcore.dumps.measure import ANSWERS, batches
from rlcore.dumps.rows import Row, WrongRow, row_of, write
from rlcore.errors import UserError


def answers(count, *, error=0.0, seed=0, **columns):
    """Rows whose actor is off by a normal error of the log-probs."""
    made = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = 5 + number % 30
        ref = -torch.rand(length, generator=made, dtype=torch.float64) * 3
        inf = (ref + error * torch.randn(length, generator=made, dtype=torch.float64)).clamp(max=0)
        found.append({"logp_inf": inf.tolist(), "logp_ref": ref.tolist(), **columns})
    return found


def test_figures_are_those_of_all_tokens_whatever_the_batches():
    rows = answers(3 * ANSWERS + 7, error=0.4)
    d = torch.tensor([r - q for row in rows for q, r in zip(row["logp_inf"], row["logp_ref"])])
    figures = diagnose(rows).figures[""].figures
    w = d.exp()
    assert figures["tokens"] == len(d) and figures["answers"] == len(rows)
    assert figures["kl_k3"] == pytest.approx(float((w - 1 - d).mean()), rel=1e-5)
    assert figures["ess"] == pytest.approx(float(w.mean() ** 2 / (w * w).mean()), rel=1e-5)
    assert figures["acceptance"] == pytest.approx(float(w.clamp(max=1).mean()), rel=1e-5)
    assert figures["truncated_share"] == pytest.approx(float((w > 2).double().mean()))
    assert figures["abs_dlogp_p95"] == pytest.approx(float(d.abs().quantile(0.95)), rel=0.03)


def test_kinds_ages_and_shadows_are_each_their_own():
    rows = answers(60, error=0.01, kind="bf16", version=8, ref_version=8, advantages=1.0)
    rows += answers(40, error=0.5, seed=1, kind="int3", version=6, ref_version=8, advantages=-1.0)
    found = diagnose(rows)
    k3 = {kind: measured.figures["kl_k3"] for kind, measured in found.figures.items()}
    assert k3["bf16"] < 1e-3 < k3[""] < k3["int3"]
    every = found.figures[""]
    assert [count for count, _ in every.by_age.values()] == [
        int(found.figures[kind].figures["tokens"]) for kind in ("bf16", "int3")
    ]
    assert list(every.by_age) == [0, 2]
    assert every.figures["late_kl"] == pytest.approx(
        (k3["int3"] - k3["bf16"]) * every.figures["length"], rel=1e-5
    )
    tis = every.shadows["tis"]
    d = torch.tensor([r - q for row in rows for q, r in zip(row["logp_inf"], row["logp_ref"])])
    w = d.exp().clamp(max=2)
    assert tis["kept_share"] == 1
    assert tis["ess"] == pytest.approx(float(w.sum() ** 2 / (len(w) * (w * w).sum())), rel=1e-5)
    assert found.use == ("tis",) and found.advised and "late_kl" not in found.lacking
    states, *lacking = sorted(found.lacking, key=lambda name: " " not in name)
    assert {"group", "token_ids", "topk_logp_inf"} == set(lacking)
    assert "drift" in found.lacking[states] and "hidden states" in states


def test_an_error_that_repeats_is_told_from_a_fresh_one():
    context = answers(1, error=0.5)[0]
    same = [context | {"group": i // 8, "token_ids": [1] * 5} for i in range(32)]
    assert diagnose(same).figures[""].figures["fixed_share"] == pytest.approx(1.0)
    fresh = [answers(1, error=0.5, seed=i)[0] for i in range(32)]
    fresh = [row | {"group": i // 8, "token_ids": [1] * 5} for i, row in enumerate(fresh)]
    assert abs(diagnose(fresh).figures[""].figures["fixed_share"]) < 0.5


def test_equal_policies_need_nothing(tmp_path, capsys):
    write_rows(tmp_path / "a.jsonl", answers(300))
    assert main(["diagnose", str(tmp_path / "a.jsonl")]) == 0
    assert "Advice: no correction is called for." in capsys.readouterr().out


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


WRONG = {
    "logp_inf holds NaN at token 2": {"logp_inf": [-1.0, math.nan, -1.0]},
    "logp_ref is inf at token 1": {"logp_ref": [math.inf, -1.0, -1.0]},
    "logp_inf is -inf at token 3": {"logp_inf": [-1.0, -1.0, -math.inf]},
    "logp_ref is 0.5 at token 2": {"logp_ref": [-1.0, 0.5, -1.0]},
    "logp_ref has 2 entries, and logp_inf 3": {"logp_ref": [-1.0, -1.0]},
    "mask leaves no sampled token": {"mask": [0, 0, 0]},
    "mask holds other numbers": {"mask": [1, 2, 1]},
    "logp_inf is missing": {"logp_inf": None},
    "logp_inf is str": {"logp_inf": "-1"},
    "logp_inf holds str at token 2": {"logp_inf": [-1.0, "x", -1.0]},
    "logp_inf holds no token": {"logp_inf": [], "logp_ref": []},
    "advantages is not": {"advantages": [1.0, math.nan, 0.0]},
    "advantages has 1 entries": {"advantages": [1.0]},
    "advantages is not finite": {"advantages": math.nan},
    "advantages holds a number that is too large": {"advantages": 10**400},
    "version holds 1e": {"version": 10**300},
    "version holds 0.5": {"version": 0.5},
    "token_ids holds 4.29": {"token_ids": [1, 2, 2**32]},
    "ref_version is not a finite number": {"ref_version": 10**400},
    "topk_logp_ref holds str": {
        "topk_ids_inf": [[1]] * 3,
        "topk_logp_inf": [[-1.0]] * 3,
        "ref_logp_at_inf_ids": [[-1.0]] * 3,
        "topk_ids_ref": [[1]] * 3,
        "topk_logp_ref": [["x"]] * 3,
    },
    "reward is not a finite number": {"reward": math.inf},
    "mask covers tokens that no actor sampled": {
        "logp_inf": [0.0] * 5 + [-1.0],
        "logp_ref": [-2.0] * 6,
    },
    "mask covers tokens that no actor sampled: logp_inf is 0 at tokens 2 to 5": {
        "logp_inf": [-1.0, *[0.0] * 4],
        "logp_ref": [-1.0, *[-2.0] * 4],
    },
    "mask covers tokens that the learner has not scored: logp_ref is 0 at tokens 1 to 4": {
        "logp_inf": [-3.0] * 5,
        "logp_ref": [0.0] * 4 + [-3.0],
    },
    "logp_ref is -1e[+]30 at token 1, which stands for no log-prob": {
        "logp_ref": [-1e30, -1.0, -1.0]
    },
    "logp_inf is -9999 at token 3, which stands for no log-prob": {"logp_inf": [-1.0, -1.0, -9999]},
    "logp_inf holds list at token 1, and a row is one answer": {"logp_inf": [[-1.0]] * 3},
    "token_ids holds -100, which is not a token": {"token_ids": [-100, 5, 6]},
    "token_ids holds 7, and vocabulary is 7": {"token_ids": [5, 6, 7], "vocabulary": 7},
    "version is 9, after ref_version 3": {"version": 9, "ref_version": 3},
    "version is -1": {"version": [0, 1, -1]},
    "vocabulary is 0, below 1": {"vocabulary": 0},
    "topk_ids_inf has another number of entries": {
        "topk_ids_inf": [[1, 2]] * 3,
        "topk_logp_inf": [[-1.0]] * 3,
        "ref_logp_at_inf_ids": [[-1.0, -2.0]] * 3,
        "topk_ids_ref": [[1, 2]] * 3,
        "topk_logp_ref": [[-1.0, -2.0]] * 3,
    },
}
RIGHT = {"logp_inf": [-1.0, -1.0, -1.0], "logp_ref": [-1.0, -1.1, -1.0]}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_row_is_counted_and_left_out(said, tmp_path):
    with pytest.raises(WrongRow, match=said):
        row_of(RIGHT | WRONG[said])
    counts = Read()
    write_rows(tmp_path / "a.jsonl", [RIGHT, RIGHT | WRONG[said], RIGHT | WRONG[said], RIGHT])
    assert len(list(read(tmp_path / "a.jsonl", counts))) == 2
    assert sum(counts.left_out.values()) == 2
    told = counts.told()[0]
    assert told.startswith(f"2 rows left out, the first {tmp_path}/a.jsonl row 2: ")
    assert re.search(said, told)


def test_what_a_mask_hides_may_hold_anything():
    row = row_of(RIGHT | {"logp_inf": [math.nan, -1.0, 5.0], "mask": [0, 1, 0], "reward": 1})
    assert row == Row([-1.0], [-1.1], reward=1.0)


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    lines = [json.dumps(RIGHT), "{", "[1]", "", "[" * 100_000, json.dumps(RIGHT)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    counts = Read()
    assert len(list(read([tmp_path / "a.jsonl"], counts))) == 2
    assert sum(counts.left_out.values()) == 3


def test_files_that_cannot_be_used_are_refused_in_a_sentence(tmp_path, capsys):
    rows = {
        "empty": [],
        "wrong": [RIGHT | {"mask": [0, 0, 0]}],
        "verl": [{"input": "a", "output": "b", "score": 1.0, "step": 1}],
        "trl": [{"prompt": "a", "completion": "b", "advantage": 0.0}],
        "other": [{"text": "a"}],
        "verl without": [{"old_log_probs": [-1.0], "response_mask": [1]}],
        "trl without": [{"sampling_per_token_logps": [-1.0], "old_per_token_logps": None}],
        "a batch": [{"logp_inf": [[-1.0]], "logp_ref": [[-1.0]]}],
    }
    said = {
        "empty": "holds no row that can be read: it is empty",
        "wrong": "mask leaves no sampled token",
        "verl": "calculate_log_probs=True",
        "trl": "use_vllm=True",
        "other": "has no column logp_inf and no column logp_ref: it has text",
        "verl without": "calculate_log_probs=True",
        "trl without": "set vllm_importance_sampling_correction=True",
        "a batch": "a row is one answer",
        "absent": "is not a file",
    }
    for name, sentence in said.items():
        if name in rows:
            write_rows(tmp_path / f"{name}.jsonl", rows[name])
        assert main(["diagnose", str(tmp_path / f"{name}.jsonl")]) == 2
        told = capsys.readouterr().err
        assert sentence in told and len(told.splitlines()) == 1


def test_peers_layouts_are_read(tmp_path):
    inf, ref = RIGHT["logp_inf"], RIGHT["logp_ref"]
    nemo = {
        "content": "x",
        "rewards": 1.0,
        "generation_logprobs": [0.0, 0.0, *inf],
        "prev_logprobs": [-3.0, -3.0, *ref],
        "token_loss_mask": [0, 0, 1, 1, 1],
        "sample_loss_mask": 1,
        "advantages": [0.0, 0.0, 1.0, 1.0, 1.0],
        "input_lengths": 5,
    }
    verl = {"rollout_log_probs": inf, "old_log_probs": ref, "response_mask": [1, 1, 1]}
    trl = {"sampling_per_token_logps": inf, "old_per_token_logps": ref, "advantages": 0.5}
    openrlhf = {"rollout_log_probs": inf, "action_log_probs": ref, "action_mask": [1, 1, 1]}
    skyrl = {"rollout_logprobs": inf, "action_log_probs": ref, "loss_mask": [1, 1, 1]}
    rows = {"NeMo-RL": nemo, "verl": verl, "TRL": trl, "OpenRLHF": openrlhf, "SkyRL": skyrl}
    for name, row in rows.items():
        write_rows(tmp_path / "a.jsonl", [row])
        counts = Read()
        (found,) = read(tmp_path / "a.jsonl", counts)
        assert (counts.layouts, found.logp_inf, found.logp_ref) == ([name], inf, ref)


def test_no_row_spoils_its_file(tmp_path):
    """Not the first one either, and each row is read by its own columns."""
    peer = {"rollout_log_probs": [-1.0], "old_log_probs": [-1.1], "response_mask": [1]}
    wrong = [{"logp_inf": None}, {}, RIGHT | {"vocabulary": 12}]
    write_rows(tmp_path / "a.jsonl", [*wrong[:2], RIGHT | {"vocabulary": 10}, peer, wrong[2]])
    found = diagnose(tmp_path / "a.jsonl")
    assert found.rows == 2 and set(found.layouts) == {"rlcore's schema", "verl"}
    assert len(found.left_out) == 2 and found.left_out[0].startswith("2 rows left out, the first")
    assert "row 5: vocabulary is 12, and 10 in rows before" in found.left_out[1]
    write_rows(tmp_path / "b.jsonl", [RIGHT | {"vocabulary": 12}])
    with pytest.raises(UserError, match=r"b\.jsonl holds no row .* diagnose their files"):
        diagnose([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])


def test_log_probs_of_0_at_an_end_are_told(tmp_path):
    padded = {"logp_inf": [-1.0, *[0.0] * 4], "logp_ref": [-1.0, *[0.0] * 4]}
    found = diagnose([padded, RIGHT, padded | {"mask": [1, 1, 0, 0, 0]}])
    assert found.rows == 3 and found.left_out[0].startswith("1 row begins or ends with tokens")


def test_tables_numbers_and_generators_of_python_are_read():
    array = torch.tensor(RIGHT["logp_inf"], dtype=torch.float32)
    row = {"logp_inf": array, "logp_ref": list(array.numpy()), "mask": array < 0}
    row |= {"advantages": torch.tensor(1.0), "reward": array.numpy()[0]}
    assert diagnose(dict(row) for _ in range(3)).rows == 3
    assert diagnose(row).rows == 1


def test_kinds_beyond_sixteen_are_one():
    found = diagnose([RIGHT | {"kind": f"{number}"} for number in range(40)]).figures
    assert len(found) == 18 and found["others"].figures["answers"] == 24


@pytest.mark.parametrize(
    ("name", "start", "said"),
    [
        ("a.pt", b"anything", "is a pickle, which may run code as it is read"),
        ("a.pkl", b"anything", "is a pickle"),
        ("dump", b"PK\x03\x04...", "is a pickle"),
        ("dump", b"\x80\x04N.", "is a pickle"),
        ("a.jsonl", b"\x1f\x8b...", "is compressed: decompress it first"),
        ("dump", b"PAR1...", "is not a readable Parquet file"),
    ],
)
def test_what_is_no_dump_of_rows_is_known_by_its_first_bytes(name, start, said, tmp_path):
    (tmp_path / name).write_bytes(start)
    with pytest.raises(UserError, match=said):
        diagnose(tmp_path / name)


def test_a_line_that_memory_may_not_hold_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("rlcore.dumps.files.LONGEST_LINE", 1 << 20)
    right = json.dumps(RIGHT)
    (tmp_path / "a.jsonl").write_text(f"{right}\n[{'0, ' * 2_000_000}0]\n{right}")
    found = diagnose(tmp_path / "a.jsonl")
    assert found.rows == 2
    assert "row 2: line has more than 1 MiB: write one answer a line" in found.left_out[0]


def test_parquet_and_written_rows_are_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = answers(150, error=0.2, group="a")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    by_parquet, by_list = diagnose(tmp_path / "a.parquet"), diagnose(rows)
    assert by_parquet.figures == by_list.figures
    tensor = torch.tensor([RIGHT["logp_inf"]])
    assert write(tmp_path / "w.jsonl", logp_inf=tensor, logp_ref=tensor, mask=None) == 1
    ragged = [torch.tensor([-1.0]), torch.tensor([-1.0, -0.5])]
    assert write(tmp_path / "w.jsonl", logp_inf=ragged, logp_ref=ragged) == 2
    assert rlcore.diagnose(tmp_path / "w.jsonl").rows == 3
    with pytest.raises(UserError, match=r"unequal sizes \(logp_inf 1, logp_ref 2\)"):
        write(tmp_path / "w.jsonl", logp_inf=tensor, logp_ref=[[0.0], [0.0]])


def test_jackpot_and_the_total_variation_need_the_top_k():
    rows = answers(20, error=0.3)
    without = diagnose(rows).figures[""]
    assert "jackpot" not in without.shadows and "tv" not in without.figures
    for row in rows:
        count = len(row["logp_inf"])
        row |= {
            "topk_ids_inf": [[1, 2]] * count,
            "topk_logp_inf": [[-0.5, -1.5]] * count,
            "ref_logp_at_inf_ids": [[-0.7, -1.2]] * count,
            "topk_ids_ref": [[1, 2]] * count,
            "topk_logp_ref": [[-0.7, -1.2]] * count,
        }
    found = diagnose(rows).figures[""]
    assert 0 < found.shadows["jackpot"]["kept_share"] <= 1
    q, p = ([math.exp(a), math.exp(b)] for a, b in ((-0.5, -1.5), (-0.7, -1.2)))
    apart = [a - b for a, b in zip([*q, 1 - sum(q)], [*p, 1 - sum(p)])]
    assert found.figures["tv"] == pytest.approx(0.5 * sum(map(abs, apart)), rel=1e-5)


def test_a_group_stays_in_one_batch_and_long_answers_make_small_batches():
    rows = [Row([-1.0], [-1.0], group=str(i // 10)) for i in range(ANSWERS + 20)]
    sizes = [len(batch) for batch in batches(rows)]
    assert sum(sizes) == len(rows) and sizes[0] == 260
    long = [Row([-1.0] * 300_000, [-1.0] * 300_000) for _ in range(7)]
    assert max(len(batch) for batch in batches(long)) == 3
    top = [Row([-1.0] * 1000, [-1.0] * 1000, topk_ids_inf=[[1] * 19] * 1000) for _ in range(120)]
    assert max(len(batch) for batch in batches(top)) == 50


def test_the_page_and_json_hold_the_figures(tmp_path, capsys):
    write_rows(tmp_path / "<b>.jsonl", answers(40, error=0.4, kind="<i>", advantages=1.0))
    page = tmp_path / "page.html"
    assert (
        main(["diagnose", str(tmp_path / "<b>.jsonl"), f"out={page}", "json=true", "answers=512"])
        == 3
    )
    found = json.loads(capsys.readouterr().out)
    text = page.read_text()
    assert found["use"] == ["tis"] and "Advice: use tis." in text
    assert f"{found['figures']['all']['figures']['kl_k3']:.4g}" in text
    assert "<i>" not in text.replace("<div>", "") and found["advised"] is True


@pytest.mark.slow
@pytest.mark.processes
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Two hundred MB of rows; the largest memory of the process, torch included, stays below 2
    GiB."""
    line = json.dumps(answers(1)[0] | {"logp_inf": [-1.0] * 2000, "logp_ref": [-1.1] * 2000})
    with (tmp_path / "a.jsonl").open("w") as file:
        for _ in range(8000):
            file.write(line + "\n")
    words = [sys.executable, "-m", "rlcore.cli", "diagnose", str(tmp_path / "a.jsonl")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(words, capture_output=True, text=True, timeout=deadline(280))
    assert done.stdout.startswith("8000 answers")
    assert max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) < 2 * 2**20
