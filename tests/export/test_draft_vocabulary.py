"""Drafts whose head has a part of the vocabulary: their logits are the whole head's, the text is the target's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

pytest.importorskip("gguf", reason="the tiny models need the package gguf: scripts/run.py install export")

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.cli.main import cli
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.errors import ConfigError
from edgespec.export.check import open_engine
from edgespec.export.onnx.hub_model import open_hub
from edgespec.export.onnx.writer import DraftVocabulary, convert_hub
from edgespec.export.request import ExportRequest
from edgespec.formats.manifest import read_pair
from edgespec.formats.onnx import DATA, drafted
from edgespec.formats.onnx.drafted import LACKS
from edgespec.types import Batch
from laws import ALPHA_1E6
from lossless import PROMPTS, score_of_pairs
from table_engine import TableEngine
from tiny_checkpoints import TOKEN_IDS, write_checkpoint

DRAFT = DEMO / "hf" / "draft"
IDS = np.array(TOKEN_IDS, np.int32)
Floats = NDArray[np.float32]

pytestmark = pytest.mark.usefixtures("one_thread")


def logits(path: Path, ids: NDArray[np.int32] = IDS) -> Floats:
    with open_engine("onnx", path, 128, TEST_THREADS) as engine:
        return engine.forward(Batch.chain(ids)).copy()


def graph(source: Path, folder: Path, quant: str, vocabulary: DraftVocabulary | None = None) -> Path:
    folder.mkdir()
    return convert_hub(open_hub(source), folder, quant, vocabulary=vocabulary)


@pytest.mark.parametrize("most_runs", [64, 0], ids=["joined", "scattered"])
@pytest.mark.parametrize("quant", ["fp32", "int8", "w8a8", "int4"])
@pytest.mark.parametrize("case", ["qwen3", "gemma3"])
def test_kept_tokens_have_the_logits_of_the_whole_head(
    case: str, quant: str, most_runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rows of a product do not depend on the others."""
    monkeypatch.setattr(drafted, "MOST_RUNS", most_runs)
    source = write_checkpoint(tmp_path / case, case, final_logit_softcapping=8.0, tie_word_embeddings=False)
    vocabulary = DraftVocabulary(300)
    kept = np.array(vocabulary.applied(open_hub(source).config, source).drafted)
    whole, part = (
        logits(graph(source, tmp_path / "whole", quant)),
        logits(graph(source, tmp_path / "part", quant, vocabulary)),
    )
    assert kept.size == 300 and (np.diff(kept) > 0).all()
    assert part.shape == whole.shape
    others = np.setdiff1d(np.arange(whole.shape[1]), kept)
    assert (part[:, others] == LACKS).all()
    if quant != "w8a8":
        np.testing.assert_allclose(part[:, kept], whole[:, kept], atol=2e-6 * float(np.abs(whole).max()))
    else:
        assert np.corrcoef(part[:, kept].ravel(), whole[:, kept].ravel())[0, 1] > 0.99


def test_the_likeliest_are_those_of_a_text_then_the_lowest_ids(tmp_path: Path):
    source = write_checkpoint(tmp_path / "tiny", "smollm2")
    config = open_hub(source).config
    rare = 390  # a token that was merged late
    vocabulary = TokenizerFile(source, config.vocab_size)
    text = vocabulary.decode([rare, rare])
    counted = set(vocabulary.encode(text))
    kept = DraftVocabulary(260, text).applied(config, source).drafted
    ends = {token_id for token_id in vocabulary.end_ids if token_id < config.vocab_size}
    assert counted | ends <= set(kept)
    rest = sorted(set(kept) - counted - ends)
    assert rest == [token_id for token_id in range(400) if token_id not in counted | ends][: len(rest)]
    with pytest.raises(ConfigError, match="--draft-vocab 400: the draft has 400 tokens; give fewer"):
        DraftVocabulary(400).applied(config, source)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_joint_law_of_a_draft_that_lacks_tokens_is_the_targets(rule: str):
    target = TableEngine.random(10, order=1, seed=3, spread=1.0, context_length=4100)
    table = target.related(1.0)._table.copy()
    table[..., [1, 6, 9]] = LACKS
    drafter = ModelDrafter(TableEngine(table, order=1, context_length=4100))
    score, events = score_of_pairs(target, drafter, rule)
    assert sum(event.from_draft for event in events) > 2500
    assert not {event.token_id for event in events if event.from_draft} & {1, 6, 9}
    assert score < ALPHA_1E6


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with a draft of a quarter of its tokens, as a user makes it."""
    output = tmp_path_factory.mktemp("drafted") / "pair"
    arguments = ["--to", "onnx", "--quant", "w8a8", "--draft", str(DRAFT), "--draft-vocab", "1024", "-o", str(output)]
    made = CliRunner().invoke(cli, ["export", str(DEMO / "hf" / "target"), *arguments])
    assert made.exit_code == 0, made.output
    assert "check draft onnx: top-1 agreement" in made.stdout
    return output


@pytest.fixture(scope="module")
def model(pair: Path) -> Iterator[edgespec.Model]:
    with edgespec.load(str(pair), reproducible=True, threads=1, context_length=512) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_does_not_depend_on_the_draft(model: edgespec.Model, prompt: str, temperature: float):
    sampling, options = Sampling(temperature=temperature, seed=7), GenerateOptions(max_tokens=48, ignore_eos=True)
    plain = model.generate(prompt, sampling, dataclasses.replace(options, drafter="none"))
    for drafter, length in (("model", 2), ("model", 5), ("tree", 8), ("auto", "auto")):
        found = model.generate(prompt, sampling, dataclasses.replace(options, drafter=drafter, draft_length=length))
        assert found.token_ids == plain.token_ids
        assert found.logprobs == plain.logprobs


def test_it_drafts_and_reads_a_smaller_head(pair: Path, model: edgespec.Model, tmp_path: Path):
    options = GenerateOptions(max_tokens=96, ignore_eos=True, drafter="model", draft_length=4)
    found = model.generate(PROMPTS[0], Sampling(temperature=0.0), options)
    assert found.stats.acceptance_rate > 0.4
    whole = graph(DRAFT, tmp_path / "whole", "int8").parent / DATA
    draft = read_pair(pair).files["draft"].path.parent / DATA
    assert draft.stat().st_size - whole.stat().st_size < 1.1 * 1024 * 128  # the rows of the head, beside the embedding


def test_a_draft_in_gguf_is_reduced_too(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(PROMPTS))
    given = ["export", str(DEMO / "demo-target-q8_0.gguf"), "--draft", str(DEMO / "demo-draft-q8_0.gguf")]
    given += ["--to", "onnx", "--draft-vocab", "512", "--draft-text", str(text), "-o", str(tmp_path / "pair")]
    result = CliRunner().invoke(cli, given)
    assert result.exit_code == 0, result.output
    assert "check draft onnx: top-1 agreement" in result.stdout
    with open_engine("onnx", read_pair(tmp_path / "pair").files["draft"].path, 64, TEST_THREADS) as draft:
        (row,) = draft.forward(Batch.chain([1]))
        assert (row > LACKS).sum() == 512
        assert (row[draft.vocabulary.encode(PROMPTS[0])] > LACKS).all()


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_that_compare_distributions_run_on_it(pair: Path, rule: str):
    with edgespec.load(str(pair), drafter="model", verify=rule, threads=1, context_length=256) as model:
        options = GenerateOptions(max_tokens=64, draft_length=4, ignore_eos=True)
        stats = model.generate(PROMPTS[0], Sampling(temperature=0.8, seed=2), options).stats
        assert stats.accepted_tokens > 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft_vocab": 255}, "give 256 or more"),
        ({"draft": None}, "needs a draft with files of its own"),
        ({"exporter": "optimum"}, "edgespec's own writer"),
        ({"quants": {"gguf": "q8_0"}}, "edgespec's own writer"),
        ({"draft_vocab": None, "draft_text": Path("x")}, "give that, too"),
        ({"draft_text": Path("absent.txt")}, "--draft-text absent.txt cannot be read"),
    ],
)
def test_bad_requests_are_refused(changes: dict[str, object], said: str):
    usual = {"quants": {"onnx": "int8"}, "draft": "d", "draft_vocab": 1024}
    with pytest.raises(edgespec.errors.EdgespecError, match=said):
        ExportRequest("a", Path("b"), **(usual | changes))  # type: ignore[arg-type]


def test_more_tokens_than_there_are_is_one_line(tmp_path: Path):
    arguments = ["--to", "onnx", "--draft", str(DRAFT), "--draft-vocab", "4096", "-o", str(tmp_path / "pair")]
    for source in (DEMO / "hf" / "target", DEMO / "demo-target-q8_0.gguf"):
        draft = DRAFT if source.is_dir() else DEMO / "demo-draft-q8_0.gguf"
        arguments[3] = str(draft)
        result = CliRunner().invoke(cli, ["export", str(source), *arguments])
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1].endswith("the draft has 4096 tokens; give fewer, or omit it")
    assert list(tmp_path.iterdir()) == []
