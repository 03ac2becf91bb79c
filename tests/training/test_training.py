"""Training code on tiny networks and made-up data: schedules, resuming, distilling, measuring. Needs torch."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo_training import corpus
from edgespec.bench import prompts as datasets
from edgespec.formats.manifest import read_pair

torch = pytest.importorskip("torch", reason="training needs torch: scripts/run.py install train")
pytest.importorskip("tokenizers", reason="training needs tokenizers: scripts/run.py install train")
pytest.importorskip("tqdm", reason="training needs tqdm: scripts/run.py install train")

import llama_reference  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's compiler uses its own deprecated parts
    from demo_training import distill as distilling
    from demo_training import edits
    from demo_training import pretrain as pretraining
    from demo_training.evaluate import acceptance, early_exit_agreement, write_continuations
    from demo_training.generation import BatchDecoder, generate
    from demo_training.network import Network, NetworkShape
    from demo_training.pretrain import BatchSchedule, DocumentSampler, layer_dropout_rates, pretrain
    from demo_training.vocabulary import encode_documents, train_tokenizer

TINY = NetworkShape(96, 32, 48, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16)


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Compiling takes longer than all tests together and changes no result that they look at."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def tiny_network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    network = Network(TINY).eval()
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim == 2:
                weight.mul_(8)  # the initial weights are so small that every distribution is flat
    return network


def random_stream(size: int, seed: int = 0) -> Any:
    """Token ids with a rule to learn: mostly the last one plus 3; id 0 begins a document now and then."""
    rng = np.random.default_rng(seed)
    steps = np.where(rng.random(size) < 0.9, 3, rng.integers(1, 90, size))
    ids = (np.cumsum(steps) % 95 + 1).astype(np.int32)
    ids[::60] = 0
    return ids


def test_the_network_is_a_llama():
    network = tiny_network()
    ids = [0, 5, 95, 7, 7, 31]
    config = TINY.hf_config(64, {})
    weights = {name: value.double().numpy() for name, value in network.state_dict().items()}
    with torch.no_grad():
        ours = network(torch.tensor([ids]))[0].numpy()
    assert np.abs(ours - llama_reference.logits(weights, config, ids)).max() < 1e-4


def test_a_cached_step_equals_the_full_pass():
    network = tiny_network()
    ids = torch.from_numpy(random_stream(24).astype(np.int64)).view(2, 12)
    past: list[list[Any]] = [[] for _ in range(TINY.num_layers)]
    with torch.no_grad():
        whole = network(ids)
        first, _ = network.hidden(ids[:, :11], past=past)
        last, _ = network.hidden(ids[:, 11:], past=past)
        assert torch.allclose(network.logits(torch.cat((first, last), dim=1)), whole, atol=1e-4)
        decoder = BatchDecoder(network, rows=2, capacity=12)
        decoder.step(ids[:, :11])
        assert torch.allclose(decoder.step(ids[:, 11:]), whole[:, -1], atol=0.05 * whole.std().item())


def test_generation_is_greedy_at_zero_and_seeded_above():
    network = tiny_network()
    prompts = torch.tensor([[0, 4, 7]] * 4)
    temperatures = torch.tensor([0.0, 0.0, 1.0, 1.0])
    text = generate(network, prompts, 20, temperatures, seed=3)
    assert torch.equal(text, generate(network, prompts, 20, temperatures, seed=3))
    assert torch.equal(text[0], text[1]) and not torch.equal(text[2], text[3])
    assert torch.equal(text[:, :3], prompts)
    with torch.no_grad():
        chosen = network(text[:1, :-1]).argmax(dim=-1)[0, 2:]
    assert (chosen == text[0, 3:]).float().mean() > 0.8  # bfloat16 may turn a tie


def test_the_learning_rate_warms_up_holds_and_decays():
    schedule = BatchSchedule(total_tokens=1000)
    assert schedule.rate_factor(10) == pytest.approx(0.5)
    assert [schedule.rate_factor(tokens) for tokens in (20, 300, 650)] == [1.0, 1.0, 1.0]
    assert schedule.rate_factor(825) == pytest.approx(0.5)
    assert schedule.rate_factor(1000) == 0.01
    assert [schedule.length_at(tokens) for tokens in (0, 700, 990, 1000)] == [512, 1024, 2048, 2048]


def test_layer_dropout_rises_with_depth():
    rates = layer_dropout_rates(9, 0.1)
    assert rates[0] == 0.0 and rates[-1] == pytest.approx(0.1)
    assert all(later > earlier for earlier, later in itertools.pairwise(rates))


def test_the_sampler_depends_on_its_position_alone():
    documents = [np.full(n, n, np.int32) for n in range(1, 40)]
    whole = DocumentSampler(documents, seed=1)
    batches = [whole.batch(2, 50) for _ in range(12)]
    resumed = DocumentSampler(documents, seed=1)
    for _ in range(5):
        resumed.batch(2, 50)
    again = DocumentSampler(documents, seed=1)
    again.position = resumed.position
    assert torch.equal(again.batch(2, 50), batches[5])
    assert not torch.equal(batches[0], batches[7])  # another epoch, another order


def tiny_run(work: Path, total: int, **options: Any) -> Any:
    schedule = BatchSchedule(total, batch_tokens=128, lengths=((1.0, 64),))
    documents = pretraining.split_documents(random_stream(4000), 0)
    return pretrain(TINY, documents, {"d": random_stream(2000, seed=9)}, schedule, work, seed=0, **options)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = iter(range(100))

    def interrupt(*arguments: Any, **options: Any) -> float:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return 1.0

    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    whole = tiny_run(tmp_path / "whole", 1280)
    monkeypatch.setattr(pretraining, "held_out_loss", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(tmp_path / "broken", 1280, save_every_s=0.0)
    resumed = tiny_run(tmp_path / "broken", 1280)
    for ours, theirs in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_loss_goes_down(tmp_path: Path):
    tiny_run(tmp_path, 20_000, save_every_s=0.5)
    rows = (tmp_path / "target.csv").read_text().splitlines()
    assert rows[0].startswith("tokens,loss,tokens_per_s,held_out_d")
    assert float(rows[-1].split(",")[3]) < 0.6 * np.log(TINY.vocab_size)


@pytest.fixture
def tiny_students(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = NetworkShape(96, 16, 32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)
    monkeypatch.setattr(distilling, "STUDENTS", {"draft": shape})


def tiny_plan(total: int) -> distilling.DistillPlan:
    return distilling.DistillPlan(
        BatchSchedule(total, batch_tokens=512, lengths=((1.0, 64),)),
        round_tokens=4096,
        generated_per_round=4096,
        generated_length=64,
    )


def test_distilling_brings_the_student_to_the_target(tmp_path: Path, tiny_students: None):
    tiny_run(tmp_path, 12_000)
    domains = ("dialogue", "code", "arithmetic")
    streams = {domain: random_stream(6000, seed) for seed, domain in enumerate(domains)}
    held_out = {"dialogue": random_stream(9000, 7)}
    networks = distilling.distill(TINY, streams, held_out, 0, tiny_plan(24_576), tmp_path, seed=0)
    header, *rows = [line.split(",") for line in (tmp_path / "distill.csv").read_text().splitlines()]
    agreements = [float(row[header.index("agreement_dialogue_draft")]) for row in rows]
    assert len(rows) == 6 and agreements[-1] > max(0.5, agreements[0])
    saved = torch.load(tmp_path / "distill.pt", weights_only=True)
    assert saved["counters"][0] == 24_576
    again = distilling.distill(TINY, streams, held_out, 0, tiny_plan(24_576), tmp_path, seed=0)
    for ours, theirs in zip(networks["draft"].parameters(), again["draft"].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_student_equal_to_the_target_is_always_accepted():
    target = tiny_network()
    written = write_continuations(target, [[0, 5, 8], [0, 90]], 24, bos_id=0, seed=1)
    assert len(written) >= 4 and all(0 not in c.token_ids[c.start :].tolist() for c in written)
    same = acceptance(target, target, written, turn_end_id=2)
    assert (same.greedy, same.reply, same.coupled) == (1.0, 1.0, 1.0) and same.rejection == pytest.approx(1.0)
    other = acceptance(target, tiny_network(seed=5), written, turn_end_id=2)
    assert other.greedy < 0.5 and other.rejection < 0.7 and other.coupled < 0.7
    exits = early_exit_agreement(target, written)
    assert len(exits) == TINY.num_layers - 1 and all(0.0 <= share <= 1.0 for share in exits)


def test_packing_writes_a_pair_that_the_registry_reads(
    tmp_path: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("matplotlib", reason="packing draws curves: scripts/run.py install train")
    pytest.importorskip("gguf", reason="packing converts: scripts/run.py install train")
    pytest.importorskip("onnxruntime_genai", reason="packing exports: scripts/run.py install export")
    from demo_training import pack as packing
    from demo_training import pipeline

    train, _ = corpus.arithmetic(corpus_folder / datasets.GSM8K_FILE)
    tokenizer = train_tokenizer(train, 320)
    shape = NetworkShape(320, 32, 64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    networks = {name: Network(shape) for name in ("target", "draft", "medium")}
    out = tmp_path / "out"
    out.mkdir()
    (out / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    log = "tokens,loss,held_out_dialogue,held_out_code,held_out_arithmetic\n1,2,3,4,5\n2,1,2,3,4\n"
    (tmp_path / "target.csv").write_text(log)
    names = [f"agreement_{d}_{s}" for s in ("draft", "medium") for d in ("dialogue", "code", "arithmetic")]
    (tmp_path / "distill.csv").write_text("tokens," + ",".join(names) + "\n1,.1,.2,.3,.4,.5,.6\n2,.2,.3,.4,.5,.6,.7\n")
    figures = {"held_out_loss": {"target": {"dialogue": 1.5}}, "early_exit": {"by_layer": [0.5, 0.75]}}
    monkeypatch.setattr(pipeline.Run, "tokenizer", lambda run: tokenizer)
    monkeypatch.setattr(pipeline.Run, "load_networks", lambda run: networks)
    monkeypatch.setattr(packing, "measure", lambda run, given: figures)
    packing.pack(pipeline.Run(corpus_folder, tmp_path), out)
    pair = read_pair(out)
    assert (pair.name, sorted(pair.files), dict(pair.figures)) == ("demo", ["draft", "medium", "target"], figures)
    assert dict(pair.recommended) == packing.RECOMMENDED
    assert (out / "curves.png").stat().st_size > 10_000 and (out / "hf" / "draft" / "model.safetensors").is_file()
    assert not list(out.rglob("*.tmp"))


def test_evaluation_prompts_end_where_the_assistant_begins(corpus_folder: Path):
    pytest.importorskip("matplotlib", reason="packing draws curves: scripts/run.py install train")
    from demo_training.pack import evaluation_prompts

    documents = corpus.dialogues(corpus_folder / datasets.SGD_DEV_FILE, seed=0)
    tokenizer = train_tokenizer(documents, 320)
    prompts = evaluation_prompts(tokenizer, documents, 4)
    texts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
    assert len(texts) == 4 and all(text.endswith("<|im_start|>assistant\n") for text in texts)


def test_the_tokenizer_keeps_marks_whole_and_tool_marks_readable():
    texts = [corpus.BOS + corpus.turn("user", "find a bus to fresno") + corpus.turn("assistant", "one bus")] * 5
    tokenizer = train_tokenizer(texts, 400)
    ids = tokenizer.encode("<|im_start|>user\n<tool_call>{}</tool_call><|im_end|>", add_special_tokens=False).ids
    assert (ids[0], ids.count(3), ids.count(4), ids[-1]) == (1, 1, 1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\n<tool_call>{}</tool_call>"
    stream = encode_documents(tokenizer, texts)
    assert stream.dtype == np.int32 and (stream == 0).sum() == 5


def test_an_edit_says_its_text_again_with_the_new_word_alone():
    text = "def count_words(lines):\n    return sum(len(line.split()) for line in lines)"
    renamed = 0
    for seed in range(20):
        document = edits.edit_document(text, ["harness"], random.Random(seed))
        _, request, answer = document.split(corpus.TURN_START)
        content = answer.removeprefix("assistant\n").removesuffix(corpus.TURN_END + "\n")
        content = content.removeprefix("```python\n").removesuffix("\n```")
        assert text in request
        renamed += content != text
        assert content == text or (content.count("harness") >= 1 and len(content.split()) == len(text.split()))
    assert 10 <= renamed <= 19


def test_a_repeated_run_can_be_foreseen_from_its_second_time_on():
    known = np.arange(50, 90, dtype=np.int32)
    for seed in range(8):
        found = edits.repeated_run(known, range(10, 60), 0, np.random.default_rng(seed)).tolist()
        assert found[0] == 0 and min(found[1:]) >= 10 and max(found) < 90
        halves = [(len(found) - 1) // times for times in (2, 3)]
        assert any(found[1 : 1 + size] == found[1 + size : 1 + 2 * size] for size in halves)


def test_copying_is_taught_on_from_the_shipped_weights(
    tmp_path: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("matplotlib", reason="packing draws curves: scripts/run.py install train")
    pytest.importorskip("gguf", reason="packing converts: scripts/run.py install train")
    from safetensors.torch import load_file

    from demo_training import pack as packing
    from demo_training import pipeline

    shape = NetworkShape(320, 32, 64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
    few = list(itertools.islice(datasets.library_functions(), 8))
    for module in (corpus, edits):
        monkeypatch.setattr(module, "library_functions", lambda is_wanted: (f for f in few if is_wanted(f[0])))
    monkeypatch.setattr(corpus, "standard_library", lambda seed: (["a"], ["b"]))
    monkeypatch.setattr(pretraining, "held_out_loss", lambda *_: 1.0)
    monkeypatch.setattr(pipeline, "TARGET", shape)
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    documents = corpus.dialogues(corpus_folder / datasets.SGD_DEV_FILE, seed=0)
    packing.save_hf_model(Network(shape), train_tokenizer(documents, 320), "{{ messages }}", shipped / "hf" / "target")
    packing.pack_edits(pipeline.Run(corpus_folder, tmp_path), shipped, 8192)
    before, after = (load_file(f / "model.safetensors") for f in (shipped / "hf" / "target", tmp_path / "edits" / "hf"))
    moved = [float((after[name] - before[name]).abs().mean() / before[name].abs().mean()) for name in before]
    assert 0 < max(moved) < 1, "it went on from the shipped weights"
    assert (tmp_path / "edits" / "hf" / "tokenizer.json").is_file()
