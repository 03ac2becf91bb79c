"""edgespec itself as one of the field, in a child process like the others.

Its draft model reads the prompt while decoding, so decoding pays for that; in most peers reading the prompt does.
Variants: plain, auto, and both again as "... reproducible"; heads: auto with `heads` (a file) in place of the pair's
draft model. Files: `folder` (a pair), `target` (of heads), `engine`, `context_length`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.config.values import EngineName
from peers.base import Answer, Files, Peer, Request, Slots


class OwnPeer(Peer):
    def __init__(self) -> None:
        self._models: Slots[Model] = Slots(Model.close)

    def open(self, files: Files) -> str:
        self._files = files
        return f"edgespec {edgespec.__version__} ({files['engine']})"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._model("plain", 1).encode(text, parse_special=True) for text in texts]

    def generate(self, request: Request) -> Answer:
        model = self._model(request.variant, request.settings["threads"])
        model.forget()  # variants share a model, and the second would find its prompt read
        result = model.generate(
            list(request.prompt_ids),
            Sampling(temperature=request.temperature, seed=request.seed),
            GenerateOptions(
                max_tokens=request.max_tokens,
                ignore_eos=True,
                logprobs=False,
                drafter="none" if request.variant.startswith("plain") else "auto",
            ),
        )
        return Answer(
            token_ids=result.token_ids,
            decode_tokens=result.stats.new_tokens - 1,
            decode_s=result.stats.decode_s,
            total_s=result.stats.wall_s,
            drafted_tokens=result.stats.drafted_tokens,
            accepted_tokens=result.stats.accepted_tokens,
        )

    def close(self) -> None:
        self._models.clear()

    def _model(self, variant: str, threads: int) -> Model:
        reproducible, engine = variant.endswith("reproducible"), cast(EngineName, self._files["engine"])
        heads = self._files["heads"] if variant == "heads" else None

        def load() -> Model:
            return edgespec.load(
                self._files["folder" if heads is None else "target"],
                engine=engine,
                heads=heads,
                reproducible=reproducible,
                threads=threads,
                context_length=int(self._files["context_length"]),
            )

        return self._models.get(variant, (reproducible, heads, threads), load)
