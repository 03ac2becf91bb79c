"""The parts of an export without torch: requests, plans, workspaces, manifests, tokenizers, the comparison itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo import DEMO, change_json, changed_copy
from edgespec.errors import CapabilityError, ConfigError, ModelFileError, StateError, UsageError
from edgespec.export import source as sources
from edgespec.export.check import (
    Comparison,
    ReferenceLogits,
    check_round_trip,
    compare,
    compare_logits,
    engine_reference,
    limits_of,
    open_engine,
)
from edgespec.export.hub import card_licence, find_source, local_source, recommended_sampling
from edgespec.export.pair import workspace
from edgespec.export.request import FORMATS, ExportRequest, parse_quants
from edgespec.export.source import of_folder
from edgespec.formats.manifest import write_manifest
from tiny_graphs import export_gguf

TARGET, DRAFT = DEMO / "hf" / "target", DEMO / "hf" / "draft"


# requests


def test_quantisations_are_sorted_by_the_format_that_knows_them():
    both = FORMATS
    assert parse_quants("--quant", ["int4", "Q4_K_M"], both) == {"onnx": "int4", "gguf": "q4_k_m"}
    assert parse_quants("--quant", ["gguf=f16"], both) == {"gguf": "f16"}
    assert parse_quants("--quant", [], both) == {}
    assert parse_quants("--quant", ["q8_0"], both) == {"gguf": "q8_0"}  # which both have
    assert parse_quants("--quant", ["q4_k_m", "q8_0"], both) == {"gguf": "q4_k_m", "onnx": "q8_0"}
    assert parse_quants("--quant", ["onnx=q8_0"], both) == {"onnx": "q8_0"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exporter": "optimum"}, "is for ONNX"),
        ({"quants": {"onnx": "q8_0"}, "exporter": "optimum"}, "does not write q8_0"),
    ],
)
def test_contradictory_requests_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        ExportRequest(**{"source": "a", "output": Path("b"), "quants": {"gguf": "q8_0"}, **changes})


# plans


@pytest.mark.parametrize("quant", ["f16", "q4_k_m"])
def test_planned_sizes_are_close_and_on_the_safe_side(tmp_path, quant):
    export_gguf(TARGET, tmp_path / "x.gguf", quant)
    planned = of_folder(local_source(TARGET)).output_bytes("gguf", quant)
    size = (tmp_path / "x.gguf").stat().st_size - 300_000  # the vocabulary, small beside any real model
    assert size <= planned <= 1.15 * size


def needs(**request: Any) -> tuple[int, int]:
    """Disk and memory of an export, in bytes."""
    wanted = ExportRequest("a", Path("b"), **{"quants": {"gguf": "q8_0"}, **request})
    models = {"target": of_folder(local_source(TARGET))}
    return sources.disk_bytes(wanted, models), sources.memory_bytes(wanted, models)


def test_every_output_and_temporary_file_is_planned():
    straight, weights = needs()[0], (TARGET / "model.safetensors").stat().st_size
    assert needs(quants={"gguf": "f16"})[0] > 1.8 * straight
    assert needs(quants={"gguf": "q4_k_m"})[0] > 0.5 * straight + weights  # a 16-bit file stands between
    assert needs(quants={"gguf": "q8_0", "onnx": "int8"})[0] > 2 * straight + weights
    assert needs(quants={"onnx": "int8"}, exporter="optimum")[0] > 4 * 8_131_328  # a float32 graph does
    assert needs()[1] > needs(check=False)[1]


def test_too_little_disk_or_memory_is_refused_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "free_bytes", lambda place: 5_000_000)
    with pytest.raises(CapabilityError, match=r"not enough disk: the export needs 9 MiB in .*, 5 MiB are free"):
        sources.check_room(tmp_path / "new" / "pair", *needs(check=False))
    monkeypatch.undo()
    monkeypatch.setattr(sources, "free_memory", lambda: 300_000_000)
    with pytest.raises(CapabilityError, match=r"not enough memory: .* needs \d{3} MiB, 286 MiB are available"):
        sources.check_room(tmp_path / "pair", *needs(check=False))


# sources


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["pytorch_model.bin"], "pickled"),
        (["adapter_config.json", "adapter_model.safetensors"], "adapter"),
        (["model-00001-of-00003.safetensors"], "1 of 3"),
        (["x.gguf"], "already holds GGUF files"),
    ],
)
def test_a_folder_without_usable_weights_says_what_it_has(tmp_path, files, said):
    for name in ("config.json", *files):
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ModelFileError, match=said):
        find_source(str(tmp_path))


# manifests


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# X", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: tongyi\n---\n", "tongyi"),
        ("---\r\nlicense:\r\n- mit\r\n---\r\n", "mit"),
        ("# no front matter\nlicense: mit\n", ""),
        (None, ""),
    ],
)
def test_the_licence_is_the_model_cards(tmp_path, card, licence):
    if card is not None:
        (tmp_path / "README.md").write_bytes(card.encode())
    assert card_licence(tmp_path) == licence


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ('{"do_sample": true, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}', (0.6, 20, 1.1)),
        ('{"do_sample": true, "temperature": -1, "top_k": 20}', (None, 20, None)),
        ('{"temperature": 0.6}', (None, None, None)),
        ("not json", (None, None, None)),
    ],
)
def test_sampling_comes_from_the_generation_settings(tmp_path, settings, wanted):
    (tmp_path / "generation_config.json").write_text(settings)
    found = recommended_sampling(tmp_path)
    assert tuple(found.get(key) for key in ("temperature", "top_k", "repeat_penalty")) == wanted


# workspaces


def old_pair(output: Path) -> Path:
    output.mkdir()
    (output / "old.gguf").write_text("old")
    write_manifest(output, {"name": "old"}, ())
    return output


def test_a_replacement_that_fails_between_its_renames_is_undone(tmp_path, monkeypatch):
    output, rename = old_pair(tmp_path / "out"), Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "pair":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="Input/output error"), workspace(output, replace=True) as (pair, _):
        (pair / "target.gguf").write_text("weights")
    assert (output / "old.gguf").exists() and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_other_things_is_never_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("dear")
    with pytest.raises(UsageError, match="other files"), workspace(tmp_path / "home", replace=True):
        pass
    here = pytest.raises(UsageError, match="is the current folder or holds it")
    for output in (Path(), Path.cwd(), Path("..") / Path.cwd().name, Path("/")):
        with here, workspace(output, replace=True):
            pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is not a folder"), workspace(tmp_path / "file", replace=True):
        pass
    refused = pytest.raises(StateError, match=r"cannot be written: .*; choose another --output")
    with refused, workspace(tmp_path / "file" / "out", replace=True):
        pass


def test_a_second_export_is_refused_until_the_first_is_gone(tmp_path):
    holder = (
        "import sys; from pathlib import Path; from edgespec.export.pair import workspace\n"
        f"with workspace(Path({str(tmp_path / 'out')!r}), replace=False): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"held"
        with pytest.raises(UsageError, match="another edgespec is writing"), workspace(tmp_path / "out", replace=False):
            pass
        process.kill()
        process.wait()
    with workspace(tmp_path / "out", replace=False):
        pass
    assert not (tmp_path / ".out.export.lock").exists()


# tokenizers


def test_a_tokenizer_that_is_broken_or_loses_text_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is not a tokenizer"):
        check_round_trip(tmp_path)
    check_round_trip(TARGET)
    folder = changed_copy(tmp_path / "hf")
    change_json(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
    with pytest.raises(ModelFileError, match=r"The quick br.* became .the quick"):
        check_round_trip(folder)


# the comparison


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ReferenceLogits:
    """The draft in float32 through our own engine: what transformers says, to seven digits (see test_export_cli)."""
    path = tmp_path_factory.mktemp("reference") / "f32.gguf"
    export_gguf(DRAFT, path, "f32")
    with open_engine("gguf", path, 320, 1) as engine:
        return engine_reference(engine, "edgespec")


def exported(folder: Path, path: Path, quant: str, reference: ReferenceLogits) -> Comparison:
    export_gguf(folder, path, quant)
    with open_engine("gguf", path, 320, 1) as engine:
        return compare(reference, engine)


@pytest.mark.parametrize("quant", ["f32", "bf16", "q8_0", "q6_k", "q4_k_m"])
def test_an_honest_export_passes(tmp_path, reference, quant):
    found = exported(DRAFT, tmp_path / "x.gguf", quant, reference)
    assert found.complaint(limits_of(quant)) == ""
    assert found.num_tokens == reference.token_ids.size == 320
    assert (found.mean_kl == 0) == (quant == "f32")


@pytest.mark.parametrize("quant", ["f32", "bf16", "q8_0"])
def test_a_wrong_rotary_base_is_found(tmp_path, reference, quant):
    folder = changed_copy(tmp_path / "hf", rope_theta=20000.0)
    found = exported(folder, tmp_path / "x.gguf", quant, reference)
    assert "mean KL" in found.complaint(limits_of(quant))


def test_a_comparison_adds_up():
    """Of logits that differ by known amounts: two of four rows flip, the first of which is left out."""
    real = np.random.default_rng(0).standard_normal((4, 50), np.float32)
    real[:, 7] += 4  # a clear lead
    moved = real.copy()
    moved[[0, 2]] = np.roll(real[[0, 2]], 1, axis=1)
    p = np.exp(real[2].astype(np.float64)) / np.exp(real[2].astype(np.float64)).sum()
    wanted = (p * (real[2] - moved[2])).sum() / 3
    padded = np.pad(moved, ((0, 0), (0, 6)), constant_values=99)
    found = compare_logits(real, padded)
    assert (found.num_tokens, found.top1_agreement) == (4, pytest.approx(2 / 3))
    assert found.mean_kl == pytest.approx(wanted, rel=1e-5)
