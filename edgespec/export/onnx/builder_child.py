"""Child process that runs onnxruntime-genai's model builder on one local folder, with fixes for known bugs.

`python -m edgespec.export.onnx.builder_child ORDER` where ORDER is JSON: {source, output, precision, provider, cache,
options}. Fixes for bugs of version 0.18 with transformers 5; they do no harm in versions without the bug:
- Mistral: the sliding window is dropped, so results differ beyond the window;
- SmolLM3: the builder fails at the first layer without rotary positions;
- Gemma 3: rotary settings per kind of layer are not supported;
- Gemma: the embedding scale is rounded to two decimals.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

from edgespec.export.onnx.child import follow_parent


def _wrap(owner: type, method: str, around: Callable[..., Any]) -> None:
    """Replace a method by `around(original, self, *arguments)`."""
    original = getattr(owner, method)

    def replacement(self: Any, *arguments: Any, **named: Any) -> Any:
        return around(original, self, *arguments, **named)

    setattr(owner, method, replacement)


def _mistral(original: Callable[..., Any], model: Any, config: Any, *arguments: Any) -> Any:
    if config.model_type == "mistral" and config.sliding_window and not getattr(config, "layer_types", None):
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    return original(model, config, *arguments)


def _gemma(original: Callable[..., Any], model: Any, config: Any, *arguments: Any) -> Any:
    built = original(model, config, *arguments)
    model.embed_attrs["scale"] = math.sqrt(model.hidden_size)
    return built


def _gemma3(original: Callable[..., Any], model: Any, config: Any, *arguments: Any) -> Any:
    rotary = config.rope_parameters
    if isinstance(rotary, dict) and "full_attention" in rotary:
        config.rope_local_base_freq = rotary["sliding_attention"]["rope_theta"]
        config.rope_parameters = rotary["full_attention"]
        config.rope_theta = rotary["full_attention"]["rope_theta"]
    return original(model, config, *arguments)


def _gemma3_caches(_: Callable[..., Any], model: Any) -> None:
    """Global and local rotary tables; context extension applies to the global ones only."""
    model.cos_cache_global_name, model.sin_cache_global_name = "cos_cache_global", "sin_cache_global"
    model.cos_cache_local_name, model.sin_cache_local_name = "cos_cache_local", "sin_cache_local"
    model.make_rotary_embedding_caches(cos_cache_name="cos_cache_global", sin_cache_name="sin_cache_global")
    model.rope_attrs.update(create_caches=True, theta=model.rope_local_theta, rescale_factors=1)
    model.make_rotary_embedding_caches(cos_cache_name="cos_cache_local", sin_cache_name="sin_cache_local")


def _smollm3(original: Callable[..., Any], model: Any, layer: int, *arguments: Any, **named: Any) -> Any:
    has_rotary = model.attention_attrs["rope"]
    model.attention_attrs["rope"] = has_rotary and bool(model.no_rope_layers[layer])
    try:
        return original(model, layer, *arguments, **named)
    finally:
        model.attention_attrs["rope"] = has_rotary


def correct_builder(builders: Any) -> None:
    _wrap(builders.MistralModel, "__init__", _mistral)
    _wrap(builders.GemmaModel, "__init__", _gemma)
    _wrap(builders.Gemma3Model, "__init__", _gemma3)
    _wrap(builders.Gemma3Model, "make_rotary_embedding_multi_cache", _gemma3_caches)
    _wrap(builders.SmolLM3Model, "make_attention", _smollm3)


def main() -> None:
    follow_parent()
    order = json.loads(sys.argv[1])
    from onnxruntime_genai.models import builder

    correct_builder(builder)
    place = (None, order["source"], order["output"], order["precision"], order["provider"], order["cache"])
    options = builder.parse_extra_options(*place, [f"{key}={value}" for key, value in order["options"].items()])
    builder.create_model(*place, **options)


if __name__ == "__main__":
    main()
