"""The back test of warnings: how runs are told apart, and that its page is made from its lines."""

import json

from run_rows import after, rows

from benchmarks.evidence import alarms


def line(age, final, reward, kl=0.0):
    found = rows(40, **{"reward/mean": reward, "step_bound/answer_kl": kl, "mismatch/kl_k3": 0.0})
    found = [{**row, "staleness/mean": float(age), "step_bound/answer_kl": kl} for row in found]
    values = [[row[name] for name in alarms.NAMES] for row in found]
    return {"age": age, "lr": 1e-4, "seed": 0, "final": final, "rows": values}


def test_runs_are_lost_harmed_or_well_by_their_rewards():
    lines = [
        line(0, 0.7, 0.6),
        line(4, 0.3, after(20, 0.6, 0.2), 3.0),
        line(4, 0.6, 0.6, 3.0),
        line(4, 0.68, 0.6),
    ]
    lost, harmed, well = alarms.sorted_by_end(lines)
    assert [len(part) for part in (lost, harmed, well)] == [1, 1, 1]
    assert alarms.fallen_at(lost[0]) == 22 and alarms.fallen_at(well[0]) is None
    row = alarms.judged("answer_kl", lost, harmed, well)
    assert list(row.values()) == ["answer_kl", "1, 0, 0", 19, 1, 0]
    row = alarms.judged("prototype: k3 times tokens above 2 in 2 of 3", lost, harmed, well)
    assert list(row.values())[1] == "0, 0, 1"


def test_the_page_is_made_from_the_lines():
    lines = [json.loads(row) for row in alarms.FILE.read_text().splitlines()]
    assert alarms.PAGE.read_text() == alarms.page(lines) + "\n"
