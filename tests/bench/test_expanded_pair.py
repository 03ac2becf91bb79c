"""The pair that a race builds: whole numbers that add up, the demo's words, its files whole or not there at all."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.bench import expanded_pair as pair_module
from edgespec.bench.expanded_pair import ExpandedPair
from edgespec.bench.expanded_tensors import TensorPlan, cancelling_shares_of, shares_of
from edgespec.bench.expanded_weights import EMBEDDING, HEAD, ExpandedWeights, product_codes
from edgespec.bench.expansion import LLAMA_1B, Expansion, Shape
from edgespec.engines.onnx import OnnxEngine
from edgespec.errors import CapabilityError, ModelFileError, UsageError
from edgespec.export.workspace import opened
from edgespec.formats.manifest import read_pair
from edgespec.formats.onnx.llama_reader import LlamaGraph
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.types import Batch

# Copies of everything, layers that add nothing, more and larger groups of heads, a longer vocabulary, in little.
SMALL = Shape(1024, 1792, 11, 16, 4, vocab_size=4352)
LITTLE = Shape(512, 1024, 10, 8, 2, vocab_size=4352)
GREEDY = Sampling(temperature=0.0)
SHIPPED = DEMO / "onnx" / "target"


@pytest.fixture(scope="module")
def small() -> LlamaGraph:
    return LlamaGraph(SHIPPED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pair = ExpandedPair(DEMO, "onnx", tmp_path_factory.mktemp("expanded") / "demo-small", SMALL)
    assert not pair.is_built()
    told: list[tuple[int, int, str]] = []
    made = pair.build(lambda *event: told.append(event))
    assert pair.is_built()
    assert [done for done, _, _ in told] == list(range(1, SMALL.num_layers + 3))
    return made


def summed(codes: np.ndarray, scales: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """What a product makes of equal inputs, as copies give them: [owners, rows]."""
    totals = np.zeros((owners.max() + 1, codes.shape[1]))
    np.add.at(totals, owners[owners >= 0], codes[owners >= 0].astype(np.int64))
    return totals * scales


@pytest.mark.parametrize("copies", [1, 2, 3, 7])
def test_codes_of_copies_add_up_to_more_than_eight_bits(copies: int):
    source = np.random.default_rng(0).standard_normal((40, 32), np.float32)
    columns = np.concatenate((np.tile(np.arange(32), copies), [-1] * 8))
    rows = np.array([*range(40), *range(40), -1])
    plan = TensorPlan("m", (81, columns.size), source, rows, columns, shares_of(columns), std=1.0, quiet_rows=True)
    codes, scales = product_codes(plan, 0)
    assert codes.dtype == np.int8 and codes.shape == (columns.size, 81) and scales.shape == (81,)
    found = summed(codes, scales, columns)
    assert (np.abs(found[:, :40] - source.T) <= scales[:40] / 2 * 1.001).all()
    np.testing.assert_array_equal(codes[:, :40], codes[:, 40:80])
    assert not codes[:, 80].any()
    assert np.count_nonzero(codes[-8:, :80]) > 0.9 * 8 * 80  # what reads zeros has weights, too
    np.testing.assert_allclose(scales[:40], np.abs(source).max(axis=1) * shares_of(columns).max() / 126, rtol=1e-6)
    quiet = replace(plan, shares=cancelling_shares_of(columns))
    codes, scales = product_codes(quiet, 0)
    assert not summed(codes, scales, columns).any()
    pairs = codes[: 32 * (copies - copies % 2), :80]
    assert np.count_nonzero(pairs) >= 0.9 * pairs.size


def test_every_code_is_within_eight_bits_and_real_rows_are_close(small: LlamaGraph):
    expansion = Expansion(small, SMALL)
    weights = ExpandedWeights(expansion)
    codes, scales = weights.product(HEAD)
    found = summed(codes, scales, np.where(expansion.dims < 0, -1, expansion.dims))
    table = small.weights(EMBEDDING)
    assert np.abs(found[:, :4096] / expansion.num_copies - table.T).max() < np.abs(table).max() / 600
    assert (codes[-1, 4096:] == -127).all() and not codes[:-1, 4096:].any()
    rows, groups = weights.embedding()
    looked_up = (rows.astype(np.float32) - 128).reshape(*groups.shape, -1) * groups[..., None]
    np.testing.assert_allclose(looked_up.reshape(4352, -1)[:4096, :256], table, atol=np.abs(table).max() / 250)
    assert all(
        np.abs(weights.product(f"model.layers.{layer}.mlp.down_proj.weight")[0]).max() <= 127 for layer in (0, 5)
    )


def test_it_says_what_the_demo_says(folder: Path):
    """Scores along texts of the demo: as close as its own int8 file and 8 bits per row of activations allow."""
    target = read_pair(DEMO, "onnx").target
    with edgespec.load("demo", engine="onnx", threads=TEST_THREADS, reproducible=False) as model:
        prompts = [model.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in PROMPTS[:3]]
        options = GenerateOptions(max_tokens=40, drafter="none", ignore_eos=True)
        texts = [[*ids, *model.generate(ids, GREEDY, options).token_ids][-60:] for ids in prompts]
    scores = []
    for path in (target, folder / "target" / "model.onnx"):
        with OnnxEngine.load(path, threads=TEST_THREADS, reproducible=False, context_length=128) as engine:
            found = []
            for ids in texts:
                engine.rollback(0)
                found.append(engine.forward(Batch.chain(ids)).copy())
            scores.append(np.concatenate(found))
    ours, theirs = scores
    assert theirs.shape == (180, SMALL.vocab_size)
    assert theirs[:, 4096:].max() < -300 and theirs[:, :4096].min() > -40
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean() > 0.97
    assert np.abs(ours - theirs[:, :4096]).mean() < 0.1


@pytest.mark.parametrize(("drafter", "accepted"), [("model", 0.5), ("eagle", 0.3)])
def test_speculation_changes_no_bit_and_drafts_are_accepted(folder: Path, drafter: Any, accepted: float):
    with edgespec.load(str(folder), drafter=drafter, threads=TEST_THREADS, reproducible=True) as model:
        ids = model.encode_chat([{"role": "user", "content": PROMPTS[0].text}])
        for temperature in (0.0, 0.8):
            sampling = Sampling(temperature=temperature, seed=4)
            options = GenerateOptions(max_tokens=40, ignore_eos=True, drafter=drafter, draft_length=4)
            drafted = model.generate(ids, sampling, options)
            plain = model.generate(ids, sampling, replace(options, drafter="none"))
            assert drafted.token_ids == plain.token_ids and drafted.logprobs == plain.logprobs
            if not temperature:
                assert drafted.stats.acceptance_rate > accepted


def test_the_manifest_describes_what_is_there(folder: Path):
    found, demo = read_pair(folder), read_pair(DEMO, "onnx")  # every file against its checksum
    assert (found.name, found.engines) == ("demo-small", ("onnx",))
    assert (found.recommended, found.context_length, found.licence) == (
        demo.recommended,
        demo.context_length,
        demo.licence,
    )
    assert sorted(found.heads) == ["eagle", "medusa"]
    assert found.draft is not None and demo.draft is not None
    assert found.draft.read_bytes() == demo.draft.read_bytes()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing that it was made of is left


def test_building_needs_no_torch_and_no_checkpoint(tmp_path: Path):
    """In a process of its own, from what a wheel holds of the demo."""
    source = tmp_path / "demo"
    shutil.copytree(DEMO, source, ignore=shutil.ignore_patterns("hf", "*.gguf"))
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'gguf', 'safetensors', 'onnxruntime_genai'): sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from edgespec.bench.expanded_pair import ExpandedPair\n"
        "from edgespec.bench.expansion import Shape\n"
        f"pair = ExpandedPair(Path({str(source)!r}), 'onnx', Path({str(tmp_path / 'out')!r}), {LITTLE!r})\n"
        "pair.build(); assert pair.is_built()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_changed_demo_makes_it_stale_and_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pair = ExpandedPair(DEMO, "onnx", tmp_path / "out" / "pair", LITTLE)
    pair.build()
    assert pair.is_built() and not replace(pair, shape=SMALL).is_built()
    monkeypatch.setattr(pair_module, "FORMAT", pair_module.FORMAT + 1)
    assert not pair.is_built()
    (pair.folder / "stray").touch()
    pair.build()
    assert pair.is_built() and not (pair.folder / "stray").exists()


def test_what_is_interrupted_leaves_nothing_and_keeps_what_was_there(tmp_path: Path):
    pair = ExpandedPair(DEMO, "onnx", tmp_path / "pair", LITTLE)
    pair.build()
    before = {path: path.stat().st_mtime_ns for path in pair.folder.rglob("*")}

    def stop(done: int, total: int, what: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    for folder in (pair.folder, tmp_path / "other"):
        with pytest.raises(KeyboardInterrupt):
            replace(pair, folder=folder).build(stop)
    assert {path: path.stat().st_mtime_ns for path in pair.folder.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pair_module, "expand_heads", fail)
    with pytest.raises(CapabilityError, match=r"No space left on device\. Make room there, or set EDGESPEC_HOME"):
        ExpandedPair(DEMO, "onnx", tmp_path / "pair", LITTLE).build()
    assert not list(tmp_path.iterdir())


def test_two_at_once_are_told(tmp_path: Path):
    pair = ExpandedPair(DEMO, "onnx", tmp_path / "pair", LITTLE)
    with opened(pair.folder, replace=True), pytest.raises(UsageError, match="is writing"):
        pair.build()


def test_a_damaged_demo_is_refused_before_anything_is_written(tmp_path: Path):
    source = tmp_path / "demo"
    shutil.copytree(DEMO, source, ignore=shutil.ignore_patterns("hf", "*.gguf"))
    data = source / "onnx" / "target" / "model.onnx.data"
    changed = bytearray(data.read_bytes())
    changed[1000] ^= 1
    data.write_bytes(changed)
    with pytest.raises(ModelFileError, match="damaged or was replaced"):
        ExpandedPair(source, "onnx", tmp_path / "pair", LITTLE).build()
    assert not (tmp_path / "pair").exists()


def test_what_it_takes_is_known_before(tmp_path: Path):
    needs = ExpandedPair(DEMO, "onnx", tmp_path, LLAMA_1B).needs()
    assert 1.5e9 < needs.disk_bytes < 1.6e9  # 1.52e9 were written
    assert 3.4e9 < needs.memory_bytes < 4e9  # 3.67e9 were measured of a race, 0.4e9 of building
    assert 15 < needs.seconds < 60
    little = ExpandedPair(DEMO, "onnx", tmp_path / "pair", LITTLE)
    little.build()
    written = sum(path.stat().st_size for path in (tmp_path / "pair" / "target").iterdir())
    assert written < little.needs().disk_bytes < written + 25e6


def test_a_gguf_of_it_says_the_same(tmp_path: Path):
    pytest.importorskip("gguf", reason="writing a GGUF needs the package gguf: scripts/run.py install export")
    folder = ExpandedPair(DEMO, "llamacpp", tmp_path / "pair", LITTLE).build()
    found = read_pair(folder)
    assert found.engines == ("llamacpp",) and sorted(path.name for path in folder.glob("*.gguf")) == [
        "draft.gguf",
        "target.gguf",
    ]
    options = GenerateOptions(max_tokens=24, drafter="model", draft_length=4)
    written = []
    for name in (str(folder), "demo"):
        with edgespec.load(name, engine="llamacpp", threads=TEST_THREADS) as model:
            ids = model.encode_chat([{"role": "user", "content": PROMPTS[0].text}])
            result = model.generate(ids, GREEDY, options)
            assert result.stats.acceptance_rate > 0.5
            written.append(result.text)
    assert written[0] == written[1]
