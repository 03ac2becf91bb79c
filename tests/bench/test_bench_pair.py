"""Benchmark pairs on disk: they run, are kept, are made again when something changed, and errors are clear."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="building a pair needs the package gguf: scripts/run.py install export")

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.bench.expanded_heads import expand_heads
from edgespec.bench.expansion import Expansion, Shape
from edgespec.errors import CapabilityError, ConfigError, ModelFileError
from edgespec.export import resources as room
from edgespec.formats.checkpoint import Checkpoint
from edgespec.formats.head_file import read_head_file
from edgespec.formats.manifest import read_pair
from edgespec.installation import install_command
from edgespec.types import Batch
from expansion import pair as pair_module
from expansion import shapes
from expansion.pair import Builder
from expansion.request import BenchRequest, check_needs, needs_of

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lab" / "make_bench_pair.py"
LITTLE = Shape(512, 1024, 10, 8, 2, vocab_size=4352)
PROMPT = [{"role": "user", "content": "Hi, can you find me a restaurant in San Jose that serves Italian food?"}]


@pytest.fixture(autouse=True)
def little_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named shape that takes a second to build."""
    monkeypatch.setitem(shapes.SHAPES, "little", LITTLE)


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "manifest.toml"}


def test_a_pair_runs_and_says_what_the_demo_says(tmp_path: Path):
    request = BenchRequest("little", ("q8_0",))
    (folder,) = Builder(request, DEMO, tmp_path / "out").build()
    assert folder == tmp_path / "out" / "q8_0"
    assert not (tmp_path / "out" / "checkpoints").exists()
    greedy, options = Sampling(temperature=0.0), GenerateOptions(max_tokens=24, drafter="model", draft_length=4)
    written = []
    for name in (str(folder), str(DEMO)):
        with edgespec.load(name, threads=TEST_THREADS) as model:
            ids = model.encode_chat(PROMPT)
            drafted = model.generate(ids, greedy, options)
            assert drafted.drafter == "model"
            assert drafted.stats.acceptance_rate > 0.5
            assert drafted.token_ids == model.generate(ids, greedy, replace(options, drafter="none")).token_ids
            written.append(drafted.text)
    assert written[0] == written[1]
    found, demo = read_pair(folder), read_pair(DEMO)
    assert found.name == "bench-little-q8_0"
    assert "cost of a little model with 4352 tokens" in found.description
    assert (found.recommended, found.context_length) == (demo.recommended, demo.context_length)


def test_the_heads_read_the_copies_and_are_accepted_as_on_the_demo_target(tmp_path: Path):
    request = BenchRequest("little", ("q8_0", "f16"))
    folders = Builder(request, DEMO, tmp_path).build()
    for folder, kind in itertools.product(folders, ("eagle", "medusa")):
        heads, own = (read_head_file(read_pair(place).heads[kind].path) for place in (folder, DEMO))
        assert (heads.manifest.hidden_size, heads.manifest.feature_size) == (256, 512)
        assert heads.manifest.vocabulary_size == 4096
        assert all(np.array_equal(heads.arrays[name], array) for name, array in own.arrays.items())
    greedy, accepted = Sampling(temperature=0.0), {}
    for name in (folders[0], DEMO):
        for kind in ("eagle", "medusa"):
            with edgespec.load(str(name), drafter=kind, threads=TEST_THREADS, reproducible=True) as model:
                ids = model.encode_chat(PROMPT)
                options = GenerateOptions(max_tokens=48, drafter=kind, draft_length=3, ignore_eos=True)
                drafted = model.generate(ids, greedy, options)
                assert drafted.token_ids == model.generate(ids, greedy, replace(options, drafter="none")).token_ids
                accepted[name, kind] = drafted.stats.accepted_tokens
    for kind in ("eagle", "medusa"):
        # rounding of 8 bits may change a draft here and there
        assert abs(accepted[folders[0], kind] - accepted[DEMO, kind]) <= 3 < accepted[DEMO, kind]


def test_heads_of_another_width_and_a_source_without_any(tmp_path: Path):
    source = tmp_path / "demo"
    shutil.copytree(DEMO, source)
    expansion = Expansion(Checkpoint.open(source / "hf" / "draft"), LITTLE)
    with pytest.raises(ModelFileError, match="holds heads on states of 256 numbers"):
        expand_heads(source / "heads" / "eagle.npz", expansion, tmp_path / "eagle.npz")
    assert not (tmp_path / "eagle.npz").exists()
    manifest = (source / "manifest.toml").read_text(encoding="utf-8")
    (source / "manifest.toml").write_text(re.sub(r"\[heads\.\w+\]\n(?:.+\n)+", "", manifest), encoding="utf-8")
    (folder,) = Builder(BenchRequest("little", ("q8_0",)), source, tmp_path / "out").build()
    assert not read_pair(folder).heads


def test_another_target_is_expanded_without_the_heads_of_the_first(tmp_path: Path):
    request = BenchRequest("little", ("q8_0",), target=DEMO / "hf" / "draft")
    assert request.name == "bench-little-of-hf-draft"
    (folder,) = Builder(request, DEMO, tmp_path / "out").build()
    assert not read_pair(folder).heads
    options = GenerateOptions(max_tokens=16, drafter="model", draft_length=4)
    with edgespec.load(str(folder), threads=TEST_THREADS) as model:
        stats = model.generate(model.encode_chat(PROMPT), Sampling(temperature=0.0), options).stats
    # The target says what its own draft says, but for the rounding of two files.
    assert stats.accepted_tokens >= 0.7 * stats.drafted_tokens > 0
    with pytest.raises(ModelFileError, match="no-such"):
        Builder(replace(request, target=tmp_path / "no-such"), DEMO, tmp_path / "out")


def test_existing_files_are_kept_and_changed_ones_rebuilt(tmp_path: Path):
    source, output = tmp_path / "demo", tmp_path / "out"
    shutil.copytree(DEMO, source)
    request = BenchRequest("little", ("q8_0",))
    assert Builder(request, source, output).needs() is not None
    (folder,) = Builder(request, source, output).build()
    first = times(folder)
    assert Builder(request, source, output).needs() is None
    Builder(request, source, output).build()
    assert times(folder) == first

    # A retrained draft is another file in the source's manifest.
    manifest = (source / "manifest.toml").read_text(encoding="utf-8")
    facts = {role: file.sha256 or "" for role, file in read_pair(DEMO).files.items()}
    sizes = {role: str(file.bytes) for role, file in read_pair(DEMO).files.items()}
    shutil.copyfile(DEMO / "demo-medium-q8_0.gguf", source / "demo-draft-q8_0.gguf")
    manifest = manifest.replace(facts["draft"], facts["medium"]).replace(sizes["draft"], sizes["medium"])
    (source / "manifest.toml").write_text(manifest, encoding="utf-8")
    Builder(request, source, output).build()
    assert times(folder)["target.gguf"] == first["target.gguf"]
    assert times(folder)["draft.gguf"] != first["draft.gguf"]
    assert (folder / "draft.gguf").read_bytes() == (DEMO / "demo-medium-q8_0.gguf").read_bytes()

    Builder(replace(request, seed=1), source, output).build()
    assert times(folder)["target.gguf"] != first["target.gguf"]


class Interrupted(Exception):
    pass


def test_an_interrupted_build_leaves_no_manifest_and_resumes(tmp_path: Path):
    def stop(done: int, total: int, what: str) -> None:
        if what.startswith("f16/target"):
            raise Interrupted

    request = BenchRequest("little", ("q8_0", "f16"), draft_size="little")
    with pytest.raises(Interrupted):
        Builder(request, DEMO, tmp_path, stop).build()
    assert sorted(path.parent.name for path in tmp_path.rglob("manifest.toml")) == ["q8_0"]
    assert not list(tmp_path.glob("f16/*"))
    first = times(tmp_path / "q8_0")
    Builder(request, DEMO, tmp_path).build()
    assert times(tmp_path / "q8_0") == first
    # The expanded draft is made once and copied.
    assert (tmp_path / "f16" / "draft.gguf").read_bytes() == (tmp_path / "q8_0" / "draft.gguf").read_bytes()
    assert (tmp_path / "q8_0" / "draft.gguf").stat().st_size > 20e6
    with edgespec.load(str(tmp_path / "q8_0"), threads=TEST_THREADS) as model:
        options = GenerateOptions(max_tokens=16, drafter="model", draft_length=4)
        result = model.generate(model.encode_chat(PROMPT), Sampling(temperature=0.0), options)
    assert result.stats.acceptance_rate > 0.5


@pytest.mark.parametrize(("quant", "off", "same"), [("int8", 0.05, 0.97), ("w8a8", 0.4, 0.9)])
def test_graphs_of_onnx_runtime(quant: str, off: float, same: float, tmp_path: Path):
    (folder,) = Builder(BenchRequest("little", (quant,)), DEMO, tmp_path).build()
    found = read_pair(folder, "onnx")
    assert {file.engine for file in found.files.values()} == {"onnx"}
    from edgespec.engines.llamacpp import LlamaCppEngine
    from edgespec.engines.onnx import OnnxEngine

    with edgespec.load(str(folder), threads=TEST_THREADS) as model:
        ids = model.encode_chat(PROMPT)
        ids += model.generate(ids, Sampling(temperature=0.0), GenerateOptions(max_tokens=100)).token_ids
        assert model.stats.acceptance_rate > 0.5
    with OnnxEngine.load(found.target, threads=TEST_THREADS, reproducible=False) as engine:
        theirs = engine.forward(Batch.chain(ids)).copy()
    with LlamaCppEngine.load(read_pair(DEMO).target, threads=TEST_THREADS, reproducible=False) as engine:
        ours = engine.forward(Batch.chain(ids)).copy()
    assert theirs.shape == (len(ids), 4352) and theirs[:, 4096:].max() < -100
    assert np.abs(ours - theirs[:, :4096]).mean() < off
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean() > same


def test_a_target_that_says_something_else_is_refused(tmp_path: Path):
    (folder,) = Builder(BenchRequest("little", ("q8_0",), sigma=4.0), DEMO, tmp_path).build()
    with pytest.raises(ModelFileError, match=r"writes other tokens than .* in . of 8 places"):
        pair_module.check_answers(folder / "target.gguf", read_pair(DEMO).target)


def test_missing_disk_or_memory_is_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small, large = needs_of(BenchRequest("60m", ("q8_0",))), needs_of(BenchRequest("3b", ("q8_0", "q4_k_m")))
    assert 150e6 < small.disk_bytes < 300e6 < 10e9 < large.disk_bytes < 25e9
    graph = needs_of(BenchRequest("1b", ("w8a8",)))
    assert 2e9 < graph.memory_bytes < 4e9
    monkeypatch.setattr(room, "free_bytes", lambda place: 10**6)
    with pytest.raises(CapabilityError, match=r"not enough disk: up to .* are needed .*, 1 MB are free"):
        Builder(BenchRequest("little", ("q8_0",)), DEMO, tmp_path / "out").build()
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(room, "free_bytes", lambda place: 10**15)
    monkeypatch.setattr("edgespec.platform.memory.free_memory", lambda: 10**6)
    with pytest.raises(CapabilityError, match=r"not enough memory: .* leave int8, w8a8 and int4 out"):
        check_needs(graph, tmp_path)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pair_module, "find_spec", lambda name: None if name == "onnx" else object())
    with pytest.raises(CapabilityError, match=re.escape(f"building for onnx needs onnx: {install_command('export')}")):
        Builder(BenchRequest("little", ("int8",)), DEMO, tmp_path / "out").build()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": "9b"}, "no shape '9b'; allowed: 60m"),
        ({"size": "1b", "draft_size": "2b"}, "no shape '2b'"),
        ({"size": "1b", "formats": ("q9_0",)}, "no format 'q9_0'; allowed: f32"),
        ({"size": "1b", "formats": ()}, "no format is given"),
        ({"size": "1b", "draft": "huge"}, "no draft 'huge'; allowed: demo, medium"),
        ({"size": "1b", "sigma": -0.1}, "sigma must be within"),
        ({"size": "1b", "sigma": float("nan")}, "sigma must be within"),
    ],
)
def test_bad_requests(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        BenchRequest(**values)


def test_a_vocabulary_below_the_models_own_is_refused(tmp_path: Path):
    with pytest.raises(ModelFileError, match="vocab_size 1000 is below the model's own 4096"):
        Builder(BenchRequest("little", ("q8_0",), vocab_size=1000), DEMO, tmp_path)


def test_different_pairs_have_different_names():
    plain = BenchRequest("1b")
    others = [replace(plain, **change) for change in ({"sigma": 0.2}, {"draft_size": "60m"}, {"vocab_size": 5000})]
    assert plain.name == "bench-1b"
    assert [other.name for other in others] == ["bench-1b-sigma-0.2", "bench-1b-draft-60m", "bench-1b-vocab-5000"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "9b"], "error: no shape '9b'; allowed: 60m, 300m, 1b, 3b"),
        (["--size", "1b", "--formats", "q8"], "error: no format 'q8'; allowed: "),
        (["--size", "1b", "--source", "nowhere"], "error: nowhere/hf/target/config.json is missing"),
        (["--size", "1b", "--draft", "medium", "--draft-size", "60m"], "error: --draft medium cannot be expanded: "),
    ],
)
def test_the_script_says_what_is_wrong_in_one_line(arguments: list[str], message: str):
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1
    assert done.stdout == ""
