"""The tokenizer of an exported GGUF splits text as the `tokenizers` library does, or the export is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf.gguf_reader import GGUFReader

from demo import change_json
from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.errors import ModelFileError
from edgespec.export.check import read_tokenizer
from edgespec.export.gguf.convert import convert
from edgespec.export.gguf.tokenizer import check_tokenizer
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.tokenizer import write_tokenizer_files
from tiny_checkpoints import VOCABULARY, write_checkpoint, write_tokenizer
from tiny_gguf import byte_letters

KINDS = ("llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "gpt-4o", "llama-spm", "gemma-spm")


def folder_with(tmp_path: Path, kind: str) -> Path:
    """A small model with a tokenizer of `kind`."""
    folder = write_checkpoint(tmp_path / "hf", "qwen2", num_hidden_layers=1)
    write_tokenizer(folder, kind)
    return folder


def fields_of(folder: Path) -> dict[str, Any]:
    out = folder.parent / "out.gguf"
    convert(folder, out, "f16")
    return {key: field.contents() for key, field in GGUFReader(out).fields.items() if key.startswith("tokenizer.")}


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_split_as_the_tokenizer_does_by_llama_cpp_and_by_what_is_made_of_the_gguf(tmp_path: Path, kind: str):
    folder, path = folder_with(tmp_path, kind), tmp_path / "out.gguf"
    fields = fields_of(folder)
    assert fields["tokenizer.ggml.pre"] == ("default" if kind.endswith("-spm") else kind)
    back = tmp_path / "back"
    back.mkdir()
    write_tokenizer_files(check_gguf(path), back)
    for each in (folder, back):
        assert check_tokenizer(each, path) > 200
    text = "The foxes there: 1984 + 2026,\n\n  don't; žluťoučký 敏捷 🙂"
    with VocabularyFile(path) as theirs:
        ours = TokenizerFile(back, theirs.size)
        assert b"".join(map(theirs.token_bytes, theirs.encode(text))).decode().lstrip() == text
        for key in ("bos_id", "eos_id", "adds_bos", "end_ids", "chat_template"):
            assert getattr(ours, key) == getattr(theirs, key), key
        start = ours.token_names().index("<|start|>")  # which llama.cpp prints, whatever its kind, for one model's sake
        assert [p for at, p in enumerate(ours.pieces) if at != start] == [
            p for at, p in enumerate(theirs.pieces) if at != start
        ]


def test_a_wrong_splitter_is_found_by_its_first_text(tmp_path: Path):
    """As when a splitter's name is guessed: the file loads, and splits numbers otherwise."""
    folder = folder_with(tmp_path, "qwen2")
    convert(folder, tmp_path / "out.gguf", "f16")
    data = (tmp_path / "out.gguf").read_bytes()
    entry = b"tokenizer.ggml.pre\x08\0\0\0\x05\0\0\0\0\0\0\0"
    assert data.count(entry + b"qwen2") == 1
    (tmp_path / "out.gguf").write_bytes(data.replace(entry + b"qwen2", entry + b"gpt-2"))
    with pytest.raises(ModelFileError, match=r"does not tokenise as .*hf: '.*' becomes \["):
        check_tokenizer(folder, tmp_path / "out.gguf")


def test_words_that_llama_cpp_splits_at_a_mark_are_no_reason_to_refuse(tmp_path: Path):
    folder = folder_with(tmp_path, "tekken")
    source = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    merge_syllable(source["model"], "\u0939\u093f")  # a letter and its mark, as in the probe text in Hindi
    (folder / "tokenizer.json").write_text(json.dumps(source), encoding="utf-8")
    convert(folder, tmp_path / "out.gguf", "f16")
    theirs = read_tokenizer(folder)
    with VocabularyFile(tmp_path / "out.gguf") as ours:
        assert len(theirs.encode("\u0939\u093f").ids) == 1 < len(ours.encode("\u0939\u093f"))
    assert check_tokenizer(folder, tmp_path / "out.gguf") > 200


def merge_syllable(model: dict[str, Any], text: str) -> None:
    """Make `text` one token of a byte-level BPE, in place of its last merges."""
    letters = byte_letters()
    whole = [letters[byte] for byte in text.encode()]
    model["merges"] = [list(pair.split(" ")) if isinstance(pair, str) else pair for pair in model["merges"]]
    for end in range(len(whole), 1, -1):
        index = model["vocab"].pop("".join(model["merges"].pop()))
        model["vocab"]["".join(whole[:end])] = index
        model["merges"].insert(0, ["".join(whole[: end - 1]), whole[end - 1]])


def test_special_ids_are_written_in_words(tmp_path: Path):
    folder = folder_with(tmp_path, "llama-bpe")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [398, 399]}))
    fields = fields_of(folder)
    assert fields["tokenizer.ggml.bos_token_id"] == 397
    assert fields["tokenizer.ggml.eos_token_id"] == 398
    assert fields["tokenizer.ggml.eot_token_id"] == 399
    assert fields["tokenizer.ggml.add_bos_token"] is True
    assert fields["tokenizer.ggml.add_eos_token"] is False
    with VocabularyFile(tmp_path / "out.gguf") as vocabulary:
        assert vocabulary.adds_bos
        assert {398, 399} <= vocabulary.end_ids


def test_a_pad_token_behind_the_vocabulary_is_left_out(tmp_path: Path):
    """Fine-tuning adds one to the tokenizer without a row in the model."""
    folder = folder_with(tmp_path, "llama-bpe")
    change_json(folder / "tokenizer_config.json", pad_token="[PAD]")
    assert "tokenizer.ggml.padding_token_id" not in fields_of(folder)
    change_json(folder / "tokenizer_config.json", bos_token="[BOS]")
    with pytest.raises(ModelFileError, match=r"bos_token '\[BOS\]', which tokenizer.json lacks"):
        fields_of(folder)


def test_a_tokenizer_without_named_ends(tmp_path: Path):
    """Without entries llama.cpp would take id 11 for both."""
    folder = folder_with(tmp_path, "qwen2")
    change_json(folder / "tokenizer_config.json", bos_token=None, eos_token=None)
    change_json(folder / "config.json", bos_token_id=None, eos_token_id=398)
    fields = fields_of(folder)
    assert fields["tokenizer.ggml.bos_token_id"] == fields["tokenizer.ggml.eos_token_id"] == 398
    assert fields["tokenizer.ggml.add_bos_token"] is False
    change_json(folder / "config.json", eos_token_id=None)
    with pytest.raises(ModelFileError, match="name no eos token"):
        fields_of(folder)


@pytest.mark.parametrize("where", ["file", "text", "list", "none"])
def test_where_a_chat_template_may_stand(tmp_path: Path, where: str):
    folder = folder_with(tmp_path, "qwen2")
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    change_json(folder / "tokenizer_config.json", chat_template={"text": "C", "list": named}.get(where))
    if where == "file":
        (folder / "chat_template.jinja").write_text("F")
    wanted = {"file": "F", "text": "C", "list": "D", "none": None}[where]
    assert fields_of(folder).get("tokenizer.chat_template") == wanted


def test_added_tokens_and_scores_of_an_spm_tokenizer(tmp_path: Path):
    folder = folder_with(tmp_path, "gemma-spm")
    source = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    base = source["added_tokens"][0]
    words = sorted(source["model"]["vocab"], key=source["model"]["vocab"].__getitem__)
    spaced = next(text for text in words if text.startswith("\u2581") and len(text) > 2)
    ids = {"spaced": source["model"]["vocab"][spaced], "beyond": VOCABULARY, "user": VOCABULARY - 1}
    source["added_tokens"] = [
        *[token for token in source["added_tokens"] if token["id"] != ids["user"]],
        base | {"id": ids["spaced"], "content": spaced, "special": False},
        base | {"id": ids["user"], "content": "<mine>", "special": False},
        base | {"id": ids["beyond"], "content": "<image>"},
    ]
    (folder / "tokenizer.json").write_text(json.dumps(source), encoding="utf-8")
    fields = fields_of(folder)
    types, tokens = fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.tokens"]
    assert [types[ids["spaced"]], types[ids["user"]], types[0], types[tokens.index("<0x41>")]] == [1, 4, 2, 6]
    assert "<image>" not in tokens
    assert fields["tokenizer.ggml.add_space_prefix"] is False
    scores = dict(zip(tokens, fields["tokenizer.ggml.scores"], strict=True))
    first = "".join(source["model"]["merges"][0])
    assert scores[first] == -1 and scores["<0x41>"] < -1e5
    assert all(score <= -1 for score in scores.values())


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    r"splits text by \(\('Digits', False\)": (
        "smollm",
        {"pre_tokenizer": {"type": "Digits", "individual_digits": False}},
    ),
    "add_prefix_space": ("gpt-2", {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}),
    "has the normalizers .'Lowercase'.": ("gpt-2", {"normalizer": {"type": "Lowercase"}}),
    "handles spaces by": ("llama-spm", {"pre_tokenizer": {"type": "Whitespace"}}),
    "handles spaces by .*'Nmt'": ("gemma-spm", {"normalizer": {"type": "Nmt"}}),
    "holds a WordPiece tokenizer; allowed": ("gpt-2", {"model": {"type": "WordPiece", "vocab": {}}}),
    "is not a valid tokenizer: KeyError 'id'": ("gpt-2", {"added_tokens": [{"content": "x"}]}),
    "no token for 256 of 256 bytes, such as <0x00>": (
        "gemma-spm",
        {"model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}, "merges": []}},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_tokenizers_that_llama_cpp_would_not_follow_are_refused(tmp_path: Path, message: str):
    kind, values = REFUSED[message]
    folder = folder_with(tmp_path, kind)
    change_json(folder / "tokenizer.json", **values)
    with pytest.raises(ModelFileError, match=message):
        convert(folder, tmp_path / "out.gguf", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_merges_ignored_where_llama_cpp_does_not(tmp_path: Path):
    folder = folder_with(tmp_path, "qwen2")
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    change_json(folder / "tokenizer.json", model=model | {"ignore_merges": True})
    with pytest.raises(ModelFileError, match=r"sets ignore_merges; llama\.cpp does so for llama-bpe, tekken, not"):
        convert(folder, tmp_path / "out.gguf", "f16")


def test_metaspace_instead_of_a_normaliser(tmp_path: Path):
    folder = folder_with(tmp_path, "llama-spm")
    scheme = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    change_json(folder / "tokenizer.json", normalizer=None, pre_tokenizer=scheme)
    assert fields_of(folder)["tokenizer.ggml.add_space_prefix"] is True
    assert check_tokenizer(folder, tmp_path / "out.gguf") > 200
    change_json(folder / "tokenizer.json", pre_tokenizer=scheme | {"split": True})
    with pytest.raises(ModelFileError, match="handles spaces by"):
        fields_of(folder)
