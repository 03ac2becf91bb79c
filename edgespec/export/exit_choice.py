"""Chooses the best early-exit layer of a model by measuring the acceptance of every exit. Needs torch.

The model answers the built-in prompts greedily. An exit after layer E applies the final norm and head to the hidden
state there; its acceptance is the share of positions at which it picks the model's token. The expected speedup follows
from the weights that a pass reads: a drafted token costs its share of them, a verifying pass costs more per extra row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.control.length import expected_speedup
from edgespec.errors import CapabilityError, ConfigError
from edgespec.export.reference import in_transformers
from edgespec.loading.sample_prompts import PROMPTS

TOKENS = 48  # per prompt
LONGEST = 8
ROW_COST = 0.2  # cost of an extra row in a verifying pass, relative to a pass of one row: int8 and Q8_0 on a CPU
FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "embedding_norm")


@dataclass(frozen=True, slots=True)
class Exit:
    """An exit after `layers` layers. `acceptance`: 0..1; `speedup`: expected at the best draft length, `length`."""

    layers: int
    acceptance: float
    speedup: float
    length: int


def exits_of(folder: Path, threads: int | None = None) -> list[Exit]:
    """All exits of the model in `folder`, ordered by layer.

    Raises CapabilityError without torch or if the model's final norm is not known, ConfigError if the folder does not
    exist, ModelFileError if transformers cannot load it.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"early-exit:auto needs a local model folder, {folder} is not one: give a number instead")
    with in_transformers(folder, threads) as (torch, transformers, model):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        head, norm = model.get_output_embeddings(), _final_norm(model, folder)
        agreed: list[list[float]] = []
        for prompt in PROMPTS:
            ids = torch.tensor([_prompt_ids(tokenizer, prompt.text)])
            text = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
            states = model(text[:, :-1], output_hidden_states=True).hidden_states
            start = ids.shape[1] - 1
            chosen = [head(norm(state[:, start:])).argmax(-1) for state in states[1:-1]]
            wanted = text[0, start + 1 :]
            agreed.extend((torch.stack([one[0] for one in chosen]) == wanted).T.tolist())
        shares = [sum(column) / len(agreed) for column in zip(*agreed, strict=True)]
        in_head, embedded = head.weight.numel(), model.get_input_embeddings().weight.numel()
        per_layer = (sum(p.numel() for p in _body(model).parameters()) - embedded) / (len(shares) + 1)
    whole = (len(shares) + 1) * per_layer + in_head
    return [_valued(n, share, (n * per_layer + in_head) / whole) for n, share in enumerate(shares, start=1)]


def best_exit(exits: Sequence[Exit]) -> Exit:
    """The exit with the highest expected speedup; the shortest of equal ones."""
    return max(exits, key=lambda found: (round(found.speedup, 3), -found.layers))


def _valued(layers: int, acceptance: float, token_cost: float) -> Exit:
    pass_cost = [0.0, *(1.0 + ROW_COST * row for row in range(LONGEST + 1))]
    speedups = {k: expected_speedup(acceptance, k, pass_cost, token_cost) for k in range(1, LONGEST + 1)}
    length = max(speedups, key=lambda k: speedups[k])
    return Exit(layers, acceptance, speedups[length], length)


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The text as a user's turn if the model has a chat template, else as it is."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if has_template:
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=not has_template)["input_ids"])


def _body(model: Any) -> Any:
    return getattr(model, model.base_model_prefix)


def _final_norm(model: Any, folder: Path) -> Any:
    norm = next((getattr(_body(model), name) for name in FINAL_NORMS if hasattr(_body(model), name)), None)
    if norm is None:
        raise CapabilityError(f"{folder} has no final norm under a known name: give --derive early-exit:LAYERS")
    return norm
