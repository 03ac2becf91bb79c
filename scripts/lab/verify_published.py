"""Checks published models and heads on a machine that reaches the hub, smallest first, and keeps what it saw.

    python scripts/lab/verify_published.py --out FOLDER [NAME ...] [--most-gb 8] [--minutes 30] [--discard] [--again]
        [--llama-server PATH] [--list]

A target is an entry of the catalogue (models/*.toml) with what `edgespec pull` takes with it, and once more with each
other head that is published ready to run. Each is pulled, then a child process with a limit of time loads it (which
engine, how long), writes answers with and without drafts at temperatures 0 and 0.8 (same token ids, same log
probabilities; with four drafted tokens a step, so that there are drafts, and as automatic decoding drafts), and times
automatic against plain decoding, by turns. A second child fills a context, and its peak is compared with the plan
(measure_memory.py). With --llama-server the same prompts go to llama.cpp's server, plain and with each of its ways to
speculate from these files; the fastest counts.

FOLDER gets NAME.json for each target, and results.md, a row each, after every one. What stands there with this version
of edgespec is not done again (--again: it is; what failed for want of network, time or memory always is), so the same
command goes on after an interruption. --discard removes each model when it is done. Exit code 1: something failed;
`fix` in its file and the last column say what to do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.errors import DownloadError, EdgespecError, PromptError, StateError
from edgespec.formats.gguf.heads import head_kind_of, read_head
from edgespec.formats.manifest import ModelPair
from edgespec.loading import catalogue
from edgespec.loading.drafts import PROMPTS
from edgespec.loading.own_models import entry_bytes, remove
from edgespec.loading.pull import pull
from edgespec.platform.machine import default_threads, processor
from measure_memory import RIGHT_BYTES, Case, judged, measured
from peers.base import Refusal
from peers.over_http import LlamaServer

TEMPERATURES = (0.0, 0.8)
DRAFTED, MEMORY_CONTEXT = 4, 512
LENGTHS = (2, 4, 7)  # of llama.cpp's drafts, of which the fastest counts
PASSED, FAILED, LATER = "passed", "failed", "to be tried again"
FIXES = {
    "pull": "see what the repository holds on the hub, then correct its entry in models/*.toml",
    "network": "run the same command again: it goes on where it stopped; HF_TOKEN opens gated models",
    "time": "give more time with --minutes",
    "load": "edgespec show MODEL, then edgespec run MODEL -v: report what they print",
    "text": "edgespec verify MODEL --reproducible; if that differs too, it is a defect: report this file",
    "memory": "scripts/lab/measure_memory.py MODEL=x tells own from mapped memory: correct footprint.py",
}


@dataclass(frozen=True)
class Job:
    """One target: an entry, and the head or draft to take with it where that is not what `pull` takes."""

    entry: catalogue.Entry
    draft: str = ""
    kind: str = ""

    @property
    def name(self) -> str:
        return f"verify-{self.entry.name}{f'-{self.kind}' if self.kind else ''}"


def jobs(names: list[str]) -> list[Job]:
    """Of the entries named, all without a name, by size."""
    unknown = set(names) - set(catalogue.entries())
    if unknown:
        sys.exit(f"not in the catalogue: {', '.join(sorted(unknown))}; --list shows what is")
    found = []
    for entry in catalogue.entries().values():
        if (entry.name in names or not names) and not entry.draft_only:
            found.append(Job(entry))
            ready = [head for head in entry.heads if head.gguf and head.gguf != entry.drafted_by]
            found += [Job(entry, head.gguf, head.kind) for head in ready]
    return sorted(found, key=lambda job: entry_bytes(job.entry))


def check(job: Job, chosen: argparse.Namespace) -> dict[str, Any]:
    """What is seen of one target; with `fix` where something failed."""
    told: dict[str, Any] = {"model": job.entry.name, "repo": job.entry.repo, "edgespec": edgespec.__version__}
    told |= {
        "draft": job.draft,
        "machine": processor(),
        "threads": default_threads(),
        "onnxruntime": version("onnxruntime"),
    }

    def failed(step: str, reason: str, outcome: str = FAILED) -> dict[str, Any]:
        fix = FIXES[step].replace("MODEL", job.name)
        return {**told, "outcome": outcome, "step": step, "reason": reason, "fix": fix}

    try:
        pair = pull(job.entry.name, lambda *_: None, print, name=job.name, draft=job.draft)
    except (DownloadError, StateError) as exc:
        return failed("network", str(exc), LATER)
    except EdgespecError as exc:
        return failed("pull", str(exc))
    files = [each for file in pair.files.values() for each in file.all_files]
    told["files"] = [{"path": each.path.name, "bytes": each.bytes, "sha256": each.sha256} for each in files]
    told["draft"] = pair.draft.name if pair.draft else ""
    lines, reason = run_child(job.name, chosen)
    for line in lines:
        told |= line
    if reason:
        return failed("time", reason, LATER) if reason == "time" else failed("load", reason)
    if told["differs"]:
        return failed("text", "; ".join(told["differs"]))
    if chosen.llama_server:
        told["llama_server"] = served(pair, job, chosen)
    with tempfile.TemporaryDirectory() as home:
        options = {"model": job.name, "context_length": MEMORY_CONTEXT, "drafter": "auto"}
        memory = measured(Case(job.name, options), home)
    if isinstance(memory, str):
        return failed("memory", memory, LATER)
    told |= {"planned_bytes": memory["planned"], "peak_bytes": memory["peak"]}
    if judged(memory["planned"], memory["peak"]) == "low" and memory["peak"] - memory["planned"] > RIGHT_BYTES:
        return failed("memory", f"the plan is low: {memory['planned']:.0f} of {memory['peak']:.0f} bytes")
    return {**told, "outcome": PASSED}


def run_child(name: str, chosen: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """What the child told, and why it told no more; "time" where it took too long, empty where it is done."""
    kept = {"child": name, **{key: vars(chosen)[key] for key in ("out", "tokens", "context", "prompts")}}
    command = [sys.executable, __file__, *(word for key, value in kept.items() for word in (f"--{key}", str(value)))]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "EDGESPEC_HOME": home, "HF_HUB_OFFLINE": "1"}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            output, errors = child.communicate(timeout=60 * chosen.minutes)
            reason = (errors.strip().splitlines() or ["no reason"])[-1] if child.returncode else ""
        except subprocess.TimeoutExpired:
            child.kill()
            output, reason = child.communicate()[0], "time"
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")], reason


def child(name: str, chosen: argparse.Namespace) -> None:
    """In the child: load, compare and time; a line of JSON after each."""
    with edgespec.load(name, context_length=chosen.context) as model:
        facts = model.target.facts
        told = {"engine": facts.name, "architecture": facts.architecture, "drafter": model.drafter_name}
        print(json.dumps({**told, "reproducible": model.reproducible, "notes": facts.notes}), flush=True)
        asked = [encoded(model, prompt.text) for prompt in PROMPTS[: chosen.prompts]]
        print(json.dumps(compared(model, asked, chosen.tokens)), flush=True)


def encoded(model: Model, text: str) -> list[int]:
    try:
        return model.encode_chat([{"role": "user", "content": text}])
    except PromptError:  # a base model continues the text
        return model.encode(text)


def compared(model: Model, asked: list[list[int]], tokens: int) -> dict[str, Any]:
    """Same texts and speeds. Where the engine does not promise the same bits, a difference is told and no failure."""
    differs, ratios, rates, drafted, accepted = [], [], [], 0, 0
    for number, ids in enumerate(asked):
        for temperature in TEMPERATURES:
            sampling = Sampling(temperature=temperature, seed=number)
            usual, answers = GenerateOptions(max_tokens=tokens), {}
            options = {"plain": replace(usual, drafter="none"), "automatic": usual}
            options["forced"] = replace(usual, draft_length=DRAFTED)
            for name in options if number % 2 else reversed(options):
                model.forget()
                answers[name] = model.generate(ids, sampling, options[name])
            own = answers["plain"]
            for name in ("automatic", "forced"):
                other = answers[name]
                if (own.token_ids, own.logprobs) != (other.token_ids, other.logprobs):
                    differs.append(f"prompt {number} at temperature {temperature:g}, {name} drafts")
            drafted += answers["forced"].stats.drafted_tokens
            accepted += answers["forced"].stats.accepted_tokens
            if own.stats.tokens_per_second:
                rates.append(own.stats.tokens_per_second)
                ratios.append(answers["automatic"].stats.tokens_per_second / rates[-1])
    found: dict[str, Any] = {"compared": 2 * len(TEMPERATURES) * len(asked), "drafted": drafted, "accepted": accepted}
    found |= {"plain_per_s": median(rates), "gain": median(ratios)} if rates else {}
    return {**found, "differs": differs if model.reproducible else [], "differs_as_allowed": len(differs)}


def served(pair: ModelPair, job: Job, chosen: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of llama-server on the same prompts: plain, and the fastest of its ways to speculate."""
    own = [str(chosen.llama_server), "--model", str(pair.target), "--ctx-size", str(chosen.context), "--parallel", "1"]
    own += ["--threads", str(default_threads()), "--cache-ram", "0", "--jinja"]
    found: dict[str, Any] = {}
    asked = [{"role": "user", "content": prompt.text} for prompt in PROMPTS[: chosen.prompts]]
    bodies = [{"messages": [each], "temperature": 0, "max_tokens": chosen.tokens} for each in asked]
    for flags in ([], *speculating(pair)):
        label = " ".join(flags[:2] + flags[4:]) or "plain"
        server = LlamaServer()
        try:
            server.start([*own, *flags], {"log": str(chosen.out / f"{job.name}.server.log"), "clients": "1"})
            with closing(server):
                told = (server.post("/v1/chat/completions", body)["timings"] for body in bodies)
                found[label] = server.complaint() or median(each["predicted_per_second"] for each in told)
        except (Refusal, OSError, ValueError, KeyError, TypeError) as exc:
            found[label] = f"{type(exc).__name__}: {exc}"
    rates = {label: rate for label, rate in found.items() if isinstance(rate, float)}
    best = max(rates, key=lambda label: rates[label], default="")
    return {**found, "best": best, "best_per_s": rates.get(best, 0.0)}


def speculating(pair: ModelPair) -> Iterator[list[str]]:
    """Flags of llama-server: a kind of drafts, the draft's file, and how many tokens."""
    yield ["--spec-default"]
    if pair.draft is None or pair.draft.suffix != ".gguf":
        return
    kind = head_kind_of(pair.draft)
    name = "simple" if kind is None else "dspark" if kind == "dflash" and read_head(pair.draft).has_markov else kind
    for length in LENGTHS:
        yield ["--spec-type", f"draft-{name}", "--model-draft", str(pair.draft), "--spec-draft-n-max", str(length)]


def row(told: dict[str, Any]) -> str:
    """The row of the table."""
    text = "-"
    if "compared" in told:
        text = f"{told['compared']} answers, {told['accepted']} of {told['drafted']} drafted tokens accepted"
        text += f"; {told['differs_as_allowed']} differ" if told["differs_as_allowed"] else ""
    memory = f"{told['planned_bytes'] / 1e6:.0f} / {told['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in told else "-"
    theirs = told.get("llama_server", {})
    over = "-"
    if theirs.get("best_per_s") and told.get("plain_per_s"):
        over = f"{told['plain_per_s'] * told['gain'] / theirs['best_per_s']:.2f} ({theirs['best']})"
    outcome = told["outcome"] + (f": {told['reason']}; {told['fix']}" if "fix" in told else "")
    cells = [told["model"], told["draft"] or "none", told.get("engine", "-"), text, memory]
    cells += [f"{told['gain']:.2f}" if "gain" in told else "-", over, outcome]
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def write_table(out: Path) -> list[dict[str, Any]]:
    """results.md, by size; what it shows."""
    told = [json.loads(path.read_text(encoding="utf-8")) for path in out.glob("verify-*.json")]
    told.sort(key=lambda each: sum(file["bytes"] for file in each.get("files", ())))
    head = "| model | draft | engine | same text | plan / peak, MB | over plain | over llama-server | outcome |"
    table = "\n".join((head, "|---" * 8 + "|", *map(row, told), ""))
    (out / "results.md").write_text(table, encoding="utf-8")
    return told


def is_done(path: Path) -> bool:
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"edgespec": ""}
    return bool(told["edgespec"] == edgespec.__version__ and told["outcome"] != LATER)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="entries of the catalogue (default: all)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--most-gb", type=float, default=8.0, help="of a target with its draft (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=30.0, help="for one child (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--discard", action="store_true", help="remove each model when it is done")
    parser.add_argument("--again", action="store_true", help="also what was done before")
    parser.add_argument("--list", action="store_true", help="print what would be checked")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen.child, chosen)
        return 0
    if chosen.llama_server and not chosen.llama_server.is_file():
        parser.error(f"there is no {chosen.llama_server}: give the path of llama.cpp's llama-server")
    found = [job for job in jobs(chosen.names) if entry_bytes(job.entry) <= chosen.most_gb * 1e9]
    if chosen.list:
        for job in found:
            drafted = job.draft or job.entry.drafted_by or "none"
            print(f"{job.name}: about {entry_bytes(job.entry) / 1e9:.1f} GB from {job.entry.repo}, draft {drafted}")
        return 0
    chosen.out.mkdir(parents=True, exist_ok=True)
    for job in found:
        path = chosen.out / f"{job.name}.json"
        if is_done(path) and not chosen.again:
            print(f"{job.name}: done before")
            continue
        print(f"{job.name}: {job.entry.repo}", flush=True)
        told = check(job, chosen)
        path.write_text(json.dumps(told, indent=1), encoding="utf-8")
        print(row(told), flush=True)
        write_table(chosen.out)
        if chosen.discard and "files" in told:
            remove(job.name)
    return int(any(told["outcome"] != PASSED for told in write_table(chosen.out)))


if __name__ == "__main__":
    sys.exit(main())
