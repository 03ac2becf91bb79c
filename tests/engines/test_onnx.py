"""The ONNX Runtime engine beyond the contract: the rewritten graph, vocabulary, bad files, engines side by side."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from demo import DEMO, TEST_THREADS
from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.engines.onnx import OnnxEngine, settings
from edgespec.engines.onnx.library import library
from edgespec.errors import CapabilityError, ConfigError, ModelNotFound, PromptError
from edgespec.runtime import load
from edgespec.types import Batch
from lossless import assert_same_text
from tiny_graphs import assert_same_vocabulary

TEXTS = (
    "Find me a restaurant in San Jose.",
    "def f(x):\n\treturn x ** 2  # square",
    "na\u00efve \u6771\u4eac \U0001f600 \u00a0\r\n",
    "<|im_end|>x",
    " ",
)


def open_engine(path: Path, **options) -> OnnxEngine:
    return OnnxEngine.load(path, threads=TEST_THREADS, **{"context_length": 400, **options})


@pytest.fixture(scope="module")
def engine(onnx_path):
    with open_engine(onnx_path) as engine:
        yield engine


@pytest.fixture
def copied(onnx_path, tmp_path) -> Path:
    """A copy of the demo export that a test may damage."""
    shutil.copytree(onnx_path.parent, tmp_path / "model")
    return tmp_path / "model" / "model.onnx"


def plain_logits(path: Path, ids: np.ndarray) -> np.ndarray:
    """The graph as it was exported, run by itself over a whole text."""
    session = library().InferenceSession(str(path))
    feeds = {"input_ids": ids[None].astype(np.int64), "attention_mask": np.ones((1, ids.size), np.int64)}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            feeds[value.name] = np.zeros((1, value.shape[1], 0, 64), np.float32)
    return session.run(["logits"], feeds)[0][0]


def test_a_closed_engine_gives_its_weights_back(onnx_path: Path) -> None:
    engine = open_engine(onnx_path)
    engine.forward(Batch.chain([1, 2, 3]))
    session = weakref.ref(engine._bindings.session)  # type: ignore[attr-defined]
    engine.close()
    assert session() is None


def test_the_rewritten_graph_computes_what_the_exported_one_does(engine, onnx_path):
    ids = np.random.default_rng(3).integers(0, engine.vocabulary.size, 40).astype(np.int32)
    engine.rollback(0)
    found = np.concatenate([engine.forward(Batch.chain(part)).copy() for part in (ids[:20], ids[20:27], ids[27:])])
    np.testing.assert_array_equal(found, plain_logits(onnx_path, ids))


def test_the_vocabulary_is_that_of_the_gguf(engine):
    with VocabularyFile(DEMO / "demo-target-q8_0.gguf") as gguf:
        ours = engine.vocabulary
        assert_same_vocabulary(ours, gguf, TEXTS)
        assert [ours.token_name(i) for i in range(ours.size)] == [gguf.token_name(i) for i in range(gguf.size)]
        assert ours.chat_template.strip() == gguf.chat_template.strip()
        assert all(ours.decode(ours.encode(text)) == text for text in TEXTS)


def test_text_that_is_no_unicode_is_refused(engine):
    with pytest.raises(PromptError, match="surrogate"):
        engine.vocabulary.encode("\ud800")


def test_the_context_can_be_filled_to_its_last_token(onnx_path):
    """The rotary table ends with the context, so padding must not reach behind it."""
    with open_engine(onnx_path, context_length=2048, reproducible=True) as engine:
        ids = np.random.default_rng(1).integers(0, engine.vocabulary.size, 2048).astype(np.int32)
        for start in range(0, 2040, 60):
            engine.forward(Batch.chain(ids[start : start + 60], last_only=True))
        whole = engine.forward(Batch.chain(ids[2040:])).copy()
        engine.rollback(2040)
        single = [engine.forward(Batch.chain(ids[i : i + 1])).copy() for i in range(2040, 2048)]
        np.testing.assert_array_equal(np.concatenate(single), whole)


def test_where_bits_depend_on_the_pass_there_is_no_reproducible_mode(onnx_path, monkeypatch):
    for name, value in (("is_x86", lambda: False), ("VALUES_AT_ONCE", 32)):
        with monkeypatch.context() as patched:
            patched.setattr(settings, name, value)
            with pytest.raises(CapabilityError, match=r"no reproducible mode on this processor.*Run the GGUF"):
                open_engine(onnx_path, reproducible=True)
            with open_engine(onnx_path) as engine:
                assert engine.facts.pinned_class is None


@pytest.mark.parametrize(
    ("model", "draft"), [("onnx/target", "demo-draft-q8_0.gguf"), ("demo-target-q8_0.gguf", "onnx/draft")]
)
def test_every_pair_of_engines_writes_the_same_text(model, draft):
    options = {"threads": TEST_THREADS, "context_length": 512, "reproducible": True}
    with load(DEMO / model, draft=DEMO / draft, **options) as mixed:
        assert mixed.reproducible
        found = assert_same_text(mixed, [("model", 1), ("model", 4), ("model", 7), ("ngram", 5)], num_tokens=25)
    assert found["model", 1].accepted_tokens > 0


def test_bad_options_are_refused(onnx_path, tmp_path):
    with pytest.raises(ModelNotFound):
        open_engine(tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match="2048"):
        open_engine(onnx_path, context_length=4000)
    with pytest.raises(ConfigError, match="allowed: auto"):
        open_engine(onnx_path, provider="tpu")
    if "cuda" not in library().get_available_providers():
        with pytest.raises(CapabilityError, match=r"For an NVIDIA GPU: .*(install gpu|onnxruntime-gpu)"):
            open_engine(onnx_path, provider="cuda")
    with pytest.raises(ConfigError, match="not supported here: use f32"):
        open_engine(onnx_path, cache_type_k="q4_0")
    with pytest.raises(ConfigError, match="provider="):
        load(str(onnx_path.parent), gpu_layers=3)
    with pytest.raises(ConfigError, match="give -ctk and -ctv the same"):
        load(str(onnx_path.parent), cache_type_k="f32")


def test_a_config_of_the_other_builder_serves_too(copied):
    folder = copied.parent
    if not (folder / "genai_config.json").is_file():
        decoder = {"head_size": 64}
        genai = {"model": {"type": "llama", "context_length": 1024, "decoder": decoder}}
        (folder / "genai_config.json").write_text(json.dumps(genai))
    (folder / "config.json").unlink(missing_ok=True)
    with open_engine(copied) as engine:
        assert engine.facts.architecture == "llama"


@pytest.mark.skipif(sys.platform != "linux", reason="where ONNX Runtime keeps its reports elsewhere is not known")
def test_nothing_is_reported_to_the_maker_of_the_library(onnx_path, tmp_path):
    """ONNX Runtime files its reports in the home folder before it sends them; in CI and under pytest it makes none."""
    code = "import sys\nfrom pathlib import Path\nfrom edgespec.engines.onnx import OnnxEngine\n"
    code += "OnnxEngine.load(Path(sys.argv[1])).close()\n"
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}

    def files(**settings: str) -> list[str]:
        home = tmp_path / "-".join(("home", *settings))
        home.mkdir()
        environment = {**kept, "HOME": str(home), "EDGESPEC_HOME": str(tmp_path / "own"), **settings}
        subprocess.run([sys.executable, "-c", code, str(onnx_path)], env=environment, check=True)
        return [str(path.relative_to(home)) for path in home.rglob("*") if "onnxruntime" in path.name]

    assert files() == []
    assert files(ORT_DISABLE_TELEMETRY="0")  # whoever asks for it
