"""A GGUF with another vocabulary: the same weights under other token ids, some tokens left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from tiny_gguf import finish


def write_reordered_gguf(source: Path, path: Path, order: Sequence[int]) -> Path:
    """Write the model at `source` with token `order[i]` of it as token i; what `order` lacks is left out."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    place = {old: new for new, old in enumerate(order)}
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kept = {tokens[old] for old in order}
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
            value = [value[old] for old in order]
        elif key == "tokenizer.ggml.merges":
            value = [rule for rule in value if {rule.replace(" ", ""), *rule.split(" ")} <= kept]
        elif key.endswith("_token_id"):
            value = place[value]
        elif key.endswith(".vocab_size"):
            value = len(order)
        writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        rows = tensor.data[list(order)] if tensor.name in ("token_embd.weight", "output.weight") else tensor.data
        writer.add_tensor(tensor.name, np.ascontiguousarray(rows), raw_dtype=tensor.tensor_type)
    return finish(writer, path, {})
