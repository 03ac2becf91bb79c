"""Tiny random Hugging Face folders of every architecture that can be exported, made from a seed without torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from edgespec.formats.architectures import ARCHITECTURES, Architecture, Sizes
from edgespec.formats.checkpoint import Checkpoint
from edgespec.formats.gguf.tokenizer import GPT_4O, LLAMA3, QWEN2, SPACE, TEKKEN

VOCABULARY = 400
TOKEN_IDS = [0, 1, 300, 17, 399, 2, 90, 90, 31, 5, 128, 255, 256, 77, 8, 301, 302, 64, 65, 66, 3, 210, 11, 150]
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the other foxes say: that's all there is to it.",
    "She said they'd rather be there than here; we'll see whether it's so in 1984 or 2026.",
    "Every morning a small orchestra of kettles, pigeons and bicycles begins its rehearsal under my window.",
    "def the_other(there, these):\n    return there + these  # there and then\n",
)
BASE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5}
BASE |= {"rope_theta": 500.0, "hidden_act": "silu", "tie_word_embeddings": True}
BASE |= {"bos_token_id": 397, "eos_token_id": 398, "pad_token_id": 398}
LLAMA3_SCALING: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_SCALING |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
GEMMA: dict[str, Any] = {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def hub(architecture: str, model_type: str, tokenizer: str, /, **settings: Any) -> tuple[dict[str, Any], str]:
    """(What config.json says besides BASE, kind of tokenizer)."""
    return {"architectures": [architecture], "model_type": model_type, **settings}, tokenizer


GEMMA_LAYERS: dict[str, Any] = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA_LAYERS |= {"rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
WITH_BIASES: dict[str, Any] = {"rope_scaling": LLAMA3_SCALING, "attention_bias": True, "mlp_bias": True}
GPT2: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256, "layer_norm_epsilon": 1e-5}
CASES = {
    "llama": hub("LlamaForCausalLM", "llama", "llama-bpe", **WITH_BIASES, **UNTIED),
    "smollm2": hub("LlamaForCausalLM", "llama", "smollm"),
    "mistral": hub("MistralForCausalLM", "mistral", "llama-spm", head_dim=32, sliding_window=None, **UNTIED),
    "qwen2": hub("Qwen2ForCausalLM", "qwen2", "qwen2"),
    "qwen3": hub("Qwen3ForCausalLM", "qwen3", "qwen2", head_dim=32),
    "smollm3": hub("SmolLM3ForCausalLM", "smollm3", "llama-bpe", num_hidden_layers=5),
    "gemma3": hub(
        *("Gemma3ForCausalLM", "gemma3_text", "gemma-spm"), **GEMMA, **GEMMA_LAYERS, query_pre_attn_scalar=32
    ),
    "gpt2": hub("GPT2LMHeadModel", "gpt2", "gpt-2", **GPT2, activation_function="gelu_new"),
}
GEMMA_ROTATION = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
UNROTATED = ("rope_scaling", "rope_theta", "rope_local_base_freq")
# Name of a variant -> (case, what its config.json says otherwise, what it does not say).
VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "qwen2-no-window": ("qwen2", {"sliding_window": 6, "use_sliding_window": False, "max_window_layers": 1}, ()),
    "llama-linear": ("smollm2", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, ()),
    "llama-new-names": ("llama", {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 700.0}}, UNROTATED),
    "gemma3-new-names": ("gemma3", {"rope_parameters": GEMMA_ROTATION}, UNROTATED),
    "gemma3-defaults": ("gemma3", {}, UNROTATED[::2]),
    "gemma3-capped": ("gemma3", {"final_logit_softcapping": 5.0}, ()),
    "gemma3-pattern": ("gemma3", {"sliding_window_pattern": 2}, ("layer_types",)),
    # What config.json leaves out, and what it says of layers that are all alike.
    "gemma3-silent": ("gemma3", {}, UNROTATED),
    "smollm3-silent": ("smollm3", {}, ("rope_theta",)),
    "llama-kinds": ("smollm2", {"sliding_window": 6, "layer_types": ["sliding_attention"] * 3}, ()),
}
SPECIALS = ["<|start|>", "<|end|>", "<|user|>"]


def write_checkpoint(folder: Path, case: str, *, seed: int = 0, dtype: str = "F32", **changes: Any) -> Path:
    """Write one of CASES to `folder`; `changes` replace entries of config.json."""
    settings, tokenizer = CASES[case]
    unneeded = {"hidden_size", "rope_theta"} if case == "gpt2" else set()
    config = {key: value for key, value in BASE.items() if key not in unneeded} | settings | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_tokenizer(folder, tokenizer)
    write_safetensors(folder / "model.safetensors", random_weights(Checkpoint(folder, config, {}), seed), dtype)
    return folder


def write_variant(folder: Path, name: str) -> Path:
    """Write one of VARIANTS to `folder`."""
    case, changes, absent = VARIANTS[name]
    path = write_checkpoint(folder, case, **changes) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in absent}), encoding="utf-8")
    return folder


def random_weights(checkpoint: Checkpoint, seed: int) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a config, large enough that all of them matter to the logits."""
    found = ARCHITECTURES[checkpoint.architecture]
    sizes, rng = found.sizes(checkpoint), np.random.default_rng(seed)
    return {name: _draw(rng, name, shape, found) for name, shape in _shapes(checkpoint, found, sizes).items()}


def _shapes(checkpoint: Checkpoint, found: Architecture, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    config = checkpoint.config
    shapes = {name: sizes.shape(tensor.shape) for name, tensor in found.outer.items()}
    if config["tie_word_embeddings"]:
        shapes.pop("lm_head.weight")
    for layer in range(sizes.layers):
        for name, tensor in found.layer.items():
            switch = "mlp_bias" if name.startswith("mlp.") else "attention_bias"
            if not tensor.is_optional or config.get(switch):
                shapes[f"{found.layer_prefix}{layer}.{name}"] = sizes.shape(tensor.shape)
    return shapes


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], found: Architecture) -> NDArray[np.float32]:
    """llama.cpp reads GELU from a table in half precision: a smaller share for it keeps that rounding below 1e-3."""
    noise = rng.standard_normal(shape)
    if len(shape) == 1:
        is_plain_norm = name.endswith("weight") and not found.name.startswith("gemma")
        centre = 1.0 if is_plain_norm else 0.0
        if name.endswith("post_feedforward_layernorm.weight"):
            centre = -0.7
        return (0.2 * noise + centre).astype(np.float32)
    rows = shape[0] if found.name == "gpt2" and ".h." in name else shape[1]
    share = 0.3 if name.endswith(("mlp.down_proj.weight", "mlp.c_proj.weight")) and is_gelu(found) else 1.2
    return (noise * share / math.sqrt(rows)).astype(np.float32)


def is_gelu(found: Architecture) -> bool:
    return found.name.startswith(("gemma", "gpt2"))


def read_weights(folder: Path) -> dict[str, NDArray[np.float32]]:
    """All tensors of a checkpoint as float32."""
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.weights(name) for name in checkpoint.tensors}


def write_safetensors(path: Path, weights: dict[str, NDArray[np.float32]], dtype: str = "F32") -> None:
    """Plain bytes, so that bf16 can be written without torch."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, values in weights.items():
        blob = _stored(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def shard(folder: Path, parts: int = 3) -> dict[str, str]:
    """Cut the weights of `folder` into files as large models come; returns tensor name -> file name."""
    checkpoint = Checkpoint.open(folder)
    names = list(checkpoint.tensors)
    placed = dict[str, str]()
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        mine = names[part::parts]
        write_safetensors(folder / file, {name: checkpoint.weights(name) for name in mine})
        placed |= dict.fromkeys(mine, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return placed


def _stored(values: NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "BF16":  # cut off: the test weights need no rounding
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"F32": np.float32, "F16": np.float16, "F64": np.float64}[dtype]).tobytes()


def write_tokenizer(folder: Path, kind: str) -> None:
    is_spm = kind.endswith("-spm")
    tokenizer = spm_tokenizer(with_prefix=kind == "llama-spm") if is_spm else byte_level_tokenizer(kind)
    if kind in ("llama-bpe", "llama-spm", "gemma-spm"):
        bos = tokenizer.token_to_id(SPECIALS[0])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], bos)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "chat_template": "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def byte_level_tokenizer(kind: str) -> Tokenizer:
    splits = {"qwen2": QWEN2, "llama-bpe": LLAMA3, "tekken": TEKKEN, "gpt-4o": GPT_4O}
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind in ("llama-bpe", "tekken")))
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in splits)
    first: list[Any] = []
    if kind in splits:
        first = [pre_tokenizers.Split(Regex(splits[kind]), "isolated")]
    elif kind == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, spell]) if first else spell
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIALS), min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def spm_tokenizer(*, with_prefix: bool) -> Tokenizer:
    """BPE with byte fallback, its merges all pairs that make a token, as conversions of SentencePiece models have."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    room = VOCABULARY - 259 - len(SPECIALS)
    words.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=room, min_frequency=1, show_progress=False))
    ordered = sorted(words.get_vocab(), key=words.get_vocab().__getitem__)
    vocab = {text: index for index, text in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *ordered])}
    merges = [
        (text[:cut], text[cut:])
        for text in ordered
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), space]) if with_prefix else space
    if not with_prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", *SPECIALS])
    return tokenizer


LOGITS = Path(__file__).parent / "data" / "tiny_logits.npz"
COLUMNS = slice(None, None, 5)  # of the vocabulary: enough to tell models apart, small enough to keep


def logits_of_transformers(folder: Path) -> NDArray[np.float32]:
    """Scores [len(TOKEN_IDS), VOCABULARY] in float32. Needs torch and transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model, loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not (loaded["missing_keys"] or loaded["unexpected_keys"]), loaded
    with torch.no_grad():
        found: NDArray[np.float32] = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    return found


def main() -> None:
    """Write the logits that the tests without torch compare with."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folders = {case: write_checkpoint(Path(name) / case, case) for case in CASES}
        folders |= {each: write_variant(Path(name) / each, each) for each in VARIANTS}
        found = {each: logits_of_transformers(folder)[:, COLUMNS] for each, folder in folders.items()}
    LOGITS.parent.mkdir(exist_ok=True)
    np.savez_compressed(LOGITS, allow_pickle=False, **found)


if __name__ == "__main__":
    main()
