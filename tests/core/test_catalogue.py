"""The catalogue is sound, its claims have a source, and names lead to what they say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from edgespec.errors import ModelFileError, ModelNotFound
from edgespec.loading import catalogue
from edgespec.loading.catalogue import Entry, entries, parse
from edgespec.loading.hub import HubFile, choose, head_beside

ROOT = Path(__file__).resolve().parents[2]
ALL = list(entries().values())


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_an_entry_is_sound(entry: Entry):
    assert entry.name == entry.name.lower() and entry.parameters > 1e6
    assert entry.licence and entry.description and entry.repo and entry.weights and entry.quant
    assert entry.files or not entry.verified, "what was tried here has a known checksum"
    if entry.draft:
        draft = entries()[entry.draft]
        assert draft.family == entry.family and draft.guessed_bytes() < entry.guessed_bytes()
    assert all(head.target == entry.weights for head in entry.heads)
    assert len({head.repo for head in entry.heads}) == len(entry.heads)
    for head in (head for head in entry.heads if head.gguf):
        group = choose(head.gguf, listing(head.gguf.partition(":")[2] or f"{head.gguf.split('/')[1]}-Q8_0.gguf"))
        assert group.target.is_head and parse(head.gguf).repo == head.gguf.partition(":")[0]


@pytest.mark.parametrize(
    ("target", "others", "head"),
    [
        ("m-Q4_K_M.gguf", ("mtp-m-Q4_0.gguf", "mtp-m-Q8_0.gguf", "m-Q8_0.gguf"), "mtp-m-Q8_0.gguf"),
        ("g-it-Q4_K_M.gguf", ("g-it-assistant.Q8_0.gguf",), "g-it-assistant.Q8_0.gguf"),
        ("m.gguf", ("dspark-m-small-Q8_0.gguf", "eagle3-m-BF16.gguf", "mmproj-m.gguf"), "eagle3-m-BF16.gguf"),
        ("m-Q4_0.gguf", ("mtp-n-Q8_0.gguf", "m-draft-Q4_0.gguf"), None),
        ("m-00001-of-00002.gguf", ("m-00002-of-00002.gguf", "dflash-m-Q8_0.gguf"), "dflash-m-Q8_0.gguf"),
    ],
)
def test_heads_beside_a_file_are_found_by_name(target: str, others: tuple[str, ...], head: str | None):
    assert head_beside(target, dict.fromkeys((target, *others), 1000)) == head


def test_heads_are_taken_with_eight_bits():
    found = choose("o/r", listing("m-Q4_K_M.gguf", "mtp-small-Q4_0.gguf", "mtp-small-BF16.gguf", "mtp-small-Q8_0.gguf"))
    assert found.draft and found.draft.files[0].path == "mtp-small-Q8_0.gguf"
    alone = choose("o/r", listing("m-DSpark-Q4_K_M.gguf", "m-DSpark-F16.gguf", "m-DSpark-Q8_0.gguf"))
    assert alone.target.files[0].path == "m-DSpark-Q8_0.gguf"


def test_every_file_of_the_catalogue_travels_in_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    files = [f"models/{path.name}" for path in sorted((ROOT / "models").glob("*.toml"))]
    assert files and [path for path in files if included.get(path) != f"edgespec/data/{path}"] == []


def test_a_damaged_catalogue_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.toml"
    monkeypatch.setattr(catalogue, "shipped_models", lambda: tmp_path)
    for text in (
        "format = 2",
        "format = 1\nfamily = 'x'",
        "format =",
        "format = 1\nfamily='x'\nlicence='y'\n[models.a]",
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ModelFileError, match=r"x\.toml is damaged: .*install edgespec again"):
            entries.__wrapped__()


@pytest.mark.parametrize(
    ("text", "name", "repo", "wanted"),
    [
        ("qwen3-8b", "qwen3-8b", "Qwen/Qwen3-8B-GGUF", ""),
        ("Qwen3-8B:Q8_0", "qwen3-8b-q8_0", "Qwen/Qwen3-8B-GGUF", "Q8_0"),
        ("Org/Some-Model-GGUF:Q4_K_M", "Some-Model-q4_k_m", "Org/Some-Model-GGUF", "Q4_K_M"),
        ("https://huggingface.co/Org/Some-Model-GGUF/tree/main", "Some-Model", "Org/Some-Model-GGUF", ""),
        ("hf.co/Org/Some-Model-GGUF:Q8_0", "Some-Model-q8_0", "Org/Some-Model-GGUF", "Q8_0"),
        ("https://hf.co/Org/M/resolve/v2/sub/m-Q8_0.gguf", "M-m-q8_0", "Org/M", "sub/m-Q8_0.gguf"),
    ],
)
def test_names_repositories_and_addresses(text: str, name: str, repo: str, wanted: str):
    found = parse(text)
    assert (found.name, found.repo, found.wanted) == (name, repo, wanted)
    assert found.revision == ("v2" if "/v2/" in text else "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("qwen3-8", "did you mean qwen3-8b"),
        ("x/y/z", "is not a known model"),
        ("https://example.org/a/b.gguf", "fetch a file yourself, then edgespec add FILE"),
        ("https://huggingface.co/models", "is no repository of the hub"),
        ("", "is not a known model"),
    ],
)
def test_what_cannot_be_got_is_refused(text: str, said: str):
    with pytest.raises(ModelNotFound, match=said):
        parse(text)


# which files of a repository


def listing(*names: str, size: int = 1000) -> dict[str, HubFile]:
    return {name: HubFile(name, size // 10 if "small" in name else size) for name in names}


@pytest.mark.parametrize(
    ("names", "wanted", "target", "draft"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-F16.gguf"], "", ["m-Q4_K_M.gguf"], ""),
        (["qwen2.5-0.5b-instruct-q4_k_m.gguf"], "Q4_K_M", ["qwen2.5-0.5b-instruct-q4_k_m.gguf"], ""),
        (["m-UD-Q4_K_XL.gguf", "m-IQ4_XS.gguf"], "", ["m-UD-Q4_K_XL.gguf"], ""),
        (["m.gguf", "mmproj-m-F16.gguf", "m.imatrix.gguf"], "", ["m.gguf"], ""),
        (["Q8_0/m-00002-of-00002.gguf", "Q8_0/m-00001-of-00002.gguf"], "q8_0", ["Q8_0/m-00001-of-00002.gguf"], ""),
        (["m-Q4_0.gguf", "m-draft-Q4_0.gguf", "m-draft-Q8_0.gguf"], "", ["m-Q4_0.gguf"], "m-draft-Q4_0.gguf"),
        (["m-Q8_0.gguf", "dspark-m-BF16.gguf"], "", ["m-Q8_0.gguf"], "dspark-m-BF16.gguf"),
        (["g-Q4_K_M.gguf", "mmproj-F16.gguf", "mtp-g.gguf"], "", ["g-Q4_K_M.gguf"], "mtp-g.gguf"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "b-Q8_0.gguf", ["b-Q8_0.gguf"], ""),
        (["onnx/model.onnx", "onnx/model_q4.onnx", "tokenizer.json"], "", ["onnx/model.onnx"], ""),
        (["onnx/model.onnx", "onnx/model_q4.onnx", "tokenizer.json"], "model_q4", ["onnx/model_q4.onnx"], ""),
    ],
)
def test_the_files_of_a_repository(names: list[str], wanted: str, target: list[str], draft: str):
    found = choose("o/r", listing(*names), wanted)
    assert [file.path for file in found.target.files][: len(target)] == target
    assert ("" if found.draft is None else found.draft.files[0].path) == draft


@pytest.mark.parametrize(
    ("names", "wanted", "said"),
    [
        (["m-Q8_0.gguf", "m-Q4_0.gguf"], "Q2_K", "o/r has no Q2_K: it has Q4_0, Q8_0"),
        (["a-big-Q8_0.gguf", "a-small-Q8_0.gguf"], "", "o/r holds several models: name a file, as in o/r:FILE"),
        (["model.safetensors", "config.json"], "", "must be converted first: edgespec export o/r"),
        (["README.md"], "", "no complete GGUF or ONNX model, only README.md"),
        (["model.onnx"], "", "no complete GGUF or ONNX model"),
    ],
)
def test_a_repository_that_is_no_use_says_why(names: list[str], wanted: str, said: str):
    with pytest.raises((ModelNotFound, ModelFileError), match=said):
        choose("o/r", listing(*names), wanted)
