"""edgespec against other runtimes on the same weights, prompts and token counts, interleaved in one run.

    python scripts/lab/make_bench_pair.py --size 1b --vocab-size 4096 --formats int8,q8_0 --keep-checkpoints \\
        --output PAIR
    python scripts/lab/bench_peers.py --pair PAIR --prompts FILE --output FOLDER --llama-server PATH \\
        --python openvino-genai=ENVIRONMENT/bin/python

Every library runs in a child process of its own and only one computes at a time; each is tuned by a small sweep on
prompts that are not measured, then all answer each prompt in turns, in an order that rotates. Libraries that are not
installed are listed with the command that installs them. FOLDER gets report.md, report.json, report.png and a journal:
interrupted, the same command goes on where it stopped. FILE holds one {"domain": ..., "text": ...} per line.
--vocab-size 4096 gives the target the vocabulary of its draft: most libraries refuse a draft of another size.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edgespec.errors import ConfigError, EdgespecError
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.platform.files import write_atomically
from peers.base import Request
from peers.child import PEERS
from peers.competition import Competition, Journal
from peers.field import find_files, make_field
from peers.report import as_json, kinds_table, make_rows, table

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TUNING = (0, 4)  # of the built-in prompts: dialogue and code, in the demo family's chat format
CHAT = "<|endoftext|><|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--pair", type=Path, default=DEMO, help="pair folder (default: the demo pair)")
    made.add_argument("--gguf", default="q8_0", metavar="FORMAT", help="GGUF format of the pair (default %(default)s)")
    made.add_argument("--onnx", default="int8", metavar="FORMAT", help="ONNX format of the pair (default %(default)s)")
    made.add_argument("--heads", type=Path, help="EAGLE heads of the target: edgespec takes part with them, too")
    made.add_argument("--draft-checkpoint", type=Path, help="Hugging Face folder of the draft (default: found)")
    made.add_argument("--prompts", type=Path, help="JSON lines with domain and text (default: built-in prompts)")
    made.add_argument("--limit", type=int, help="take only so many prompts")
    made.add_argument("--tokens", type=int, default=64, help="per answer (default %(default)s)")
    made.add_argument("--tuning-tokens", type=int, default=32, help="per answer of a sweep (default %(default)s)")
    made.add_argument("--temp", type=float, default=0.0, help="temperature (default %(default)s)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--threads", help="counts to sweep, such as 1,2 (default: 1 .. cores)")
    made.add_argument("--peers", default=",".join(PEERS), help="who takes part (default %(default)s)")
    made.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server (default: found on the search path)")
    made.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="interpreter of a peer")
    made.add_argument("--timeout", type=float, default=900.0, help="seconds for one answer (default %(default)s)")
    made.add_argument("--context-length", type=int, default=1024, help="tokens of every cache (default %(default)s)")
    made.add_argument("--low-memory", action="store_true", help="hold one library's models at a time; takes longer")
    made.add_argument("--output", type=Path, required=True, help="folder for journal and report")
    return made


def main() -> int:
    given = parser().parse_args()
    try:
        run(given)
    except EdgespecError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("\nstopped; the same command goes on from here")
        return 130
    return 0


def run(given: argparse.Namespace) -> None:
    pair = find_files(given.pair, given.gguf, given.onnx, DEMO, given.draft_checkpoint)
    given.output.mkdir(parents=True, exist_ok=True)
    field = make_field(
        pair, threads_of(given.threads), given.context_length, given.output, given.llama_server, given.heads
    )
    prompts = read_prompts(given.prompts)[: given.limit]
    journal = Journal(given.output / "journal.jsonl", identity_of(given, prompts))
    chosen = field.only(names_of(given.peers))
    pythons, logs = pythons_of(given.python), given.output / "logs"
    with Competition(chosen, pythons, logs, given.timeout, say, keeps_one=given.low_memory) as competition:
        competition.open()
        measured = requests_of(competition, given, [text for _, text in prompts], given.tokens)
        tuning = requests_of(competition, given, [CHAT.format(PROMPTS[i].text) for i in TUNING], given.tuning_tokens)
        competition.tune(tuning, journal)
        competition.measure(measured, tuning[0], journal)
        libraries = {name: peer.library for name, peer in competition.peers.items()}
    rows = make_rows(chosen.contestants, journal, libraries)
    domains = [domain for domain, _ in prompts]
    written = table(rows, competition.out) + "\n" + kinds_table(rows, journal, domains)
    write_atomically(given.output / "report.md", written)
    about = {**identity_of(given, prompts), "pair": pair.name, "libraries": libraries}
    found = as_json(rows, competition.out, journal, domains, about)
    write_atomically(given.output / "report.json", json.dumps(found, indent=1))
    print(written)


def requests_of(
    competition: Competition, given: argparse.Namespace, texts: list[str], max_tokens: int
) -> list[Request]:
    """Raises ConfigError for a prompt that leaves no room for its answer."""
    made = []
    for ids in competition.encode(texts):
        if len(ids) + max_tokens + 32 > given.context_length:  # room for the last draft
            raise ConfigError(f"a prompt has {len(ids)} tokens: give a larger --context-length or fewer --tokens")
        made.append(Request(tuple(ids), max_tokens, given.temp, given.seed))
    return made


def read_prompts(path: Path | None) -> list[tuple[str, str]]:
    """Domain and text of each prompt. Raises ConfigError for a file that does not hold them."""
    if path is None:
        left = [prompt for index, prompt in enumerate(PROMPTS) if index not in TUNING]
        return [(prompt.domain, CHAT.format(prompt.text)) for prompt in left]
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [(str(record["domain"]), str(record["text"])) for record in records]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{path} must hold one JSON object with domain and text per line: {exc!r}") from exc


def identity_of(given: argparse.Namespace, prompts: list[tuple[str, str]]) -> dict[str, Any]:
    """What a journal's figures were measured with; another one starts anew."""
    names = ("gguf", "onnx", "tokens", "tuning_tokens", "temp", "seed", "threads", "context_length")
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    heads = None if given.heads is None else str(given.heads.resolve())
    return {
        "pair": str(given.pair.resolve()),
        "heads": heads,
        "prompts": digest,
        **{name: getattr(given, name) for name in names},
    }


def threads_of(text: str | None) -> list[int]:
    if text is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return list(range(cores, 0, -1))
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--threads must be numbers such as 1,2, got {text!r}") from None


def names_of(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"no peer {name!r}; allowed: {', '.join(PEERS)}")
    return names


def pythons_of(options: list[str]) -> dict[str, str]:
    """Interpreters by peer. Raises ConfigError for an option that is not PEER=PATH."""
    pythons = {}
    for option in options:
        name, separator, path = option.partition("=")
        if not separator or name not in PEERS:
            raise ConfigError(f"--python must be PEER=PATH with PEER of {', '.join(PEERS)}, got {option!r}")
        pythons[name] = path
    return pythons


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
