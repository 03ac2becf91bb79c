"""Hugging Face folder -> GGUF: logits in llama.cpp are those of transformers; others, and bad folders, are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.gguf_reader import GGUFReader

from demo import DEMO, change_json, changed_copy
from edgespec.errors import ModelFileError
from edgespec.export.gguf.convert import convert
from edgespec.formats.checkpoint import Checkpoint
from edgespec.installation import install_command
from tiny_checkpoints import CASES, COLUMNS, LLAMA3_SCALING, LOGITS, shard, write_checkpoint, write_safetensors
from tiny_graphs import logits

USES_GELU = {"gemma3", "gpt2"}


def tolerance(case: str) -> float:
    """llama.cpp reads GELU from a table in half precision."""
    return 1e-3 if case in USES_GELU else 1e-4


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str):
    convert(write_checkpoint(tmp_path / "hf", case), tmp_path / "out.gguf", "f32")
    with np.load(LOGITS) as wanted:
        assert wanted[case].std() > 1
        assert np.abs(logits(tmp_path / "out.gguf")[:, COLUMNS] - wanted[case]).max() < tolerance(case)


def test_a_sharded_checkpoint_gives_the_same_model(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "hf", "llama")
    convert(folder, tmp_path / "whole.gguf", "f32", name="x")
    shard(folder)
    convert(folder, tmp_path / "sharded.gguf", "f32", name="x")
    one, other = (
        {tensor.name: tensor.data.tobytes() for tensor in GGUFReader(tmp_path / f"{name}.gguf").tensors}
        for name in ("whole", "sharded")
    )
    assert one == other


def test_a_shard_that_is_missing_is_told(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "hf", "qwen2")
    (folder / sorted(set(shard(folder).values()))[1]).unlink()
    with pytest.raises(ModelFileError, match="has 2 of 3 weight files"):
        Checkpoint.open(folder)


def test_names_without_their_first_part(tmp_path: Path):
    """As GPT-2's first checkpoints have them, with masks among the weights."""
    folder = write_checkpoint(tmp_path / "hf", "gpt2")
    convert(folder, tmp_path / "full.gguf", "f32", name="x")
    checkpoint = Checkpoint.open(folder)
    bare = {name.removeprefix("transformer."): checkpoint.weights(name) for name in checkpoint.tensors}
    write_safetensors(folder / "model.safetensors", bare | {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32)})
    convert(folder, tmp_path / "bare.gguf", "f32", name="x")
    assert np.array_equal(logits(tmp_path / "full.gguf"), logits(tmp_path / "bare.gguf"))


def test_a_window_that_llama_cpp_lacks_bounds_the_context(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "hf", "mistral", sliding_window=96)
    convert(folder, tmp_path / "out.gguf", "f32")
    fields = GGUFReader(tmp_path / "out.gguf").fields
    assert fields["llama.context_length"].contents() == fields["llama.attention.sliding_window"].contents() == 96


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"architectures": None}, "is a none; supported for GGUF"),
    ("llama", {"architectures": ["Phi3ForCausalLM"]}, r"is a Phi3ForCausalLM; .*\. llama.cpp's own convert_hf_to_gguf"),
    ("qwen2", {"rope_scaling": {"rope_type": "longrope"}}, "positions are scaled by 'longrope'; allowed: default"),
    ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}, "no rotary positions in each fourth layer"),
    ("gemma3", {"query_pre_attn_scalar": 20}, "query_pre_attn_scalar is 20; allowed: 32"),
    ("gpt2", {"tie_word_embeddings": False}, "needs tied embeddings"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("llama", {"hidden_size": None}, "lacks 'hidden_size'"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers 0, must be a positive integer"),
    ("llama", {"head_dim": 32}, r"k_proj.bias has the shape \(32,\), config.json implies \(64,\)"),
    ("smollm2", {"hidden_act": "relu"}, "its hidden_act is 'relu'; allowed: 'silu'"),
    ("smollm2", {"rope_scaling": {"type": "linear", "factor": -1}}, "have factor -1; a number above 0 is needed"),
    ("smollm2", {"rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 4.0}}, "an impossible setting"),
    ("smollm2", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "an impossible setting: 'low_freq_factor'"),
    ("smollm2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("smollm2", {"num_hidden_layers": 4}, "lacks 9 tensors, the first is model.layers.3.input_layernorm.weight"),
    ("smollm2", {"num_hidden_layers": 2}, "layers.2.* has no place in a llama model of 2 layers"),
    ("smollm2", {"attention_bias": True}, "the first is model.layers.0.self_attn.q_proj.bias"),
    ("gemma3", {"layer_types": ["sliding_attention"]}, "layer_types must hold 3 of"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_what_llama_cpp_would_compute_differently_is_refused(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
):
    folder = write_checkpoint(tmp_path / "hf", case)
    config = json.loads((folder / "config.json").read_text()) | changes
    # A cap that is left out has a default; null means none.
    kept = {key: value for key, value in config.items() if value is not None or key.endswith("softcapping")}
    (folder / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ModelFileError, match=message):
        convert(folder, tmp_path / "out.gguf", "f32")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def rewrite(folder: Path, **changes: Any) -> None:
    """Replace tensors of a folder; None leaves one out."""
    checkpoint = Checkpoint.open(folder)
    weights = {name: checkpoint.weights(name) for name in checkpoint.tensors}
    found = {name: values for name, values in (weights | changes).items() if values is not None}
    write_safetensors(folder / "model.safetensors", found)


def test_faults_of_tensors_are_named(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "hf", "qwen2")
    name = "model.layers.1.mlp.up_proj.weight"
    sound = Checkpoint.open(folder).weights(name)
    faults: list[tuple[Any, str]] = [
        (None, f"lacks 1 tensors, the first is {name}"),
        (sound[:, :-1], rf"model.safetensors: tensor {name} has the shape \(96, 63\), config.json implies \(96, 64\)"),
        (np.where(sound == sound.max(), np.float32(np.nan), sound), f"tensor {name} contains infinity or NaN"),
        (np.where(sound == sound.max(), np.float32(np.inf), sound), f"tensor {name} contains infinity or NaN"),
    ]
    for values, message in faults:
        rewrite(folder, **{name: values})
        with pytest.raises(ModelFileError, match=message):
            convert(folder, tmp_path / "out.gguf", "f32")
    rewrite(folder, **{name: np.where(sound == sound.max(), np.float32(1e6), sound)})
    with pytest.raises(ModelFileError, match="outside the range of f16; export it as bf16"):
        convert(folder, tmp_path / "out.gguf", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def with_header(folder: Path, change: Any) -> None:
    """Rewrite the JSON header of the weights in place."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(change(header)).encode().ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h | {NORM: h[NORM] | {"dtype": "F8_E4M3", "shape": [256]}}, f"{NORM} is stored as F8_E4M3|implies"),
        (lambda h: h | {NORM: h[NORM] | {"shape": [65]}}, rf"damaged.* tensor {NORM} of F32 \(65,\) has 256 bytes"),
        (lambda h: h | {NORM: h[NORM] | {"data_offsets": [1 << 40, (1 << 40) + 256]}}, f"truncated.* tensor {NORM}"),
        (lambda _: [1], "damaged"),
    ],
)
def test_corrupt_safetensors_name_the_file(tmp_path: Path, change: Any, message: str):
    folder = write_checkpoint(tmp_path / "hf", "qwen2")
    with_header(folder, change)
    with pytest.raises(ModelFileError, match=r"model\.safetensors") as caught:
        convert(folder, tmp_path / "out.gguf", "f32")
    assert caught.match(message)


# -- folders


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"holds \[\], an object was expected"),
        (lambda f: change_json(f / "config.json", rms_norm_eps="x"), "config.json has an impossible setting: .*'x'"),
        (lambda f: change_json(f / "config.json", rms_norm_eps=1e99), "a setting that GGUF cannot hold"),
        (lambda f: change_json(f / "config.json", vocab_size=4000), r"config.json implies \(4000, 128\)"),
        (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (
            lambda f: change_json(f / "tokenizer.json", model={"type": "Unigram"}),
            "holds a Unigram tokenizer; allowed: byte-level BPE",
        ),
        (lambda f: change_json(f / "tokenizer.json", pre_tokenizer=None), "splits text by None"),
        (lambda f: change_json(f / "tokenizer_config.json", eos_token="</s>"), "eos_token '</s>', which .* lacks"),
        (lambda f: (f / "model.safetensors").unlink(), r"has no model\.safetensors"),
    ],
)
def test_a_bad_folder_is_refused_and_nothing_is_left(tmp_path: Path, break_it: Any, message: str):
    folder = changed_copy(tmp_path / "hf")
    break_it(folder)
    with pytest.raises(ModelFileError, match=message):
        convert(folder, tmp_path / "out.gguf", "f32")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_shipped_gguf_is_the_shipped_checkpoint(tmp_path: Path, role: str):
    folder = DEMO / "hf" / role
    convert(folder, tmp_path / "again.gguf", "q8_0", name=f"edgespec demo {role}", licence="cc-by-sa-4.0")
    assert (tmp_path / "again.gguf").read_bytes() == (DEMO / f"demo-{role}-q8_0.gguf").read_bytes()


def test_a_missing_package_is_named():
    code = "import sys; sys.modules['gguf'] = None; import edgespec.export.gguf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"CapabilityError: an export needs gguf: {install_command('convert')}" in done.stderr
