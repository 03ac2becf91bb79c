"""Hugging Face folder -> GGUF: against an independent forward pass, against transformers, and on bad folders."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="conversion needs the package gguf: scripts/run.py install export")
safetensors = pytest.importorskip("safetensors.numpy", reason="writing test folders needs the package safetensors")

import gguf  # noqa: E402
from gguf.gguf_reader import GGUFReader  # noqa: E402

import llama_reference  # noqa: E402
from edgespec.engines.llamacpp import LlamaCppEngine  # noqa: E402
from edgespec.errors import ModelFileError  # noqa: E402
from edgespec.export.gguf.convert import convert  # noqa: E402
from edgespec.formats.checkpoint import Checkpoint  # noqa: E402
from edgespec.formats.gguf.tokenizer import pre_tokenizer_name  # noqa: E402
from edgespec.installation import install_command  # noqa: E402
from edgespec.types import Batch  # noqa: E402

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
}
TOKEN_IDS = [0, 1, 300, 17, 4095, 2, 900, 900, 31, 5]


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (width,),
            f"{prefix}post_attention_layernorm.weight": (width,),
            f"{prefix}self_attn.q_proj.weight": (q, width),
            f"{prefix}self_attn.k_proj.weight": (kv, width),
            f"{prefix}self_attn.v_proj.weight": (kv, width),
            f"{prefix}self_attn.o_proj.weight": (width, q),
            f"{prefix}mlp.gate_proj.weight": (inner, width),
            f"{prefix}mlp.up_proj.weight": (inner, width),
            f"{prefix}mlp.down_proj.weight": (width, inner),
        }
    return {
        name: (1 + 0.1 * rng.standard_normal(s) if len(s) == 1 else rng.standard_normal(s) / np.sqrt(s[1])).astype("f4")
        for name, s in shapes.items()
    }


def write_folder(folder: Path, weights: dict[str, np.ndarray], **changes: Any) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / "hf" / "target" / name, folder / name)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.save_file(weights, folder / "model.safetensors")
    return folder


def engine_logits(path: Path, token_ids: list[int]) -> np.ndarray:
    exact: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": False}
    with LlamaCppEngine.load(path, threads=2, reproducible=False, context_length=64, **exact) as engine:
        return engine.forward(Batch.chain(token_ids)).copy()


def test_logits_equal_an_independent_forward_pass(tmp_path: Path):
    weights = random_weights(CONFIG)
    done = convert(write_folder(tmp_path / "hf", weights), tmp_path / "out.gguf", "f32")
    wanted = llama_reference.logits({k: v.astype("f8") for k, v in weights.items()}, CONFIG, TOKEN_IDS)
    assert np.abs(engine_logits(tmp_path / "out.gguf", TOKEN_IDS) - wanted).max() < 2e-4 * wanted.std()
    assert (done.architecture, done.types) == ("llama", {"F32": 20})


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 0.02), ("bf16", 0.06), ("q8_0", 0.06)])
def test_smaller_types_stay_close(tmp_path: Path, kind: Any, tolerance: float):
    weights = random_weights(CONFIG)
    done = convert(write_folder(tmp_path / "hf", weights), tmp_path / "out.gguf", kind)
    wanted = llama_reference.logits({k: v.astype("f8") for k, v in weights.items()}, CONFIG, TOKEN_IDS)
    assert np.abs(engine_logits(tmp_path / "out.gguf", TOKEN_IDS) - wanted).mean() < tolerance * wanted.std()
    assert done.types == {"F32": 5, kind.upper(): 15}


def test_an_untied_head_is_written(tmp_path: Path):
    weights = random_weights(CONFIG)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
    convert(write_folder(tmp_path / "hf", weights, tie_word_embeddings=False), tmp_path / "out.gguf", "f32")
    double = {k: v.astype("f8") for k, v in weights.items()}
    tied = llama_reference.logits(double, CONFIG, TOKEN_IDS)
    # Reversed rows of the head give reversed columns of the logits.
    assert np.abs(engine_logits(tmp_path / "out.gguf", TOKEN_IDS) - tied[:, ::-1]).max() < 2e-4 * tied.std()


def test_rows_that_no_block_fits_fall_back_and_are_reported(tmp_path: Path):
    config = CONFIG | {"intermediate_size": 80}
    weights = random_weights(config)
    done = convert(write_folder(tmp_path / "hf", weights, intermediate_size=80), tmp_path / "out.gguf", "q8_0")
    assert done.types == {"F32": 5, "Q8_0": 13, "F16": 2}
    wanted = llama_reference.logits({k: v.astype("f8") for k, v in weights.items()}, config, TOKEN_IDS)
    assert np.abs(engine_logits(tmp_path / "out.gguf", TOKEN_IDS) - wanted).mean() < 0.06 * wanted.std()


def test_both_spellings_of_the_rotary_settings(tmp_path: Path):
    weights = random_weights(CONFIG)
    five = {"rope_theta": None, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    convert(write_folder(tmp_path / "four", weights), tmp_path / "four.gguf", "f32", name="x")
    convert(write_folder(tmp_path / "five", weights, **five), tmp_path / "five.gguf", "f32", name="x")
    assert (tmp_path / "four.gguf").read_bytes() == (tmp_path / "five.gguf").read_bytes()


def test_llama3_scaling_becomes_frequency_factors(tmp_path: Path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = write_folder(tmp_path / "hf", random_weights(CONFIG), rope_scaling=scaling)
    convert(folder, tmp_path / "out.gguf", "f32")
    factors = next(t.data for t in GGUFReader(tmp_path / "out.gguf").tensors if t.name == "rope_freqs.weight")
    wavelengths = 2 * np.pi * 500.0 ** (np.arange(0, 32, 2) / 32)
    assert np.allclose(factors[wavelengths < 64 / 4], 1.0)  # fast rotations stay
    assert np.allclose(factors[wavelengths > 64], 8.0)  # slow ones are stretched in full
    between = (wavelengths > 64 / 4) & (wavelengths < 64)
    assert between.any() and np.all((factors[between] > 1) & (factors[between] < 8))
    assert np.isfinite(engine_logits(tmp_path / "out.gguf", TOKEN_IDS)).all()


def test_metadata_of_the_tokenizer(tmp_path: Path):
    convert(write_folder(tmp_path / "hf", random_weights(CONFIG)), tmp_path / "out.gguf", "f32", licence="mit")
    fields = GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert fields["tokenizer.ggml.pre"].contents() == "qwen2"
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert fields["tokenizer.ggml.bos_token_id"].contents() == 0
    assert fields["general.license"].contents() == "mit"
    assert fields["tokenizer.chat_template"].contents() == (DEMO / "chat_template.jinja").read_text(encoding="utf-8")


def test_ids_beyond_the_tokenizer_are_padding(tmp_path: Path):
    config = CONFIG | {"vocab_size": 4128}
    weights = random_weights(config)
    convert(write_folder(tmp_path / "hf", weights, vocab_size=4128), tmp_path / "out.gguf", "f32")
    fields = GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[4096:4098] == ["[PAD4096]", "[PAD4097]"]
    assert fields["tokenizer.ggml.token_type"].contents()[-1] == int(gguf.TokenType.UNUSED)
    assert engine_logits(tmp_path / "out.gguf", TOKEN_IDS).shape == (len(TOKEN_IDS), 4128)


def break_json(folder: Path, name: str, **changes: Any) -> None:
    values = json.loads((folder / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(values | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"holds a list, an object was expected"),
        (
            lambda f: break_json(f, "config.json", architectures=["XForCausalLM"]),
            "is a XForCausalLM; supported for GGUF: Llama",
        ),
        (lambda f: break_json(f, "config.json", rope_scaling={"type": "yarn"}), "rotary scaling 'yarn'"),
        (lambda f: break_json(f, "config.json", rms_norm_eps="x"), "config.json has an impossible setting: .*'x'"),
        (lambda f: break_json(f, "config.json", rms_norm_eps=1e99), "a setting that GGUF cannot hold"),
        (lambda f: break_json(f, "config.json", vocab_size=4000), r"\(4096, 64\), config.json implies \(4000, 64\)"),
        (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (
            lambda f: break_json(f, "tokenizer.json", model={"type": "Unigram"}),
            "holds a Unigram tokenizer; allowed: byte-level BPE",
        ),
        (lambda f: break_json(f, "tokenizer.json", pre_tokenizer=None), "splits text by None"),
        (lambda f: break_json(f, "tokenizer_config.json", eos_token="</s>"), "eos_token '</s>', which .* lacks"),
        (lambda f: (f / "model.safetensors").unlink(), r"has no model\*\.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x09\0\0\0\0\0\0\0nonsense!"), "not a safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "truncated"),
    ],
)
def test_a_bad_folder_is_refused_and_nothing_is_left(tmp_path: Path, break_it: Any, message: str):
    folder = write_folder(tmp_path / "hf", random_weights(CONFIG))
    break_it(folder)
    with pytest.raises(ModelFileError, match=message):
        convert(folder, tmp_path / "out.gguf", "f32")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_unknown_tensor_is_refused(tmp_path: Path):
    weights = random_weights(CONFIG) | {"model.layers.0.self_attn.surprise": np.zeros(4, "f4")}
    with pytest.raises(ModelFileError, match=r"self_attn\.surprise has no place"):
        convert(write_folder(tmp_path / "hf", weights), tmp_path / "out.gguf", "f32")


def test_an_unknown_split_is_refused():
    pattern = {"type": "Split", "pattern": {"Regex": r"\s+"}}
    with pytest.raises(ModelFileError, match="none of: qwen2"):
        pre_tokenizer_name({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [pattern]}})


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_shipped_gguf_is_the_shipped_checkpoint(tmp_path: Path, role: str):
    folder = DEMO / "hf" / role
    convert(folder, tmp_path / "again.gguf", "q8_0", name=f"edgespec demo {role}", licence="cc-by-sa-4.0")
    assert (tmp_path / "again.gguf").read_bytes() == (DEMO / f"demo-{role}-q8_0.gguf").read_bytes()
    checkpoint = Checkpoint.open(folder)
    weights = {name: checkpoint.weights(name).astype("f8") for name in checkpoint.names()}
    wanted = llama_reference.logits(weights, checkpoint.config, TOKEN_IDS)
    convert(folder, tmp_path / "f16.gguf", "f16")
    assert np.abs(engine_logits(tmp_path / "f16.gguf", TOKEN_IDS) - wanted).max() < 0.02 * wanted.std()
    assert np.abs(engine_logits(tmp_path / "again.gguf", TOKEN_IDS) - wanted).max() < 0.2 * wanted.std()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_transformers_agrees_with_the_reference(role: str):
    torch = pytest.importorskip("torch", reason="this comparison needs torch: scripts/run.py install export")
    transformers = pytest.importorskip("transformers", reason="this comparison needs transformers")
    folder = DEMO / "hf" / role
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    checkpoint = Checkpoint.open(folder)
    weights = {name: checkpoint.weights(name).astype("f8") for name in checkpoint.names()}
    assert np.abs(theirs - llama_reference.logits(weights, checkpoint.config, TOKEN_IDS)).max() < 1e-3


def test_a_missing_package_is_named():
    code = "import sys; sys.modules['gguf'] = None; import edgespec.export.gguf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"CapabilityError: converting to GGUF needs the package gguf: {install_command('export')}" in done.stderr
