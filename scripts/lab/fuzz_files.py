"""Cases of `fuzz.py` with damaged files: models, folders of graphs, manifests, heads, caches, stores, settings."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edgespec
from edgespec import GenerateOptions, Sampling
from fuzz_cases import DEMO, Case, Garbage, Known, command_line
from fuzz_mutate import damaged_bytes, damaged_json, damaged_text

TOKENS = 10
PROMPT = "Hi, can you find"
GRAPH_FILES = ("model.onnx", "model.onnx.data", "tokenizer.json", "tokenizer_config.json", "config.json",
               "genai_config.json", "chat_template.jinja")  # fmt: skip
Damage = Callable[[random.Random, Path], str]


def answer(model: str, **options: Any) -> str:
    """What a model says, greedily. Raises Garbage where its log probabilities are none."""
    given: dict[str, Any] = {"reproducible": False, "threads": 1, "drafter": "none"} | options
    with edgespec.load(model, **given) as loaded:
        found = loaded.generate(PROMPT, Sampling(temperature=0.0), GenerateOptions(max_tokens=TOKENS, ignore_eos=True))
    if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in found.logprobs):
        raise Garbage(f"log probabilities {found.logprobs}")
    return found.text


def known() -> Known:
    """What the undamaged models say, and a cache and stores that are filled."""
    home = Path(os.environ["EDGESPEC_HOME"])
    texts = {"pair": answer("demo"), "pair onnx": answer("demo", engine="onnx")}
    texts["reproducible"] = answer("demo", reproducible=True)
    texts["cache"] = answer("demo", **_CACHED)
    (home / "note.txt").write_text("Hi, can you find me a restaurant? " * 20)
    assert command_line(["corpus", "add", str(home / "note.txt")]) == 0
    assert command_line(["generate", "-p", PROMPT, "-n", "8", "--seed", "1", "--ignore-eos", "--learn"]) == 0
    return texts


_CACHED = {"engine": "onnx", "reproducible": None, "drafter": "auto"}


def cases(rng: random.Random, index: int, texts: Known) -> Case:
    """Case `index` of this kind."""
    name = list(_KINDS)[index % len(_KINDS)]
    label, run = _KINDS[name](rng, texts)
    return Case(f"files {name}: {label}", run)


Made = tuple[str, Callable[[Path], None]]


def _gguf(rng: random.Random, texts: Known) -> Made:
    """A bare file, which nobody knows a checksum of: whatever it says, in numbers, is an answer."""
    data = (DEMO / "demo-draft-q8_0.gguf").read_bytes()
    header = 330_000 if rng.random() < 0.5 else 4096
    spans = {"header": (0, header), "tensors": (header, len(data)), "anywhere": (0, len(data))}
    part = rng.choice(list(spans))
    damaged = damaged_bytes(rng, data, *spans[part])

    def run(folder: Path) -> None:
        (folder / "model.gguf").write_bytes(damaged)
        answer(str(folder / "model.gguf"))

    return part, run


def _pair(rng: random.Random, texts: Known) -> Made:
    """A file that the manifest has a checksum of."""
    engine = rng.choice(("llamacpp", "onnx"))
    names = ("demo-target-q8_0.gguf",) if engine == "llamacpp" else tuple(f"onnx/target/{name}" for name in GRAPH_FILES)
    name = rng.choice(names)
    data = (DEMO / name).read_bytes()
    damaged = damaged_bytes(rng, data)

    def run(folder: Path) -> None:
        shutil.copytree(DEMO, folder / "pair", ignore=shutil.ignore_patterns("hf", "*.csv", "*.png"))
        (folder / "pair" / name).unlink()
        (folder / "pair" / name).write_bytes(damaged)
        said = answer(str(folder / "pair"), engine=engine)
        expect(said, texts["pair" if engine == "llamacpp" else "pair onnx"])

    return name, run


def _graph(rng: random.Random, texts: Known) -> Made:
    """A folder of a graph given by its path."""
    name = rng.choice(GRAPH_FILES)
    data = (DEMO / "onnx" / "draft" / name).read_bytes()
    if name.endswith(".json") and rng.random() < 0.7:
        damaged = damaged_json(rng, data.decode()).encode()
    else:
        damaged = damaged_bytes(rng, data)

    def run(folder: Path) -> None:
        shutil.copytree(DEMO / "onnx" / "draft", folder / "graph")
        (folder / "graph" / name).write_bytes(damaged)
        answer(str(folder / "graph"))

    return name, run


def _manifest(rng: random.Random, texts: Known) -> Made:
    text = (DEMO / "manifest.toml").read_text(encoding="utf-8")
    damaged = damaged_text(rng, text)

    def run(folder: Path) -> None:
        shutil.copytree(DEMO, folder / "pair", ignore=shutil.ignore_patterns("hf", "*.csv", "*.png"))
        (folder / "pair" / "manifest.toml").unlink()
        (folder / "pair" / "manifest.toml").write_text(damaged, encoding="utf-8", errors="surrogatepass")
        expect(answer(str(folder / "pair")), texts["pair"])

    return "manifest.toml", run


def _heads(rng: random.Random, texts: Known) -> Made:
    kind = rng.choice(("eagle", "medusa"))
    data = (DEMO / "heads" / f"{kind}.npz").read_bytes()
    damaged = damaged_bytes(rng, data)

    def run(folder: Path) -> None:
        (folder / "heads.npz").write_bytes(damaged)
        said = answer("demo", drafter=kind, heads=folder / "heads.npz", draft_length=4, reproducible=True)
        expect(said, texts["reproducible"])

    return kind, run


def _cache(rng: random.Random, texts: Known) -> Made:
    choice = rng.random()
    odd = rng.choice(("{}", "[]", "null", "[[100, 100]]", "Infinity", "[" * 5000, '{"value": 0}', "9" * 5000))

    def run(folder: Path) -> None:
        home = own_home(folder)
        files = sorted((home / "cache").glob("*/*.json"))
        file = files[rng.randrange(len(files))]
        if choice < 0.3:
            file.write_text(odd)
        elif choice < 0.6:
            file.write_text(damaged_json(rng, file.read_text()))
        else:
            file.write_bytes(damaged_bytes(rng, file.read_bytes()))
        expect(answer("demo", **_CACHED), texts["cache"])

    return "an entry", run


def _store(rng: random.Random, texts: Known) -> Made:
    kind = rng.choice(("corpus", "learnt"))

    def run(folder: Path) -> None:
        home = own_home(folder)
        (file,) = (home / "texts").glob(f"{kind}-*.npz")
        file.write_bytes(damaged_bytes(rng, file.read_bytes()))
        command_line(["corpus", "ls"], allowed=(0, 1, 2))
        for _ in range(2):
            given = {"drafter": "suffix", "learn": True, "draft_length": 4, "reproducible": True}
            expect(answer("demo", **given), texts["reproducible"])
        command_line(["corpus", "rm", "--all"])

    return kind, run


def _settings(rng: random.Random, texts: Known) -> Made:
    what = rng.choice(("config", "conversation"))
    sources = {
        "config": 'temp = 0.0\ntop-k = 5\nstop = ["x"]\ndrafter = "ngram"\ndraft-length = 4\nstats = true\n',
        "conversation": '{"format": "edgespec-conversation", "version": 1, "messages": []}',
    }

    def run(folder: Path) -> None:
        own_home(folder)
        path = folder / "file"
        if what == "conversation":
            path.write_text(damaged_json(rng, sources[what]))
            command_line(["chat", "-n", "2"], allowed=(0, 1, 2), stdin=f"/load {path}\n/show\nhi\n/save {path}\n")
            return
        path.write_text(damaged_text(rng, sources[what]), encoding="utf-8", errors="surrogatepass")
        command_line(["generate", "-p", PROMPT, "-n", "4", "--config", str(path)], allowed=(0, 2))

    return what, run


_KINDS: dict[str, Callable[[random.Random, Known], Made]] = {
    "gguf": _gguf,
    "pair": _pair,
    "graph": _graph,
    "manifest": _manifest,
    "heads": _heads,
    "cache": _cache,
    "store": _store,
    "settings": _settings,
}


def own_home(folder: Path) -> Path:
    """A copy of the home folder, which is this case's from now on."""
    home = folder / "home"
    shutil.copytree(os.environ["EDGESPEC_HOME"], home)
    os.environ["EDGESPEC_HOME"] = str(home)
    return home


def expect(said: str, expected: str) -> None:
    """Raises Garbage where a checksum or the promise of the same text should have seen to it."""
    if said != expected:
        raise Garbage(f"{said!r} instead of {expected!r}")
