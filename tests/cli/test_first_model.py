"""A chat without a model's name: a real model where the user agrees, the demo otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import edgespec
from demo import DEMO
from edgespec.cli import chat as module
from edgespec.cli.chat import FIRST, first_model
from edgespec.config.sources import Settings
from edgespec.errors import DownloadError
from edgespec.formats.manifest import ModelPair
from edgespec.loading.own_models import add
from edgespec.loading.registry import resolve as pair_of

UNNAMED = Settings({}, {})


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


def test_nothing_is_asked_in_a_pipe_or_where_a_model_or_an_engine_is_named() -> None:
    assert asked("") == (None, "")
    for named in ({"model": "demo"}, {"engine": "onnx"}):
        assert first_model(Settings(named, {})) is None


def test_who_declines_is_not_asked_again(terminal: None) -> None:
    found, shown = asked("n\n")
    assert found is None
    assert "SmolLM2" in shown and "98 MB" in shown and f"edgespec pull {FIRST}" in shown
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
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The demo's GGUF stands in for the model that would be downloaded."""
    names: list[str] = []

    def take(name: str, *, wants_draft: bool) -> ModelPair:
        assert not wants_draft
        names.append(add(DEMO / "demo-target-q8_0.gguf", name))
        return pair_of(name)

    monkeypatch.setattr(module, "fetched", take)
    return names


def test_it_is_fetched_once_and_runs_as_it_is(terminal: None, fetched: list[str]) -> None:
    assert asked("y\n")[0] == FIRST
    assert asked("") == (FIRST, "")  # it is there from now on
    assert fetched == [FIRST]
    with edgespec.load(FIRST, context_length=128) as model:
        result = model.generate("Hello", None, edgespec.GenerateOptions(max_tokens=3, ignore_eos=True))
        assert len(result.token_ids) == 3


def test_the_model_that_was_got_last_is_taken(tmp_path: Path) -> None:
    for age, name in ((30, "older"), (10, "newer"), (20, "between")):
        add(DEMO / "demo-target-q8_0.gguf", name)
        os.utime(tmp_path / "models" / name / "manifest.toml", (1e9 - age, 1e9 - age))
    assert asked("") == ("newer", "")


def test_where_nothing_runs_a_gguf_the_command_for_that_is_named(
    terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "library_path", lambda: None)
    monkeypatch.setattr(module, "has_engine", lambda engine: engine == "onnx")
    found, shown = asked("")
    assert found is None
    assert "llamacpp" in shown
