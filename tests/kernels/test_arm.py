"""The kernels on Arm, in an emulator: the bits of all operators are those of this processor's library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from edgespec.kernels import build
from edgespec.kernels.library import library_path

ROOT = Path(__file__).resolve().parents[2]
CROSS, QEMU, SYSROOT = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"
needs_arm = pytest.mark.skipif(
    not (shutil.which(CROSS) and shutil.which(QEMU)), reason=f"needs {CROSS} and {QEMU} (Debian: qemu-user)"
)


def compiled(compiler: tuple[str, ...], folder: Path) -> Path:
    """The program that prints digests; see its source."""
    program, source = folder / "digests", ROOT / "tests" / "support" / "kernel_digests.cpp"
    options = ["-std=c++17", "-O1", "-ffp-contract=off", f"-I{build.SOURCES}"]
    subprocess.run([*compiler, *options, str(source), "-lstdc++", "-ldl", "-o", str(program)], check=True)
    return program


def said_by(*command: str | Path) -> list[list[str]]:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def by_path(lines: list[list[str]]) -> dict[str, list[list[str]]]:
    paths = sorted({path for path, *_ in lines} - {"path"})
    return {path: [what for name, *what in lines if name == path] for path in paths}


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[list[str]]:
    """The digests of this processor's paths, which are all the same."""
    try:
        compiler = build.find_compiler()
    except build.NoCompiler:
        pytest.skip("needs a C++ compiler")
    found = by_path(said_by(compiled(compiler, tmp_path_factory.mktemp("host")), library_path()))
    for path, digests in found.items():
        assert digests == found["portable"], path
    return found["portable"]


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory, pytestconfig):
    """Runs the program and the library of Arm on a processor; the library is kept until its sources change."""
    program = compiled((CROSS,), tmp_path_factory.mktemp("arm"))
    kept, target = pytestconfig.cache.mkdir("edgespec-kernels-arm"), "linux-aarch64"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS))
        library = build.find_library(kept, target) or build.build(kept, (CROSS,), target)
    for old in set(kept.iterdir()) - {library}:
        old.unlink()
    return lambda processor, *words: said_by(QEMU, "-L", SYSROOT, "-cpu", processor, program, library, *words)


def test_this_processors_paths_have_the_same_bits(expected) -> None:
    assert len(expected) > 90


@needs_arm
def test_all_bits_on_arm_are_those_of_this_processor(expected, on_arm) -> None:
    found = by_path(on_arm("max"))
    assert set(found) == {"portable", "neon-dot", "neon-i8mm"}
    for path, digests in found.items():
        assert digests == expected, path


@needs_arm
@pytest.mark.parametrize(
    ("processor", "path"), [("max", "neon-i8mm"), ("neoverse-n1", "neon-dot"), ("cortex-a72", "portable")]
)
def test_an_arm_processor_gets_the_path_that_it_has(on_arm, processor: str, path: str) -> None:
    assert on_arm(processor, "path") == [["path", path]]
