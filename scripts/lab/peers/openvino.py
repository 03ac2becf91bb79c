"""openvino-genai on the same GGUF, which it converts as it loads: plain, with a draft model, with prompt lookup.

Sweeps `threads`, `precision` of activations (the default is bf16 where the machine has it); of draft `num_tokens`, of
lookup also `max_ngram`. It batches without a cache of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from peers.base import MIN_P, TOP_K, TOP_P, Answer, Files, Question, Runtime, Settings, library
from peers.in_process import only_prompt

CACHE_GB = 1


class OpenvinoGenai(Runtime):
    def open(self, files: Files, settings: Settings) -> str:
        import numpy

        self._library, title = library("openvino_genai", "openvino-genai")
        self._openvino, _ = library("openvino", "openvino")
        self._numpy, self._settings = numpy, settings
        device = {"INFERENCE_NUM_THREADS": settings["threads"]}
        if settings["precision"] != "default":
            device["INFERENCE_PRECISION_HINT"] = settings["precision"]
        scheduler = self._library.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.cache_size = False, CACHE_GB
        extra: dict[str, Any] = {"scheduler_config": scheduler}
        if settings["setting"] == "draft":
            extra["draft_model"] = self._library.draft_model(files["draft"], "CPU", **device)
        if settings["setting"] == "lookup":
            extra["prompt_lookup"] = True
        self._pipeline = self._library.LLMPipeline(files["target"], "CPU", **extra, **device)
        return title

    def ask(self, question: Question) -> list[Answer]:
        ids = self._numpy.array([only_prompt(question)], self._numpy.int64)
        tensor, started_s = self._openvino.Tensor, perf_counter()
        inputs = self._library.TokenizedInputs(tensor(ids), tensor(self._numpy.ones_like(ids)))
        times_s: list[float] = []
        result = self._pipeline.generate(inputs, self._config(question), self._streamer(times_s, started_s))
        token_ids = [int(token_id) for token_id in result.tokens[0]]
        ended_s = perf_counter() - started_s
        times_s += [ended_s] * (len(token_ids) - len(times_s))  # what its streamer holds back until the end
        return [Answer(token_ids, times_s[: len(token_ids)])]

    def _streamer(self, times_s: list[float], started_s: float) -> Any:
        library = self._library

        class Streamer(library.StreamerBase):  # type: ignore[misc, name-defined]
            def write(self, token: int | Sequence[int]) -> Any:
                times_s.extend([perf_counter() - started_s] * (1 if isinstance(token, int) else len(token)))
                return library.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        return Streamer()

    def _config(self, question: Question) -> Any:
        config = self._library.GenerationConfig()
        config.max_new_tokens = question.max_tokens
        own = self._pipeline.get_generation_config()
        end_id = own.eos_token_id if own.eos_token_id >= 0 else self._pipeline.get_tokenizer().get_eos_token_id()
        config.set_eos_token_id(end_id)
        config.stop_token_ids = own.stop_token_ids or {end_id}
        config.do_sample = bool(question.temperature)
        if question.temperature:
            config.temperature, config.rng_seed = question.temperature, question.seed
            config.top_k, config.top_p, config.min_p = TOP_K, TOP_P, MIN_P
        if self._settings["setting"] != "plain":
            config.num_assistant_tokens = self._settings["num_tokens"]
        if self._settings["setting"] == "lookup":
            config.max_ngram_size = self._settings["max_ngram"]
        return config
