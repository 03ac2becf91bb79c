"""`edgespec export` from folder to pair, through click's runner and as a process that is interrupted and killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from demo import changed_copy, heed_interrupts
from edgespec.cli.main import cli
from edgespec.errors import ModelFileError
from edgespec.export import check as checks
from edgespec.export import pair as pairs
from edgespec.export.check import ReferenceLogits, engine_reference, open_engine
from edgespec.formats.manifest import MANIFEST, read_pair, sha256_of
from edgespec.installation import install_command

ROOT = Path(__file__).resolve().parents[2]
TARGET, DRAFT = (str(ROOT / "models" / "demo" / "hf" / role) for role in ("target", "draft"))
POSIX = pytest.mark.skipif(os.name == "nt", reason="signals and fork of POSIX")


pytestmark = pytest.mark.usefixtures("one_thread")


def export(source: str | Path, output: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["export", str(source), "-o", str(output), *arguments])


def assert_refused(result: Result, *said: str, code: int = 2) -> None:
    """The last line says it, there is no traceback, nothing is on stdout."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    for text in said:
        assert text in line


def test_a_pair_is_made_and_runs(tmp_path):
    source = changed_copy(tmp_path / "Demo-8M", Path(TARGET))
    (source / "README.md").write_text("---\nlicense: cc-by-sa-4.0\n---\n# Demo\n")
    (source / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    output = tmp_path / "made" / "pair"
    result = export(source, output, "--draft", DRAFT, "--quant", "q4_0", "--draft-quant", "q8_0", "--no-check")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == str(output)
    assert f"edgespec chat {output}" in result.stdout
    assert "not compared with its source" in result.stdout
    pair = read_pair(output)
    assert (pair.name, pair.licence, pair.context_length) == ("Demo-8M", "cc-by-sa-4.0", 2048)
    assert pair.recommended == {"temperature": 0.6, "top_k": 20}
    assert [file.path.name for file in pair.files.values()] == ["target-q4_0.gguf", "draft-q8_0.gguf"]
    assert pair.figures["check"] == {"performed": False, "tokenisation": "equal"}
    assert str(tmp_path) not in (output / "manifest.toml").read_text()  # nothing of this machine travels along
    assert [path.name for path in output.parent.iterdir()] == ["pair"]
    ran = CliRunner().invoke(cli, ["generate", str(output), "-p", "Hello", "-n", "4", "--json"])
    assert ran.exit_code == 0, ran.output
    answer = json.loads(ran.stdout)
    assert (answer["model"], answer["drafter"], len(answer["token_ids"])) == ("Demo-8M", "auto", 4)


def test_a_model_is_exported_by_the_name_that_it_runs_by(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["export", "demo", "--to", "onnx", "--quant", "int8", "--no-check"])
    assert result.exit_code == 0, result.output
    made = read_pair(tmp_path / "demo-pair").files["target"]
    assert made.engine == "onnx" and made.path.is_relative_to(tmp_path)
    onnx_only = tmp_path / "home" / "models" / "other"
    shutil.copytree(tmp_path / "demo-pair", onnx_only)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    assert_refused(export("other", tmp_path / "out", "--to", "onnx"), "other", "llamacpp")
    (tmp_path / "demo").mkdir()  # a folder comes before a name
    assert_refused(export("demo", tmp_path / "out", "--to", "onnx"), "demo", "safetensors")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quant", "q4_km"], "did you mean 'q4_k_m'"),
        (["--to", "ggf"], "is not one of 'gguf', 'onnx', 'both'"),
        (["--draft-quant", "f16"], "there is no draft"),
        (["--revision", "main"], "is a folder"),
        (["--draft", "/nonexistent/folder"], "no folder '/nonexistent/folder'"),
        (["--qant", "f16"], "did you mean '--quant'"),
    ],
)
def test_bad_options_are_one_line(tmp_path, arguments, said):
    assert_refused(export(TARGET, tmp_path / "pair", "--no-check", *arguments), said)
    assert not (tmp_path / "pair").exists()


def test_bad_sources_are_one_line(tmp_path):
    unknown = changed_copy(tmp_path / "unknown", architectures=["MambaForCausalLM"])
    assert_refused(export(unknown, tmp_path / "pair", "--no-check"), "MambaForCausalLM", "LlamaForCausalLM")
    broken = changed_copy(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(export(broken, tmp_path / "pair", "--no-check"), "model.safetensors", "truncated")
    (broken / "config.json").write_text("{")
    assert_refused(export(broken, tmp_path / "pair", "--no-check"), "config.json")
    assert_refused(export(DRAFT, Path(DRAFT) / "pair", "--no-check"), "inside the source")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "unknown"]


def test_a_foreign_draft_is_refused_before_any_weight_is_converted(tmp_path):
    foreign = changed_copy(tmp_path / "foreign")
    text = (foreign / "tokenizer.json").read_text()
    (foreign / "tokenizer.json").write_text(text.replace('"<|im_end|>"', '"<|im_over|>"'))
    result = export(TARGET, tmp_path / "pair", "--draft", str(foreign), "--no-check")
    assert_refused(result, "token 2 is '<|im_end|>' in the target and '<|im_over|>' in the draft")
    assert "to GGUF" not in result.stderr


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert_refused(export(DRAFT, tmp_path / "pair"), "torch", install_command("export"), "--no-check")
    assert list(tmp_path.iterdir()) == []


def test_gguf_without_the_check_needs_nothing_but_gguf(tmp_path):
    missing = ("torch", "transformers", "safetensors")
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({missing!r}))\nfrom edgespec.cli.main import cli\n"
        f"cli.main(['export', {DRAFT!r}, '-o', {str(tmp_path / 'pair')!r}, '--no-check'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_pair(tmp_path / "pair").figures["check"]["tokenisation"] == "equal"


# the check


def answers_of(folder: Path) -> ReferenceLogits:
    """A reference made by our own engine from the pair at `folder`, in place of transformers."""
    with open_engine("gguf", read_pair(folder).target, 64, 1) as engine:
        return engine_reference(engine, "edgespec")


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: True)


def test_an_export_that_fails_the_check_gets_no_name(tmp_path, monkeypatch, without_torch):
    assert export(DRAFT, tmp_path / "right", "--quant", "f32", "--no-check").exit_code == 0
    assert export(TARGET, tmp_path / "other", "--quant", "f32", "--no-check").exit_code == 0
    right, other = answers_of(tmp_path / "right"), answers_of(tmp_path / "other")
    monkeypatch.setattr(pairs, "reference_of", lambda folder, threads: other)
    result = export(DRAFT, tmp_path / "pair")
    assert_refused(result, "target gguf q8_0 is wrong and was removed", "mean KL", "top-1", code=1)
    assert not (tmp_path / "pair").exists()
    assert not list((tmp_path / ".pair.export").rglob("*.gguf"))
    monkeypatch.setattr(pairs, "reference_of", lambda folder, threads: right)
    again = export(DRAFT, tmp_path / "pair")
    assert again.exit_code == 0, again.output
    assert "check target gguf: top-1 agreement" in again.stdout
    found = read_pair(tmp_path / "pair").figures["check"]
    assert found["performed"] is True
    assert 0 < found["target"]["gguf"]["mean_kl"] < 0.005


# being interrupted


def test_an_existing_pair_is_kept_unless_forced(tmp_path):
    output = tmp_path / "pair"
    assert export(DRAFT, output, "--no-check").exit_code == 0
    assert_refused(export(DRAFT, output, "--no-check", "--quant", "f16"), "exists", "--force")
    assert_refused(export(TARGET, output, "--no-check", "--force", "--quant", "q9"), "'q9'")
    assert read_pair(output).target.name == "target-q8_0.gguf"
    assert export(DRAFT, output, "--no-check", "--quant", "f16", "--force").exit_code == 0
    assert read_pair(output).target.name == "target-f16.gguf"
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


@POSIX
def test_an_interrupt_writes_nothing(tmp_path):
    script = [sys.executable, str(ROOT / "scripts" / "export_hf.py")]
    arguments = [TARGET, "-o", str(tmp_path / "pair"), "--no-check", "--quant", "q4_k_m", "--draft", DRAFT]

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*script, *arguments], **pipes, preexec_fn=heed_interrupts) as process:
        assert process.stderr is not None
        while b"to GGUF" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, said = process.communicate(timeout=120)
    assert process.returncode == 130, said.decode()
    assert b"interrupted: nothing was written" in said
    assert b"Traceback" not in said
    assert output == b""
    assert not (tmp_path / "pair").exists()


def contents(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in folder.rglob("*") if path.is_file()}


@POSIX
def test_no_kill_leaves_a_folder_that_looks_finished(tmp_path):
    """Kills a moment after each step; the next run always succeeds."""
    output, early, rng = tmp_path / "pair", 0, random.Random(0)
    command = [sys.executable, "-m", "edgespec", "export", DRAFT, "-o", str(output), "--no-check", "--to", "both"]
    steps = subprocess.run(command, check=True, capture_output=True).stderr.splitlines()
    wanted = contents(output)
    for step in range(len(steps)):
        shutil.rmtree(output)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            for _ in range(step + 1):
                process.stderr.readline()
            time.sleep(rng.uniform(0, 0.03))
            process.kill()
        early += not output.exists()
        for manifest in tmp_path.rglob(MANIFEST):
            with suppress(ModelFileError):
                read_pair(manifest.parent)
                assert contents(manifest.parent) == wanted, "it looks finished and is not"
        if not output.exists():
            subprocess.run(command, check=True, capture_output=True)
        assert contents(output) == wanted
        # The working folder stays where the kill came between the last rename and its removal.
        assert {path.name for path in tmp_path.iterdir()} <= {".pair.export", ".pair.export.lock", "pair"}
    assert early >= 2  # the test kills exports, not what comes after them
