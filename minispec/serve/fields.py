"""The fields a client may send, as tables: each acts, is refused by name where it asks for something, or is ignored.

A class below is the body of an endpoint and a line in it is a field that acts. Every other field that OpenAI, SGLang or
vLLM document stands in `REFUSED` or `IGNORED`, with the reason; a line in an endpoint's class takes precedence. Names
in none of these are ignored with a debug line, because clients send many.

Ranges are checked where `SamplingParams` is made, so that `LLM` has them too. Types are strict (no 1 for true, no "1"
for 1), lists end at their first error (a million wrong ids are one error), and null means the same as no field.

Read next: `parse.py`, which makes requests of what is read here; `openapi.py`, which describes it.
"""

from __future__ import annotations

import functools
import json
import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from minispec.request import RequestError, short

log = logging.getLogger(__name__)

MAX_BATCH = 128  # prompts in one HTTP request
MAX_CHOICES = 16  # for one prompt
MAX_MESSAGES = 2**14  # in one chat; each costs a template some tokens
MAX_PARTS = 2**10  # of a message
MAX_RID = 256  # characters
MAX_TOOLS = 128  # offered in a request, or called in a message

TEMPLATE = "handed to the chat template"
VARIABLES = "handed to the chat template: at most 16 plain values"
CHOICE = ("none hides the tools; auto, the default, leaves it to the model; required, or a function by name, "
          "constrains the answer to calls; of allowed_tools the others are hidden")  # fmt: skip

T = TypeVar("T")

# ---- types -----------------------------------------------------------------------------------------------------------


def told_apart(allowed: str, **members: Any) -> Any:
    """Return the union of `members`, told apart by JSON type alone, so that an error is that of the member meant.

    The members' names say which JSON they are: `text`, `object`, `flag`, `number`, or a list by its first item: `ids`
    (and all that is none of these), `texts`, `rows` (of lists), `objects`. `allowed` completes "must be" for anything
    else.
    """
    scalars: dict[type, str] = {str: "text", dict: "object", bool: "flag", int: "number", float: "number"}
    lists: dict[type, str] = {str: "texts", list: "rows", dict: "objects"}
    of_empty = next((name for name in members if name not in scalars.values()), "")

    def name_of(value: Any) -> str | None:
        if isinstance(value, list):
            return lists.get(type(value[0]), "ids") if value else of_empty
        return scalars.get(type(value))

    return _union(allowed, members, name_of)


def of_type(allowed: str, *kinds: Any, other: Any = None) -> Any:
    """Return the union of the models `kinds`, told apart by their `type`, a literal; `allowed` as in `told_apart`.

    An object without a type is of the kind whose type may be None; one whose type no kind has is an `other`.
    """
    names = {name: kind.__name__ for kind in kinds for name in _literals(kind.model_fields["type"].annotation)}

    def name_of(value: Any) -> str | None:
        given = value.get("type") if isinstance(value, dict) else getattr(value, "type", 0)
        if not isinstance(given, str | None):
            return None
        return names.get(given, other.__name__ if other and given else None)

    return _union(allowed, {kind.__name__: kind for kind in (*kinds, other) if kind}, name_of)


def _union(allowed: str, members: Mapping[str, Any], name_of: Callable[[Any], str | None]) -> Any:
    """Return a union whose members are told apart by `name_of`; tags in brackets are no part of an error's path."""
    tagged = [Annotated[kind, Tag(f"<{name}>")] for name, kind in members.items()]
    tag = lambda value: f"<{name}>" if (name := name_of(value)) in members else None  # noqa: E731
    return Annotated[functools.reduce(operator.or_, tagged), Discriminator(
        tag, custom_error_type="allowed", custom_error_message=allowed)]  # fmt: skip


def _literals(annotation: Any) -> list[str | None]:
    """Return the values of a literal, with None where that is allowed beside it."""
    given = get_args(annotation)
    return [*get_args(given[0]), None] if type(None) in given else list(given)


def shape(name: str, base: type[BaseModel] | None = None, /, **own: Any) -> Any:
    """Return the model `name` of a small object: a field must be there, unless its type has None."""
    given = {field: (kind, None) if type(None) in get_args(kind) else kind for field, kind in own.items()}
    return create_model(name, __base__=base or Fields, **cast(dict[str, Any], given))


def _whole(value: Any) -> Any:
    """Return 4 for 4.0, also within a list."""
    if type(value) is list and float in set(map(type, value)):
        return [_whole(item) for item in value]
    return int(value) if type(value) is float and value.is_integer() else value


def _truncation(value: int) -> int:
    if value != -1 and value < 1:
        raise PydanticCustomError("allowed", "-1 or at least 1")
    return value


def _equal_to_n(value: int | None, info: ValidationInfo) -> int | None:
    if value not in (None, n := info.data.get("n") or 1):
        raise PydanticCustomError("allowed", "n, which is {n}", {"n": n})
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Flag = bool | None
Integer = Whole | None
Number = float | None
Text = str | None
Each = Annotated[list[T], Field(fail_fast=True)]
Batch = Annotated[list[T], Field(fail_fast=True, min_length=1, max_length=MAX_BATCH)]
Turns = Annotated[list[T], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
Items = Annotated[list[T], Field(fail_fast=True, max_length=MAX_MESSAGES)]
Parts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PARTS)]
OfTools = Annotated[list[T], Field(fail_fast=True, max_length=MAX_TOOLS)]
Filled = Annotated[str, Field(min_length=1)]
ToolName = Annotated[str, Field(min_length=1, max_length=128)]
AnyIds = Annotated[list[int], Field(fail_fast=True), BeforeValidator(_whole)]
Ids = Annotated[list[int], Field(fail_fast=True, min_length=1), BeforeValidator(_whole)]
Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID)]
Effort = Annotated[str, Field(max_length=100)] | None
Salt = Rid  # kept with every first page in the prefix cache
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES), BeforeValidator(_whole)]
Interval = Annotated[int, Field(ge=1), BeforeValidator(_whole)]  # tokens between two events
Integers = told_apart("an integer or a list of integers", number=Whole, ids=Batch[Whole])
Rows = told_apart("token ids or a list of such lists", ids=AnyIds, rows=Batch[AnyIds])
# An object of any size. Its values are checked one by one later: a dict of numbers could give a million errors.
Biases = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]


def does(text: str) -> Any:
    """Return the default of an optional field, None, with what the field does; for the description."""
    return Field(None, description=text)


# ---- fields that do not act ------------------------------------------------------------------------------------------

REFUSED = {  # why -> fields
    "choices are drawn, not searched for": "n use_beam_search beam_width length_penalty",
    "each endpoint has the logprobs of its own API, and responses have none": """logprobs top_logprobs prompt_logprobs
        echo return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs
        return_tokens_as_token_ids""",
    "logprobs have one form and are the model's own": """flat_logprobs return_sampling_mask sampling_logprobs_mode
        return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
        return_entropy""",
    "only chats and responses have tools, in tools and tool_choice, which the client runs": """tools tool_choice
        functions function_call web_search_options""",
    "what constrains an output is response_format or text.format, json_schema, regex, ebnf, structural_tag": """
        response_format json_schema regex ebnf structural_tag structured_outputs guided_json guided_regex guided_choice
        guided_grammar guided_whitespace_pattern grammar format guided_decoding output_format output_config""",
    "tokens are not banned by name here; logit_bias lowers single ones": "bad_words",
    "stops are ids and strings": "stop_regex repetition_detection",
    "requests are served in the order of their arrival": "priority service_tier speed",
    "only text goes in and out": """image_data audio_data video_data audio modalities images_config video_config
        mm_processor_kwargs media_io_kwargs mm_hashes mm_content_hashes encoder_urls use_audio_in_video
        max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch image""",
    "a prompt is text, token ids, messages or items": """prompt suffix input_ids input_embeds prompt_embeds
        positional_embed_overrides multi_item_delimiter_indices documents chat_template chat_template_content_format
        task""",
    "only a completion's prompt may do without the special tokens": "add_special_tokens",
    "a prompt is cut at its beginning, by truncate_prompt_tokens alone": "truncation_side truncation",
    "requests bring no code": "custom_logit_processor custom_params logits_processors vllm_xargs",
    "there are no adapters": "lora_path lora_id",
    "nothing is stored: each request has the whole conversation, which the prefix cache finds again": """store
        previous_response_id conversation background background_options session_id session_params kv_hints container
        """,
    "the server runs no tools": "mcp_servers",
    "reasoning has no bound but that of the answer, and whether there is any the chat template says": """
        require_reasoning max_thinking_tokens thinking_token_budget thinking enable_thinking""",
    "the answer has no such part": """return_hidden_states return_routed_experts routed_experts_start_len
        return_indexer_topk return_cached_tokens_details return_spec_tokens_details return_prompt_token_ids
        return_prompt_text return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext return_bytes
        return_token_strs watermark moderation""",
    "the server chooses the replica, and there are no others to transfer to": """
        data_parallel_rank routed_dp_rank disagg_prefill_dp_rank bootstrap_host bootstrap_port bootstrap_room
        bootstrap_pair_key decode_tp_size kv_transfer_params token_indices_to_pool""",
}  # fmt: skip

# Values that ask for what is done anyway, besides null, false and what is empty.
IDLE: dict[str, tuple[Any, ...]] = {
    "n": (1,), "top_logprobs": (0,), "top_logprobs_num": (0,), "logprob_start_len": (-1,), "length_penalty": (1, 1.0),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "response_format": ({"type": "text"},),
    "priority": (0,), "service_tier": ("auto", "default", "flex", "standard_only"), "speed": ("standard",),
    "modalities": (["text"],), "truncation_side": ("left",), "truncation": ("disabled", "auto"),
    "routed_experts_start_len": (0,), "data_parallel_rank": (0,), "routed_dp_rank": (0,),
}  # fmt: skip

IGNORED = {  # why no answer depends on it -> fields
    "it is a hint of which no model here knows": "verbosity",
    "the client has the whole conversation, and cuts it itself": "context_management compaction",
    "it concerns Anthropic's own service": """inference_geo user_profile_id workspace_id diagnostics betas fallbacks
        fallback_credit_token billing_policy thread""",
    "it is for the caller's own books": "user metadata safety_identifier custom_labels conversation_id routing_key",
    "who may ask is a matter of keys": "access_programs",
    "it bounds tools that the server would run, and there are none": "max_tool_calls",
    "of /generate and responses the last event always has the usage": "stream_options",
    "the prefix cache works by itself": "cache_control prompt_cache_key prompt_cache_options prompt_cache_retention",
    "text is never logged": "no_logs log_metrics",
    "only a chat may have its reasoning in another way": "separate_reasoning stream_reasoning include_reasoning",
    "only chats and responses have tool calls": "parallel_tool_calls",
    "only a chat's answer may be predicted, and it is a hint for speed": "prediction",
    "only slow Python tokenizers put spaces there": "spaces_between_special_tokens",
    "llguidance constrains output, whichever is named": "guided_decoding_backend",
}


def _refused(name: str, why: str) -> Any:
    """Return the type of a refused field: what asks for nothing passes."""
    passes = (None, False, "", [], {}, *IDLE.get(name, ()))

    def check(value: Any) -> Any:
        if not any(type(value) is type(idle) and value == idle for idle in passes):
            raise PydanticCustomError("unsupported_field", "{why}", {"why": why})
        return value

    return Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": list(passes)})]


# Fields that SamplingParams has under another name. In order: a later one wins.
MEANS = {"min_tokens": "min_new_tokens", "seed": "sampling_seed", "sampling_seed": "sampling_seed",
         "max_tokens": "max_new_tokens", "max_output_tokens": "max_new_tokens",
         "max_completion_tokens": "max_new_tokens", "include_stop_str_in_output": "no_stop_trim",
         "stop_sequences": "stop"}  # fmt: skip

INACTIVE = {  # name -> "refused" or "ignored", and why
    name: (fate, why)
    for fate, table in (("refused", REFUSED), ("ignored", IGNORED))
    for why, names in table.items() for name in names.split()
}  # fmt: skip


def _inactive_fields(names: Iterable[str]) -> dict[str, Any]:
    return {
        name: (_refused(name, why) if fate == "refused" else Any, Field(None, description=f"{fate}: {why}"))
        for name, (fate, why) in INACTIVE.items() if name in names
    }  # fmt: skip


# ---- the bodies ------------------------------------------------------------------------------------------------------


class Fields(BaseModel):
    """An object of fields; what it does not name is ignored."""

    model_config = ConfigDict(strict=True)


class Prompted(create_model("Inactive", __base__=Fields, **_inactive_fields(INACTIVE))):  # type: ignore[misc]
    """What every request for text may say."""

    model: Text = does("ignored, unless --strict-model-name: then another name than the served one is a 404")
    stream: Flag = does("answer by server-sent events")
    rid: told_apart(f"a string of 1 to {MAX_RID} characters or a list of such", text=Rid, texts=Batch[Rid]) | None = (
        does("the answer's id, and what /abort_request looks for; a list for a list of prompts"))  # fmt: skip
    stream_interval: Interval | None = does("tokens between two events, in place of the server's")
    truncate_prompt_tokens: Annotated[Whole, AfterValidator(_truncation)] | None = does(
        "keep so many last tokens of the prompt; -1 as many as leave room for the tokens to generate, at most half of "
        "the context"
    )
    best_of: Annotated[Integer, AfterValidator(_equal_to_n)] = does("must equal n, as nothing ranks choices")
    cache_salt: Salt | None = does("share cached prefixes only with requests of this salt, and give nobody else drafts")
    extra_key: Salt | None = does("the same, and beside cache_salt a part of it")


class Sampling(Fields):
    """How tokens are chosen and where text ends; the ranges are those of `SamplingParams`."""

    temperature: Number = does("0 is greedy")
    top_p: Number = does("the likeliest tokens of this total probability")
    top_k: Integer = does("so many likeliest tokens; -1 or 0 for all")
    min_p: Number = does("tokens at least so likely, relative to the likeliest")
    frequency_penalty: Number = does("lowers tokens by how often they were generated")
    presence_penalty: Number = does("lowers tokens that were generated")
    repetition_penalty: Number = does("divides the logits of tokens seen, prompt included")
    logit_bias: Biases | None = does("token id -> number added to its logit")
    allowed_token_ids: AnyIds | None = does("only these tokens are generated")
    stop: told_apart("a string or a list of strings", text=str, texts=Each[str]) | None = does(
        "strings that end the text"
    )
    stop_token_ids: AnyIds | None = does("ids that end the text, besides EOS")
    ignore_eos: Flag = does("EOS ends nothing")
    no_stop_trim: Flag = does("leave what matched a stop in the text")
    skip_special_tokens: Flag = does("leave special tokens out of the text (the default)")
    ngram_corpus_id: str | None = does("the external corpus that lookups draft from, in place of all")
    speculative: Flag = does("false: verify no drafts for this request, which in float32 changes its speed alone")


SchemaForm = told_apart("a JSON schema, as text or as an object", text=str, object=dict[str, Any])
TagForm = told_apart("a structural tag, as text or as an object", text=str, object=dict[str, Any])
OF_SCHEMA = "the output is JSON of this schema"
OF_REGEX = "the output matches this regular expression, wholly"
OF_CHOICE = "the output is one of these strings"
OF_GRAMMAR = "the output is of this grammar, written in GBNF or in llguidance's Lark"
OF_TAG = "free text in which each trigger begins one of the structures"
BETWEEN = "what may stand between two tokens of JSON, as a regular expression"


class Constrained(Fields):
    """What an output must be; at most one of these may be given."""

    json_schema: SchemaForm | None = does(OF_SCHEMA)
    regex: Text = does(OF_REGEX)
    ebnf: Text = does(OF_GRAMMAR)
    grammar: Text = does("the same, as llama.cpp is asked for it")
    structural_tag: TagForm | None = does(OF_TAG)


class StructuredOutputs(Fields):
    """The object `structured_outputs`, vLLM's; exactly one of its first six fields must ask for something."""

    json_: SchemaForm | None = Field(None, alias="json", description=OF_SCHEMA)  # pydantic's models have a method json
    regex: Text = does(OF_REGEX)
    choice: Each[str] | None = does(OF_CHOICE)
    grammar: Text = does(OF_GRAMMAR)
    json_object: Flag = does("true: the output is a JSON object")
    structural_tag: TagForm | None = does(OF_TAG)
    whitespace_pattern: Text = does(BETWEEN)
    disable_any_whitespace: Flag = does("true: nothing may stand between two tokens of JSON")
    disable_additional_properties: Flag = does("ignored: objects that name properties have no others anyway")


class ResponseFormat(Fields):
    """The object `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = Field(
        description="anything, any JSON object, JSON of a schema, or tags within text"
    )
    json_schema: dict[str, Any] | None = does("an object with the schema under schema; strict or not, it is kept to")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="of a json_object, as llama.cpp has it")
    structures: Each[dict[str, Any]] | None = does("of a structural tag: objects of begin, schema and end")
    triggers: Each[str] | None = does("of a structural tag: what begins the structures")


class StreamOptions(Fields):
    """The object `stream_options`."""

    include_usage: Flag = does("a last event with the usage")
    continuous_usage_stats: Flag = does("the usage so far in every event")


class Guided(Fields):
    """What an output must be, as older versions of vLLM are asked for it."""

    guided_json: SchemaForm | None = does(OF_SCHEMA)
    guided_regex: Text = does(OF_REGEX)
    guided_choice: Each[str] | None = does(OF_CHOICE)
    guided_grammar: Text = does(OF_GRAMMAR)
    guided_whitespace_pattern: Text = does(BETWEEN)


class OpenAI(Constrained, Guided, Prompted, Sampling):
    """What both of OpenAI's endpoints take, extensions of SGLang and vLLM included."""

    n: Choices | None = does("choices for each prompt, at most 16; the prompt is computed once")
    max_tokens: Integer = does("tokens to generate at most")
    min_tokens: Integer = does("tokens before which nothing ends the text")
    seed: Integer = does(
        "the same seed, prompt and parameters give the same text in float32, or with --enable-deterministic-inference"
    )
    sampling_seed: Integer = does("as seed")
    include_stop_str_in_output: Flag = does("as no_stop_trim")
    stream_options: StreamOptions | None = does("what events carry besides text")
    return_token_ids: Flag = does("add prompt_token_ids and token_ids to the answer")
    return_spec_tokens_details: Flag = does("add sglext.spec_tokens_details: what was drafted and accepted, by source")
    return_tokens_as_token_ids: Flag = does("spell tokens as token_id:N in logprobs")
    request_id: Rid | None = does("as rid")
    response_format: ResponseFormat | None = does("what the output must be")
    structured_outputs: StructuredOutputs | None = does("the same, as vLLM is asked for it")


LEFT_OUT = {"image": "image", "input_image": "image", "document": "document", "input_file": "file"}  # only text goes in
RefusalPart = shape("RefusalPart", type=Literal["refusal"], refusal=str)
ThinkingPart = shape("ThinkingPart", type=Literal["thinking"], thinking=str)
TextPart = shape("TextPart", type=Literal["text"], text=str)
Part = of_type("a part of type text, refusal or thinking, since only text goes in", TextPart, RefusalPart, ThinkingPart)
Content = told_apart("text or a list of text parts", text=str, objects=Parts[Part])
Arguments = told_apart("a JSON object, or the text of one", text=str, object=dict[str, Any], ids=list[Any], flag=bool,
                       number=Any)  # fmt: skip

CalledFunction = shape("CalledFunction", name=Filled, arguments=Arguments | None)
ToolCall = shape("ToolCall", id=Text, type=Literal["function"] | None, function=CalledFunction)
Function = shape("Function", name=ToolName, description=Text, parameters=dict[str, Any] | None)
Tool = shape("Tool", type=Literal["function"], function=Function)
Named = shape("Named", type=Literal["function"], function=shape("Name", name=Filled))
CHOICES, Modes = "none, auto, required, or an object that names a function or allowed_tools", Literal[
    "none", "auto", "required"]  # fmt: skip
Choice = told_apart(
    CHOICES, text=Modes,
    object=of_type("an object of type function or allowed_tools", Named, shape(
        "Allowed", type=Literal["allowed_tools"], allowed_tools=shape(
            "AllowedTools", mode=Literal["auto", "required"], tools=OfTools[Named]))))  # fmt: skip
Thinking = shape("Thinking", type=Literal["enabled", "disabled", "adaptive"], budget_tokens=Integer)
Prediction = shape("Prediction", type=Literal["content"], content=Content)


class Message(Fields):
    """A message of a chat; what it says besides these is ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(description="whose it is")
    content: Content | None = does(
        "text, or parts joined by newlines; only those of the assistant and of tools may be null"
    )
    name: Text = does(TEMPLATE)
    tool_calls: OfTools[ToolCall] | None = does("handed to the chat template, arguments as objects")
    tool_call_id: Text = does(TEMPLATE)
    reasoning_content: Text = does(TEMPLATE)
    reasoning: Text = does("as reasoning_content")


class Chat(OpenAI):
    """The body of POST /v1/chat/completions."""

    messages: Turns[Message] = Field(description="the conversation")
    max_completion_tokens: Integer = does("as max_tokens, and wins; with neither the context is the limit")
    logprobs: Flag = does("add the log-probability of each token")
    top_logprobs: Integer = does("and so many likeliest tokens beside it, at most 20; needs logprobs")
    add_generation_prompt: Flag = does("let the answer begin a new message (the default)")
    continue_final_message: Flag = does("let the answer continue the last message, the assistant's")
    tools: OfTools[Tool] | None = does("functions that may be called, shown to the model by the chat template")
    tool_choice: Choice | None = does(CHOICE)
    parallel_tool_calls: Flag = does("false ends the answer with its first call")
    separate_reasoning: Flag = does("false leaves reasoning in the content; it is told apart with --reasoning-parser")
    stream_reasoning: Flag = does("false sends reasoning when it is complete, in one piece")
    include_reasoning: Flag = does("false leaves reasoning out of the answer")
    prediction: Prediction | None = does("text that NGRAM drafts from, for this request alone; a hint for speed")
    reasoning_effort: Effort = does(TEMPLATE)
    enable_thinking: Flag = does(TEMPLATE)
    thinking: Thinking | None = does("of type disabled or enabled, it is enable_thinking false or true")
    chat_template_kwargs: dict[str, Any] | None = does(VARIABLES)


def _few_texts(value: dict[str, Any]) -> dict[str, Any]:
    sizes = [(name, value[name]) for name in value] if len(value) <= 16 else [("", None)]
    if not all(isinstance(text, str) and len(name) <= 64 and len(text) <= 512 for name, text in sizes):
        raise PydanticCustomError("allowed", "an object of at most 16 texts, of 512 characters under names of 64")
    return value


LeftOutPart = shape("LeftOutPart", type=Literal[tuple(LEFT_OUT)])
ItemText = shape("ItemText", text=str, type=Literal[
    "input_text", "output_text", "reasoning_text", "summary_text", "text"])  # fmt: skip
ItemPart = of_type("a text part", ItemText, RefusalPart, LeftOutPart)
ItemContent = told_apart("text or a list of text parts", text=str, objects=Parts[ItemPart])
FunctionTool = shape("FunctionTool", Function, type=Literal["function"], strict=Flag)
CustomTool = shape("CustomTool", Function, type=Literal["custom"])  # called with a text
SpacedTool = of_type("a tool of type function or custom", FunctionTool, CustomTool)
Namespace = shape("Namespace", type=Literal["namespace"], name=Filled, description=Text, tools=OfTools[SpacedTool])
Unserved = shape("Unserved", type=str)  # what is left out, with a line in the log
ItemTool = of_type("a tool", FunctionTool, CustomTool, Namespace, other=Unserved)
NamedTool = shape("NamedTool", type=Literal["function", "custom"], name=Filled, namespace=Text)
AllowedTool = of_type("a tool by its name", NamedTool, other=Unserved)
AllowedNames = shape("AllowedNames", type=Literal["allowed_tools"], mode=Literal["auto", "required"],
                     tools=OfTools[AllowedTool])  # fmt: skip
ItemChoice = told_apart(CHOICES, text=Modes, object=of_type(
    "an object of type function, custom or allowed_tools", NamedTool, AllowedNames))  # fmt: skip

MessageItem = shape("MessageItem", type=Literal["message"] | None, content=ItemContent,
                    role=Literal["system", "developer", "user", "assistant"])  # fmt: skip
CallItem = shape("CallItem", type=Literal["function_call"], call_id=str, name=Filled, namespace=Text, arguments=str)
CustomCallItem = shape("CustomCallItem", type=Literal["custom_tool_call"], call_id=str, name=Filled, namespace=Text,
                       input=str)  # fmt: skip
OutputItem = shape("OutputItem", type=Literal["function_call_output", "custom_tool_call_output"], call_id=str,
                   output=ItemContent)  # fmt: skip
ReasoningItem = shape("ReasoningItem", type=Literal["reasoning"], content=Parts[ItemPart] | None,
                      summary=Parts[ItemPart] | None)  # fmt: skip
ToolsItem = shape("ToolsItem", type=Literal["additional_tools"], tools=OfTools[ItemTool])
UnservedItem = shape("UnservedItem", type=Literal[tuple(
    """web_search_call file_search_call image_generation_call code_interpreter_call local_shell_call shell_call
    local_shell_call_output shell_call_output tool_search_call tool_search_output mcp_list_tools mcp_call computer_call
    computer_call_output mcp_approval_request mcp_approval_response""".split())])  # fmt: skip
Item = of_type(
    "an item of type message, function_call, custom_tool_call, an output of these, or reasoning (nothing is stored, so "
    "no item can be referred to; clients that are told store: false send items whole)",
    MessageItem, CallItem, CustomCallItem, OutputItem, ReasoningItem, ToolsItem, UnservedItem)  # fmt: skip


class TextFormat(Fields):
    """The object `text.format`."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="anything, any JSON object, or JSON of a schema"
    )
    name: Text = does("given back in the answer")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="the schema; strict or not, it is kept to")


class TextConfig(Fields):
    """The object `text`."""

    format: TextFormat | None = does("what the output must be")
    verbosity: Text = does("ignored: " + INACTIVE["verbosity"][1])


class Reasoning(Fields):
    """The object `reasoning`; a summary is not made, since the answer has the reasoning itself."""

    effort: Effort = does("handed to the chat template, as reasoning_effort")


class Responses(Constrained, Prompted, Sampling):
    """The body of POST /v1/responses."""

    input: told_apart("text or a list of items", text=str, objects=Items[Item]) = Field(
        description="the conversation, as text or as items"
    )
    instructions: Text = does("a system message before the input")
    max_output_tokens: Integer = does("tokens to generate at most, reasoning included; without it the context is the "
                                      "limit")  # fmt: skip
    min_tokens: Integer = does("tokens before which nothing ends the text")
    seed: Integer = does(
        "the same seed, prompt and parameters give the same text in float32, or with --enable-deterministic-inference"
    )
    tools: OfTools[ItemTool] | None = does(
        "functions, namespaces of them and tools of a free text that may be called, "
        "shown to the model by the chat template; all others are left out"
    )
    tool_choice: ItemChoice | None = does(CHOICE)
    parallel_tool_calls: Flag = does("false ends the answer with its first call")
    text: TextConfig | None = does("the form of the answer")
    reasoning: Reasoning | None = does("how the model reasons")
    truncation: Literal["disabled", "auto"] | None = does(
        "ignored: nothing is cut, unless truncate_prompt_tokens says so"
    )
    include: Each[Literal["reasoning.encrypted_content"]] | None = does(
        "adds nothing: reasoning items have their whole text already, and none of it is encrypted"
    )
    metadata: (
        Annotated[
            dict[str, Any],
            AfterValidator(_few_texts),
            WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
        ]
        | None
    ) = does("given back in the answer")
    chat_template_kwargs: dict[str, Any] | None = does(VARIABLES)


ToolUse = shape("ToolUse", type=Literal["tool_use"], id=str, name=Filled, input=Arguments)
ResultBlock = of_type("a block of type text", TextPart, LeftOutPart)
ToolResult = shape("ToolResult", type=Literal["tool_result"], tool_use_id=str, content=told_apart(
    "text or a list of blocks", text=str, objects=Parts[ResultBlock]) | None)  # fmt: skip
UnservedBlock = shape("UnservedBlock", type=Literal[tuple(
    """redacted_thinking server_tool_use web_search_tool_result web_fetch_tool_result code_execution_tool_result
    bash_code_execution_tool_result text_editor_code_execution_tool_result tool_search_tool_result mcp_tool_use
    mcp_tool_result container_upload search_result compaction""".split())])  # fmt: skip
MessageBlock = of_type("a block of type text, thinking, tool_use or tool_result", TextPart, ThinkingPart, ToolUse,
                       ToolResult, LeftOutPart, UnservedBlock)  # fmt: skip
Turn = shape("Turn", role=Literal["user", "assistant", "system"], content=told_apart(
    "text or a list of blocks", text=str, objects=Parts[MessageBlock]))  # fmt: skip
SchemaFormat = shape("SchemaFormat", type=Literal["json_schema"],
                     schema_=Annotated[dict[str, Any], Field(alias="schema")])  # fmt: skip
ClientTool = shape("ClientTool", type=Literal["custom"] | None, name=ToolName, description=Text,
                   input_schema=dict[str, Any])  # fmt: skip
OfferedTool = of_type("a tool", ClientTool, other=Unserved)


class CountTokens(Constrained, Prompted, Sampling):
    """The body of POST /v1/messages/count_tokens."""

    messages: Turns[Turn] = Field(description="the conversation; an assistant's last message is continued")
    system: told_apart("text or a list of text blocks", text=str, objects=Parts[TextPart]) | None = does(
        "a system message before the others"
    )
    max_tokens: Integer = does("tokens to generate at most, reasoning included")
    stop_sequences: Each[str] | None = does("strings that end the text")
    tools: OfTools[OfferedTool] | None = does(
        "functions that may be called, shown to the model by the chat template; the server's own are left out"
    )
    tool_choice: shape("ToolChoice", type=Literal["auto", "any", "tool", "none"], name=Text,
                       disable_parallel_tool_use=Flag) | None = does(
        "none hides the tools; auto, the default, leaves it to the model; any, or a tool by name, constrains the "
        "answer to calls; disable_parallel_tool_use ends it with the first")  # fmt: skip
    thinking: Thinking | None = does(
        "of type disabled or enabled, it is enable_thinking false or true for the chat template"
    )
    output_config: shape("OutputConfig", effort=Effort, format=SchemaFormat | None) | None = does(
        "the effort, handed to the chat template as reasoning_effort, and the form of the answer"
    )
    output_format: SchemaFormat | None = does("the form of the answer")
    chat_template_kwargs: dict[str, Any] | None = does(VARIABLES)
    seed: Integer = does(
        "the same seed, prompt and parameters give the same text in float32, or with --enable-deterministic-inference"
    )


class Messages(CountTokens):
    """The body of POST /v1/messages."""

    max_tokens: Whole = Field(description="tokens to generate at most, reasoning included")


class Completion(OpenAI):
    """The body of POST /v1/completions."""

    prompt: told_apart("text, token ids, or a list of either", text=Filled, texts=Batch[Filled], ids=Ids,
                       rows=Batch[Ids]) = Field(description="what the text continues")  # fmt: skip
    max_completion_tokens: Integer = does("as max_tokens, and wins; with neither 16 is the limit")
    echo: Flag = does("begin the text, and logprobs, with the prompt")
    logprobs: Integer = does("add the log-probability of each token and of so many likeliest ones, at most 20")
    prompt_logprobs: Integer = does("add those of the prompt's tokens, in vLLM's form")
    add_special_tokens: Flag = does("begin with BOS where the model expects it (the default)")


class Closed(Fields):
    """An object in which an unknown name is an error."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, given: Any) -> Any:
        """Raise for the first unknown name: pydantic's own check would list a million of them."""
        unknown = next((name for name in given if name not in cls.model_fields), None) if type(given) is dict else None
        if unknown is not None:
            known = ", ".join(sorted(acting(cls)))
            raise PydanticCustomError("unknown_key", "{name}", {"name": unknown, "known": known})
        return given


class NativeParams(Closed, Constrained, Sampling, create_model(  # type: ignore[misc]
    "InactiveNative", __base__=Fields, **_inactive_fields(
        "beam_width stop_regex custom_params watermark spaces_between_special_tokens".split()))):  # fmt: skip
    """The object `sampling_params`."""

    n: Choices | None = does("choices for each prompt, at most 16, each an item of the answer's list")
    max_new_tokens: Integer = does("tokens to generate at most; 128 if not given")
    min_new_tokens: Integer = does("tokens before which nothing ends the text")
    sampling_seed: Integer = does(
        "the same seed, prompt and parameters give the same text in float32, or with --enable-deterministic-inference"
    )
    stream_interval: Interval | None = does("tokens between two events, in place of the server's")


class Generate(Prompted):
    """The body of POST and PUT /generate; exactly one of text and input_ids."""

    text: told_apart("text or a list of texts", text=Filled, texts=Batch[Filled]) | None = does(
        "what the answer continues"
    )
    input_ids: told_apart("token ids or a list of such lists", ids=Ids, rows=Batch[Ids]) | None = does(
        "the same as token ids"
    )
    trace: Flag = does("add where each token came from, and each step's tree: see Watching speculation")
    sampling_params: told_apart("an object or a list of objects", object=NativeParams, objects=Batch[NativeParams]
                                ) | None = does("how to generate, for all prompts or for each")  # fmt: skip
    return_logprob: told_apart("true, false or a list of these", flag=bool, ids=Batch[bool]) | None = does(
        "add the log-probability of each token to meta_info; this and the next three for all prompts or for each"
    )
    logprob_start_len: Integers | None = does(
        "the first token of the prompt whose log-probability is told; -1, the default, for none"
    )
    top_logprobs_num: Integers | None = does("so many likeliest tokens beside each, at most 20")
    token_ids_logprob: Rows | None = does("and these tokens")
    return_text_in_logprobs: Flag = does("and their texts")


class Tokenize(Fields):
    """The body of POST /tokenize and /v1/tokenize: prompt or messages."""

    model: Text = does("as in a request for text")
    prompt: told_apart("text or a list of texts", text=str, texts=Batch[str]) | None = does("what to tokenize")
    messages: Turns[Message] | None = does("a conversation to tokenize by the chat template, ready for an answer")
    add_special_tokens: Flag = does("begin with BOS where the model expects it (the default)")


class Detokenize(Fields):
    """The body of POST /detokenize and /v1/detokenize."""

    model: Text = does("as in a request for text")
    tokens: Rows = Field(description="what to turn into text")
    skip_special_tokens: Flag = does("leave special tokens out of the text (the default)")


class Abort(Fields):
    """The body of POST /abort_request: rid, or abort_all."""

    rid: Filled | None = does("what the ids of prompts to end begin with")
    abort_all: Flag = does("end all")


class AddCorpus(Fields):
    """The body of POST /add_external_corpus: documents or file_path."""

    corpus_id: Filled | None = does("the corpus's name, by which requests may choose it; one is made if none is given")
    documents: Each[str] | None = does("the texts")
    file_path: Filled | None = does("a file of JSON lines below --speculative-ngram-corpus-folder")


class RemoveCorpus(Fields):
    """The body of POST /remove_external_corpus."""

    corpus_id: Filled = Field(description="the corpus to remove")


class ServerArgs(Closed):
    """What may change while the server runs."""

    speculative_accept_threshold_single: Number = does("as the flag of that name")
    speculative_accept_threshold_acc: Number = does("as the flag of that name")
    speculative_adaptive: Flag = does("as the flag of that name")


class InternalState(Fields):
    """The body of POST and PUT /set_internal_state."""

    server_args: ServerArgs = Field(description="flags to change while the server runs")


@functools.cache
def acting(kind: type[Fields]) -> dict[str, FieldInfo]:
    """Return the fields of a model that act, and so are in none of the tables or are switched on."""
    return {
        field.alias or name: field for name, field in kind.model_fields.items()
        if name not in INACTIVE or field.description != ": ".join(INACTIVE[name])
    }  # fmt: skip


# ---- reading ---------------------------------------------------------------------------------------------------------

Model = TypeVar("Model", bound=Fields)


def read(kind: type[Model], body: Mapping[str, Any]) -> Model:
    """Return a body as its model; RequestError 400 for the first field that is wrong."""
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        raise _explained(kind, error.errors(include_url=False)[0]) from None
    if log.isEnabledFor(logging.DEBUG) and (unknown := sorted(body.keys() - kind.model_fields.keys())):
        log.debug("ignored fields: %s", short(unknown))
    return asked


_ALLOWED = {  # pydantic's error types -> what completes "must be"
    "string_type": "a string", "int_type": "an integer", "float_type": "a number", "bool_type": "true or false",
    "list_type": "a list", "dict_type": "an object", "model_type": "an object", "literal_error": "{expected}",
    "too_short": "a list that is not empty", "too_long": "a list of at most {max_length}",
    "string_too_short": "a string that is not empty", "string_too_long": "a string of at most {max_length} characters",
    "greater_than_equal": "at least {ge}", "less_than_equal": "at most {le}",
}  # fmt: skip


def _explained(kind: type[Fields], error: ErrorDetails) -> RequestError:
    """Return an error of pydantic's as ours: the field, what is allowed, what was given.

    The field is one of the body's, or one of `sampling_params`, whose names are parameters too.
    """
    names = [part for part in error["loc"] if not str(part).startswith("<")]  # but the tags of unions
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names)[1:]
    nested = names[0] == "sampling_params" and isinstance(names[-1], str)
    param, code, context = str(names[-1] if nested else names[0]), None, error.get("ctx", {})
    if error["type"] == "missing":
        message = f"{path} is required"
    elif error["type"] == "unknown_key":
        param = context["name"][:100]
        message = f"{path} has no {param!r} here; known: {context['known']}"
    elif error["type"] == "unsupported_field":
        code = error["type"]
        passes = "".join(f"; {json.dumps(value)} passes" for value in IDLE.get(param, ()))
        message = f"{path} is not supported ({context['why']}), got {short(error['input'])}{passes}"
    else:
        allowed = _ALLOWED.get(error["type"], error["msg"]).format(**context)
        message = f"{path} must be {allowed}, got {short(error['input'])}"
    return RequestError(message, param, code=code)
