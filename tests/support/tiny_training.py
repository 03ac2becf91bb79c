"""A target for tests of training: a tiny Llama with a habit that a draft can learn. Needs torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from trainlib.demo_texts import save_hf_tokenizer, train_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALKS = [f"user {i} asks for {i * 7 % 13} tickets to town {i % 5}" for i in range(40)]


def write_target(path: Path) -> Path:
    """A Llama of three random layers with a tokenizer; beside it talks.jsonl, a text file to prompt it with."""
    path.mkdir()
    tokenizer = train_tokenizer(TALKS, 300)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # a habit that a student can learn: mostly it counts on
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, dims=0) * 0.3)
    model.save_pretrained(path)
    save_hf_tokenizer(tokenizer, path, TEMPLATE)
    (path.parent / "talks.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TALKS))
    return path


def nothing(*_: Any) -> None:
    """No progress is shown."""
