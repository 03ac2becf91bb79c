"""Writes how a server for many users runs the same pair: vLLM, SGLang or llama.cpp's server.

vLLM and SGLang read the original weights from the hub, llama.cpp's server reads the GGUF files. What is handed over is
the pair, which drafter to use, and the draft length that `edgespec tune` found on this machine, or a usual one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgespec.errors import CapabilityError, ConfigError
from edgespec.formats.gguf.header import read_header
from edgespec.formats.manifest import ModelFile
from edgespec.loading.catalogue import entries
from edgespec.loading.registry import resolve
from edgespec.tuning.profiles import load_profile, profile_path

USUAL_LENGTH = 4
LOOKUP_TOKENS = 3  # of the end of the text, which lookups search for
CHECK_S = 120.0
LOOKUPS = ("ngram", "suffix", "corpus", "cache")
# Where a converter writes the weights that a GGUF was made of.
_ORIGINS = ("general.source.repo_url", "general.base_model.0.repo_url")
HELP = {
    "vllm": ("vllm", "serve", "--help=all"),
    "sglang": ("sglang", "serve", "--help"),
    "llama-server": ("llama-server", "--help"),
}
# Original weights whose `vocab_size` is larger than that of the smaller models of their family. It is padding, but vLLM
# and SGLang compare this number.
_PADDED = frozenset(
    {
        "Qwen/Qwen2.5-7B-Instruct",
        "Qwen/Qwen2.5-14B-Instruct",
        "Qwen/Qwen2.5-32B-Instruct",
        "Qwen/Qwen2.5-72B-Instruct",
        "Qwen/Qwen2.5-Coder-7B-Instruct",
        "Qwen/Qwen2.5-Coder-32B-Instruct",
        "codellama/CodeLlama-7b-Instruct-hf",
        "google/gemma-3-4b-it",
        "google/gemma-3-12b-it",
        "google/gemma-3-27b-it",
    }
)


@dataclass(frozen=True, slots=True)
class Handover:
    """How `engine` runs a pair. `target`, `draft`: hub ids or paths, none for lookups; `kind`: model, eagle3, ngram.

    `length`: most tokens of a draft; `is_measured`: it was found by `edgespec tune` and is no guess; `note`: what
    differs from what was asked for, empty for nothing.
    """

    engine: str
    target: str
    kind: str
    draft: str
    length: int
    is_measured: bool
    note: str = ""

    @property
    def vocabularies_differ(self) -> bool:
        """Whether the original weights of the draft have another `vocab_size` than the target's."""
        return self.kind == "model" and (self.target in _PADDED) != (self.draft in _PADDED)

    @property
    def command(self) -> list[str]:
        """The command to start the server, as words."""
        return _COMMANDS[self.engine](self)


def handover(
    engine: str,
    model: str,
    *,
    draft: str | None = None,
    weights: str | None = None,
    draft_weights: str | None = None,
    length: int | None = None,
    heads: bool = False,
) -> Handover:
    """How `engine` (a key of `HELP`) runs `model`: a name of the catalogue, a pair on this machine, or a file.

    `weights`, `draft_weights`: hub ids of the original weights where they are not known; `heads`: the published EAGLE-3
    head of the catalogue drafts, not the draft model. Raises ConfigError when an id or a head is not known, and as
    `resolve`.
    """
    if engine not in HELP:
        raise ConfigError(f"{engine!r} is not a server that edgespec can write commands for: use {', '.join(HELP)}")
    if length is not None and not 1 <= length <= 64:
        raise ConfigError(f"a draft length of {length} was given; 1..64 is allowed")
    found, is_measured = _measured(model, draft)
    length = length or found.get("draft_length") or USUAL_LENGTH
    kind = "ngram" if found.get("drafter") in LOOKUPS else "eagle3" if heads else "model"
    entry = entries().get(model)
    if engine == "llama-server" or entry is None:
        sources = _local(engine, model, draft, weights, draft_weights)
    else:
        drafts_with = entries().get(draft or entry.draft)
        sources = weights or entry.weights, draft_weights or (drafts_with.weights if drafts_with else "")
    target, small = sources
    if kind == "eagle3":
        published = [head.repo for head in entry.heads if head.kind == kind] if entry else []
        if not published or engine == "llama-server":
            raise ConfigError(f"no published EAGLE-3 head is known for {model!r} with {engine}: leave --heads out")
        small = published[0]
    if kind == "model" and not small:
        kind = "ngram"
    made = Handover(engine, target, kind, small if kind != "ngram" else "", int(length), is_measured)
    if engine == "sglang" and made.vocabularies_differ:
        note = f"SGLang refuses {small} as a draft, because its vocab_size differs: SGLang's n-gram lookup is used"
        return replace(made, kind="ngram", draft="", note=note)
    return made


def _measured(model: str, draft: str | None) -> tuple[Mapping[str, Any], bool]:
    """The settings that `tune` found, and whether a draft length is among them."""
    path = profile_path(model, Path(draft) if draft else None)
    if path is None or not path.is_file():
        return {}, False
    settings = load_profile(path).settings
    length = settings.get("draft_length")
    return {**settings, "draft_length": length if isinstance(length, int) else None}, isinstance(length, int)


def _local(
    engine: str, model: str, draft: str | None, weights: str | None, draft_weights: str | None
) -> tuple[str, str]:
    """The two sources of a pair on this machine: its GGUF files, or the hub ids of their original weights."""
    pair = resolve(model, Path(draft) if draft else None, check_hashes=False)
    target, small = pair.files["target"], pair.files.get("draft")
    if engine != "llama-server":
        return weights or _origin(target, "--weights"), draft_weights or (
            _origin(small, "--draft-weights") if small else ""
        )
    for file in filter(None, (target, small)):
        if not file.is_gguf:
            raise ConfigError(
                f"llama-server reads GGUF files, {file.path} is ONNX: give the GGUF that it was made from"
            )
    return str(target.path), str(small.path) if small else ""


def _origin(file: ModelFile, flag: str) -> str:
    """The hub id of the weights that a GGUF was made of."""
    metadata = read_header(file.path).metadata if file.is_gguf else {}
    for key in _ORIGINS:
        url = urlsplit(str(metadata.get(key, "")))
        if url.netloc == "huggingface.co" and url.path.count("/") == 2:
            return url.path.strip("/")
    raise ConfigError(f"{file.path.name} does not say which weights it was made from: give {flag} with their hub id")


def _vllm(given: Handover) -> list[str]:
    spec: dict[str, object] = {"num_speculative_tokens": given.length}
    if given.kind == "ngram":
        spec |= {"method": "ngram", "prompt_lookup_max": LOOKUP_TOKENS, "prompt_lookup_min": LOOKUP_TOKENS - 1}
    else:
        spec |= {"method": "eagle3" if given.kind == "eagle3" else "draft_model", "model": given.draft}
    if given.vocabularies_differ:
        spec["use_heterogeneous_vocab"] = True
    return ["vllm", "serve", given.target, "--speculative-config", json.dumps(spec)]


def _sglang(given: Handover) -> list[str]:
    words = ["sglang", "serve", "--model-path", given.target]
    # A chain, one row of which is the token that is known already.
    rows = ["--speculative-num-draft-tokens", str(given.length + 1)]
    if given.kind == "ngram":
        return [*words, "--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1", *rows]
    words += ["--speculative-algorithm", "EAGLE3" if given.kind == "eagle3" else "STANDALONE"]
    words += ["--speculative-draft-model-path", given.draft, "--speculative-num-steps", str(given.length)]
    return [*words, "--speculative-eagle-topk", "1", *rows]


def _llama_server(given: Handover) -> list[str]:
    words = ["llama-server", "-m", given.target]
    if given.kind == "ngram":
        words += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(LOOKUP_TOKENS)]
        return [*words, "--spec-ngram-simple-size-m", str(given.length)]
    words += ["--spec-type", "draft-simple", "--model-draft", given.draft]
    return [*words, "--spec-draft-n-max", str(given.length)]


_COMMANDS = {"vllm": _vllm, "sglang": _sglang, "llama-server": _llama_server}


def check(given: Handover) -> bool:
    """Whether the server itself was asked about its flags; False where it is not installed.

    Raises CapabilityError for a server that does not know one of them.
    """
    words = HELP[given.engine]
    program = shutil.which(words[0])
    if program is None:
        return False
    try:
        done = subprocess.run([program, *words[1:]], capture_output=True, text=True, timeout=CHECK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode:
        return False
    unknown = [word for word in given.command if word.startswith("--") and word not in done.stdout + done.stderr]
    if unknown:
        raise CapabilityError(f"the {given.engine} that is installed does not know {', '.join(unknown)}: update it")
    return True
