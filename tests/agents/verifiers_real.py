"""A taskset of verifiers 0.4, and a harness that calls the model from its own process; read by the
Python of an environment that has verifiers."""

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Counting", "Direct"]


class Number(vf.TaskData):
    answer: str


class Count(vf.Task[Number]):
    @vf.reward
    async def counted(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Counting(vf.Taskset[Count, vf.TasksetConfig]):
    def load(self):
        for n in range(5):
            data = Number(prompt=f"{n}+1=", answer=str(n + 1))
            yield Count(data, self.config.task)


class Direct(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *rest):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")
