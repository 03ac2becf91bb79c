"""Distilling a draft with scripts/train/distill.py: learning, writing, measuring, resuming. Needs torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import ConfigError
from trainlib.documents import read_documents, split_held_out

torch: Any = pytest.importorskip("torch", reason="training needs torch: scripts/run.py install train")
transformers: Any = pytest.importorskip("transformers", reason="targets are read by it: scripts/run.py install train")

import distill as script  # noqa: E402
from distill import Distiller, Plan, distill  # noqa: E402
from tiny_training import write_target  # noqa: E402
from trainlib.hub import OwnText, Target, agreement  # noqa: E402

SMALL: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "rounds": 3, "round_tokens": 256, "round_prompts": 8}
SMALL |= {"reply_tokens": 12, "window": 32, "batch_tokens": 128, "held_out_prompts": 4, "patience": 9}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="module")
def target(tiny: Path) -> Target:
    return Target(tiny, torch.device("cpu"))


def distiller(target: Target, **changes: Any) -> Distiller:
    documents = read_documents([target.folder.parent / "talks.jsonl"])
    return Distiller(Plan(**{**SMALL, **changes}), target, *split_held_out(documents, 4))


def test_the_command_makes_a_draft_that_learnt(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**SMALL, "round_tokens": 8192, "window": 64}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [str(tiny), "--data", str(tiny.parent / "talks.jsonl"), "-o", str(tmp_path / "draft"), *given]
    assert script.main(command) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    before, *_, after = (float(line.split("acceptance ")[1][:5]) for line in lines)
    assert len(lines) == 4 and after > before + 0.1
    student = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert (student.config.hidden_size, student.config.num_hidden_layers) == (32, 1)
    assert (tmp_path / "draft" / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert "(round " in (tmp_path / "draft" / "README.md").read_text()
    assert script.main(command) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_run_that_was_stopped_gives_the_weights_of_one_that_was_not(target: Target, tmp_path: Path) -> None:
    documents = read_documents([target.folder.parent / "talks.jsonl"])
    weights = []
    for name, stops in (("whole", ()), ("stopped", (1, 2))):
        for stop in (*stops, None):

            def say(text: str, last: int | None = stop) -> None:
                if last is not None and text.startswith(f"round {last}"):
                    raise KeyboardInterrupt

            try:
                distill(Plan(**SMALL), target, documents, tmp_path / name, say)
            except KeyboardInterrupt:
                assert not (tmp_path / name).exists()
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_gradient_does_not_depend_on_how_many_rows_go_at_once(target: Target) -> None:
    found = []
    for rows in (1, 4):
        made = distiller(target)
        made.rows_at_once = rows
        made.write_pool()
        variation = made.accumulate(*made.draw_batch(), 0.6)
        found.append((variation, [weight.grad for weight in made.student.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_documents_are_read_from_every_kind_of_file_and_bad_lines_named(tmp_path: Path) -> None:
    lines = [{"text": "one"}, {"messages": [{"role": "user", "content": "two"}]}, {"prompt": "two"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.txt").write_text("three")
    paths = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    found = read_documents(paths)
    assert found == read_documents(paths[::-1]) and len(found) == 3
    train, held_out = split_held_out(found, 64)
    assert len(train) == 2 and len(held_out) == 1
    for content, said in (("{", "line 1 is not JSON"), ('{"x": 1}', "line 1 has no"), ("\xff", "cannot be read")):
        (tmp_path / "bad.jsonl").write_bytes(content.encode("latin-1"))
        with pytest.raises(ConfigError, match=said):
            read_documents([tmp_path / "bad.jsonl"])
    with pytest.raises(ConfigError, match="at least two"):
        split_held_out(["one"], 4)


def test_acceptance_is_what_a_plain_loop_finds(target: Target) -> None:
    student = distiller(target).student.eval()
    texts = [OwnText([0, 4, 8, 15, 16, 23, 42], 3), OwnText([0, 9, 9], 1), OwnText(list(range(20)), 12)]
    hits, overlap, count = 0, 0.0, 0
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([text.token_ids])
            ours, theirs = (model(ids).logits[0].softmax(dim=-1) for model in (target.model, student))
            for place in range(text.start, len(text.token_ids)):
                hits += int(theirs[place - 1].argmax() == text.token_ids[place])
                overlap += float(torch.minimum(ours[place - 1], theirs[place - 1]).sum())
                count += 1
    found = agreement(target.model, student, texts, 24)
    assert found == (pytest.approx(hits / count), pytest.approx(overlap / count, rel=1e-5))
