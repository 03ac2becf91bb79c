"""llama-cpp-python's high-level class: plain, and with its own prompt lookup. It has no draft model.

Files: `target` (GGUF), `context_length`. Settings: `threads`, `flash_attention`; lookup: `num_tokens`, `max_ngram`.
"""

from __future__ import annotations

import importlib
from time import perf_counter
from typing import Any

from peers.base import Answer, Arrivals, Files, Library, Peer, Request, Slots

LIBRARY = Library("llama_cpp", "llama-cpp-python", "pip install llama-cpp-python")


class LlamaCppPythonPeer(Peer):
    def __init__(self) -> None:
        self._models: Slots[Any] = Slots(lambda model: model.close())

    def open(self, files: Files) -> str:
        self._files = files
        self._library = LIBRARY.load()
        return LIBRARY.title

    def generate(self, request: Request) -> Answer:
        model = self._model(request)
        model.set_seed(request.seed)
        model.reset()  # or it would take the prompt from its cache
        arrivals = Arrivals(perf_counter())
        token_ids: list[int] = []
        # Its generator goes on after the end token, so that all answers have one length.
        for token_id in model.generate(
            list(request.prompt_ids), temp=request.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        ):
            if not token_ids:
                arrivals.add(perf_counter(), 1)
            token_ids.append(token_id)
            if len(token_ids) == request.max_tokens:
                break
        return arrivals.answer(token_ids, perf_counter())

    def close(self) -> None:
        self._models.clear()

    def _model(self, request: Request) -> Any:
        settings = request.settings
        lookup = None
        if request.variant == "lookup":
            speculative = importlib.import_module("llama_cpp.llama_speculative")
            lookup = speculative.LlamaPromptLookupDecoding(settings["max_ngram"], settings["num_tokens"])

        def load() -> Any:
            return self._library.Llama(
                self._files["target"],
                n_ctx=int(self._files["context_length"]),
                n_threads=settings["threads"],
                n_threads_batch=settings["threads"],
                flash_attn=settings["flash_attention"],
                draft_model=lookup,
                verbose=False,
            )

        return self._models.get(request.variant, tuple(sorted(settings.items())), load)
