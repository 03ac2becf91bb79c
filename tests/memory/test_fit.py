"""What is given up for a budget, in which order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import edgespec
from edgespec.cli.main import cli
from edgespec.config.options import LoadOptions
from edgespec.errors import CapabilityError, ConfigError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import Fitted, fit
from edgespec.memory.plan import Room
from edgespec.platform.memory import Limit
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
    monkeypatch.setattr("edgespec.engines.trial.new_child", no_engine)
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


@keeping_headers()
def test_a_context_of_auto_gives_nothing_up_or_is_the_default() -> None:
    for size in range(40 * MIB, 140 * MIB, 10 * MIB):
        try:
            usual = fitted(size, engine="llamacpp")
        except CapabilityError:
            continue
        found = fitted(size, engine="llamacpp", context_length="auto")
        assert not found.given_up or found == usual


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
