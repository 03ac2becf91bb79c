"""The registry, the catalogue and models of other programs: names, paths, manifests, and how each can be wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import edgespec
from demo import TEST_THREADS
from edgespec.cli.main import cli
from edgespec.errors import ModelFileError, ModelNotFound
from edgespec.formats.manifest import read_pair
from edgespec.loading import catalogue
from edgespec.loading import registry as models
from edgespec.loading.catalogue import Entry, entries, parse
from edgespec.loading.download import check_hash
from edgespec.loading.hub import HubFile, choose, head_beside
from edgespec.loading.registry import found_elsewhere, path_elsewhere, resolve
from edgespec.platform.files import shipped_models
from tiny_gguf import write_model

TARGET, DRAFT = b"target weights", b"draft weights"


def file_table(role: str, path: str, content: bytes) -> str:
    return f'[files.{role}]\npath = "{path}"\nbytes = {len(content)}\nsha256 = "{hashlib.sha256(content).hexdigest()}"'


def manifest_text(**changes: str) -> str:
    parts = {
        "head": 'format = 1\nname = "pair"\ndescription = "two files"\nbanner = "hello"\ncontext_length = 64',
        "target": file_table("target", "t.gguf", TARGET),
        "draft": file_table("draft", "d.gguf", DRAFT),
        "sampling": "[sampling]\ntemperature = 0.7\ntop_k = 40",
    }
    return "\n".join((parts | changes).values()) + "\n"


def write_pair(folder: Path, **changes: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "t.gguf").write_bytes(TARGET)
    (folder / "d.gguf").write_bytes(DRAFT)
    (folder / "manifest.toml").write_text(manifest_text(**changes), encoding="utf-8")
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_name_is_a_pair_and_the_users_folder_comes_before_the_checkout(home: Path):
    assert "demo" in models.registered_folders()
    write_pair(home / "demo")
    pair = resolve("demo")
    assert (pair.banner, pair.context_length) == ("hello", 64)
    assert (pair.target.read_bytes(), pair.draft.read_bytes(), pair.medium) == (TARGET, DRAFT, None)
    assert dict(pair.recommended) == {"temperature": 0.7, "top_k": 40}
    assert models.registered_folders()["demo"] == home / "demo"


def test_paths(home: Path, tmp_path: Path):
    folder = write_pair(tmp_path / "elsewhere")
    assert resolve(str(folder)).draft == folder / "d.gguf"
    alone = resolve(str(folder / "t.gguf"))
    assert (alone.name, alone.target, alone.draft, alone.banner) == ("t", folder / "t.gguf", None, "")
    assert [file.sha256 for file in alone.files.values()] == [None]


def test_a_given_draft_replaces_the_pairs_own(home: Path, tmp_path: Path):
    write_pair(home / "pair")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"x")
    assert resolve("pair", other).draft == other
    assert resolve("pair").draft == home / "pair" / "d.gguf"
    for folder in (tmp_path, tmp_path / ("deep" * 50), tmp_path / "/".join(["deep"] * 300)):
        with pytest.raises(ModelNotFound, match=r"no draft .*absent\.gguf"):
            resolve("pair", folder / "absent.gguf")


def test_a_folder_that_is_given_as_draft_is_the_model_in_it(home: Path, tmp_path: Path):
    write_pair(home / "pair")
    assert resolve("pair", write_pair(tmp_path / "exported")).draft == tmp_path / "exported" / "t.gguf"
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "small.gguf").write_bytes(b"x")
    assert resolve("pair", tmp_path / "plain").draft == tmp_path / "plain" / "small.gguf"
    (tmp_path / "plain" / "small.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"holds no manifest.toml and no \.gguf"):
        resolve("pair", tmp_path / "plain")


@pytest.mark.parametrize("text", ["absent.gguf", "no/such/folder", "./demo2"])
def test_a_missing_path_is_not_taken_for_a_name(home: Path, text: str):
    write_pair(home / "pair")
    with pytest.raises(ModelNotFound, match=r"'pare'.*did you mean 'pair'.*known names: demo, pair"):
        resolve("pare")
    with pytest.raises(ModelNotFound, match=r"no model .*or give a \.gguf or \.onnx file"):
        resolve(text)


def test_a_gguf_without_its_ending_runs(tmp_path: Path):
    """Ollama names its files by their checksum."""
    path = write_model(tmp_path / "tiny.gguf").rename(tmp_path / "sha256-0123")
    assert resolve(str(path)).target == path
    with edgespec.load(path, drafter="none", threads=1) as model:
        assert model.generate("Hi", options=edgespec.GenerateOptions(max_tokens=2, ignore_eos=True)).stats.new_tokens


def test_other_files_are_refused(home: Path, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"is not a \.gguf or \.onnx file.*export"):
        resolve(str(tmp_path / "model.safetensors"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFileError, match=r"holds no manifest\.toml and no \.gguf or \.onnx file"):
        resolve(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "format = 1\nname = "}, r"cannot be read: .*line 2"),
        ({"head": "format = 2"}, "format is 2; this edgespec reads 1"),
        ({"head": 'format = 1\ndescripton = "x"'}, "unknown field `descripton`"),
        ({"target": ""}, r"files\.target is missing"),
        ({"draft": '[files.draft]\npath = "d.gguf"\nbytes = 13'}, r"`sha256` - at `\$\.files"),
        ({"draft": file_table("draft", "../d.gguf", DRAFT)}, r"must stay inside the folder, got '\.\./d\.gguf'"),
    ],
)
def test_a_bad_manifest_names_file_and_key(home: Path, changes: dict[str, str], message: str):
    folder = write_pair(home / "pair", **changes)
    with pytest.raises(ModelFileError, match=message) as caught:
        resolve("pair")
    assert str(folder) in str(caught.value)


def test_missing_truncated_and_damaged_files(home: Path):
    folder = write_pair(home / "pair")
    (folder / "d.gguf").write_bytes(DRAFT[:-1])
    with pytest.raises(ModelFileError, match=r"d\.gguf has 12 bytes, the manifest says 13"):
        resolve("pair")
    (folder / "d.gguf").write_bytes(DRAFT[:-1] + b"!")
    with pytest.raises(ModelFileError, match=r"d\.gguf has SHA-256 .* the manifest says"):
        check_hash(resolve("pair").files["draft"])
    assert read_pair(folder).name == "pair"
    (folder / "d.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"d\.gguf is missing"):
        resolve("pair")


# -- the catalogue is sound, its claims have a source, and names lead to what they say


ROOT = Path(__file__).resolve().parents[2]
ALL = list(entries().values())


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_an_entry_is_sound(entry: Entry):
    assert entry.name == entry.name.lower() and entry.parameters > 1e6
    assert entry.licence and entry.description and entry.repo and entry.weights and entry.quant
    assert entry.files or not entry.verified, "what was tried here has a known checksum"
    if entry.draft:
        draft = entries()[entry.draft]
        assert draft.family == entry.family or (draft.verified and entry.verified), (
            "another one only where it was measured"
        )
        assert draft.guessed_bytes() < entry.guessed_bytes()
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
    for text in ("format = 2", "format =", "format = 1\nfamily='x'\nlicence='y'\n[models.a]"):
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
        (["m-UD-Q4_K_XL.gguf", "m-IQ4_XS.gguf"], "", ["m-UD-Q4_K_XL.gguf"], ""),
        (["m.gguf", "mmproj-m-F16.gguf", "m.imatrix.gguf"], "", ["m.gguf"], ""),
        (["Q8_0/m-00002-of-00002.gguf", "Q8_0/m-00001-of-00002.gguf"], "q8_0", ["Q8_0/m-00001-of-00002.gguf"], ""),
        (["m-Q4_0.gguf", "m-draft-Q4_0.gguf", "m-draft-Q8_0.gguf"], "", ["m-Q4_0.gguf"], "m-draft-Q4_0.gguf"),
        (["g-Q4_K_M.gguf", "mmproj-F16.gguf", "mtp-g.gguf"], "", ["g-Q4_K_M.gguf"], "mtp-g.gguf"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "b-Q8_0.gguf", ["b-Q8_0.gguf"], ""),
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
        (["model.onnx"], "", "no complete GGUF or ONNX model"),
    ],
)
def test_a_repository_that_is_no_use_says_why(names: list[str], wanted: str, said: str):
    with pytest.raises((ModelNotFound, ModelFileError), match=said):
        choose("o/r", listing(*names), wanted)


# -- models of Ollama, LM Studio and the hub's cache run by the names they have there


DEMO = shipped_models() / "demo"
WEIGHTS = "application/vnd.ollama.image.model"


@pytest.fixture
def users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for name in ("OLLAMA_MODELS", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "own"))
    return tmp_path


def ollama(root: Path, name: str, digest: str = "a" * 64, **changed: object) -> Path:
    """A model as `ollama pull` keeps it; its manifest."""
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(DEMO / "demo-draft-q8_0.gguf", blob)
    layers = [{"mediaType": WEIGHTS, "digest": f"sha256:{digest}"}, {"mediaType": "other", "digest": "sha256:0"}]
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "layers": layers} | changed))
    return path


def hub(root: Path, repo: str, *files: str, commit: str = "c1", is_main: bool = True) -> Path:
    """A repository as huggingface_hub keeps it; its snapshot."""
    folder = root / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in files:
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(DEMO / "demo-draft-q8_0.gguf", snapshot / file)
    if is_main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return snapshot


def test_a_model_of_ollamas_answers_by_its_name_there(users_home: Path) -> None:
    ollama(users_home / ".ollama" / "models", "registry.ollama.ai/library/tiny/135m")
    with edgespec.load("tiny:135m", threads=TEST_THREADS, reproducible=False) as model:
        assert model.pair.name == "tiny-135m"
        assert model.generate("Hello", options=edgespec.GenerateOptions(max_tokens=2)).stats.new_tokens == 2
    with pytest.raises(ModelNotFound, match="no model 'tiny'"):
        resolve("tiny")  # which is tiny:latest


def test_names_of_ollamas(users_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = users_home / "elsewhere"
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    ollama(root, "registry.ollama.ai/library/llama/latest")
    ollama(root, "registry.ollama.ai/someone/llama/8b", "b" * 64)
    ollama(root, "hf.co/org/Repo-GGUF/Q4_K_M")
    assert sorted(each.name for each in found_elsewhere()) == [
        *("hf.co/org/Repo-GGUF:Q4_K_M", "llama:latest", "someone/llama:8b")
    ]
    assert path_elsewhere("llama") == path_elsewhere("llama:latest") != path_elsewhere("someone/llama:8b")
    assert resolve("hf.co/org/Repo-GGUF:Q4_K_M").target.is_file()


def test_what_is_damaged_or_no_gguf_is_left_out(users_home: Path) -> None:
    root = users_home / ".ollama" / "models"
    for index, layers in enumerate(([{}], "no", [{"mediaType": WEIGHTS, "digest": "sha256:../../x"}], [])):
        ollama(root, f"registry.ollama.ai/library/m/{index}", layers=layers)
    ollama(root, "registry.ollama.ai/library/m/text").write_text("{")
    ollama(root, "registry.ollama.ai/library/m/other", "b" * 64)
    (root / "blobs" / f"sha256-{'b' * 64}").write_bytes(b"no model")
    ollama(root, "registry.ollama.ai/library/m/gone", "d" * 64)
    (root / "blobs" / f"sha256-{'d' * 64}").unlink()
    ollama(root, "registry.ollama.ai/library/m/deep").write_text("[" * 200_000)
    ollama(root, "stray")
    ollama(root, "host/stray")
    assert list(found_elsewhere()) == []


def test_a_repository_in_the_hubs_cache_is_chosen_from_as_a_pull_does(users_home: Path) -> None:
    cache = users_home / ".cache" / "huggingface" / "hub"
    hub(cache, "org/Tiny-GGUF", "Tiny-Q8_0.gguf", "sub/Tiny-Q4_K_M.gguf", "mmproj-Tiny.gguf")
    hub(cache, "org/Tiny-GGUF", "Tiny-Q2_K.gguf", commit="older", is_main=False)
    assert {each.name for each in found_elsewhere()} == {"org/Tiny-GGUF:Q8_0", "org/Tiny-GGUF:Q4_K_M"}
    assert resolve("org/Tiny-GGUF").target.name == "Tiny-Q4_K_M.gguf"
    assert resolve("hf.co/org/tiny-gguf:q8_0", draft=Path("org/Tiny-GGUF:Q4_K_M")).draft is not None
    with pytest.raises(ModelNotFound, match="edgespec pull org/Tiny-GGUF:Q6_K"):
        resolve("org/Tiny-GGUF:Q6_K")


def test_a_file_that_is_there_and_a_pulled_model_come_first(users_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(users_home / ".cache" / "huggingface" / "hub", "org/name", "Other-Q8_0.gguf")
    monkeypatch.chdir(users_home)
    (users_home / "org" / "name").mkdir(parents=True)
    shutil.copyfile(DEMO / "demo-target-q8_0.gguf", users_home / "org" / "name" / "own.gguf")
    assert resolve("org/name").target.name == "own.gguf"


def test_ls_shows_where_each_is(users_home: Path) -> None:
    ollama(users_home / ".ollama" / "models", "registry.ollama.ai/library/tiny/135m")
    studio = users_home / ".lmstudio" / "models" / "org" / "Tiny-GGUF"
    studio.mkdir(parents=True)
    shutil.copyfile(DEMO / "demo-draft-q8_0.gguf", studio / "Tiny-Q8_0.gguf")
    rows = {each["name"]: each for each in json.loads(CliRunner().invoke(cli, ["ls", "--json"]).stdout)}
    assert rows["tiny:135m"]["state"] == "in Ollama" and rows["org/Tiny-GGUF:Q8_0"]["state"] == "in LM Studio"
    assert rows["tiny:135m"]["bytes"] == (DEMO / "demo-draft-q8_0.gguf").stat().st_size
