"""A KV cache on disk: the same text without reading again, and a clear refusal of every other file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.cli.main import cli
from edgespec.errors import StateError

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "Can you find me a restaurant in San Jose? " * 4
OPTIONS = GenerateOptions(max_tokens=24, logprobs=True, ignore_eos=True)
SAMPLING = Sampling(temperature=0.8, seed=5)
Answered = tuple[tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def saved(engine: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, list[int], Answered]:
    """A file, its number of tokens, a longer prompt, and the answer to that prompt by the model that wrote the file."""
    path = tmp_path_factory.mktemp("saved") / "x.state"
    with edgespec.load("demo", engine=engine, reproducible=True) as model:
        first = model.generate(PROMPT, SAMPLING, OPTIONS)
        count = model.save_state(path)
        longer = [*model.encode(PROMPT), *first.token_ids, *model.encode("And a cheap one?")]
        model.forget()
        answer = answered(model, longer)
    return path, count, longer, answer


def answered(model: Model, ids: list[int]) -> Answered:
    result = model.generate(ids, SAMPLING, OPTIONS)
    return tuple(result.token_ids), tuple(result.logprobs)


@pytest.fixture
def fresh(engine: str) -> Iterator[Model]:
    with edgespec.load("demo", engine=engine, reproducible=True) as model:
        yield model


def test_a_restored_cache_gives_the_same_bits_without_reading_again(
    fresh: Model, saved: tuple[Path, int, list[int], Answered]
) -> None:
    path, count, longer, expected = saved
    assert fresh.load_state(path) == count
    assert answered(fresh, longer) == expected
    assert fresh.stats.reused_tokens >= count - 1


def test_damaged_and_foreign_files_are_refused(
    fresh: Model, saved: tuple[Path, int, list[int], Answered], tmp_path: Path
) -> None:
    content, expected = saved[0].read_bytes(), saved[3]
    end = len(content)
    bad = {
        "empty": b"",
        "other": b"GGUF" * 99,
        "cut": content[: end // 2],
        "end": content[:-200],
        **{
            f"flipped at {place}": content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            for place in (0, 170, 600, end // 2)
        },
    }
    for array in ("array", "arrays"):
        (np.save if array == "array" else np.savez)(tmp_path / array, np.zeros(3))
        bad[array] = next(tmp_path.glob(f"{array}.np?")).read_bytes()
    for name, damaged in bad.items():
        path = tmp_path / name
        path.write_bytes(damaged)
        with pytest.raises(StateError):
            fresh.load_state(path)
        assert answered(fresh, saved[2]) == expected, f"after {name}"
    with pytest.raises(StateError, match="cannot be read"):
        fresh.load_state(tmp_path / "nothing")


def test_reproducible_mode_takes_no_state_of_the_fastest_mode(fresh: Model, engine: str, tmp_path: Path) -> None:
    with edgespec.load("demo", engine=engine, reproducible=False) as other:
        other.generate(PROMPT, SAMPLING, OPTIONS)
        other.save_state(tmp_path / "fast.state")
    with pytest.raises(StateError, match=r"reproducible mode|another model, library version or cache type"):
        fresh.load_state(tmp_path / "fast.state")


def chat(path: Path, *lines: str) -> Result:
    options = ["--engine", "onnx", "--session", str(path), "-n", "12", "--temp", "0"]
    return CliRunner().invoke(cli, ["chat", "demo", *options], input="".join(line + "\n" for line in lines))


def test_a_chat_goes_on_where_it_ended(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    lines = ("Find me a bus to Fresno.", "For two, please.")
    assert chat(whole, *lines).exit_code == 0
    for line in lines:
        result = chat(parts, line)
        assert result.exit_code == 0, result.stderr
    assert f"continuing {parts}: 1 exchange" in result.stderr
    assert json.loads(parts.read_text()) == json.loads(whole.read_text())
    assert parts.with_name("parts.json.state").stat().st_mode & 0o077 == 0, "only the owner may read it"


def test_a_chat_goes_on_without_its_state(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    assert chat(path, "Find me a bus to Fresno.").exit_code == 0
    path.with_name("c.json.state").write_bytes(b"nothing of ours")
    result = chat(path, "For two, please.")
    assert result.exit_code == 0
    assert len(json.loads(path.read_text())["messages"]) == 4


def test_another_file_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    result = CliRunner().invoke(cli, ["chat", "no-such-model", "--session", str(path)], input="hello\n")
    assert result.exit_code != 0
    assert "is not a saved conversation" in result.stderr
    assert path.read_text() == "my notes"
