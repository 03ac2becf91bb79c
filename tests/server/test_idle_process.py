"""`--idle-unload` in a process: its memory, its end while nothing is loaded or something is, the sidecar."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from serving import ENDS_WITHIN_S, errors_of, read_line, served
from waiting import until

FIELDS: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def is_loaded(url: str) -> bool:
    return "edgespec_model_loaded 1" in httpx.get(url + "/metrics").text


def text_of(url: str) -> str:
    answer = httpx.post(url + "/v1/completions", json=FIELDS, timeout=ENDS_WITHIN_S)
    return answer.json()["choices"][0]["text"]


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.quiet
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_its_memory_goes_back_to_the_system_each_time(private_home: Path):
    options = ("--port", "0", "--idle-unload", "0.5", "-c", "2048", "--verbose")
    with served(private_home, *options) as process:
        url = read_line(process)["url"]
        texts, used = [], []
        for _ in range(4):
            texts.append(text_of(url))
            used.append(resident_bytes(process))
            until(lambda: resident_bytes(process) < used[-1] - (8 << 20), 20, process)
            assert not is_loaded(url)
        assert len(set(texts)) == 1
        assert used[-1] < used[0] + (8 << 20), used
        process.send_signal(signal.SIGTERM)  # while nothing is loaded
        assert process.wait(ENDS_WITHIN_S) == 0
        log = errors_of(process)
        assert log.count("note: answer: ") == 4  # from the engine's thread
        assert log.count("the model is unloaded") == 4 and log.count("is loaded again") == 3 and "Traceback" not in log


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_signal_while_it_is_loaded_again_ends_it(private_home: Path):
    with served(private_home, "--port", "0", "--idle-unload", "0.2") as process:
        url = read_line(process)["url"]
        until(lambda: not is_loaded(url), process=process)
        asking = subprocess.Popen(
            [sys.executable, "-c", f"import urllib.request as r; r.urlopen('{url}/tokenize', b'{{}}')"]
        )
        until(lambda: is_loaded(url) or asking.poll() is not None, process=process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDS_WITHIN_S) == 0
        asking.wait(ENDS_WITHIN_S)
        assert "Traceback" not in errors_of(process)


def test_the_sidecar_unloads_too(private_home: Path):
    with served(private_home, "--stdio", "--idle-unload", "0.3", "--verbose") as process:
        assert process.stdin is not None and process.stderr is not None
        assert [read_line(process)["event"] for _ in range(2)] == ["hello", "ready"]
        texts = []
        for number in range(2):
            while (line := process.stderr.readline()) and b"the model is unloaded" not in line:
                pass
            process.stdin.write(json.dumps({"op": "generate", "id": str(number)} | FIELDS).encode() + b"\n")
            process.stdin.flush()
            text = ""
            while (event := read_line(process))["event"] == "delta":
                text += event["text"]
            assert event["event"] == "done" and text
            texts.append(text)
        assert texts[0] == texts[1]
        process.stdin.close()
        assert process.wait(ENDS_WITHIN_S) == 0
        process.stdin = None


def test_what_was_learnt_of_costs_is_kept(tmp_path: Path):
    with served(tmp_path, "--port", "0", "--idle-unload", "0.5") as process:
        url = read_line(process)["url"]
        assert not list(tmp_path.rglob("learnt*/*"))
        for _ in range(3):
            text_of(url)
        # Closing, which follows the unloading, writes measured costs and learnt confidences.
        until(lambda: any(tmp_path.rglob("learnt*/*")), process=process)
        assert not is_loaded(url)
