"""States of a cache, parked in memory and saved on disk: the same bits, and nothing is read again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from click.testing import Result as Ran

import edgespec
from edgespec import GenerateOptions, Model, Result, Sampling
from edgespec.cli.main import cli
from edgespec.engines.parked import ParkedStates
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import StateError
from edgespec.types import TokenIds
from table_engine import TableEngine


def text_of(seed: int, length: int = 80) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 10, length).astype(np.int32)


def read(live: CachedSequence, parked: ParkedStates, wanted: TokenIds) -> int:
    """Read a text as a generation does; the tokens that were reused."""
    parked.make_way(live, wanted)
    reused = live.reuse(wanted)
    live.feed(wanted[live.length :])
    assert live.engine.length() == live.length == wanted.size
    return reused


@pytest.fixture
def live() -> CachedSequence:
    return CachedSequence(TableEngine.random(10, context_length=256))


def test_alternating_texts_are_not_read_again(live: CachedSequence) -> None:
    parked = ParkedStates()
    for length in (80, 120, 160):
        for seed in (1, 2, 3):
            reused = read(live, parked, text_of(seed, 200)[:length])
            assert reused == length - 40 or (length == 80 and reused < 3)  # the first letters may be the same
    assert len(parked._states) == 2, "a state that is live again, and the beginnings of a longer one, are not kept"


def test_parked_states_stay_within_their_limit(live: CachedSequence) -> None:
    size = len(live.engine.save_state()) + 4 * 80
    parked = ParkedStates(most_bytes=2 * size)
    for seed in range(5):
        read(live, parked, text_of(seed))
        assert parked.num_bytes <= 2 * size
    assert len(parked._states) == 2
    assert read(live, ParkedStates(most_bytes=100), text_of(9)) == 0
    parked.clear()
    assert parked.num_bytes == 0


def test_a_model_that_cannot_roll_back_takes_up_whole_texts_only() -> None:
    live = CachedSequence(TableEngine.random(10, context_length=256, can_rollback=False))
    parked = ParkedStates()
    first, second = text_of(1, 200), text_of(2, 200)
    read(live, parked, first[:80])
    read(live, parked, second[:80])
    assert read(live, parked, first[:120]) == 80
    assert read(live, parked, np.concatenate((second[:70], first[:50]))) == 0


@pytest.mark.parametrize("broken", ["save_state", "load_state"])
@pytest.mark.parametrize("error", [StateError, MemoryError])
def test_a_text_whose_state_fails_is_read_again(live: CachedSequence, broken: str, error: type[Exception]) -> None:
    def failing(*_: Any) -> Any:
        raise error("no")

    parked = ParkedStates()
    read(live, parked, text_of(1))
    setattr(live.engine, broken, failing)
    for seed in (2, 1, 2):
        assert read(live, parked, text_of(seed)) == 0


def test_an_interrupted_load_leaves_an_empty_cache(live: CachedSequence) -> None:
    parked, load = ParkedStates(), live.engine.load_state
    read(live, parked, text_of(1))
    read(live, parked, text_of(2))

    def interrupted(*given: Any) -> None:
        load(*given)
        raise KeyboardInterrupt

    live.engine.load_state = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        read(live, parked, text_of(1))
    assert live.engine.length() == live.length == 0
    live.engine.load_state = load  # type: ignore[method-assign]
    assert read(live, parked, text_of(2)) == 79


# -- on real weights

QUESTIONS = (
    "Find me a cheap Italian restaurant in San Jose for tonight, with a table for four people near the river.",
    "Tom has 12 apples and gives away a third of them to his sister, then buys 5 more. How many are left?",
)
FURTHER = ("Is there another one that is open on Sundays?", "And if he then loses half of what he has?")
SAMPLING = Sampling(temperature=0.8, seed=4)
OPTIONS = GenerateOptions(max_tokens=48)
CASES = [("llamacpp", "model"), ("llamacpp", "eagle"), ("llamacpp", "none"), ("onnx", "model"), ("onnx", "none")]


def converse(model: Model, *, forgets: bool) -> list[Result]:
    """Two conversations of three turns each, in turn."""
    talks: list[list[dict[str, str]]] = [[], []]
    found = []
    for turn in range(3):
        for talk, first, further in zip(talks, QUESTIONS, FURTHER, strict=True):
            talk.append({"role": "user", "content": first if turn == 0 else further})
            if forgets:
                model.forget()
            found.append(model.chat(talk, SAMPLING, OPTIONS).result())
            talk.append({"role": "assistant", "content": found[-1].text})
    return found


@pytest.mark.parametrize("engine, drafter", CASES)
def test_two_conversations_in_turn_are_those_of_fresh_models(engine: Any, drafter: Any) -> None:
    length: Any = "auto" if drafter == "none" else 4
    with edgespec.load(
        "demo", engine=engine, drafter=drafter, draft_length=length, threads=1, reproducible=True
    ) as model:
        found = converse(model, forgets=False)
        assert 0 < model._executor.parked.num_bytes < 256 << 20
        fresh = converse(model, forgets=True)
        model.forget()
        assert model._executor.parked.num_bytes == 0
    assert [each.token_ids for each in found] == [each.token_ids for each in fresh]
    assert [each.logprobs for each in found] == [each.logprobs for each in fresh]
    for result, before in zip(found[2:], found, strict=False):
        assert result.stats.reused_tokens >= len(before.prompt_token_ids) - 1
    assert all(result.stats.reused_tokens == 0 for result in fresh)


# -- a KV cache on disk: the same text without reading again, and a clear refusal of every other file


pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "Can you find me a restaurant in San Jose? " * 4
SAVED_OPTIONS = GenerateOptions(max_tokens=24, logprobs=True, ignore_eos=True)
SAVED_SAMPLING = Sampling(temperature=0.8, seed=5)
Answered = tuple[tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def saved(engine: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, list[int], Answered]:
    """A file, its number of tokens, a longer prompt, and the answer to that prompt by the model that wrote the file."""
    path = tmp_path_factory.mktemp("saved") / "x.state"
    with edgespec.load("demo", engine=engine, reproducible=True) as model:
        first = model.generate(PROMPT, SAVED_SAMPLING, SAVED_OPTIONS)
        count = model.save_state(path)
        longer = [*model.encode(PROMPT), *first.token_ids, *model.encode("And a cheap one?")]
        model.forget()
        answer = answered(model, longer)
    return path, count, longer, answer


def answered(model: Model, ids: list[int]) -> Answered:
    result = model.generate(ids, SAVED_SAMPLING, SAVED_OPTIONS)
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
        other.generate(PROMPT, SAVED_SAMPLING, SAVED_OPTIONS)
        other.save_state(tmp_path / "fast.state")
    with pytest.raises(StateError, match=r"reproducible mode|another model, library version or cache type"):
        fresh.load_state(tmp_path / "fast.state")


def chat(path: Path, *lines: str) -> Ran:
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
