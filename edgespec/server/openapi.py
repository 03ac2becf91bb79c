"""`/openapi.json`: the API as an OpenAPI 3.1 document. Schemas name the fields that work; the readers check them."""

from __future__ import annotations

from typing import Any

from edgespec import __version__
from edgespec.config import DRAFTERS, REASONING_FORMATS, RULES
from edgespec.server.service import Names

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_MODEL: Schema = {"model": {"$ref": "#/components/schemas/Model"}}
_TEXTS: Schema = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 16}, {"type": "null"}]}


def _number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def _whole(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _object(properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


_LIMIT = {"anyOf": [_whole(0, 2**31 - 1), {"const": -1}], "description": "-1: no limit; 0: only read the prompt"}
_PARTS: Schema = {"type": "array", "items": _object({"type": {"const": "text"}, "text": _TEXT}, ("type", "text"))}
_CONTENT: Schema = {"oneOf": [_TEXT, _PARTS]}
_MESSAGE = _object(
    {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}, "content": _CONTENT}, ("role", "content")
)
_MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1}
_SPECULATIVE: Schema = {
    "oneOf": [
        {"type": "boolean"},
        _object(
            {
                "drafter": {"enum": list(DRAFTERS)},
                "draft_length": {"oneOf": [_whole(0, 64), {"const": "auto"}]},
                "verify": {"enum": list(RULES)},
            }
        ),
        {"type": "null"},
    ],
    "description": "false: plain decoding; an object chooses how to draft",
}
_SAMPLING: Schema = {
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "top_k": _whole(-1, 2**31 - 1),
    "min_p": _number(0, 1),
    "repeat_penalty": _number(0.01, 100),
    "seed": {"type": ["integer", "null"]},
}
_COMMON: Schema = {
    **_MODEL,
    **_SAMPLING,
    "presence_penalty": {"type": ["number", "null"]},
    "frequency_penalty": {"type": ["number", "null"]},
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}, "maxProperties": 1024},
    "stop": _TEXTS,
    "max_tokens": _LIMIT,
    "n_predict": {**_LIMIT, "description": "llama.cpp's name of max_tokens"},
    "ignore_eos": _FLAG,
    "n": _whole(1, 16),
    "stream": _FLAG,
    "stream_options": {"oneOf": [_object({"include_usage": _FLAG}), {"type": "null"}]},
    "speculative": _SPECULATIVE,
    "timings_per_token": {**_FLAG, "description": "In a stream: `timings`, and in a chat `tokens` with their drafters"},
    "return_progress": {**_FLAG, "description": "In a stream: `prompt_progress` while the prompt is read"},
}
_CHOICE: Schema = {"oneOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}
_CHAT = _object(
    {
        **_COMMON,
        "messages": _MESSAGES,
        "max_completion_tokens": _LIMIT,
        "logprobs": _FLAG,
        "top_logprobs": _whole(0, 20),
        "tools": {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": 128},
        "tool_choice": _CHOICE,
        "parallel_tool_calls": _FLAG,
        "reasoning_effort": {
            "type": ["string", "null"],
            "description": "none: a model that can reason answers without reasoning",
        },
        "reasoning_format": {"enum": [*REASONING_FORMATS, None], "description": "none: reasoning stays in the text"},
        "chat_template_kwargs": {"type": ["object", "null"], "description": "Passed to the chat template"},
        "response_format": {"type": ["object", "null"]},
        "add_generation_prompt": _FLAG,
        "continue_final_message": _FLAG,
        "prediction": {
            "type": ["object", "null"],
            "description": 'What most of the answer is expected to be: {"type": "content", "content": "..."}',
        },
    },
    ("messages",),
)
_IDS: Schema = {"type": "array", "items": {"type": "integer"}}
_COMPLETION = _object(
    {
        **_COMMON,
        "prompt": {"oneOf": [_TEXT, _IDS, {"type": "array", "items": {"oneOf": [_TEXT, _IDS]}}]},
        "logprobs": _whole(0, 20),
        "suffix": {"type": ["string", "null"], "description": "What follows the gap that is to be filled"},
    },
    ("prompt",),
)
_NATIVE: Schema = {
    **{name: value for name, value in _COMMON.items() if name != "stream_options"},
    "logit_bias": {"type": ["array", "object", "null"], "description": "Pairs of a token id or text and a number"},
    "n_predict": {**_whole(-2, 2**31 - 1), "description": "0: only read the prompt"},
    "n_cmpl": _whole(1, 16),
    "n_probs": _whole(0, 20),
    "n_indent": {**_whole(0, 2**20), "description": "End at the first line that is indented less"},
    "t_max_predict_ms": _whole(-1, 2**31),
    "return_tokens": _FLAG,
    "response_fields": {"type": ["array", "null"], "items": _TEXT, "maxItems": 64},
}
_PART: Schema = {"oneOf": [_TEXT, {"type": "integer"}]}
_NATIVE_PROMPT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}
_COMPLETION_NATIVE = _object(
    {**_NATIVE, "prompt": {"anyOf": [_NATIVE_PROMPT, {"type": "array", "items": _NATIVE_PROMPT}]}}, ("prompt",)
)
_FILE = _object({"filename": {"type": ["string", "null"]}, "text": _TEXT}, ("text",))
_INFILL = _object(
    {
        **_NATIVE,
        "input_prefix": _TEXT,
        "input_suffix": _TEXT,
        "input_extra": {"type": ["array", "null"], "items": _FILE, "maxItems": 1024},
        "prompt": {"type": ["string", "null"], "description": "The begin of what fills the gap"},
    },
    ("input_prefix", "input_suffix"),
)
_RESPONSES = _object(
    {
        **_MODEL,
        **_SAMPLING,
        "input": {"oneOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
        "instructions": {"type": ["string", "null"]},
        "max_output_tokens": _LIMIT,
        "text": {"type": ["object", "null"]},
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_choice": _CHOICE,
        "stream": _FLAG,
        "speculative": _SPECULATIVE,
    },
    ("input",),
)
_TURN = _object({"role": {"enum": ["user", "assistant"]}, "content": _CONTENT}, ("role", "content"))
_TURNS: Schema = {"type": "array", "items": _TURN}
_COUNTED: Schema = {**_MODEL, "messages": _TURNS, "system": _CONTENT, "tools": {"type": ["array", "null"]}}
_ANTHROPIC: Schema = {
    **_COUNTED,
    **{name: _SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
    "max_tokens": {"type": "integer", "minimum": 1},
    "stop_sequences": {"type": ["array", "null"], "items": _TEXT, "maxItems": 16},
    "stream": _FLAG,
}
_OLLAMA: Schema = {**_MODEL, "stream": _FLAG, "options": {"type": ["object", "null"]}, "keep_alive": {}}
_EMBEDDED: Schema = {"oneOf": [_TEXT, _IDS, {"type": "array", "items": {"oneOf": [_TEXT, _IDS]}, "maxItems": 2048}]}
_OLLAMA_EMBED: Schema = {**_OLLAMA, "truncate": _FLAG}
del _OLLAMA_EMBED["stream"]
_EMBEDDING = _object(
    {
        **_MODEL,
        "input": _EMBEDDED,
        "encoding_format": {"enum": ["float", "base64", None]},
        "dimensions": _whole(1, 2**20),
    },
    ("input",),
)
_CONTENT_EMBEDDING = _object({**_MODEL, "content": _EMBEDDED}, ("content",))
_POSTS: dict[str, tuple[str, Schema]] = {
    "/v1/chat/completions": ("Answer a conversation (OpenAI)", _CHAT),
    "/v1/completions": ("Continue a text or token ids (OpenAI)", _COMPLETION),
    "/chat/completions": ("The same as /v1/chat/completions", _CHAT),
    "/completion": ("Continue a text or token ids (llama-server)", _COMPLETION_NATIVE),
    "/completions": ("The same as /completion", _COMPLETION_NATIVE),
    "/apply-template": ("The prompt of a conversation as text (llama-server)", _CHAT),
    "/v1/chat/completions/input_tokens": ("Count a prompt's tokens (llama-server)", _CHAT),
    "/chat/completions/input_tokens": ("The same as /v1/chat/completions/input_tokens", _CHAT),
    "/v1/responses/input_tokens": ("Count a prompt's tokens (OpenAI)", _RESPONSES),
    "/responses/input_tokens": ("The same as /v1/responses/input_tokens", _RESPONSES),
    "/responses": ("The same as /v1/responses", _RESPONSES),
    "/v1/responses": ("Answer a conversation (OpenAI's newer protocol, stateless)", _RESPONSES),
    "/v1/messages": ("Answer a conversation (Anthropic)", _object(_ANTHROPIC, ("messages", "max_tokens"))),
    "/v1/messages/count_tokens": ("Count a prompt's tokens (Anthropic)", _object(_COUNTED, ("messages",))),
    "/api/chat": ("Answer a conversation (Ollama)", _object({**_OLLAMA, "messages": _MESSAGES}, ("messages",))),
    "/api/generate": (
        "Answer a prompt (Ollama)",
        _object({**_OLLAMA, "prompt": _TEXT, "suffix": _TEXT, "raw": _FLAG}, ("prompt",)),
    ),
    "/api/show": ("Facts of the model (Ollama)", _object({**_MODEL, "name": _MODEL["model"]})),
    "/infill": ("Fill the gap between two texts (llama-server); 501 for models that cannot", _INFILL),
    "/v1/embeddings": ("Embeddings of texts (OpenAI); 501 for models that give none", _EMBEDDING),
    "/api/embed": (
        "Embeddings of texts (Ollama)",
        _object({**_OLLAMA_EMBED, "input": _EMBEDDED, "dimensions": _whole(1, 2**20)}),
    ),
    "/api/embeddings": ("The embedding of a text (Ollama's older form)", _object({**_OLLAMA_EMBED, "prompt": _TEXT})),
    "/embedding": ("Embeddings of texts (llama-server)", _CONTENT_EMBEDDING),
    "/embeddings": ("The same as /embedding", _CONTENT_EMBEDDING),
    "/tokenize": ("Text to token ids", _object({"content": _TEXT, "with_pieces": _FLAG}, ("content",))),
    "/detokenize": ("Token ids to text", _object({"tokens": _IDS}, ("tokens",))),
}
_GETS = {
    "/v1/models": "The served model (OpenAI)",
    "/v1/models/{name}": "One model by name",
    "/models": "The same as /v1/models",
    "/slots": "What runs (llama-server)",
    "/v1/health": "The same as /health",
    "/health": "200 once the model answers, 503 before",
    "/props": "Model, engine, drafter, default settings, memory plan",
    "/metrics": "Counters for Prometheus",
    "/openapi.json": "This document",
    "/api/version": "The version (Ollama)",
    "/api/tags": "The served model (Ollama)",
    "/api/ps": "The same with its memory and context",
}
_STREAMS = {"/api/chat": "application/x-ndjson", "/api/generate": "application/x-ndjson"}
_JSON: Schema = {"application/json": {"schema": {"type": "object"}}}
_ERROR: Schema = {"description": "What is wrong and what is allowed", "content": _JSON}


def document(names: Names) -> Schema:
    """The whole document of a server whose model has `names`."""
    paths: Schema = {path: {"get": _get(path, text)} for path, text in _GETS.items()}
    paths |= {path: {"post": _post(path, *about)} for path, about in _POSTS.items()}
    known: Schema = {"type": ["string", "null"]} if names.any_other else {"enum": [*names.all, None]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "edgespec",
            "version": __version__,
            "description": "Local text generation with speculative decoding",
        },
        "paths": paths,
        "components": {
            "schemas": {"Model": {**known, "description": "The served model; null or absent too"}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _get(path: str, summary: str) -> Schema:
    kind = "text/plain" if path == "/metrics" else "application/json"
    found: Schema = {"summary": summary, "responses": {"200": _answer({kind: {}}), "4XX": _ERROR, "5XX": _ERROR}}
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
    return found


def _post(path: str, summary: str, body: Schema) -> Schema:
    kinds: Schema = dict(_JSON)
    if "stream" in body["properties"]:
        kinds[_STREAMS.get(path, "text/event-stream")] = {}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": _answer(kinds), "4XX": _ERROR, "5XX": _ERROR},
    }


def _answer(content: Schema) -> Schema:
    return {"description": "The answer", "content": content}
