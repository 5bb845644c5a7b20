"""timeline.jsonl: the last steps, through resumes, in a file that stays small."""

from rlcore.metrics.logger import KEPT, TimelineSink, read_timeline


def spans(step):
    return [("learner", f"optimizer step {step}", step - 1.0, float(step), 1.0)]


def steps(path):
    return [found["step"] for found in read_timeline(path)]


def test_the_newest_steps_are_kept_and_the_file_stays_small(tmp_path):
    sink, path = TimelineSink(tmp_path), tmp_path / "timeline.jsonl"
    assert read_timeline(path) == []
    for step in range(1, 5 * KEPT + 8):
        sink.timeline(step, spans(step))
        assert len(steps(path)) <= 2 * KEPT
    assert steps(path)[-KEPT:] == list(range(4 * KEPT + 8, 5 * KEPT + 8))
    assert read_timeline(path)[-1]["spans"] == [list(span) for span in spans(5 * KEPT + 7)]


def test_a_resume_drops_later_steps_and_a_cut_line_is_passed_over(tmp_path):
    sink, path = TimelineSink(tmp_path), tmp_path / "timeline.jsonl"
    for step in (1, 2, 3):
        sink.timeline(step, spans(step))
    with path.open("a") as file:
        file.write('{"step": 4, "sp')
    assert steps(path) == [1, 2, 3]
    again = TimelineSink(tmp_path)
    again.resume_at(2)
    again.timeline(3, spans(30))
    assert steps(path) == [1, 2, 3] and read_timeline(path)[-1]["spans"][0][1].endswith(" 30")
