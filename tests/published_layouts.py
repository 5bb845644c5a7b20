"""Small model folders laid out as published ones are: the files, their names and the settings in
them follow the repositories on the Hugging Face hub; the sizes do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # far from uniform, so that two models answer differently
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TURNS = (
    "{% for message in messages %}"
    "{{ OPEN + message['role'] + MIDDLE + message['content'] + CLOSE }}"
    "{% endfor %}{% if add_generation_prompt %}{{ OPEN + 'assistant' + MIDDLE }}{% endif %}"
)


def _template(opening: str, middle: str, closing: str, before: str = "") -> str:
    parts = {"OPEN": opening, "MIDDLE": middle, "CLOSE": closing}
    text = _TURNS
    for name, value in parts.items():
        text = text.replace(name, json.dumps(value))
    return before + text


CHATML = _template("<|im_start|>", "\n", "<|im_end|>\n")
THINKING = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think>{% endif %}"
LLAMA = _template("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "{{- bos_token }}")
GEMMA = _template("<start_of_turn>", "\n", "<end_of_turn>\n", "{{ bos_token }}")


def _write(folder: Path, name: str, content: Any) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))


def _added(first: int, special: list[str], plain: tuple[str, ...] = ()) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        str(first + i): {"content": text, **flags, "special": text not in plain}
        for i, text in enumerate([*special, *plain])
    }


def _byte_level(folder: Path, added: dict[str, Any], *, bos: str | None, merges_file: bool) -> int:
    """tokenizer.json of a byte-level BPE; returns its size."""
    vocab = {piece: i for i, piece in enumerate([*sorted(ByteLevel.alphabet()), "he", "ll"])}
    post: Any = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    if bos is not None:
        number = next(int(i) for i, token in added.items() if token["content"] == bos)
        first, text = {"id": bos, "type_id": 0}, {"id": "A", "type_id": 0}
        single = [{"SpecialToken": first}, {"Sequence": text}]
        named = {bos: {"id": bos, "ids": [number], "tokens": [bos]}}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        begins = {"type": "TemplateProcessing", "single": single, "pair": pair}
        post = {"type": "Sequence", "processors": [post, {**begins, "special_tokens": named}]}
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    level["trim_offsets"] = True
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False}
    merges = ["h e", "l l"]
    _write(
        folder,
        "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": int(i), **token} for i, token in added.items()],
            "normalizer": {"type": "NFC"} if bos is None else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "post_processor": post,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
            "model": {**model, "byte_fallback": False, "vocab": vocab, "merges": merges},
        },
    )
    if merges_file:
        _write(folder, "vocab.json", vocab)
        _write(folder, "merges.txt", "#version: 0.2\n" + "\n".join(merges) + "\n")
    return len(vocab) + len(added)


def _first() -> int:
    return len(ByteLevel.alphabet()) + 2


def _qwen(folder: Path, *, third: bool) -> dict[str, Any]:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
    plain = ("<tool_call>", "</tool_call>", *(("<think>", "</think>") if third else ()))
    added = _added(_first(), special, plain)
    size = _byte_level(folder, added, bos=None, merges_file=True)
    end, stop = _first(), _first() + 2
    _write(
        folder,
        "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "additional_special_tokens": special[1:],
            "bos_token": None,
            "chat_template": THINKING if third else CHATML,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "model_max_length": 131072,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )
    generation = {"do_sample": True, "eos_token_id": [stop, end], "pad_token_id": end}
    _write(folder, "generation_config.json", {**generation, "temperature": 0.7, "top_k": 20})
    kind = "Qwen3" if third else "Qwen2"
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "attention_dropout": 0.1,
        "bos_token_id": end,
        "eos_token_id": stop,
        "hidden_act": "silu",
        **({"head_dim": 32, "attention_bias": False} if third else {}),
        "max_window_layers": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None if third else 256,
        "tie_word_embeddings": not third,
        "transformers_version": "4.43.1",
        "use_sliding_window": False,
        "vocab_size": size,
    }


def qwen25(folder: Path) -> dict[str, Any]:
    return _qwen(folder, third=False)


def qwen3(folder: Path) -> dict[str, Any]:
    return _qwen(folder, third=True)


def llama3(folder: Path) -> dict[str, Any]:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    special += ["<|eot_id|>", "<|eom_id|>", "<|reserved_special_token_0|>"]
    added = _added(_first(), special)
    size = _byte_level(folder, added, bos=special[0], merges_file=False)
    names = {"bos_token": special[0], "eos_token": "<|eot_id|>"}
    _write(
        folder,
        "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            **names,
            "chat_template": LLAMA,
            "clean_up_tokenization_spaces": True,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": 131072,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    _write(
        folder,
        "special_tokens_map.json",
        {name: {"content": text, **flags} for name, text in names.items()},
    )
    ends = [_first() + 1, _first() + 5, _first() + 4]
    _write(folder, "generation_config.json", {"bos_token_id": _first(), "eos_token_id": ends})
    _write(folder, "original/params.json", {"dim": 64, "n_layers": 2, "rope_theta": 500000.0})
    _write(folder, "original/tokenizer.model", "aGU= 0\n")
    (folder / "original/consolidated.00.pth").write_bytes(b"weights in another format")
    _write(folder, "LICENSE.txt", "terms of the base model\n")
    scaling = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
    original = {"original_max_position_embeddings": 64, "rope_type": "llama3"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _first(),
        "eos_token_id": ends,
        "head_dim": 32,
        "hidden_act": "silu",
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {**scaling, **original},
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.45.0.dev0",
        "vocab_size": size,
    }


def smollm2(folder: Path) -> dict[str, Any]:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"]
    added = _added(_first(), special)
    size = _byte_level(folder, added, bos=None, merges_file=True)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    names |= {"unk_token": "<|endoftext|>"}
    _write(
        folder,
        "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            **names,
            "chat_template": CHATML,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 8192,
            "tokenizer_class": "GPT2Tokenizer",
            "vocab_size": size,
        },
    )
    _write(
        folder,
        "special_tokens_map.json",
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], **names},
    )
    ids = {"bos_token_id": _first() + 1, "eos_token_id": _first() + 2}
    _write(folder, "generation_config.json", {"_from_model_config": True, **ids})
    _write(folder, "runs/Jul01/events.txt", "a log that the authors left\n")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **ids,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "is_llama_config": True,
        "mlp_bias": False,
        "pad_token_id": _first() + 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3",
        "vocab_size": size,
    }


def gemma3(folder: Path) -> dict[str, Any]:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    added = _added(0, special)
    pieces = [*special, *(f"<0x{i:02X}>" for i in range(256)), "\u2581"]
    pieces += [*map(chr, range(97, 123)), "\u2581a", "he"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    single = [
        {"SpecialToken": {"id": "<bos>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    _write(
        folder,
        "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": int(i), **token} for i, token in added.items()],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "post_processor": {
                "type": "TemplateProcessing",
                "single": single,
                "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
            },
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": "<unk>",
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [["\u2581", "a"], ["h", "e"]],
            },
        },
    )
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    _write(
        folder,
        "tokenizer_config.json",
        {
            "add_bos_token": True,
            "add_eos_token": False,
            "added_tokens_decoder": added,
            **names,
            "clean_up_tokenization_spaces": False,
            "extra_special_tokens": {"boi_token": "<start_of_turn>"},
            "model_max_length": 1000000000000000019884624838656,
            "sp_model_kwargs": None,
            "spaces_between_special_tokens": False,
            "tokenizer_class": "GemmaTokenizerFast",
            "use_default_system_prompt": False,
        },
    )
    _write(folder, "special_tokens_map.json", names)
    _write(folder, "added_tokens.json", {"<end_of_turn>": 6})
    _write(folder, "chat_template.jinja", GEMMA)
    _write(folder, "additional_chat_templates/tool_use.jinja", GEMMA + "{{ tools }}")
    _write(folder, "preprocessor_config.json", {"image_processor_type": "Gemma3ImageProcessor"})
    _write(folder, "processor_config.json", {"processor_class": "Gemma3Processor"})
    generation = {"bos_token_id": 2, "eos_token_id": [1, 6], "pad_token_id": 0}
    _write(folder, "generation_config.json", {"cache_implementation": "hybrid", **generation})
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": [1, 6],
        "final_logit_softcapping": None,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        "query_pre_attn_scalar": 32,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 64,
        "sliding_window_pattern": 2,
        "transformers_version": "4.50.0.dev0",
        "vocab_size": len(vocab),
    }


def llama2(folder: Path) -> dict[str, Any]:
    """With a tokenizer of sentencepiece alone, as folders before tokenizer.json have."""
    import sentencepiece

    (folder / "words").write_text("hello world\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "words"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        byte_fallback=True,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "words").unlink()
    (folder / "tokenizer.vocab").unlink()
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    _write(
        folder,
        "tokenizer_config.json",
        {
            "add_bos_token": True,
            "add_eos_token": False,
            **{n: {"__type": "AddedToken", "content": t, **flags} for n, t in names.items()},
            "chat_template": _template("[", "] ", "</s>", "{{ bos_token }}"),
            "clean_up_tokenization_spaces": False,
            "legacy": False,
            "model_max_length": 4096,
            "pad_token": None,
            "sp_model_kwargs": {},
            "tokenizer_class": "LlamaTokenizer",
        },
    )
    _write(folder, "special_tokens_map.json", names)
    ids = {"bos_token_id": model.bos_id(), "eos_token_id": model.eos_id()}
    _write(folder, "generation_config.json", ids)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **ids,
        "hidden_act": "silu",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.31.0",
        "vocab_size": model.vocab_size(),
    }


def tuned_qwen(folder: Path) -> dict[str, Any]:
    """Qwen2.5 as somebody has tuned it: a token added, the template in a file, rows of the
    embedding that no token has, code and notes in folders."""
    config = _qwen(folder, third=False)
    number = config["vocab_size"]
    added = _added(number, ["<|mine|>"])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    _write(folder, "chat_template.jinja", settings.pop("chat_template"))
    settings["added_tokens_decoder"] |= added
    settings["additional_special_tokens"].append("<|mine|>")
    _write(folder, "tokenizer_config.json", settings)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": number, **added[str(number)]})
    _write(folder, "tokenizer.json", tokenizer)
    _write(folder, "added_tokens.json", {"<|mine|>": number})
    _write(folder, "eval/2024/results.json", {"score": 1})
    _write(folder, "modeling_own.py", "x = 1\n")
    return config | {"vocab_size": 512}


LAYOUTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "qwen2.5": qwen25,
    "qwen3": qwen3,
    "llama3": llama3,
    "gemma3": gemma3,
    "smollm2": smollm2,
    "llama2": llama2,
    "tuned_qwen": tuned_qwen,
}


def build_layout(name: str, folder: Path) -> Path:
    """Write the layout `name` with random bfloat16 weights in two shards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    _write(folder, "config.json", {**_SHAPE, **LAYOUTS[name](folder)})
    _write(folder, "README.md", "# the base model's card\n")
    _write(folder, ".gitattributes", "*.safetensors filter=lfs\n")
    _write(folder, ".cache/huggingface/CACHEDIR.TAG", "of the download\n")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = AutoConfig.from_pretrained(folder)
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {n: w.detach().contiguous() for n, w in lm.named_parameters()}
    names, shards = sorted(weights), ("model-00001-of-00002", "model-00002-of-00002")
    where = {n: f"{shards[i % 2]}.safetensors" for i, n in enumerate(names)}
    for file in set(where.values()):
        own = {n: weights[n] for n in names if where[n] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    size = sum(w.nbytes for w in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    _write(folder, "model.safetensors.index.json", index)
    return folder
