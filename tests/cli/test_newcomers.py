"""What a newcomer tries first: the wrong file of a folder, another program's habits, a damaged installation."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from command_line import refusal, run
from edgespec.cli.chat import CHOSEN_HERE
from edgespec.cli.main import cli
from edgespec.errors import ModelFileError
from edgespec.loading.registry import resolve
from split_gguf import split
from tiny_gguf import Shape, write_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGESPEC_THREADS", "1")
    return tmp_path / "models"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "downloads"
    made.mkdir()
    return made


def refused(*arguments: str) -> str:
    """The one line that a bad input gets."""
    return refusal(run(*arguments))


# Files that are no language model. They have no chat template either, and are no base models.


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.type": "mmproj"}, "mmproj"),
        ({"general.type": "adapter"}, "LoRA adapter"),
        ({"general.type": "imatrix"}, "importance matrix"),
        ({"general.architecture": "clip"}, "mmproj"),
        ({"general.architecture": "t5"}, "t5 models read a whole text at once"),
        ({"llama.attention.causal": False}, "llama models read a whole text at once"),
    ],
)
def test_a_gguf_that_is_no_language_model_is_named(folder: Path, metadata: dict[str, object], said: str) -> None:
    file = write_model(folder / "x.gguf", Shape(has_template=False), metadata=metadata)
    for command in ("chat", "plan", "add"):
        line = refused(command, str(file))
        assert "is not a text-generation model" in line and said in line
        assert "base model" not in line and "Download" not in line


# Folders


def test_a_folder_with_a_split_model_holds_one(folder: Path) -> None:
    first = split(write_model(folder.parent / "whole.gguf"), folder / "big", 12)[0]
    assert first.name.startswith("big-00001-of-")
    pair = resolve(str(folder))
    assert pair.target == first and pair.name == "big"
    assert run("add", str(first)).stdout == "added: edgespec chat big\n"
    assert run("add", str(folder)).stdout == "added: edgespec chat downloads\n"


def test_what_lies_beside_a_model_is_none(folder: Path) -> None:
    model = write_model(folder / "vision-Q8_0.gguf")
    for name in ("mmproj-vision-f16.gguf", "vision-lora.gguf"):
        write_model(folder / name, metadata={"general.type": "mmproj"})
    assert resolve(str(folder)).target == model
    shutil.copy(model, folder / "vision-Q4_0.gguf")
    with pytest.raises(ModelFileError, match=r"give one of the files: vision-Q4_0\.gguf, vision-Q8_0\.gguf$"):
        resolve(str(folder))


def test_a_file_without_its_suffix_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(folder / "tiny.gguf")
    for given in (f"{folder}/tiny", "downloads/tiny"):
        monkeypatch.chdir(folder.parent)
        line = refused("generate", given, "-p", "hi")
        assert f"did you mean '{given}.gguf'?" in line and "edgespec pull" not in line
    monkeypatch.chdir(folder)
    assert "did you mean 'tiny.gguf'?" in refused("generate", "tiny", "-p", "hi")
    assert "did you mean 'tiny.gguf'?" in refused("generate", "demo", "-md", "tiny", "-p", "hi")


@pytest.mark.skipif(sys.platform == "win32", reason="making links needs a privilege on Windows")
@pytest.mark.parametrize("is_folder", [True, False])
def test_a_model_of_the_hubs_cache_can_be_added(folder: Path, is_folder: bool) -> None:
    """There a file has its name as a link, and its contents are called by their hash."""
    blob = write_model(folder / "tiny.gguf").rename(folder / "0123abcd")
    snapshot = folder / "snapshots" / "f00d"
    snapshot.mkdir(parents=True)
    link = snapshot / "tiny-Q8_0.gguf"
    link.symlink_to(blob)
    name = "f00d" if is_folder else "tiny-Q8_0"
    assert run("add", str(snapshot if is_folder else link)).stdout == f"added: edgespec chat {name}\n"
    assert resolve(name).target == link
    here = {each["name"]: each["state"] for each in json.loads(run("ls", "--json").stdout)}
    assert here[name] == "here"


def test_an_added_model_whose_file_is_gone_says_what_to_do(folder: Path) -> None:
    file = write_model(folder / "tiny.gguf")
    run("add", str(file))
    file.unlink()
    assert "edgespec rm tiny" in refused("generate", "tiny", "-p", "hi")
    assert run("rm", "tiny").stdout == "removed: tiny; its files stay where they are\n"


def test_a_name_may_begin_with_any_letter(folder: Path) -> None:
    file = write_model(folder / "tiny.gguf")
    assert run("add", str(file), "--name", "日本").stdout == "added: edgespec chat 日本\n"
    assert "is not a valid name" in refused("add", str(file), "--name", "_x")


# Words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["repl", "qwen3-8b"], "did you mean 'chat'?"),
        (["run", "qwen3:8b", "hi"], "edgespec pull qwen3:8b fetches it"),
        (["create", "x", "-f", "Modelfile"], "edgespec add FILE --name NAME"),
        (["generate", "--n-predict", "5"], "did you mean '--max-tokens'?"),
        (["run", "--think=false", "x"], "--no-thinking turns it off"),
        (["generate", "--prompt-cache", "x"], "no such option '--prompt-cache'"),
        (["chat", "--prompt-cache", "x"], "did you mean '--session'?"),
        (["generate", "--file", "x"], "-p - < FILE"),
        (["generate", "-temp", "0"], "no such option '-temp'; did you mean '--temp'?"),
        (["chat", "--lora", "x"], "merge them into the model"),
        (["generate", "-p", "x", "--top-k", "-2"], "0 or -1 keeps all"),
        (["chat", "demo", "hello"], "edgespec run MODEL 'TEXT' answers one prompt"),
        (["generate", "-p", "x", "-c", "-1"], "0 or max is the model's own"),
        (["pull", "demo"], "is already on this machine; run it with: edgespec chat demo"),
    ],
)
def test_a_word_of_another_program_has_its_name_here(words: list[str], said: str) -> None:
    found = run(*words)
    assert found.exit_code == 2
    assert said in found.output


def test_help_is_a_word() -> None:
    for words, same in ((["help"], ["--help"]), (["help", "run"], ["run", "--help"])):
        helped = run(*words)
        assert helped.exit_code == 0 and helped.output == run(*same).output


@pytest.mark.parametrize("word", ["--log-colours", "--cpu-range", "--edit"])
def test_what_is_not_alike_is_not_suggested(word: str) -> None:
    assert f"no such option '{word}'; see edgespec serve --help" in " ".join(run("serve", word).output.split())


def test_a_file_is_not_to_be_pulled(folder: Path) -> None:
    file = write_model(folder / "tiny.gguf")
    assert f"edgespec add {file}" in refused("pull", str(file))


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("EDGESPEC_FOO", "EDGESPEC_FOO; unset it"),
        ("EDGESPEC_NUM_CTX", "did you mean 'EDGESPEC_CTX_SIZE'?"),
        ("EDGESPEC_TEMPRATURE", "did you mean 'EDGESPEC_TEMPERATURE'?"),
    ],
)
def test_an_unknown_variable_names_one_that_is_alike(monkeypatch: pytest.MonkeyPatch, variable: str, said: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert said in refused("plan", "demo")


def test_a_byte_order_mark_is_no_part_of_a_file(folder: Path) -> None:
    """As PowerShell writes files."""
    schema, settings = folder / "answer.json", folder / "config.toml"
    schema.write_text('{"type": "boolean"}', encoding="utf-8-sig")
    settings.write_text("max-tokens = 3\n", encoding="utf-8-sig")
    given = ("--config", str(settings), "--json-schema", str(schema))
    assert json.loads(run("generate", "demo", "-p", "x", "--json", *given).stdout)["stats"]["new_tokens"] <= 3
    answers = [
        run("generate", "demo", "-p", "-", "-n", "1", "--json", stdin="x".encode(encoding)).stdout
        for encoding in ("utf-8", "utf-8-sig")
    ]
    plain, marked = (json.loads(answer)["prompt_token_ids"] for answer in answers)
    assert plain == marked


def test_show_says_that_chat_chose_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("add", str(write_model(folder / "tiny.gguf")), "--name", "smollm2-135m")
    found = run("chat", stdin="/show\n")
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("model ")]
    assert line.rstrip().split(None, 2)[1:] == ["smollm2-135m", CHOSEN_HERE]


def test_pair_lists_no_files_that_are_no_models(folder: Path) -> None:
    target = write_model(folder / "target.gguf", Shape(layers=8))
    draft = write_model(folder / "draft.gguf", Shape(layers=1))
    write_model(folder / "mmproj-target.gguf", Shape(layers=1), metadata={"general.type": "mmproj"})
    write_model(folder / "vectors.gguf", Shape(layers=1), metadata={"llama.attention.causal": False})
    shown = run("pair", str(target)).stdout
    assert draft.name in shown and "mmproj" not in shown and "vectors" not in shown


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["edgespec", "chat", "dem"], {("file", "dem"), ("plain", "demo")}),
        (["edgespec", "chat", "./mod"], {("file", "./mod")}),
        (["edgespec", "rm", "tin"], {("file", "tin"), ("plain", "tiny")}),
        (["edgespec", "pull", "qwen3-8"], {("file", "qwen3-8"), ("plain", "qwen3-8b")}),
        (["edgespec", "export", "./fold"], {("file", "./fold")}),
    ],
)
def test_tab_completes_models(folder: Path, typed: list[str], offered: set[tuple[str, str]]) -> None:
    run("add", str(write_model(folder / "tiny.gguf")))
    words = {"COMP_WORDS": " ".join(typed), "COMP_CWORD": str(len(typed) - 1), "_EDGESPEC_COMPLETE": "bash_complete"}
    shown = CliRunner().invoke(cli, [], env=words).stdout
    assert offered <= {tuple(line.split(",", 1)) for line in shown.splitlines()}


def test_a_budget_that_is_too_small_is_to_be_larger() -> None:
    """Freed memory would not help; 8 was meant as GiB."""
    assert refused("generate", "demo", "-p", "x", "--memory", "8").endswith("or a larger --memory")
