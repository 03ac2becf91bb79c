"""Text and tokenizer of the demo family: task dialogues with tool calls, arithmetic word problems, Python functions.

Every document is one string in the demo's chat format (`models/demo/chat_template.jinja` renders the same). A tool
call and its result stand inside the assistant's turn, so that a chat without any real tool still reads as one.
Nothing here copies data into the project: documents live in memory and only weights are kept.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from trainlib.public_data import GSM8K_FILE, SGD_DEV_FILE, function_request, is_held_out, library_functions, read_lines

BOS = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TOOL_CALL = ("<tool_call>", "</tool_call>")
TOOL_RESPONSE = ("<tool_response>", "</tool_response>")
SPECIAL_TOKENS = (BOS, TURN_START, TURN_END, *TOOL_CALL, *TOOL_RESPONSE)
SYSTEM_PROMPT = "You are a helpful assistant."
SGD_TRAIN_FILE = "sgd_train.jsonl.xz"

Domains = dict[str, list[str]]
TokenStream = NDArray[np.int32]


def turn(role: str, content: str) -> str:
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def assistant_content(message: dict[str, Any]) -> str:
    """Tool call, tool result and reply of one assistant message, in that order."""
    parts = []
    if call := message.get("call"):
        parts.append(TOOL_CALL[0] + compact_json(call) + TOOL_CALL[1] + "\n")
        parts.append(TOOL_RESPONSE[0] + compact_json(message.get("result", {})) + TOOL_RESPONSE[1] + "\n")
    parts.append(message["content"])
    return "".join(parts)


def tool_line(name: str, arguments: list[str]) -> str:
    return f"{name}({', '.join(arguments)})"


def dialogue(record: dict[str, Any], tools: dict[str, list[str]], rng: random.Random) -> str:
    """One dialogue; half of them name their tools in a system turn."""
    turns = []
    if rng.random() < 0.5:
        called = sorted({m["call"]["name"] for m in record["messages"] if m.get("call")})
        lines = [tool_line(name, tools[name]) for name in called]
        system = SYSTEM_PROMPT + ("\nTools:\n" + "\n".join(lines) if lines else "")
        turns.append(turn("system", system))
    for message in record["messages"]:
        content = message["content"] if message["role"] == "user" else assistant_content(message)
        turns.append(turn(message["role"], content))
    return BOS + "".join(turns)


def dialogues(path: Path, seed: int) -> list[str]:
    records = list(read_lines(path))
    tools: dict[str, set[str]] = {}
    for record in records:
        for message in record["messages"]:
            if call := message.get("call"):
                tools.setdefault(call["name"], set()).update(call["arguments"])
    named = {name: sorted(arguments) for name, arguments in tools.items()}
    rng = random.Random(seed)
    return [dialogue(record, named, rng) for record in records]


def arithmetic(path: Path) -> tuple[list[str], list[str]]:
    """(training, held-out) word problems; calculator marks removed, the result said in words."""
    train: list[str] = []
    held_out: list[str] = []
    for record in read_lines(path):
        answer = re.sub(r"<<[^>]*>>", "", record["answer"])
        answer = re.sub(r"\n#### (.*)$", r"\nThe answer is \1.", answer)
        text = BOS + turn("user", record["question"]) + turn("assistant", answer)
        (held_out if is_held_out(record["question"]) else train).append(text)
    return train, held_out


def function_document(signature: str, documentation: str, code: str, *, as_chat: bool) -> str:
    if not as_chat:
        return BOS + code + "\n"
    request = function_request(signature, documentation)
    return BOS + turn("user", request) + turn("assistant", f"```python\n{code}\n```")


def standard_library(seed: int) -> tuple[list[str], list[str]]:
    """(training, held-out) documented functions of this Python's own library, split by file."""
    rng = random.Random(seed)
    train: list[str] = []
    held_out: list[str] = []
    seen: set[str] = set()
    for path, functions in library_functions():
        for signature, documentation, code in functions:
            if code in seen:
                continue
            seen.add(code)
            document = function_document(signature, documentation, code, as_chat=rng.random() < 0.5)
            (held_out if is_held_out(path) else train).append(document)
    return train, held_out


def load_corpus(data: Path, seed: int) -> tuple[Domains, Domains]:
    """(training, held-out) documents by domain; held-out dialogues are another file, partly of unseen services.

    Raises FileNotFoundError when `data` lacks one of the named files.
    """
    missing = [name for name in (GSM8K_FILE, SGD_TRAIN_FILE, SGD_DEV_FILE) if not (data / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{data} lacks {', '.join(missing)}: give the folder of the data files with --data")
    math_train, math_held_out = arithmetic(data / GSM8K_FILE)
    code_train, code_held_out = standard_library(seed)
    train = {"dialogue": dialogues(data / SGD_TRAIN_FILE, seed), "code": code_train, "arithmetic": math_train}
    held_out = {"dialogue": dialogues(data / SGD_DEV_FILE, seed), "code": code_held_out, "arithmetic": math_held_out}
    return train, held_out


# the tokenizer: byte-level BPE with a pre-tokenizer that llama.cpp knows by name (`qwen2`)

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on `texts`; the marks of turns and tools take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return with_printable_tools(tokenizer)


def with_printable_tools(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with only the turn marks as control tokens.

    Tool marks are part of an answer: they must survive in its text, or the next turn's history would lack them.
    """
    source = json.loads(tokenizer.to_str())
    for added in source["added_tokens"]:
        added["special"] = added["content"] not in (*TOOL_CALL, *TOOL_RESPONSE)
    return Tokenizer.from_str(json.dumps(source))


def mark_id(tokenizer: Tokenizer, mark: str) -> int:
    """The id of one of SPECIAL_TOKENS."""
    token_id = tokenizer.token_to_id(mark)
    assert token_id is not None, f"the tokenizer was trained without {mark}"
    return int(token_id)


def save_hf_tokenizer(tokenizer: Tokenizer, folder: Path, chat_template: str) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as transformers expects them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": TURN_END,
        "pad_token": BOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> TokenStream:
    """All documents as one stream of token ids [num_tokens]; each begins with its own BOS."""
    encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
    return np.concatenate([np.asarray(e.ids, dtype=np.int32) for e in encoded])
