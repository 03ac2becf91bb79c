"""The plan reads no weights, and a child process takes what it says; several answers and heads in it."""

from __future__ import annotations

import builtins
import dataclasses
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgespec
from demo import DEMO
from edgespec import GenerateOptions
from edgespec.config.options import LoadOptions
from edgespec.config.values import DrafterName
from edgespec.drafters.heads import EagleDrafter
from edgespec.engines.llamacpp import library
from edgespec.engines.llamacpp.footprint import footprint
from edgespec.engines.llamacpp.settings import CELLS_MULTIPLE
from edgespec.engines.model_use import WIDEST, ModelUse
from edgespec.errors import ConfigError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import MOST_SEQUENCES, fit
from edgespec.memory.plan import Plan, Room, head_bytes, planned
from llama_headers import LLAMA_8B, LLAMA_70B, write_header
from needs import NEEDS_KERNELS

MIB = 1 << 20
TEST_THREADS = 2
CHILD = """
import json, sys
import edgespec
with edgespec.load(**json.loads(sys.argv[1])) as model:
    ids = (model.encode("The quick brown fox jumps over the lazy dog. ") * 400)[: model.context_length - 20]
    stats = model.generate(ids, options=edgespec.GenerateOptions(max_tokens=16, ignore_eos=True)).stats
    memory = model.memory
    print(json.dumps([memory.plan.total_bytes, memory.peak_rss_bytes, stats.planned_bytes, stats.peak_rss_bytes]))
"""


def plan_of(**options: Any) -> Plan:
    chosen = LoadOptions(**options)
    return planned(chosen, resolve_pair(chosen))


@pytest.mark.quiet
@pytest.mark.skipif(sys.platform != "linux", reason="the sizes of Python and the libraries were measured on Linux")
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "llamacpp"},
        {"engine": "llamacpp", "drafter": "none", "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        {"engine": "onnx"},
        {"engine": "auto", "drafter": "none", "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    ],
)
def test_a_child_takes_what_was_planned(options: dict[str, Any]) -> None:
    """The laboratory's limit is 30 MB; here it is wider, as libraries of other machines differ."""
    command = [sys.executable, "-c", CHILD, json.dumps({"model": "demo", "threads": TEST_THREADS, **options})]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    total, peak, planned_bytes, peak_rss_bytes = json.loads(done.stdout)
    assert (planned_bytes, 0 < peak_rss_bytes <= peak) == (total, True)
    assert abs(total - peak) < 60_000_000
    assert total > 0.85 * peak


def test_the_parts_add_up_and_follow_the_options() -> None:
    whole, short = plan_of(engine="llamacpp"), plan_of(engine="llamacpp", context_length=512)
    assert sum(part.own for part in whole.parts) == whole.own_bytes
    assert sum(part.mapped for part in whole.parts) == whole.mapped_bytes
    assert (whole.context_length, short.context_length) == (2048, 512)
    cache = [need.cache for need in (*whole.models.values(), *short.models.values())]
    assert cache[2] < cache[0] / 2 and cache[3] < cache[1]  # the draft's context follows the target's
    alone = plan_of(engine="llamacpp", drafter="none")
    assert list(alone.models) == ["target"]
    assert alone.own_bytes < whole.own_bytes


def test_a_cache_of_bytes_takes_about_half() -> None:
    plain, small = (
        plan_of(engine="llamacpp", cache_type_k=kind, cache_type_v=kind).models["target"] for kind in (None, "q8_0")
    )
    assert small.cache == pytest.approx(17 / 32 * plain.cache, rel=0.01)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that is read from files."""
    read: list[int] = []

    class Counting(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            found = super().read(size) or b""
            read.append(len(found))
            return found

    opened = builtins.open
    monkeypatch.setattr(
        Path, "open", lambda self, mode="r", **k: Counting(self, "r") if mode == "rb" else opened(self, mode, **k)
    )
    return read


def test_a_70b_and_8b_pair_is_planned_from_its_headers_alone(tmp_path: Path, bytes_read: list[int]) -> None:
    """Under a budget too, where many contexts and types are tried: every header is read once."""
    target, draft = tmp_path / "70b.gguf", tmp_path / "8b.gguf"
    weights, _ = write_header(target, LLAMA_70B), write_header(draft, LLAMA_8B)
    alone = footprint(target, ModelUse())
    assert weights > 35e9 and sum(bytes_read) < 4 * MIB
    assert alone.mapped == target.stat().st_size
    assert alone.packed == 0 or alone.packed > 0.9 * weights  # by processor
    assert alone.cache == 4096 * 80 * 2 * 1024 * 2  # cells, layers, keys and values, bytes
    assert alone.context_length == 4096
    bytes_read.clear()
    chosen = LoadOptions(model=str(target), draft=draft, memory="48GiB", context_length=8192, gpu_layers=0)
    with keeping_headers():
        pair = resolve_pair(chosen)
        whole = planned(chosen, pair)
        once = sum(bytes_read)
        mine = len(bytes_read)
        found = fit(chosen, pair, Room(whole.own_bytes - (64 << 20), ()))
        others = sum(bytes_read[mine:])  # headers of smaller models on this machine, such as the demo's
        fit(chosen, pair, Room(whole.own_bytes - (96 << 20), ()))
    assert list(whole.models) == ["target", "draft"]
    assert whole.mapped_bytes > target.stat().st_size + draft.stat().st_size
    assert found.given_up and found.plan.own_bytes < whole.own_bytes
    assert once < 8 * MIB and others < 8 * MIB and sum(bytes_read) == once + others


def test_weights_that_are_only_copied_from_their_file_need_no_room_there(tmp_path: Path) -> None:
    """For the processor's kernels, or to a GPU; where they are not, all of them are read in every pass."""
    path = tmp_path / "8b.gguf"
    weights = write_header(path, LLAMA_8B)
    alone = footprint(path, ModelUse())
    assert alone.read_once == alone.packed
    plan = plan_of(model=str(path), gpu_layers=-1)
    assert 0.99 * weights < plan.read_once_bytes <= plan.mapped_bytes
    assert (plan.own_bytes, plan.working_bytes) <= (plan.working_bytes, plan.total_bytes - plan.read_once_bytes)
    assert Room(plan.working_bytes, ()).verdict(plan).fit == "fits"
    assert Room(plan.working_bytes - 1, ()).verdict(plan).fit == "pages"


def test_what_lies_on_a_device_is_not_counted_as_memory_of_the_processor(tmp_path: Path) -> None:
    here = plan_of(engine="onnx", provider="cpu")
    there = plan_of(engine="onnx", provider="cuda")
    assert (here.device_bytes, here.device_note) == (0, "")
    caches = sum(need.cache for need in here.models.values())
    assert there.device_bytes > here.mapped_bytes - here.process.mapped + caches
    assert not any("KV cache" in part.name or "weights in their file" in part.name for part in there.parts)
    assert there.own_bytes < here.own_bytes - caches
    assert there.device_note.startswith("on cuda: about ") and "is not known" in there.device_note
    path = tmp_path / "70b.gguf"
    write_header(path, LLAMA_70B)
    cache = footprint(path, ModelUse()).cache
    on_gpu = footprint(path, ModelUse(gpu_layers=-1))
    assert on_gpu.cache == 0 and on_gpu.device > cache


def test_cuda_is_told_by_the_files_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp" / "lib").mkdir(parents=True)
    (tmp_path / "llama_cpp" / "__init__.py").write_text("raise AssertionError('a plan imports nothing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    library.has_cuda.cache_clear()
    assert not library.has_cuda()
    (tmp_path / "llama_cpp" / "lib" / "libggml-cuda.so.0").touch()
    library.has_cuda.cache_clear()
    assert library.has_cuda()
    library.has_cuda.cache_clear()


@pytest.mark.usefixtures("without_kernels")
def test_what_a_model_cannot_have_is_refused_before_anything_loads(tiny_path: Path) -> None:
    with pytest.raises(ConfigError, match="trained for 512"):
        plan_of(model=str(tiny_path), context_length=4096)


ENGINES = ("llama_cpp", "onnxruntime", "edgespec.runtime")


@pytest.mark.parametrize(
    ("options", "heavy"),
    [(["--json"], ENGINES), (["--engine", "llamacpp"], (*ENGINES, "numpy", "onnx", "rich", "jinja2"))],
)
def test_a_plan_imports_no_engine_and_for_llama_cpp_no_numpy(options: list[str], heavy: tuple[str, ...]) -> None:
    """They take longer to import than the plan takes: a third of a second for a pair of 70B and 8B."""
    code = (
        "import sys\nfrom edgespec.cli.main import cli\n"
        f"try: cli.main(['plan', 'demo', *{options!r}])\nexcept SystemExit as exc: assert exc.code == 0\n"
        f"sys.exit(','.join(m for m in {heavy!r} if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"loaded: {done.stderr}"
    assert "together, at most" in done.stdout or "--json" in options


def test_chats_that_share_cells_for_trees_are_planned_so() -> None:
    """Attention then reads the cells of all of them for each row, which its mask has room for."""

    def compute(drafter: DrafterName) -> int:
        options = LoadOptions(model="demo", engine="llamacpp", parallel=8, drafter=drafter)
        return planned(options, resolve_pair(options)).models["target"].compute

    assert compute("tree") > compute("auto") + (1 << 20)


# -- contexts for several answers at once, as planned and as loaded


OPTIONS = LoadOptions("demo", context_length=1024, drafter="model")


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_each_answer_has_a_cache_of_its_own_in_the_plan(engine: Any) -> None:
    options = replace(OPTIONS, engine=engine)
    pair = resolve_pair(options)
    one, four = (planned(replace(options, parallel=count), pair) for count in (1, 4))
    for role, alone in one.models.items():
        assert four.models[role].cache == pytest.approx(4 * alone.cache, rel=0.2)
    assert any("for each of 4 answers" in part.name for part in four.parts)


def cells_of(options: LoadOptions) -> int:
    """Cells that are planned for the target."""
    one = replace(options, parallel=1, context_length=CELLS_MULTIPLE - WIDEST)
    caches = [planned(each, resolve_pair(each)).models["target"].cache for each in (options, one)]
    return round(CELLS_MULTIPLE * caches[0] / caches[1])


@pytest.mark.parametrize("drafter", ["lookahead", "suffix"])
@pytest.mark.parametrize("reproducible", [True, False])
def test_the_planned_cells_are_those_of_the_load(drafter: Any, reproducible: bool) -> None:
    """In reproducible mode each sequence has cells of its own, even if trees would share them."""
    options = replace(
        OPTIONS, engine="llamacpp", drafter=drafter, draft=None, threads=1, parallel=3, context_length=500
    )
    options = replace(options, reproducible=reproducible)
    with edgespec.load(**dataclasses.asdict(options)) as model:
        assert model.target.facts.own_cells == (reproducible or drafter == "suffix")
        loaded = library.library().llama_n_ctx(model.target._context)  # type: ignore[attr-defined]
    assert cells_of(options) == loaded


@NEEDS_KERNELS
def test_there_is_room_for_as_many_answers_as_fit_with_full_texts() -> None:
    options = replace(OPTIONS, parallel="auto")
    pair = resolve_pair(options)
    plans = [planned(replace(options, parallel=count), pair) for count in range(1, 5)]
    for count, plan in enumerate(plans, 1):
        budget = plan.total_bytes
        found = fit(replace(options, memory=budget), pair, Room(budget, ()))
        assert found.options.parallel == count and found.plan == plan and not found.given_up
    assert fit(options, pair, Room(1 << 40, ())).options.parallel == MOST_SEQUENCES == len(plans)
    with edgespec.load(**dataclasses.asdict(options)) as model:
        assert model.target.facts.max_sequences == model.options.parallel == MOST_SEQUENCES


def test_one_answer_at_a_time_where_more_would_take_memory_at_once() -> None:
    options = replace(OPTIONS, engine="llamacpp", parallel="auto")
    assert fit(options, resolve_pair(options), Room(1 << 40, ())).options.parallel == 1


@pytest.mark.parametrize("given", [0, 65, "4", True])
def test_a_wrong_number_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="parallel must be"):
        LoadOptions("demo", parallel=given)


# -- draft heads in the plan: the file, and what is kept for each text


EAGLE = DEMO / "heads" / "eagle.npz"
SIZE = EAGLE.stat().st_size


def test_opening_heads_takes_more_than_keeping_them() -> None:
    kept, opening = head_bytes(EAGLE, 2048, 1)
    assert opening == 10 * SIZE > kept > 0
    pair = resolve_pair(LoadOptions("demo", engine="onnx", heads=EAGLE, drafter="eagle"))
    plan = planned(LoadOptions("demo", engine="onnx", heads=EAGLE, drafter="eagle"), pair)
    assert replace(plan, heads_opening=1 << 40).own_bytes > 1 << 40


def test_a_file_that_cannot_be_read_takes_its_size(tmp_path: Path) -> None:
    damaged = tmp_path / "heads.npz"
    damaged.write_bytes(EAGLE.read_bytes()[:1000])
    assert head_bytes(damaged, 2048, 1) == (1000, 0)
    assert head_bytes(tmp_path / "none.npz", 2048, 1) == head_bytes(Path("a\0b"), 2048, 1) == (0, 0)


def test_a_long_answer_takes_what_was_planned() -> None:
    options = LoadOptions("demo", engine="onnx", heads=EAGLE, drafter="eagle", context_length=1400, threads=1)
    with edgespec.load(options) as model:
        ids = (model.encode("A table for two in San Jose, please. ") * 400)[:1300]
        stats = model.generate(ids, options=GenerateOptions(max_tokens=60, draft_length=4, ignore_eos=True)).stats
        assert stats.drafted_tokens
        (drafter,) = (each for each in model.drafters.drafters.values() if isinstance(each, EagleDrafter))
        used = drafter.bytes_used
    assert used <= planned(options, resolve_pair(options)).heads
