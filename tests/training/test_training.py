"""Training from command to file: a distilled draft that learnt, heads that can be read. Needs torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.formats.head_file import read_head_file

torch: Any = pytest.importorskip("torch", reason="training needs torch: scripts/run.py install train")
transformers: Any = pytest.importorskip("transformers", reason="targets are read by it: scripts/run.py install train")

import distill  # noqa: E402
import heads  # noqa: E402
from trainlib.demo_texts import save_hf_tokenizer, train_tokenizer  # noqa: E402

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALKS = [f"user {i} asks for {i * 7 % 13} tickets to town {i % 5}" for i in range(40)]


def write_target(path: Path) -> Path:
    """A Llama of three random layers with a tokenizer; beside it talks.jsonl, a text file to prompt it with."""
    path.mkdir()
    tokenizer = train_tokenizer(TALKS, 300)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # a habit that a student can learn: mostly it counts on
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, dims=0) * 0.3)
    model.save_pretrained(path)
    save_hf_tokenizer(tokenizer, path, TEMPLATE)
    (path.parent / "talks.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TALKS))
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


def test_a_draft_learns(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "rounds": 3, "round_tokens": 8192, "round_prompts": 8}
    sizes |= {"reply_tokens": 12, "window": 64, "batch_tokens": 128, "held_out_prompts": 4, "patience": 9}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    command = [str(target), "--data", str(target.parent / "talks.jsonl"), "-o", str(tmp_path / "draft"), *given]
    assert distill.main(command) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    before, *_, after = (float(line.split("acceptance ")[1][:5]) for line in lines)
    assert len(lines) == 4 and after > before + 0.1
    student = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert (student.config.hidden_size, student.config.num_hidden_layers) == (32, 1)
    assert (tmp_path / "draft" / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    assert "(round " in (tmp_path / "draft" / "README.md").read_text()
    assert distill.main(command) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_the_stages_make_a_file_of_heads(kind: str, target: Path, tmp_path: Path) -> None:
    work = ["--work", str(tmp_path / "work"), "--device", "cpu"]
    data = ["--data", str(target.parent / "talks.jsonl"), "--places", "16", "--room", "96", "--longest", "24"]
    assert heads.main(["write", str(target), *work, *data, "--minutes", "0.02"]) == 0
    learn = ["--kind", kind, "--batch", "512", "--depth", "3", "--read-layers", "1", "--minutes", "0.02"]
    for _ in range(2):  # the second one goes on
        assert heads.main(["train", str(target), *work, *learn]) == 0
    output = tmp_path / "heads.npz"
    sizes = ["--packed", "60", "--frequent", "20"]
    assert heads.main(["pack", str(target), *work, "--kind", kind, *sizes, "-o", str(output)]) == 0
    found = read_head_file(output)
    assert (found.manifest.kind, found.manifest.depth, found.manifest.layers) == (kind, 3, (1,))
    assert found.token_ids.size == 60 and found.frequent is not None and found.frequent.size == 20
    assert str(tmp_path) not in str(found.manifest)
