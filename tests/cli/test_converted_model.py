"""A chat with a GGUF offers to convert it where that gains: asked once, measured before and after, undone if it fails.

The demo is too small to gain anything for sure, so the limits are what the tests set them to; all else is as it is.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("gguf", reason="a conversion needs the package gguf")
pytest.importorskip("llama_cpp", reason="a GGUF is run by llama.cpp")

from demo import DEMO, TEST_THREADS
from edgespec.cli import chat as chat_command
from edgespec.cli import converted_model as module
from edgespec.cli.converted_model import best_of, offer_conversion, with_converted
from edgespec.cli.dialogue import Chat
from edgespec.cli.session import Session, open_session
from edgespec.cli.skippable import unless_skipped
from edgespec.config.sources import Settings
from edgespec.engines.llamacpp import LlamaCppEngine
from edgespec.errors import CapabilityError
from edgespec.export import conversion_gain
from edgespec.export.accuracy import ExportRefused
from edgespec.export.conversion_gain import WIDTHS, Gain, measure_gains
from edgespec.loading.registry import models_folder
from tiny_gguf import write_model


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_kernels: None) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(module, "is_interactive", lambda: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(module, "MOST_MEASURING_S", math.inf)  # tests run on busy machines
    monkeypatch.setattr(conversion_gain, "MOST_LACKING", math.inf)
    monkeypatch.setattr(conversion_gain, "MOST_APART", math.inf)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    target = shutil.copy(DEMO / "demo-target-q8_0.gguf", tmp_path / "mine.gguf")
    return settings_of(model=str(target))


def settings_of(**values: object) -> Settings:
    values |= {"threads": TEST_THREADS}
    return Settings(values, dict.fromkeys(values, "a test"))


def limits(monkeypatch: pytest.MonkeyPatch, least: float, kept: float = 0.0) -> None:
    monkeypatch.setattr(module, "LEAST_GAIN", least)
    monkeypatch.setattr(module, "LEAST_PLAIN", 0.0)
    monkeypatch.setattr(module, "LEAST_TOKEN_S", 0.0)
    monkeypatch.setattr(module, "KEEPS_GAIN", kept)


def asked(settings: Settings, answers: str) -> tuple[Session, str]:
    """The session after these answers were typed, and all that was shown."""
    session = open_session(settings)
    with CliRunner().isolation(answers) as (_, shown, *_rest):
        found = offer_conversion(session)
        return found, shown.getvalue().decode()


def engine_of(session: Session) -> str:
    with session.model as model:
        return model.target.facts.name


def gain(here: float, there: float, rows: float = 1.0) -> Gain:
    costs = {width: there * (1 + (width - 1) * rows) for width in WIDTHS}
    return Gain("int8", {width: here * width for width in WIDTHS}, costs, 0.0, 1, 1.0)


def test_gains_are_those_of_the_passes():
    assert gain(2.0, 1.0).plain == gain(2.0, 1.0).drafted(0.5) == 2.0
    cheap = gain(1.0, 1.0, rows=0.0)
    assert cheap.plain == 1.0 and cheap.drafted(0.5) == pytest.approx(2 * (1 - 0.5**6))
    dear = Gain("int8", cheap.here, cheap.there, 10.0, 1, 1.0)
    assert dear.drafted(0.5) == 1.0  # drafts that cost more than they bring are not made


def test_what_hardly_gains_is_not_offered():
    slower, faster = gain(1.0, 1.5, rows=0.0), gain(1.0, 0.9)
    assert slower.drafted() > 1.2 and best_of([slower, faster]) is None  # plain decoding may be no slower
    good = gain(1.0, 0.9, rows=0.1)
    assert best_of([slower, faster, good]) is good
    assert best_of([gain(1e-3, 0.9e-3, rows=0.1)]) is None  # a thousand tokens a second as it is


def test_costs_are_measured_on_some_layers_of_the_file(tmp_path: Path):
    with LlamaCppEngine.load(DEMO / "demo-target-q8_0.gguf", threads=TEST_THREADS, reproducible=False) as engine:
        found = measure_gains(engine, None, DEMO / "demo-target-q8_0.gguf", TEST_THREADS)
        assert engine.length() == 0
        assert [each.quant for each in found] == ["int8", "w8a8"]
        for each in found:
            assert each.here.keys() == each.there.keys() == set(WIDTHS)
            assert 0 < each.there[1] < 1 and 6e6 < each.bytes < 12e6 and each.draft_share == 0
        hybrid = write_model(tmp_path / "scaled.gguf", metadata={"llama.attention.scale": 0.5})
        assert measure_gains(engine, None, hybrid, TEST_THREADS) == []  # what cannot be converted


def test_a_busy_machine_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    """Neither where threads lacked processor time, nor where a load came or went between the two sides."""
    file = DEMO / "demo-target-q8_0.gguf"
    with LlamaCppEngine.load(file, threads=TEST_THREADS, reproducible=False) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(conversion_gain, "MOST_LACKING", -1.0)
            with pytest.raises(CapabilityError, match="keep this machine busy"):
                measure_gains(engine, None, file, TEST_THREADS)
        monkeypatch.setattr(conversion_gain, "MOST_APART", 1.2)
        costs = iter((0.090, 0.011, 0.011, 0.090, 0.012, 0.011))
        monkeypatch.setattr(conversion_gain, "costs_of", lambda *_: (dict.fromkeys(WIDTHS, next(costs)), 0.0))
        for _ in range(2):
            with pytest.raises(CapabilityError, match="keep this machine busy"):
                measure_gains(engine, None, file, TEST_THREADS)
        assert {each.here[1] for each in measure_gains(engine, None, file, TEST_THREADS)} == {0.011}


def test_what_could_not_be_measured_is_asked_next_time(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    limits(monkeypatch, 0.0)
    for what, value in ((conversion_gain, -1.0), (module, 0.2)):
        with monkeypatch.context() as patched:
            patched.setattr(what, "MOST_LACKING" if what is conversion_gain else "MOST_MEASURING_S", value)
            started_s = time.monotonic()
            session, shown = asked(settings, "y\n")
            assert engine_of(session) == "llamacpp" and not shown
            assert time.monotonic() - started_s < 60
    assert engine_of(asked(settings, "y\n")[0]) == "onnx"


def test_no_answer_to_the_question_is_no_refusal(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    limits(monkeypatch, 0.0)
    session, shown = asked(settings, "")  # Ctrl-D
    assert engine_of(session) == "llamacpp" and "Convert it?" in shown
    assert engine_of(asked(settings, "y\n")[0]) == "onnx"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo terminals")
def test_a_key_ends_what_nobody_asked_for_and_is_not_lost(monkeypatch: pytest.MonkeyPatch):
    import pty

    master, slave = pty.openpty()
    ended = threading.Event()
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)

        def work(stopping):
            stopping.add(ended.set)
            os.write(master, b"h")
            return ended.wait(60)

        assert unless_skipped(work, 60) is None and ended.is_set()
        os.write(master, b"i\n")
        assert terminal.readline() == "hi\n"
    os.close(master)


def test_what_is_done_meanwhile_ends_in_time_or_fails_as_it_would():
    ended = threading.Event()

    def work(stopping):
        stopping.add(ended.set)
        return ended.wait(60)

    assert unless_skipped(work, 0.1) is None
    assert unless_skipped(lambda stopping: 5, 60) == 5
    with pytest.raises(ZeroDivisionError):
        unless_skipped(lambda stopping: 1 // 0, 60)


def test_the_first_answer_comes_before_the_question(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    """Whatever is to be measured, nobody waits for it; the answer's text is not read again afterwards."""
    asked_after = []

    def offer(session: Session) -> Session:
        asked_after.append(chat.totals.num_generations)
        with session.model.measuring(keeps_text=True) as (engine, _):
            assert engine.length() == 0
        return session

    monkeypatch.setattr(chat_command, "offer_conversion", offer)
    story = "Tell me a story about a cat and a dog who live in a house by the sea. " * 8
    lines = iter(["/set max-tokens 8", story, "/stats", "Go on.", "/exit"])
    session = open_session(settings)
    with session.model, CliRunner().isolation():
        chat = Chat(session)
        assert chat_command._run(chat, lambda *_: next(lines)) == 0
        assert asked_after == [1]
        assert chat.last.reused_tokens > 100


def test_what_was_set_in_the_chat_stays_in_the_converted_model(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    limits(monkeypatch, 0.0)
    session = open_session(settings)
    session.sampling = replace(session.sampling, temperature=0.25)
    session.options = replace(session.options, max_tokens=7)
    with CliRunner().isolation("y\n"):
        found = offer_conversion(session)
    assert engine_of(found) == "onnx"
    assert found.sampling.temperature == 0.25 and found.options.max_tokens == 7


def test_a_model_is_converted_once_and_used_from_then_on(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    limits(monkeypatch, 0.0)
    session, shown = asked(settings, "y\n")
    assert engine_of(session) == "onnx"
    assert "ms a token here. Converted to ONNX as" in shown and "top-1 agreement" in shown and "measured: " in shown
    (made,) = models_folder().iterdir()
    assert made.name.startswith("mine-")
    assert with_converted(settings).values["model"] == made.name
    again = with_converted(settings_of(model=settings.values["model"], engine="llamacpp"))
    assert again.values["model"] == settings.values["model"]
    shutil.rmtree(made)
    assert with_converted(settings) is settings


def test_a_draft_is_converted_with_its_target(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    limits(monkeypatch, 0.0)
    pair = settings_of(model=settings.values["model"], draft=DEMO / "demo-draft-q8_0.gguf")
    session, _ = asked(pair, "y\n")
    assert session.model.pair.draft is not None and session.model.pair.draft.suffix == ".onnx"
    assert engine_of(session) == "onnx"
    assert "draft" not in with_converted(pair).values


def test_who_declines_is_not_asked_again(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    limits(monkeypatch, 0.0)
    session, shown = asked(settings, "n\n")
    assert engine_of(session) == "llamacpp" and "edgespec export mine.gguf --to onnx" in shown
    session, shown = asked(settings, "")
    assert engine_of(session) == "llamacpp" and not shown
    assert with_converted(settings) is settings


def test_a_model_that_does_not_keep_the_promise_is_removed(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    limits(monkeypatch, 0.0, kept=1e9)
    session, shown = asked(settings, "y\n")
    assert engine_of(session) == "llamacpp" and "times as fast\nusing the file as it is" in shown
    assert not list(models_folder().iterdir())
    assert engine_of(asked(settings, "")[0]) == "llamacpp"


def test_a_converted_model_that_cannot_be_loaded_is_removed(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    limits(monkeypatch, 0.0)
    opened = open_session

    def open_file(given: Settings, **options: bool) -> Session:
        if given.values["model"] != settings.values["model"]:
            raise CapabilityError("does not fit")
        return opened(given, **options)

    monkeypatch.setattr(module, "open_session", open_file)
    session, shown = asked(settings, "y\n")
    assert engine_of(session) == "llamacpp" and "does not fit\nusing the file as it is" in shown
    assert not list(models_folder().iterdir())


def test_files_of_one_name_are_two_models(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits(monkeypatch, 0.0)
    (tmp_path / "other").mkdir()
    other = settings_of(model=shutil.copy(DEMO / "demo-draft-q8_0.gguf", tmp_path / "other" / "mine.gguf"))
    for each in (settings, other):
        session, _ = asked(each, "y\n")
        assert engine_of(session) == "onnx"
    names = [with_converted(each).values["model"] for each in (settings, other)]
    assert len(set(names)) == 2 == len(list(models_folder().iterdir()))


def test_a_model_that_gains_too_little_is_measured_once(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    limits(monkeypatch, 1e9)
    session, shown = asked(settings, "")
    assert engine_of(session) == "llamacpp" and not shown
    monkeypatch.setattr(module, "_measured", None)
    assert engine_of(asked(settings, "")[0]) == "llamacpp"


def test_nothing_is_measured_beyond_a_budget_or_without_memory(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    limits(monkeypatch, 0.0)
    budget = Settings({**settings.values, "memory": 2 << 30}, settings.sources | {"memory": "a test"})
    with monkeypatch.context() as patched:
        patched.setattr("edgespec.export.conversion_gain.fits", lambda num_bytes: num_bytes < 0)
        for given in (budget, settings):
            session, shown = asked(given, "y\n")
            assert engine_of(session) == "llamacpp" and not shown
    assert engine_of(asked(settings, "y\n")[0]) == "onnx"  # asked as soon as there is room


@pytest.mark.parametrize("failure", [ExportRefused("the graph is wrong"), KeyboardInterrupt()])
def test_a_conversion_that_fails_leaves_the_file_in_use(
    failure: BaseException, settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: object) -> None:
        raise failure

    limits(monkeypatch, 0.0)
    monkeypatch.setattr("edgespec.export.pair.export_pair", fails)
    session, shown = asked(settings, "y\n")
    assert engine_of(session) == "llamacpp" and "using the file as it is" in shown
    assert with_converted(settings) is settings


@pytest.mark.parametrize(
    "given", [{"engine": "llamacpp"}, {"reproducible": True}, {"gpu_layers": 1}, {"cache_type_k": "q8_0"}]
)
def test_settings_for_llama_cpp_are_respected(
    given: dict[str, object], settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    limits(monkeypatch, 0.0)
    found = Settings({**settings.values, **given}, {**settings.sources, **dict.fromkeys(given, "a test")})
    assert module._candidate(settings) is not None and module._candidate(found) is None
    monkeypatch.setattr(module, "is_interactive", lambda: False)
    assert module._candidate(settings) is None
