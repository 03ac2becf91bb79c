"""Training heads (needs torch): the loss against a reference, resuming, and numpy inference of the trained heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tiny_heads import drafter_of

pytest.importorskip("torch", reason="learning needs torch: scripts/run.py install train")
pytest.importorskip("transformers", reason="targets are read by transformers: scripts/run.py install train")
pytest.importorskip("tokenizers", reason="texts need tokenizers: scripts/run.py install train")

import torch
import transformers

from edgespec.cli import main as cli_main
from edgespec.config.options import Sampling
from edgespec.drafters.base import DraftRequest
from edgespec.errors import CapabilityError, ConfigError
from edgespec.export.training.heads import build_heads_trainer, head_file, train_heads
from edgespec.export.training.heads_loss import DraftLoss, target_distributions
from edgespec.export.training.heads_request import HeadsRequest, heads_shape
from edgespec.export.training.heads_start import start_at_least_squares
from edgespec.export.training.heads_trainer import (
    LATER_WEIGHT,
    STATE_WEIGHT,
    HeadsTrainer,
    head_scale,
    last_states,
    states_of,
)
from edgespec.export.training.inherit import load_target
from edgespec.export.training.preparation import prepare
from edgespec.export.training.request import flag
from edgespec.formats.head_file import read_head_file
from edgespec.sampling import Sampler
from tiny_training import nothing, write_target

KINDS = ("medusa", "eagle")
SMALL: dict[str, Any] = {
    "depth": 3,
    "rounds": 3,
    "round_tokens": 512,
    "round_prompts": 6,
    "reply_tokens": 16,
    "window": 32,
    "batch_tokens": 128,
    "held_out_prompts": 4,
    "patience": 9,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


def asked(target: Path, output: Path, kind: str, **changes: Any) -> HeadsRequest:
    return HeadsRequest(target, output, (target.parent / "talks.jsonl",), kind=kind, **{**SMALL, **changes})


def run(request: HeadsRequest, advance: Any = nothing) -> Any:
    prepared = prepare(request, "", heads_shape)
    return train_heads(prepared, prepared.open_journal(), nothing, advance)


def trainer_of(target: Path, kind: str, **changes: Any) -> HeadsTrainer:
    return build_heads_trainer(prepare(asked(target, target / "unused", kind, **changes), "", heads_shape))[0]


def shaken(trainer: HeadsTrainer) -> HeadsTrainer:
    """Weights that are neither zero nor learnt."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in trainer.student.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return trainer


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_makes_a_file_that_drafts(kind: str, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "heads.npz"
    options = [f"{flag(name)}={value}" for name, value in {**SMALL, "round_tokens": 4096}.items()]
    data = ["--data", str(tiny.parent / "talks.jsonl"), "-o", str(output), "--kind", kind]
    done = CliRunner().invoke(cli_main.cli, ["train-heads", str(tiny), *data, *options])
    assert done.exit_code == 0, done.stderr
    assert f"--heads {output} --drafter {kind}" in done.stdout and "round 3: acceptance" in done.stderr
    heads = read_head_file(output)
    assert (heads.manifest.kind, heads.manifest.depth, heads.manifest.hidden_size) == (kind, 3, 32)
    assert len(heads.manifest.target_sha256) == 64 and str(tmp_path) not in str(heads.manifest)
    untrained, *_, last = [line for line in done.stderr.splitlines() if line.startswith("round")]
    before, after = (float(line.split("acceptance ")[1][:5]) for line in (untrained, last))
    assert after > before + 0.02, done.stderr
    assert not output.with_name("heads.npz.partial").exists()
    again = CliRunner().invoke(cli_main.cli, ["train-heads", str(tiny), *data, *options])
    assert again.exit_code == 2 and "already exists" in again.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_gives_the_heads_of_one_that_was_not(kind: str, tiny: Path, tmp_path: Path) -> None:
    run(asked(tiny, tmp_path / "whole.npz", kind))
    whole = read_head_file(tmp_path / "whole.npz")
    calls: list[int] = []
    run(asked(tiny, tmp_path / "counted.npz", kind), lambda *_: calls.append(1))
    for stop in range(2, len(calls), 5):
        request, left = asked(tiny, tmp_path / f"{stop}.npz", kind), stop

        def until(*_: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(request, until)
        assert not request.output.exists()
        run(request)
        found = read_head_file(request.output)
        assert found.manifest == whole.manifest
        assert all(np.array_equal(found.arrays[name], array) for name, array in whole.arrays.items())


@pytest.mark.parametrize("changes", [{}, {"draft_vocabulary": 40}, {"read_layers": (0, 1)}])
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_drafts_what_torch_predicts(kind: str, changes: dict[str, Any], tiny: Path) -> None:
    """The run-time goes token by token with a cache; training unrolls all roots at once: the same tokens."""
    trainer = shaken(trainer_of(tiny, kind, **changes, **({"layers": 2} if kind == "medusa" else {})))
    trainer.write_held_out(trainer.corpus, nothing)
    trainer.measure(0, 1.0, 0.0)
    layers = trainer.request.read_layers
    drafter = drafter_of(head_file(trainer, trainer.facts), trainer.facts.size("vocab_size"), layers)
    sampler = Sampler(Sampling(temperature=0.0), trainer.facts.size("vocab_size"))
    text = torch.randint(0, trainer.facts.size("vocab_size"), (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = states_of(trainer.target, text, layers, scaled=False)[0].numpy()
        for length in (2, 5, 6, 20, 23):  # root length - 1, whose token behind is the pending one
            request = DraftRequest(text[0, : length + 1].numpy().astype(np.int32), 3, sampler, features=states[:length])
            drafted = drafter.draft(request).token_ids
            assert drafted.size == 3
            ids = torch.cat((text[0, : length + 1], torch.from_numpy(drafted.astype(np.int64))))[None]
            unrolled = trainer.student.drafts(states_of(trainer.target, ids, layers), ids)
            vocabulary = trainer.student.vocabulary
            wanted = [int(vocabulary.token_ids[vocabulary.logits(found[0, length - 1]).argmax()]) for found in unrolled]
            assert drafted.tolist() == wanted, length


def test_the_commonest_tokens_of_the_target_are_always_scored(tiny: Path, tmp_path: Path) -> None:
    request = asked(tiny, tmp_path / "heads.npz", "eagle", read_layers=(1,), draft_vocabulary=60, frequent=20)
    run(request)
    heads = read_head_file(request.output)
    assert heads.manifest.layers == (1,) and heads.manifest.feature_size == 64
    assert heads.frequent is not None and heads.frequent.size == 20 and heads.token_ids.size == 60
    trainer = build_heads_trainer(prepare(request, "", heads_shape))[0]
    trainer.write_pool(nothing)  # of the first round, which the file's tokens are from, too
    written = np.concatenate([ids[own] for ids, own in trainer.pool])
    counts = np.bincount(written[np.isin(written, heads.token_ids)], minlength=200)
    commonest = int(counts.argmax())
    assert commonest in heads.token_ids[heads.frequent]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frequent": 8}, "--frequent"),
        ({"frequent": 60, "draft_vocabulary": 50}, "--frequent"),
        ({"read_layers": (3, 1)}, "ascending"),
        ({"read_layers": (99,)}, "--read-layers 99"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str, tiny: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(asked(tiny, tiny / "unused", "eagle", **changes), "", heads_shape)


@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_an_eagle_head_starts_at_the_best_linear_prediction(layers: tuple[int, ...], tiny: Path) -> None:
    """Its layer left out, no other matrix predicts the states better; and it drafts better than random weights."""
    trainer = trainer_of(tiny, "eagle", round_prompts=24, read_layers=layers)
    trainer.write_held_out(trainer.corpus, nothing)
    untrained = trainer.measure(0, 1.0, 0.0)
    trainer.write_pool(nothing)
    head, batches = trainer.student, list(trainer._pooled())
    start_at_least_squares(head, batches)
    assert trainer.measure(0, 1.0, 0.0).greedy > untrained.greedy + 0.02

    def error(change: Any) -> float:
        total = 0.0
        for states, ids in batches:
            last = states[..., -head.norm.numel() :]
            pairs = torch.cat((last[:, :-1], head.vocabulary.embed(ids[:, 1:])), dim=-1)
            found = pairs @ (head.fc.weight + change).T * head.norm
            total += float(((found - last[:, 1:]) / head.norm).square().sum())
        return total

    def fused_error() -> float:
        """With the other layers, through the projection."""
        total = 0.0
        for states, ids in batches:
            fused = states[:, :-1] @ head.project.T
            found = torch.cat((fused, head.vocabulary.embed(ids[:, 1:])), dim=-1) @ head.fc.weight.T
            total += float((found - states[:, 1:, -head.norm.numel() :] / head.norm).square().sum())
        return total

    torch.manual_seed(0)
    with torch.no_grad():
        best = error(0.0)
        assert all(error(0.1 * torch.randn_like(head.fc.weight)) > best for _ in range(5))
        assert best < 0.7 * error(-head.fc.weight)  # of no prediction at all
        if layers:
            assert fused_error() < 0.99 * best


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_equals_the_reference(kind: str, tiny: Path) -> None:
    """Root by root, token by token: the k-th token of root i against the target's choice of token i + 2 + k."""
    trainer = shaken(trainer_of(tiny, kind, draft_vocabulary=50))
    ids = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    weights = torch.rand((2, 12), generator=torch.Generator().manual_seed(1))
    loss, variation = (float(value.detach()) for value in trainer.distance(ids, weights, 0.6))
    vocabulary, share = trainer.student.vocabulary, trainer.request.share
    slow_loss = slow_variation = 0.0
    with torch.no_grad():
        states = last_states(trainer.target, ids)
        target = (trainer.target(input_ids=ids).logits / 0.6).softmax(dim=-1)
        for k, found in enumerate(trainer.student.drafts(states, ids)):
            assert found.shape[1] == 10 - k
            for row in range(2):
                for root in range(10 - k):
                    q = (vocabulary.logits(found[row, root]) / 0.6).softmax(dim=-1)
                    p = target[row, root + 1 + k]
                    full = torch.zeros_like(p)
                    full[vocabulary.token_ids] = q
                    distance = float(0.5 * (full - p).abs().sum())
                    entropy = float(-(p[vocabulary.token_ids] * q.log()).sum())
                    part = share * entropy + (1 - share) * distance
                    if kind == "eagle":
                        apart = torch.nn.functional.smooth_l1_loss(found[row, root], states[row, root + 1 + k])
                        part += STATE_WEIGHT * float(apart)
                    weight = float(weights[row, root + 2 + k]) * LATER_WEIGHT**k
                    slow_loss, slow_variation = slow_loss + weight * part, slow_variation + weight * distance
    total = sum(LATER_WEIGHT**k for k in range(3))
    assert loss == pytest.approx(slow_loss / total, rel=1e-4)
    assert variation == pytest.approx(slow_variation / total, rel=1e-4)


@pytest.mark.parametrize("share", [1.0, 0.2, 0.0])
@pytest.mark.parametrize("drafted", [30, 12])
def test_the_gradient_written_by_hand_is_the_one_of_autograd(share: float, drafted: int) -> None:
    torch.manual_seed(0)
    head, states, found = torch.randn(30, 8), torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    weights, ids, factor = torch.rand(3, 5), torch.randperm(30)[:drafted].sort().values, 0.7
    wanted = target_distributions(states, head, ids, factor)
    results = []
    for slow in (False, True):
        given = found.clone().requires_grad_()
        if slow:
            p = (states @ head.T * factor).softmax(dim=-1)
            log_q = (given @ head[ids].T * factor).log_softmax(dim=-1)
            full = torch.zeros_like(p).index_copy(2, ids, log_q.exp())
            distance = 0.5 * (full - p).abs().sum(dim=-1)
            entropy = -(p[..., ids] * log_q).sum(dim=-1)
            loss = (weights * (share * entropy + (1 - share) * distance)).sum()
            variation = (weights * distance).sum()
        else:
            loss, variation = DraftLoss.apply(given, head[ids], wanted, weights, factor, share)
        (3 * loss).backward()
        results.append((loss.detach(), variation.detach(), given.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_most_frequent_tokens_can_be_drafted(tiny: Path) -> None:
    trainer = trainer_of(tiny, "eagle", draft_vocabulary=40)
    ids = trainer.student.vocabulary.token_ids.tolist()
    assert ids == sorted(set(ids)) and len(ids) == 40
    assert trainer.corpus is not None
    drawn = trainer.corpus.window(np.random.default_rng(9), 2000)
    assert np.isin(drawn, ids).mean() > np.isin(drawn, range(40)).mean() + 0.2
    assert trainer_of(tiny, "eagle").student.vocabulary.token_ids.numel() == trainer.facts.size("vocab_size")


def test_a_head_that_scales_its_scores_is_measured_and_another_refused(tiny: Path) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    config = transformers.GraniteConfig(**sizes, logits_scaling=4.0)
    model = transformers.GraniteForCausalLM(config).eval()
    assert head_scale(model, 300) == pytest.approx(0.25, rel=1e-4)
    trainer = trainer_of(tiny, "medusa")
    target = load_target(trainer.facts, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        target.lm_head.bias = torch.nn.Parameter(torch.ones(target.lm_head.out_features))
    with pytest.raises(CapabilityError, match="bias"):
        head_scale(target, target.lm_head.out_features)
