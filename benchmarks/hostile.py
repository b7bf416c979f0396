"""Bodies that broke other servers, or were made to: each is refused with a 4xx before the model is asked.

The classes are those of public faults of inference servers: wrong types and shapes, numbers out of range, ids outside
the vocabulary, nesting, text that is no Unicode, sizes and counts that cost memory or time before anybody looks at
them, grammars that cannot be compiled or take for ever, and fields that would bring code, files or addresses.
"""

from __future__ import annotations

import json
from typing import Any

GROWING = "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"'
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**more: Any) -> dict[str, Any]:
    """Return a chat's body, good but for what is given."""
    return {"messages": [{"role": "user", "content": "Tell me something"}], "max_tokens": 40, **more}


def nested(levels: int, what: Any = 1) -> Any:
    """Return a list within a list, and so on."""
    for _ in range(levels):
        what = [what]
    return what


def message(**more: Any) -> dict[str, Any]:
    """Return a chat's body whose one message has these fields."""
    return chat(messages=[{"role": "user", "content": "a", **more}])


def schema_of(schema: Any) -> dict[str, Any]:
    """Return a chat's body that asks for JSON of a schema."""
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})


def native(**params: Any) -> dict[str, Any]:
    """Return a native body with these sampling parameters."""
    return {"text": "a", "sampling_params": params}


RAW = [
    b"", b"[]", b"{", b"null", b"1", b'"a"', b"true", b"\xff\xfe", b"\xef\xbb\xbf{}", b"{}{}", b"{'a': 1}",
    b'{"a": 1,}',
    b'{"a":' + b"[" * 100_000, b'{"a":' * 100_000, b'{"messages": 1e999}', b'{"messages": -1e999}',
    b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"temperature": -Infinity}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
    b'{"\\ud800": 1}', b'{"seed": ' + b"9" * 5000 + b"}", b'{"seed": 18446744073709551616}',
    b'{"messages": "\x00"}', b'{"messages": [], "messages": []}', b"model=default&prompt=a",
    json.dumps({"a": nested(80)}).encode(), b'{"prompt": ' + b'"' * 3 + b"}",
]  # fmt: skip

CHATS = [chat(**wish) for wish in (
    # counts and sizes
    {"n": 10**6}, {"n": 0}, {"n": -1}, {"n": 17}, {"best_of": 10**6}, {"best_of": 2}, {"stop": ["x"] * 1000},
    {"stop": [""]}, {"stop": "x" * 10**6}, {"stop": [1]}, {"tools": [FUNCTION] * 129}, {"rid": "r" * 1000},
    {"rid": ["a", "b"]}, {"cache_salt": "s" * 10**6}, {"extra_key": "s" * 10**6}, {"cache_salt": ""},
    {"chat_template_kwargs": {f"a{i}": 1 for i in range(100)}}, {"chat_template_kwargs": {"a": "x" * 10**5}},
    {"reasoning_effort": "x" * 10**5}, {"prediction": {"type": "content", "content": "x" * 10**6}},
    {"tools": [{**FUNCTION, "function": {"name": "f", "description": "x" * 10**6}}]}, {"messages": []},
    {"messages": [{"role": "user", "content": "a"}] * 2**15},
    {"messages": [{"role": "user", "content": "long " * 50_000}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2**11}]},
    # numbers
    {"temperature": -1}, {"temperature": "NaN"}, {"temperature": 1e30}, {"temperature": True}, {"top_p": 2},
    {"top_p": 0}, {"top_p": -0.5}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": 1.5}, {"min_p": -1},
    {"frequency_penalty": 3}, {"presence_penalty": -3}, {"repetition_penalty": 0}, {"repetition_penalty": 1e9},
    {"max_tokens": -5}, {"max_tokens": 10**12}, {"max_tokens": 2**63}, {"max_tokens": "5"}, {"max_tokens": 1.5},
    {"max_completion_tokens": 10**12}, {"min_tokens": 50}, {"min_tokens": -1}, {"seed": 2**63}, {"seed": "a"},
    {"seed": 2**70}, {"stream_interval": 0}, {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2},
    # ids and logprobs
    {"top_logprobs": 10**6, "logprobs": True}, {"top_logprobs": -1, "logprobs": True}, {"top_logprobs": 5},
    {"prompt_logprobs": -1}, {"logit_bias": {"49152": 1}}, {"logit_bias": {"1": 1e30}}, {"logit_bias": {"-1": 1}},
    {"logit_bias": {"a": 1}}, {"logit_bias": {"1": "x"}}, {"logit_bias": [1]}, {"stop_token_ids": [10**9]},
    {"stop_token_ids": [-1]}, {"stop_token_ids": ["1"]}, {"allowed_token_ids": []}, {"allowed_token_ids": [10**9]},
    # what would bring code, or what is not there
    {"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"tokenize": True}}, {"chat_template_kwargs": {"self": 1}},
    {"chat_template_kwargs": {"__class__": 1}}, {"custom_logit_processor": "x"}, {"lora_path": "/etc/passwd"},
    {"logits_processors": ["os.system"]}, {"use_beam_search": True}, {"stream_options": 7}, {"stream": "yes"},
    # grammars and tools
    {"response_format": {"type": "json_schema", "json_schema": {}}}, {"response_format": {"type": "x"}},
    {"response_format": "json"}, {"regex": "(a+"}, {"regex": "(" * 10**4},
    {"regex": "x" * 2**17}, {"ebnf": "no grammar"}, {"ebnf": GROWING}, {"json_schema": "{"},
    {"json_schema": json.dumps(nested(50)) * 2}, {"regex": "a", "ebnf": "b"}, {"structural_tag": "x"},
    {"structured_outputs": {}}, {"structured_outputs": []}, {"structured_outputs": {"json": {}, "regex": "a"}},
    {"structured_outputs": {"grammar": GROWING}}, {"structured_outputs": {"choice": [{}]}}, {"guided_choice": "a"},
    {"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, {"guided_regex": "a", "guided_grammar": "b"},
    {"guided_grammar": "\n" * 2**16}, {"guided_json": {"allOf": [{"$ref": "#x"}, {"properties": {}}]}},
    {"tools": [{"type": "function"}]}, {"tools": [FUNCTION, FUNCTION]}, {"tools": "f"},
    {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}},
)] + [schema_of(schema) for schema in (
    1, "x", [], {"not": {}}, {"multipleOf": 10**9}, {"type": "nothing"}, {"pattern": "(", "type": "string"},
    {"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1/x"},
)] + [message(**wish) for wish in (
    {"role": "root"}, {"role": None}, {"role": ["user"]}, {"content": None}, {"content": 5}, {"content": [[]]},
    {"content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]},
    {"content": [{"type": "text"}]}, {"content": {"text": "a"}}, {"tool_calls": [{"function": {}}]}, {"name": 5},
)] + [{"messages": "hi"}, {"messages": [[]]}, {"messages": [{"role": "user"}]}, {}]  # fmt: skip

COMPLETIONS = [{"prompt": prompt} for prompt in (
    "", [], [[]], [-1], [49152], [2**63], ["a", [1]], "long " * 2000, "x" * 10**6, ["a"] * 1000, None, {}, [1.5],
    [True], [[1], "a"], [["a"]], [5] * 1024, [5] * 10**5, [[5]] * 1000, ["a", ""], 7,
)] + [{"prompt": "a", **wish} for wish in (
    {"suffix": "b"}, {"logprobs": 10**6}, {"logprobs": -1}, {"logprobs": True}, {"prompt_logprobs": -1}, {"echo": 1},
    {"n": 16, "best_of": 15}, {"prompt_embeds": "AAAA"}, {"max_tokens": 10**12}, {"model": 5},
)]  # fmt: skip

GENERATES = [
    {}, {"text": "a", "input_ids": [1]}, {"input_ids": [10**7]}, {"input_ids": [1.5]}, {"input_ids": [-1]},
    {"input_ids": []}, {"input_ids": [[]]}, {"text": 3}, {"text": ""}, {"text": []}, {"text": "a", "rid": ""},
    {"input_ids": [5] * 1024}, {"text": "a", "input_embeds": [[0.0]]},
    {"text": "a", "image_data": "file:///etc/passwd"}, {"text": "a", "lora_path": "x"},
    {"text": "a", "return_hidden_states": True}, {"text": "a", "session_params": {"id": 1}},
    {"text": ["a", "b"], "sampling_params": [{}]}, {"text": "a", "sampling_params": "x"},
    {"text": "a", "return_logprob": True, "top_logprobs_num": 10**6},
    {"text": "a", "return_logprob": True, "logprob_start_len": 10**6},
    {"text": "a", "return_logprob": True, "token_ids_logprob": [10**9]},
    {"text": "a", "return_logprob": True, "token_ids_logprob": list(range(1000))},
    native(temprature=1), native(regex="(a+"), native(max_new_tokens=10**12), native(n=10**6),
    native(max_new_tokens=-1),
    native(n=0), native(stop_regex="a"), native(custom_params={"a": 1}), native(temperature=float(10**30)),
    native(json_schema="{"), native(min_new_tokens=9, max_new_tokens=3), native(sampling_seed=2**63), native(top_k="5"),
]  # fmt: skip

TOOL = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}

RESPONSES = [{"input": given} for given in (
    None, 5, {}, [5], [[]], [None], "long " * 50_000, "x" * 10**6, [{}], [{"role": "user"}], [CALL] * 2**15,
    [{"role": "root", "content": "a"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}],
    [{"role": "user", "content": "a"}] * 2**15, [{"type": "item_reference", "id": "msg_1"}], [{"type": ["message"]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": "http://127.0.0.1/x"}]}],
    [{"type": "call", "id": "ws_1"}], [{"type": "reasoning", "summary": 5}], [{**CALL, "type": "custom_tool_call"}],
    [{**CALL, "arguments": {}}], [{**CALL, "name": ""}], [{**CALL, "namespace": 5}],
    [{"type": "additional_tools", "tools": [{"type": "function"}]}],
    [{"type": "function_call_output", "call_id": "c"}], [{"type": "function_call_output", "call_id": 5, "output": "a"}],
    [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_audio"}]}],
)] + [{"input": "a", **wish} for wish in (
    {"store": True}, {"previous_response_id": "resp_1"}, {"conversation": {"id": "conv_1"}}, {"background": True},
    {"prompt": {"id": "pmpt_1"}}, {"instructions": 5}, {"instructions": "x" * 10**6}, {"max_output_tokens": -1},
    {"max_output_tokens": 10**12}, {"max_output_tokens": 1.5}, {"temperature": -1}, {"top_p": 2}, {"n": 2},
    {"top_logprobs": 5}, {"include": ["code_interpreter_call.outputs"]}, {"include": "reasoning.encrypted_content"},
    {"tools": [TOOL] * 129}, {"tools": [TOOL, TOOL]}, {"tools": [{"type": "x"}], "tool_choice": "required"},
    {"tools": [{**TOOL, "description": "x" * 10**6}]}, {"tools": [FUNCTION]}, {"tools": [TOOL], "tool_choice": "f"},
    {"tool_choice": "required"}, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
    {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}},
    {"tools": [TOOL], "tool_choice": {"type": ["function"]}}, {"text": "a"}, {"text": {"format": "json"}},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "http://127.0.0.1/x"}}}},
    {"text": {"format": {"type": "json_schema", "name": "n"}}}, {"text": {"verbosity": 1}},
    {"text": {"format": {"type": "json_object"}}, "ebnf": "a"}, {"reasoning": "high"}, {"reasoning": {"effort": 5}},
    {"reasoning": {"effort": "x" * 10**5}}, {"metadata": {"a": "x" * 10**6}},
    {"metadata": {str(i): "" for i in range(99)}},
    {"metadata": "a"}, {"stream": 1}, {"truncation": "all"}, {"service_tier": "priority"}, {"rid": ""},
    {"chat_template_kwargs": {"tools": 1}},
)]  # fmt: skip

USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
GIVEN = {"type": "tool_result", "tool_use_id": "t", "content": "a"}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}

MESSAGES = [{"max_tokens": 9, "messages": given} for given in (
    None, [], "a", [5], [{}], [{"role": "user"}], [{"role": "tool", "content": "a"}], [{"role": "user"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}], [{"role": "user", "content": [{}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": ["text"]}]}],
    [{"role": "user", "content": [{"type": "nothing"}]}], [{"role": "user", "content": [USE]}],
    [{"role": "assistant", "content": [GIVEN]}], [{"role": "assistant", "content": [{**USE, "name": ""}]}],
    [{"role": "assistant", "content": [{**USE, "id": 5}]}], [{"role": "user", "content": [{**GIVEN, "content": 5}]}],
    [{"role": "user", "content": "a"}] * 2**15, [{"role": "user", "content": "long " * 50_000}],
)] + [{"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], **wish} for wish in (
    {"max_tokens": None}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": 10**12}, {"temperature": -1},
    {"top_p": 0}, {"top_k": -5}, {"stop_sequences": "a"}, {"stop_sequences": [""]}, {"system": 5},
    {"system": [{"type": "image"}]}, {"stream": "yes"}, {"tools": [ANTHROPIC_TOOL] * 2}, {"tools": [{"name": "f"}]},
    {"tools": [{**ANTHROPIC_TOOL, "input_schema": "x"}]}, {"tools": [ANTHROPIC_TOOL] * 129}, {"tool_choice": "auto"},
    {"tool_choice": {"type": "any"}}, {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool"}},
    {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "g"}}, {"thinking": {"type": "deep"}},
    {"thinking": True}, {"output_format": {"type": "json_schema", "schema": {"not": {}}}},
    {"output_config": {"format": {"type": "json"}}}, {"mcp_servers": [{"url": "http://127.0.0.1/"}]},
    {"output_format": {"type": "json_schema", "schema": {}}, "regex": "a"}, {"service_tier": "priority"},
)]  # fmt: skip

HOSTILE: list[tuple[str, Any]] = [
    *(("/v1/chat/completions", body) for body in [*RAW, *CHATS]),
    *(("/v1/responses", body) for body in [*RAW[:8], *RESPONSES]),
    *(("/v1/messages", body) for body in [*RAW[:8], *MESSAGES]),
    *(("/v1/messages/count_tokens", body) for body in MESSAGES[:5]),
    *(("/v1/completions", body) for body in COMPLETIONS), *(("/generate", body) for body in GENERATES),
    *(("/tokenize", body) for body in ({}, {"prompt": 5}, {"prompt": "x" * 10**6}, {"messages": []},
                                       {"prompt": "a", "messages": [{"role": "user", "content": "a"}]})),
    *(("/detokenize", {"tokens": tokens}) for tokens in ([-1], [10**9], [[True]], "a", ["1"])),
    *(("/abort_request", body) for body in ({"rid": ""}, {}, {"rid": 5}, {"abort_all": "yes"})),
]  # fmt: skip
