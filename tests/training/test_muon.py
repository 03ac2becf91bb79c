"""Muon in float32 against torch's own, which computes in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="training needs torch: scripts/run.py install train")

from trainlib.optimise import Muon  # noqa: E402


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon to compare with")
@pytest.mark.parametrize("shape", [(48, 16), (16, 48)])
def test_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
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
