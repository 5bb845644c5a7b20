"""A model of random weights at a real shape whose answers end once in MEAN tokens.

    python benchmarks/gpu/random_model.py FOLDER SHAPE MEAN

Channel 0 of the hidden states is the same constant at every position, since no layer adds to it,
and the row of the end of sequence reads it: its logit is raised by the same amount everywhere.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

QWEN = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
    },
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, **QWEN},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, **QWEN},
}
CONSTANT, PAD, EOS, FIRST = 3.0, 0, 1, 3  # FIRST: of the words w3, w4, ...


def tokenizer(folder: Path, vocabulary: int) -> None:
    """One token a word: w3, w4, ... and three special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2}
    words |= {f"w{i}": i for i in range(FIRST, vocabulary)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


def random_model(shape: dict[str, int], device: str) -> Any:
    """The model with channel 0 held constant, in bfloat16 on a GPU and float32 on a CPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = Qwen3Config(
        **shape,
        max_position_embeddings=1 << 15,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = CONSTANT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
    return model


def end_once_in(model: Any, mean: float) -> float:
    """Set the end's row so that its chance is 1/mean over random texts; the chance it has then."""
    import torch

    table, vocabulary = model.model.embed_tokens.weight, model.config.vocab_size
    with torch.no_grad():
        ids = torch.randint(FIRST, vocabulary, (8, 128), device=table.device)
        hidden = model.model(input_ids=ids).last_hidden_state[:, 32:].flatten(0, 1)[:256].float()
        logits = hidden @ table.float().T
        own, others = logits[:, EOS].clone(), logits
        others[:, EOS] = -math.inf
        rest = others.logsumexp(-1)
        low, high = -50.0, 50.0
        for _ in range(60):
            middle = (low + high) / 2
            chance = torch.sigmoid(own + middle * hidden[:, 0] - rest).mean().item()
            low, high = (middle, high) if chance < 1 / mean else (low, middle)
        table[EOS, 0] += (low + high) / 2
        probabilities = torch.softmax(model.lm_head(hidden.to(table.dtype)).float(), -1)
    return float(probabilities[:, EOS].mean())


def main() -> None:
    import torch

    folder, shape, mean = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    model = random_model(SHAPES[shape], "cuda" if torch.cuda.is_available() else "cpu")
    chance = end_once_in(model, mean)
    given = model.generation_config
    given.eos_token_id, given.pad_token_id, given.do_sample = EOS, PAD, True
    model.save_pretrained(folder)
    tokenizer(folder, model.config.vocab_size)
    print(f"{shape}: an answer ends once in {1 / chance:.1f} tokens; {mean:g} was asked for")


if __name__ == "__main__":
    main()
