"""One line of advice where an answer went badly, from causes that are simulated, once per model."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

import edgespec
from bench_table import table_model
from edgespec.generation.advisor import Conditions
from edgespec.reports import Stats

CALM = Conditions(disk_reads=100, stalled=0.0, throttled=3, clock=1.0)


def write(root: Path, **files: object) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_battery_heat_and_paging_are_read_from_the_system(tmp_path: Path) -> None:
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
        proc__self__stat="42 (a (b) c) S 1 1 1 0 -1 4194560 9 0 77 0 0 0 0",
    )
    found = Conditions.now(tmp_path)
    assert found == Conditions(77, 0.375, 17, 0.5, on_battery=True, saves_power=True)
    write(tmp_path, sys__class__power_supply__AC__online=1)
    assert not Conditions.now(tmp_path).on_battery
    write(tmp_path, sys__class__power_supply__AC__online=0, sys__class__power_supply__BAT0__scope="Device")
    assert not Conditions.now(tmp_path).on_battery  # a mouse
    write(tmp_path, proc__pressure__memory="some", proc__self__stat="x")
    assert (Conditions.now(tmp_path).disk_reads, Conditions.now(tmp_path).stalled) == (None, None)


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


@pytest.mark.parametrize(
    ("conditions", "says"),
    [
        ({"disk_reads": 90_000}, "--memory auto"),
        ({"clock": 0.4, "on_battery": True}, "on battery the processor is limited to 40% of its clock"),
        ({"on_battery": True, "saves_power": True}, "set to save power: powerprofilesctl set performance"),
        ({"throttled": 10}, "fewer threads make less heat: -t 1"),
        ({"on_battery": True}, ""),
        ({"stalled": 0.9}, ""),  # by other programs
    ],
)
def test_each_cause_has_a_line_that_ends_in_what_to_do(
    tmp_path: Path, conditions: dict[str, object], says: str
) -> None:
    with watched(table_model(tmp_path, drafter="none", threads=2), dataclasses.replace(CALM, **conditions)) as model:
        model.target.facts = dataclasses.replace(model.target.facts, threads=2)
        notes = answered(model).notes
    assert len(notes) == bool(says) and all(says in note and "\n" not in note for note in notes)
