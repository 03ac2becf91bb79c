"""Show that the suite catches broken acceptance rules: apply each mutant to a copy of the package, expect failure.

    python scripts/lab/mutants.py

Each mutant is a mistake that real implementations have made. Exit code 1 when one survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOSSLESS = "tests/core/test_lossless.py"
LAW = f"{LOSSLESS}::test_joint_law_of_sampled_text_is_the_targets"


@dataclass(frozen=True)
class Mutant:
    """Replace `original` by `mutated` in one file; some of `tests` must fail."""

    name: str
    file: str
    original: str
    mutated: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "residual without subtracting the draft",
        "sampling/acceptance.py",
        "np.maximum(reach * target.probs - _probs_at(proposed, target.token_ids), 0)",
        "np.maximum(reach * target.probs - 0 * _probs_at(proposed, target.token_ids), 0)",
        ("tests/core/test_verify.py",),
    ),
    Mutant(
        "stop one token early: the last draft token is never accepted",
        "sampling/acceptance.py",
        "        if not choices.accept(target.prob_of(token_id)",
        "        if node + 1 == draft.num_tokens or not choices.accept(target.prob_of(token_id)",
        ("tests/core/test_verify.py",),
    ),
    Mutant(
        "drop a sampled token afterwards because it is unlikely",
        "drafters/growth.py",
        "        has_room = count + 1 < self.most and token_id not in self.end_ids\n",
        "        if distribution.prob_of(token_id) < 0.3:\n"
        "            self.token_ids.pop(), self.evidence.pop(), self.distributions.pop()\n"
        "            self.is_open = False\n            return False\n"
        "        has_room = count + 1 < self.most and token_id not in self.end_ids\n",
        (f"{LAW}[rejection-model]",),
    ),
    Mutant(
        "pick all tokens of a path with the noise of its first",
        "sampling/acceptance.py",
        "choices.pick(target_at(node, path), position + len(path))",
        "choices.pick(target_at(node, path), position)",
        (f"{LOSSLESS}::test_coupled_text_is_plain_text_token_by_token",),
    ),
    Mutant(
        "off by one row",
        "generation/decode.py",
        "return sampler.distribution(logits[node + 1], history)",
        "return sampler.distribution(logits[max(node, 0)], history)",
        (f"{LOSSLESS}::test_coupled_text_is_plain_text_token_by_token",),
    ),
    Mutant(
        "draw the residual with the noise that drew the draft",
        "sampling/acceptance.py",
        "choices.pick(residual(target, proposed), position + node, Stream.RESIDUAL)",
        "choices.pick(residual(target, proposed), position + node, Stream.DRAFT)",
        ("tests/core/test_sampling.py",),
    ),
    Mutant(
        "judge a position again by the draw of the round before",
        "sampling/acceptance.py",
        "choices.accept(chance, position + node, node)",
        "choices.accept(chance, position + node)",
        ("tests/core/test_sampling.py",),
    ),
    Mutant(
        "draft a position again with the noise of the round before",
        "drafters/growth.py",
        "index = request.num_drafted + count if request.needs_distributions else 0",
        "index = 0",
        ("tests/core/test_sampling.py",),
    ),
    Mutant(
        "hand out the target's choices one row late",
        "generation/decode.py",
        "row_choices = tuple(logits.argmax(axis=1).tolist())",
        "row_choices = tuple(np.roll(logits.argmax(axis=1), 1).tolist())",
        ("tests/drafters/test_lookahead.py",),
    ),
    Mutant(
        "leave one rejected token in the cache",
        "engines/sequence.py",
        "self.engine.rollback(end, self.sequence)",
        "self.engine.rollback(min(end + 1, self.engine.length(self.sequence)), self.sequence)",
        (f"{LOSSLESS}::test_coupled_text_is_plain_text_token_by_token",),
    ),
)


def is_killed(mutant: Mutant) -> bool:
    """Whether the suite fails on a copy of the project with the mutant applied."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("edgespec", "tests", "models", "scripts"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "hf"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "edgespec" / mutant.file
        source = path.read_text(encoding="utf-8")
        if source.count(mutant.original) != 1:
            raise SystemExit(
                f"mutant {mutant.name!r} no longer applies to {mutant.file}: update scripts/lab/mutants.py"
            )
        path.write_text(source.replace(mutant.original, mutant.mutated), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(copy)}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(
                f"mutant {mutant.name!r}: pytest itself failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return done.returncode == 1


def main() -> int:
    survivors = 0
    for mutant in MUTANTS:
        killed = is_killed(mutant)
        survivors += not killed
        print(f"{'killed  ' if killed else 'SURVIVED'}  {mutant.name}", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
