"""ONNX export: folders appear whole, graphs are cut and shared bit for bit, exported logits are the model's own.

The last part needs torch, transformers and onnxruntime-genai, and is skipped without them.
"""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec.export.onnx.child import failure
from edgespec.export.onnx.convert import Exporter
from numpy.typing import NDArray

import edgespec
from edgespec.engines.onnx.sessions import open_session
from edgespec.errors import CapabilityError, ConfigError, EdgespecError, ModelFileError
from edgespec.export.onnx import export_onnx
from edgespec.export.request import ONNX_QUANTS

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from edgespec.export.onnx.cut import early_exit_onnx  # noqa: E402
from edgespec.export.onnx.graph import read_graph  # noqa: E402
from edgespec.export.onnx.tied import share_embedding  # noqa: E402
from onnx import helper, numpy_helper  # noqa: E402

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "models" / "demo"
HIDDEN, VOCABULARY, LAYERS, BLOCK = 32, 64, 3, 16
PROBE, CONTINUATION, ROOM = 20, 5, 64
Values = dict[str, NDArray[Any]]


def session(path: Path) -> Any:
    """As the engine makes it, which changes weights whose products saturate on this processor."""
    return open_session(path.read_bytes(), path.parent, threads=1, provider="cpu")[0]


def run(path: Path, values: Values) -> Values:
    found = session(path)
    feeds = {value.name: values[value.name] for value in found.get_inputs()}
    return dict(zip([value.name for value in found.get_outputs()], found.run(None, feeds), strict=True))


# A graph with the builder's names, small enough to be made by hand: every layer keeps a cache of its inputs' sums.


def builder_like(folder: Path) -> Path:
    """A model of three layers whose weights lie in model.onnx.data."""
    random = np.random.default_rng(1)
    weights: Values = {"embedding": random.normal(size=(VOCABULARY, HIDDEN)), "head": random.normal(size=(HIDDEN, 64))}
    nodes = [helper.make_node("Gather", ["embedding", "input_ids"], ["embedded"], "/model/embed_tokens/Gather")]
    residual, delta = "embedded", "embedded"
    inputs = [helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch_size", "sequence_length"])]
    outputs = [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [1, "sequence_length", 64])]
    cache = ["batch_size", "sequence_length", HIDDEN]
    for layer in range(LAYERS + 1):
        place = f"layers.{layer}/input_layernorm" if layer < LAYERS else f"layers.{layer}/final_norm_layernorm"
        norm = f"/model/{place}/SkipLayerNorm"
        weights[f"{norm}.weight"] = random.normal(size=HIDDEN)
        made = [f"{norm}/output_0", "", "", f"{norm}/output_3"]
        add = helper.make_node(
            "SkipSimplifiedLayerNormalization", [residual, delta, f"{norm}.weight"], made, norm, domain="com.microsoft"
        )
        nodes.append(add)
        if layer == LAYERS:
            nodes.append(helper.make_node("MatMul", [f"{norm}/output_0", "head"], ["logits"], "/lm_head/MatMul"))
            break
        weights[f"layer{layer}"] = random.normal(size=(HIDDEN, HIDDEN))
        past, present = f"past_key_values.{layer}.key", f"present.{layer}.key"
        past_value, present_value = f"past_key_values.{layer}.value", f"present.{layer}.value"
        inputs.append(helper.make_tensor_value_info(past, onnx.TensorProto.FLOAT, cache))
        inputs.append(helper.make_tensor_value_info(past_value, onnx.TensorProto.FLOAT, cache))
        outputs.append(helper.make_tensor_value_info(present, onnx.TensorProto.FLOAT, cache))
        outputs.append(helper.make_tensor_value_info(present_value, onnx.TensorProto.FLOAT, cache))
        nodes.append(helper.make_node("Add", [f"{norm}/output_0", past], [present]))
        nodes.append(helper.make_node("Add", [present, past_value], [present_value]))
        residual, delta = f"{norm}/output_3", f"delta{layer}"
        nodes.append(helper.make_node("MatMul", [present_value, f"layer{layer}"], [delta]))
    stored = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    write(helper.make_graph(nodes, "builder-like", inputs, outputs, stored), folder)
    return folder


def write(graph: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    place = folder / "model.onnx"
    onnx.save_model(model, place, save_as_external_data=True, location="model.onnx.data", size_threshold=0)


def values_for(path: Path, width: int = 4) -> Values:
    """Arbitrary tokens, and for every cache input arbitrary numbers."""
    random = np.random.default_rng(2)
    values: Values = {"input_ids": random.integers(0, VOCABULARY, (1, width))}
    for value in session(path).get_inputs():
        if value.name.startswith("past"):
            values[value.name] = random.normal(size=(1, width, HIDDEN)).astype(np.float32)
    return values


def exit_logits(folder: Path, layers: int, values: Values) -> NDArray[np.float32]:
    """What the first layers of the model, its final norm and its head compute, in numpy."""
    weights = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(folder / "model.onnx").graph.initializer
    }

    def normed(state: NDArray[np.float32], place: str) -> NDArray[np.float32]:
        return state / np.sqrt((state**2).mean(-1, keepdims=True)) * weights[f"/model/{place}/SkipLayerNorm.weight"]

    state = 2 * weights["embedding"][values["input_ids"]]
    for layer in range(layers):
        past, past_value = (values[f"past_key_values.{layer}.{kind}"] for kind in ("key", "value"))
        present = normed(state, f"layers.{layer}/input_layernorm") + past + past_value
        state = state + present @ weights[f"layer{layer}"]
    return normed(state, f"layers.{LAYERS}/final_norm_layernorm") @ weights["head"]


def check_exit(folder: Path, layers: int, values: Values) -> Values:
    """The draft fills the caches of its layers as the whole graph does, bit for bit; no weights were written."""
    before = (folder / "model.onnx.data").stat()
    draft = early_exit_onnx(folder, layers)
    assert (folder / "model.onnx.data").stat() == before
    assert not list(folder.glob("*.tmp"))
    whole, short = run(folder / "model.onnx", values), run(draft, values)
    assert np.abs(short["logits"] - whole["logits"]).max() > 1e-3
    kinds = ("key", "value")
    assert short.keys() == {"logits", *(f"present.{layer}.{kind}" for layer in range(layers) for kind in kinds)}
    for name in short.keys() - {"logits"}:
        np.testing.assert_array_equal(short[name], whole[name])
    return short


@pytest.mark.parametrize("layers", [1, 2])
def test_an_exit_computes_its_layers_final_norm_and_head(tmp_path: Path, layers: int) -> None:
    folder = builder_like(tmp_path / "model")
    values = values_for(folder / "model.onnx")
    found = check_exit(folder, layers, values)["logits"]
    np.testing.assert_allclose(found, exit_logits(folder, layers, values), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layers", [0, 3, -1])
def test_a_cut_outside_the_layers_is_refused(tmp_path: Path, layers: int) -> None:
    with pytest.raises(ConfigError, match="allowed are 1 to 2"):
        early_exit_onnx(builder_like(tmp_path / "model"), layers)


def test_a_graph_of_another_exporter_is_refused(tmp_path: Path) -> None:
    folder = builder_like(tmp_path / "model")
    model = read_graph(folder / "model.onnx")
    for node in model.graph.node:
        node.name = f"node_{node.name.replace('/', '_')}"
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(CapabilityError, match="was not written by"):
        early_exit_onnx(folder, 1)


@pytest.mark.parametrize("content", [None, b"", b"not a graph at all", b"\x08\x0a"])
def test_what_is_no_graph_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.onnx"):
        early_exit_onnx(tmp_path, 1)


def test_the_demo_target_can_be_cut(tmp_path: Path) -> None:
    shipped = DEMO / "onnx" / "target"
    if not (shipped / "model.onnx").is_file():
        pytest.skip(f"{shipped.relative_to(REPOSITORY)} is not shipped in this checkout")
    folder = shutil.copytree(shipped, tmp_path / "target")
    check_exit(folder, 3, attention_values(folder / "model.onnx"))


def attention_values(path: Path, width: int = PROBE) -> Values:
    """A first pass over `width` tokens of a model with empty caches."""
    values: Values = {
        "input_ids": np.random.default_rng(3).integers(5, 500, (1, width)),
        "attention_mask": np.ones((1, width), np.int64),
    }
    graph = read_graph(path).graph
    for value in graph.input:
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.name.startswith("past"):
            values[value.name] = np.zeros((1, dims[1], 0, dims[3] or head_size(graph)), np.float32)
    return values


def head_size(graph: Any) -> int:
    """The builder's graphs do not name the size of a head in their caches: it is twice that of a rotary row."""
    return 2 * next(tensor.dims[1] for tensor in graph.initializer if tensor.name.startswith("cos_cache"))


# Sharing of tied embeddings.


def quantised_rows(rows: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """MatMulNBits' layout of [count, width]: uint8 [count, blocks, bytes] and scales [count, blocks]."""
    zero = 2 ** (bits - 1)
    blocks = rows.reshape(len(rows), -1, BLOCK)
    scales = np.abs(blocks).max(-1) / (zero - 1)
    codes = (np.round(blocks / scales[..., None]) + zero).astype(np.uint8)
    return (codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4), scales.astype(np.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_embedding_reads_the_rows_of_the_head(tmp_path: Path, bits: int) -> None:
    rows = np.random.default_rng(4).normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)
    codes, scales = quantised_rows(rows, bits)
    stored = {"embedding": rows, "lm_head.weight_Q": codes, "lm_head.scales": scales}
    settings = {"K": HIDDEN, "N": VOCABULARY, "bits": bits, "block_size": BLOCK, "domain": "com.microsoft"}
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["embedded"], "/model/embed_tokens/Gather"),
        helper.make_node("MatMulNBits", ["embedded", "lm_head.weight_Q", "lm_head.scales"], ["logits"], **settings),
    ]
    ids = helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, [1, "width"])
    outputs = [
        helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [1, "width", VOCABULARY]),
        helper.make_tensor_value_info("embedded", onnx.TensorProto.FLOAT, [1, "width", HIDDEN]),
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    write(helper.make_graph(nodes, "tied", [ids], outputs, tensors), tmp_path)
    size = (tmp_path / "model.onnx.data").stat().st_size

    assert share_embedding(tmp_path)

    assert (tmp_path / "model.onnx.data").stat().st_size <= size - rows.nbytes // 2
    found = run(tmp_path / "model.onnx", {"input_ids": np.arange(VOCABULARY)[None]})
    assert np.abs(found["embedded"][0] - rows).max() <= scales.max() / 2 + 1e-6
    np.testing.assert_allclose(found["logits"][0], found["embedded"][0] @ found["embedded"][0].T, atol=1e-4)
    assert not share_embedding(tmp_path)  # nothing is left to share


# Folders.


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to_mother.txt").write_text("dear")
    with pytest.raises(ModelFileError, match="is not an ONNX export"):
        export_onnx(DEMO / "hf" / "draft", tmp_path / "letters", "int8")
    assert (tmp_path / "letters" / "to_mother.txt").read_text() == "dear"


FOLLOW = """
import time
from edgespec.export.onnx.child import follow_parent
follow_parent()
print("ready", flush=True)
time.sleep({seconds})
"""


def test_a_child_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", FOLLOW.format(seconds=60)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(10) == 1


def test_a_child_that_is_done_ends_well() -> None:
    command = [sys.executable, "-c", FOLLOW.format(seconds=0)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.wait(10) == 0


# What a user may get wrong, and what may go wrong.


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(DEMO / "hf" / "draft", tmp_path / "draft")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant": "int3"}, f"allowed: {', '.join(ONNX_QUANTS)}"),
        ({"quant": "int8", "group_size": 48}, "allowed: 16, 32, 64, 128, 256"),
        ({"quant": "int8", "exporter": "magic"}, "allowed: auto, edgespec, builder, transformers, optimum"),
    ],
)
def test_bad_options_are_refused(checkpoint: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_onnx(checkpoint, tmp_path / "out", **options)
    assert not list(tmp_path.glob("out*"))


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _scramble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 5000)


def _configured(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def _forget_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be read as JSON"),
        (shutil.rmtree, "is not a folder"),
        (_truncate, "truncated"),
        (_scramble, "not a safetensors file"),
        (_forget_architecture, "lacks 'architectures'"),
        (_configured(num_hidden_layers=None), "has no num_hidden_layers; a whole number above 0 is needed"),
        (_configured(num_hidden_layers=0), "has num_hidden_layers 0; a whole number above 0"),
        (_configured(num_attention_heads="x"), "num_attention_heads"),
        (_configured(hidden_size=None, head_dim=None), "has no hidden_size"),
        (_configured(rms_norm_eps={}), "its rms_norm_eps is {}, a number was expected"),
        (
            _configured(architectures=["NewForCausalLM"]),
            "is a NewForCausalLM; supported for ONNX: Llama.*GPT2LMHeadModel",
        ),
        (_configured(architectures=["NewForCausalLM"]), "llama.cpp's own convert_hf_to_gguf.py"),
    ],
)
def test_a_damaged_folder_is_refused(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(checkpoint)
    with pytest.raises(ModelFileError, match=message) as caught:
        export_onnx(checkpoint, tmp_path / "out", "int8")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("returncode", "said", "kind", "message"),
    [
        (1, ["Traceback", "KeyError: 'rope_type'"], ModelFileError, "cannot be exported: KeyError: 'rope_type'"),
        (1, ["ModuleNotFoundError: No module named 'onnx_ir'"], CapabilityError, r"needs onnx_ir: .* install "),
        (1, ["OSError: [Errno 28] No space left on device"], CapabilityError, "filled the disk"),
        (-signal.SIGKILL if hasattr(signal, "SIGKILL") else 137, ["layer 3"], CapabilityError, "memory ran out"),
        (3, [], ModelFileError, "no output"),
    ],
)
def test_the_reason_of_a_failed_child(
    returncode: int, said: list[str], kind: type[EdgespecError], message: str
) -> None:
    error = failure(returncode, said, "Llama from folder")
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        raise error


def test_heads_that_no_kernel_takes_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"head_dim": 24}))
    with pytest.raises(ModelFileError, match="heads of 24 values"):
        export_onnx(checkpoint, tmp_path / "out", "int8")


# Real exports.


def tiny_config(kind: str) -> dict[str, Any]:
    """Shapes that show faults: few heads, windows shorter than the probe, a width whose root has no short decimals."""
    config: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    special: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": 8},
        "smollm3": {"no_rope_layer_interval": 2},
        "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 24},
        "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 24, "layer_types": WINDOWED},
    }
    if kind == "gpt2":
        return {"vocab_size": 512, "n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 128, "eos_token_id": 2}
    if kind in ("qwen2", "smollm3"):
        config |= {"num_attention_heads": 3, "num_key_value_heads": 1}
        del config["head_dim"]
    return config | special.get(kind, {})


WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "gemma2", "gemma3_text", "gpt2")


def export_tools() -> Any:
    """transformers, or a skip where the export extra is missing."""
    for name in ("torch", "onnxscript", "onnxruntime_genai"):
        # Found, not imported: their import warns, and only child processes use them.
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random checkpoint of a kind of model, with the demo's tokenizer."""
    transformers = export_tools()
    import torch

    made: dict[str, Path] = {"demo": DEMO / "hf" / "target"}

    def make(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(kind, **tiny_config(kind))
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for weights in model.parameters():
                    weights.mul_(3) if weights.ndim > 1 else weights.add_(torch.randn_like(weights) / 10)
            made[kind] = tmp_path_factory.mktemp(kind) / "hf"
            model.save_pretrained(made[kind])
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(DEMO / "hf" / "draft" / name, made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="module")
def exports(
    checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Path]]:
    """Exported folders by kind and weight type, each made once."""
    made: dict[tuple[str, str], Path] = {}

    def make(kind: str, quant: str) -> Path:
        if (kind, quant) not in made:
            output = tmp_path_factory.mktemp("onnx") / kind
            exporter: Exporter = "transformers" if kind == "gpt2" else "builder"
            made[kind, quant] = export_onnx(checkpoints(kind), output, quant, exporter=exporter).path.parent
        return made[kind, quant]

    return make


def reference(folder: Path, ids: NDArray[np.int64], layers: int | None = None) -> NDArray[np.float32]:
    """transformers' logits [width, vocabulary]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if layers is not None:
        del model.model.layers[layers:]
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor(ids), use_cache=False).logits[0].numpy()
    return logits


def two_passes(path: Path, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Logits of the probe in one pass and of the rest in another, past and present one buffer."""
    found, logits = session(path), []
    shapes = {value.name: (value.shape, value.type) for value in found.get_inputs()}
    size = json.loads((path.parent / "config.json").read_text())
    per_head = size.get("head_dim") or size.get("hidden_size", size.get("n_embd")) // size.get(
        "num_attention_heads", size.get("n_head")
    )
    buffers = {}
    for name, (shape, kind) in shapes.items():
        if name.startswith("past"):
            number = np.float16 if kind == "tensor(float16)" else np.float32
            empty = np.zeros((1, shape[1], ROOM, per_head), number)
            buffers[name] = onnxruntime.OrtValue.ortvalue_from_numpy(empty)
    for start, end in ((0, PROBE), (PROBE, ids.shape[1])):
        binding = found.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids[:, start:end]))
        binding.bind_cpu_input("attention_mask", np.ones((1, end), np.int64))
        if "position_ids" in shapes:
            binding.bind_cpu_input("position_ids", np.arange(start, end)[None])
        binding.bind_output("logits", "cpu")
        for name, buffer in buffers.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), buffer)
        found.run_with_iobinding(binding)
        logits.append(binding.get_outputs()[0].numpy()[0].astype(np.float32))
    return np.concatenate(logits)


def probe(limit: int = 512) -> NDArray[np.int64]:
    return np.random.default_rng(5).integers(5, limit, (1, PROBE + CONTINUATION))


@pytest.mark.parametrize("kind", [*KINDS, "demo"])
def test_float_logits_are_the_models_own(
    kind: str, checkpoints: Callable[[str], Path], exports: Callable[..., Path]
) -> None:
    folder = exports(kind, "fp32")
    tolerance = 1e-3 if kind.startswith("g") else 1e-4  # Gemma and GPT-2 approximate GELU
    expected = reference(checkpoints(kind), probe())
    assert np.abs(two_passes(folder / "model.onnx", probe()) - expected).max() <= tolerance * max(1, expected.std())
    names = {path.name for path in folder.iterdir()}
    assert {"model.onnx", "model.onnx.data", "config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert ("genai_config.json" in names) == (kind != "gpt2")
    same = ("tokenizer.json", "tokenizer_config.json", "config.json")
    assert all((folder / name).read_bytes() == (checkpoints(kind) / name).read_bytes() for name in same)


# Least agreement over random tokens, a quarter of which are near ties.
NARROW = [
    *(("demo", "int8", 0.9), ("demo", "w8a8", 0.8), ("demo", "fp16", 0.95)),
    *(("gpt2", "int8", 0.7), ("gpt2", "w8a8", 0.7), ("gemma3_text", "w8a8", 0.7)),
]


@pytest.mark.parametrize(("kind", "quant", "least"), NARROW)
def test_narrow_weights_keep_most_choices(
    kind: str, quant: str, least: float, checkpoints: Callable[[str], Path], exports: Callable[..., Path]
) -> None:
    folder = exports(kind, quant)
    expected, found = reference(checkpoints(kind), probe()), two_passes(folder / "model.onnx", probe())
    assert (expected.argmax(1) == found.argmax(1)).mean() >= least
    assert np.abs(found - expected).max() <= 0.25 * expected.std()
    if (kind, quant) == ("demo", "int8"):
        assert (folder / "model.onnx.data").stat().st_size < 10.5e6  # one copy of the embeddings, of 8.1 M weights


@pytest.mark.parametrize("quant", ["int8", "w8a8", "int4"])
def test_what_is_exported_by_default_can_be_reproducible(quant: str, exports: Callable[..., Path]) -> None:
    """Groups of 128 are read by a kernel whose bits depend on the width of a pass."""
    graph = exports("demo", quant) / "model.onnx"
    with edgespec.load(str(graph), drafter="none", reproducible=True, threads=1, context_length=256) as model:
        assert model.target.facts.pinned_class[0] <= 2
        assert model.target.facts.pinned_class[1] >= 16


def test_an_early_exit_is_the_pruned_model(checkpoints: Callable[[str], Path], exports: Callable[..., Path]) -> None:
    draft = early_exit_onnx(exports("demo", "fp32"), 4)
    expected = reference(checkpoints("demo"), probe(), layers=4)
    assert np.abs(two_passes(draft, probe()) - expected).max() <= 1e-4 * expected.std()


def test_an_exit_of_a_real_export(exports: Callable[..., Path]) -> None:
    folder = exports("gemma3_text", "fp32")
    values = attention_values(folder / "model.onnx")
    check_exit(folder, 2, values)


def test_an_export_names_its_files_and_reports_its_progress(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    made = export_onnx(
        checkpoints("llama"),
        tmp_path / "out",
        "fp32",
        exporter="builder",
        progress=lambda done, total, what: seen.append((done, total)),
    )
    assert made.exporter == "builder" and made.architecture == "LlamaForCausalLM"
    assert made.files == {path.name: path.stat().st_size for path in made.path.parent.iterdir()}
    assert seen[-1][0] == seen[-1][1] and len(seen) >= 6


def test_an_unknown_architecture_is_named(checkpoint: Path, tmp_path: Path) -> None:
    export_tools()
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"architectures": ["WobbleForCausalLM"], "model_type": "wobble"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="WobbleForCausalLM") as caught:
        export_onnx(checkpoint, tmp_path / "out", "int8")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out*"))
