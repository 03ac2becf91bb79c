"""llama.cpp's own server: plain, with a draft model, and with its n-gram lookup, over HTTP on this machine.

Files: `program`, `target`, `draft` (GGUF), `context_length`, `log`. Settings, which it takes at its start: `threads`,
`flash_attention` (on, off, auto); draft: `max_tokens`, `min_probability`; lookup: `ngram`, `max_tokens`. Its answers
never hold the end token, which it forbids when told to go on after it.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

from edgespec.errors import CapabilityError, EngineError
from peers.base import Answer, Files, Peer, Request, Slots

INSTALL = "build llama.cpp and give its llama-server with --llama-server PATH"
START_S = 300.0
STOP_S = 5.0
ANSWER_S = 3600.0  # the parent's own limit comes first
POLL_S = 0.05
# The machine's own proxy settings must not come between.
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LlamaServerPeer(Peer):
    def __init__(self) -> None:
        self._servers: Slots[Server] = Slots(Server.stop)

    def open(self, files: Files) -> str:
        program = shutil.which(files.get("program", "llama-server"))
        if program is None:
            raise CapabilityError(f"no llama-server is given or found: {INSTALL}")
        self._files = {**files, "program": program}
        told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        lines = [line for line in (told.stderr + told.stdout).splitlines() if line.startswith("version")]
        return f"llama.cpp server {lines[0].removeprefix('version:').strip()}" if lines else "llama.cpp server"

    def generate(self, request: Request) -> Answer:
        settings = tuple(sorted(request.settings.items()))
        server = self._servers.get(request.variant, settings, lambda: self._start(request))
        body = {
            "prompt": list(request.prompt_ids),
            "n_predict": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": False,
        }
        started = perf_counter()
        told = server.ask("/completion", body)
        return answer_of(told, perf_counter() - started)

    def close(self) -> None:
        self._servers.clear()

    def _start(self, request: Request) -> Server:
        log = Path(self._files["log"]).with_suffix(f".{request.variant}.log")
        server = Server([self._files["program"], *arguments(self._files, request.variant, request.settings)], log)
        if request.variant == "draft" and (complaint := server.complaint()):
            server.stop()
            raise CapabilityError(f"llama-server would run without its draft: {complaint}")
        return server


def arguments(files: Files, variant: str, settings: Mapping[str, Any]) -> list[str]:
    """The server's command line, its port left out."""
    given = ["--model", files["target"], "--ctx-size", files["context_length"], "--parallel", "1"]
    given += ["--threads", str(settings["threads"]), "--flash-attn", settings["flash_attention"], "--cache-ram", "0"]
    if variant == "draft":
        given += ["--spec-type", "draft-simple", "--model-draft", files["draft"]]
        given += ["--spec-draft-n-max", str(settings["max_tokens"])]
        given += ["--spec-draft-p-min", str(settings["min_probability"])]
    if variant == "lookup":
        given += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(settings["ngram"])]
        given += ["--spec-ngram-simple-size-m", str(settings["max_tokens"])]
    return given


def answer_of(told: Mapping[str, Any], total_s: float) -> Answer:
    """What a /completion reply says. Raises EngineError when it is not one."""
    try:
        token_ids, timings = told["tokens"], told["timings"]
        return Answer(
            token_ids=tuple(int(token_id) for token_id in token_ids),
            decode_tokens=int(timings["predicted_n"]) - 1,
            decode_s=float(timings["predicted_ms"]) / 1e3,
            total_s=total_s,
            drafted_tokens=timings.get("draft_n"),
            accepted_tokens=timings.get("draft_n_accepted"),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise EngineError(f"llama-server's reply has no tokens and timings: {str(told)[:200]}") from exc


class Server:
    """One running server; `stop` leaves nothing behind. Raises CapabilityError when it ends before it is ready."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = ANSWER_S) -> Any:
        """The JSON reply. Raises EngineError when there is none."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with HTTP.open(asked, timeout=timeout_s) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as exc:
            raise EngineError(f"llama-server answered {exc.code} to {path}: {exc.read(200)!r}") from exc
        except (OSError, ValueError) as exc:
            raise EngineError(f"llama-server did not answer {path}: {exc}") from exc

    def complaint(self) -> str:
        """Why it serves without speculation, which it tells its log only; empty when nothing is wrong."""
        return next((line for line in self._lines() if "failed to initialize speculative" in line), "")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self) -> None:
        deadline = monotonic() + START_S
        while monotonic() < deadline:
            if self._process.poll() is not None:
                raise CapabilityError(f"llama-server ended with {self._process.returncode}: {self._last_words()}")
            try:
                self.ask("/health", timeout_s=POLL_S * 20)
            except EngineError:  # not listening yet, or still loading: 503
                sleep(POLL_S)
            else:
                return
        raise CapabilityError(f"llama-server was not ready after {START_S:.0f} s: {self._last_words()}")

    def _last_words(self) -> str:
        """What its log says of a failure: the last line that has the word, or simply the last one."""
        lines = self._lines()
        telling = [line for line in lines if "error" in line.lower() or "not compatible" in line]
        return (telling or lines or ["it said nothing"])[-1][-300:]

    def _lines(self) -> list[str]:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
