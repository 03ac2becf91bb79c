"""Hugging Face folders to graphs without torch: what the graphs compute, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the tiny models need the package gguf: scripts/run.py install export")

from demo import TEST_THREADS, change_json
from edgespec.errors import ModelFileError
from edgespec.export.check import open_engine
from edgespec.export.onnx.hub_model import open_hub
from edgespec.formats.onnx import DATA
from tiny_checkpoints import (
    COLUMNS,
    LLAMA3_SCALING,
    LOGITS,
    VARIANTS,
    VOCABULARY,
    read_weights,
    shard,
    write_checkpoint,
    write_safetensors,
    write_variant,
)
from tiny_graphs import CASES, IDS, difference, graph, logits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", [case for case in CASES if case != "gemma2"])  # to ONNX from a GGUF only
def test_a_float_graph_computes_what_transformers_does(case: str, tmp_path: Path):
    """The logits of transformers are stored beside the tests."""
    found = logits(graph(write_checkpoint(tmp_path / case, case), tmp_path / "made"))
    assert difference(found[:, COLUMNS], np.load(LOGITS)[case]) < 2e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_mean_what_they_mean_to_transformers(name: str, tmp_path: Path):
    """Windows, layers without rotary positions, both spellings of rotary settings, capped logits."""
    found = logits(graph(write_variant(tmp_path / name, name), tmp_path / "made"))
    assert difference(found[:, COLUMNS], np.load(LOGITS)[name]) < 2e-5


@pytest.mark.parametrize("dtype", ["F64", "F16", "BF16"])
def test_every_type_of_weights_is_read(dtype: str, tmp_path: Path):
    """As its values rounded to that type and stored in 32 bits."""
    source = write_checkpoint(tmp_path / dtype, "qwen3", dtype=dtype)
    rounded = write_checkpoint(tmp_path / "rounded", "qwen3")
    write_safetensors(rounded / "model.safetensors", read_weights(source), "F32")
    ours, theirs = (graph(folder, tmp_path / f"made-{folder.name}") for folder in (source, rounded))
    assert (ours.parent / DATA).read_bytes() == (theirs.parent / DATA).read_bytes()


@pytest.mark.parametrize("has_shards", [True, False])
def test_a_whole_file_outranks_an_old_index(tmp_path: Path, has_shards: bool):
    """transformers' save_pretrained leaves the index of a model that was in several files, and reads the whole file."""
    whole = write_checkpoint(tmp_path / "whole", "llama", seed=1)
    folder = write_checkpoint(tmp_path / "both", "llama")
    shard(folder)
    if not has_shards:
        for path in folder.glob("model-*.safetensors"):
            path.unlink()
    shutil.copy(whole / "model.safetensors", folder)
    ours, theirs = (graph(each, tmp_path / f"made-{each.name}", "int8") for each in (folder, whole))
    assert (ours.parent / DATA).read_bytes() == (theirs.parent / DATA).read_bytes()


def test_a_window_is_kept(tmp_path: Path):
    """Which llama.cpp has not for Mistral: with one of six tokens, later ones depend on nothing before it."""
    source = write_checkpoint(tmp_path / "m", "mistral", sliding_window=6, num_hidden_layers=1)
    path, other = graph(source, tmp_path / "made"), IDS.copy()
    other[:4] += 1
    plain, changed = logits(path), logits(path, other)
    assert difference(plain[4:9], changed[4:9]) > 0.01
    assert difference(plain[9:], changed[9:]) < 1e-6  # positions 9 - 5 and later are seen


def test_the_folders_own_files_come_along(tmp_path: Path):
    source = write_checkpoint(tmp_path / "q", "qwen3")
    change_json(source / "tokenizer_config.json", chat_template="{{ messages }}")
    (source / "generation_config.json").write_text('{"eos_token_id": [398, 397]}')
    made = graph(source, tmp_path / "made").parent
    for name in ("tokenizer.json", "generation_config.json", "config.json"):
        assert (made / name).read_bytes() == (source / name).read_bytes()
    assert (made / "chat_template.jinja").read_text() == "{{ messages }}"
    with open_engine("onnx", made / "model.onnx", 64, TEST_THREADS) as engine:
        assert engine.vocabulary.end_ids == {397, 398}
        assert engine.vocabulary.chat_template == "{{ messages }}"


def test_a_tag_that_llama_cpp_takes_for_a_control_token_is_one_in_the_graphs_tokenizer(tmp_path: Path):
    """Gemma's `</s>`, token 212, which its tokenizer.json calls an ordinary one."""
    source = write_checkpoint(tmp_path / "tiny", "smollm2")
    path = source / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    ids = tokenizer["model"]["vocab"]
    plain = max(ids, key=ids.__getitem__)
    ids["</s>"] = ids.pop(plain)
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if plain not in str(pair)]
    path.write_text(json.dumps(tokenizer))
    graph(source, tmp_path / "out")
    (added,) = [
        token
        for token in json.loads((tmp_path / "out" / "tokenizer.json").read_text())["added_tokens"]
        if token["content"] == "</s>"
    ]
    assert added["special"] and added["id"] == tokenizer["model"]["vocab"]["</s>"]


# what is refused


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("smollm2", {"architectures": ["MixtralForCausalLM"]}, "is a MixtralForCausalLM; supported .* LlamaForCausalLM"),
    ("smollm2", {"hidden_act": "relu"}, "its hidden_act is 'relu'; allowed: 'silu'"),
    ("smollm2", {"quantization_config": {"quant_method": "awq"}}, "its quantization_config is"),
    ("smollm2", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "scaled by 'yarn'; .*--exporter optimum"),
    ("smollm2", {"rope_scaling": {"type": "linear", "factor": -1}}, "have factor -1; a number above 0 is needed"),
    ("smollm2", {"rope_scaling": {"type": "linear"}}, "have factor None; a number above 0 is needed"),
    ("smollm2", {"rope_theta": 0}, "have rope_theta 0; a number above 0 is needed"),
    (
        "smollm2",
        {"rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 4.0}},
        "high_freq_factor 4 above low_freq_factor 4",
    ),
    (
        "smollm2",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "rope_scaling": {"type": "yarn", "factor": 4},
        },
        r"both rope_parameters and rope_scaling, and they differ \(rope_type, factor\): keep what is meant",
    ),
    ("smollm2", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "lacks low_freq_factor"),
    ("smollm2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("smollm2", {"num_attention_heads": 8, "num_key_value_heads": 8}, "needs a multiple of 16"),
    ("smollm2", {"num_key_value_heads": 3}, "of the latter"),
    ("smollm2", {"hidden_size": 32, "head_dim": 16}, r"has the shape \(400, 64\), config.json implies \(400, 32\)"),
    ("smollm2", {"num_hidden_layers": 4}, "lacks 9 tensors, the first is model.layers.3.input_layernorm.weight"),
    ("smollm2", {"num_hidden_layers": 2}, "layers.2.* has no place in a llama model of 2 layers"),
    ("smollm2", {"tie_word_embeddings": False}, "lacks 1 tensors, the first is lm_head.weight"),
    ("smollm2", {"attention_bias": True}, "the first is model.layers.0.self_attn.q_proj.bias"),
    ("smollm2", {"rms_norm_eps": "small"}, "its rms_norm_eps is 'small', a number was expected"),
    ("smollm2", {"vocab_size": -1}, "must be a positive integer"),
    ("qwen3", {"attention_bias": True}, "its attention_bias is True; allowed: False"),
    ("smollm3", {"use_sliding_window": True}, "its use_sliding_window is True"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "its no_rope_layers are not 5 flags"),
    ("gemma3", {"layer_types": ["sliding_attention"]}, "layer_types must hold 3 of"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "its attn_logit_softcapping is 50.0; allowed: none"),
    ("gemma3", {"sliding_window": None}, "has no sliding_window"),
]


@pytest.mark.parametrize(("case", "changes", "said"), REFUSED)
def test_what_the_graph_would_not_compute_is_refused(case: str, changes: dict[str, Any], said: str, tmp_path: Path):
    source = write_checkpoint(tmp_path / case, case)
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelFileError, match=said) as refused:
        open_hub(source)
    assert str(source) in str(refused.value) or "config.json" in str(refused.value)


def test_a_tokenizer_with_more_words_than_the_model_is_refused_before_anything_is_written(tmp_path: Path):
    source = write_checkpoint(tmp_path / "m", "smollm2")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["one too many"] = VOCABULARY
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelFileError, match=f"a token with the id {VOCABULARY}, config.json has {VOCABULARY} ids"):
        graph(source, tmp_path / "made")
    assert not list((tmp_path / "made").iterdir())


def truncate(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path):
    source = write_checkpoint(tmp_path / "tiny", "smollm2")
    weights = read_weights(source)
    weights["model.layers.1.mlp.up_proj.weight"][5, 7] = np.nan
    write_safetensors(source / "model.safetensors", weights, "F32")
    with pytest.raises(ModelFileError, match=r"model.layers.1.mlp.up_proj.weight contains infinity or NaN"):
        graph(source, tmp_path / "made")


def test_a_file_cut_while_it_is_read_is_told(tmp_path: Path):
    source = write_checkpoint(tmp_path / "tiny", "smollm2")
    model = open_hub(source)
    truncate(source)
    tensors = model.checkpoint.tensors
    last = max(tensors, key=lambda name: tensors[name].offset)
    with pytest.raises(ModelFileError, match=f"became shorter while tensor {last} was read"):
        model.checkpoint.weights(last)


def test_names_without_the_prefix_and_old_buffers_are_taken(tmp_path: Path):
    source = write_checkpoint(tmp_path / "tiny", "smollm2")
    plain = graph(source, tmp_path / "plain")
    weights = {name.removeprefix("model."): each for name, each in read_weights(source).items()}
    buffers = {f"layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for layer in range(3)}
    write_safetensors(source / "model.safetensors", weights | buffers, "F32")
    assert open_hub(source).config.vocab_size == VOCABULARY
    np.testing.assert_array_equal(logits(graph(source, tmp_path / "bare")), logits(plain))
