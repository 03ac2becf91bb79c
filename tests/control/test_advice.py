"""One line of advice where an answer went badly, from causes that are simulated, once per model."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

import edgespec
from bench_table import table_model
from edgespec.control.advice import Evidence, advice
from edgespec.engines.conditions import Conditions
from edgespec.reports import RoundRecord, Stats

CALM = Conditions(disk_reads=100, stalled=0.0, throttled=3, clock=1.0, load=0.5)
GOOD = Evidence("demo", passes=100, threads=4, cores=4, drafted=300, accepted=200, fixed_length=4, loss=0.7)
BAD = {
    "paging": ({"disk_reads": 4000}, "--memory auto"),
    "threads": ({"threads": 16, "gives_threads": True}, "-t 4"),
    "clock": ({"clock": 0.5}, "powerprofilesctl set performance"),
    "heat": ({"throttled": 7}, "-t 2"),
    "slow draft": ({"draft_share": 0.9, "ceiling": 1.02}, "edgespec pair demo"),
    "idle draft": ({"idle_share": 0.6, "model_drafted": 4}, "--draft-length 4"),
    "fixed length": ({"accepted": 20, "loss": 1.6}, "--draft-length auto"),
    "poor draft": ({"model_drafted": 200, "model_accepted": 10}, "--drafter ngram"),
    "engine": ({"other_engine": "onnx", "other_gain": 1.6}, "--engine onnx"),
}


def write(root: Path, **files: object) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.mark.parametrize("cause", BAD)
def test_each_cause_has_one_line_that_ends_in_what_to_do(cause: str) -> None:
    changed, command = BAD[cause]
    found = advice(dataclasses.replace(GOOD, **changed))  # type: ignore[arg-type]
    assert found is not None and found.cause == cause
    assert found.text.endswith(command) and "\n" not in found.text


def test_nothing_is_said_of_a_good_run_or_of_what_the_user_cannot_change() -> None:
    assert advice(GOOD) is None
    harmless = (
        {"threads": 16},  # chosen by the runtime
        {"on_battery": True},
        {"saves_power": True},
        {"stalled": 0.9},  # by other programs
        {"slowdown": 2.0, "threads": 1},
        {"accepted": 20, "loss": 0.9},  # few are accepted, and it still is faster
        {"drafted": 20, "accepted": 0, "loss": 2.0},
        {"idle_share": 0.1, "model_drafted": 80},
        {"idle_share": 0.1, "passes": 30},  # too few to tell
    )
    for changed in harmless:
        assert advice(dataclasses.replace(GOOD, **changed)) is None, changed  # type: ignore[arg-type]


def test_what_slows_everything_down_comes_first_and_the_next_when_that_was_said() -> None:
    both = dataclasses.replace(GOOD, disk_reads=4000, accepted=20, loss=1.6, gives_memory=True, context_length=4096)
    first = advice(both)
    assert first is not None and first.text.endswith("-c 2048")
    second = advice(both, lambda cause: cause == "paging")
    assert second is not None and second.cause == "fixed length"
    assert advice(both, lambda cause: True) is None


def test_battery_heat_paging_and_load_are_read_from_the_system(tmp_path: Path) -> None:
    assert Conditions.now(tmp_path / "empty") in (Conditions(), Conditions(disk_reads=Conditions.now().disk_reads))
    write(
        tmp_path,
        sys__class__power_supply__AC__type="Mains",
        sys__class__power_supply__AC__online=0,
        sys__class__power_supply__BAT0__type="Battery",
        sys__class__power_supply__BAT0__status="Discharging",
        sys__devices__system__cpu__cpufreq__policy0__scaling_max_freq=1400000,
        sys__devices__system__cpu__cpufreq__policy0__cpuinfo_max_freq=2800000,
        sys__devices__system__cpu__cpu0__thermal_throttle__package_throttle_count=17,
        sys__firmware__acpi__platform_profile="low-power",
        proc__pressure__memory="some avg10=37.50 avg60=1.00 avg300=0.10 total=5\nfull avg10=1.00 avg60=0.00",
        proc__loadavg="3.25 1.00 0.50 4/321 4711",
        proc__self__stat="42 (a (b) c) S 1 1 1 0 -1 4194560 9 0 77 0 0 0 0",
    )
    found = Conditions.now(tmp_path)
    assert found == Conditions(77, 0.375, 17, 0.5, on_battery=True, saves_power=True, load=3.25)
    line = advice(dataclasses.replace(GOOD, clock=found.clock, on_battery=found.on_battery))
    assert line is not None and line.text.startswith("on battery the processor is limited to 50% of its clock")
    write(tmp_path, sys__class__power_supply__AC__online=1)
    assert not Conditions.now(tmp_path).on_battery
    write(tmp_path, sys__class__power_supply__AC__online=0, sys__class__power_supply__BAT0__scope="Device")
    assert not Conditions.now(tmp_path).on_battery  # a mouse
    write(tmp_path, proc__loadavg="many", proc__pressure__memory="some", proc__self__stat="x")
    assert (Conditions.now(tmp_path).load, Conditions.now(tmp_path).stalled) == (None, None)


def answered(model: edgespec.Model, **options: object) -> Stats:
    chosen = edgespec.GenerateOptions(max_tokens=200, ignore_eos=True, **options)  # type: ignore[arg-type]
    return model.generate(np.arange(5) % 12, options=chosen).stats  # type: ignore[arg-type]


def watched(model: edgespec.Model, *read: Conditions) -> edgespec.Model:
    """Every answer of `model` is judged, and the machine's conditions are those given, one after the other."""
    advisor, left = model._executor.advisor, list(read)
    advisor.least_s, advisor._before = 0.0, CALM
    advisor._read = lambda: left.pop(0) if left else CALM
    return model


def test_a_fixed_length_that_does_not_pay_is_said_in_one_answer(tmp_path: Path) -> None:
    """The draft knows nothing of the target, and every row of a pass costs as much as a pass."""
    load = {"draft_length": 4, "drafter": "model", "threads": 1}
    with watched(table_model(tmp_path, spread=9.0, sigma=30.0, **load)) as model:
        stats = answered(model)
        assert stats.acceptance_rate < 0.25
        assert [note for note in stats.notes if note.endswith("--draft-length auto")]
        assert not answered(model).notes


def test_each_is_said_once_per_model_on_a_machine(tmp_path: Path) -> None:
    bad = dataclasses.replace(CALM, disk_reads=90_000, clock=0.4)
    said = []
    for version in (1, 1, 1, 2):
        with watched(table_model(tmp_path, drafter="none", threads=2), bad) as model:
            os.utime(tmp_path / "table.gguf", ns=(version, version))
            said.append(" ".join(answered(model).notes))
    assert "read from the disk" in said[0] and "of its clock" in said[1] and not said[2]
    assert said[3] == said[0]  # another file


def test_short_answers_are_not_judged(tmp_path: Path) -> None:
    with watched(table_model(tmp_path, drafter="none", threads=2), dataclasses.replace(CALM, clock=0.4)) as model:
        model._executor.advisor.least_s = 60.0
        assert not answered(model).notes


def test_passes_that_became_slower_without_other_load_mean_heat(tmp_path: Path) -> None:
    with watched(table_model(tmp_path, drafter="none")) as model:
        advisor = model._executor.advisor
        advisor._target.facts = dataclasses.replace(advisor._target.facts, threads=4)
        stats = Stats(new_tokens=100, target_passes=99, wall_s=1.0)

        def answer(pass_s: float, load: float) -> str:
            watch = advisor.watching(edgespec.GenerateOptions(), None)
            for position in range(40, 60):
                watch(RoundRecord(position, None, 0, 0, (), 0.0, pass_s))
            advisor._read = lambda: dataclasses.replace(CALM, load=load)
            return advisor.judged(stats)

        assert not answer(0.010, 0.5)
        assert not answer(0.011, 0.5)
        assert not answer(0.020, 8.0)  # something else runs
        assert answer(0.020, 0.5).endswith("fewer threads make less heat: -t 2")
        assert not answer(0.020, 0.5)
