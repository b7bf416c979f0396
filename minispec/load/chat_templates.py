"""Chat templates that go by a name: what `--chat-template chatml` and the like stand for.

Older models publish no template of their own, and SGLang has these formats under these names. Each one here is a Jinja
program written from the published format, with the token that ends a turn in it: a model that was published without
the template may not list this token among those that end an answer.

Read next: `chat.py`, which renders them.
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
_HELPFUL = "{% set default = 'You are a helpful assistant.' %}"
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
    # ChatML with tools in the form of Hermes 2 Pro and Qwen2.5: calls and results stand between tags.
    "hermes": NamedTemplate(
        _HELPFUL + _SPLIT_OFF_SYSTEM + "{{ '<|im_start|>system\\n' + system }}"
        "{% if tools %}{{ '\\n\\n# Tools\\n\\nThese are the functions that you may call, one a line:\\n<tools>' }}"
        "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
        "{{ '\\n</tools>\\n\\nA call is a JSON object between tags, and several calls are several such blocks:\\n"
        "<tool_call>\\n{\"name\": <function name>, \"arguments\": <object of its arguments>}\\n</tool_call>' }}"
        "{% endif %}"
        "{{ '<|im_end|>\\n' }}{% for m in turns %}{% if m.role == 'tool' %}"
        "{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
        "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
        "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
        "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% for call in m.tool_calls or [] %}"
        "{{ '' if loop.first and not m.content else '\\n' }}"
        "{{ '<tool_call>\\n{\"name\": ' + (call.function.name | tojson) }}"
        "{{ ', \"arguments\": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "<|im_end|>",
    ),
    # Llama 3.1's headers with tools as JSON; a call is the whole of a turn, and its result has the role ipython.
    "llama3-json": NamedTemplate(
        _HELPFUL + _SPLIT_OFF_SYSTEM +
        "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' + system }}"
        "{% if tools %}{{ '\\n\\nThese are the functions that you may call:\\n' }}"
        "{% for tool in tools %}{{ '\\n' + (tool | tojson(indent=4)) + '\\n' }}{% endfor %}"
        "{{ '\\nA call is a JSON object and nothing else, without variables: "
        "{\"name\": <function name>, \"parameters\": <object of its arguments>}' }}{% endif %}{{ '<|eot_id|>' }}"
        "{% for m in turns %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
        "{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + m.content }}{% for call in m.tool_calls or [] %}"
        "{{ '' if loop.first else '; ' }}{{ '{\"name\": ' + (call.function.name | tojson) }}"
        "{{ ', \"parameters\": ' + (call.function.arguments | tojson) + '}' }}{% endfor %}"
        "{{ '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
        "<|eot_id|>",
    ),
}  # fmt: skip


WITH_TOOLS = ("hermes", "llama3-json")  # those that show tools to the model

# Names that the machinery of templates uses: a client may not set them.
RESERVED = frozenset(
    """messages tools documents conversation chat_template template add_generation_prompt continue_final_message
    tokenize padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
    raise_exception strftime_now bos_token eos_token unk_token pad_token loop range dict lipsum cycler joiner
    namespace self caller varargs kwargs""".split()
)


def is_template(text: str) -> bool:
    """Return whether a text is itself a Jinja template, and not the name of one."""
    return "{{" in text or "{%" in text
