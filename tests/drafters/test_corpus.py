"""The training corpus: how dialogues, problems and functions become documents. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from trainlib import demo_texts as corpus
from trainlib import public_data as datasets


def test_dialogues_are_rendered_with_sorted_tools(corpus_folder: Path):
    documents = corpus.dialogues(corpus_folder / corpus.SGD_TRAIN_FILE, seed=0)
    with_tools = [d for d in documents if "Tools:\nFindBus(day, to)<|im_end|>" in d]
    assert 0 < len(with_tools) < len(documents)
    assert documents == corpus.dialogues(corpus_folder / corpus.SGD_TRAIN_FILE, seed=0)
    tail = (
        '<|im_start|>assistant\n<tool_call>{"name": "FindBus", "arguments": {"to": "Fresno", "day": "monday"}}'
        '</tool_call>\n<tool_response>{"time": "9:00"}</tool_response>\nOne leaves at 9.<|im_end|>\n'
    )
    assert all(d.endswith(tail) and d.startswith("<|endoftext|>") and d.count("<|endoftext|>") == 1 for d in documents)


def test_arithmetic_loses_its_calculator_marks_and_is_split_by_question(corpus_folder: Path):
    train, held_out = corpus.arithmetic(corpus_folder / datasets.GSM8K_FILE)
    assert len(train) + len(held_out) == 99 and 0 < len(held_out) < 15
    assert not set(train) & set(held_out)
    assert "<|im_start|>assistant\n7+1=8\nThe answer is 8.<|im_end|>\n" in "".join(train + held_out)
