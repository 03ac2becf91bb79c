"""Training the demo family on tiny networks and made-up data. Needs torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="training needs torch: scripts/run.py install train")
transformers: Any = pytest.importorskip("transformers", reason="targets are read by it: scripts/run.py install train")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's compiler uses its own deprecated parts
    import demo_family as family
    from trainlib import demo_network
    from trainlib import demo_texts as texts
    from trainlib.demo_network import BatchSchedule, DocumentSampler, network_config, pretrain, split_documents
    from trainlib.optimise import Muon

TINY = network_config(32, 48, layers=3, heads=2, kv_heads=1, head_dim=16, vocab_size=320)
TEXTS = [
    texts.BOS + texts.turn("user", f"find a bus to town {i}") + texts.turn("assistant", "one bus") for i in range(30)
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Compiling takes longer than all tests together and changes no result that they look at."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = np.arange(4000, dtype=np.int32) % 300 + 1
    stream[::60] = 0
    documents, schedule = split_documents(stream, 0), BatchSchedule(4096, batch_tokens=1024, lengths=((1.0, 64),))
    half = BatchSchedule(2048, batch_tokens=1024, lengths=((1.0, 64),))
    monkeypatch.setattr(BatchSchedule, "rate_factor", lambda self, seen: 1.0)
    ends = []
    for name, schedules in (("whole", [schedule]), ("halves", [half, schedule])):
        (tmp_path / name).mkdir()
        for each in schedules:
            network = pretrain(TINY, documents, {}, each, tmp_path / name, 0)
        ends.append(network.state_dict())
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


def test_the_tokenizer_keeps_marks_whole_and_tool_marks_readable() -> None:
    tokenizer = texts.train_tokenizer(TEXTS, 400)
    ids = tokenizer.encode("<|im_start|>user\n<tool_call>{}</tool_call><|im_end|>", add_special_tokens=False).ids
    assert (ids[0], ids.count(3), ids.count(4), ids[-1]) == (1, 1, 1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\n<tool_call>{}</tool_call>"
    stream = texts.encode_documents(tokenizer, TEXTS)
    assert stream.dtype == np.int32 and (stream == 0).sum() == len(TEXTS)


def test_the_stages_make_a_family(tmp_path: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "standard_library", lambda seed: (["def f(): ..."] * 3, ["def g(): ..."]))
    monkeypatch.setattr(family, "TARGET", TINY)
    monkeypatch.setattr(demo_network, "held_out_loss", lambda *_: 1.0)  # the texts are shorter than a window
    monkeypatch.setattr(family, "DOMAIN_REPEATS", {"dialogue": 20, "code": 20, "arithmetic": 20})
    sizes = {"hidden": 16, "heads": 1, "kv_heads": 1, "ffn": 32}
    monkeypatch.setattr(family, "STUDENTS", {"draft": {"layers": 1, **sizes}, "medium": {"layers": 2, **sizes}})
    run = family.Run(corpus_folder, tmp_path)
    run.train_target(16384, TEMPLATE)
    small = {"round_tokens": 128, "round_prompts": 4, "reply_tokens": 8, "window": 32, "batch_tokens": 64}
    run.distill(1, **small, held_out_prompts=2)
    out = tmp_path / "out"
    out.mkdir()
    family.pack(run, out, with_figures=False)
    from edgespec.formats.manifest import read_pair

    pair = read_pair(out)
    assert sorted(pair.files) == ["draft", "medium", "target"] and pair.banner


def test_the_sampler_depends_on_its_position_alone() -> None:
    documents = [np.arange(start, start + 50, dtype=np.int32) for start in range(0, 500, 50)]
    one, other = DocumentSampler(documents, 3), DocumentSampler(documents, 3)
    for _ in range(7):
        batch = one.batch(2, 20)
    other.position = one.position - 40
    assert torch.equal(other.batch(2, 20), batch)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon to compare with")
@pytest.mark.parametrize("shape", [(48, 16), (16, 48)])
def test_steps_of_muon_are_those_of_torch(shape: tuple[int, int]) -> None:
    """In float32, while torch's own computes in bfloat16."""
    torch.manual_seed(0)
    start = torch.randn(shape)
    gradients = [torch.randn(shape) for _ in range(5)]
    ends = []
    for kind in (Muon, torch.optim.Muon):
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], lr=0.02, weight_decay=0.05, momentum=0.95)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        ends.append(weight.detach() - start)
    assert float((ends[0] - ends[1]).norm() / ends[1].norm()) < 0.03  # bfloat16 has 8 bits
