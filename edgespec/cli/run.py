"""`edgespec run`: one prompt, one answer, as text or as one JSON object; without a prompt in a terminal, a chat."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from pathlib import Path
from typing import Any

import click

from edgespec.cli.chat import command as chat
from edgespec.cli.chat import settings_with_model
from edgespec.cli.main import FAILED, INTERRUPTED
from edgespec.cli.options import SettingsCommand, settings_options
from edgespec.cli.session import Session, length_note, open_session, require_chat_template, show_beginning
from edgespec.cli.terminal import complain, counted, is_interactive, note, stops
from edgespec.config.options import SessionOptions
from edgespec.errors import ConfigError, PromptError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.generation.handle import Result
from edgespec.loading.registry import is_known
from edgespec.platform.files import MAX_TEXT_BYTES
from edgespec.reports import Stats

STATS_KEYS = (
    *("prompt_tokens", "new_tokens", "target_passes", "drafted_tokens", "accepted_tokens", "acceptance_rate"),
    *("mean_accepted_length", "tokens_per_second", "prefill_s", "draft_s", "verify_s", "overhead_s", "wall_s"),
    *("peak_rss_bytes", "planned_bytes"),
)
FIRST_BYTE_S = 10.0


@click.command("run", cls=SettingsCommand)
@settings_options("load", "generate", "sampling", "session")
@click.argument("words", nargs=-1, metavar="[PROMPT]")
@click.option("-p", "--prompt", metavar="TEXT|-", help="The prompt, before piped text; -: piped text alone")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text")
def command(
    model_name: str | None,
    words: tuple[str, ...],
    config_file: Path | None,
    prompt: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Answer PROMPT, or what is piped; without one, chat. --no-chat-template continues it.

    MODEL is a name (demo), a GGUF or ONNX file, or a folder with one.
    """
    is_text = (prompt is None and given["model"]) or (not words and any(map(str.isspace, model_name or "")))
    if model_name is not None and is_text and not is_known(model_name):
        words, model_name = (model_name, *words), None
    if words and prompt is not None:
        raise ConfigError(f"two prompts are given, {' '.join(words)!r} and -p {prompt!r}: keep one")
    prompt = " ".join(words) if words else prompt
    if prompt is None and not as_json and is_interactive():
        return int(click.get_current_context().invoke(chat, model_name=model_name, config_file=config_file, **given))
    settings = settings_with_model(given, model_name, config_file)
    SessionOptions(**settings.part("session"))  # before the prompt is waited for
    with keeping_headers():
        require_chat_template(settings)
        text = read_prompt(prompt)
        session = open_session(settings, remembers=True)
    with session.model:
        prompt_ids = encode_prompt(session, text)
        return _print_json(session, prompt_ids) if as_json else _print_text(session, prompt_ids)


def read_prompt(prompt: str | None) -> str:
    """The text of `-p` with that of a pipe or file behind it; for `-`, or without -p, standard input alone.

    Raises PromptError.
    """
    if prompt is None:
        if sys.stdin.isatty():
            raise PromptError("no prompt given: edgespec run MODEL 'TEXT', or -p - to read it from standard input")
        prompt = "-"
    if prompt == "-":
        prompt = whole_input()
    elif prompt.strip() and (behind := text_behind()):
        prompt = f"{prompt}\n\n{behind}"
    if not prompt.strip():
        raise PromptError("the prompt is empty: give at least one character")
    try:
        prompt.encode()
    except UnicodeEncodeError as exc:  # bytes of an argument that Python could not decode
        raise PromptError(f"-p is not UTF-8 text: invalid byte behind {exc.start} characters") from exc
    return prompt


# With -p nobody has said that there is such text, so only a file or a pipe is read, as `program < FILE` and `other |
# program` make them: a terminal, /dev/null and a socket (what Node.js gives its children) are not. A pipe may also be
# one that a supervisor never writes to and never closes, so its first byte is waited for only so long.
def whole_input() -> str:
    """All of standard input. Raises PromptError for what is no text."""
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise PromptError(f"standard input has more than {MAX_TEXT_BYTES >> 20} MiB: give less text")
    try:
        return data.decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as exc:
        raise PromptError(f"standard input is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc


def text_behind() -> str:
    """What a file or a pipe on standard input holds; empty where there is neither. Raises PromptError."""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):  # closed, or no file at all
        return ""
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        return ""
    if os.name != "nt" and not select.select([descriptor], [], [], FIRST_BYTE_S)[0]:
        note(f"no data on standard input in {FIRST_BYTE_S:.0f} s: answering without it (< /dev/null does at once)")
        return ""
    text = whole_input()
    if not text.strip():
        return ""
    note(f"standard input: {counted(len(text), 'character')} behind the prompt")
    return text


def encode_prompt(session: Session, text: str) -> list[int]:
    """Token ids of one prompt, through the chat template unless that is switched off. Raises PromptError."""
    if not session.shown.chat_template:
        return session.model.encode(text)
    system = [{"role": "system", "content": session.shown.system}] if session.shown.system else []
    return session.encode([*system, {"role": "user", "content": text}])


def _print_text(session: Session, prompt_ids: list[int]) -> int:
    answer = session.stream(prompt_ids)  # checks the prompt before anything is said
    printer = session.printer(prompt_ids)
    show_beginning(session)
    is_stopped = printer.print_all(answer)
    code = _code_of(session, answer.stats)
    session.show_end(answer.stats, says_cut=not code)
    return INTERRUPTED if is_stopped else code


def _print_json(session: Session, prompt_ids: list[int]) -> int:
    answer, code = session.stream(prompt_ids), 0
    with stops(answer.cancel) as interruption:
        show_beginning(session)
        if not interruption.is_set():
            result = answer.result()
            session.show_notes(result.stats)
            click.echo(json.dumps(result_object(session, result), allow_nan=False))
            code = _code_of(session, result.stats)
    return INTERRUPTED if interruption.is_set() else code


def _code_of(session: Session, stats: Stats) -> int:
    """FAILED, with a line that --quiet does not hide, where an answer with a structure was cut; else 0."""
    structure, why = session.options.structure, length_note(stats, session.options)
    if structure is None or why is None:
        return 0
    complain(f"the answer ends before --{structure.replace('_', '-')} is complete, {why}")
    return FAILED


def result_object(session: Session, result: Result) -> dict[str, Any]:
    """What `--json` prints; the keys are a contract."""
    model = session.model
    reasoning, answer = model.split_reasoning(result) if session.splits_reasoning else ("", result.text)
    return {
        "model": model.pair.name,
        "engine": model.target.facts.name,
        "drafter": result.drafter,
        "verify": result.verify,
        "seed": result.seed,
        "reproducible": result.reproducible,
        "lossless": result.lossless,
        "prompt_token_ids": list(result.prompt_token_ids),
        "token_ids": list(result.token_ids),
        "text": result.text,
        "reasoning": reasoning,
        "answer": answer,
        "finish_reason": result.finish_reason,
        "notes": list(result.stats.notes),
        "stats": {key: getattr(result.stats, key) for key in STATS_KEYS},
    }
