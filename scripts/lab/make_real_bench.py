"""Build a benchmark of real text at real cost: a small real Llama as GGUF, expanded to the cost of a bigger one.

    python scripts/lab/make_real_bench.py SmolLM2-135M-Instruct.Q4_1.gguf --size 1b --formats w8a8,q4_k_m \\
        --draft-formats int8,q4_0 --sigma .3 --output bench-real
    edgespec chat bench-real/target-1b-w8a8 --model-draft bench-real/draft-135m-sigma-0.3-int8

The target writes what the source writes. The draft is the source with noise in its head (`--sigma`): no trained draft
for SmolLM2 is small enough, so how much it accepts is chosen here, and only what that gains is measured. Needs the
extras `convert` and `llamacpp`, no torch. What is there already is kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edgespec.errors import ConfigError, EdgespecError
from edgespec.platform.disk_cache import cache_folder
from expansion.real import AS_IS, DEEP_SHAPES, RealBench, compared


def parser() -> argparse.ArgumentParser:
    sizes = ", ".join(f"{name} ({shape.parameters() / 1e6:.0f}M)" for name, shape in DEEP_SHAPES.items())
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("source", type=Path, help="GGUF of SmolLM2-135M or a Llama of its shape")
    made.add_argument("--size", default="1b", help=f"shape of the target: {sizes}")
    made.add_argument("--formats", default="w8a8", help="of the target, by commas; none: drafts only")
    made.add_argument("--draft-formats", default="int8", help="of the draft, by commas; none: targets only")
    made.add_argument("--draft-size", default=AS_IS, help="shape of the draft (default %(default)s: as it is)")
    made.add_argument("--sigma", type=float, default=0.0, help="noise in the draft's head, in standard deviations")
    made.add_argument("--heads", type=Path, help="EAGLE heads of the source, to be expanded like the target")
    made.add_argument("--vocab-size", type=int, metavar="N", help="tokens of the target, the unused ones padding")
    made.add_argument("--seed", type=int, default=0, help="of the random weights (default %(default)s)")
    made.add_argument("--output", type=Path, help="folder for the result (default: in the user's cache folder)")
    made.add_argument("--peers", action="store_true", help="also make what bench_peers.py takes: pairs, checkpoints")
    made.add_argument("--check", action="store_true", help="compare what was made with the source's float32 weights")
    return made


def main() -> int:
    given = parser().parse_args()
    output = given.output or cache_folder() / "bench" / "real"
    bench = RealBench(given.source, output, given.seed, tell)
    started_s = time.monotonic()
    try:
        targets = [bench.target(given.size, kind, given.vocab_size) for kind in listed(given.formats)]
        drafts = [bench.draft(given.draft_size, kind, given.sigma) for kind in listed(given.draft_formats)]
        made = targets + drafts
        if given.heads:
            print(bench.heads(given.heads, given.size))
        if given.peers:
            made += [bench.pair(target, draft_of(target, drafts)) for target in targets]
            bench.checkpoints(given.size, given.sigma)
        print(f"done in {time.monotonic() - started_s:.0f} s", file=sys.stderr)
        for path in made:
            print(path)
        for name, found in (compared(given.source, made, output) if given.check else {}).items():
            print(f"{name}: mean KL {found.mean_kl:.4f} nats, top-1 agreement {found.top1_agreement:.3f}", flush=True)
    except EdgespecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def draft_of(target: Path, drafts: Sequence[Path]) -> Path:
    """The draft for the same engine. Raises ConfigError without one."""
    found = next((draft for draft in drafts if draft.is_dir() == target.is_dir()), None)
    if found is None:
        raise ConfigError(f"no draft for {target.name} was made: --draft-formats must name one for each engine")
    return found


def listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]


def tell(done: int, total: int, what: str) -> None:
    if done == total:
        print(f"{what}: {total} parts", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
