"""Environments that misbehave, a sampler without an engine, and jobs to play."""

from __future__ import annotations

import os
import random
import subprocess
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from timing import deadline

from rlcore.environments.play import Play
from rlcore.environments.protocol import Opening, Reply, answer_calls, tool_schema
from rlcore.environments.specs import EnvironmentJob, EnvironmentSpec
from rlcore.tasks.specs import EvalTaskSpec
from rlcore.testing.records import make_sampling, make_trajectory
from rlcore.types import Grade, Request

HERE = Path(__file__)


class Echo:
    """Answers every turn with its text until `turns` are played; `fault`: what it does wrong, and
    `at`: in which call."""

    def __init__(self, turns=3, fault="", at="step", seconds=0.0, rewards=(), late=(), listed=()):
        self.turns, self.fault, self.at, self.seconds = turns, fault, at, seconds
        self.rewards, self.late = rewards, tuple(late)  # of turns: by steps, by the grade
        self.listed = listed  # of turns or tokens, by the grade
        self.texts = []

    def _misbehave(self, call):
        if call != self.at:
            return
        if self.fault == "raise":
            raise ValueError("it has a fault")
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "hang":
            time.sleep(1000)
        if self.fault == "print":
            for _ in range(1024):
                print("x" * (1 << 20))
        if self.fault == "memory":
            bytearray(8 << 30)
        if self.fault == "daemon":  # in a session of its own, and without a parent
            subprocess.run(["sh", "-c", f"setsid sleep 600 & echo $! > {self.listed}"], check=True)
            os._exit(3)
        what, _, at = self.fault.partition(" ")
        if what == "leave":
            subprocess.run(["sh", "-c", f"setsid sleep 600 & echo $! >> {at}"], check=True)
        if self.fault == "big":
            self.texts[-1] = "1" * (1 << 26)
        if self.fault == "slow":
            time.sleep(self.seconds)

    def reset(self, item, seed):
        self.seed = seed
        self._misbehave("reset")
        return Opening([{"role": "user", "content": item.question}])

    def step(self, action):
        self.texts.append(action.text)
        self._misbehave("step")
        over = len(self.texts) == self.turns
        reward = self.rewards[len(self.texts) - 1] if self.rewards else None
        return Reply([{"role": "user", "content": self.texts[-1]}], over, {"steps": 1}, reward)

    def grade(self):
        self._misbehave("grade")
        parts = {"seed": self.seed % 1000, "process": os.getpid()}
        if self.listed:
            return self.listed, parts
        return Grade(float(len(self.texts)), parts, self.late)


class Dice:
    """Asks for a number three times and answers with a die, which also rewards the turn."""

    def reset(self, item, seed):
        self.random = random.Random(seed)
        self.left = 3
        return Opening([{"role": "user", "content": item.question}])

    def step(self, action):
        self.left -= 1
        die = self.random.randint(1, 6)
        message = {"role": "user", "content": str(die)}
        return Reply([message], over=not self.left, reward=die / 6)

    def grade(self):
        return self.random.random()


class Calculator:
    """One tool, `divide`; the episode is over when a turn calls none. `sleeps`: seconds that the
    tool takes over a division by 3."""

    def __init__(self, sleeps=0.0):
        self.sleeps = sleeps

    def reset(self, item, seed):
        self.answers = []
        return Opening([{"role": "user", "content": item.question}], [tool_schema(self.divide)])

    def step(self, action):
        if not action.tool_calls:
            return Reply(over=True)
        messages = answer_calls({"divide": self.divide}, action.tool_calls)
        self.answers += [m["content"] for m in messages]
        return Reply(messages)

    def grade(self):
        return float("2.0" in self.answers)

    def divide(self, a: float, b: float):
        """Divide a by b."""
        time.sleep(self.sleeps if b == 3 else 0.0)
        return a / b


class Evaluating:
    """A game that evaluates what the model says, as some packages do."""

    confined = True

    def reset(self, item, seed):
        return Opening([{"role": "user", "content": item.question}])

    def step(self, action):
        return Reply([{"role": "user", "content": str(eval(action.text))}])

    def grade(self):
        return 1.0


def make_job(name="Echo", *, max_len=64, **settings):
    """Episodes of `name`, a class of this file or a shipped environment, over the digits task."""
    args = settings.pop("args", {})
    path = f"{HERE}:{name}" if name[0].isupper() else name
    spec = EnvironmentSpec(name=path, args=args, **settings)
    return EnvironmentJob(spec, EvalTaskSpec(name="digits"), "digits", max_len=max_len, run_seed=3)


def ask(count, *, group=0, purpose="train", **sampling):
    """`count` samples of one prompt, whose tokens come from the environment."""
    spec = make_sampling(**{"max_new_tokens": 6, "logprobs_k": 2, **sampling})
    nothing = np.zeros(0, np.int32)
    return [
        Request(group, i, f"digits/train/{abs(group)}", nothing, spec, 7 + i, purpose)
        for i in range(count)
    ]


def _episode(request):
    """Its name, which the turns of all conversations share."""
    return request.purpose.partition(".")[0], request.group_id, request.sample_index


class ScriptedSampler:
    """Answers every turn with the next of these token lists, then again from the first."""

    def __init__(self, play: Play, turns, version=0):
        self.play = play
        self.turns = turns
        self.version = version
        self.asked: list[Request] = []
        self.aborted: list[str] = []

    def run(self, timeout_s=60.0):
        """Play until no episode is left; those played, by sample."""
        end, waiting = time.monotonic() + deadline(timeout_s), []
        while self.play.busy:
            assert time.monotonic() < end, "the episodes did not end"
            self.play.begin_waiting()
            self.play.wait(0.2, None)
            self.play.check_deadlines()
            self.aborted += self.play.to_abort
            self.play.to_abort = []
            asked, self.play.to_sample = self.play.to_sample, []
            self.asked += asked
            waiting += asked
            answered = self.ready(waiting)
            waiting = [r for r in waiting if not any(r is a for a in answered)]
            for request in answered:
                self.play.sampled(self.turn(request))
        done, self.play.done = self.play.done, []
        return sorted(done, key=lambda p: (p.score.group_id, p.score.sample_index))

    def ready(self, waiting):
        """Which of the turns that wait are answered now."""
        return list(waiting)

    def turn(self, request):
        """What an engine makes of a request."""
        count = sum(_episode(r) == _episode(request) for r in self.asked)
        drawn = self.turns[(count - 1) % len(self.turns)]
        return make_trajectory(
            request.group_id,
            request.sample_index,
            turns=[(request.prompt_ids.tolist(), drawn)],
            version=self.version + count - 1,
            k=request.sampling.logprobs_k,
            purpose=request.purpose,
            prompt_id=request.prompt_id,
            timings={"queue_s": 0.0, "generate_s": 1.0},
        )

    def submit(self, requests):
        done = Future()
        done.set_result(None)
        self.asked += requests
        return done
