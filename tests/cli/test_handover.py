"""A pair that is handed over to a server for many users: the command, and what is refused."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgespec.cli.main import cli
from edgespec.errors import CapabilityError, ConfigError
from edgespec.loading.catalogue import entries
from edgespec.tuning import handover as module
from edgespec.tuning.handover import check, handover
from edgespec.tuning.profiles import new_profile, profile_path, save_profile


def words(*given: str) -> list[str]:
    done = CliRunner().invoke(cli, ["handover", *given])
    assert done.exit_code == 0, done.output
    return shlex.split(done.stdout)


def test_a_model_in_the_place_of_the_server_is_told_where_it_goes() -> None:
    done = CliRunner().invoke(cli, ["handover", "my model.gguf"])
    assert done.exit_code == 2
    assert "not one of vllm, sglang, llama-server; the server comes before the model" in done.stderr
    assert "edgespec handover llama-server 'my model.gguf'" in done.stderr


def test_vllm_gets_the_original_weights_of_target_and_draft() -> None:
    command = words("vllm", "qwen3-8b", "--draft-length", "5")
    assert command[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    spec = json.loads(command[command.index("--speculative-config") + 1])
    assert spec == {"method": "draft_model", "model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5}


def test_a_published_head_or_lookups_draft_where_they_are_asked_for_or_nothing_else_is_known() -> None:
    head = handover("vllm", "qwen3-8b", heads=True)
    assert (head.kind, head.draft) == ("eagle3", entries()["qwen3-8b"].heads[0].repo)
    assert "EAGLE3" in handover("sglang", "qwen3-8b", heads=True).command
    alone = handover("sglang", "smollm2-135m")
    assert (alone.kind, alone.draft) == ("ngram", "")
    assert "NGRAM" in alone.command
    with pytest.raises(ConfigError, match="no published EAGLE-3 head"):
        handover("vllm", "qwen3-0.6b", heads=True)


def test_sglang_counts_the_known_token_too() -> None:
    command = handover("sglang", "qwen3-8b", length=5).command
    assert command[:4] == ["sglang", "serve", "--model-path", "Qwen/Qwen3-8B"]
    assert command[command.index("--speculative-num-steps") + 1] == "5"
    assert command[command.index("--speculative-num-draft-tokens") + 1] == "6"
    lookups = handover("sglang", "smollm2-135m", length=5).command
    assert lookups[lookups.index("--speculative-num-draft-tokens") + 1] == "6"
    assert lookups[lookups.index("--speculative-ngram-max-bfs-breadth") + 1] == "1"  # a chain, as the length was tuned


def test_a_draft_with_another_vocab_size_is_allowed_in_vllm_and_not_given_to_sglang() -> None:
    spec = json.loads(handover("vllm", "qwen2.5-7b").command[-1])
    assert (spec["model"], spec["use_heterogeneous_vocab"]) == ("Qwen/Qwen2.5-0.5B-Instruct", True)
    assert "use_heterogeneous_vocab" not in handover("vllm", "qwen2.5-3b").command[-1]
    found = handover("sglang", "gemma-3-4b")
    assert (found.kind, found.draft) == ("ngram", "")
    assert "google/gemma-3-270m-it" in found.note
    assert not handover("sglang", "qwen3-8b").note


def test_llama_server_gets_files(target_path: Path, draft_path: Path) -> None:
    command = handover("llama-server", str(target_path), draft=str(draft_path)).command
    assert command[command.index("-m") + 1] == str(target_path)
    assert command[command.index("--model-draft") + 1] == str(draft_path)


def test_a_tuned_length_and_drafter_are_handed_over(
    target_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    path = profile_path(str(target_path))
    assert path is not None
    settings = {"drafter": "suffix", "draft_length": 7, "engine": "llamacpp"}
    save_profile(path, new_profile(str(target_path), settings, 10.0, 1.5))
    found = handover("llama-server", str(target_path))
    assert (found.kind, found.length, found.is_measured) == ("ngram", 7, True)


def test_what_is_not_known_is_asked_for(target_path: Path, onnx_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --weights"):
        handover("vllm", str(target_path))
    given = handover("vllm", str(target_path), weights="me/target")
    assert (given.target, given.kind) == ("me/target", "ngram")
    with pytest.raises(ConfigError, match="reads GGUF files"):
        handover("llama-server", str(onnx_path))
    with pytest.raises(ConfigError, match="use vllm, sglang, llama-server"):
        handover("tgi", "qwen3-8b")
    with pytest.raises(ConfigError, match=r"1\.\.64"):
        handover("vllm", "qwen3-8b", length=0)


def test_a_server_that_is_here_is_asked_about_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that prints a help text stands in for the server."""
    program = tmp_path / "llama-server"
    monkeypatch.setattr(shutil, "which", lambda name: str(program))
    given = module.Handover("llama-server", "t.gguf", "model", "d.gguf", 4, is_measured=False)
    program.write_text("#!/bin/sh\necho '--spec-type --model-draft --spec-draft-n-max'\n")
    program.chmod(0o755)
    assert check(given)
    program.write_text("#!/bin/sh\necho '--draft-max --model-draft'\n")
    with pytest.raises(CapabilityError, match="--spec-type, --spec-draft-n-max"):
        check(given)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not check(given)


def test_every_entry_of_the_catalogue_names_its_original_weights() -> None:
    assert not [name for name, entry in entries().items() if entry.weights.count("/") != 1]
