"""Distilling a draft where torch is: learning, writing, measuring, resuming, the finished folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from edgespec.cli import main as cli_main
from edgespec.errors import ModelFileError, StateError
from edgespec.export.training import request as requests
from edgespec.export.training.journal import stale_rounds
from edgespec.export.training.preparation import prepare
from edgespec.export.training.request import DistillRequest

torch = pytest.importorskip("torch", reason="learning needs torch: scripts/run.py install train")
transformers = pytest.importorskip(
    "transformers", reason="targets are read by transformers: scripts/run.py install train"
)
pytest.importorskip("tokenizers", reason="texts need tokenizers: scripts/run.py install train")

from safetensors.torch import load_file  # noqa: E402

from edgespec.export.training.card import write_folder  # noqa: E402
from edgespec.export.training.inherit import new_student, principal_embedding  # noqa: E402
from edgespec.export.training.on_policy import build_trainer, distill  # noqa: E402
from edgespec.export.training.student_acceptance import OwnText, agreement  # noqa: E402
from edgespec.export.training.writing import write  # noqa: E402
from tiny_training import nothing, write_target  # noqa: E402
from waiting import until  # noqa: E402

SMALL: dict[str, Any] = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "rounds": 3,
    "round_tokens": 256,
    "round_prompts": 6,
    "reply_tokens": 12,
    "window": 32,
    "batch_tokens": 128,
    "held_out_prompts": 4,
    "patience": 9,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


def run_command(*arguments: str | Path) -> Any:
    cli_main.COMMANDS.setdefault("distill", "Train a small draft.")
    return CliRunner().invoke(cli_main.cli, ["distill", *map(str, arguments)])


def small(tiny: Path, output: Path, **changes: Any) -> DistillRequest:
    return DistillRequest(tiny, output, (tiny.parent / "talks.jsonl",), **{**SMALL, **changes})


def run(request: DistillRequest, advance: Any = nothing) -> Any:
    prepared = prepare(request)
    return distill(prepared, prepared.open_journal(), nothing, advance)


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_command_makes_a_folder_that_transformers_loads(tiny: Path, tmp_path: Path):
    output = tmp_path / "draft"
    options = [f"{requests.flag(name)}={value}" for name, value in SMALL.items()]
    done = run_command(tiny, "--data", tiny.parent / "talks.jsonl", "-o", output, *options)
    assert done.exit_code == 0, done.stderr
    assert f"next: edgespec export {tiny} --draft {output}" in done.stdout
    assert "at most 3 rounds" in done.stderr and "round 3: acceptance" in done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(output)
    assert model.config.vocab_size == transformers.AutoConfig.from_pretrained(tiny).vocab_size
    assert {value.dtype for value in load_file(output / "model.safetensors").values()} == {torch.float16}
    assert (output / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert len((output / "rounds.csv").read_text().splitlines()) == 5
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert str(tmp_path) not in (output / name).read_text() and str(tiny) not in (output / name).read_text()
    card, notice = (output / "README.md").read_text(), (output / "NOTICE").read_text()
    assert "a draft for target" in card and "| 3 | 768 |" in card
    assert "talks.jsonl (sha256 " in notice and str(tmp_path) not in card + notice
    assert not output.with_name("draft.partial").exists()
    again = run_command(tiny, "-o", output, *options)
    assert again.exit_code == 2 and "already exists" in again.stderr


def test_a_run_that_was_stopped_anywhere_gives_the_weights_of_one_that_was_not(tiny: Path, tmp_path: Path):
    whole = run(small(tiny, tmp_path / "whole"))
    calls: list[int] = []
    run(small(tiny, tmp_path / "counted"), lambda *_: calls.append(1))
    for index, stop in enumerate(range(1, len(calls) + 1, 4)):
        request = small(tiny, tmp_path / f"stopped{index}")
        seen = 0

        def interrupt(*_: Any, stop: int = stop) -> None:
            nonlocal seen
            seen += 1
            if seen == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(request, interrupt)
        assert not request.output.exists()
        done = run(request)
        assert weights_of(request.output) == weights_of(whole.folder), f"stopped at call {stop}"
        without_time = [replace(result, seconds=0) for result in done.rounds]
        assert without_time == [replace(result, seconds=0) for result in whole.rounds]


def test_a_killed_process_loses_one_round_at_most(tiny: Path, tmp_path: Path):
    code = "import sys\nfrom edgespec.cli import main\nmain.COMMANDS.setdefault('distill', '')\nmain.main()"
    output = tmp_path / "killed"
    options = [f"{requests.flag(name)}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-c", code, "distill", str(tiny), "--data", str(tiny.parent / "talks.jsonl")]
    command += ["-o", str(output), *options]
    process = subprocess.Popen(command, env=os.environ, stderr=subprocess.DEVNULL)
    rounds = tmp_path / "killed.partial" / "rounds.csv"
    until(lambda: process.poll() is not None or (rounds.exists() and rounds.read_text().count("\n") >= 3), 120)
    process.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    process.wait()
    if not output.exists():  # else it was done before the signal came
        done = run_command(tiny, "--data", tiny.parent / "talks.jsonl", "-o", output, *options)
        assert done.exit_code == 0 and "resuming after round" in done.stderr, done.stderr
    whole = run(small(tiny, tmp_path / "whole"))
    assert weights_of(output) == weights_of(whole.folder)


def test_an_interrupt_ends_with_130_and_says_that_it_goes_on(tiny: Path, tmp_path: Path, monkeypatch: Any):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgespec.export.training.on_policy.estimate", interrupt)
    done = run_command(tiny, "-o", tmp_path / "draft", "--window", "64", "--reply-tokens", "12")
    assert done.exit_code == 130 and "the same command continues" in done.stderr


def test_acceptance_rises_and_learning_stops_when_it_no_longer_does(tiny: Path, tmp_path: Path):
    learning = {"hidden": 64, "heads": 4, "window": 64, "batch_tokens": 256, "round_tokens": 2048}
    request = small(tiny, tmp_path / "draft", rounds=12, patience=2, min_rise=0.05, **learning)
    done = run(request)
    values = [result.acceptance for result in done.rounds]
    assert max(values) > 0.5 > values[0] + 0.3
    assert len(values) < 13 and "has not risen by more than 0.05 for 2 rounds" in done.reason
    assert stale_rounds(done.rounds, 0.05) == 2 and done.best.acceptance == max(values)


def test_a_student_of_all_layers_is_the_target(tiny: Path, tmp_path: Path):
    prepared = prepare(small(tiny, tmp_path / "draft", layers=None, hidden=None, heads=None, init=(0, 1, 2)))
    trainer, held_out = build_trainer(prepared)
    trainer.write_held_out(held_out, nothing)
    result = trainer.measure(0, 1.0, 0.0)
    assert result.greedy == 1.0 and result.sampled == pytest.approx(1.0, abs=1e-5)
    ids, weights = torch.arange(64).view(2, 32), torch.ones(2, 32)
    _, variation = trainer.distance(ids, weights, 1.0)
    assert float(variation) == pytest.approx(0.0, abs=1e-3)
    last = prepare(small(tiny, tmp_path / "last", layers=None, hidden=None, heads=None, init=(2,)))
    student = new_student(last.shape, last.facts, trainer.target, 0)
    wanted = trainer.target.model.layers[2].mlp.up_proj.weight
    assert torch.equal(student.model.layers[0].mlp.up_proj.weight, wanted) and len(student.model.layers) == 1


def test_a_gradient_does_not_depend_on_how_many_rows_go_at_once(tiny: Path, tmp_path: Path):
    trainer, _ = build_trainer(prepare(small(tiny, tmp_path / "draft")))
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 250, (4, 32), generator=rng)
    weights = torch.rand((4, 32), generator=rng)
    found = []
    for at_once in (4, 1):
        trainer.rows_at_once = at_once
        trainer.student.zero_grad()
        variation = trainer.accumulate(ids, weights, 0.6)
        found.append((variation, trainer.student.model.layers[0].mlp.up_proj.weight.grad.clone()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-3, atol=1e-6)


def random_model(kind: str) -> Any:
    """A tiny model with weights so large that its greedy text varies; Gemma 2 has a cache that slides."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    common = {"vocab_size": 300, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(**common, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    elif kind == "gemma2":
        config = transformers.Gemma2Config(**common, **sizes, head_dim=16, num_key_value_heads=1, sliding_window=8)
    else:
        config = transformers.Qwen2Config(**common, **sizes, num_key_value_heads=1)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gpt2"])
def test_writing_in_batches_is_writing_alone(kind: str):
    """Greedy text of ragged rows, with rows that end early, against transformers' own generation row by row."""
    model = random_model(kind)
    prompts = [[0, 5, 9], [0, 17], [0, 30, 31, 32, 33, 34, 40], [0, 99, 98, 97, 96]]
    alone = [
        model.generate(
            torch.tensor([p]),
            attention_mask=torch.ones(1, len(p)),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=[],
            pad_token_id=0,
        )[0].tolist()
        for p in prompts
    ]
    stops = {alone[0][len(prompts[0]) + 3], alone[1][len(prompts[1]) + 1]}
    expected = []
    for prompt, text in zip(prompts, alone, strict=True):
        end = next((i for i in range(len(prompt), len(text)) if text[i] in stops), len(text) - 1)
        expected.append(text[: end + 1])
    assert write(model, prompts, 20, [0.0] * 4, stops, seed=1) == expected
    assert write(model, prompts, 20, [0.0] * 4, (), seed=1) == alone
    hot = [write(model, prompts, 20, [1.0] * 4, (), seed=seed) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    opened = write(model, [[0], [0]], 20, [0.0, 0.0], (), seed=1, opening=4)
    assert opened[0][:5] != opened[1][:5], "greedy rows from one begin token are told apart by their opening"


def test_acceptance_is_what_a_plain_loop_finds(tiny: Path, tmp_path: Path):
    trainer, _ = build_trainer(prepare(small(tiny, tmp_path / "draft")))
    texts = [OwnText([0, 4, 8, 15, 16, 23, 42], 3), OwnText([0, 9, 9], 1), OwnText(list(range(20)), 12)]
    hits, overlaps = [], []
    for text in texts:
        ids = torch.tensor([text.token_ids])
        with torch.no_grad():
            ours, theirs = (model(input_ids=ids).logits[0] for model in (trainer.target, trainer.student))
        for position in range(text.start - 1, len(text.token_ids) - 1):
            hits.append(int(theirs[position].argmax()) == text.token_ids[position + 1])
            overlaps.append(float(torch.minimum(ours[position].softmax(0), theirs[position].softmax(0)).sum()))
    for max_tokens in (1, 24, 1000):
        greedy, sampled = agreement(trainer.target, trainer.student, texts, max_tokens, with_target=True)
        assert greedy == pytest.approx(np.mean(hits)) and sampled == pytest.approx(np.mean(overlaps), abs=1e-5)


def test_an_embedding_in_all_its_directions_keeps_likeness():
    embedding = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 9)
    centred = embedding - embedding.mean(dim=0)
    for width, tolerance in ((8, 1e-5), (6, 0.05)):
        found = principal_embedding(embedding, width)
        ours, theirs = found @ found.T, centred @ centred.T
        assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 1 - tolerance
    wide = principal_embedding(embedding, 12)
    assert wide.shape == (50, 12) and wide[:, 8:].std() < wide[:, :8].std() / 5


def test_without_data_the_target_begins_on_its_own(tiny: Path, tmp_path: Path):
    done = run(replace(small(tiny, tmp_path / "draft", loss="kl", weights="f32"), data=()))
    assert len(done.rounds) == 4
    assert {value.dtype for value in load_file(done.folder / "model.safetensors").values()} == {torch.float32}
    assert "No text is copied" not in (done.folder / "NOTICE").read_text()


def test_damaged_weights_and_foreign_tokenizers_are_refused(tiny: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tiny.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    request = replace(small(tiny, tmp_path / "draft"), target=copy)
    (copy / "model.safetensors").write_bytes(weights_of(tiny)[:1000])
    with pytest.raises(ModelFileError, match="copy"):
        run(request)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(ModelFileError, match="vocabulary ends at 99"):
        build_trainer(prepare(request))
    (copy / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelFileError, match="is not a tokenizer"):
        build_trainer(prepare(request))


def test_a_disk_that_fills_up_keeps_the_last_round(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A limit on file sizes stands in for the disk: it is met by the state, then by the finished weights."""
    resource = pytest.importorskip("resource", reason="file sizes are limited by a Unix call")
    whole = run(small(tiny, tmp_path / "whole"))
    request = small(tiny, tmp_path / "draft")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(*_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))

    def fill_and_write(*arguments: Any) -> None:
        fill()
        write_folder(*arguments)

    try:
        with pytest.raises(StateError, match=r"state\.pt cannot be written: .* run the same command again"):
            run(request, fill)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        monkeypatch.setattr("edgespec.export.training.on_policy.write_folder", fill_and_write)
        with pytest.raises(StateError, match=r"result cannot be written: .* run the same command again"):
            run(request)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, previous)
    monkeypatch.undo()
    assert not request.output.exists()
    run(request)
    assert weights_of(request.output) == weights_of(whole.folder)
