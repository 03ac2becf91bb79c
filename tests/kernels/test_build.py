"""How the kernels are compiled, found and put into a wheel; with sources of a few lines."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgespec.kernels import build, library

ROOT = Path(__file__).resolve().parents[2]
EXPORT = 'extern "C" __attribute__((visibility("default")))'
INTERFACE = f"""{EXPORT} int edgespec_abi_version() {{ return {library.ABI_VERSION}; }}
{EXPORT} const char* edgespec_path() {{ return "portable"; }}
#define PATH(name) #name " "
{EXPORT} const char* edgespec_paths() {{ return EDGESPEC_PATHS PATH(portable); }}
"""
PATH = f"""#define NAMED(name) {EXPORT} int is_in_##name() {{ return LANES; }}
#define EXPANDED(name) NAMED(name)
EXPANDED(EDGESPEC_PATH)
"""
# A header of lanes says whether it is compiled with its flags.
LANES = {"512": "__AVX512VNNI__", "256": "__AVX2__", "neon": "__ARM_FEATURE_DOTPROD", "portable": "__cplusplus"}
# Says what it is called with, and lacks an option where LACKS names one.
COMPILER = """import os, subprocess, sys
if os.environ.get("LACKS") in sys.argv:
    sys.exit("unknown option")
print(*sys.argv[1:], file=open(os.environ["CALLS"], "a"))
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""
# Zig for Arm, by the compiler of this system.
ZIG = """import subprocess, sys
_, *asked = sys.argv[1:5]
assert asked == ["-target", "aarch64-linux-gnu.2.17", "-mcpu=baseline"], asked
sys.exit(subprocess.run([*{compiler!r}, *sys.argv[5:]]).returncode)
"""
is_x86 = build.HOST.partition("-")[2] in build.X86


@pytest.fixture(scope="module")
def compiler() -> tuple[str, ...]:
    try:
        return build.find_compiler()
    except build.NoCompiler:
        pytest.skip("needs a C++ compiler")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """The folder of sources, with two."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "interface.cpp").write_text(INTERFACE)
    (folder / "path.cpp").write_text(PATH)
    for name, flag in LANES.items():
        (folder / f"lanes_{name}.h").write_text(f"#ifndef {flag}\n#error without its flags\n#endif\n#define LANES 1\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@pytest.fixture
def found(monkeypatch, tmp_path):
    """`library` afresh, as if the package lay in a folder of its own, not in a checkout."""
    monkeypatch.setattr(library, "PACKAGE", tmp_path / "a" / "b" / "package")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(library.SETTING, raising=False)
    library._find.cache_clear()
    yield library
    library._find.cache_clear()


def calls_of(tmp_path, monkeypatch, compiler) -> tuple[tuple[str, ...], Path]:
    """A compiler that writes down its calls, and where."""
    program, calls = tmp_path / "compiler.py", tmp_path / "calls"
    program.write_text(COMPILER)
    monkeypatch.setenv("CALLS", str(calls))
    return (sys.executable, str(program), *compiler), calls


def test_a_library_is_built_once_and_found_until_its_sources_change(sources, compiler, tmp_path, monkeypatch):
    path = build.build(tmp_path / "new" / "folder", compiler)
    loaded = ctypes.CDLL(str(path))
    assert loaded.edgespec_abi_version() == library.ABI_VERSION
    loaded.edgespec_paths.restype = ctypes.c_char_p
    built = loaded.edgespec_paths().decode().split()
    assert built[-1] == "portable" and all(hasattr(loaded, f"is_in_{name}") for name in built)
    assert not is_x86 or built == [*build.X86_SETS, "portable"]
    assert build.find_library(path.parent) == path == build.build(path.parent, compiler)
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.find_library(path.parent) is None is build.find_library(path.parent, "haiku-riscv64")
    monkeypatch.undo()
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build.find_library(path.parent) == path
    (sources / "more.h").touch()
    assert build.find_library(path.parent) is None


def test_another_compiler_or_processor_leaves_instruction_sets_out(sources, compiler, tmp_path, monkeypatch):
    recorder, calls = calls_of(tmp_path, monkeypatch, compiler)
    build.build(tmp_path, recorder, target=f"{sys.platform}-riscv64")
    assert "-DEDGESPEC_PATHS= " in calls.read_text() and "-mavx" not in calls.read_text()
    assert calls.read_text().count("-DEDGESPEC_PATH=") == 1
    if is_x86:
        monkeypatch.setenv("LACKS", "-mavxvnni")
        said = []
        path = build.build(tmp_path, recorder, say=said.append)
        loaded = ctypes.CDLL(str(path))
        assert hasattr(loaded, "is_in_avx2") and not hasattr(loaded, "is_in_avxvnni")
        assert "does not know avxvnni" in said[0] and len(said) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the C++ library is part of other systems")
def test_what_needs_the_cxx_library_is_refused(sources, compiler, tmp_path):
    (sources / "text.cpp").write_text(
        "#include <string>\nstd::string text(int count) { return std::to_string(count); }"
    )
    with pytest.raises(build.BuildError, match="undefined"):
        build.build(tmp_path, compiler)


def test_a_fault_in_a_source_names_it(sources, compiler, tmp_path):
    (sources / "broken.cpp").write_text("no C++")
    with pytest.raises(build.BuildError, match=r"(?s)broken\.cpp.*error"):
        build.build(tmp_path / "out", compiler)
    assert not (tmp_path / "out").exists()


def test_without_a_compiler_the_error_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    with pytest.raises(build.NoCompiler, match=r"apt install g\+\+.*CXX=.*ziglang, to .*python"):
        build.find_compiler(str(tmp_path / "python"))


def test_a_compiler_that_works_is_taken_and_cxx_is_asked_first(monkeypatch, compiler, tmp_path):
    recorder, _ = calls_of(tmp_path, monkeypatch, compiler)
    monkeypatch.setenv("CXX", shlex.join(recorder))
    assert build.find_compiler() == recorder
    monkeypatch.setenv("CXX", shlex.join((sys.executable, "-c", "raise SystemExit(1)")))
    assert build.find_compiler() == compiler


def test_several_builds_at_once_leave_one_whole_library(sources, compiler, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; from edgespec.kernels import build; "
    )
    code += f"build.SOURCES = Path({str(sources)!r}); print(build.build(Path({str(tmp_path / 'out')!r})))"
    with ThreadPoolExecutor() as pool:
        started = [pool.submit(subprocess.check_output, [sys.executable, "-c", code], text=True) for _ in range(3)]
        built = {Path(each.result().strip()) for each in started}
    assert built == {build.find_library(tmp_path / "out")} == set((tmp_path / "out").iterdir())


def test_a_library_that_was_cut_short_is_missing_and_built_again(sources, compiler, found, tmp_path, capsys):
    path = build.build(tmp_path / "home" / "cache" / "kernels", compiler)
    path.write_bytes(path.read_bytes()[:4000])
    assert found.library_path() is None
    assert found.why_missing().startswith("they are not built: ")
    found._find.cache_clear()
    assert found.build_missing() == 0
    assert capsys.readouterr().out.strip() == str(path)
    found._find.cache_clear()
    assert found.library_path() == path


def test_which_library_is_used(sources, compiler, found, tmp_path, monkeypatch):
    """What the environment names, else the package's, else the user's own; with another interface none."""
    own = build.build(tmp_path / "home" / "cache" / "kernels", compiler)
    assert found.library_path() == own and found.why_missing() == ""
    shipped = build.build(found.PACKAGE, compiler)
    for chosen, path, reason in (
        ("", shipped, ""),
        (str(own), own, ""),
        ("none", None, "EDGESPEC_KERNELS=none"),
        (str(tmp_path / "absent.so"), None, "absent.so: not a library of kernels"),
    ):
        monkeypatch.setenv(found.SETTING, chosen)
        found._find.cache_clear()
        assert found.library_path() == path and reason in found.why_missing()
    monkeypatch.setenv(found.SETTING, "")
    monkeypatch.setattr(found, "ABI_VERSION", library.ABI_VERSION + 1)
    found._find.cache_clear()
    assert found.library_path() is None and f"{own}: its interface has version" in found.why_missing()


def test_what_cannot_be_built_is_told_with_exit_code_1(sources, found, monkeypatch, capsys):
    monkeypatch.setattr(library, "build", lambda folder, say: build.build(folder, ("no-such-compiler",)))
    assert found.build_missing() == 1
    assert capsys.readouterr().err.startswith("error: the kernels cannot be built: no-such-compiler cannot be run")


# -- wheels


@pytest.fixture
def project(tmp_path, sources):
    """A project with our build backend and hook, whose package holds kernels of a few lines."""
    folder = tmp_path / "project"
    kernels = folder / "edgespec" / "kernels"
    kernels.mkdir(parents=True)
    sources.rename(kernels / "src")
    for name in ("edgespec/kernels/build.py", "scripts/build_backend.py", "scripts/vendor_page.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "edgespec" / "__init__.py").touch()
    (folder / ".gitignore").write_text("*.so\nvendor/\n")
    (folder / "scripts" / "ziglang.py").write_text("raise SystemExit('not here')")  # whatever this environment holds
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "edgespec"\nversion = "1"\nrequires-python = ">=3"\n'
        '[tool.hatch.build]\ndev-mode-dirs = ["."]\n[tool.hatch.build.targets.wheel]\npackages = ["edgespec"]\n'
        '[tool.hatch.build.targets.wheel.hooks.custom]\npath = "scripts/build_backend.py"\n'
    )
    return folder


def backend(project: Path, call: str, **environment: str) -> str:
    """What our backend says in a call, and returns: the last line."""
    code = f"import build_backend; print(build_backend.{call})"
    settings = os.environ | {"PYTHONPATH": str(project / "scripts"), "EDGESPEC_PAGE_LIBRARIES": "none"} | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=project, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (done.stderr + done.stdout).strip()


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_a_wheel_holds_the_library_for_this_system_and_any_python(project, compiler):
    name = backend(project, "build_wheel('.')")
    assert name.startswith("edgespec-1-py3-none-") and not name.endswith("-any.whl")
    (built,) = [file for file in files_in(project / name) if "libedgespec_kernels" in file]
    assert Path(built).parent == Path("edgespec/kernels") and not list((project / "edgespec/kernels").glob("lib*"))
    assert "edgespec/kernels/src/interface.cpp" in files_in(project / name), "its hash names the library"


def test_a_wheel_for_another_system_holds_a_library_that_is_found_there(project, compiler, monkeypatch):
    (project / "scripts" / "ziglang.py").write_text(ZIG.format(compiler=compiler))
    said = backend(project, "build_wheel('.')", EDGESPEC_WHEEL_FOR="manylinux_2_17_aarch64")
    name = "edgespec-1-py3-none-manylinux_2_17_aarch64.whl"
    assert said.endswith(name), said
    (built,) = [file for file in files_in(project / name) if "libedgespec_kernels" in file]
    monkeypatch.setattr(build, "SOURCES", project / "edgespec" / "kernels" / "src")
    assert build.source_hash("linux-aarch64") in built


def test_a_wheel_holds_the_libraries_of_the_chat_page_where_they_can_be_had(project, tmp_path):
    spec = importlib.util.spec_from_file_location("vendor_page", project / "scripts" / "vendor_page.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    page.VENDOR.mkdir(parents=True)
    versions = {each.name: each.version for each in page.LIBRARIES}
    (page.VENDOR / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    (page.VENDOR / "marked.js").touch()  # as it was fetched before
    wanted = {"EDGESPEC_PAGE_LIBRARIES": "", "EDGESPEC_KERNELS": "none"}
    backend(project, "build_wheel('.')", **wanted)
    wheel = project / "edgespec-1-py3-none-any.whl"
    assert "edgespec/server/static/vendor/marked.js" in files_in(wheel), "though git ignores them"
    shutil.rmtree(page.VENDOR)
    nowhere = {"PATH": str(tmp_path), "npm_config_registry": "http://127.0.0.1:1", "no_proxy": "127.0.0.1"}
    said = backend(project, "build_wheel('.')", **wanted, **nowhere)
    assert "the chat page in this wheel has no formulas" in said
    assert not [each for each in files_in(wheel) if "vendor/" in each]


@pytest.mark.parametrize("fault", ["none wanted", "no compiler", "does not compile"])
def test_a_wheel_without_the_library_is_for_all_systems(project, fault, tmp_path):
    environment = {"EDGESPEC_KERNELS": "none"} if fault == "none wanted" else {}
    if fault == "no compiler":
        environment = {"PATH": str(tmp_path), "CXX": ""}
    if fault == "does not compile":
        (project / "edgespec" / "kernels" / "src" / "interface.cpp").write_text("no C++")
    said = backend(project, "build_wheel('.')", **environment)
    assert said.endswith("edgespec-1-py3-none-any.whl")
    assert ("this wheel has no kernels" in said) == (fault != "none wanted")
    assert not [file for file in files_in(project / "edgespec-1-py3-none-any.whl") if "libedgespec" in file]


def test_only_a_wheel_asks_for_a_compiler_and_only_where_there_is_none(project, compiler, tmp_path):
    nothing = {"PATH": str(tmp_path), "CXX": ""}
    assert backend(project, "get_requires_for_build_wheel()") == "[]"
    assert "ziglang" in backend(project, "get_requires_for_build_wheel()", **nothing)
    for call, settings in (("wheel", {"EDGESPEC_KERNELS": "none"}), ("editable", {}), ("sdist", {})):
        assert "ziglang" not in backend(project, f"get_requires_for_build_{call}()", **settings, **nothing)


def test_the_sources_are_in_an_sdist_and_an_editable_installation_builds_nothing(project, tmp_path):
    assert backend(project, "build_sdist('.')") == "edgespec-1.tar.gz"
    with tarfile.open(project / "edgespec-1.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"edgespec-1/edgespec/kernels/src/interface.cpp", "edgespec-1/scripts/build_backend.py"} <= names
    assert backend(project, "build_editable('.')") == "edgespec-1-py3-none-any.whl"
