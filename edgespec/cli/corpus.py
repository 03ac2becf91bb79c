"""`edgespec corpus`: the texts that are kept to draft from, a user's own and what models wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import click
import numpy as np

from edgespec.cli import FilePath, printable
from edgespec.cli.terminal import note
from edgespec.config.options import LoadOptions
from edgespec.config.sources import resolve
from edgespec.config.values import aligned
from edgespec.corpus.texts import (
    MAX_BYTES,
    Corpus,
    CorpusText,
    DamagedError,
    Documents,
    LearntTexts,
    check_name,
    check_size,
    vocabulary_key,
)
from edgespec.drafters.spec import learnt_texts
from edgespec.errors import ConfigError, StateError
from edgespec.loading.drafts import open_vocabulary
from edgespec.loading.registry import resolve as find_pair
from edgespec.platform.files import resolved
from edgespec.types import TokenIds
from edgespec.vocabulary import Vocabulary

_MIB = 1 << 20
_MODEL = click.option(
    "-m", "--model", metavar="MODEL", help="Model that the texts are for, and all with its vocabulary.  [default: demo]"
)


@click.group("corpus", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Texts on this disk to draft from. They change the speed of an answer, never its words.

    There are two kinds, each stored per vocabulary in the folder `texts` of EDGESPEC_HOME or of your data folder:
    what you add here, and the answers of chat and generate with --learn, the latest 262144 tokens.
    Drafter suffix uses both. Without --learn no answer is stored; prompts never are. `edgespec corpus rm --learnt`
    deletes stored answers.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@command.command("add")
@click.argument("paths", nargs=-1, required=True, type=FilePath(), metavar="PATH...")
@_MODEL
@click.option("--name", help="Name of the text.  [default: that of the file or folder]")
def add(paths: tuple[Path, ...], model: str | None, name: str | None) -> int:
    """Add files of text or code, or folders of them, 256 MiB of memory in all. Adding a path again replaces it."""
    if name is not None and len(paths) > 1:
        raise ConfigError(f"--name is for one text, but {len(paths)} paths are given: add them one by one")
    sources = [Documents(path) for path in paths]  # all of them are there before any is read
    with _opened(model) as (target, vocabulary, corpus, _):
        for documents in sources:
            chosen = resolved(documents.path).name if name is None else name
            check_name(chosen)
            ids = _encoded(documents, vocabulary)
            added = corpus.add(chosen, str(resolved(documents.path)), ids)
            if documents.num_left_out:
                note(f"left out as no text: {documents.num_left_out} of the files or folders in it")
            click.echo(f"added for {target}: {_described(added)}")
    return 0


@command.command("ls")
@_MODEL
def ls(model: str | None) -> int:
    """List the texts and the memory they take, and how much --learn stored."""
    with _opened(model) as (target, _, corpus, learnt):
        texts = corpus.texts()
        rows = [("name", "tokens", "files", "MiB", "added", "from")]
        for text in texts:
            counts = str(text.num_tokens), str(text.num_documents), f"{text.num_bytes / _MIB:.1f}"
            added = datetime.fromtimestamp(text.added_s, UTC).date().isoformat()
            rows.append((printable(text.name), *counts, added, printable(text.source)))
        for line in aligned(rows, right=(1, 2, 3)) if texts else ():
            click.echo(line)
        total = sum(text.num_bytes for text in texts)
        click.echo(f"corpus for {target}: {total / _MIB:.1f} of {MAX_BYTES / _MIB:.0f} MiB, {corpus.path}")
        answers = learnt.read()
        click.echo(f"learnt: {sum(map(len, answers))} tokens of {len(answers)} answers, {learnt.path}")
    return 0


@command.command("rm")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@_MODEL
@click.option("--all", "everything", is_flag=True, help="All texts, damaged or not")
@click.option("--learnt", is_flag=True, help="The answers that --learn stored")
def rm(names: tuple[str, ...], model: str | None, everything: bool, learnt: bool) -> int:
    """Remove texts by name, or all of them, or the stored answers."""
    if bool(names) + everything + learnt != 1:
        raise ConfigError("say what to remove: names as corpus ls shows them, or --all, or --learnt")
    with _opened(model) as (_, _, corpus, answers):
        for name in names:
            click.echo(f"removed: {_described(corpus.remove(name))}")
        if everything or learnt:
            store: Corpus | LearntTexts = corpus if everything else answers
            click.echo(f"removed: {store.path}" if store.clear() else f"there was nothing: {store.path}")
    return 0


@contextmanager
def _opened(model: str | None) -> Iterator[tuple[str, Vocabulary, Corpus, LearntTexts]]:
    """The name of the model, its vocabulary and what is kept in it."""
    options = LoadOptions(**resolve({"model": model}).part("load"))
    pair = find_pair(options.model, options.draft, options.engine)
    with open_vocabulary(pair.files["target"]) as vocabulary:
        try:
            corpus = Corpus(vocabulary_key(vocabulary), vocabulary.size)
            yield options.model, vocabulary, corpus, learnt_texts(vocabulary)
        except DamagedError as exc:
            fix = "edgespec corpus rm --all removes your own texts, --learnt the stored answers, damaged or not"
            raise StateError(f"{exc}; {fix}") from exc


def _encoded(documents: Documents, vocabulary: Vocabulary) -> list[TokenIds]:
    """The token ids of each document. Raises ConfigError when there is none, or as soon as they are too many."""
    found: list[TokenIds] = []
    num_tokens = 0
    for text in documents:
        found.append(np.array(vocabulary.encode(text), np.int32))
        num_tokens += found[-1].size
        check_size(str(documents.path), num_tokens)
    if not found:
        raise ConfigError(f"{documents.path} contains no text in UTF-8: give a folder that does")
    return found


def _described(text: CorpusText) -> str:
    size = f"{text.num_bytes / _MIB:.1f} MiB"
    return f"{printable(text.name)}, {text.num_tokens} tokens of {text.num_documents} files, {size}"
