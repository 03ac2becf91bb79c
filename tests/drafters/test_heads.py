"""Drafting from hidden states: losslessness, files that are wrong, damaged or another model's, costs of nothing."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import edgespec
from damage import damaged
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.cli.main import cli
from edgespec.drafters.base import DraftRequest
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.onnx.file_heads import HeadText
from edgespec.errors import CapabilityError, ModelFileError, ModelNotFound
from edgespec.formats.head_file import HeadFile, HeadManifest, read_head_file
from edgespec.platform.files import shipped_models
from edgespec.sampling.sampler import Sampler
from lossless import GREEDY, PLAIN, run_once
from table_engine import TableEngine
from tiny_gguf import Shape, write_model
from tiny_heads import KINDS, VOCABULARY, drafter_of, random_heads, request, table, table_heads, with_features, write
from trainlib.head_files import write_head_file


class Chains(TableEngine):
    """Scores no trees."""

    most_branches = 0


# -- losslessness


def test_heads_that_know_the_target_are_accepted() -> None:
    target = table(engine=Chains)
    for kind, length, least in (("medusa", 1, 0.99), ("eagle", 6, 0.99)):
        cached = with_features(target)
        drafter = drafter_of(table_heads(kind, target), VOCABULARY)
        found = run_once(cached, drafter, "coupled", length, GREEDY, 200)
        share = sum(event.from_draft for event in found) / 200
        assert share >= least * length / (length + 1) - 0.02, kind
    # with noise shared, a head that has the target's own probabilities draws the target's own tokens
    drafter = drafter_of(table_heads("medusa", target), VOCABULARY)
    found = run_once(with_features(target), drafter, "coupled", 1, PLAIN, 200)
    assert sum(event.from_draft for event in found) >= 90


# -- the drafters


@pytest.fixture(scope="module")
def tiny_engine(tiny_path: Path) -> Any:
    with LlamaCppEngine.load(tiny_path, threads=TEST_THREADS, context_length=128, reproducible=False) as engine:
        yield engine


@pytest.mark.parametrize("kind", KINDS)
def test_heads_narrower_than_the_states_draft_from_their_projection(kind: str, tiny_engine: Any) -> None:
    heads = random_heads(kind, tiny_engine, 64)
    project = np.random.default_rng(1).normal(0, 0.1, (64, 150)).astype(np.float32)  # a width that keeps float32
    wide = replace(
        heads, manifest=replace(heads.manifest, feature_size=150), arrays={**heads.arrays, "project": project}
    )
    rng = np.random.default_rng(3)
    states, text = rng.standard_normal((40, 150)).astype(np.float32), rng.integers(0, 299, 41).astype(np.int32)
    drafters = drafter_of(heads, 299), drafter_of(wide, 299)
    for length in (4, 5, 21, 40):
        given = text[: length + 1]
        ours = drafters[0].draft(request(given, states[:length] @ project.T, most=3, temperature=0.9))
        theirs = drafters[1].draft(request(given, states[:length], most=3, temperature=0.9))
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.evidence, theirs.evidence, atol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_of_more_tokens_than_the_heads_know(kind: str, tiny_engine: Any) -> None:
    """What pads a vocabulary is never drafted, and is no harm in a text or in the settings."""
    states, text = np.ones((6, 64), np.float32), np.array([0, 1, 2, 999, 3, 700, 4], np.int32)
    drafter = drafter_of(random_heads(kind, tiny_engine, 64), 1000)
    for settings in (GREEDY, Sampling(temperature=1.0, repeat_penalty=1.2, logit_bias={998: 3.0, 5: 1.0})):
        asked = DraftRequest(text, 3, Sampler(settings, 1000), features=states)
        found = drafter.draft(asked).token_ids
        assert found.size == 3 and found.max() < 299


# -- files


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("storage", "tolerance"), [("int8", 0.01), ("f16", 0.001)])
def test_a_file_keeps_the_heads(kind: str, storage: str, tolerance: float, tiny_engine: Any, tmp_path: Path) -> None:
    """With a projection of wider states, too; a file of before there were such needs none."""
    path, heads = tmp_path / "heads.npz", random_heads(kind, tiny_engine, 64)
    project, probe = np.eye(64, 96, dtype=np.float32), np.ones((8, 96), np.float32)
    manifest, arrays = replace(heads.manifest, feature_size=96), {**heads.arrays, "project": project}
    for given in (replace(heads, manifest=manifest, arrays=arrays, probe_states=probe), heads):
        write_head_file(path, given, storage)
        found = read_head_file(path)
        assert found.manifest == given.manifest and found.probe_states.shape == given.probe_states.shape
        assert found.arrays.keys() == given.arrays.keys()
        for name, array in given.arrays.items():
            np.testing.assert_allclose(found.arrays[name], array, atol=tolerance * np.abs(array).max())
        np.testing.assert_array_equal(found.token_ids, heads.token_ids)
    rewritten(path, lambda manifest, _: manifest.pop("feature_size"))
    assert read_head_file(path).manifest == heads.manifest
    assert list(tmp_path.iterdir()) == [path]


def test_no_damage_passes_for_heads_and_none_ends_in_a_traceback(tiny_engine: Any, tmp_path: Path) -> None:
    path, rng = tmp_path / "heads.npz", random.Random(0)
    write_head_file(path, random_heads("eagle", tiny_engine, 64, draft_vocabulary=16))
    whole, intact, refused = path.read_bytes(), read_head_file(path), 0
    for _ in range(150):
        path.write_bytes(damaged(whole, rng))
        try:
            found = read_head_file(path)
        except ModelFileError as exc:
            refused += 1
            assert "\n" not in str(exc)
        else:  # a bit that means nothing, as in a time stamp
            assert found.manifest == intact.manifest
            assert all(np.array_equal(found.arrays[name], array) for name, array in intact.arrays.items())
    assert refused > 120
    for wrong in (b"", b"no archive", archive(3), archive(2**50), archive(3, method=12)):
        path.write_bytes(wrong)
        with pytest.raises(ModelFileError, match=r"heads\.npz is not a heads file, or it is damaged"):
            read_head_file(path)


def archive(size: int, method: int = 0) -> bytes:
    """A zip file of an array in the manifest's place, which claims this size and this compression."""
    array, made = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "<f4", "fortran_order": False, "shape": (size,)})
    with zipfile.ZipFile(made, "w") as out:
        out.writestr("manifest.npy", array.getvalue() + bytes(12))
    found = bytearray(made.getvalue())
    for mark, at in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        place = found.find(mark) + at
        found[place : place + 2] = struct.pack("<H", method)
    return bytes(found)


def rewritten(path: Path, change: Any) -> None:
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    manifest = json.loads(arrays["manifest"].tobytes())
    change(manifest, arrays)
    if "manifest" in arrays:
        arrays["manifest"] = np.frombuffer(json.dumps(manifest).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    path.write_bytes(buffer.getvalue())


@pytest.mark.parametrize(
    ("change", "said"),
    {
        "no manifest": (lambda m, a: a.pop("manifest"), "not a heads file"),
        "another format": (lambda m, a: m.update(format=9), "another format"),
        "unknown key": (lambda m, a: m.update(colour="red"), "unknown way"),
        "unknown kind": (lambda m, a: m.update(kind="hydra"), "unknown way .*'hydra'.*kind"),
        "text for a size": (lambda m, a: m.update(depth="3"), "unknown way .*int.*depth"),
        "size out of range": (lambda m, a: m.update(hidden_size=0), "unknown way .*>= 1.*hidden_size"),
        "states of no size": (lambda m, a: m.update(feature_size=-1), "unknown way .*>= 0.*feature_size"),
        "text for their size": (lambda m, a: m.update(feature_size="64"), "unknown way .*int.*feature_size"),
        "no projection": (lambda m, a: m.update(feature_size=96), r"project must be \[64, 96\], there is nothing"),
        "other sizes": (lambda m, a: m.update(hidden_size=32), "fc must be"),
        "uneven heads": (lambda m, a: m.update(kv_heads=3), "do not fit together"),
        "matrix gone": (lambda m, a: a.pop("q_proj"), "there is nothing"),
        "matrix turned": (lambda m, a: a.update(fc=a["fc"].T.copy()), "fc must be"),
        "not a number": (lambda m, a: a["norm"].fill(np.nan), "not numbers"),
        "ids out of range": (lambda m, a: a["token_ids"].fill(299), "outside the vocabulary"),
        "ids out of order": (lambda m, a: a.update(token_ids=a["token_ids"][::-1].copy()), "out of order"),
        "ids are floats": (lambda m, a: a.update(token_ids=a["token_ids"].astype(np.float32)), "list of token ids"),
        **{
            f"layers {layers}": (lambda m, a, layers=layers: m.update(layers=layers, feature_size=66), "layers|feature")
            for layers in ([2, 1], [-1], ["1"], [1, 1], [0.5], [1, 2, 3])
        },
        "objects": (lambda m, a: a.update(norm=np.array(["x"] * 64)), "norm must be"),
    }.values(),
)  # fmt: skip
def test_a_file_that_does_not_fit_itself_is_refused(change: Any, said: str, tiny_engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "heads.npz"
    write_head_file(path, random_heads("eagle", tiny_engine, 64, draft_vocabulary=16))
    rewritten(path, change)
    with pytest.raises(ModelFileError, match=said):
        read_head_file(path)


def test_heads_of_another_target_are_refused(tiny_path: Path, other_tiny_path: Path, tmp_path: Path) -> None:
    """Another one of the same sizes is told by its states; one of other sizes by these."""
    with LlamaCppEngine.load(tiny_path, threads=TEST_THREADS, context_length=64) as engine:
        path = write(random_heads("eagle", engine, 64), tmp_path / "heads.npz")
    options = {"drafter": "eagle", "heads": path, "threads": TEST_THREADS, "context_length": 64}
    edgespec.load(str(tiny_path), **options).close()
    wider = write_model(tmp_path / "wider.gguf", Shape(width=128))
    for wrong in (other_tiny_path, wider, DEMO / "demo-target-q8_0.gguf"):
        with pytest.raises(ModelFileError, match="heads for another target"):
            edgespec.load(str(wrong), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_are_not_there_are_missed_by_name(kind: str, tiny_path: Path, tmp_path: Path) -> None:
    options = {"threads": TEST_THREADS, "context_length": 64}
    with pytest.raises(CapabilityError, match=f"drafter '{kind}' needs a heads file"):
        edgespec.load(str(tiny_path), drafter=kind, **options)
    with pytest.raises(ModelNotFound, match="scripts/train/heads"):
        edgespec.load(str(tiny_path), drafter=kind, heads=tmp_path / "none.npz", **options)
    model = edgespec.load(str(tiny_path), drafter="ngram", **options)
    with model, pytest.raises(CapabilityError, match="heads="):
        model.generate("ab", GREEDY, GenerateOptions(max_tokens=2, drafter=kind))
    with LlamaCppEngine.load(tiny_path, threads=TEST_THREADS, context_length=64) as engine:
        other = KINDS[1 - KINDS.index(kind)]
        path = write(random_heads(other, engine, 64), tmp_path / "heads.npz")
    with pytest.raises(CapabilityError, match=f"holds {other} heads"):
        edgespec.load(str(tiny_path), drafter=kind, heads=path, **options)


def test_auto_leaves_a_pairs_own_heads_alone_beside_its_draft_model() -> None:
    with edgespec.load("demo", engine="llamacpp", threads=TEST_THREADS) as model:
        assert "model" in model.drafters.names and not {*KINDS} & set(model.drafters.names)


def test_heads_read_the_inputs_of_their_layers_among_those_given() -> None:
    """The target may give more layers than these heads read, for other heads."""
    target = table(engine=Chains)
    plain = table_heads("eagle", target)
    size = plain.manifest.hidden_size
    project = np.concatenate((np.zeros((size, 2 * size), np.float32), np.eye(size, dtype=np.float32)), axis=1)
    project[0, 0] = project[1, size] = 0.5
    manifest = replace(plain.manifest, layers=(3, 7), feature_size=0)
    assert manifest.feature_size == 3 * size
    heads = replace(plain, manifest=manifest, arrays={**plain.arrays, "project": project})
    rng = np.random.default_rng(0)
    third, fifth, seventh, last = 10 * rng.standard_normal((4, 6, size)).astype(np.float32)
    own = drafter_of(heads, VOCABULARY, (3, 7))._head.encode(np.concatenate((third, seventh, last), axis=1))
    given = np.concatenate((third, fifth, seventh, last), axis=1)
    kept = given.copy()
    np.testing.assert_array_equal(drafter_of(heads, VOCABULARY, (3, 5, 7))._head.encode(given), own)
    np.testing.assert_array_equal(given, kept)  # which other heads read too
    # inputs of layers count by their direction, the last state as it is
    scaled = np.concatenate((3 * third, 5 * seventh, last), axis=1)
    np.testing.assert_allclose(drafter_of(heads, VOCABULARY, (3, 7))._head.encode(scaled), own, rtol=1e-4, atol=1e-4)
    expected = last.copy()
    expected[:, 0] += 0.5 * third[:, 0] / np.sqrt((third**2).mean(1))
    expected[:, 1] += 0.5 * seventh[:, 0] / np.sqrt((seventh**2).mean(1))
    np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-4)


def test_eagle_reads_the_end_of_a_long_prompt_only(tiny_engine: Any) -> None:
    drafter = drafter_of(random_heads("eagle", tiny_engine, 64), 299)
    rng = np.random.default_rng(3)
    states, text = rng.standard_normal((512, 64)).astype(np.float32), rng.integers(0, 299, 4000).astype(np.int32)
    for length, start in ((2000, 1744), (2001, 1744), (2300, 2044), (3990, 3734)):  # the third time too much is new
        assert drafter.num_uncached(text[: length + 1]) == (2 if length == 2001 else 256)
        drafter.draft(request(text[: length + 1], states))
        assert drafter._head.start == start


# -- heads that always score frequent tokens only: the others are drafted once they occurred, in every kind of draft


SIZE = 1000


def cut_heads(num_frequent: int = 8) -> HeadFile:
    """Heads with a vocabulary of every second token, of which the first `num_frequent` are frequent."""
    manifest = HeadManifest("eagle", 3, 16, SIZE, "random", "-", heads=2, kv_heads=1, head_dim=4, ffn=8, scale=0.5)
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in manifest.shapes().items()}
    ids = np.arange(0, SIZE, 2, dtype=np.int32)
    vocabulary = rng.standard_normal((ids.size, 16)).astype(np.float16).astype(np.float32)
    frequent = np.arange(num_frequent, dtype=np.int32)
    return HeadFile(manifest, arrays, vocabulary, ids, ids[:4], np.zeros((4, 16), np.float32), frequent)


def logits_of(scored: HeadText, heads: HeadFile, states: np.ndarray) -> np.ndarray:
    frequent = (states @ heads.frequent_rows.T) * np.float32(heads.manifest.scale)
    return scored.logits(states, frequent)[0].copy()


def test_a_token_is_scored_from_its_first_occurrence_on() -> None:
    heads = cut_heads()
    scored = HeadText(heads, SIZE)
    states = np.random.default_rng(1).standard_normal((1, 16)).astype(np.float32)
    exact = np.full(SIZE, -1e30, np.float32)
    exact[heads.token_ids] = states[0] @ heads.vocabulary.T * 0.5
    expected = set(range(0, 16, 2))
    text = np.array([3, 500, 7], np.int32)
    for new in ([], [500, 2, 501], [998, 500], list(range(0, SIZE, 2))):  # 501 and 3 are not in the vocabulary
        text = np.concatenate((text, np.array(new, np.int32)))
        scored.follow(text)
        expected |= {int(token) for token in text if token % 2 == 0}
        found = logits_of(scored, heads, states)
        assert set(np.flatnonzero(found > -1e29)) == expected
        np.testing.assert_allclose(found[sorted(expected)], exact[sorted(expected)], rtol=1e-5, atol=1e-5)
    scored.begin()  # another text: all of it is forgotten
    assert set(np.flatnonzero(logits_of(scored, heads, states) > -1e29)) == set(range(0, 16, 2))
    scored.follow(text[:2])
    scored.follow(text[:1])  # shorter: another text, too
    assert 500 not in np.flatnonzero(logits_of(scored, heads, states) > -1e29)


@pytest.mark.parametrize("branches", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_whole_vocabulary_where_all_tokens_occurred(kind: str, branches: int) -> None:
    target = table()
    whole = table_heads(kind, target)
    cut = replace(whole, frequent=np.array([1, 4], np.int32))
    rng = np.random.default_rng(0)
    states = rng.standard_normal((30, VOCABULARY)).astype(np.float32)
    text = np.concatenate((np.arange(VOCABULARY), rng.integers(0, VOCABULARY, 21))).astype(np.int32)
    asked = request(text, states)._replace(max_branches=branches)
    drafts = [drafter_of(heads, VOCABULARY).draft(asked) for heads in (whole, cut)]
    assert list(drafts[0].token_ids) == list(drafts[1].token_ids)
    assert list(drafts[0].parents) == list(drafts[1].parents)
    # before they occurred only the frequent ones can be drafted
    drafter = drafter_of(cut, VOCABULARY)
    early = drafter.draft(request(np.full(31, 4, np.int32), states)._replace(max_branches=branches))
    assert set(early.token_ids.tolist()) <= {1, 4}


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_plain_decoding(kind: str) -> None:
    target = table()
    heads = replace(table_heads(kind, target), frequent=np.array([1, 4], np.int32))
    plain = run_once(with_features(target), None, "coupled", 0, GREEDY, 200)
    found = run_once(with_features(target), drafter_of(heads, VOCABULARY), "coupled", 3, GREEDY, 200)
    assert [event.token_id for event in found] == [event.token_id for event in plain]
    assert sum(event.from_draft for event in found) > 40


def test_the_file_keeps_them_and_refuses_damage(tmp_path: Path) -> None:
    heads = cut_heads()
    write_head_file(tmp_path / "heads.npz", heads)
    found = read_head_file(tmp_path / "heads.npz")
    assert found.frequent is not None and heads.frequent is not None
    assert np.array_equal(found.frequent, heads.frequent) and len(found.frequent_rows) == 8
    for wrong in ([3, 1], [0, 500], [-1, 2], []):
        write_head_file(tmp_path / "wrong.npz", replace(heads, frequent=np.array(wrong, np.int32)))
        with pytest.raises(ModelFileError):
            read_head_file(tmp_path / "wrong.npz")


# -- heads that do not fit: an EAGLE-3 head as published, which llama.cpp converts, and heads of another model


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "a head"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_the_error_says_what_converts_it(head: Path) -> None:
    exported = CliRunner().invoke(cli, ["export", str(head), "--to", "onnx", "--no-check"])
    assert exported.exit_code == 2, exported.output
    assert "is a LlamaForCausalLMEagle3; supported for ONNX by" in exported.stderr
    assert "convert_hf_to_gguf.py knows more of them" in exported.stderr


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_heads_that_read_layers_of_a_deeper_model_are_refused(engine: str) -> None:
    heads = shipped_models() / "smollm2" / "eagle.npz"
    arguments = ["generate", "demo", "--engine", engine, "--heads", str(heads), "-p", "x", "-n", "1"]
    found = CliRunner().invoke(cli, arguments)
    assert found.exit_code == 2 and "the heads read the input of layer 14" in found.stderr
    assert "give heads that were made for" in found.stderr and "edgespec export" not in found.stderr
