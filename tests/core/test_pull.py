"""Pulling models from a hub on this machine, and everything that goes wrong between here and there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edgespec
from demo import DEMO, ROOT, heed_interrupts
from edgespec.errors import ConfigError, DownloadError, ModelFileError, ModelNotFound, StateError
from edgespec.formats.manifest import ModelPair
from edgespec.loading.own_models import add, remove
from edgespec.loading.pull import pull
from edgespec.loading.registry import resolve
from hub_server import COMMIT, TAG, HubServer, serve
from split_gguf import split
from waiting import until

ID = "edge/demo-GGUF"
GREEDY, SHORT = edgespec.Sampling(temperature=0), edgespec.GenerateOptions(max_tokens=6)
TARGET, DRAFT = DEMO / "demo-medium-q8_0.gguf", DEMO / "demo-draft-q8_0.gguf"  # both small
Get = Callable[..., ModelPair]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository as publishers make them: quantisations, a draft, and files that are no models."""
    folder = tmp_path / "repo"
    folder.mkdir()
    shutil.copy(TARGET, folder / "demo-Q8_0.gguf")
    shutil.copy(TARGET, folder / "demo-Q6_K.gguf")
    shutil.copy(DRAFT, folder / "demo-draft-Q8_0.gguf")
    (folder / "mmproj-demo-F16.gguf").write_bytes(b"GGUF")
    (folder / "README.md").write_text("a model card")
    return folder


@pytest.fixture
def hub(repo: Path) -> Iterator[HubServer]:
    with serve({ID: repo}) as server:
        yield server


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that a download made, which take no time here."""
    made: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr("time.sleep", lambda seconds: made.append(seconds) if seconds >= 1 else sleep(seconds))
    return made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def get(tmp_path: Path, home: Path, hub: HubServer, notes: list[str], waits: list[float], monkeypatch) -> Get:
    """Pull in this process; huggingface_hub reads its settings when it is imported, so they are changed there."""
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))

    def run(text: str = ID, **options: object) -> ModelPair:
        return pull(text, lambda name, done, total: None, notes.append, **options)  # type: ignore[arg-type]

    return run


def command(*arguments: str, hub: HubServer, models: Path, limit: int | None = None, **popen: object):
    """edgespec as a user runs it. `limit`: the largest file that it may write."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(models / "hf"), "EDGESPEC_MODELS": str(models)}

    def restrict() -> None:
        import resource

        heed_interrupts()
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [sys.executable, "-m", "edgespec", *arguments],
        cwd=ROOT,
        env=kept | own | {"EDGESPEC_THREADS": "1"},
        preexec_fn=restrict,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,  # type: ignore[call-overload]
    )


def nothing_loads(home: Path) -> bool:
    """No model, and no file that could be taken for one."""
    return not [path for path in home.rglob("*") if path.suffix in (".gguf", ".onnx") or path.name == "manifest.toml"]


# what is chosen


def test_a_repository_becomes_a_pair_that_is_found_by_its_names(get, hub, home, notes):
    pair = get()
    folder = home / "demo"
    assert (pair.target, pair.draft) == (folder / "demo-Q6_K.gguf", folder / "draft" / "demo-draft-Q8_0.gguf")
    assert pair.target.read_bytes() == TARGET.read_bytes()
    assert (pair.licence, pair.source) == ("apache-2.0", f"{ID}@{COMMIT}#demo-Q6_K.gguf")
    assert any("Q6_K was chosen; it also has Q8_0" in note for note in notes)
    assert sorted(hub.fetched) == ["demo-Q6_K.gguf", "demo-draft-Q8_0.gguf"]
    assert resolve(str(folder)).target == resolve(ID).target == pair.target
    asked = len(hub.asked)
    assert get().target == pair.target
    assert len(hub.asked) == asked and f"already on this machine, from {ID}@{COMMIT}#demo-Q6_K.gguf" in notes[-1]
    remove(ID)
    assert not folder.exists()


def test_a_quantisation_a_file_and_an_address_can_be_named(get, hub, home, tmp_path):
    assert get(f"{ID}:q8_0").target == home / "demo-q8_0" / "demo-Q8_0.gguf"
    assert resolve(f"{ID}:Q8_0").target == home / "demo-q8_0" / "demo-Q8_0.gguf"
    address = f"{hub.endpoint}/{ID}/blob/main/demo-draft-Q8_0.gguf"
    assert get(address, name="small").target == home / "small" / "demo-draft-Q8_0.gguf"
    assert get(ID, name="alone", wants_draft=False).draft is None
    with pytest.raises(ModelNotFound, match=r"has no Q2_K: it has Q6_K, Q8_0"):
        get(f"{ID}:Q2_K")
    with pytest.raises(ConfigError, match=r"taken by a model from edge/demo-GGUF@.*--name"):
        get("other/model", name="small")
    own = Path(shutil.copy(TARGET, tmp_path / "own.gguf"))
    add(own, "mine")
    with pytest.raises(ConfigError, match="taken by a model from elsewhere"):
        get(name="mine", draft=f"{ID}:Q8_0")
    assert own.is_file() and resolve("mine").target == own


def test_another_quantisation_under_the_same_name_is_not_taken_for_it(get, hub):
    pair = get(name="tagged", wants_draft=False, revision=TAG)
    asked = len(hub.asked)
    assert get(f"{ID}:Q6_K", name="tagged").target == get(name="tagged").target == pair.target
    with pytest.raises(ConfigError, match="the name tagged is taken by a model from"):
        get(f"{ID}:Q8_0", name="tagged")
    assert len(hub.asked) == asked


def test_a_split_model_comes_whole_and_loads(get, hub, repo, home):
    for path in repo.glob("demo-Q*"):
        path.unlink()
    parts = split(TARGET, repo / "demo-Q8_0", 20)
    assert len(parts) == 3
    pair = get()
    assert [path.name for path in pair.paths("target")] == [part.name for part in parts]
    with edgespec.load("edge/demo-GGUF", threads=1) as model, edgespec.load(TARGET, threads=1) as whole:
        answers = [each.generate("Hi", GREEDY, SHORT).token_ids for each in (model, whole)]
    assert answers[0] == answers[1] and answers[0]
    pair.paths("target")[1].unlink()
    with pytest.raises(ModelFileError, match=r"demo-Q8_0-00002-of-00003\.gguf is missing"):
        resolve("edge/demo-GGUF")
    with pytest.raises(ModelFileError, match=r"open its first file, demo-Q8_0-00001-of-00003\.gguf"):
        edgespec.load(parts[2])


def test_an_onnx_folder_comes_with_its_tokenizer(get, repo):
    for path in repo.iterdir():
        path.unlink()
    shutil.copytree(DEMO / "onnx" / "draft", repo, dirs_exist_ok=True)
    pair = get(ID, name="graph")
    assert pair.engines == ("onnx",)
    assert {path.name for path in pair.paths("target")} >= {"model.onnx", "model.onnx.data", "tokenizer.json"}
    with edgespec.load("graph", threads=1) as model:
        assert model.generate("Hi", GREEDY, SHORT).token_ids


def test_a_draft_that_cannot_be_used_is_left_out_with_its_reason(get, repo, home, notes):
    (repo / "demo-draft-Q8_0.gguf").write_bytes(b"GGUF" + bytes(100))
    assert get().draft is None
    (said,) = [note for note in notes if "kept without its draft" in note]
    assert "demo-draft-Q8_0.gguf is not a usable model" in said
    assert not list(home.rglob("demo-draft*"))


# what goes wrong


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_cut_connections_are_made_up_for(get, hub, waits, knows_ranges):
    hub.faults.cut_after, hub.faults.cuts, hub.faults.knows_ranges = 1 << 20, 2, knows_ranges
    assert get().target.read_bytes() == TARGET.read_bytes()
    assert hub.fetched.count("demo-Q6_K.gguf") == 3
    assert waits == [1, 1]


def test_a_hub_that_never_delivers_is_given_up_and_gone_on_with(get, hub, home, waits):
    hub.faults.cuts = 99
    with pytest.raises(DownloadError, match=r"edge/demo-GGUF could not be fetched .*: run the same command again"):
        get()
    assert len(waits) <= 6
    assert nothing_loads(home)
    hub.faults.cuts = 0
    assert get().target.read_bytes() == TARGET.read_bytes()


def test_wrong_contents_never_get_a_name(get, hub, home):
    hub.faults.corrupt = 99
    with pytest.raises(DownloadError, match=r"does not match the checksum that the hub lists: run the same"):
        get()
    assert nothing_loads(home)
    assert not list(home.rglob("*.part"))
    hub.faults.corrupt = 0
    assert get().target.read_bytes() == TARGET.read_bytes()


def test_a_model_that_is_not_there(get, hub, repo):
    with pytest.raises(
        ModelNotFound, match=r"no model 'edge/nothing' that this user may read: check the spelling, or set"
    ):
        get("edge/nothing")
    with pytest.raises(ModelNotFound, match="has no revision 'v7'"):
        get(revision="v7")
    hub.faults.refusals, hub.faults.refused = [(404, {"X-Error-Code": "EntryNotFound"})], "/store/"
    with pytest.raises(ModelNotFound, match=r"could not be fetched .*: run the same command again"):
        get()


def test_a_gated_model_needs_a_token(get, hub, monkeypatch):
    hub.faults.token = "hf_secret"
    with pytest.raises(ModelNotFound, match=r"is gated: accept its terms .* set HF_TOKEN") as caught:
        get()
    assert "hf_secret" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelNotFound, match="HF_TOKEN"):
        get()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert get().target.is_file()
    hub.faults.refusals = [(401, {"X-Error-Message": "Invalid credentials in Authorization header"})]
    with pytest.raises(ModelNotFound, match=r"could not be fetched .*HF_TOKEN"):
        get(name="other")


def test_a_hub_that_is_busy_is_waited_for(get, hub, waits):
    hub.faults.refused, hub.faults.refusals = "/store/", [(429, {"Retry-After": "7"})]
    assert get().target.is_file()
    assert waits == [8.0]
    hub.faults.refused, hub.faults.refusals = "/api/models/", [(503, {})]
    with pytest.raises(DownloadError, match=r"could not be fetched .*503.*: run the same command again"):
        get(name="later")


def test_a_file_name_that_leads_elsewhere_is_not_fetched(get, hub, repo, home):
    (repo / "demo-Q6_K.gguf").rename(repo / "..\\demo-Q6_K.gguf")
    (repo / "demo-Q8_0.gguf").unlink()
    with pytest.raises(ModelFileError, match="is not a plain file name"):
        get()
    assert hub.fetched == []


def test_no_room_on_the_disk_is_known_before_anything_is_fetched(get, hub, home):
    hub.faults.claimed_bytes["demo-Q6_K.gguf"] = 10**15
    fix = "free some space, or set EDGESPEC_MODELS"
    with pytest.raises(StateError, match=rf"needs 93132\d\.\d+ GiB more .*, plus 64 MiB kept free; it has .*: {fix}"):
        get()
    assert hub.fetched == [] and nothing_loads(home)


def test_a_hub_without_a_network_and_offline(get, hub, home, monkeypatch):
    for address in ("http://127.0.0.1:9", "127.0.0.1:8000", "ftp://mirror.example.org"):
        monkeypatch.setenv("HF_ENDPOINT", address)
        with pytest.raises(DownloadError, match=rf"could not be fetched from {address}.*check HF_ENDPOINT"):
            get()
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    get()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert get().target.is_file()
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids downloads"):
        get(f"{ID}:Q8_0")


# in processes of their own


@pytest.mark.skipif(os.name == "nt", reason="no limit of file sizes")
def test_a_disk_that_fills_up_is_one_line(home, hub):
    process = command("pull", ID, hub=hub, models=home, limit=2 << 20)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 1 and output == ""
    line = said.splitlines()[-1]
    assert line.startswith("error: ") and "cannot be written: File too large; free some space" in line
    assert nothing_loads(home)
    process = command("pull", ID, hub=hub, models=home)
    assert process.communicate(timeout=60)[0] == "run it: edgespec chat demo\n"


def test_a_killed_pull_goes_on_where_it_stopped(home, hub):
    hub.faults.pause_s = 0.02
    for number, ended in enumerate((signal.SIGKILL, signal.SIGINT), 1):
        process = command("pull", ID, hub=hub, models=home)
        until(
            lambda most=number << 20: sum(path.stat().st_size for path in home.rglob("*.part")) >= most, process=process
        )
        process.send_signal(ended)
        said = process.communicate()[1]
        assert nothing_loads(home)
    assert process.returncode == 130 and "the same command continues" in said
    hub.faults.pause_s = 0.0
    process = command("pull", ID, hub=hub, models=home)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0, said
    assert "MB of it are already here" in said
    assert (home / "demo" / "demo-Q6_K.gguf").read_bytes() == TARGET.read_bytes()
    assert not list(home.rglob("*.part"))


def test_two_at_once_fetch_once(home, hub):
    hub.faults.pause_s = 0.005
    both = [command("pull", ID, hub=hub, models=home) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(hub.fetched) == ["demo-Q6_K.gguf", "demo-draft-Q8_0.gguf"]
    assert sum("is getting demo: waiting for it" in text for text in said) == 1
