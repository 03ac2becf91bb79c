"""transformers on torch: plain, assisted generation with a draft model, and prompt lookup, from the checkpoints.

Files: `target`, `draft` (Hugging Face folders). Settings: `threads`, `dtype`; draft: `num_tokens`,
`confidence_threshold`; lookup: `num_tokens`. It reads the prompt and verifies its first draft in one pass.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from edgespec.errors import CapabilityError
from peers.base import Answer, Arrivals, Files, Library, Peer, Request, Slots
from peers.field import ROLES

INSTALL = "pip install 'transformers>=5' torch"
LIBRARY = Library("transformers", "transformers", INSTALL)


class TransformersPeer(Peer):
    def __init__(self) -> None:
        self._models: Slots[dict[str, Any]] = Slots()

    def open(self, files: Files) -> str:
        self._files = files
        self._torch = Library("torch", "torch", INSTALL).load()
        self._library = LIBRARY.load()
        self._library.utils.logging.disable_progress_bar()
        return f"{LIBRARY.title}, torch {self._torch.__version__}"

    def generate(self, request: Request) -> Answer:
        torch = self._torch
        torch.set_num_threads(request.settings["threads"])
        models = self._load(request)
        options = self._options(request, models)
        torch.manual_seed(request.seed)
        prompt = torch.tensor([request.prompt_ids])
        arrivals = Arrivals(perf_counter())
        with torch.inference_mode():
            output = models["target"].generate(
                prompt, attention_mask=torch.ones_like(prompt), streamer=_Streamer(arrivals), **options
            )
        ended = perf_counter()
        return arrivals.answer(output[0, prompt.shape[1] :].tolist(), ended)

    def _options(self, request: Request, models: dict[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "eos_token_id": None,
            "pad_token_id": 0,
            "do_sample": bool(request.temperature),
        }
        if request.temperature:
            options |= {"temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        if request.variant == "draft":
            config = models["draft"].generation_config
            config.num_assistant_tokens = request.settings["num_tokens"]
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = request.settings["confidence_threshold"]
            options["assistant_model"] = models["draft"]
        if request.variant == "lookup":
            options["prompt_lookup_num_tokens"] = request.settings["num_tokens"]
        return options

    def _load(self, request: Request) -> dict[str, Any]:
        """The models in one dtype. Raises CapabilityError when the draft's vocabulary has another size."""
        dtype = request.settings["dtype"]

        def load() -> dict[str, Any]:
            make = self._library.AutoModelForCausalLM.from_pretrained
            return {role: make(self._files[role], dtype=dtype).eval() for role in ROLES if role in self._files}

        models = self._models.get(request.variant, dtype, load)
        sizes = [models[role].config.vocab_size for role in ROLES if role in models]
        if request.variant == "draft" and sizes[0] != sizes[1]:
            raise CapabilityError(
                f"transformers wants one vocabulary size, got {sizes[0]} in the target and {sizes[1]} in the draft, or "
                f"it translates every draft through text: build the pair with --vocab-size {sizes[1]}"
            )
        return models


class _Streamer:
    """What `generate` calls a streamer; its first call hands over the prompt."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._has_prompt = False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self._arrivals.add(perf_counter(), value.numel())
        self._has_prompt = True

    def end(self) -> None:
        pass
