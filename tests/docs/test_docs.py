"""README and docs are true: code runs as printed, commands, options, links, files and names exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import edgespec
from edgespec.cli.main import cli
from edgespec.config.options import SETTINGS
from edgespec.config.sources import resolve
from edgespec.config.values import DRAFTERS
from edgespec.loading.catalogue import entries

ROOT = Path(edgespec.__file__).resolve().parents[1]
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Commands of the first pages that finish in seconds without a network: they are run, the others are parsed.
STARTS = ("python3 scripts/run.py ", "edgespec ")
FIRST_PAGES = ("README.md", "docs/quickstart.md", "docs/models.md")
RUNNABLE = ("run", "doctor", "verify", "chat", "ls", "show", "drafts")


def blocks(name: str, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(TEXTS[name]) if kind == language]


def command_lines(name: str) -> Iterator[str]:
    """Shell lines of a page, continuation lines joined."""
    for block in blocks(name, "sh"):
        yield from (line for line in block.replace("\\\n", " ").splitlines() if line.strip())


def words_of(line: str) -> list[str]:
    """The arguments of `edgespec` in a shell line, behind variables and pipes; empty for another program."""
    line = line.rpartition("| ")[2].strip()
    line = re.sub(r"^(EDGESPEC_\w+=\S+ )+", "", line)
    for start in STARTS:
        if line.startswith(start):
            return shlex.split(line.removeprefix(start), comments=True)
    return []


EDGESPEC_LINES = [(name, line) for name in PAGES for line in command_lines(name) if words_of(line)]
SCRIPT_LINES = [(name, line) for name in PAGES for line in command_lines(name) if line.startswith("python scripts/")]


def find_command(words: list[str]) -> tuple[click.Command, click.Context, list[str]]:
    """The command that `words` name, its context, and its arguments."""
    group, context = cli, click.Context(cli, info_name="edgespec")
    while True:
        command = group.get_command(context, words[0])
        assert command is not None, f"no command {words[0]}"
        context, words = click.Context(command, parent=context, info_name=words[0]), words[1:]
        if not isinstance(command, click.Group):
            return command, context, words
        group = command


@pytest.mark.parametrize("name", [name for name in PAGES if blocks(name, "python")])
def test_python_runs_as_printed(name: str, tmp_path: Path) -> None:
    """The blocks of a page, one after another in one process."""
    code = "\n".join(blocks(name, "python"))
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_both_commands_stand_at_the_top_of_a_readme_of_one_screen() -> None:
    text = TEXTS["README.md"]
    assert text.count("\n") <= 120
    assert "python3 scripts/run.py chat" in text[:700]
    assert "python3 scripts/run.py test" in text[:700]


@pytest.mark.parametrize(("name", "line"), EDGESPEC_LINES, ids=lambda value: value)
def test_commands_parse(name: str, line: str) -> None:
    """Every option of a printed command exists and takes what is given to it; files need not exist."""
    words = words_of(line)
    if words[0] in ("test", "lint", "install", "--help", "--help-all"):  # of scripts/run.py; of the group itself
        return
    command, context, arguments = find_command(words)
    given, _, order = command.make_parser(context).parse_args(list(arguments))
    for parameter in order:
        value = given.get(parameter.name or "")
        if value is not None and isinstance(parameter.type, click.Choice | click.types.IntParamType):
            parameter.type_cast_value(context, value)


@pytest.mark.parametrize("line", dict.fromkeys(line for name, line in EDGESPEC_LINES if name in FIRST_PAGES))
def test_first_commands_run(line: str) -> None:
    """What a reader tries first works on the demo pair; what needs own files or minutes is parsed above."""
    words = words_of(line)
    needs_pull = words[0] in ("chat", "run") and bool({*words} & {*entries()})
    if words[0] not in RUNNABLE or needs_pull or any("./" in word for word in words):
        return
    text = re.search(r'^echo "(.*?)" \|', line)
    command = [sys.executable, "-m", "edgespec", *words]
    typed = text[1] if text else "/help\n/exit\n"
    # A seed, as one answer in a few hundred is empty.
    env = os.environ | {"EDGESPEC_SEED": "1"}
    done = subprocess.run(command, input=typed, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or words[0] == "chat"


@pytest.mark.parametrize(("name", "line"), SCRIPT_LINES, ids=lambda value: value)
def test_scripts_have_these_options(name: str, line: str) -> None:
    words = shlex.split(line)
    assert {word for word in words[2:] if word.startswith("--")} <= script_flags(ROOT / words[1])


def script_flags(script: Path) -> set[str]:
    """Long options that are named there, or made of the fields of a class of options."""
    source = script.read_text(encoding="utf-8")
    fields = re.findall(r"^ +(\w+): .* = option\(", source, re.MULTILINE)
    return {*re.findall(r'"(--[a-z-]+)"', source), *(f"--{name.replace('_', '-')}" for name in fields)}


def all_flags() -> set[str]:
    """Long options of every command of edgespec, and of every script."""
    found = set()
    for each in (cli, *(cli.get_command(click.Context(cli), name) for name in cli.list_commands(click.Context(cli)))):
        assert each is not None
        for command in (each, *(each.commands.values() if isinstance(each, click.Group) else ())):
            found |= {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}
    for script in (ROOT / "scripts").rglob("*.py"):
        found |= script_flags(script)
    return found


def test_options_in_the_text_exist() -> None:
    # Of xcode-select, aider, Claude Code, Ollama and llama.cpp's converter.
    known = all_flags() | {"--install", "--edit-format", "--tools", "--format", "--keepalive", "--target-model-dir"}
    ours = {name: text for name, text in TEXTS.items() if name != "docs/handover.md"}  # which has those of servers
    named = {(name, flag) for name, text in ours.items() for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert sorted((name, flag) for name, flag in named if flag not in known) == []


def test_config_files_are_accepted(tmp_path: Path) -> None:
    (printed,) = blocks("docs/cli.md", "toml")
    path = tmp_path / "config.toml"
    path.write_text(printed, encoding="utf-8")
    assert resolve({}, {}, path).values == {"draft_length": 6, "learn": True}


def test_every_setting_is_documented() -> None:
    table = TEXTS["docs/cli.md"].partition("## Options of")[2].partition("## Where")[0]
    tables = dict.fromkeys(("load", "sampling", "generate", "session"), table) | {"serve": TEXTS["docs/server.md"]}
    missing = [s.key for s in SETTINGS if not any(flag in tables[s.part] for flag in (f"--{s.key}", f"--no-{s.key}"))]
    assert missing == []


def test_every_command_drafter_and_public_name_is_documented() -> None:
    commands = TEXTS["docs/cli.md"].partition("## Models")[0]
    assert [name for name in cli.list_commands(click.Context(cli)) if f"`{name}" not in commands] == []
    assert [name for name in DRAFTERS if name != "auto" and f"`{name}`" not in TEXTS["docs/drafters.md"]] == []
    assert [name for name in edgespec.__all__ if f"`{name}`" not in TEXTS["docs/python-api.md"]] == []


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere_and_named_files_exist(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (PAGES[name].parent / path).resolve() if path else PAGES[name]
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name}: {link}"
    paths = re.findall(r"`((?:edgespec|scripts|tests|models|docs|\.ci|\.github)/[\w./-]*)`", TEXTS[name])
    assert [path for path in paths if not (ROOT / path).exists()] == []
