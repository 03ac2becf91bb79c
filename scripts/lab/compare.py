"""edgespec by default against what else runs the same file: whole answers, interleaved, in one resumable command.

    python scripts/lab/compare.py qwen=MODEL.gguf --data DATA --output FOLDER --llama-server PATH \\
        [--ik-server PATH] [--python openvino-genai=PYTHON] [--runtimes edgespec llama-server/plain] [--limit N] \\
        [--temp 0 0.8] [--kinds spec-bench edits] [--clients 4] [--cold]

A model is NAME=TARGET.gguf, with ",draft=FILE" and ",heads=FILE" where it has them. Every runtime with every setting is
a child process of its own, and one computes at a time. The others are first tuned by a sweep (threads, flash attention,
kind and length of lookups, length of drafts) on prompts that are not measured; edgespec is as it comes. Then all answer
each prompt in random order, and plain decoding of the others twice, which shows the noise. An answer's time runs from
the question to its last token, the reading of the prompt included; it ends where the model ends it. Two answers are
compared up to the last token of the shorter one. Ratios are over the fastest plain decoding of the others.

FOLDER gets report.md and a journal: the same command, or one with other models, temperatures or runtimes,
adds what is not there yet. With --clients so many prompts are asked at once, over HTTP of the servers, the next when an
answer has come. edgespec starts from an empty cache folder and keeps there what it learns; --cold adds its first
answers, a new process with an empty folder for each prompt. DATA is the folder with spec_bench_dev.jsonl.xz.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import random
import re
import shlex
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

from edgespec.platform.files import write_atomically
from peers.base import Question
from peers.field import RUNTIMES, Contestant, Failures, contestants, cores, tune, warming
from peers.process import Child
from peers.report import AGAIN, Cell, Journal, markdown, tuned_key
from trainlib.public_data import library_functions

NUM_TUNING = 2
GROUPS_OF_A_PROCESS = 10  # until all start anew: one process may be slower than another for its whole life
EACH_ASKS = 3  # questions of each of several clients, one after the other
FOLDERS = re.compile(r"(?<![^=,])/\S*/")  # of a path, which reports leave out
KINDS, ROLES = ("spec-bench", "edits"), ("target", "draft", "heads")
EDITED = range(400, 1600)  # characters of a function that is to be edited
EDITS = (
    "Add type hints to this function. Return the whole function.",
    "Add a docstring and comments to this function. Return the complete code.",
    "Rename the local variables of this function to be more descriptive. Return the whole function.",
    "Fix any bugs in this function and return all of it.",
)
Prompt = tuple[str, str]  # kind, text


def spec_bench(folder: Path) -> list[Prompt]:
    """(kind, first turn) of Spec-Bench's questions, the kinds by turns, in an order drawn with a seed."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    with lzma.open(folder / "spec_bench_dev.jsonl.xz", "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            by_kind[record["category"]].append(record["turns"][0])
    draw = random.Random(0)
    for texts in by_kind.values():
        draw.shuffle(texts)
    most = max(len(texts) for texts in by_kind.values())
    return [(kind, texts[place]) for place in range(most) for kind, texts in by_kind.items() if place < len(texts)]


def edits(count: int) -> list[Prompt]:
    """Requests to change a function of Python's library and return all of it, in an order drawn with a seed."""
    code = [code for _, functions in library_functions() for *_, code in functions if len(code) in EDITED]
    random.Random(0).shuffle(code)
    return [("edit", f"{EDITS[n % 4]}\n\n```python\n{each}\n```") for n, each in enumerate(code[:count])]


def prompts_of(given: argparse.Namespace) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts that are measured, and those that settings are tuned on."""
    sources = [spec_bench(given.data) if kind == "spec-bench" else edits(10 * given.limit + 10) for kind in given.kinds]
    share = -(-given.limit // len(sources))
    measured = [prompt for source in sources for prompt in source[:share]][: given.limit]
    tuning = [source[-1 - place] for place in range(NUM_TUNING) for source in sources][:NUM_TUNING]
    return [(kind, text[: given.chars]) for kind, text in measured], [(k, text[: given.chars]) for k, text in tuning]


class Comparison:
    """One model: its children, opened when they are first asked and kept, and what they answer, into the journal."""

    def __init__(self, name: str, files: Mapping[str, str], given: argparse.Namespace, journal: Journal) -> None:
        self.name, self._files, self._given, self._journal = name, dict(files), given, journal
        self._children: dict[str, Child] = {}
        self._without_plain: set[str] = set()  # runtimes that cannot run this model at all
        about = {role: [Path(path).name, Path(path).stat().st_size] for role, path in files.items()}
        if journal.models.get(name, about) != about:
            raise SystemExit(f"{given.output} has figures of {name} with other files: give it another name")
        if name not in journal.models:
            journal.add("model", name=name, files=about)
        roles = [role for role in ("draft", "heads") if role in files]
        self.contestants = contestants(given.runtimes, roles, given.clients, given.threads, is_cold=given.cold)

    def run(self) -> None:
        """Sweep and measure whatever the journal lacks."""
        measured, tuning = self._encoded()
        clients = self._given.clients
        size = clients if clients == 1 else clients * EACH_ASKS
        groups = [measured[start : start + size] for start in range(0, len(measured), size)]
        learnt_on = [(tuning[place:] + tuning * clients)[:clients] for place in range(NUM_TUNING)]
        short = max(1, self._given.tokens // 2)
        questions = [replace(self._question(group, 0.0), max_tokens=short) for group in learnt_on]
        try:
            for temperature in self._given.temp:
                cell = Cell(
                    self.name, temperature, clients, f"{' and '.join(self._given.kinds)}, {self._given.tokens} tokens"
                )
                self._tune(cell, questions)
                for number, group in enumerate(groups, 1):
                    if number % GROUPS_OF_A_PROCESS == 1:
                        self._close()
                    self._measure(cell, group, questions)
                    say(f"{self.name}, temperature {temperature:g}: {number} of {len(groups)}")
        finally:
            self._close()

    def _close(self) -> None:
        while self._children:
            self._children.popitem()[1].close()

    def _encoded(self) -> tuple[list[tuple[str, list[int]]], list[tuple[str, list[int]]]]:
        """(kind, token ids) of the prompts; edgespec encodes them for all."""
        measured, tuning = prompts_of(self._given)
        child = self._child(Contestant("edgespec", "plain", "edgespec"), {"setting": "plain"})
        try:
            ids = child.encode([text for _, text in measured + tuning])
        finally:
            child.close()
        longest = max(map(len, ids)) + self._given.tokens + 32  # room for the last draft
        if longest > self._given.context:
            raise SystemExit(f"prompts and answers take {longest} tokens: give --context, fewer --chars or --tokens")
        pairs = [(kind, each) for (kind, _), each in zip(measured + tuning, ids, strict=True)]
        return pairs[: len(measured)], pairs[len(measured) :]

    def _tune(self, cell: Cell, questions: Sequence[Question]) -> None:
        journal = self._journal
        for contestant in list(self.contestants):
            key, plain = (tuned_key(cell, name) for name in (contestant.name, contestant.plain))
            if key in journal.tuned or contestant.runtime in self._without_plain:
                continue
            base = journal.tuned.get(plain, {}).get("settings", {})
            try:
                settings, trials = tune(
                    contestant,
                    base,
                    questions,
                    self._child,
                    journal.trials.get(key, []),
                    lambda trial, key=key: journal.add("trial", key=key, trial=trial),  # type: ignore[misc]
                )
            except Failures as failure:
                self._drop(cell, contestant, str(failure))
                if contestant.setting == "plain":
                    self._without_plain.add(contestant.runtime)
            else:
                journal.add("tuned", key=key, settings=settings, trials=trials)
                say(f"{key}: {settings}")
        self.contestants = [c for c in self.contestants if tuned_key(cell, c.name) in journal.tuned]

    def _measure(self, cell: Cell, group: Sequence[tuple[str, list[int]]], learnt_on: Sequence[Question]) -> None:
        """All answers to the prompts of one group that the journal lacks, in an order drawn for this group."""
        digest = hashlib.sha256(json.dumps([*group, self._given.tokens]).encode()).hexdigest()[:16]
        turns = [(contestant, contestant.name) for contestant in self.contestants]
        turns += [(c, c.name + AGAIN) for c in self.contestants if c.is_other_plain]
        turns = [(c, name) for c, name in turns if (cell, name, digest) not in self._journal.entries]
        random.Random(digest).shuffle(turns)
        question = replace(self._question(group, cell.temperature), seed=int(digest[:6], 16))
        for contestant, name in turns:
            if contestant not in self.contestants:  # it failed a moment ago
                continue
            try:
                with self._turn(cell, contestant, learnt_on) as child:
                    reply = child.ask(question)
            except Failures as failure:
                self._drop(cell, contestant, str(failure))
                continue
            self._journal.add(
                "answer",
                cell=astuple(cell),
                name=name,
                prompts=digest,
                kind=group[0][0] if len({kind for kind, _ in group}) == 1 else "mixed",
                answers=[asdict(answer) for answer in reply.answers],
                peak_bytes=reply.peak_bytes,
                load=os.getloadavg()[0],
            )

    @contextmanager
    def _turn(self, cell: Cell, contestant: Contestant, learnt_on: Sequence[Question]) -> Iterator[Child]:
        """The child whose turn it is: kept and warm, or of "default cold" a new one that has learnt nothing."""
        settings = self._journal.tuned[tuned_key(cell, contestant.name)]["settings"]
        if contestant.setting == "default cold":
            with (
                tempfile.TemporaryDirectory(prefix="edgespec-cold-") as home,
                closing(self._child(contestant, settings, Path(home))) as child,
            ):
                yield child
            return
        if contestant.name not in self._children:
            child = self._children[contestant.name] = self._child(contestant, settings)
            for question in [warming(learnt_on[0]), *(learnt_on if contestant.learns else ())]:
                child.ask(question)
        yield self._children[contestant.name]

    def _question(self, group: Sequence[tuple[str, list[int]]], temperature: float) -> Question:
        return Question([ids for _, ids in group], self._given.tokens, temperature)

    def _child(self, contestant: Contestant, settings: Mapping[str, Any], home: Path | None = None) -> Child:
        name = f"{self.name}-{contestant.name}".replace(" ", "-").replace("/", "-")
        work = self._given.output / "work"
        files = {**self._files, "context": str(self._given.context), "clients": str(self._given.clients)}
        files["log"] = str(work / f"{name}.server.log")
        if program := {"llama-server": self._given.llama_server, "ik_llama.cpp": self._given.ik_server}.get(
            contestant.runtime
        ):
            files["program"] = str(program)
        child = Child(
            contestant.child,
            files,
            settings,
            log=work / f"{name}.log",
            home=home or work / f"home-{name}",
            python=self._given.python.get(contestant.runtime, sys.executable),
        )
        if self._journal.titles.get(contestant.runtime) != child.title:
            self._journal.add("title", name=contestant.runtime, title=child.title)
        return child

    def _drop(self, cell: Cell, contestant: Contestant, reason: str) -> None:
        say(f"{contestant.name}: out: {reason}")
        self._journal.add("failed", cell=astuple(cell), name=contestant.name, reason=reason)
        if contestant in self.contestants:
            self.contestants.remove(contestant)
        if child := self._children.pop(contestant.name, None):
            child.close()


def read_model(text: str) -> tuple[str, dict[str, str]]:
    """NAME=TARGET[,draft=FILE][,heads=FILE] as a name and files by role. Raises ArgumentTypeError."""
    name, _, rest = text.partition("=")
    parts = [part.partition("=") for part in f"target={rest}".split(",")]
    files = {role: str(Path(path).resolve()) for role, _, path in parts}
    if wrong := [path for role, path in files.items() if role not in ROLES or not Path(path).is_file()]:
        what = f"no file {wrong[0]}: a model is NAME=TARGET.gguf[,draft=FILE][,heads=FILE]"
        raise argparse.ArgumentTypeError(what)
    return name, files


def read_runtime(text: str) -> str:
    """RUNTIME or RUNTIME/SETTING. Raises ArgumentTypeError."""
    if text.partition("/")[0] not in RUNTIMES:
        raise argparse.ArgumentTypeError(f"no runtime {text!r}; allowed: {', '.join(RUNTIMES)}, each with /SETTING")
    return text


def read_python(text: str) -> tuple[str, str]:
    """RUNTIME=PATH of the interpreter of a runtime. Raises ArgumentTypeError."""
    runtime, _, path = text.partition("=")
    return read_runtime(runtime), path


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, several = made.add_argument, [cores(), cores() // 2 or 1]
    add("models", nargs="+", type=read_model, metavar="NAME=TARGET.gguf[,draft=FILE][,heads=FILE]")
    add("--data", type=Path, required=True, help="folder of spec_bench_dev.jsonl.xz")
    add("--output", type=Path, required=True, help="folder for journal and report")
    add("--runtimes", nargs="+", type=read_runtime, default=list(RUNTIMES), metavar="RUNTIME[/SETTING]")
    add("--llama-server", type=Path, help="llama.cpp's server (default: found on the search path)")
    add("--ik-server", type=Path, help="ik_llama.cpp's server")
    add("--python", nargs="*", type=read_python, default=[], metavar="RUNTIME=PATH", help="interpreters of runtimes")
    add("--kinds", nargs="+", choices=KINDS, default=["spec-bench"], help="of prompts (default %(default)s)")
    add("--limit", type=int, default=30, help="prompts in all (default %(default)s)")
    add("--temp", nargs="+", type=float, default=[0.0], help="temperatures (default 0)")
    add("--clients", type=int, default=1, help="prompts asked at once (default %(default)s)")
    add("--threads", nargs="+", type=int, default=several, help="of the others, to sweep (default %(default)s)")
    add("--cold", action="store_true", help="add edgespec's first answers, from an empty cache folder")
    add("--tokens", type=int, default=64, help="of an answer at most (default %(default)s)")
    add("--chars", type=int, default=2400, help="longer prompts are cut (default %(default)s)")
    add("--context", type=int, default=2048, help="tokens of each client's cache (default %(default)s)")
    return made


def main() -> None:
    given = parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends a slice as Ctrl-C does: with a report
    given.python, given.output = dict(given.python), given.output.resolve()
    journal = Journal(given.output / "journal.jsonl")
    command = shlex.join(["python", "scripts/lab/compare.py", *(FOLDERS.sub("", part) for part in sys.argv[1:])])
    journal.add("command", text=command)
    try:
        for name, files in given.models:
            Comparison(name, files, given, journal).run()
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
    report = markdown(journal)
    write_atomically(given.output / "report.md", report)
    print(report)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
