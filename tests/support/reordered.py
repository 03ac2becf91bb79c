"""Models with another vocabulary made from given ones: the same weights under other token ids, some tokens left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import onnx
from onnx import numpy_helper

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


def write_reordered_onnx(source: Path, folder: Path, order: Sequence[int]) -> Path:
    """A copy of the export in `source` whose token i is token `order[i]` of it; every token must be in `order`."""
    shutil.copytree(source, folder)
    place = {old: new for new, old in enumerate(order)}
    graph_file, tokenizer_file = folder / "model.onnx", folder / "tokenizer.json"
    model = onnx.load(str(graph_file))
    for tensor in model.graph.initializer:
        if tensor.name.startswith(("lm_head.", "model.embed_tokens.")):
            rows = numpy_helper.to_array(tensor)[list(order)]
            tensor.CopyFrom(numpy_helper.from_array(rows, tensor.name))
    (folder / "model.onnx.data").unlink()
    onnx.save(model, str(graph_file), save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    tokenizer = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {name: place[old] for name, old in vocabulary.items()}
    for token in tokenizer["added_tokens"]:
        token["id"] = place[token["id"]]
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    tokenizer_file.write_text(json.dumps(tokenizer), encoding="utf-8")
    for name in ("config.json", "genai_config.json", "generation_config.json"):
        if (folder / name).is_file():
            (folder / name).write_text(_with_ids_moved((folder / name).read_text(encoding="utf-8"), place))
    return graph_file


def _with_ids_moved(text: str, place: dict[int, int]) -> str:
    """A configuration with its special tokens under their new ids."""

    def moved(value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {name: moved(item, name) for name, item in value.items()}
        if key.endswith("token_id"):
            return [place[one] for one in value] if isinstance(value, list) else place.get(value, value)  # type: ignore[call-overload]
        return value

    return json.dumps(moved(json.loads(text)))
