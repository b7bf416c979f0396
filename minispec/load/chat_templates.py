"""Chat templates that go by a name: what `--chat-template chatml` and the like stand for.

Older models publish no template of their own, and SGLang has these formats under these names. Each one here is a Jinja
program written from the published format, with the token that ends a turn in it: a model that was published without
the template may not list this token among those that end an answer.

Read next: `tokenizer.py`, which renders them.
"""

from __future__ import annotations

from typing import NamedTuple


class NamedTemplate(NamedTuple):
    """A Jinja template, and the token that ends a turn."""

    source: str
    end: str


# Takes the system message, which may only come first, off the turns, for formats that give it no turn of its own.
_SPLIT_OFF_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = default %}{% set turns = messages %}{% endif %}"
)
_OTHER_ROLE = "{% else %}{{ raise_exception('this template has no place for the role ' + m.role) }}{% endif %}"

NAMED = {
    # OpenAI's ChatML with the system message that SGLang puts in where none is given.
    "chatml": NamedTemplate(
        "{% if messages[0].role != 'system' %}"
        "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "<|im_end|>",
    ),
    # Meta's generation.py of Llama 2: the system message stands inside the first user turn.
    "llama-2": NamedTemplate(
        "{% set default = '' %}" + _SPLIT_OFF_SYSTEM + "{{ bos_token }}{% for m in turns %}"
        "{% if m.role == 'user' %}{{ ('' if loop.first else '<s>') + '[INST] ' }}"
        "{% if loop.first and system %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}"
        "{{ m.content + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' </s>' }}" + _OTHER_ROLE + "{% endfor %}",
        "</s>",
    ),
    # Meta's Llama 3: a header before each turn; contents are stripped.
    "llama-3-instruct": NamedTemplate(
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
        "{{ (m.content | trim) + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
        "<|eot_id|>",
    ),
    # LMSYS's Vicuna 1.1 and later, the targets of the first EAGLE heads.
    "vicuna_v1.1": NamedTemplate(
        "{% set default = 'A chat between a curious user and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the user\\'s questions.' %}" + _SPLIT_OFF_SYSTEM +
        "{{ bos_token }}{{ system + ' ' }}{% for m in turns %}"
        "{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
        "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + '</s>' }}" + _OTHER_ROLE + "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
        "</s>",
    ),
}  # fmt: skip


def is_template(text: str) -> bool:
    """Return whether a text is itself a Jinja template, and not the name of one."""
    return "{{" in text or "{%" in text
