"""Servers on this machine, asked by as many clients as there are prompts: edgespec's and two in llama.cpp's form."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

from peers.base import MIN_P, TOP_K, TOP_P, Answer, Files, Question, Refusal, Runtime, Settings

START_S = 300.0
STOP_S = 5.0
ANSWER_S = 3600.0  # the parent's own limit comes first
POLL_S = 0.05
# The machine's own proxy settings must not come between.
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerRuntime(Runtime):
    """A server in a process of its own, with `/health` and llama.cpp's `/completion`."""

    def ask(self, question: Question) -> list[Answer]:
        started_s = perf_counter()
        with ThreadPoolExecutor(self._clients) as clients:
            return list(clients.map(lambda prompt: self._stream(prompt, question, started_s), question.prompts))

    def process_ids(self) -> list[int]:
        return [self._process.pid]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def start(self, command: Sequence[str], files: Files) -> None:
        """Returns when the server answers. Raises Refusal when it ends before, or takes too long."""
        self._log, self._clients, port = Path(files["log"]), int(files["clients"]), _free_port()
        self._url = f"http://127.0.0.1:{port}"
        with self._log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline_s = monotonic() + START_S
        while not self._is_ready():
            if self._process.poll() is not None:
                raise Refusal(f"the server ended with {self._process.returncode}: {self.last_words()}")
            if monotonic() > deadline_s:
                self.close()
                raise Refusal(f"the server was not ready after {START_S:.0f} s: {self.last_words()}")
            sleep(POLL_S)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that a path answers. Raises OSError, and ValueError for what is none."""
        asked = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with HTTP.open(asked, timeout=ANSWER_S) as reply:
            return json.loads(reply.read())

    def last_words(self, word: str = "error") -> str:
        """What its log says of a failure: the last line that has the word, or simply the last one."""
        lines = [line.strip() for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines()]
        telling = [line for line in lines if word in line.lower()]
        return (telling or [line for line in lines if line] or ["it said nothing"])[-1][-300:]

    def _is_ready(self) -> bool:
        try:
            with HTTP.open(self._url + "/health", timeout=POLL_S * 20):
                return True
        except OSError:  # not listening yet, or still loading: 503
            return False

    def _stream(self, prompt: Sequence[int], question: Question, started_s: float) -> Answer:
        body = {
            "prompt": list(prompt),
            "n_predict": question.max_tokens,
            "temperature": question.temperature,
            "top_k": TOP_K,
            "top_p": TOP_P,
            "min_p": MIN_P,
            "seed": question.seed,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        asked = urllib.request.Request(
            self._url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        token_ids: list[int] = []
        times_s: list[float] = []
        with HTTP.open(asked, timeout=ANSWER_S) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    told: Mapping[str, Any] = json.loads(line[6:])
                    if "error" in told:
                        raise RuntimeError(f"the server answered {told['error']}")
                    made = self.tokens_of(told)
                    token_ids += made
                    times_s += [perf_counter() - started_s] * len(made)
        return Answer(token_ids, times_s)

    def tokens_of(self, told: Mapping[str, Any]) -> Sequence[int]:
        """The token ids in one message of a stream."""
        tokens: Sequence[int] = told["tokens"]
        return tokens


class LlamaServer(ServerRuntime):
    """llama.cpp's own server: plain, with a draft model, and with its n-gram lookups.

    Sweeps `threads`, `flash_attention`; of draft `max_tokens`, `min_probability`; of lookup `type`, `ngram`,
    `max_tokens`, where None leaves the server's default.
    """

    def open(self, files: Files, settings: Settings) -> str:
        program = shutil.which(files.get("program", "llama-server"))
        if program is None:
            raise Refusal("no llama-server is given or found: build llama.cpp and give --llama-server PATH")
        self.start([program, *arguments(files, settings)], files)
        if settings["setting"] == "draft" and (complaint := self.complaint()):
            self.close()
            raise Refusal(complaint)
        return titled("llama.cpp's server", program)

    def complaint(self) -> str:
        """Why it would run without its draft; empty: it has one, or was asked for none."""
        if "failed to initialize speculative" not in self._log.read_text("utf-8", "replace"):
            return ""
        return f"llama-server would run without its draft: {self.last_words('speculative')}"


def titled(name: str, program: str) -> str:
    """With the version that it tells."""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in (told.stderr + told.stdout).splitlines() if line.startswith("version")]
    return f"{name} {lines[0].removeprefix('version:').strip()}" if lines else name


def arguments(files: Files, settings: Settings) -> list[str]:
    """llama-server's command line, its address left out."""
    clients, threads = int(files["clients"]), str(settings["threads"])
    given = ["--model", files["target"], "--ctx-size", str(clients * int(files["context"]))]
    given += ["--parallel", str(clients), "--threads", threads, "--threads-batch", threads]
    given += ["--flash-attn", settings["flash_attention"], "--cache-ram", "0"]
    if settings["setting"] == "draft":
        given += ["--spec-type", "draft-simple", "--model-draft", files["draft"]]
        given += ["--spec-draft-n-max", str(settings["max_tokens"])]
        given += ["--spec-draft-p-min", str(settings["min_probability"])]
    if settings["setting"] == "lookup" and settings["type"] == "default":
        given += ["--spec-default"]
    elif settings["setting"] == "lookup":
        given += ["--spec-type", settings["type"]]
        ngram, most = LOOKUP_FLAGS.get(settings["type"], ("", ""))
        if ngram and settings["ngram"]:
            given += [ngram, str(settings["ngram"])]
        if most and settings["max_tokens"]:
            given += [most, str(settings["max_tokens"])]
            if settings["type"] == "ngram-mod":
                given += ["--spec-ngram-mod-n-min", "1"]
    return given


# By type of lookup, the length that is looked up and the most tokens that are drafted.
LOOKUP_FLAGS = {kind: (f"--spec-{kind}-size-n", f"--spec-{kind}-size-m") for kind in ("ngram-simple", "ngram-map-k")}
LOOKUP_FLAGS["ngram-map-k4v"] = ("--spec-ngram-map-k4v-size-n", "--spec-ngram-map-k4v-size-m")
LOOKUP_FLAGS["ngram-mod"] = ("--spec-ngram-mod-n-match", "--spec-ngram-mod-n-max")


class IkServer(ServerRuntime):
    """ik_llama.cpp's server with weights repacked as it loads: plain, with a draft model, and with its n-gram lookups.

    Sweeps what `LlamaServer` sweeps, and of lookup `autotune`. It streams no token ids, only the text of each, whose
    checksum stands for it; the tokens of one character come as one.
    """

    def open(self, files: Files, settings: Settings) -> str:
        program = shutil.which(files.get("program", ""))
        if program is None:
            raise Refusal("no server of ik_llama.cpp is given: build it and give --ik-server PATH")
        clients, threads = int(files["clients"]), str(settings["threads"])
        given = ["--model", files["target"], "--ctx-size", str(clients * int(files["context"])), "--run-time-repack"]
        given += ["--parallel", str(clients), "--threads", threads, "--threads-batch", threads, "--cache-ram", "0"]
        given += ["--flash-attn", settings["flash_attention"], "--log-disable"]
        if settings["setting"] == "draft":
            given += ["--model-draft", files["draft"], "--draft-p-min", str(settings["min_probability"])]
            given += ["--draft-max", str(settings["max_tokens"])]
        elif settings["setting"] == "lookup":
            given += ["--spec-type", settings["type"], *(["--spec-autotune"] if settings["autotune"] else ())]
            flags = {"--spec-ngram-size-n": settings["ngram"], "--draft-max": settings["max_tokens"]}
            given += [part for flag, value in flags.items() if value for part in (flag, str(value))]
        self.start([program, *given], files)
        return titled("ik_llama.cpp's server", program)

    def tokens_of(self, told: Mapping[str, Any]) -> Sequence[int]:
        return [zlib.crc32(told["content"].encode())] if told["content"] else []


class EdgespecServer(ServerRuntime):
    """`edgespec serve`, as it is; settings as in `in_process.Edgespec`."""

    def open(self, files: Files, settings: Settings) -> str:
        command = [sys.executable, "-m", "edgespec", "serve", files["target"], "-c", files["context"]]
        command += ["--parallel", files["clients"]]
        if settings["setting"] == "plain":
            command += ["--drafter", "none"]
        elif settings["setting"] != "default alone":
            flags = {"draft": "--model-draft", "heads": "--heads"}
            command += [part for role, flag in flags.items() if role in files for part in (flag, files[role])]
        self.start(command, files)
        return f"edgespec serve {version('edgespec')}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
