"""Prints the log-probs that a plain vLLM gives a prompt: `load_compressed.py FOLDER IDS`."""

import json
import os
import sys

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1"
)


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    ids = json.loads(sys.argv[2])
    options = {"dtype": "bfloat16", "enforce_eager": True, "skip_tokenizer_init": True}
    llm = LLM(sys.argv[1], max_model_len=64, **options)
    asked = SamplingParams(prompt_logprobs=1, max_tokens=1, detokenize=False)
    [found] = llm.generate([TokensPrompt(prompt_token_ids=ids)], asked)
    logp = [at[t].logprob for at, t in zip(found.prompt_logprobs[1:], ids[1:])]
    print(f"found {json.dumps(logp)}")


if __name__ == "__main__":
    main()
