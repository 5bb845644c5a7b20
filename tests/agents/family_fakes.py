"""Chat templates in the forms of families of models, each with what its family is known for, and
a tokenizer that spells their special tokens."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END, START = "<|im_end|>", "<|im_start|>"
MISTRAL_END = "</s>"
SPECIAL = (
    *(
        "<s>",
        MISTRAL_END,
        START,
        END,
        "<|eot_id|>",
        "<|python_tag|>",
        "<|user|>",
        "<|observation|>",
    ),
    *("<|assistant|>", "<|system|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<|tool_list_start|>", "<|tool_list_end|>", "<|end|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start_header_id|>", "<|end_header_id|>", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
)
MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>")  # not special

_OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TOOLS = "{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
_ANSWER = (
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
)
_PLAIN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"

# As Qwen3: JSON in tags; an earlier thought is dropped; a developer is, too.
QWEN = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    f'{_TOOLS}<tool_call>{{{{ \'{{"name": ..., "arguments": ...}}\' }}}}</tool_call><|im_end|>\n'
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "<|im_end|>\n"
    "{% endif %}{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}" + _PLAIN + "{% elif "
    "m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    + _ANSWER
    + "{% endif %}{% endfor %}"
    + _OPENS
)
_XML_CALL = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}"
)
# As Qwen3.5 and Nemotron 3: XML, the prompt opens a thought, one system message at the front.
XML = (
    "{% if tools %}<|im_start|>system\n" + _TOOLS + "{{ messages[0].content if messages[0].role == "
    "'system' }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('System message must be "
    "first') }}{% elif not tools %}"
    + _PLAIN
    + "{% endif %}{% elif m.role == 'user' %}"
    + _PLAIN
    + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if '</think>' in m.content %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1] | trim }}\n</think>\n\n"
    "{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}"
    + _XML_CALL
    + "<|im_end|>\n"
    + _ANSWER
    + "{% else %}{{ raise_exception('Unexpected role') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
GLM = (
    "{% if tools %}<|system|>\n" + _TOOLS + "{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role in ['user', 'system'] %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As Llama 3.1: a bare JSON object, one call a turn, answers from `ipython`.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{% if tools and loop.first %}" + _TOOLS + '"parameters": dictionary of arguments\n'
    "{% endif %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As Mistral's: roles alternate, calls are a field, and ids have nine characters.
MISTRAL = (
    "{{ bos_token }}{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if first else messages %}{% set ns = namespace(i=0) %}"
    "{% for m in rest %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{% if loop.last and tools %}[AVAILABLE_TOOLS]" + _TOOLS + "[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ first + '\n\n' if first and loop.first }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    "{% if c.id | length != 9 %}{{ raise_exception('ids of calls have 9 characters') }}{% endif %}"
    '"id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% else %}{{ raise_exception('Only user, assistant and tool') }}{% endif %}"
    "{% endfor %}"
)
# As LFM2: calls are a Python list between special tokens, and no field is read.
LFM2 = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n<|tool_list_start|>["
    + _TOOLS
    + "]<|tool_list_end|><|im_end|>\n{% endif %}{% for m in messages %}"
    + _PLAIN
    + "{% endfor %}"
    + _OPENS
)
# As Phi-3: answers of tools are dropped silently.
PHI3 = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|{{ m.role }}|>\n"
    "{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As Gemma 3: user and model alternate strictly; a system message leads the first of user.
GEMMA = (
    "{{ bos_token }}{% set leads = messages[0].role == 'system' %}"
    "{% set s = messages[0].content + '\n\n' if leads else '' %}"
    "{% for m in (messages[1:] if s else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ s if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
UNKNOWN = QWEN.replace("tool_call>", "call>")
# family -> (template, the special token that ends a turn)
TEMPLATES = {
    "hermes": (QWEN, END),
    "qwen3_xml": (XML, END),
    "glm45": (GLM, "<|observation|>"),
    "llama3_json": (LLAMA, "<|eot_id|>"),
    "mistral": (MISTRAL, MISTRAL_END),
    "lfm2": (LFM2, END),
}


@functools.cache
def _core():
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return core.to_str()


def tokenizer_with(template):
    """A byte-level tokenizer with special tokens and markup of many families."""
    core = Tokenizer.from_str(_core())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def add(a: int, note: str = ""):
    """Add to what was."""
