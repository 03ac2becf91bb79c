"""Training heads with scripts/train/heads.py: target, loss, start, and inference of what was trained. Needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.drafters.base import DraftRequest
from edgespec.errors import CapabilityError
from edgespec.formats.head_file import read_head_file
from edgespec.sampling.sampler import Sampler
from tiny_checkpoints import CASES, write_checkpoint
from tiny_heads import drafter_of

torch: Any = pytest.importorskip("torch", reason="training needs torch: scripts/run.py install train")
transformers: Any = pytest.importorskip("transformers", reason="targets are read by it: scripts/run.py install train")

import heads as script  # noqa: E402
from tiny_training import write_target  # noqa: E402
from trainlib.head_network import Distance, EagleHead, Heads, MedusaHeads  # noqa: E402
from trainlib.head_texts import Texts  # noqa: E402
from trainlib.head_trainer import Trainer  # noqa: E402
from trainlib.llama import Llama, Weights  # noqa: E402

KINDS = ("eagle", "medusa")
DEPTH = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="module")
def weights(tiny: Path) -> Weights:
    return Weights(tiny, torch.float32)


def new_heads(kind: str, weights: Weights, num_inputs: int, token_ids: Any = None) -> Heads:
    torch.manual_seed(1)
    ids = torch.arange(weights.config.vocab_size) if token_ids is None else token_ids
    if kind == "medusa":
        found: Heads = MedusaHeads(weights.config, weights.head[ids], ids, num_inputs, DEPTH)
    else:
        found = EagleHead(weights.config, weights.head[ids], ids, num_inputs, 48)
    with torch.no_grad():
        for weight in found.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return found


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.split("-")[0] in ("llama", "qwen2", "qwen3", "smollm3")]
)
def test_the_target_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / case, case)
    try:
        target = Llama(Weights(folder, torch.float32), places=2, room=32, read_layers=(1,), is_scaled=False)
    except CapabilityError:
        pytest.skip("it has what this module does not compute")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 390, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True)
        features, states = target.read(ids[:, :19], torch.arange(2))
        torch.testing.assert_close(target.logits(states), wanted.logits[:, :19], atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(
            features[..., : states.shape[-1]], wanted.hidden_states[1][:, :19], atol=1e-4, rtol=1e-3
        )
        last = target.step(ids[:, 19], torch.tensor([19, 19]))
        torch.testing.assert_close(target.logits(last), wanted.logits[:, 19], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("layers", [(), (0, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_drafts_what_torch_predicts(kind: str, layers: tuple[int, ...], weights: Weights, tiny: Path) -> None:
    """The run-time goes token by token with a cache; training unrolls all drafts at once, in bfloat16."""
    size = weights.config.vocab_size
    ids = torch.arange(0, size, 2)  # the draft vocabulary
    trained = new_heads(kind, weights, len(layers), ids)
    counts = torch.zeros(size)
    counts[ids] = 1
    kept = {"heads": trained.state_dict(), "counts": counts, "said": counts, "layers": layers, "depth": DEPTH}
    probe = list(range(2, 12))
    file = script.head_file(kind, {**kept, "figures": {}}, weights, tiny, probe, (len(ids), len(ids)))
    drafter, sampler = drafter_of(file, size, layers), Sampler(Sampling(temperature=0.0), size)
    text = torch.randint(0, size, (1, 24), generator=torch.Generator().manual_seed(0))
    plain, scaled = (Llama(weights, read_layers=layers, is_scaled=flag).read(text)[0] for flag in (False, True))
    for length in (2, 5, 20):  # the pair before the pending token
        features = plain[0, :length].numpy()
        request = DraftRequest(text[0, : length + 1].numpy().astype(np.int32), DEPTH, sampler, features=features)
        drafted = drafter.draft(request).token_ids
        assert drafted.size == DEPTH
        unrolled = torch.cat((text[0, : length + 1], torch.from_numpy(drafted.astype(np.int64))))[None]
        padded = torch.nn.functional.pad(scaled[:, :length], (0, 0, 0, DEPTH))
        with torch.no_grad():
            states = trained.drafts(padded, unrolled, torch.tensor([length - 1]), 1, DEPTH)
            for token_id, found in zip(drafted.tolist(), states, strict=True):
                scores = found[0, 0] @ weights.head[ids].T
                assert float(scores.max() - scores[token_id // 2]) < 0.1 * float(scores.std()), (length, token_id)


@pytest.mark.parametrize("share", [1.0, 0.2, 0.0])
def test_the_gradient_written_by_hand_is_the_one_of_autograd(share: float) -> None:
    torch.manual_seed(0)
    rows, states = torch.randn(30, 8).bfloat16(), torch.randn(40, 8).bfloat16().float()
    wanted = torch.randn(40, 30).softmax(dim=-1)
    results = []
    for slow in (False, True):
        given = states.clone().requires_grad_()
        if slow:
            log_q = (given @ rows.float().T).log_softmax(dim=-1)
            variation = 0.5 * (log_q.exp() - wanted).abs().sum()
            loss = share * -(wanted * log_q).sum() + (1 - share) * variation
        else:
            loss, variation = Distance.apply(given, rows, wanted, share)
        (3 * loss).backward()
        results.append((loss.detach(), variation.detach(), given.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)  # logits and gradients in bfloat16


@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_an_eagle_head_starts_at_the_best_linear_prediction(layers: tuple[int, ...], weights: Weights) -> None:
    """Its layer left out, no other matrix predicts the next states better."""
    target, ids = Llama(weights, read_layers=layers), torch.arange(weights.config.vocab_size)
    drawn = np.random.default_rng(0).integers(0, 200, (12, 40)).astype(np.int32)
    texts = Texts(drawn.ravel(), np.arange(13) * 40, np.full(12, 4, np.int32), np.zeros(12, np.float32))
    head = EagleHead(weights.config, weights.head, ids, len(layers), 48)
    Trainer(head, target, ids, ids).start(texts, range(12))
    features = target.read(torch.from_numpy(drawn[:, :-1].astype(np.int64)))[0]
    last, width = features[..., -head.norm.numel() :], head.norm.numel()
    pairs = torch.cat((last[:, :-1], head.embed(torch.from_numpy(drawn[:, 1:-1].astype(np.int64)))), dim=-1)

    def error(change: Any) -> float:
        return float((pairs @ (head.fc + change).T - last[:, 1:] / head.norm).square().sum())

    with torch.no_grad():
        torch.manual_seed(0)
        best = error(0.0)
        assert all(error(0.1 * torch.randn_like(head.fc)) > best for _ in range(5))
        assert best < error(-head.fc)  # of no prediction at all
        if layers:
            fused = torch.cat((features[:, :-1] @ head.project.T, pairs[..., width:]), dim=-1)
            assert float((fused @ head.fc.T - last[:, 1:] / head.norm).square().sum()) < best


@pytest.mark.parametrize("kind", KINDS)
def test_the_stages_make_a_file_that_drafts(kind: str, tiny: Path, tmp_path: Path) -> None:
    work = ["--work", str(tmp_path / "work"), "--device", "cpu"]
    data = ["--data", str(tiny.parent / "talks.jsonl"), "--places", "16", "--room", "96", "--longest", "24"]
    assert script.main(["write", str(tiny), *work, *data, "--minutes", "0.02"]) == 0
    learn = ["--kind", kind, "--batch", "512", "--depth", "3", "--read-layers", "1", "--minutes", "0.02"]
    for _ in range(2):  # the second one goes on
        assert script.main(["train", str(tiny), *work, *learn]) == 0
    output = tmp_path / "heads.npz"
    sizes = ["--packed", "60", "--frequent", "20"]
    assert script.main(["pack", str(tiny), *work, "--kind", kind, *sizes, "-o", str(output)]) == 0
    found = read_head_file(output)
    assert (found.manifest.kind, found.manifest.depth, found.manifest.layers) == (kind, 3, (1,))
    assert found.token_ids.size == 60 and found.frequent is not None and found.frequent.size == 20
    assert str(tmp_path) not in str(found.manifest)
