"""Runtimes that a child process loads as libraries: edgespec itself and llama-cpp-python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any

from peers.base import MIN_P, TOP_K, TOP_P, Answer, Files, Question, Refusal, Runtime, Settings, library


def only_prompt(question: Question) -> list[int]:
    """Raises Refusal when several clients ask at once."""
    if len(question.prompts) != 1:
        raise Refusal("answers one client at a time")
    return list(question.prompts[0])


def timed(tokens: Iterator[int], started_s: float) -> list[Answer]:
    """The answer that an iterator of token ids makes."""
    token_ids, times_s = [], []
    for token_id in tokens:
        token_ids.append(int(token_id))
        times_s.append(perf_counter() - started_s)
    return [Answer(token_ids, times_s)]


class Edgespec(Runtime):
    """edgespec through its Python API, with the threads and all else that it chooses itself.

    Settings: "default" uses whatever `files` has, "default alone" neither draft nor heads, "plain" does not speculate.
    """

    def open(self, files: Files, settings: Settings) -> str:
        import edgespec

        options: dict[str, Any] = {"context_length": int(files["context"])}
        if settings["setting"] == "plain":
            options["drafter"] = "none"
        elif settings["setting"] != "default alone":
            options |= {role: files[role] for role in ("draft", "heads") if role in files}
        self._model = edgespec.load(files["target"], **options)
        on_kernels = self._model.target.facts.name == "onnx" and files["target"].endswith(".gguf")
        return f"edgespec {edgespec.__version__} on {'its kernels' if on_kernels else self._model.target.facts.name}"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        from edgespec.errors import PromptError

        def ids_of(text: str) -> list[int]:
            try:
                return self._model.encode_chat([{"role": "user", "content": text}])
            except PromptError:  # a base model, without a chat template
                return self._model.encode(text)

        return [ids_of(text) for text in texts]

    def ask(self, question: Question) -> list[Answer]:
        from edgespec import GenerateOptions, Sampling

        prompt = only_prompt(question)
        self._model.forget()
        sampling = Sampling(temperature=question.temperature, top_k=TOP_K, top_p=TOP_P, min_p=MIN_P, seed=question.seed)
        started_s = perf_counter()
        options = GenerateOptions(max_tokens=question.max_tokens, logprobs=False)  # as `edgespec chat`, and the others
        events = self._model.stream(prompt, sampling, options)
        return timed((event.token_id for event in events if event.finish_reason != "stop"), started_s)


class LlamaCppPython(Runtime):
    """llama-cpp-python's high-level class: plain, and "lookup", its prompt lookup. It has no draft model.

    Sweeps `threads`, `flash_attention`; of lookup `num_tokens`, `max_ngram`.
    """

    def open(self, files: Files, settings: Settings) -> str:
        self._library, title = library("llama_cpp", "llama-cpp-python")
        lookup = None
        if settings["setting"] == "lookup":
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            lookup = LlamaPromptLookupDecoding(settings["max_ngram"], settings["num_tokens"])
        self._model = self._library.Llama(
            files["target"],
            n_ctx=int(files["context"]),
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            flash_attn=settings["flash_attention"],
            draft_model=lookup,
            verbose=False,
        )
        return title

    def ask(self, question: Question) -> list[Answer]:
        prompt, model = only_prompt(question), self._model
        model.set_seed(question.seed)
        model.reset()  # or it would take the prompt from its cache
        vocabulary = self._library.llama_model_get_vocab(model.model)

        def tokens() -> Iterator[int]:
            filters = {"top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P, "repeat_penalty": 1.0}
            with closing(model.generate(prompt, temp=question.temperature, **filters)) as made:
                for count, token_id in enumerate(made, 1):
                    if self._library.llama_vocab_is_eog(vocabulary, token_id):
                        return
                    yield token_id
                    if count == question.max_tokens:
                        return

        return timed(tokens(), perf_counter())
