"""A chat without a model's name: a real model where the user agrees, the demo otherwise."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import edgespec
from demo import DEMO
from edgespec.cli import first_model as module
from edgespec.cli.first_model import FIRST, QUANTS, converted_name, first_model, quant_here
from edgespec.config.sources import Settings
from edgespec.errors import DownloadError
from edgespec.formats.manifest import ModelPair
from edgespec.loading.catalogue import entries
from edgespec.loading.own_models import add, write_manifest
from edgespec.loading.registry import models_folder
from edgespec.loading.registry import resolve as pair_of

UNNAMED = Settings({}, {})
CONVERTED = converted_name(quant_here())
WITH_VNNI, WITHOUT = frozenset({"avx2", "avx_vnni"}), frozenset({"avx2"})


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path / "models"))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_interactive", lambda: True)


def asked(answers: str) -> tuple[str | None, str]:
    """The model that is chosen while these answers are typed, and all that is shown."""
    with CliRunner().isolation(answers) as (_, shown, *_rest):
        found = first_model(UNNAMED)
        return found, shown.getvalue().decode()


def test_nothing_is_asked_without_a_terminal_or_where_a_model_or_an_engine_is_named(terminal: None) -> None:
    assert first_model(Settings({"model": "demo"}, {})) is None
    assert first_model(Settings({"engine": "onnx"}, {})) is None


def test_a_pipe_gets_the_demo() -> None:
    assert asked("") == (None, "")


def test_who_declines_is_not_asked_again(terminal: None) -> None:
    found, shown = asked("n\n")
    assert found is None
    assert "SmolLM2" in shown and "about 143 MB" in shown and f"edgespec pull {FIRST}" in shown
    assert asked("") == (None, "")


def test_what_cannot_be_fetched_is_said_and_asked_again(terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, **_: Any) -> ModelPair:
        raise DownloadError(f"{name}: no network")

    monkeypatch.setattr(module, "fetched", fails)
    for _ in range(2):
        found, shown = asked("y\n")
        assert found is None
        assert "no network" in shown and "using the demo" in shown


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The demo's GGUF stands in for the model that would be downloaded."""
    names: list[str] = []

    def take(name: str, *, wants_draft: bool, is_converted: bool) -> ModelPair:
        assert not wants_draft
        names.append(add(DEMO / "demo-target-q8_0.gguf", name))
        return pair_of(name)

    monkeypatch.setattr(module, "fetched", take)
    yield names


@pytest.mark.usefixtures("without_kernels")
def test_it_is_converted_where_llama_cpp_is_missing(
    terminal: None, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr(module, "has_engine", lambda engine: engine == "onnx")
    assert asked("\n")[0] == CONVERTED
    with edgespec.load(CONVERTED, context_length=128) as model:
        assert model.target.facts.name == "onnx"
        result = model.generate("Hello", None, edgespec.GenerateOptions(max_tokens=3, ignore_eos=True))
        assert len(result.token_ids) == 3
    assert asked("") == (CONVERTED, "")  # it is there from now on
    assert fetched == [FIRST]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(("instructions", "quant"), [(WITH_VNNI, "int8"), (WITHOUT, "w8a8")])
def test_with_both_engines_it_is_converted_on_x86(
    terminal: None, fetched: list[str], monkeypatch: pytest.MonkeyPatch, instructions: frozenset[str], quant: str
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr(module, "has_engine", lambda engine: True)
    monkeypatch.setattr(module, "is_x86", lambda: True)
    monkeypatch.setattr(module, "instruction_sets", lambda: instructions)
    assert asked("y\n")[0] == converted_name(quant)
    assert asked("")[0] == converted_name(quant)
    assert fetched == [FIRST]


@pytest.mark.parametrize("quant", QUANTS)
def test_what_another_processor_or_version_converted_is_used(
    terminal: None, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    monkeypatch.setattr(module, "has_engine", lambda engine: True)
    add(DEMO / "demo-target-q8_0.gguf", converted_name(quant))
    assert asked("") == (converted_name(quant), "")


def test_elsewhere_llama_cpp_reads_the_file_itself(
    terminal: None, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_engine", lambda engine: True)
    monkeypatch.setattr(module, "is_x86", lambda: False)
    assert asked("y\n")[0] == FIRST
    assert asked("")[0] == FIRST
    assert fetched == [FIRST]


@pytest.mark.usefixtures("without_kernels")
def test_without_the_package_for_conversion_the_command_is_named(
    terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_engine", lambda engine: engine == "onnx")
    monkeypatch.setattr(module, "is_importable", lambda name: False)
    found, shown = asked("")
    assert found is None
    assert "convert" in shown


@pytest.mark.usefixtures("without_kernels")
def test_what_its_makers_recommend_comes_with_it_and_through_the_conversion(
    terminal: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    assert dict(entries()[FIRST].sampling) == {"temperature": 0.2, "top_p": 0.9}

    def take(name: str, *, wants_draft: bool, is_converted: bool) -> ModelPair:
        folder = models_folder() / name
        folder.mkdir(parents=True)
        file = pair_of("demo", engine="llamacpp").files["target"]
        copy = replace(file, path=shutil.copy(file.path, folder / "model.gguf"))
        write_manifest(folder, {"sampling": entries()[FIRST].sampling}, {"target": copy})
        return pair_of(name)

    monkeypatch.setattr(module, "fetched", take)
    monkeypatch.setattr(module, "has_engine", lambda engine: engine == "onnx")
    assert asked("y\n")[0] == CONVERTED
    for name in (FIRST, CONVERTED):
        assert dict(pair_of(name).recommended) == {"temperature": 0.2, "top_p": 0.9}
