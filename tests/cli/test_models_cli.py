"""`ls`, `show`, `add`, `rm`, `pull` and `pair` as a user types them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import refusal, run
from demo import DEMO
from edgespec.formats.manifest import write_manifest
from edgespec.loading.catalogue import entries
from edgespec.loading.drafts import expected_gain, find_aim, rank
from edgespec.loading.registry import resolve
from tiny_gguf import Shape, write_model

TARGET, DRAFT = DEMO / "demo-target-q8_0.gguf", DEMO / "demo-draft-q8_0.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGESPEC_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "models"


def test_ls_shows_what_is_here_and_what_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("edgespec.loading.own_models.free_memory", lambda: 8 << 30)
    shown = {line.split()[0]: line for line in run("ls").stdout.splitlines()[1:]}
    assert "here" in shown["demo"] and "demo-draft-q8_0.gguf" in shown["demo"]
    assert "qwen3-8b" not in shown and f"{len(entries())} more can be pulled" in run("ls").stderr
    shown = {line.split()[0]: line for line in run("ls", "--all").stdout.splitlines()[1:]}
    assert "to pull" in shown["qwen3-8b"] and "yes" in shown["qwen3-8b"] and "~" in shown["qwen3-8b"]
    assert "~" not in shown["qwen2.5-coder-1.5b"], "its size is known"
    everything = {each["name"]: each for each in json.loads(run("ls", "--all", "--json").stdout)}
    assert everything["llama-3.1-70b"]["fits"] is False
    assert everything.keys() >= entries().keys()


def test_show_tells_where_a_model_comes_from_and_what_is_not_known():
    said = run("show", "qwen3-8b").stdout
    assert "source: Qwen/Qwen3-8B-GGUF, Q4_K_M" in said
    assert "verified: no" in said and "get it: edgespec pull qwen3-8b" in said
    assert "eagle3 head: AngelSlim/Qwen3-8B_eagle3" in said
    assert str(TARGET) in run("show", "demo").stdout
    failed = run("show", "nothing-like-it")
    assert failed.exit_code == 2 and failed.stderr.startswith("error: no model 'nothing-like-it'")


def test_show_says_what_a_file_is_and_takes(tmp_path: Path):
    shown = run("show", str(TARGET)).stdout
    rows = dict(line.strip().split("  ", 1) for line in shown.splitlines() if line.startswith("  "))
    found = {label: text.strip() for label, text in rows.items()}
    assert (found["architecture"], found["parameters"], found["quantisation"]) == ("llama", "8.13M", "Q8_0")
    assert found["context"] == "2048 tokens" and (found["template"], found["tools"]) == ("yes", "yes")
    assert found["thinking"] == "no" and found["licence"] and "MiB, fits" in found["memory"]
    base = run("show", str(write_model(tmp_path / "base.gguf", Shape(has_template=False)))).stdout
    assert "template      none" in base
    assert run("show", "qwen3:8b").stdout == run("show", "qwen3-8b").stdout, "Ollama's name for it"


def test_published_heads_are_listed_with_the_command_that_gets_or_converts_them():
    said = run("show", "qwen3-8b").stdout
    assert "convert it with: llama.cpp's convert_hf_to_gguf.py (then -md HEAD.gguf)" in said
    assert "get it with: edgespec pull qwen3-8b --draft ggml-org/Qwen3-8B-GGUF:dspark-Qwen3-8B-Q8_0.gguf" in said


def test_published_heads_are_ranked_with_the_drafts():
    told = json.loads(run("pair", "qwen3.6-27b", "--json").stdout)
    names = [each["name"].partition(":")[2] for each in told["drafts"] if each["is_head"]]
    assert names == ["mtp-Qwen3.6-27B-Q8_0.gguf", "dflash-Qwen3.6-27B-Q8_0.gguf"]
    assert told["commands"] == ["edgespec pull qwen3.6-27b", "edgespec chat qwen3.6-27b"]
    said = run("pair", "gpt-oss-20b")
    assert "size not known, to pull" in said.stdout and "eagle3 head made for openai/gpt-oss-20b" in said.stdout
    assert "cannot draft: dflash head made for openai/gpt-oss-20b, to be converted first: llama.cpp's" in said.stdout


def test_add_and_rm_leave_the_file_where_it_is(tmp_path: Path, home: Path):
    mine = Path(shutil.copy(TARGET, tmp_path / "mine.gguf"))
    small = Path(shutil.copy(DRAFT, tmp_path / "small.gguf"))
    added = run("add", str(mine), "--draft", str(small))
    assert added.stdout == "added: edgespec chat mine\n", added.stderr
    pair = resolve("mine")
    assert (pair.target, pair.draft) == (mine, small)
    answer = run("generate", "mine", "-md", "mine", "-p", "Hi", "-n", "4", "--temp", "0")
    assert answer.exit_code == 0 and answer.stdout.strip(), answer.stderr
    assert "the name mine is taken" in run("add", str(small), "--name", "mine").stderr
    assert run("rm", "mine").stdout.startswith("removed: mine")
    assert mine.exists() and small.exists() and not (home / "mine").exists()


def test_a_base_model_is_not_offered_for_chats(tmp_path: Path):
    """Without a chat template the command that is named has to be one that runs."""
    base = write_model(tmp_path / "base.gguf", Shape(has_template=False))
    command = "edgespec run base --no-chat-template -p 'Once upon a time'"
    assert run("add", str(base)).stdout == f"added: {command}\n"
    assert f"run it: {command}; drafts for it" in run("show", "base").stdout
    assert run("pair", "base").stdout.splitlines()[-1] == command
    assert run("export", str(base), "--to", "onnx", "-o", str(tmp_path / "pair")).stdout.splitlines()[-1] == (
        f"run it: {command.replace('base', str(tmp_path / 'pair'))}"
    )
    assert run("generate", str(tmp_path / "pair"), "--no-chat-template", "-p", "Once upon", "-n", "3").exit_code == 0


def test_a_folder_with_a_manifest_can_be_added(tmp_path: Path):
    assert run("add", str(DEMO), "--name", "mine").exit_code == 0
    assert resolve("mine").target == TARGET and resolve("mine", engine="onnx").engines == ("llamacpp", "onnx")
    assert run("add", str(DEMO / "onnx" / "draft"), "--name", "graph").exit_code == 0
    assert resolve("graph").target == DEMO / "onnx" / "draft" / "model.onnx"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "nothing.gguf"), "no file or folder 'nothing.gguf'"),
        (("add", str(TARGET), "--name", "a/b"), "'a/b' is not a valid name"),
        (("add", str(TARGET), "--name", "demo"), "the name demo is taken"),
        (("rm", "demo"), "no model 'demo' was pulled or added"),
        (("rm", ".."), "'..' is not a valid name"),
        (("pull", "no-such-model"), "is not a known model"),
        (("pull", "qwen3-8b", "--draft", "qwen3-0.6b", "--no-draft"), "contradict each other"),
        (("generate", "Qwen/Qwen3-8B-GGUF", "-p", "x"), "edgespec pull Qwen/Qwen3-8B-GGUF fetches it"),
        (("pair", "nothing-like-it"), "no model 'nothing-like-it'"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: tuple[str, ...], said: str):
    refusal(run(*arguments), said)


def test_rm_keeps_what_it_did_not_bring(home: Path):
    (home / "own").mkdir(parents=True)
    (home / "own" / "precious.gguf").write_bytes(b"GGUF")
    failed = run("rm", "own")
    assert failed.exit_code == 2 and "neither pulled nor added" in failed.stderr
    assert (home / "own" / "precious.gguf").exists()
    (home / "half").mkdir()
    for name in (".m.gguf.0123.part", ".unfinished"):
        (home / "half" / name).write_bytes(b"GGUF")
    assert "unfinished" in run("ls").stdout
    assert run("rm", "half").exit_code == 0 and not (home / "half").exists()


# pair


@pytest.fixture
def neighbours(tmp_path: Path) -> Path:
    """A target among drafts: one that fits, one with other tokens, one as large as the target, one that is broken."""
    folder = tmp_path / "files"
    folder.mkdir()
    write_model(folder / "small.gguf", Shape(layers=1, width=32, hidden=32))
    write_model(folder / "other.gguf", Shape(layers=1, width=32, hidden=32, merges=30))
    write_model(folder / "large.gguf", Shape(layers=8))
    (folder / "broken.gguf").write_bytes(b"GGUF")
    return write_model(folder / "target.gguf", Shape(layers=8))


def test_pair_ranks_by_what_a_draft_should_gain(neighbours: Path):
    found = {Path(each.name).name: each for each in rank(find_aim(str(neighbours)))}
    small, other = (found[name] for name in ("small.gguf", "other.gguf"))
    assert small.right > other.right > 0 and small.gain > other.gain > 1
    # A cheap draft of which half is right before one of which more is, but for half of a pass each; no other way round.
    assert expected_gain(0.1, 0.5) > expected_gain(0.5, 0.7) > 1 > expected_gain(0.5, 0.4)
    assert expected_gain(0.1, 0.5) < expected_gain(0.1, 0.7)
    assert "large.gguf" not in found and "broken.gguf" not in found and "target.gguf" not in found
    assert found["small.gguf"].vocabulary == "the same" and not found["small.gguf"].why_not
    assert "token 286 is 'ga' in the target" in found["other.gguf"].vocabulary
    best = rank(find_aim(str(neighbours)))[0]
    assert Path(best.name).name == "small.gguf"
    done = run("pair", str(neighbours))
    assert done.stdout.splitlines()[-1] == f"edgespec chat {neighbours} -md {best.name}"
    told = json.loads(run("pair", str(neighbours), "--json").stdout)
    assert told["commands"] == [f"edgespec chat {neighbours} -md {best.name}"]
    assert told["drafts"][0]["path"] == best.name


def test_models_of_either_engine_are_drafts():
    assert run("add", str(DEMO / "onnx" / "draft"), "--name", "graph").exit_code == 0
    assert run("add", str(DRAFT), "--name", "file").exit_code == 0
    names = {each.name: each.vocabulary for each in rank(find_aim(str(TARGET)))}
    assert names["graph"] == names["file"] == "the same"


def test_a_draft_that_does_not_fit_is_not_recommended(neighbours: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("edgespec.loading.own_models.free_memory", lambda: 1000)
    done = run("pair", str(neighbours))
    assert done.stdout.splitlines()[-1] == f"edgespec chat {neighbours}"
    assert run("pair", "demo").stdout.splitlines()[-1] == "edgespec chat demo", "its own draft needs no option"


def test_a_pulled_target_gets_drafts_of_its_family(neighbours: Path, monkeypatch: pytest.MonkeyPatch):
    target = neighbours.rename(neighbours.with_name("Qwen3-8B-Q4_K_M.gguf"))
    with target.open("ab") as file:
        file.truncate(5 << 30)  # as large as the model that it is named for; the rest is never read
    monkeypatch.setattr("edgespec.loading.drafts._token_bytes", lambda file, **_: file.all_bytes)
    names = [each.name for each in rank(find_aim(str(target))) if each.path is None and not each.is_head]
    assert names[0] == "qwen3-0.6b" and set(names) <= {"qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"}


def test_a_target_that_is_not_here_is_paired_from_the_catalogue():
    told = json.loads(run("pair", "qwen3-8b", "--json").stdout)
    assert told["drafts"][0]["name"] == "qwen3-0.6b" and told["drafts"][0]["path"] is None
    assert told["commands"] == ["edgespec pull qwen3-8b", "edgespec chat qwen3-8b"]
    assert "is only useful as a draft" in run("pair", "mistral-draft-0.5b").stderr


def test_a_model_goes_by_the_name_of_its_folder(home: Path, tmp_path: Path):
    for folder in (home / "mine", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
        copy = replace(resolve("demo", engine="llamacpp").files["target"], path=folder / "model.gguf")
        shutil.copy(TARGET, copy.path)
        write_manifest(folder, {"name": "inner"}, [("target", copy)])
    assert resolve(str(tmp_path / "elsewhere")).name == "inner"
    assert resolve("mine").name == "mine" and run("show", "mine").stdout.startswith("mine:")


@pytest.mark.parametrize("size", [0, 3, 1000, 600_000])
def test_show_refuses_a_file_that_cannot_be_run(tmp_path: Path, size: int):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(TARGET.read_bytes()[:size])
    failed = run("show", str(cut))
    assert failed.exit_code == 2 and "run it" not in failed.stdout and str(cut) in failed.stderr
