"""vLLM as a rollout engine. Everything that imports vLLM is in this package."""

import os

from rlcore.lazy import defer

# keys of SamplingParams.extra_args, by which a request reaches the sparse rule
PROMPT_LEN = "prompt_len"
RULE = "page_rule"
# vLLM reads these when it is imported, so they are set here, before any module of this package
# imports it. An engine cannot work otherwise, whatever the user has set.
_NEEDED = {
    # The engine runs in the actor's own process: weights are loaded between two of its steps.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # `engine.py` sets it for each engine, as its actor asks.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # A fork of a process that has threads can hang.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Nothing is looked up or reported outside the machine.
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_USUAL = {
    # The ranks of an engine share the cores that the actor has.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ.update(_NEEDED)
for _name, _value in _USUAL.items():
    os.environ.setdefault(_name, _value)

# Imported by vLLM and used by no engine of a run: resampling of sounds, losses of object detection
# (by transformers), and parsers of reasoning, with OpenAI's types and a web server.
defer("scipy.signal")
defer("scipy.optimize", names=("linear_sum_assignment",))
defer("vllm.reasoning", names=("ReasoningParserManager",))
defer("vllm.parser.engine.adapters", names=("ParserEngineReasoningAdapter",))
