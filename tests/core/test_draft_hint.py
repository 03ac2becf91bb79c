"""Which draft is named for a GGUF without one, and for which models nothing is said."""

from __future__ import annotations

import re
import shutil

import pytest
from click.testing import CliRunner

from edgespec.cli.main import cli
from edgespec.loading import drafts as hints
from edgespec.loading.catalogue import entries
from edgespec.loading.registry import resolve
from tiny_gemma4 import GemmaShape, write_drafter, write_target
from tiny_gguf import Shape, write_model


@pytest.fixture
def big(tmp_path, monkeypatch):
    """A model that counts as large; its neighbours are chosen by each test."""
    path = write_model(tmp_path / "big.gguf", Shape(layers=8))
    monkeypatch.setattr(hints, "_LEAST_TARGET_BYTES", path.stat().st_size)
    return path


def hint(path) -> str | None:
    return hints.draft_hint(resolve(str(path)))


def test_the_largest_neighbour_with_the_same_vocabulary_is_named(big):
    folder = big.parent
    small = write_model(folder / "small one.gguf", Shape(layers=1, width=32, hidden=32))
    write_model(folder / "other.gguf", Shape(layers=1, width=32, hidden=32, merges=30))
    write_model(folder / "as-big.gguf", Shape(layers=8))
    (folder / "damaged.gguf").write_bytes(b"GGUF")
    assert small.stat().st_size * 4 <= big.stat().st_size
    assert hint(big) == f"big has no draft model; small one.gguf in the same folder fits: -md '{small}'"


@pytest.mark.parametrize(
    ("described", "family"),
    [
        ("qwen3 qwen3 8b qwen2", "qwen3-0.6b"),
        ("qwen2 qwen2.5 7b instruct qwen2", "qwen2.5-0.5b"),
        ("llama meta llama 3.1 8b instruct llama-bpe", "llama-3.2-1b"),
        ("llama smollm2 1.7b smollm2 smollm", "smollm2-135m"),
        ("gemma3 gemma 3 12b it default", "gemma-3-270m"),
        ("llama mistral 7b default", None),
        ("qwen3moe qwen3 30b qwen2", None),
    ],
)
def test_families_are_told_by_architecture_name_and_tokenizer(described, family):
    found = [name for pattern, name in hints._FAMILIES if re.search(pattern, described)]
    assert set(found) <= entries().keys()
    assert found[:1] == ([family] if family else [])


def test_gemma_4_has_a_drafter_of_its_own(tmp_path, monkeypatch):
    path = write_target(tmp_path / "gemma.gguf", GemmaShape(layers=16))
    monkeypatch.setattr(hints, "_LEAST_TARGET_BYTES", path.stat().st_size)
    assert "the drafter that Google trained for it (mtp-*.gguf" in hint(path)
    drafter = write_drafter(tmp_path / "mtp-gemma.gguf", GemmaShape(drafter_layers=2))
    assert drafter.stat().st_size * 4 <= path.stat().st_size
    assert hint(path).endswith(f"mtp-gemma.gguf in the same folder fits: -md {drafter}")


def test_nothing_is_said_of_a_small_model_or_one_with_a_draft(big, tiny_path):
    folder = big.parent
    small = write_model(folder / "small.gguf", Shape(layers=1, width=32, hidden=32))
    assert hint(small) is None
    assert hints.draft_hint(resolve(str(big), draft=small)) is None
    assert hints.draft_hint(resolve("demo")) is None


def test_it_is_said_once_and_only_where_drafting_is_left_to_the_program(big, monkeypatch, tmp_path):
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGESPEC_THREADS", "1")
    write_model(big.parent / "small.gguf", Shape(layers=1, width=32, hidden=32))

    def said(*options: str) -> bool:
        arguments = ["generate", str(big), "-p", "x", "-n", "2", "--no-chat-template", *options]
        return "has no draft model" in CliRunner().invoke(cli, arguments).stderr

    assert [said("--drafter", "none"), said("-q"), said(), said()] == [False, False, True, False]
    shutil.rmtree(tmp_path / "home")
    assert said()
