"""Profiles: below all that a user says, above the defaults; damaged ones name themselves and the fix."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from demo import DEMO
from edgespec.cli.main import cli
from edgespec.cli.options import resolve_settings
from edgespec.config.sources import Settings
from edgespec.errors import ConfigError, StateError
from edgespec.tuning.profiles import (
    forget_profile,
    load_profile,
    new_profile,
    profile_in_effect,
    profile_path,
    save_profile,
    source_of,
    with_profile,
)

TUNED = {"engine": "llamacpp", "drafter": "ngram", "draft_length": 3, "threads": 1}


@pytest.fixture(autouse=True)
def no_profiles_stay(private_home):
    """Profiles of one test are none of another's; what was measured of the machine may be."""
    yield
    shutil.rmtree(private_home / "profiles", ignore_errors=True)


@pytest.fixture
def profile(target_path) -> Path:
    path = profile_path(str(target_path))
    assert path is not None
    save_profile(path, new_profile("it", TUNED, 12.5, 1.5))
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def test_what_is_saved_is_read_back(profile):
    found = load_profile(profile)
    assert dict(found.settings) == TUNED
    assert (found.model, found.tokens_per_second, found.speedup) == ("it", 12.5, 1.5)
    assert [path.name for path in profile.parent.iterdir()] == [profile.name]


@pytest.mark.parametrize("model", ['quote " and \\ backslash', "naïve 模型", "tab\tdel\x7f"])
def test_any_name_survives(tmp_path, model):
    save_profile(tmp_path / "p.toml", new_profile(model, {"drafter": "auto", "draft_length": "auto"}, 1.0, 1.0))
    found = load_profile(tmp_path / "p.toml")
    assert (found.model, found.settings["draft_length"]) == (model, "auto")


def test_a_flag_an_environment_and_a_file_stand_above_it_and_defaults_below(
    profile, target_path, tmp_path, monkeypatch
):
    monkeypatch.setenv("EDGESPEC_DRAFTER", "ngram")
    (tmp_path / "mine.toml").write_text("draft-length = 7\n")
    settings = resolve_settings({"threads": 2}, str(target_path), tmp_path / "mine.toml")
    assert settings.values["draft_length"] == 7
    assert settings.values["threads"] == 2
    assert settings.values["engine"] == "llamacpp"
    assert settings.sources["engine"] == source_of(profile)
    assert settings.sources["drafter"] == "EDGESPEC_DRAFTER"
    assert profile_in_effect(settings) == source_of(profile)
    assert profile_in_effect(resolve_settings({"no_profile": True}, str(target_path), None)) is None


def test_what_was_found_under_the_opposite_is_not_taken(profile, target_path):
    model = {"model": str(target_path)}
    assert with_profile(Settings({**model, "engine": "onnx"}, {})).values == {**model, "engine": "onnx"}
    other_drafter = with_profile(Settings({**model, "drafter": "suffix"}, {})).values
    assert "draft_length" not in other_drafter
    assert other_drafter["threads"] == 1


def test_an_exit_belongs_to_the_drafter_that_it_was_found_for(profile):
    save_profile(profile, new_profile("it", TUNED | {"drafter": "early-exit", "exit_layer": 5}, 1.0, 1.0))
    cut = load_profile(profile)
    assert cut.applicable({})["exit_layer"] == 5
    assert "exit_layer" not in cut.applicable({"drafter": "ngram"})
    assert "exit_layer" not in cut.applicable({"exit_layer": 3})


def test_a_command_about_speculation_leaves_plain_decoding_open(target_path):
    path = profile_path(str(target_path))
    assert path is not None
    save_profile(path, new_profile("it", {"engine": "llamacpp", "drafter": "none", "threads": 1}, 1.0, 1.0))
    assert resolve_settings({}, str(target_path), None).values["drafter"] == "none"
    assert "drafter" not in resolve_settings({}, str(target_path), None, speculates=True).values


def test_a_profile_belongs_to_one_model_one_draft_and_one_machine(target_path, tmp_path, monkeypatch):
    copy = tmp_path / "other.gguf"
    shutil.copyfile(target_path, copy)
    first, second = profile_path(str(target_path)), profile_path(str(copy))
    assert first != second
    assert first != profile_path(str(target_path), copy)
    assert first == profile_path(str(target_path), None, None, None)
    heads, medium = (profile_path(str(target_path), None, *files) for files in ((copy, None), (None, copy)))
    assert first not in (heads, medium)
    assert profile_path("no-such-model") is None
    copy.write_bytes(copy.read_bytes() + b"x")
    assert second != profile_path(str(copy))
    monkeypatch.setattr("edgespec.tuning.profiles.machine_name", lambda: "another one")
    assert first != profile_path(str(target_path))


def test_a_registered_name_and_its_folder_are_one_model():
    if not (DEMO / "manifest.toml").is_file():
        pytest.skip("the demo family is not here")
    by_name, by_folder = profile_path("demo"), profile_path(str(DEMO))
    assert by_name is not None
    assert by_name == by_folder


DAMAGED = {
    "no TOML": (b"format = ", "damaged"),
    "no text": (b"\xff\xfe\x00", "damaged"),
    "empty": (b"", "format is None"),
    "of the future": (b"format = 9", "format is 9"),
    "without settings": (b'format = 1\nmodel = "a"\nmachine = "b"\ncreated = "c"\n', "missing"),
    "of wrong types": (
        b'format = 1\nmodel = "a"\nmachine = "b"\ncreated = "c"\ntokens_per_second = 1\nspeedup = 1\n'
        b'[settings]\nthreads = "two"\n',
        "expected a whole number",
    ),
    "with an unknown setting": (
        b'format = 1\nmodel = "a"\nmachine = "b"\ncreated = "c"\ntokens_per_second = 1\nspeedup = 1\n'
        b"[settings]\nthreds = 2\n",
        "unknown setting 'threds'",
    ),
    "with one that is not tuned": (
        b'format = 1\nmodel = "a"\nmachine = "b"\ncreated = "c"\ntokens_per_second = 1\nspeedup = 1\n'
        b"[settings]\ntemp = 2\n",
        "settings.temp is not a setting that tune writes",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_profile_names_itself_and_the_fix(profile, target_path, case):
    contents, said = DAMAGED[case]
    profile.write_bytes(contents)
    with pytest.raises(ConfigError, match="tune MODEL --forget"):
        load_profile(profile)
    result = run("generate", str(target_path), "-p", "x", "-n", "1")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(profile) in line
    assert said in line
    assert run("generate", str(target_path), "-p", "x", "-n", "1", "-t", "1", "--no-profile").exit_code == 0
    assert run("tune", str(target_path), "--forget").exit_code == 0
    assert not profile.exists()


def test_two_at_once_leave_a_whole_one(profile):
    writers = [
        threading.Thread(
            target=lambda n=number: [save_profile(profile, new_profile(f"m{n}", {"threads": n}, 1.0, 1.0))] * 1
        )
        for number in range(1, 9)
    ]
    for writer in writers:
        writer.start()
    for _ in range(50):
        load_profile(profile)  # never half of one
    for writer in writers:
        writer.join()
    found = load_profile(profile)
    assert found.model == f"m{found.settings['threads']}"
    assert [path.name for path in profile.parent.iterdir()] == [profile.name]


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StateError, match="cannot be written"):
        save_profile(tmp_path / "file" / "p.toml", new_profile("m", {}, 1.0, 1.0))


def test_forgetting_reports_whether_there_was_a_profile(profile):
    assert forget_profile(profile)
    assert not forget_profile(profile)


def test_runs_say_that_a_profile_is_in_effect(profile, target_path):
    said = run("generate", str(target_path), "-p", "hello", "-n", "2").stderr
    assert "drafter ngram, draft length 3 | tuned |" in said
    assert source_of(profile) in run("generate", str(target_path), "-p", "hello", "-n", "2", "-v").stderr
    plain = run("generate", str(target_path), "-p", "hello", "-n", "2", "-t", "1", "-v", "--no-profile").stderr
    assert "profile" not in plain
    assert "draft length auto" in plain


def test_a_profile_that_cannot_be_met_any_more_is_named(target_path):
    path = profile_path(str(target_path))
    assert path is not None
    save_profile(path, new_profile("it", {"engine": "llamacpp", "drafter": "model", "threads": 1}, 1.0, 1.0))
    result = run("generate", str(target_path), "-p", "hello", "-n", "2")
    assert result.exit_code == 2
    assert f"({source_of(path)} is in effect; --no-profile ignores it)" in result.stderr.splitlines()[-1]


def test_the_chat_shows_where_its_settings_come_from(profile, target_path):
    result = CliRunner().invoke(cli, ["chat", str(target_path)], input="/show\n")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stderr.splitlines() if line.startswith("draft-length"))
    assert line.split()[:3] == ["draft-length", "3", "profile"]
