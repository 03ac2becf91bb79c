"""Build a pair with the demo's behaviour and the cost of a bigger model, for measuring speed without real weights.

    python scripts/lab/make_bench_pair.py --size 1b --formats q8_0,q4_k_m
    edgespec generate FOLDER -p "Hi, can you find me a restaurant?"

Needs `python3 scripts/run.py install export`. A target that does not write what the demo writes is refused.
Interrupted, the same command goes on where it stopped. Nothing is written into the repository.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edgespec.errors import EdgespecError
from edgespec.platform.disk_cache import cache_folder
from expansion.pair import Builder
from expansion.request import DRAFT_ROLES, FORMATS, BenchRequest
from expansion.shapes import SHAPES

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def parser() -> argparse.ArgumentParser:
    sizes = ", ".join(f"{name} ({shape.parameters() / 1e6:.0f}M)" for name, shape in SHAPES.items())
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--size", required=True, metavar="SIZE", help=f"shape of the target: {sizes}")
    made.add_argument("--formats", default="q8_0,q4_k_m", help=f"of {','.join(FORMATS)} (default %(default)s)")
    made.add_argument("--draft", default="demo", help=f"{' or '.join(DRAFT_ROLES)}: which draft (default %(default)s)")
    made.add_argument("--draft-size", metavar="SIZE", help="expand the draft as well (default: as it is)")
    made.add_argument("--vocab-size", type=int, metavar="N", help="tokens, the unused ones padding (default: SIZE's)")
    made.add_argument("--sigma", type=float, default=0.0, help="noise in the target's head, in deviations: .1 .. .4")
    made.add_argument("--seed", type=int, default=0, help="of the random weights (default %(default)s)")
    made.add_argument("--source", type=Path, default=DEMO, help="the pair that is expanded")
    made.add_argument("--target", type=Path, metavar="FOLDER", help="expand this checkpoint, not the pair's own target")
    made.add_argument("--output", type=Path, help="folder for the result (default: in the user's cache folder)")
    made.add_argument("--keep-checkpoints", action="store_true", help="keep the expanded Hugging Face folders")
    return made


def main() -> int:
    given = parser().parse_args()
    try:
        request = BenchRequest(
            size=given.size,
            formats=tuple(dict.fromkeys(name.strip() for name in given.formats.split(",") if name.strip())),
            draft=given.draft,
            draft_size=given.draft_size,
            vocab_size=given.vocab_size,
            sigma=given.sigma,
            seed=given.seed,
            keep_checkpoints=given.keep_checkpoints,
            target=given.target,
        )
        output = given.output or cache_folder() / "bench" / request.name
        builder = Builder(request, given.source, output, tell_progress)
        tell_needs(builder, output)
        started_s = time.monotonic()
        folders = builder.build()
    except EdgespecError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("\nstopped; the same command goes on from here")
        return 130
    say(f"done in {time.monotonic() - started_s:.0f} s")
    for folder in folders:
        print(folder)
    return 0


def tell_needs(builder: Builder, output: Path) -> None:
    """What the work will take, before it begins."""
    needs = builder.needs()
    if needs is None:
        say(f"{output}: everything is there")
        return
    say(
        f"{builder.request.name}: up to {needs.disk_bytes / 1e9:.1f} GB of disk, {needs.memory_bytes / 1e9:.1f} GB of "
        f"memory, about {max(1, round(needs.seconds / 60))} min on one quiet core; into {output}"
    )


def tell_progress(done: int, total: int, what: str) -> None:
    """One line that is written over in a terminal; elsewhere, a line at the end of each part."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{done}/{total} {what}"[:120], end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total:
        say(f"{done}/{total} {what}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
