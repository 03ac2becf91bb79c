"""The command line, by click's runner and as a process: output, refused input, exit codes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

import gguf
import pytest
from click.testing import CliRunner

from command_line import POSIX, refusal, run
from edgespec.cli import run as piped
from edgespec.cli.main import ALIASES, COMMANDS, cli
from edgespec.cli.terminal import stops
from edgespec.config.options import GenerateOptions
from edgespec.config.sources import resolve
from edgespec.errors import ConfigError, PromptError
from edgespec.formats.manifest import MANIFEST
from edgespec.installation import install_command
from tiny_gguf import Shape, write_model

EVERYDAY = "chat run serve ls show pull plan bench export doctor"
KEYS = {
    *("model", "engine", "drafter", "verify", "seed", "reproducible", "lossless", "prompt_token_ids", "token_ids"),
    *("text", "reasoning", "answer", "finish_reason", "notes", "stats"),
}
STATS_KEYS = {
    *("prompt_tokens", "new_tokens", "target_passes", "drafted_tokens", "accepted_tokens", "acceptance_rate"),
    *("mean_accepted_length", "tokens_per_second", "prefill_s", "draft_s", "verify_s", "overhead_s", "wall_s"),
    *("peak_rss_bytes", "planned_bytes"),
}
pytestmark = pytest.mark.usefixtures("one_thread")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "edgespec", *arguments]


# generate


def test_json_is_one_object_with_exactly_the_promised_keys(pair):
    asked = ("generate", *pair, "-p", "hello", "-n", "8", "--seed", "7")
    answer = json.loads(run(*asked, "--json").stdout)
    assert run(*asked).stdout == answer["text"].removesuffix("\n") + "\n"
    stats = answer["stats"]
    assert (set(answer), set(stats)) == (KEYS, STATS_KEYS)
    assert (answer["seed"], answer["drafter"], answer["lossless"]) == (7, "auto", True)
    assert stats["new_tokens"] == len(answer["token_ids"]) <= 8
    assert stats["prompt_tokens"] == len(answer["prompt_token_ids"]) > 0
    assert stats["wall_s"] > 0 and stats["peak_rss_bytes"] > 10**6


@pytest.mark.usefixtures("fresh_seeds")
def test_a_random_seed_is_reported_and_gives_the_text_again(pair):
    first = run("generate", *pair, "-p", "hello", "-n", "12", "--stats")
    (seed,) = re.findall(r"seed (\d+)", first.stderr)
    again = run("generate", *pair, "-p", "hello", "-n", "12", "--seed", seed)
    assert again.stdout == first.stdout
    assert re.findall(r"seed (\d+)", run("generate", *pair, "-p", "hello", "-n", "1", "-v").stderr) != [seed]
    asked = run("generate", *pair, "-p", "hello", "-n", "1", "--seed", "-1", "--json")  # llama.cpp's way to ask for one
    assert json.loads(asked.stdout)["seed"] not in (-1, 0, int(seed))


def test_the_prompt_comes_from_a_pipe(pair):
    spoken = json.loads(run("generate", *pair, "-p", "two\nlines", "-n", "1", "--json").stdout)
    for arguments in (["-p", "-"], []):
        piped = run("generate", *pair, *arguments, "-n", "1", "--json", stdin="two\nlines\n")
        assert json.loads(piped.stdout)["prompt_token_ids"] == spoken["prompt_token_ids"]


def test_the_template_can_be_left_out(pair):
    plain = json.loads(run("generate", *pair, "-p", "hello", "-n", "1", "--no-chat-template", "--json").stdout)
    wrapped = json.loads(run("generate", *pair, "-p", "hello", "-n", "1", "--json").stdout)
    named = json.loads(run("generate", *pair, "hello", "-n", "1", "--json").stdout)
    assert named["prompt_token_ids"] == wrapped["prompt_token_ids"]
    system = json.loads(run("generate", *pair, "-p", "hello", "-s", "be brief", "-n", "1", "--json").stdout)
    assert len(plain["prompt_token_ids"]) < len(wrapped["prompt_token_ids"]) < len(system["prompt_token_ids"])


# bad input

_X = ("generate", "-p", "x")
REFUSED = [
    (["generate", "demoo", "-p", "x"], "no model 'demoo'"),
    ([*_X, "-md", "nothing.gguf"], "nothing.gguf"),
    (["genrate"], "no such command 'genrate'; did you mean 'generate'?"),
    (["xyzzy"], f"known: {', '.join(COMMANDS)}"),
    (["chat", "--no-chat-template"], "edgespec run --no-chat-template"),
    (["generate", "demo", "-p", " "], "prompt is empty"),
    (["verify", "demo", "--drafter", "none"], "turns speculation off"),
    ([*_X, "-c", "64", "-p", "many words " * 200], "tokens but the context holds only 64"),
    (["chat", "--tmep", "1"], "no such option '--tmep'; did you mean '--temp'?"),
    ([*_X, "--temp", "nan"], "--temp must be a number"),
    ([*_X, "-n"], "'-n' requires an argument"),
    ([*_X, "--stop", ""], "stop contains an empty string"),
    ([*_X, "-s", "x", "--no-chat-template"], "--system needs the chat template"),
    ([*_X, "other", "-m", "another"], "two models"),
    ([*_X, "--config", "/nonexistent.toml"], "/nonexistent.toml cannot be read: No such file"),
    ([*_X, "demo", "superfluous"], "two prompts are given"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_a_bad_command_line_is_one_line_before_any_work(arguments, said):
    refusal(run(*arguments), said)


def test_notes_of_an_answer_are_in_the_json(pair, monkeypatch):
    """Such as memory that was freed, or a drafter that failed: a program that reads the JSON sees no stderr."""
    monkeypatch.setattr("edgespec.memory.watch.Relief.relieve", lambda *_: "a note")
    result = run("generate", *pair, "-p", "hello", "-n", "2", "--json")
    assert json.loads(result.stdout)["notes"] == ["a note"]
    assert "note: a note" in result.stderr


def prompt_of(pair, text="Summarise:", **streams) -> tuple[list[int], str]:
    """The prompt that `generate -p TEXT` reads with such a standard input, and its notes."""
    arguments = command("generate", *pair, "-p", text, "--no-chat-template", "-n", "1", "--json")
    done = subprocess.run(arguments, capture_output=True, timeout=120, check=True, **streams)
    return json.loads(done.stdout)["prompt_token_ids"], done.stderr.decode()


def test_text_of_a_file_or_a_pipe_comes_behind_the_prompt(pair, tmp_path):
    (tmp_path / "text").write_text("one\ntwo\n")
    with (tmp_path / "text").open("rb") as file:
        prompt, notes = prompt_of(pair, stdin=file)
    assert "standard input: 7 characters behind the prompt" in notes
    assert prompt == prompt_of(pair, input=b"one\ntwo\n")[0]
    whole, notes = prompt_of(pair, "Summarise:\n\none\ntwo", input=b"\n")
    assert whole == prompt and "standard input" not in notes
    refusal(run("generate", *pair, "-p", " ", stdin=b"text"), "prompt is empty")


@POSIX
def test_a_standard_input_without_data_does_not_hang(pair, monkeypatch, capsys):
    """A socket is not read; a pipe that stays open is waited for, but not for ever."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert "standard input" not in prompt_of(pair, stdin=theirs)[1]
    monkeypatch.setattr(piped, "FIRST_BYTE_S", 0.2)
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert piped.text_behind() == ""
        assert "answering without it (< /dev/null" in capsys.readouterr().err
        os.close(writing)


@POSIX
def test_an_input_without_end_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(piped, "MAX_TEXT_BYTES", 1 << 20)
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE, text=True) as endless:
        monkeypatch.setattr("sys.stdin", endless.stdout)
        with pytest.raises(PromptError, match="more than 1 MiB"):
            piped.text_behind()
        endless.kill()
    (tmp_path / "long").write_bytes(b"a" * (1 << 21))
    with (tmp_path / "long").open() as long:
        monkeypatch.setattr("sys.stdin", long)
        with pytest.raises(PromptError, match="more than 1 MiB"):
            piped.text_behind()


def test_a_prompt_that_is_no_text(pair):
    refusal(run("generate", *pair, "-p", "-", stdin=b"\xff\xfe"), "not UTF-8")
    refusal(run("generate", *pair, "-p", "a\udcff"), "-p is not UTF-8 text: invalid byte behind 1 characters")
    result = run("generate", *pair, "-p", "x", "--stop", "caf\udce9")
    refusal(result, "--stop, from the command line, is not UTF-8 text: invalid byte behind 3 characters")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "-p", "x", "--config=~/c.toml"], "c.toml: unknown setting 'found'"),
        (["chat", "--session=~/c.toml"], "c.toml"),
    ],
)
def test_a_tilde_behind_an_option_is_the_home_folder(arguments, said, tmp_path: Path, monkeypatch) -> None:
    """Shells replace it in a word of its own only."""
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "c.toml").write_text("found = 1")
    result = run(*arguments)
    assert result.exit_code, result.output
    assert str(tmp_path / "c.toml") in result.stderr
    assert said in result.stderr


# help


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments):
    result = run(*arguments)
    assert result.exit_code == 0
    listed = re.findall(r"^  ([a-z-]+)  ", result.stdout.partition("Commands:")[2], re.MULTILINE)
    assert listed == EVERYDAY.split()
    assert all(f"  {name} " in run("--help-all").stdout for name in COMMANDS)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_other_names_of_a_command_are_the_command(alias, name):
    assert run(alias, "--help").stdout == run(name, "--help").stdout


# real processes


def test_a_closed_pipe_is_not_an_error(pair):
    with subprocess.Popen(
        command("generate", *pair, "-p", "hello", "--ignore-eos"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait(120) in (0, 141)  # 0 when all was written before the pipe closed
    assert "Traceback" not in said
    assert "Exception" not in said


@POSIX
@pytest.mark.parametrize("mode", [[], ["--json"]])
def test_an_interrupt_ends_generate_with_130(pair, mode):
    arguments = command("generate", *pair, "-p", "hello", "--ignore-eos", *mode)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"kernels" in process.stderr.readline()  # the last line before the first token
        assert process.stdout is not None
        if not mode:  # JSON comes at the end
            process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        output, said = process.communicate(timeout=120)
    assert process.returncode == 130, said.decode()
    assert b"Traceback" not in said
    if mode and output:
        assert json.loads(output)["finish_reason"] == "cancelled"


# verify and doctor


def test_verify_reports_as_json(pair):
    result = run("verify", *pair, "-n", "6", "--seed", "1", "--json")
    report = json.loads(result.stdout)
    assert set(report) == {
        *("model", "engine", "drafter", "draft_length", "verify", "seed", "reproducible", "identical", "num_tokens"),
        *("acceptance_rate", "mean_accepted_length", "speed_ratio", "comparisons"),
    }
    assert result.exit_code == (0 if report["identical"] else 1)
    assert {one["temperature"] for one in report["comparisons"]} == {0.0, 0.8}
    assert report["num_tokens"] == sum(one["num_tokens"] for one in report["comparisons"])
    assert report["identical"] == all(one["divergence"] is None for one in report["comparisons"])


def test_verify_finds_identical_text_in_the_reproducible_mode(tmp_path):
    quantised = write_model(tmp_path / "q8.gguf", Shape(weights=gguf.GGMLQuantizationType.Q8_0))
    result = run("verify", str(quantised), "-md", str(quantised), "-n", "12", "--seed", "1")
    assert result.exit_code == 0
    assert re.fullmatch(
        r"identical with and without speculation: \d+ tokens in \d+ runs, \d+ of \d+ draft tokens accepted",
        result.stdout.splitlines()[-1],
    )
    assert not re.findall(r"\d+\.\d\dx", result.stdout), "a speed would be taken for a result"
    assert "This checks the text, not the speed" in result.stderr
    assert "DIFFERENT" not in result.stdout


def test_verify_finds_and_explains_a_difference(pair):
    """Under the rejection rule sampled text depends on the draft: there is a difference to find."""
    result = run("verify", *pair, "-n", "16", "--seed", "1", "--verify", "rejection", "--temp", "1.5", "--top-k", "0")
    assert result.exit_code == 1
    assert re.search(r"DIFFERENT at token \d+: \d+ '.*' plain, \d+ '.*' drafted, logit margin -?\d", result.stdout)
    assert result.stdout.splitlines()[-1].startswith("DIFFERENT in ")


def test_doctor_reports_engine_and_versions():
    report = json.loads(run("doctor", "--json").stdout)
    assert report["engines"]["llamacpp"]["available"]
    assert {"name", "description", "kind", "total_bytes"} <= report["engines"]["llamacpp"]["devices"][0].keys()
    assert report["engines"]["llamacpp"]["rpc"] in (True, False)
    assert report["threads"] >= 1
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))


def test_doctor_tells_which_models_are_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / MANIFEST).write_text("no = = toml")
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and any(f"broken{os.sep}{MANIFEST}" in problem for problem in report["problems"])


def test_doctor_tells_how_to_build_llama_cpp_for_other_devices(monkeypatch):
    device = {"name": "CPU", "description": "a processor", "kind": "cpu", "total_bytes": 2**30, "free_bytes": 0}
    found = {"installed": True, "available": True, "version": "1", "features": [], "gpu_offload": False, "rpc": False}
    found |= {"devices": [device]}
    monkeypatch.setattr("edgespec.cli.doctor._llamacpp", lambda: found)
    monkeypatch.setattr("edgespec.cli.doctor.gpu_backend", lambda: "vulkan")
    shown = run("doctor").stdout
    assert shown.startswith("Ready: ")
    assert "device CPU: a processor (cpu, 1.0 GiB)" in shown
    assert re.search(r"this machine's GPU \(any GPU\): .*(GGML_VULKAN=ON|--backend vulkan)", shown)
    assert re.search(r"several machines \(RPC\): not in this build: .*(GGML_RPC=ON|--backend rpc)", shown)


def test_doctor_tells_of_two_builds_of_onnx_runtime_and_of_an_engine_that_cannot_start(monkeypatch):
    monkeypatch.setattr("edgespec.cli.doctor._is_installed", lambda package: True)
    monkeypatch.setattr("edgespec.contained.sys.executable", "/nonexistent/python")
    result = run("doctor")
    assert result.exit_code == 1 and result.stdout.startswith("Not ready: 2 problems")
    assert "engine llamacpp: NOT available" in result.stdout
    builds, llamacpp = sorted(line for line in result.stdout.splitlines() if line.startswith("problem: "))[::-1]
    assert "onnxruntime and onnxruntime-gpu overwrite each other's files" in builds
    assert install_command("gpu") in builds
    assert "asking llama.cpp failed" in llamacpp


@pytest.mark.parametrize(("terminal", "has_codes"), [("xterm", True), ("dumb", False)])
def test_a_dumb_terminal_gets_no_escape_codes(terminal: str, has_codes: bool):
    result = CliRunner().invoke(cli, ["plan", "demo"], color=True, env={"TERM": terminal, "NO_COLOR": ""})
    assert result.exit_code == 0, result.output
    assert ("\x1b" in result.stdout) == has_codes


# -- --json-schema, --grammar, --regex and --free-until


SCHEMA = {
    "type": "object",
    "properties": {"seats": {"enum": [2, 4]}},
    "required": ["seats"],
    "additionalProperties": False,
}


def test_a_schema_comes_from_a_file_or_the_line_itself(tmp_path: Path, pair):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    for given in (str(file), json.dumps(SCHEMA)):
        result = run("generate", *pair, "-p", "A table", "-n", "40", "--temp", "0", "--json-schema", given, "--json")
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        assert answer["finish_reason"] == "stop" and json.loads(answer["text"])["seats"] in (2, 4)


def test_a_grammar_comes_from_a_file(tmp_path: Path, pair):
    file = tmp_path / "answer.gbnf"
    file.write_text('root ::= "yes" | "no"\n', encoding="utf-8")
    result = run("generate", *pair, "-p", "Well?", "--grammar", str(file))
    assert result.exit_code == 0 and result.stdout in ("yes\n", "no\n")


@pytest.mark.parametrize(
    ("structure", "quiet"), [(["--json-schema", json.dumps(SCHEMA)], []), (["--regex", "[0-9]{40}"], ["-q", "--json"])]
)
def test_an_answer_that_is_cut_before_its_end_is_an_error(pair, structure: list[str], quiet: list[str]):
    result = run("generate", *pair, "-p", "A table", "-n", "2", *structure, *quiet)
    assert result.exit_code == 1 and result.stdout
    lines = [line for line in result.stderr.splitlines() if "cut at 2 tokens" in line]
    more = "a larger -n (--max-tokens) gives more"
    assert lines == [f"error: the answer ends before {structure[0]} is complete, cut at 2 tokens: {more}"]
    assert not quiet or result.stderr.splitlines() == lines
    assert not quiet or json.loads(result.stdout)["finish_reason"] == "length"


def test_a_config_file_and_the_environment_name_a_schema_too(tmp_path: Path):
    wrong = run("generate", "demo", "-p", "x", "--json-schema", "nowhere.json")
    refusal(wrong, "the file 'nowhere.json' cannot be read: No such file")
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    config = tmp_path / "config.toml"
    config.write_text(f"json-schema = '{file}'\n", encoding="utf-8")
    for settings in (resolve({}, {}, config), resolve({}, {"EDGESPEC_JSON_SCHEMA": str(file), "EDGESPEC_CONFIG": ""})):
        assert GenerateOptions(**settings.part("generate")).json_schema == json.dumps(SCHEMA)
    with pytest.raises(ConfigError, match="EDGESPEC_GRAMMAR: the file 'gone' cannot be read"):
        resolve({}, {"EDGESPEC_GRAMMAR": "gone", "EDGESPEC_CONFIG": ""})


# -- Ctrl-C while a library's call runs, which Python's own handlers wait for


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send SIGINT to this process alone")
def test_ctrl_c_cancels_before_a_long_call_returns() -> None:
    called: list[tuple[float, threading.Thread]] = []
    with stops(lambda: called.append((monotonic(), threading.current_thread()))) as interruption:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 5_000_000)  # as long as a pass, and like it without Python's lock
        returned = monotonic()
    assert interruption.is_set()
    (called_s, thread), *_ = called
    assert called_s < returned and thread is not threading.main_thread()  # which the call has


def test_the_wakeup_of_others_is_given_back() -> None:
    before = signal.set_wakeup_fd(-1)
    try:
        with stops(lambda: None):
            pass
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(before)
