"""The demo family's tokenizer: byte-level BPE with a pre-tokenizer that llama.cpp knows by name (`qwen2`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_training.corpus import BOS, SPECIAL_TOKENS, TOOL_CALL, TOOL_RESPONSE, TURN_END

LLAMA_CPP_PRE_TOKENIZER = "qwen2"
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


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    begin, end = mark_id(tokenizer, BOS), mark_id(tokenizer, TURN_END)
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": begin}


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


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> NDArray[np.int32]:
    """All documents as one stream of token ids [num_tokens]; each begins with its own BOS."""
    encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
    return np.concatenate([np.asarray(e.ids, dtype=np.int32) for e in encoded])
