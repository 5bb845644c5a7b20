"""Settings of the starting model. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rlcore.errors import UserError
from rlcore.spec import Fixed, Spec, Unread, refuse, setting


class FreshModelSpec(Spec):
    """A small randomly initialised Qwen3 model; its tokenizer has the task's alphabet."""

    hidden_size: int = setting(128, "width", gt=0)
    layers: int = setting(4, "transformer blocks", gt=0)
    heads: int = setting(4, "query heads", gt=0)
    kv_heads: int = setting(2, "key and value heads", gt=0)
    head_dim: int = setting(32, "width of a head", gt=0)
    intermediate_size: int = setting(384, "width of the MLP", gt=0)
    vocab_size: int | None = setting(None, "padded up to this; null: what the alphabet needs", gt=0)
    tie_embeddings: bool = setting(True, "LM head shares the embedding")

    def check(self, key: str) -> None:
        refuse(
            self.heads % self.kv_heads != 0,
            f"{key}.heads={self.heads} must be a multiple of {key}.kv_heads={self.kv_heads}.",
        )
        refuse(
            self.head_dim % 2 != 0,
            f"{key}.head_dim={self.head_dim} must be even: rotary positions turn pairs.",
        )


class WarmUpSpec(Spec):
    """Supervised warm-up on the task's worked answers; runs of equal settings reuse the result."""

    fixed: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("steps", "batch_size", "lr", "precision", "lr_warmup_steps", "lr_schedule"), Fixed.MODEL
    )

    steps: int = setting(220, "supervised optimizer steps", gt=0)
    batch_size: int = setting(128, "worked answers a step", gt=0)
    lr: float = setting(1e-3, "peak learning rate", gt=0)
    lr_warmup_steps: int = setting(20, "steps of linear warm-up", ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = setting("constant", "after the warm-up")
    precision: Literal["float32", "float64"] = setting(
        "float32",
        "float64: computed in float64 and rounded at its end, to the same model on every machine; "
        "in one process, on CPU",
    )
    cache_dir: str = setting(
        "cache/warmup", "folder where warmed-up models are kept and reused", names="path"
    )

    def check(self, key: str) -> None:
        refuse(
            self.lr_schedule != "constant" and self.lr_warmup_steps >= self.steps,
            f"{key}.lr_warmup_steps={self.lr_warmup_steps} leaves none of {key}.steps={self.steps} "
            f"to {key}.lr_schedule={self.lr_schedule}: set {key}.lr_warmup_steps={self.steps - 1} "
            f"or less, or {key}.lr_schedule=constant.",
        )


class DiffusionSpec(Spec):
    """A masked-diffusion model, and how its responses are denoised (papers/ais.txt, C.2)."""

    block: int = setting(
        32, "a response is denoised in blocks, one after the other", unit="tokens", gt=0
    )
    tokens_per_step: int = setting(
        2, "most confident tokens of a block that a denoising step unmasks", gt=0
    )
    prompt_masking: float = setting(
        0.15, "share of the prompt that is hidden in the estimate of log-probs", ge=0, lt=1
    )


# what `models.text.rendered` gives a template itself
RENDERED = {
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
}


class TemplateSpec(Spec):
    """How conversations become text."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("chat_template_args", "tool_parser"),
            lambda spec: spec.chat_template == "off",
            "chat_template=off reads no template",
        ),
    )
    fixed: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("chat_template", "chat_template_args", "tool_parser", "system_prompt", "control_tokens"),
        Fixed.ASKED,
    )

    chat_template: str = setting(
        "auto",
        "auto: the tokenizer's, if it has one; off: none; else a file with your Jinja template",
        names="template",
    )
    chat_template_args: dict[str, Any] = setting(
        default_factory=dict,
        meaning="what the chat template is given besides, such as {enable_thinking: false}",
    )
    tool_parser: str = setting(
        "auto",
        "the form of tool calls: auto, as the chat template shows it, hermes, qwen3_xml, glm45, "
        "llama3_json, mistral, lfm2, or the name of a tool parser of vLLM",
    )
    system_prompt: str | None = setting(None, "put before every question")
    control_tokens: Literal["text", "tokens"] = setting(
        "text", "special tokens that rows and tools' answers spell: text, or these tokens"
    )

    def check(self, key: str) -> None:
        taken = sorted(RENDERED & set(self.chat_template_args))
        refuse(
            bool(taken),
            f"{key}.chat_template_args={self.chat_template_args} sets {', '.join(taken)}, which "
            "rlcore gives the template itself: leave it out.",
        )


class ModelSpec(TemplateSpec):
    """The starting policy: a model folder, or a fresh small model."""

    fixed: ClassVar[Mapping[str, str]] = {
        "path": Fixed.MODEL,
        "fresh": Fixed.MODEL,
        "diffusion": Fixed.SAMPLED,
    }

    path: str | None = setting(None, "Hugging Face folder of the starting policy", names="model")
    fresh: FreshModelSpec | None = setting(None, "made when path is null")
    diffusion: DiffusionSpec | None = setting(
        None, "the model is a masked-diffusion one, of LLaDA's form; null: it is causal"
    )
    max_len: int = setting(
        512, "longest episode that an engine or learner must hold", unit="tokens", gt=1
    )
    gpu_check: str | None = setting(
        None,
        "mixtures of experts on GPUs: file of rows in which benchmarks/gpu/check.py has shown that "
        "this vLLM's engines compute and update them right (parts experts, experts graphs)",
    )
    trust_remote_code: Literal[False] = setting(False, "code from model folders is never run")
    warmup: WarmUpSpec | None = setting(None, "supervised warm-up of a fresh model")

    def check(self, key: str) -> None:
        TemplateSpec.check(self, key)
        if self.path is None and self.fresh is None:
            raise UserError(
                f"{key}.path=null needs {key}.fresh: choose model=tiny or give {key}.path=FOLDER."
            )
        fresh = self.fresh if self.path is None and self.diffusion is not None else None
        warmed = self.warmup if fresh is not None else None
        refuse(
            warmed is not None and warmed.precision == "float64",
            f"{key}.warmup.precision=float64 cannot be combined with {key}.diffusion: only causal "
            "models are warmed up in float64, so use float32.",
        )
        refuse(
            fresh is not None and fresh.heads * fresh.head_dim != fresh.hidden_size,
            f"{key}.fresh.hidden_size={fresh and fresh.hidden_size} is not {key}.fresh.heads * "
            f"{key}.fresh.head_dim, as it must be with {key}.diffusion.",
        )
