"""onnxruntime-genai: plain, with a draft model, with n-gram lookup, all on the files that edgespec runs.

Files: `target`, `draft` (folders with genai_config.json). Settings: `threads`; draft: `max_draft_tokens`,
`min_adaptive_k`; lookup: `ngram_size`, `max_draft_tokens`, `chained`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec.errors import CapabilityError
from peers.base import Answer, Files, Library, Peer, Request, Slots

LIBRARY = Library("onnxruntime_genai", "onnxruntime-genai", "pip install onnxruntime-genai")


class GenaiPeer(Peer):
    def __init__(self) -> None:
        self._models: Slots[Any] = Slots()

    def open(self, files: Files) -> str:
        self._files = files
        self._library = LIBRARY.load()
        self._scratch = tempfile.TemporaryDirectory(prefix="edgespec-genai-")
        return LIBRARY.title

    def generate(self, request: Request) -> Answer:
        numpy = Library("numpy", "numpy", LIBRARY.install).load()
        generator = self._library.Generator(self._model(request), self._parameters(request))
        started = perf_counter()
        generator.append_tokens(numpy.array([request.prompt_ids], numpy.int32))
        prefilled = perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        ended = perf_counter()
        token_ids = generator.get_sequence(0)[len(request.prompt_ids) :].tolist()
        stats = generator.get_speculative_stats()
        return Answer(
            token_ids=tuple(token_ids),
            decode_tokens=len(token_ids) - 1,
            decode_s=ended - prefilled,
            total_s=ended - started,
            drafted_tokens=stats["draft_tokens_proposed"],
            accepted_tokens=stats["draft_tokens_accepted"],
        )

    def close(self) -> None:
        self._models.clear()
        self._scratch.cleanup()

    def _parameters(self, request: Request) -> Any:
        settings = request.settings
        parameters = self._library.GeneratorParams(self._model(request))
        length = len(request.prompt_ids) + request.max_tokens
        search: dict[str, Any] = {"max_length": length, "min_length": length, "do_sample": False}
        if request.temperature:
            search |= {"do_sample": True, "temperature": request.temperature, "top_k": 0, "random_seed": request.seed}
        parameters.set_search_options(**search)
        if request.variant == "draft":
            names = ("max_draft_tokens", "min_adaptive_k")
            parameters.set_speculative_options(**{name: settings[name] for name in names})
        if request.variant == "lookup":
            parameters.set_speculative_options(
                ngram_size=settings["ngram_size"],
                max_draft_tokens=settings["max_draft_tokens"],
                ngram_chained_lookup=settings["chained"],
            )
        return parameters

    def _model(self, request: Request) -> Any:
        has_draft = request.variant == "draft"
        threads = request.settings["threads"]

        def load() -> Any:
            folder = self._composite() if has_draft else self._files["target"]
            config = self._library.Config(str(folder))
            session = {"session_options": {"intra_op_num_threads": threads}}
            roles = {"decoder": session, **({"draft": session} if has_draft else {})}
            # It cannot ignore the end token, and min_length forbids it: a token that is hardly ever wanted takes its
            # place.
            last_id = _config(Path(self._files["target"]))["model"]["vocab_size"] - 1
            config.overlay(json.dumps({"model": {**roles, "eos_token_id": last_id}}))
            return self._library.Model(config)

        return self._models.get(request.variant, (has_draft, threads), load)

    def _composite(self) -> Path:
        """A folder with both models, as its draft decoding wants them; the weights are linked.

        Raises CapabilityError when the vocabularies have different sizes, which it refuses.
        """
        target, draft = (_config(Path(self._files[role])) for role in ("target", "draft"))
        sizes = target["model"]["vocab_size"], draft["model"]["vocab_size"]
        if sizes[0] != sizes[1]:
            raise CapabilityError(
                f"onnxruntime-genai wants one vocabulary size, got {sizes[0]} in the target and {sizes[1]} in the "
                f"draft: build the pair with --vocab-size {sizes[1]}"
            )
        folder = Path(self._scratch.name)
        target["model"]["decoder"]["filename"] = "target/model.onnx"
        target["model"]["draft"] = {**draft["model"]["decoder"], "filename": "draft/model.onnx"}
        for role in ("target", "draft"):
            if not (folder / role).exists():
                (folder / role).symlink_to(Path(self._files[role]).resolve(), target_is_directory=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((Path(self._files["target"]) / name).read_bytes())
        (folder / "genai_config.json").write_text(json.dumps(target), encoding="utf-8")
        return folder


def _config(folder: Path) -> dict[str, Any]:
    """Raises CapabilityError when the folder was not written by onnxruntime-genai's builder."""
    path = folder / "genai_config.json"
    if not path.is_file():
        raise CapabilityError(f"{folder} has no genai_config.json: export it with onnxruntime-genai's builder")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
