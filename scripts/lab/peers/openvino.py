"""openvino-genai: plain, with a draft model, with prompt lookup, on its own int8 export of the same checkpoint.

Files: `target`, `draft` (Hugging Face folders), `exports` (where the exports are kept). Settings: `threads`,
`precision` (of activations: bf16 where the machine has it, or f32); draft: `num_tokens`; lookup: also `max_ngram`.
Batching without prefix caching, so that no prompt is read from a cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec.errors import CapabilityError
from edgespec.platform.files import atomic_folder
from peers.base import Answer, Arrivals, Files, Library, Peer, Request, Slots
from peers.field import ROLES

INSTALL = "in an environment of its own (--python openvino-genai=PATH): pip install openvino-genai optimum-intel nncf"
LIBRARY = Library("openvino_genai", "openvino-genai", INSTALL)
CACHE_GB = 1
TAIL = 300  # characters of a failed export's last words


class OpenvinoPeer(Peer):
    def __init__(self) -> None:
        self._pipelines: Slots[Any] = Slots()

    def open(self, files: Files) -> str:
        self._library = LIBRARY.load()
        self._openvino = Library("openvino", "openvino", INSTALL).load()
        self._numpy = Library("numpy", "numpy", INSTALL).load()
        exports = Path(files["exports"])
        self._models = {role: _export(Path(files[role]), exports / role) for role in ROLES if role in files}
        return f"{LIBRARY.title} (int8)"

    def generate(self, request: Request) -> Answer:
        pipeline = self._pipeline(request)
        arrivals = Arrivals(perf_counter())
        result = pipeline.generate(self._inputs(request), self._config(request), self._streamer(arrivals))
        answer = arrivals.answer(result.tokens[0], perf_counter())
        told = result.extended_perf_metrics  # of a draft model only
        if told is None:
            return answer
        return replace(
            answer, drafted_tokens=told.get_num_draft_tokens(), accepted_tokens=told.get_num_accepted_tokens()
        )

    def close(self) -> None:
        self._pipelines.clear()

    def _inputs(self, request: Request) -> Any:
        ids = self._numpy.array([request.prompt_ids], self._numpy.int64)
        tensor = self._openvino.Tensor
        return self._library.TokenizedInputs(tensor(ids), tensor(self._numpy.ones_like(ids)))

    def _streamer(self, arrivals: Arrivals) -> Any:
        library = self._library

        class Streamer(library.StreamerBase):  # type: ignore[misc, name-defined]
            def write(self, token: int | list[int]) -> Any:
                arrivals.add(perf_counter(), len(token) if isinstance(token, list) else 1)
                return library.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        return Streamer()

    def _config(self, request: Request) -> Any:
        config = self._library.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = request.max_tokens, True
        config.do_sample = bool(request.temperature)
        if request.temperature:
            config.temperature, config.rng_seed = request.temperature, request.seed
        if request.variant != "plain":
            config.num_assistant_tokens = request.settings["num_tokens"]
        if request.variant == "lookup":
            config.max_ngram_size = request.settings["max_ngram"]
        return config

    def _pipeline(self, request: Request) -> Any:
        variant, settings = request.variant, request.settings
        device = {"INFERENCE_NUM_THREADS": settings["threads"]}
        if settings["precision"] != "default":
            device["INFERENCE_PRECISION_HINT"] = settings["precision"]

        def load() -> Any:
            scheduler = self._library.SchedulerConfig()
            scheduler.enable_prefix_caching, scheduler.cache_size = False, CACHE_GB
            extra: dict[str, Any] = {"scheduler_config": scheduler}
            if variant == "draft":
                extra["draft_model"] = self._library.draft_model(str(self._models["draft"]), "CPU", **device)
            if variant == "lookup":
                extra["prompt_lookup"] = True
            return self._library.LLMPipeline(str(self._models["target"]), "CPU", **extra, **device)

        return self._pipelines.get(variant, (variant, settings["threads"], settings["precision"]), load)


def _export(checkpoint: Path, result: Path) -> Path:
    """The int8 export of a checkpoint, made when it is not there or was made of another one.

    Raises CapabilityError when optimum-intel is missing or fails.
    """
    weights = sorted(path for path in checkpoint.glob("*.safetensors"))
    made_of = json.dumps([[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in weights])
    record = result / "made_of.json"
    if record.is_file() and record.read_text(encoding="utf-8") == made_of:
        return result
    program = Path(sys.executable).with_name("optimum-cli")
    if not program.is_file():
        raise CapabilityError(f"optimum-intel, which exports the checkpoint, is not installed: {INSTALL}")
    order = ["export", "openvino", "-m", str(checkpoint), "--task", "text-generation-with-past"]
    with atomic_folder(result) as folder:
        command = [str(program), *order, "--weight-format", "int8", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CapabilityError(f"optimum-intel cannot export {checkpoint}: {done.stderr.strip()[-TAIL:]}")
        (folder / record.name).write_text(made_of, encoding="utf-8")
    return result
