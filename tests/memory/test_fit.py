"""What is given up for a budget, in which order, and what is refused; budgets as users write them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import edgespec
from edgespec.cli.main import cli
from edgespec.config.options import LoadOptions
from edgespec.config.values import as_size, budget_bytes
from edgespec.errors import CapabilityError, ConfigError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import ModelPair
from edgespec.loading.requirements import resolve_pair, without_drafts
from edgespec.memory.fit import COMFORTABLE_CONTEXT, Fitted, _setups, fit
from edgespec.memory.plan import Plan, Room, planned
from edgespec.platform.memory import Limit
from llama_headers import LLAMA_8B, LLAMA_70B, write_header
from tiny_gguf import write_model

MIB = 1 << 20
FREE = Limit("memory", 1 << 40, "what the machine has free")


def fitted(budget: int | None, *limits: Limit, **options: Any) -> Fitted:
    chosen = LoadOptions(memory=budget, **options)
    return fit(chosen, resolve_pair(chosen), Room(budget, limits or (FREE,)))


def whats(found: Fitted) -> list[str]:
    return [each.what for each in found.given_up]


@keeping_headers()
def budgets(**options: Any) -> list[Fitted]:
    """What is loaded for each budget from plenty down to the first that is refused."""
    found = [fitted(1 << 40, **options)]
    size = found[0].plan.own_bytes
    while True:
        size -= MIB
        try:
            found.append(fitted(size, **options))
        except CapabilityError as exc:
            assert "the budget is" in str(exc) and ("The smallest possible setup" in str(exc) or not found[-1].given_up)
            return found


def test_heads_are_given_up_where_they_do_not_fit() -> None:
    found = fitted(None)
    with_heads = replace(found, plan=replace(found.plan, models={"target": found.plan.models["target"]}, heads=1))
    assert any(step.what == "draft" for steps in _setups(with_heads) for step in steps)


def test_a_cache_that_does_not_grow_is_there_while_heads_are_opened() -> None:
    plan = replace(fitted(None).plan, heads_opening=1 << 40)
    need = plan.models["target"]
    at_once, grown = (replace(plan, models={"target": replace(need, grows=grows)}) for grows in (False, True))
    assert at_once.total_bytes - grown.total_bytes == need.cache > 0


def test_every_budget_down_to_the_smallest_is_kept() -> None:
    whole, *rest = budgets(engine="llamacpp")
    assert not whole.given_up and len(rest) > 10
    for found in rest:
        assert found.verdict.fit != "refused" and found.plan.own_bytes <= found.verdict.free_bytes
        assert not found.given_up or all(each.text in found.note for each in found.given_up)
        assert ("will page (slow)" in found.note) == (found.verdict.fit == "pages")
    assert {what for found in rest for what in whats(found)} == {"context", "cache", "draft"}
    sizes = [found.plan.own_bytes for found in (whole, *rest)]
    assert sizes == sorted(sizes, reverse=True)  # less is given up where more may be kept
    assert rest[-1].options.context_length == 512 and rest[-1].pair.draft is None


def test_options_that_were_given_stay() -> None:
    least = budgets(engine="llamacpp", context_length=2048, cache_type_k="f16", cache_type_v="f16", drafter="model")[-1]
    assert not least.given_up
    options = least.options
    assert (options.context_length, options.cache_type_k, options.drafter) == (2048, "f16", "model")


def test_a_reproducible_text_keeps_its_cache_whether_there_is_room_for_a_draft_or_not() -> None:
    assert all("cache" not in whats(found) for found in budgets(engine="llamacpp", reproducible=True))


def test_without_a_budget_only_the_draft_gives_way() -> None:
    whole = fitted(None, engine="llamacpp")
    alone = fitted(None, engine="llamacpp", drafter="none")
    room = (whole.plan.own_bytes + alone.plan.own_bytes) // 2
    found = fitted(None, Limit("memory", room, "the limit of this container"), engine="llamacpp")
    assert whats(found) == ["draft"]
    assert "the limit of this container" in found.note
    with pytest.raises(CapabilityError, match=r"The smallest possible setup \(-c 512 .*\) needs"):
        fitted(None, Limit("memory", alone.plan.own_bytes - 6 * MIB, "a limit"), engine="llamacpp", drafter="none")


@pytest.mark.usefixtures("without_kernels")
def test_weights_in_files_only_make_it_slow() -> None:
    plan = fitted(None).plan
    found = fitted(None, Limit("memory", plan.own_bytes + MIB, "what the machine has free"))
    assert (found.verdict.fit, found.given_up) == ("pages", ())
    assert "will page (slow)" in found.note
    swapping = fitted(None, Limit("memory", 1 << 40, "what the machine has free", swap_bytes=(1 << 40) - MIB))
    assert swapping.verdict.fit == "pages"


def test_what_fits_exactly_is_not_refused() -> None:
    plan = fitted(None, drafter="none").plan
    needs = {
        "memory": plan.own_bytes,
        "data": plan.own_bytes + plan.reserved_bytes,
        "addresses": plan.own_bytes + plan.reserved_bytes + plan.mapped_bytes - plan.process.mapped,
    }
    for kind, needed in needs.items():
        assert not fitted(None, Limit(kind, needed, "a limit"), drafter="none").given_up  # type: ignore[arg-type]
        with pytest.raises(
            CapabilityError, match=r"demo needs about \d+ MiB more memory, \d+ MiB is left under a limit"
        ):
            fitted(None, Limit(kind, needed - 1, "a limit"), drafter="none")  # type: ignore[arg-type]


def test_unknown_free_memory_refuses_nothing() -> None:
    chosen = LoadOptions()
    assert fit(chosen, resolve_pair(chosen), Room(None, ())).verdict.fit == "fits"


def test_nothing_is_opened_when_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_engine(*_: object, **__: object) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr("edgespec.loading.opening.open_engine", no_engine)
    monkeypatch.setattr("edgespec.engines.trial.Child", no_engine)
    with pytest.raises(CapabilityError, match="the budget is 20 MiB"):
        edgespec.load("demo", memory="20MiB")


def run_plan(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["plan", *arguments])
    return done.exit_code, done.output


@pytest.mark.usefixtures("without_kernels")
def test_the_command_prints_parts_and_verdict() -> None:
    code, shown = run_plan("demo")
    assert code == 0 and "target: KV cache, 2048 tokens, f16" in shown and "\nfits: " in shown
    code, shown = run_plan("demo", "--memory", "20MiB")
    assert code == 2 and "\nrefused: demo needs about" in shown
    code, shown = run_plan("demo", "--drafter", "none", "--json")
    found = json.loads(shown)
    assert (code, found["verdict"], found["refusal"]) == (0, "fits", None)
    assert sum(part["own"] for part in found["parts"]) == found["own_bytes"]
    assert "--memory" in run_plan("--help")[1]
    assert run_plan("demo", "--memory", "much")[0] == 2


# the context


@pytest.fixture
def long_model(tmp_path: Path) -> str:
    """A model that was trained for 100,000 tokens."""
    return str(write_model(tmp_path / "long.gguf", metadata={"llama.context_length": 100_000}))


@pytest.mark.usefixtures("without_kernels")
def test_a_context_of_0_is_the_models_own(long_model: str) -> None:
    assert fitted(None, model=long_model).plan.context_length == 4096
    found = fitted(None, model=long_model, context_length=0)
    assert found.plan.context_length == found.options.context_tokens == 100_000
    assert fitted(None, engine="onnx", context_length=0).plan.context_length == 2048
    with pytest.raises(CapabilityError, match="auto: the largest that fits"):
        fitted(found.plan.own_bytes // 2, model=long_model, context_length=0)


def test_a_context_of_auto_is_the_largest_that_fits(long_model: str) -> None:
    whole = fitted(1 << 40, model=long_model, context_length="auto")
    assert whole.plan.context_length == 100_000
    found = fitted(whole.plan.total_bytes * 2 // 3, model=long_model, context_length="auto")
    size = found.plan.context_length
    assert not found.given_up and found.verdict.fit == "fits" and 4096 < size < 100_000 and not size % 512
    more = fitted(1 << 40, model=long_model, context_length=size + 512)
    assert more.plan.total_bytes > whole.plan.total_bytes * 2 // 3, "not even one step more fits"


def test_auto_is_for_this_machines_memory() -> None:
    for options in ({"gpu_layers": "auto"}, {"gpu_layers": 4}, {"provider": "cuda"}, {"rpc": "host:1"}):
        with pytest.raises(ConfigError, match="context_length auto is chosen by this machine's memory"):
            LoadOptions(context_length="auto", **options)
    for wrong in ("most", "4k", -1, 15, True, 2.5):
        with pytest.raises(ConfigError, match="context_length"):
            LoadOptions(context_length=wrong)  # type: ignore[arg-type]


def test_a_context_of_the_command_line(long_model: str) -> None:
    code, shown = run_plan(long_model, "--json", "-c", "max")
    assert code == 0 and json.loads(shown)["context_length"] == 100_000


def test_a_model_of_context_auto_runs(long_model: str) -> None:
    with edgespec.load(long_model, context_length="auto", memory="200MB", drafter="none") as model:
        assert 4096 < model.context_length == model.options.context_length


# -- budgets as users write them


GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("6G", 6 * GIB),
        ("6gb", 6_000_000_000),
        (" 1.5 GiB ", 3 * GIB // 2),
        ("512m", 512 << 20),
        ("1TiB", 1 << 40),
        ("1234567", 1234567),
        (99, 99),
    ],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert budget_bytes(text) == num_bytes


def test_shares_of_what_is_free() -> None:
    assert [budget_bytes(text, 1000) for text in ("auto", "AUTO ", "80%", "12.5 %", "100%")] == [
        *(None, None, 800, 125, 1000)
    ]
    assert budget_bytes("80%") is None


@pytest.mark.parametrize(
    "text", ["", "6 gigs", "-1G", "0", "0%", "101%", "1e9", "GiB", "six", 0, -5, True, 1.5, "9" * 40, "٣G"]
)
def test_what_is_no_size_is_refused_with_what_is(text: object) -> None:
    with pytest.raises(ConfigError, match="allowed: auto, a share of the free memory such as 80%, or a size"):
        edgespec.LoadOptions(memory=text)  # type: ignore[arg-type]


def test_sizes_for_people() -> None:
    assert (as_size(300 << 20), as_size(3 * GIB // 2)) == ("300 MiB", "1.50 GiB")
    assert (as_size(700 << 10), as_size(200 << 10), as_size(5)) == ("1 MiB", "200 KiB", "5 bytes")


# -- what is kept under a budget is the best by the order of docs/memory.md, so never worse under a larger one


BUDGETS = 60
CONTEXTS = (None, 2048, 1024, 512)
Kept = tuple[bool, int, bool, bool, int]


def kept(fits: bool, options: LoadOptions, context: int, *, has_draft: bool) -> Kept:
    """The order of the documentation, the most important first."""
    return fits, min(context, COMFORTABLE_CONTEXT), has_draft, options.cache_type_k is None, context


def kept_of(found: Fitted) -> Kept:
    has_draft = found.pair.draft is not None
    return kept(found.verdict.fit == "fits", found.options, found.plan.context_length, has_draft=has_draft)


def all_choices(given: dict[str, Any], pair: ModelPair) -> Iterator[tuple[LoadOptions, ModelPair]]:
    caches: tuple[dict[str, Any], ...] = {}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    if pair.files["target"].engine == "onnx":
        caches = ({},)
    for context, cache, is_alone in itertools.product(CONTEXTS, caches, (False, True)):
        options = LoadOptions(**{**given, "context_length": context, **cache})
        yield without_drafts(options, pair) if is_alone else (options, pair)


@pytest.fixture(params=["demo, llama.cpp", "demo, ONNX", "70B and 8B"])
def given(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of a pair."""
    if request.param.startswith("demo"):
        return {"model": "demo", "engine": "onnx" if "ONNX" in request.param else "llamacpp"}
    target, draft = tmp_path / "70b.gguf", tmp_path / "8b.gguf"
    write_header(target, LLAMA_70B), write_header(draft, LLAMA_8B)
    return {"model": str(target), "draft": draft}


def all_budgets(plans: list[Plan]) -> list[int]:
    """From below the least that can be loaded to plenty, and on both sides of what each plan needs."""
    low, high = int(0.8 * min(plan.own_bytes for plan in plans)), int(1.1 * max(plan.total_bytes for plan in plans))
    even = (low + (high - low) * step // (BUDGETS - 1) for step in range(BUDGETS))
    needs = (need for plan in plans for need in (plan.own_bytes, plan.working_bytes))
    return sorted({*even, *(need - less for need in needs for less in (0, 1))})


@keeping_headers()
def test_the_best_that_fits_is_kept(given: dict[str, Any]) -> None:
    """Against every combination, one by one."""
    pair = resolve_pair(LoadOptions(**given))
    plans = [(*choice, planned(*choice)) for choice in all_choices(given, pair)]
    outcomes: list[Kept | None] = []
    for budget in all_budgets([plan for *_, plan in plans]):
        room = Room(budget, ())
        possible = [
            kept(verdict == "fits", options, plan.context_length, has_draft=chosen.draft is not None)
            for options, chosen, plan in plans
            if (verdict := room.verdict(plan).fit) != "refused"
        ]
        try:
            found = kept_of(fit(LoadOptions(**given, memory=budget), pair, room))
        except CapabilityError:
            found = None
        assert found == max(possible, default=None), budget
        outcomes.append(found)
    assert outcomes == sorted(outcomes, key=lambda each: (each is not None, each or ()))
    assert outcomes[0] is None and outcomes[-1] == max(found for found in outcomes if found is not None)
    assert len(set(outcomes)) > 6
