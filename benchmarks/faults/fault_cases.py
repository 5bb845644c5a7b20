"""Faults of processes, machines and numbers: how each is caused, and the outcome it must have."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import psutil

from benchmarks.faults.fault_kit import JoinedHead, Outcome, fault, kill, recovers, resumed
from benchmarks.faults.frozen_disk import FrozenDisk, may_freeze
from benchmarks.faults.job import Job, line_with
from benchmarks.harness import median, read_rows

# Ray's agents try for this long to report their node's death to a dead head, then exit.
AGENTS_S = 60.0


@fault("rollout actor killed (kill -9) while generating")
def actor_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, kill(job, "RolloutActor"), "is in the rotation")


@fault("engine stopped (SIGSTOP)")
def engine_stopped(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, kill(job, "RolloutActor", signal.SIGSTOP), "is in the rotation")


@fault("one of two actors killed: the other continues")
def one_of_two_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "actor.bf16.count=2", "cluster.num_cpus=3")
    return job, recovers(job, kill(job, "RolloutActor"), "is replaced")


@fault("one of three actors stopped (SIGSTOP): the others continue")
def hung_actor_of_three(folder: Path) -> tuple[Job, Outcome]:
    words = ("actor.bf16.count=3", "cluster.num_cpus=4", "cluster.hang_timeout_s=30")
    job = Job(folder, *words)
    job.wait(lambda: job.steps() >= 12, "twelve steps")
    stopped_at = job.steps()
    begun = time.monotonic()
    kill(job, "RolloutActor", signal.SIGSTOP)()
    job.wait(lambda: line_with(job.text(), "is replaced"), "the end of its patience")
    replaced_at = job.steps()
    job.wait(lambda: line_with(job.text(), "is in the rotation"), "a replacement")
    seconds = time.monotonic() - begun
    whole_at = job.steps()
    job.wait(lambda: job.steps() >= whole_at + 8, "further steps")
    took = [row["time/step_s"] for row in read_rows(job.run_dir)]
    before, during = took[stopped_at - 6 : stopped_at], took[stopped_at:replaced_at]
    after = took[whole_at + 1 : whole_at + 8]
    assert len(during) >= 5, took
    note = (
        f"step time {median(before):.2g} s before, {median(during):.2g} s (longest "
        f"{max(during):.2g} s, {len(during)} steps) while it was stopped, "
        f"{median(after):.2g} s after its replacement"
    )
    return job, Outcome(line_with(job.text(), "has not answered"), seconds, [note])


@fault("learner rank killed (kill -9) in the middle of a backward pass")
def learner_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, fault="killed_in_backward")
    return job, recovers(job, job.mark.touch, "recovery 1")


@fault("one of two ZeRO-2 learner ranks killed")
def rank_of_two_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "learner.ranks=2", "learner.zero_stage=2", "cluster.num_cpus=3")
    return job, recovers(job, kill(job, "LearnerActor"), "recovery 1")


@fault("both of two ZeRO-2 learner ranks stopped (SIGSTOP)")
def both_ranks_stopped(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "learner.ranks=2", "learner.zero_stage=2", "cluster.num_cpus=3")

    def stop() -> None:
        ranks = job.find("LearnerActor")
        assert len(ranks) == 2, ranks
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)

    return job, recovers(job, stop, "recovery 1")


@fault("learner rank stopped (SIGSTOP)")
def learner_stopped(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, kill(job, "LearnerActor", signal.SIGSTOP), "recovery 1")


@fault("replay buffer killed")
def buffer_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, kill(job, "BufferActor"), "recovery 1")


@fault("graders' process killed")
def scorer_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, kill(job, "ScorerActor"), "died with its queue")


@fault("Ray's head (GCS) killed")
def head_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, kill(job, "gcs_server"), "recovery 1")


def _stopped_for(job: Job, word: str, seconds: float) -> float:
    """Stop a process for so long; the seconds until five more steps were done after that."""
    job.wait(lambda: job.steps() >= 6, "six steps")
    stopped = job.process if word == "driver" else job.find(word)[-1]
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    stopped.send_signal(signal.SIGCONT)
    at = job.steps()
    return job.wait(lambda: job.steps() >= at + 5, "further steps")


@fault("Ray's head (GCS) stopped (SIGSTOP) for five seconds")
def head_stopped(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    seconds = _stopped_for(job, "gcs_server", 5.0)
    assert "recovery" not in job.text(), job.text()[-2000:]
    return job, Outcome("nothing", seconds)


@fault("Ray's head of a joined cluster stopped, and started again after twenty seconds")
def head_restarted(folder: Path) -> tuple[Job, Outcome]:
    head = JoinedHead(folder)
    job = Job(folder, f"cluster.address={head.address}")

    def restart() -> None:
        head.stop()
        time.sleep(20.0)
        head.start()

    outcome = recovers(job, restart, "recovery 1")
    saved = line_with(job.text(), "continuing from")
    job.seen |= head.roles()
    return job, Outcome(outcome.saw, outcome.seconds, [saved])


@fault("Ray's head of a joined cluster stopped for good; started later, and resumed")
def head_away(folder: Path) -> tuple[Job, Outcome]:
    head = JoinedHead(folder)
    job = Job(folder, f"cluster.address={head.address}", "cluster.start_timeout_s=120")
    job.wait(lambda: job.steps() >= 7, "seven steps")
    head.stop()
    code = job.end()
    assert code == 1 and "Traceback" not in job.text(), (code, job.text()[-2000:])
    saw = line_with(job.text(), "the run ended")
    assert saw, job.text()[-2000:]  # a sentence of the run: Ray has not ended it
    head.start()
    job, outcome = resumed(folder)
    job.seen |= head.roles()
    return job, Outcome(saw, outcome.seconds, [outcome.saw])


@fault("driver stopped (SIGSTOP) for thirty seconds, as where run_dir hangs")
def driver_stopped(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    seconds = _stopped_for(job, "driver", 30.0)
    row = read_rows(job.run_dir)[-1]
    assert row["rollout/replacements"] == 0 and "recovery" not in job.text(), job.text()[-2000:]
    return job, Outcome("nothing", seconds)


@fault("driver killed between a publication and the next commit, then resumed")
def driver_killed_at_commit(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, fault="killed_at_commit")
    job.wait(lambda: job.steps() >= 7, "seven steps")
    job.family()
    job.mark.touch()
    assert job.end() == -signal.SIGKILL
    others = [name for name in job.left() if "Agent" not in name]
    assert not others, others
    return resumed(folder)


@fault("everything killed (kill -9), then resumed")
def everything_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    job.wait(lambda: job.steps() >= 7, "seven steps")
    job.kill_everything()
    return resumed(folder)


@fault("driver alone killed (kill -9), then resumed")
def driver_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    job.wait(lambda: job.steps() >= 7, "seven steps")
    agents = job.find("Agent")
    job.process.kill()
    job.process.wait()
    begun = time.monotonic()
    others = [name for name in job.left() if "Agent" not in name]
    assert not others, others
    _, beside = psutil.wait_procs(agents, timeout=0)  # may still be there
    resumed_job, outcome = resumed(folder)
    _, alive = psutil.wait_procs(
        agents, timeout=max(0.0, begun + AGENTS_S + job.patience_s - time.monotonic())
    )
    assert not alive, alive
    outcome.notes.append(f"{len(beside)} agents of Ray were still running when it was resumed")
    return resumed_job, outcome


@fault("newest checkpoint corrupted and the one before truncated, then resumed")
def checkpoint_damaged(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "checkpoint.keep=3")
    job.wait(lambda: job.steps() >= 17, "seventeen steps")
    job.kill_everything()
    older, newer = sorted((job.run_dir / "checkpoints").glob("step_*"))[-2:]
    damaged = next((newer / "learner").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-8] + b"\0corrupt")
    cut = older / "buffer" / "records.bin"
    cut.write_bytes(cut.read_bytes()[:-1])
    return resumed(folder, "is passed over")


@fault("disk full during a checkpoint")
def disk_full(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, fault="disk_full")
    outcome = recovers(job, job.mark.touch, "could not be written")
    job.mark.unlink()
    job.wait(
        lambda: line_with(job.text(), "is written again"), "a checkpoint after the disk was freed"
    )
    return job, outcome


@fault("network disk hangs during checkpoints")
def disk_hangs(folder: Path) -> tuple[Job, Outcome]:
    frozen = may_freeze()
    job = Job(folder, "checkpoint.write_timeout_s=5", fault="" if frozen else "hung_disk")
    how = "a patched open, mkdir and rename"
    hang, wake = job.mark.touch, job.mark.unlink
    if frozen:
        how = "a frozen file system (fsfreeze) under checkpoints/"
        job.wait(job.run_dir.exists, "the run directory")
        disk = FrozenDisk(folder / "disk", job.run_dir / "checkpoints")
        Job.afterwards.append(disk.close)
        hang, wake = disk.freeze, disk.thaw
    outcome = recovers(job, hang, "a checkpoint could not be written")
    at = job.steps()
    job.wait(lambda: job.steps() >= at + 20, "twenty steps on a hung disk")
    longest = max(row["time/step_s"] for row in read_rows(job.run_dir)[-20:])
    wake()
    job.wait(lambda: line_with(job.text(), "is written again"), "a checkpoint after it woke")
    outcome.notes += [f"by {how}", f"longest of the next 20 steps {longest:.2g} s"]
    return job, outcome


@fault("NaN in the loss")
def nan_loss(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "checkpoint.every=2", fault="nan_loss")
    begun = time.monotonic()
    code = job.end()
    assert code == 1, (code, job.text()[-2000:])
    saw = line_with(job.text(), "the run ended")
    assert job.steps() == 3, job.steps()
    job, _ = resumed(folder)
    return job, Outcome(saw, None, [f"resumed after {time.monotonic() - begun:.0f} s"])


@fault("a weight update that loses one tensor")
def lost_tensor(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "cluster.verify_weights=full", fault="lost_tensor")
    job.wait(job.mark.exists, "the lost tensor")
    seconds = job.wait(lambda: line_with(job.text(), "is in the rotation"), "a replacement")
    at = job.steps()
    seconds += job.wait(lambda: job.steps() >= at + 2, "further steps")
    # "sampled" might not select the tensor that was lost
    note = "with cluster.verify_weights=full"
    return job, Outcome(line_with(job.text(), "is replaced"), seconds, [note])


@fault("one of two actors at a tenth of the speed")
def slow_actor(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "actor.bf16.count=2", "cluster.num_cpus=3", fault="slow_actor")
    job.wait(lambda: job.steps() >= 40, "forty steps")
    given: Counter[str] = Counter()
    for file in (job.run_dir / "samples").glob("step_*.jsonl"):
        given.update(json.loads(line)["actor"] for line in file.read_text().splitlines())
    shares = ", ".join(f"{name} {n / sum(given.values()):.0%}" for name, n in sorted(given.items()))
    return job, Outcome(f"nothing; shares of the samples trained on: {shares}")


@fault("wall clock jumps ahead by ten minutes, then back by twenty (in the Python processes)")
def clock_jump(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, fault="clock_jump")
    job.wait(lambda: job.steps() >= 6, "six steps")
    seconds = 0.0
    for offset_s in (600, -600):
        job.mark.write_text(str(offset_s))
        at = job.steps()
        seconds += job.wait(lambda at=at: job.steps() >= at + 5, "further steps")
    row = read_rows(job.run_dir)[-1]
    assert row["time/step_s"] < 60 and row["rollout/replacements"] == 0, row
    return job, Outcome("nothing", seconds)


@fault("SIGTERM, then resumed")
def sigterm(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    job.wait(lambda: job.steps() >= 6, "six steps")
    begun = time.monotonic()
    code = job.stop()
    took = time.monotonic() - begun
    assert code == 130 and not job.left(), (code, job.left())
    saw = line_with(job.text(), "SIGTERM")
    job, outcome = resumed(folder)
    return job, Outcome(
        saw, outcome.seconds, [f"checkpoint and exit {took:.0f} s after the signal"]
    )


@fault("Ctrl-C: SIGINT to the whole process group")
def sigint_to_all(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    job.wait(lambda: job.steps() >= 6, "six steps")
    job.family()
    os.killpg(job.process.pid, signal.SIGINT)
    code = job.end()
    assert code == 130 and not job.left(), (code, job.left(), job.text()[-2000:])
    saw = line_with(job.text(), "SIGINT")
    job, outcome = resumed(folder)
    return job, Outcome(saw, outcome.seconds)
