"""`edgespec ls`, `show`, `plan`, `pull`, `add`, `rm`, `drafts`: the models on this machine, and those to pull."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import FilePath, complete_model, printable, run_command
from edgespec.cli.main import BAD_INPUT, INTERRUPTED
from edgespec.cli.options import SettingsCommand, resolve_settings, settings_options
from edgespec.cli.terminal import note, runner, waiting
from edgespec.config.options import REMEMBERING, LoadOptions
from edgespec.config.values import aligned, as_size
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import ModelPair
from edgespec.installation import quoted
from edgespec.loading.catalogue import Entry, entries, entry_called
from edgespec.loading.download import OnBytes
from edgespec.loading.model_facts import ModelFacts, size_label
from edgespec.loading.own_models import add as add_model
from edgespec.loading.own_models import drafted_from, entry_bytes, fits, list_here, list_known, pair_bytes, remove
from edgespec.loading.pull import pull as pull_model
from edgespec.loading.registry import is_known, resolve
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import Fitted, chosen_context, fit, placed
from edgespec.memory.plan import Room, planned
from edgespec.memory.watch import plan_object

if TYPE_CHECKING:
    from edgespec.loading.drafts import Aim, Candidate

_FITS = {True: "yes", False: "no", None: "?"}


@click.command("ls")
@click.option("--all", "everything", is_flag=True, help="Also those that can be pulled")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list")
def ls(everything: bool, as_json: bool) -> int:
    """List the models on this machine, also those of Ollama, LM Studio and the hub's cache.

    Sizes are those of the target with its draft model or heads; ~ marks a guess from the number of weights. Whether a
    model fits depends on the memory that is available now.
    """
    here = list(list_here())
    known = list(list_known({each.name for each in here}))
    shown = [*here, *(known if everything else ())]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(each) for each in shown]))
        return 0
    rows = [("name", "size", "fits", "state", "draft", "")]
    for m in shown:
        size = f"{'~' if m.is_guess else ''}{m.bytes / 1e9:.2f} GB"
        rows.append((m.name, size, _FITS[m.fits], m.state, m.draft, printable(m.description)))
    for number, line in enumerate(aligned(rows, right=(1,))):
        click.echo(line if number else click.style(line, bold=True))
    if not everything:
        note(f"{len(known)} more can be pulled: edgespec ls --all. A file runs as it is: edgespec chat ./FILE.gguf")
    return 0


@click.command("show")
@click.argument("name", metavar="MODEL", shell_complete=complete_model)
def show(name: str) -> int:
    """Show what a model is and can do, the memory it takes and its files; of one to pull, where it comes from."""
    entry = None if is_known(name) else entry_called(name.partition(":")[0]) or entry_called(name)
    if entry is not None:
        _show_entry(entry)
        click.echo(f"get it: edgespec pull {entry.name}")
        return 0
    pair = resolve(name)
    for file in pair.files.values():
        if file.is_gguf:
            check_gguf(file.path)
    click.echo(f"{pair.name}: {printable(pair.description) or 'on this machine'}")
    for line in aligned(card(LoadOptions(model=name), pair)):
        click.echo(f"  {printable(line)}")
    for role, file in (*pair.files.items(), *((f"{kind} heads", file) for kind, file in pair.heads.items())):
        parts = f", {len(file.all_files)} files" if file.parts else ""
        click.echo(f"{role}: {file.path}, {file.all_bytes / 1e6:.1f} MB{parts}")
    click.echo(
        f"run it: {run_command(name, pair.files['target'])}"
        + ("" if drafted_from(pair) else f"; drafts for it: edgespec drafts {quoted(name)}")
    )
    return 0


@click.command("add")
@click.argument("path", type=FilePath(), metavar="PATH")
@click.option("--name", default="", help="Name of the model.  [default: that of the file or folder]")
@click.option("--draft", type=FilePath(), metavar="FILE", help="Its draft model")
def add(path: Path, name: str, draft: Path | None) -> int:
    """Give a GGUF or ONNX model a name. The file stays where it is; it is tried and its checksum is kept."""
    chosen = add_model(path, name, draft)
    click.echo(f"added: {run_command(chosen, resolve(chosen).files['target'])}")
    return 0


@click.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_model)
def rm(names: tuple[str, ...]) -> int:
    """Remove models from your models folder, unfinished downloads too. Files that were added stay where they are."""
    for name in names:
        freed = remove(name)
        click.echo(f"removed: {name}" + (f", {freed / 1e6:.1f} MB" if freed else "; its files stay where they are"))
    return 0


def card(options: LoadOptions, pair: ModelPair) -> list[tuple[str, str]]:
    """What `ollama show` tells of a model, and the memory it takes: labels and texts."""
    with keeping_headers():
        facts = ModelFacts.read(pair)
        used, engine = 0, ""
        try:
            pair, room = resolve_pair(options), Room.now(None)
            plan = planned(chosen_context(options, pair, room), pair)
            used, engine, verdict = plan.context_length, runner(pair.files["target"]), room.verdict(plan)
            memory = f"{as_size(plan.total_bytes)}, fits" if verdict.fit == "fits" else str(verdict)
        except EdgespecError:  # heads, say, which are no model of their own
            memory = _fit_of(pair_bytes(pair), has_draft=bool(drafted_from(pair)))
    switch = ", --no-thinking turns it off" if "enable_thinking" in facts.chat_template else ""
    trained = facts.metadata.get(f"{facts.architecture}.context_length")
    more = f", up to {trained} with -c" if used and trained and trained != used else ""
    rows = {
        "architecture": facts.architecture,
        "parameters": size_label(facts.num_parameters),
        "quantisation": facts.quantization,
        "context": f"{used or trained} tokens{more}" if used or trained else "",
        "template": "yes" if facts.chat_template else "none, as usual for base models: it continues text",
        "thinking": f"yes{switch}" if "thinking" in facts.capabilities else "no",
        "tools": "yes" if "tools" in facts.capabilities else "no",
        "heads": ", ".join(pair.heads),
        "licence": pair.licence or str(facts.metadata.get("general.license", "")) or "not said in the file",
        "source": pair.source,
        "runs on": engine,
        "memory": memory,
    }
    return [(label, text) for label, text in rows.items() if text]


def _show_entry(entry: Entry) -> None:
    click.echo(f"{entry.name}: {entry.description}, {entry.parameters / 1e9:.3g} billion weights")
    click.echo(f"source: {entry.repo}, {entry.quant} (licence: {entry.licence}; tokenizer family: {entry.family})")
    if entry.draft:
        click.echo(f"draft: {entry.draft}, {entries()[entry.draft].description}")
    for head in entry.heads:
        how = "get it with" if head.gguf else "convert it with"
        click.echo(
            f"{head.kind} head: {head.repo} (licence: {head.licence or 'not known'}), {how}: {head.command(entry.name)}"
        )
    if entry.advice:
        click.echo(f"advice: {entry.advice}")
    click.echo(f"verified: {entry.verified or 'no; nobody has tried this entry with edgespec yet'}")
    click.echo(f"size: {_fit_of(entry_bytes(entry), has_draft=bool(entry.draft), is_guess=not entry.known_bytes)}")


def _fit_of(num_bytes: int, *, has_draft: bool, is_guess: bool = False) -> str:
    answer = {True: "fits", False: "does not fit", None: "unknown whether it fits"}[fits(num_bytes)]
    size = f"{'about ' if is_guess else ''}{num_bytes / 1e9:.2f} GB{' with its draft' if has_draft else ''}"
    return f"{size}; {answer} into the memory that is available now"


# -- plan: nothing is loaded


@click.command("plan", cls=SettingsCommand)
@settings_options("load", leave_out=REMEMBERING)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table")
def plan(model_name: str | None, config_file: Path | None, as_json: bool, **given: Any) -> int:
    """Show the memory that a model and its draft would take, by part, and whether it fits. Loads nothing.

    With --memory it chooses what to give up to fit into a budget, as every load does. Exit code 2: it would be refused.
    MODEL is a name, a GGUF or ONNX file, or a folder with one.
    """
    settings = resolve_settings(given, model_name, config_file)
    options = LoadOptions(**settings.part("load"))
    room = Room.now(options.memory)
    with keeping_headers():
        pair = resolve_pair(options)
        options = placed(chosen_context(options, pair, room), pair)
        refusal = ""
        try:
            fitted = fit(options, pair, room)
        except CapabilityError as exc:
            needed = planned(options, pair)
            fitted, refusal = Fitted(options, pair, needed, room.verdict(needed)), str(exc)
    if as_json:
        click.echo(json.dumps({**plan_object(fitted), "refusal": refusal or None}))
    else:
        _show_plan(fitted, refusal)
    return BAD_INPUT if refusal else 0


def _show_plan(fitted: Fitted, refusal: str) -> None:
    plan, options = fitted.plan, fitted.options
    sizes = [(part.name, *(as_size(size) if size else "" for size in (part.own, part.mapped))) for part in plan.parts]
    together = ("together, at most", as_size(plan.own_bytes), as_size(plan.mapped_bytes))
    rows = [(plan.name, "own memory", "mapped from files"), *sizes, together]
    for number, line in enumerate(aligned(rows, right=(1, 2))):
        click.echo(click.style(line, bold=number in (0, len(rows) - 1)))
    if plan.device_note:
        layers = options.target_gpu_layers, options.draft_model_gpu_layers
        experts = f" -ncmoe {options.cpu_moe_layers}" if options.cpu_moe_layers else ""
        click.echo(plan.device_note + (f" (-ngl {layers[0]} -ngld {layers[1]}{experts})" if any(layers) else ""))
    for each in fitted.given_up:
        click.echo(f"given up: {each.text} ({each.flags})")
    click.echo(f"refused: {refusal}" if refusal else f"{fitted.verdict}")


# -- pull


@click.command("pull")
@click.argument("model", metavar="MODEL", shell_complete=complete_model)
@click.option("--draft", default="", metavar="MODEL", help="Use this draft instead of the model's own")
@click.option("--no-draft", is_flag=True, help="Get the model without a draft")
@click.option("--name", default="", help="Name of the model.  [default: that of the model or repository]")
@click.option("--revision", default="", metavar="REV", help="Branch, tag or commit of the repository")
def pull(model: str, draft: str, no_draft: bool, name: str, revision: str) -> int:
    """Get a model into your models folder (EDGESPEC_MODELS).

    MODEL is a name that edgespec ls shows, or a repository of the Hugging Face hub with GGUF or ONNX files, either
    optionally followed by :QUANT, such as qwen3-8b or Qwen/Qwen3-8B-GGUF:Q4_K_M. An interrupted download resumes where
    it stopped. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are respected.
    """
    if draft and no_draft:
        raise click.UsageError("--draft and --no-draft contradict each other: keep one")
    try:
        pair = fetched(model, name=name, draft=draft, wants_draft=not no_draft, revision=revision)
    except KeyboardInterrupt:
        note("interrupted: the same command continues")
        return INTERRUPTED
    chosen = pair.target.parent.name
    size = pair_bytes(pair)
    if fits(size) is False:
        note(f"note: {size / 1e9:.1f} GB do not fit into the memory that is available now: it will be slow")
    if pair.draft is None:
        entry = entries().get(chosen)
        advice = entry.advice if entry else ""
        note(advice or f"{chosen} has no draft model; edgespec drafts {chosen} ranks those that fit")
    click.echo(f"run it: {run_command(chosen, pair.files['target'])}")
    return 0


def fetched(model: str, *, name: str = "", draft: str = "", wants_draft: bool = True, revision: str = "") -> ModelPair:
    """Pull a model and show how far it is. Raises as `edgespec.loading.pull.pull`."""
    with _progress(model) as on_bytes:
        return pull_model(model, on_bytes, note, name=name, draft=draft, wants_draft=wants_draft, revision=revision)


@contextmanager
def _progress(model: str) -> Iterator[OnBytes]:
    """A line when a file begins, and in a terminal one for how far it is, how fast, and how long it will take."""
    begun: dict[str, tuple[int, float]] = {}  # bytes that were here, and when it began
    with waiting(f"getting {model}") as on_progress:

        def on_bytes(name: str, done: int, total: int) -> None:
            if name not in begun:
                begun[name] = done, monotonic()
                rest = f", {done / 1e6:.1f} MB of it are already here" if done else ""
                note(f"fetching {name}, {total / 1e6:.1f} MB{rest}")
            before, begun_s = begun[name]
            rate = (done - before) / max(monotonic() - begun_s, 1e-3)
            if rate and sys.stderr.isatty():
                left = timedelta(seconds=round((total - done) / rate))
                said = f"{name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s, {left} left"
                on_progress(0, 0, said)

        yield on_bytes


# -- drafts


@click.command("drafts")
@click.argument("target", metavar="TARGET", shell_complete=complete_model)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object")
def drafts(target: str, as_json: bool) -> int:
    """Rank draft models and heads for TARGET: those on this machine and those to pull.

    Compares vocabularies, heads and targets as loading does, sizes and memory. What a draft gains is a guess from its
    size and its kind: bench measures it. The last line is the command to run. TARGET is a name, a file or a folder.
    """
    from edgespec.loading.drafts import find_aim, rank  # imports numpy, which the other commands do without

    with waiting("comparing vocabularies"):
        aim = find_aim(target)
        found = rank(aim)
    best = next((each for each in found if each.is_worth_it), None)
    commands = _commands(aim, target, best)
    if as_json:
        listed = [dataclasses.asdict(each) | {"path": each.path and str(each.path)} for each in found]
        click.echo(json.dumps({"target": aim.name, "bytes": aim.bytes, "drafts": listed, "commands": commands}))
        return 0
    click.echo(f"Drafts for {aim.name} ({aim.bytes / 1e6:.0f} MB){', best first:' if found else ': none'}")
    for number, each in enumerate(found, 1):
        click.echo(f"  {number}. {_sentence(each, aim)}")
    if best is None:
        note("no draft model can be used: lookups draft instead, and the heads that this model may have")
    for line in commands:
        click.echo(line)
    return 0


def _commands(aim: Aim, target: str, best: Candidate | None) -> list[str]:
    run = run_command(target, aim.file)
    if aim.file is None and aim.entry is not None:
        is_own = best is None or best.name == aim.entry.drafted_by  # of several heads of its own the first one
        return [f"edgespec pull {target}" + ("" if is_own or best is None else f" --draft {best.name}"), run]
    if best is None or (best.path is not None and best.path == aim.own_draft):
        return [run]
    get = [] if best.path else [f"edgespec pull {best.name}"]
    return [*get, f"{run} -md {quoted(best.name)}"]


def _sentence(each: Candidate, aim: Aim) -> str:
    """Its name, size and place, and how it compares."""
    name = each.name.removeprefix(f"{Path.cwd()}{os.sep}")
    size = f"{each.bytes / 1e6:.0f} MB" if each.bytes else "size not known"
    said = [f"{name}: {size}", "here" if each.path else "to pull"]
    if each.why_not:
        return f"{', '.join(said)}; cannot draft: {', '.join(filter(None, (each.vocabulary, each.why_not)))}"
    said += ["with llama.cpp"] if each.leaves_kernels else []
    if not each.bytes:
        return f"{', '.join(said)}; {each.vocabulary}"
    gain = (
        f"a token takes about {each.cost:.0%} of the target's, so up to {each.gain:.1f} times plain decoding if "
        f"{each.right:.0%} of its tokens are right"
    )
    return f"{', '.join(said)}; {gain}; {each.vocabulary if each.is_head else f'vocabulary: {each.vocabulary}'}"
