"""Is the default ever slower than what a user would run without us? Ratios in one run, with their standard errors.

    python scripts/lab/measure_default.py MODEL [MODEL ...] --data DATA [--draft FILE] [--prompts N] [--tokens N]

DATA is the folder with spec_bench_dev.jsonl.xz. MODEL is a GGUF, an ONNX folder or a pair. The base line is plain
decoding in the fastest mode (`--no-reproducible --drafter none`), for a GGUF in llama.cpp; whole answers with the
reading of the prompt. Beside a GGUF's stands plain decoding on our kernels, with whose texts those of the default are
compared. Every
prompt is answered `--repeat` times by each setting, by turns, from empty caches and without the texts before; the
fastest answer of each counts, since disturbances only make it longer. The fastest mode may write other texts, which end
elsewhere: all settings are timed to the last token of the shortest answer, and the share of equal texts is told. What
automatic decoding learns of costs and drafters stays, as in use, from an empty cache folder on. Settings: the default
(`auto`), the base line loaded once more ("plain again": what is left of the machine's noise) and, with
`--reproducible`, both in reproducible mode.
`--natural-end` lets answers end where the model ends them; text past the end often repeats itself, which flatters
lookups. `--loop` adds llama-cpp-python's own loop around `Llama.eval` for GGUF files, on the same device. `--alone`
adds the default without the draft of `--draft`. `--edits` asks for changes of a function of the standard library.

    python scripts/lab/measure_default.py TARGET --draft DRAFT --alone --gpu-layers -1 --data DATA
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any

import numpy as np

import edgespec
from code_edits import edits
from edgespec import GenerateOptions, Model, Sampling
from edgespec.errors import PromptError

Tokens = list[tuple[int, float]]  # of an answer: token ids and the seconds from the request until each
Answer = Callable[[list[int]], Tokens]  # of prompt ids


def prompts_of(folder: Path, count: int) -> list[tuple[str, str]]:
    """(kind, prompt) pairs of Spec-Bench, the kinds by turns."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    with lzma.open(folder / "spec_bench_dev.jsonl.xz", "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            by_kind[record["category"]].append(record["turns"][0])
    draw = random.Random(0)
    for texts in by_kind.values():
        draw.shuffle(texts)
    rows = [(kind, texts[place]) for place in range(count) for kind, texts in by_kind.items() if place < len(texts)]
    return rows[:count]


@contextmanager
def fresh_home() -> Iterator[None]:
    """An empty cache folder for what follows."""
    before = os.environ.get("EDGESPEC_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_HOME"] = folder
        yield
    os.environ.pop("EDGESPEC_HOME")
    if before is not None:
        os.environ["EDGESPEC_HOME"] = before


def answering(model: Model, sampling: Sampling, options: GenerateOptions) -> Answer:
    def answer(ids: list[int]) -> Tokens:
        model.forget()
        started_s = perf_counter()
        return [(event.token_id, perf_counter() - started_s) for event in model.stream(ids, sampling, options)]

    return answer


def own_loop(path: Path, tokens: int, threads: int, context_length: int, gpu_layers: int) -> Answer:
    """Greedy decoding as a user of llama-cpp-python writes it: `eval`, argmax, again."""
    from llama_cpp import Llama

    llama = Llama(
        str(path),
        n_ctx=context_length,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=gpu_layers,
        verbose=False,
    )

    def answer(ids: list[int]) -> Tokens:
        llama.reset()
        written: Tokens = []
        started_s = perf_counter()
        for _ in range(tokens):
            llama.eval([written[-1][0]] if written else ids)
            token_id = int(np.argmax(llama._ctx.get_logits_ith(-1)[: llama.n_vocab()]))
            written.append((token_id, perf_counter() - started_s))
        return written

    return answer


def measure(path: str, chosen: argparse.Namespace) -> None:
    sampling = Sampling(temperature=chosen.temp, seed=1)
    shared: dict[str, Any] = {"context_length": chosen.context, "gpu_layers": chosen.gpu_layers}
    shared["provider"] = chosen.provider
    drafts = {"draft": chosen.draft, "draft_gpu_layers": chosen.draft_gpu_layers} if chosen.draft else {}
    options = GenerateOptions(max_tokens=chosen.tokens, ignore_eos=not chosen.natural_end)
    with fresh_home(), ExitStack() as stack:
        plain: dict[str, Any] = {"reproducible": False, "drafter": "none"}
        if is_gguf := path.endswith(".gguf"):
            plain["engine"] = "llamacpp"
        models = {
            "fastest plain": edgespec.load(path, **shared, **plain),
            "plain again": edgespec.load(path, **shared, **plain),
            "default": edgespec.load(path, **shared, **drafts),
        }
        if is_gguf:
            models["plain on kernels"] = edgespec.load(path, **shared, drafter="none")
        if chosen.alone:
            models["default alone"] = edgespec.load(path, **shared)
        if chosen.reproducible:
            models["reproducible plain"] = edgespec.load(path, **shared, reproducible=True, drafter="none")
            models["reproducible"] = edgespec.load(path, **shared, **drafts, reproducible=True)
        for model in models.values():
            stack.enter_context(model)
        settings = {name: answering(model, sampling, options) for name, model in models.items()}
        first = models["fastest plain"]
        target = first.pair.files["target"].path
        if chosen.loop and target.suffix == ".gguf":
            threads = first.target.facts.threads
            settings["llama-cpp-python"] = own_loop(target, chosen.tokens, threads, chosen.context, chosen.gpu_layers)
        asked = []
        for kind, text in (edits if chosen.edits else partial(prompts_of, chosen.data))(3 * chosen.prompts):
            try:
                ids = first.encode_chat([{"role": "user", "content": text}])
            except PromptError:  # a model without a chat template
                ids = first.encode(text)
            asked.append((kind, ids[: chosen.prompt_tokens]))
        own = "plain on kernels" if is_gguf else "fastest plain"
        report(path, settings, asked[: chosen.prompts], chosen.repeat, own)


def seconds_to(last: int, answers: list[Tokens]) -> float:
    """Until the token number `last`, in the fastest of several answers."""
    return min(answer[last - 1][1] for answer in answers)


def report(path: str, settings: dict[str, Answer], asked: list[tuple[str, list[int]]], repeats: int, own: str) -> None:
    """`own`: the setting whose texts the others are compared with."""
    taken: dict[str, list[float]] = defaultdict(list)
    same: dict[str, int] = defaultdict(int)
    timed = 0
    for answer in settings.values():
        answer(asked[0][1][:20])  # pages and buffers are touched before anything counts
    for number, (kind, ids) in enumerate(asked):
        answers: dict[str, list[Tokens]] = defaultdict(list)
        for turn in range(number, number + repeats):
            for name in settings if turn % 2 else reversed(settings):
                answers[name].append(settings[name](ids))
        last = min(len(answer) for each in answers.values() for answer in each)
        timed += last
        texts = {name: [token_id for token_id, _ in each[0]] for name, each in answers.items()}
        for name in settings:
            taken[name].append(seconds_to(last, answers[name]))
            same[name] += texts[name][:last] == texts[own][:last]
        found = "  ".join(f"{name} {taken['fastest plain'][-1] / taken[name][-1]:.2f}" for name in settings)
        print(f"  {kind:14} {len(ids):4} prompt tokens, {last} new  {found}", flush=True)
    base = taken["fastest plain"]
    print(f"{path}: plainly {timed / sum(base):.1f} tokens/s, the reading of the prompts included")
    for name, each in taken.items():
        ratios = [plain / own for plain, own in zip(base, each, strict=True)]
        error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        print(
            f"  {name:20} {sum(base) / sum(each):.3f}x of all time, mean of prompts {mean(ratios):.3f} +- {error:.3f}, "
            f"worst {min(ratios):.2f}; {same[name]} of {len(asked)} texts as {own}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=int, default=13)
    parser.add_argument("--repeat", type=int, default=2, help="answers of each setting to a prompt; the fastest counts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=900, help="longer prompts are cut (default %(default)s)")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--natural-end", action="store_true", help="answers end where the model ends them")
    parser.add_argument("--reproducible", action="store_true", help="measure reproducible mode too")
    parser.add_argument("--alone", action="store_true", help="measure the default without the draft too")
    parser.add_argument("--gpu-layers", type=int, default=0, help="of the target, -1: all (default %(default)s)")
    parser.add_argument("--draft-gpu-layers", type=int, help="of the draft (default: placed like the target)")
    parser.add_argument("--provider", default="auto", help="of ONNX models (default %(default)s)")
    parser.add_argument("--edits", action="store_true", help="ask for changes of code instead of Spec-Bench's prompts")
    parser.add_argument("--loop", action="store_true", help="measure llama-cpp-python's own loop too")
    chosen = parser.parse_args()
    for path in chosen.models:
        measure(path, chosen)


if __name__ == "__main__":
    main()
