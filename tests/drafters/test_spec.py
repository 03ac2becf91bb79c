"""The table of drafters says what the drafters are: names, costs, what they run, what they need."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgespec
from edgespec import GenerateOptions
from edgespec.config.options import LoadOptions
from edgespec.config.values import DRAFTERS
from edgespec.drafters.spec import AUTOMATIC, HEADS, SPECS, check_makeable
from edgespec.errors import CapabilityError
from edgespec.formats.manifest import HEAD_KINDS, ROLES
from lossless import DEMO


def test_every_name_that_can_be_given_has_a_line() -> None:
    assert sorted(DRAFTERS) == sorted(("auto", "none", *SPECS))
    assert {name for name, spec in SPECS.items() if HEADS in spec.needs} == set(HEAD_KINDS)
    for spec in SPECS.values():
        assert set(spec.roles) <= set(ROLES)
        assert all(hasattr(LoadOptions, need.option) for need in spec.needs)
        assert spec.needs or spec.is_made, "what needs nothing is not opened with the pair, so it is made"


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
@pytest.mark.parametrize("asked", ["auto", "hierarchical", "medusa", "eagle", "early-exit"])
def test_a_drafter_is_what_its_line_says(engine: str, asked: str) -> None:
    """Whether it is free, and whether it has an engine of its own."""
    options = {}
    if asked == "early-exit":
        if engine == "llamacpp":
            pytest.skip("first layers draft on the kernels alone")
        engine, options = "auto", {"exit_layer": 4}
    with edgespec.load("demo", engine=engine, drafter=asked, **options) as model:
        pool = model.drafters
        for name, spec in SPECS.items():
            if not pool._can_have(name):
                with pytest.raises(CapabilityError, match=f"drafter '{name}' needs {spec.needs[-1].what}, but 'demo'"):
                    check_makeable(name, pool.drafters, "demo")
                continue
            drafter = pool.drafter(name)
            assert drafter.name == name
            assert drafter.is_free == (spec.cost == "free")
            assert (drafter.engine is not None) == (spec.owns == "engine")
            assert drafter.wants_features == (HEADS in spec.needs)
        assert asked == "auto" or asked in pool.drafters
        assert model.drafters.draft_name in (None, *(name for name, spec in SPECS.items() if spec.is_pairs_draft))


def test_what_was_left_closed_says_how_to_open_it() -> None:
    with edgespec.load("demo", draft_length=3) as model:
        for name, fix in {
            "hierarchical": "needs a medium model, but 'demo' was loaded without: load it with drafter='hierarchical'",
            "early-exit": "load it with drafter='early-exit', or use drafter='auto'",
            "medusa": "give heads=..., or use drafter='ngram'",
            "eagle3": r"needs an EAGLE-3 head, .* give draft=\.\.\.",
        }.items():
            with pytest.raises(CapabilityError, match=fix):
                model.stream("a", options=GenerateOptions(drafter=name))


def test_a_drafter_of_one_engine_is_refused_on_another_before_anything_is_loaded(
    onnx_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.loading.requirements.head_kind_of", lambda path: "eagle3")
    monkeypatch.setattr("edgespec.loading.opening.open_target", lambda *_, **__: pytest.fail("loaded"))
    head = DEMO.parent / "demo-draft-q8_0.gguf"
    with pytest.raises(CapabilityError, match=r"an EAGLE-3 head for a target in GGUF, .* engine='llamacpp'"):
        edgespec.load(str(onnx_path), draft=head)


def test_auto_asks_one_lookup() -> None:
    """Each further one costs time in every round and finds what `suffix` finds."""
    assert {name for name, spec in SPECS.items() if spec.cost == "free"} & set(AUTOMATIC) == {"suffix"}
