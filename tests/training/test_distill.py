"""Distilling a draft, as far as it goes without torch: requests, targets, data, the journal, the command's refusals."""

from __future__ import annotations

import json
import lzma
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from edgespec.cli import main as cli_main
from edgespec.errors import CapabilityError, ConfigError, ModelFileError, ModelNotFound
from edgespec.export.training import request as requests
from edgespec.export.training.documents import Corpus, Document, read_documents, split_held_out
from edgespec.export.training.journal import Journal, RoundResult, best_round, rounds_csv, stale_rounds
from edgespec.export.training.preparation import prepare
from edgespec.export.training.request import DistillRequest, parse_init
from edgespec.export.training.students import student_shape
from edgespec.export.training.target import read_target
from edgespec.export.workspace import locked
from edgespec.installation import install_command

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": [0, 7],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder as far as its JSON goes."""
    path = tmp_path / "target"
    path.mkdir()
    tokenizer = {"added_tokens": [{"id": 0, "content": "<s>"}, {"id": 1, "content": "</s>"}], "model": {}}
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
    for name, value in (("config", CONFIG), ("tokenizer", tokenizer), ("tokenizer_config", settings)):
        (path / f"{name}.json").write_text(json.dumps(value))
    (path / "model.safetensors").write_bytes(b"x" * 100)
    return path


def ask(folder: Path, **changes: Any) -> DistillRequest:
    return DistillRequest(folder, folder.parent / "draft", **changes)


def result(index: int, greedy: float, sampled: float | None = None) -> RoundResult:
    return RoundResult(index, 100 * index, 10, greedy, greedy if sampled is None else sampled, 0.5, 1.0, 0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "--layers must be from 1"),
        ({"share": 1.5}, "--share must be from 0 to 1, got 1.5"),
        ({"loss": "l2"}, "--loss 'l2' is not known; allowed: tv, kl"),
        ({"window": 64, "reply_tokens": 64}, "--window 64 must be longer"),
        ({"batch_tokens": 256}, "--batch-tokens 256 must hold at least one --window of 512"),
        ({"window": 2048}, "longer than the target's context of 1024"),
        ({"hidden": 100}, "not a multiple of 64: give 64 or 128"),
        ({"hidden": 100, "heads": 3}, "--hidden 100 must be a multiple of heads= 3"),
        ({"hidden": 96, "heads": 32}, "even width"),
        ({"hidden": 192, "kv_heads": 2}, "heads= 3 is not divisible by --kv-heads 2"),
        ({"init": (0, 8)}, "--init must name different layers from 0 to 7"),
        ({"init": (0, 0)}, "--init must name different layers"),
        ({"init": (0, 7), "hidden": 128}, "--hidden 128 conflicts with --init, which sets it to 256"),
        ({"init": (0, 7), "layers": 3}, "--layers 3 conflicts with --init, which sets it to 2"),
    ],
)
def test_a_bad_request_is_refused_by_name(folder: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        prepare(ask(folder, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["layers", "layers:", "layers:0,x", "heads:1", "layers:-1"])
def test_a_bad_init_is_refused(text: str):
    with pytest.raises(ConfigError, match="layers:0,8"):
        parse_init(text)


def test_sizes_are_derived_from_the_target(folder: Path):
    facts = read_target(folder)
    shape = student_shape(ask(folder), facts)
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn, shape.head_dim) == (
        2,
        128,
        2,
        1,
        384,
        64,
    )
    assert student_shape(ask(folder, hidden=384), facts).kv_heads == 3
    config = student_shape(ask(folder, layers=3, hidden=96, heads=4), facts).config(facts)
    assert (config["num_hidden_layers"], config["head_dim"], config["num_key_value_heads"]) == (3, 24, 2)
    assert (
        config["vocab_size"] == 300 and config["bos_token_id"] == 0 and config["architectures"] == ["LlamaForCausalLM"]
    )
    taken = student_shape(ask(folder, init=parse_init("layers:1,6")), facts)
    assert taken.config(facts) == CONFIG | {"num_hidden_layers": 2}
    # embedding, two layers of attention (256 x 256 for queries and output, 256 x 128 for keys and values), norms
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768 + 2 * 256
    assert taken.parameters(300) == 300 * 256 + 2 * layer + 256


def test_the_target_is_read_from_its_json(folder: Path):
    facts = read_target(folder)
    assert (facts.name, facts.begin_id, facts.stop_ids) == ("target", 0, {0, 1, 7})
    assert facts.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    settings = {"bos_token": "<begin>"}  # not among the added tokens: config.json knows its id
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_target(folder).begin_id == 0
    before = facts.fingerprint()
    (folder / "chat_template.jinja").write_text("other")
    assert read_target(folder).chat_template == "other" and read_target(folder).fingerprint() != before
    with pytest.raises(ModelNotFound, match="is not a folder"):
        read_target(folder / "nowhere")
    (folder / "tokenizer.json").write_text('{"added_tokens": [7]}')
    with pytest.raises(ModelFileError, match="unknown format of added_tokens"):
        read_target(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json: save the tokenizer as a fast one"):
        read_target(folder)


def test_a_gpt2_names_its_sizes_differently_and_lends_no_layers(folder: Path):
    config = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 128, "n_layer": 4, "n_head": 2, "n_positions": 512}
    (folder / "config.json").write_text(json.dumps(config))
    shape = prepare(ask(folder)).shape
    assert (shape.layers, shape.hidden) == (1, 64)
    with pytest.raises(CapabilityError, match="is supported for llama, mistral, qwen2, qwen3; the target is 'gpt2'"):
        prepare(ask(folder, init=(0,)))


def write_data(folder: Path) -> list[Path]:
    talk = [{"role": "user", "content": "hi", "mood": "good"}, {"role": "assistant", "content": "hello"}]
    lines = [json.dumps({"messages": talk}), "", json.dumps({"text": "one text"}), json.dumps({"text": "one text"})]
    (folder / "a.jsonl").write_text("\n".join(lines))
    with lzma.open(folder / "b.jsonl.xz", "wt") as handle:
        handle.write(json.dumps({"text": "packed"}) + "\n")
    (folder / "c.txt").write_text("line of a book\n" * 1000)
    return [folder / name for name in ("a.jsonl", "b.jsonl.xz", "c.txt")]


def test_documents_are_read_once_from_every_kind_of_file(tmp_path: Path):
    documents = read_documents(write_data(tmp_path))
    talk = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"})
    assert documents[:3] == [Document(messages=talk), Document("one text"), Document("packed")]
    book = [document.text for document in documents[3:]]
    assert len(book) > 1 and all(len(piece) <= 8192 and piece.endswith("\n") for piece in book)
    train, held_out = split_held_out(documents, 64)
    assert sorted(d.key for d in train + held_out) == sorted(d.key for d in documents) and len(held_out) == 1
    assert split_held_out(documents[::-1], 64) == (train, held_out)


def test_a_byte_order_mark_is_no_text_and_long_files_are_cut_at_lines(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a smile \\ud83d\\ude00"}')
    (tmp_path / "b.txt").write_bytes("\ufeffa text".encode())
    texts = [document.text for document in read_documents([tmp_path / "a.jsonl", tmp_path / "b.txt"])]
    assert texts == ["a smile \U0001f600", "a text"]
    long = "".join(f"{number} words and more\n" * (number % 7) + "\n" * (number % 5) for number in range(20_000))
    (tmp_path / "c.txt").write_text(long)
    pieces = [document.text for document in read_documents([tmp_path / "c.txt"])]
    assert "".join(pieces) == long and all(len(piece) <= 8192 and piece.endswith("\n") for piece in pieces)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{}\n", 'line 1 has neither a "text"'),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", b'{"messages": [{"role": "pirate", "content": "x"}]}', "line 1: message 0 has the role 'pirate'"),
        ("a.jsonl", b'{"messages": ["x"]}', "line 1 has a message that is not an object"),
        ("a.jsonl", b"", "adds no document"),
        ("a.txt", b"  \n", "adds no document"),
        ("a.txt", b"caf\xe9", "is not UTF-8 text"),
        ("a.jsonl.xz", b"not packed", "cannot be read"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "half a smile \\ud83d"}', "line 2 is not valid Unicode"),
        ("a.jsonl", b'{"text": "x", "n": ' + b"1" * 5000 + b"}", "line 1 is not JSON"),
        ("missing.txt", None, "cannot be read: No such file"),
        ("a.txt", b"only one", "at least two are needed"),
    ],
)
def test_bad_data_is_refused_by_file_and_line(folder: Path, name: str, content: bytes | None, message: str):
    path = folder.parent / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        prepare(ask(folder, data=(path,)))
    assert message in str(caught.value) and "--data" in str(caught.value)


def test_conversations_need_a_template_and_no_data_needs_a_begin_token(folder: Path):
    (folder / "tokenizer_config.json").write_text('{"bos_token": null}')
    data = write_data(folder.parent)
    with pytest.raises(ConfigError, match="no chat template"):
        prepare(ask(folder, data=tuple(data)))
    assert prepare(ask(folder, data=(data[2],))).held_out
    with pytest.raises(ConfigError, match="no begin-of-text token to generate from: give texts with --data"):
        prepare(ask(folder))


def corpus_of(folder: Path, documents: list[Document]) -> Corpus:
    return Corpus(documents, read_target(folder), lambda text, _: list(text.encode()))


def test_a_corpus_draws_prompts_that_end_where_an_answer_begins(folder: Path):
    talk = tuple({"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b")] * 2)
    corpus = corpus_of(folder, [Document(messages=talk)])
    drawn = {bytes(corpus.prompt(np.random.default_rng(seed), 99)).decode() for seed in range(20)}
    assert drawn == {"<s><user>a<assistant>", "<s><user>a<assistant>b<user>a<assistant>"}
    assert bytes(corpus.prompt(np.random.default_rng(0), 11)) == b"<assistant>"
    whole = b"<s><user>a<assistant>b<user>a<assistant>b"
    assert bytes(corpus.window(np.random.default_rng(0), 60).tolist()) == (whole + whole)[:60]


def test_a_corpus_begins_texts_with_the_begin_token_and_draws_by_seed(folder: Path):
    corpus = corpus_of(folder, [Document("x" * 50), Document("".join(map(chr, range(33, 126))) * 5)])
    windows = [corpus.window(np.random.default_rng(seed), 64).tolist() for seed in (1, 1, 2, 3, 4)]
    assert windows[0] == windows[1] and len({tuple(w) for w in windows}) > 2
    assert any(window[0] == 0 for window in windows) and all(len(window) == 64 for window in windows)
    prompt = corpus.prompt(np.random.default_rng(0), 16)
    assert prompt[0] == 0 and 1 <= len(prompt) <= 16


def test_a_conversation_that_the_template_refuses_is_passed_over(folder: Path):
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}ok"
    )
    good, bad = (Document(messages=({"role": "user", "content": text},)) for text in ("good", "bad"))
    corpus = corpus_of(folder, [good, bad])
    assert all(corpus.prompt(np.random.default_rng(seed), 9) == list(b"ok") for seed in range(10))
    with pytest.raises(ConfigError, match=r"cannot be used: .*no"):
        corpus_of(folder, [bad]).prompt(np.random.default_rng(0), 9)


def test_stopping_looks_at_rises_over_the_last_level():
    rounds = [result(i, a) for i, a in enumerate((0.1, 0.2, 0.2009, 0.2018, 0.21, 0.205, 0.205))]
    assert [stale_rounds(rounds[:n], 0.001) for n in range(1, 8)] == [0, 0, 1, 0, 0, 1, 2]
    assert best_round(rounds).index == 4
    assert best_round([result(0, 0.3), result(1, 0.3)]).index == 0
    assert result(1, 0.4, 0.6).acceptance == pytest.approx(0.5)
    assert rounds_csv(rounds[:1]).splitlines()[0].startswith("index,tokens,own_tokens,greedy,sampled,")


def test_the_journal_takes_up_the_same_request_alone(folder: Path):
    request = ask(folder, hidden=128)
    identity = request.identity("fingerprint")
    journal = Journal(request.output, identity)
    assert not journal.is_resumed
    journal.state.write_bytes(b"state")
    journal.write_rounds([result(0, 0.5)])
    assert Journal(request.output, identity).is_resumed
    with pytest.raises(ConfigError, match=r"\(--hidden was 128, is 192\): use the same, .* --restart"):
        Journal(request.output, replace(request, hidden=192).identity("fingerprint"))
    with pytest.raises(ConfigError, match="target has changed"):
        Journal(request.output, request.identity("changed"))
    assert Journal(request.output, identity).is_resumed, "a refusal leaves the state alone"
    assert not Journal(request.output, request.identity("changed"), restart=True).is_resumed


def test_data_is_known_by_its_contents(folder: Path):
    path = folder.parent / "a.txt"
    path.write_text("one")
    before = ask(folder, data=(path,)).identity("")
    path.write_text("two")
    assert ask(folder, data=(path,)).identity("")["data"] != before["data"]
    assert str(folder.parent) not in json.dumps(before)


def test_the_journal_never_touches_what_is_not_its_own(folder: Path):
    request = ask(folder)
    own = request.output.with_name("draft.partial")
    own.mkdir()
    (own / "thesis.txt").write_text("x")
    for restart in (False, True):
        with pytest.raises(ConfigError, match="holds other files"):
            Journal(request.output, request.identity(""), restart=restart)
    assert (own / "thesis.txt").read_text() == "x"
    request.output.mkdir()
    with pytest.raises(ConfigError, match="already exists: give another --output"):
        Journal(request.output, request.identity(""))


def test_a_finished_folder_appears_whole(folder: Path):
    request = ask(folder)
    journal = Journal(request.output, request.identity(""))
    journal.result.mkdir()
    (journal.result / "config.json").write_text("{}")
    assert not request.output.exists()
    journal.write_rounds([result(0, 0.5)])
    (journal.result / "rounds.csv").write_bytes((journal.folder / "rounds.csv").read_bytes())
    journal.publish()
    assert (request.output / "config.json").read_text() == "{}" and not journal.folder.exists()


def test_what_a_kill_after_publishing_left_is_tidied_up(folder: Path):
    request = ask(folder)
    journal = Journal(request.output, request.identity(""))
    journal.write_rounds([result(0, 0.5)])
    request.output.mkdir()
    for content, left in (("another run\n", True), (rounds_csv([result(0, 0.5)]), False)):
        (request.output / "rounds.csv").write_text(content)
        with pytest.raises(ConfigError, match="already exists"):
            Journal(request.output, request.identity(""))
        assert journal.folder.exists() is left


def test_a_full_disk_is_one_line(folder: Path):
    request = ask(folder)
    journal = Journal(request.output, request.identity(""))
    with pytest.raises(CapabilityError, match="free space, or give an --output on another disk"):
        journal.need_space(2**60)


def run_command(*arguments: str | Path) -> Any:
    cli_main.COMMANDS.setdefault("distill", "Train a small draft.")
    return CliRunner().invoke(cli_main.cli, ["distill", *map(str, arguments)])


def test_the_command_refuses_in_one_line(folder: Path):
    data = folder.parent / "a.txt"
    data.write_text("")
    for arguments, message in (
        ((folder, "--data", data), "adds no document"),
        ((folder.parent / "nowhere",), "no folder"),
        ((folder, "--hiden", "64"), "did you mean '--hidden'?"),
        ((folder, "--loss", "l2"), "l2"),
        ((folder, "--hidden", "100"), "not a multiple of 64"),
    ):
        done = run_command(*arguments)
        assert done.exit_code == 2 and message in done.stderr, (arguments, done.stderr, done.exception)
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


def test_an_output_that_cannot_be_made_is_refused_first(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requests, "LIBRARIES", ("json",))
    monkeypatch.chdir(folder.parent)
    (folder.parent / "done").mkdir()
    data = folder.parent / "a.txt"
    data.write_text("some text\n" * 2000)
    with locked(folder.parent / ".busy.partial.lock", folder.parent / "busy"):
        for output, message in (
            (".", "--output . is no name for something new"),
            ("done", "done already exists"),
            ("busy", f"another edgespec (process {os.getpid()}) is writing busy"),
        ):
            done = run_command(folder, "--data", data, "-o", output)
            assert done.exit_code == 2 and message in done.stderr, done.stderr
    left = {path.name for path in folder.parent.iterdir() if path.suffix != ".lock"}  # which Windows keeps
    assert left == {folder.name, "done", "a.txt"}


def test_a_missing_library_is_named_with_its_extra(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requests, "LIBRARIES", ("torch_that_nobody_has", "json"))
    done = run_command(folder, "-o", folder.parent / "draft")
    assert done.exit_code == 2
    assert "distilling needs torch_that_nobody_has" in done.stderr
    assert install_command("train") in done.stderr
    assert not (folder.parent / "draft.partial").exists()
