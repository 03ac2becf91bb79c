"""tokenizer.json as real folders have it: settings left by training, tokens behind the vocabulary, runs of blanks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from edgespec.chat.template import encode_messages
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.formats.gguf.tokenizer import SPACE
from edgespec.vocabulary import FimTokens
from tiny_checkpoints import SPECIALS, byte_level_tokenizer, spm_tokenizer

Open = Callable[..., TokenizerFile]
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}{% endfor %}"


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """A tokenizer as a folder has it, with a vocabulary of `size` tokens."""

    def write(tokenizer: Tokenizer, size: int | None = None, **settings: Any) -> TokenizerFile:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return TokenizerFile(tmp_path, tokenizer.get_vocab_size() if size is None else size)

    return write


@pytest.mark.parametrize("length", [None, 64])
def test_truncation_and_padding_of_training_are_ignored(opened: Open, length: int | None):
    tokenizer = byte_level_tokenizer("smollm")
    expected = tokenizer.encode("a word " * 20, add_special_tokens=False).ids
    tokenizer.enable_truncation(max_length=16)
    tokenizer.enable_padding(pad_token=SPECIALS[0], length=length)
    found = opened(tokenizer)
    assert found.encode("a word " * 20) == expected and len(expected) > 16
    assert len(found.encode("a")) == 1


def test_runs_of_blanks_are_printed_as_blanks(opened: Open):
    """Gemma's are added tokens that are not special, and tokenizer.json writes their blanks as all others."""
    tokenizer = spm_tokenizer(with_prefix=False)
    tokenizer.add_tokens([AddedToken(SPACE * 4, normalized=False, special=False)])
    found = opened(tokenizer)
    assert found.token_bytes(tokenizer.token_to_id(SPACE * 4)) == b"    "
    assert tokenizer.decode([tokenizer.token_to_id(SPACE * 4)]) == "    "


def test_a_byte_level_token_keeps_its_mark(opened: Open):
    tokenizer = byte_level_tokenizer("smollm")
    tokenizer.add_tokens([AddedToken(f"a{SPACE}b", normalized=False, special=False)])
    found = opened(tokenizer)
    assert found.token_bytes(tokenizer.token_to_id(f"a{SPACE}b")).decode() == f"a{SPACE}b"


@pytest.mark.parametrize("name", ["[PAD]", "<|pipe|>", "<tool_x>"])
@pytest.mark.parametrize("is_special", [True, False])
def test_a_message_cannot_name_a_token_behind_the_vocabulary(opened: Open, name: str, is_special: bool):
    """Fine-tuning adds a pad token, Gemma 3 has one for images: their graphs have no row for it."""
    tokenizer = byte_level_tokenizer("smollm")
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=is_special)])
    found = opened(tokenizer, size, chat_template=TEMPLATE)
    assert found.encode(name, parse_special=True) == [size]
    ids = encode_messages(found, [{"role": "user", "content": f"what is {name}?"}], None, "model")
    assert max(ids) < size and found.decode(ids).endswith(f"what is {name}?")


@pytest.mark.parametrize("is_special", [False, True])
def test_the_html_tag_that_ends_a_crossed_out_text_ends_no_answer(opened: Open, is_special: bool):
    tokenizer = spm_tokenizer(with_prefix=False)
    tokenizer.add_tokens([AddedToken("</s>", normalized=False, special=is_special)])
    found = opened(tokenizer)
    assert (tokenizer.token_to_id("</s>") in found.end_ids) is is_special


@pytest.mark.parametrize("is_special", [False, True])
def test_tokens_that_fill_a_gap_are_found_by_their_names(opened: Open, is_special: bool):
    tokenizer = byte_level_tokenizer("smollm")
    assert opened(tokenizer).fim is None
    names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>"]
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=is_special) for name in names])
    found = opened(tokenizer)
    ids = [tokenizer.token_to_id(name) for name in names]
    assert found.fim == FimTokens(*ids[:5]) and set(ids[3:]) <= found.end_ids
    assert not set(ids[:3]) & found.end_ids
    assert opened(tokenizer, ids[0]).fim is None, "the model has no rows for them"
