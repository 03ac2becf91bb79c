"""`edgespec chat` through a pipe and in a real terminal: conversation, slash commands, interrupts."""

from __future__ import annotations

import json
import re
import sys

import gguf
import pytest
from click.testing import CliRunner, Result

from command_line import ANSWERING, ASKING, POSIX, Terminal
from edgespec.cli.chat import FENCE, open_history
from edgespec.cli.main import cli
from edgespec.cli.slash import COMMANDS
from tiny_gguf import Shape, write_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="session")
def slow_path(tmp_path_factory):
    """Large enough that an answer of unlimited length takes many seconds."""
    shape = Shape(layers=8, width=256, hidden=1024, context=8192, weights=gguf.GGMLQuantizationType.Q8_0)
    return write_model(tmp_path_factory.mktemp("models") / "slow.gguf", shape)


@pytest.fixture
def model(target_path, draft_path):
    return ["-m", str(target_path), "-md", str(draft_path), "--seed", "1", "-n", "8"]


def chat(model: list[str], *lines: str) -> Result:
    return CliRunner().invoke(cli, ["chat", *model], input="".join(line + "\n" for line in lines))


def answers(model: list[str], *lines: str) -> str:
    result = chat(model, *lines)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def saved(path) -> list[dict[str, str]]:
    return json.loads(path.read_text(encoding="utf-8"))["messages"]


def asked(path) -> list[str]:
    return [message["content"] for message in saved(path) if message["role"] == "user"]


def test_each_line_is_answered(model, tmp_path):
    path = tmp_path / "saved.json"
    result = chat([*model, "--stats"], "hello", "", "and again", f"/save {path}")
    assert result.exit_code == 0 and re.search(r"prompt \d+ \(\d+ cached\)", result.stderr), result.stderr
    assert [message["role"] for message in saved(path)] == ["user", "assistant"] * 2
    assert asked(path) == ["hello", "and again"]
    for message in saved(path)[1::2]:
        assert message["content"] in result.stdout


def test_another_model_goes_on_with_the_conversation(target_path, draft_path):
    """As if the conversation had been read by it alone; what cannot be loaded leaves the one that is there."""
    first, second = (["-m", str(path), "--seed", "3", "-n", "12"] for path in (target_path, draft_path))
    switched = chat(first, "one", "/model nothing-like-it", f"/model {draft_path}", "two", "/model")
    assert "no model 'nothing-like-it'" in switched.stderr and f"model: {draft_path.stem}" in switched.stderr
    one = answers(first, "one")
    assert switched.stdout.startswith(one)
    assert switched.stdout.removeprefix(one) != answers(first, "one", "two").removeprefix(one)
    back = chat(second, "hi", f"/model {target_path}", "/clear", "one")
    assert back.stdout.endswith(one)


def test_what_ollama_writes_behind_set_and_show(model):
    typed = ("/set parameter temperature 0", "/set parameter num_predict 5", "/set verbose", "/set nowordwrap")
    more = ("/set system Be brief.", "/show system", "/show info", "/set parameter num_ctx 512", "hello", "/show")
    result = chat(model, *typed, *more)
    assert not [line for line in result.stderr.splitlines() if line.startswith("error")]
    settings = {line.split()[0]: line.split()[1] for line in result.stderr.splitlines() if len(line.split()) > 1}
    assert [settings[name] for name in ("temp", "max-tokens", "ctx-size", "raw")] == ["0.0", "5", "512", "on"]
    assert "system prompt: Be brief." in result.stderr and "quantisation  Q8_0" in result.stderr
    assert "tokens/s" in result.stderr, "verbose shows the speed of an answer"


def test_undo_takes_the_exchange_back(model, tmp_path):
    path = tmp_path / "saved.json"
    chat(model, "one", "two", "/undo", f"/save {path}", "/undo", "/undo")
    assert asked(path) == ["one"]
    assert "nothing to undo" in chat(model, "/undo").stderr


def test_regen_answers_again_with_another_seed(model, tmp_path):
    path = tmp_path / "saved.json"
    result = chat(model, "one", "/regen", f"/save {path}")
    assert "seed 2" in result.stderr
    assert [message["role"] for message in saved(path)] == ["user", "assistant"]
    assert answers([*model, "--seed", "2"], "one").strip() in result.stdout
    assert "nothing to answer" in chat(model, "/regen").stderr


def test_continue_goes_on_with_a_cut_answer(tmp_path):
    path, demo = tmp_path / "saved.json", ["-m", "demo", "--temp", "0", "--reproducible"]
    whole = answers([*demo, "-n", "20"], "a table for two")
    result = chat([*demo, "-n", "4"], "a table for two", "/set max-tokens 16", "/continue", f"/save {path}")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.replace("\n", "") == whole.replace("\n", "")
    assert [message["role"] for message in saved(path)] == ["user", "assistant"]
    assert saved(path)[1]["content"] == whole.removesuffix("\n")
    again = chat([*demo, "-n", "4"], f"/load {path}", "/continue", "/undo", "/continue", f"/save {path}")
    assert "the model adds nothing" in again.stderr
    assert "no answer to go on with" in again.stderr


def test_save_load_and_clear(model, tmp_path):
    path = tmp_path / "my conversation.json"
    first = chat([*model, "-s", "be brief"], "one", f"/save {path}")
    again = tmp_path / "again.json"
    result = chat(model, f"/load {path}", f"/save {again}", "/clear", f"/save {path}")
    assert result.exit_code == 0
    assert all(shown in result.stderr for shown in ("> one", first.stdout.strip(), "loaded 1 exchange"))
    assert [message["role"] for message in saved(again)] == ["system", "user", "assistant"]
    assert [message["role"] for message in saved(path)] == ["system"]


def test_save_overwrites_nothing_but_conversations(model, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    result = chat(model, f"/save {tmp_path / 'thesis.txt'}")
    assert result.exit_code == 1
    assert "not a saved conversation" in result.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_set_changes_what_show_shows(model):
    result = chat(model, "/set temp 0.25", "/set stop END", "/set draft-length 9", "/set stats on", "/show")
    shown = result.stderr.splitlines()
    assert any(re.fullmatch(r"temp +0\.25 +this chat *", line) for line in shown)
    assert any(re.fullmatch(r"draft-length +9 +this chat *", line) for line in shown)
    assert any(re.fullmatch(r"stop +'END' +this chat *", line) for line in shown)
    assert any(re.fullmatch(r"top-k +40 *", line) for line in shown)
    assert any(re.fullmatch(r"seed +1 +the command line *", line) for line in shown)
    assert any(re.fullmatch(r"threads +1 +EDGESPEC_THREADS *", line) for line in shown)


def test_unset_takes_a_setting_back(model):
    """To the default, also where the command line gave another value; a seed becomes a random one."""
    schema = '{"type": "boolean"}'
    lines = (f"/set json-schema {schema}", "Is it?", "/unset json-schema", "/set temp 0.25", "/unset temp")
    more = ("/set stop END", "/unset stop", "/set drafter ngram", "/unset drafter", "/set system x", "/unset system")
    result = chat(model, *lines, *more, "/set stats on", "/unset stats", "/unset seed", "/show")
    said = result.stderr
    assert result.exit_code == 0 and result.stdout.strip() in ("true", "false")
    for line in ("json-schema is not set", "temp = 0.8", "stop is not set", "system prompt: none", "stats = off"):
        assert line in said
    shown = said.splitlines()
    assert any(re.fullmatch(r"temp +0\.8 *", line) for line in shown)
    assert not any(line.startswith(("json-schema  ", "stop  ", "system  ")) for line in shown)
    assert any(re.fullmatch(r"seed +\d+ +chosen at random *", line) for line in shown)
    assert any(re.fullmatch(r"drafter +auto *", line) for line in shown)


BAD = {
    "/unset": "/unset alone does nothing; /unset NAME",
    "/unset chat-template": "chat-template is on in every chat",
    "/xyzzy": "no such command /xyzzy; /help lists them",
    "/temp 0.5": "no such command /temp; did you mean '/set temp VALUE'?",
    "/set temp warm": "/set temp must be a number from 0 to 100, got 'warm'",
    "/set temp": "needs a name and a value",
    "/set allowed-host x": "allowed-host is a setting of edgespec serve",
    "/set drafter eagle": "drafter 'eagle' needs",
    "/set regex (": "regex",
    "/set draft-length 99": "/set draft-length must be auto or a whole number from 0 to 64",
    "/save": "/save alone does nothing; /save FILE: save the conversation",
    "/read /nonexistent": "/read: the file '/nonexistent' cannot be read",
}


def test_a_bad_command_is_one_line_and_the_chat_goes_on(model):
    result = chat(model, *BAD, "hello")
    errors = [text for text in result.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == len(BAD)
    for error, said in zip(errors, BAD.values(), strict=True):
        assert said in error
    assert result.stdout.strip(), "the message after it is answered"
    assert "drafter = eagle" not in result.stderr
    assert chat(model, "/save").exit_code in (1, 2), "a pipe learns of it"


def test_a_file_goes_behind_the_next_message(model, tmp_path):
    (tmp_path / "notes").write_text("one\ntwo\n")
    path, read = tmp_path / "saved.json", f"/read {tmp_path / 'notes'}"
    result = chat(model, read, "Summarise:", "Thanks", read, "/clear", "Bye", f"/save {path}")
    assert asked(path) == ["Bye"] and "7 characters of" in result.stderr
    chat(model, read, "Summarise:", "Thanks", f"/save {path}")
    assert asked(path) == ["Summarise:\n\none\ntwo", "Thanks"]


def test_a_file_that_no_context_holds_is_dropped_with_its_message(model, tmp_path):
    """Else every message would fail until /clear, which takes the conversation with it."""
    (tmp_path / "long").write_text("one two " * 40_000)
    path = tmp_path / "saved.json"
    result = chat([*model, "-c", "512"], f"/read {tmp_path / 'long'}", "Summarise:", "hello", f"/save {path}")
    assert "the message alone makes a prompt of" in result.stderr and asked(path) == ["hello"]


def test_a_chat_begins_with_a_file(model, tmp_path):
    (tmp_path / "prompt").write_text("/exit is\na message\n")
    path = tmp_path / "saved.json"
    result = chat([*model, "-f", str(tmp_path / "prompt")], "and more", f"/save {path}")
    assert result.exit_code == 0 and asked(path) == ["/exit is\na message", "and more"]
    (tmp_path / "empty").touch()
    for name in ("empty", "missing"):
        refused = chat([*model, "--file", str(tmp_path / name)])
        assert refused.exit_code == 2 and "error: --file: the file" in refused.stderr and name in refused.stderr


def test_every_command_is_in_the_help(model):
    text = chat(model, "/help").stderr
    assert all(name in text for name in COMMANDS)


def test_a_message_may_have_several_lines_and_begin_with_a_slash(model, tmp_path):
    path = tmp_path / "saved.json"
    lines = ('"""one', "/two", 'three"""', '"""', "alone", '"""', '"""same line"""', FENCE, "/exit now?", FENCE)
    chat(model, *lines, "/usr/bin/env is missing", f"/save {path}")
    assert asked(path) == ["one\n/two\nthree", "alone", "same line", "/exit now?", "/usr/bin/env is missing"]


def test_a_full_context_drops_the_oldest_turns_and_says_so(model, tmp_path):
    path = tmp_path / "saved.json"
    lines = ["alpha beta gamma", "delta epsilon zeta", "eta theta iota", "kappa lambda mu", "nu xi omicron"]
    result = chat([*model, "-c", "96"], *lines, f"/save {path}")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"the context of \d+ tokens is full: dropped the oldest \d+ exchange", result.stderr)
    assert asked(path) == lines[-len(asked(path)) :] and 0 < len(asked(path)) < len(lines)


# history


def test_the_history_is_private_and_keeps_messages_of_several_lines_apart(tmp_path, capsys):
    path = tmp_path / "new" / "history"
    for text in ("one", "two\nlines", "ünïcødé"):
        open_history(path).store_string(text)
    assert list(open_history(path).load_history_strings()) == ["ünïcødé", "two\nlines", "one"]
    if sys.platform != "win32":
        assert [each.stat().st_mode & 0o777 for each in (path, path.parent)] == [0o600, 0o700]
    memory = open_history(path / "below")
    memory.append_string("two")
    assert memory.get_strings() == ["two"] and capsys.readouterr().err.count("input history is off") == 1


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"caf\xe9\n", "the message is not UTF-8 text: invalid continuation byte at byte 3 of its line"),
        (b'"""one\ntwo\n', "never ends"),
    ],
)
def test_a_message_that_is_none_is_refused_and_not_sent(model, sent, said):
    result = CliRunner().invoke(cli, ["chat", *model], input=sent)
    assert said in result.stderr and result.exit_code == 2 and not result.stdout.strip()


# a real terminal


@POSIX
def test_ctrl_c_stops_the_answer_and_not_the_program(slow_path):
    with Terminal("chat", str(slow_path), "--drafter", "none", "--ignore-eos", "--seed", "1") as terminal:
        terminal.enter("hello")
        terminal.wait_for_more()
        terminal.type("\x03")
        terminal.wait_for("stopped")
        terminal.enter("/stats")
        terminal.wait_for("target passes")
        terminal.enter("/set max-tokens 4")
        terminal.enter("again")
        assert "stopped" not in terminal.wait_for("cut at 4 tokens"), "the interrupt ended one answer only"
        terminal.wait_for(ASKING)
        terminal.type("\x03")
        terminal.wait_for("Ctrl-D or /exit leaves")
        terminal.wait_for(ASKING)
        terminal.type("\x04")
        assert terminal.process.wait(120) == 0


@POSIX
def test_keys_in_a_terminal(target_path, private_home, tmp_path):
    """A remembered line, completion of a command, a line that goes on, the last message again, the end of input."""
    path = tmp_path / "saved.json"
    with Terminal("chat", str(target_path), "--drafter", "none", "-n", "4", "--seed", "1") as terminal:
        terminal.enter("/set drafter none")
        terminal.wait_for("drafter = none")
        terminal.enter("\x1b[A")
        terminal.wait_for("drafter = none")
        terminal.wait_for(ASKING)
        terminal.type("/sho\t")
        terminal.wait_for("w")
        terminal.type("\r")
        terminal.wait_for("max-tokens")
        terminal.wait_for(ASKING)
        terminal.type("one\x1b\rtwo\r")
        terminal.wait_for(ANSWERING)
        terminal.enter("/undo")
        terminal.wait_for(ASKING)
        terminal.type("\x1b[A\x1b[A")
        terminal.wait_for("two")
        terminal.type("!\r")
        terminal.wait_for(ANSWERING)
        terminal.enter(f"/save {path}")
        terminal.wait_for("saved 1 exchange")
        terminal.wait_for(ASKING)
        terminal.type("\x04")
        assert terminal.process.wait(120) == 0
    assert "+/set drafter none" in (private_home / "chat-history").read_text() and asked(path) == ["one\ntwo!"]


@POSIX
def test_ctrl_z_at_the_prompt_gives_the_shell_back(target_path, private_home):
    script = 'set -m; {}; echo "put" aside; fg; echo "all" over'
    with Terminal("chat", str(target_path), "-n", "4", "--seed", "1", script=script) as terminal:
        terminal.wait_for(ASKING)
        terminal.type("\x1a")
        terminal.wait_for("put aside")
        terminal.enter("hello")
        terminal.enter("/stats")
        terminal.wait_for("target passes")
        terminal.wait_for(ASKING)
        terminal.type("\x04")
        terminal.wait_for("all over")
