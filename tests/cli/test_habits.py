"""What users of other programs type by habit gets the name that it has here, never one that only looks alike."""

from __future__ import annotations

import pytest

from command_line import run
from edgespec.cli.main import COMMANDS, cli
from edgespec.config.table import CALLED, INSTEAD


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["repl", "qwen3-8b"], "did you mean 'chat'?"),
        (["models"], "did you mean 'ls'?"),
        (["run", "qwen3:8b", "hi"], "edgespec pull qwen3:8b fetches it"),
        (["run", "qwen3:8b-q8_0", "hi"], "edgespec pull qwen3:8b-q8_0 fetches it"),
        (["run", "llama3.2", "hi"], "edgespec pull llama3.2 fetches it"),
        (["delete", "x"], "did you mean 'rm'?"),
        (["install", "x"], "did you mean 'pull'?"),
        (["create", "x", "-f", "Modelfile"], "edgespec add FILE --name NAME"),
        (["ps"], "nothing stays loaded"),
        (["version"], "edgespec --version"),
        (["generate", "--n-predict", "5"], "did you mean '--max-tokens'?"),
        (["generate", "--num-ctx", "5"], "did you mean '--ctx-size'?"),
        (["generate", "--n-gpu-layers", "5"], "did you mean '--gpu-layers'?"),
        (["chat", "--draft", "5"], "did you mean '--draft-length'?"),
        (["chat", "--nothink"], "did you mean '--no-thinking'?"),
        (["run", "--think=false", "x"], "--no-thinking turns it off"),
        (["generate", "--prompt-cache", "x"], "no such option '--prompt-cache'"),
        (["chat", "--prompt-cache", "x"], "did you mean '--session'?"),
        (["generate", "--file", "x"], "-p - < FILE"),
        (["generate", "--conversation"], "edgespec chat holds"),
        (["generate", "-cnv"], "edgespec chat holds"),
        (["generate", "-temp", "0"], "no such option '-temp'; did you mean '--temp'?"),
        (["generate", "-seed", "7", "-p", "x"], "did you mean '--seed'?"),
        (["generate", "-sys", "Be brief", "-p", "x"], "did you mean '--system'?"),
        (["chat", "--lora", "x"], "merge them into the model"),
        (["chat", "-r", "User:"], "did you mean '--stop'?"),
        (["generate", "-p", "x", "--top-k", "-2"], "0 or -1 keeps all"),
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


def test_the_words_are_no_names_of_ours() -> None:
    names = set(COMMANDS)
    for command in ("run", "chat", "serve"):
        names |= {
            flag.lstrip("-") for p in cli.get_command(None, command).params for flag in (*p.opts, *p.secondary_opts)
        }
    # -ngl is one, --ngl a habit; --file is one of chat, and a habit for run; --stop is one, and a command elsewhere
    assert not (names - {"ngl", "f", "file", "stop"}) & {*CALLED, *INSTEAD}
    assert set(CALLED.values()) <= names


@pytest.mark.parametrize("word", ["--log-colours", "--cpu-range", "--simple-io", "--slots-idle", "--edit"])
def test_what_is_not_alike_is_not_suggested(word: str) -> None:
    for command in ("serve", "run"):
        found = run(command, word)
        assert f"no such option '{word}'; see edgespec {command} --help" in " ".join(found.output.split())
