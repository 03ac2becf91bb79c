"""Where the tensors of a checkpoint belong in the table of its architecture. The unknown is refused."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.errors import ModelFileError
from edgespec.formats.architectures import Architecture, Sizes, Tensor, canonical_name
from edgespec.formats.checkpoint import BUFFERS, Checkpoint

HEAD = "lm_head.weight"
_BIASES = {"mlp.": "mlp_bias", "self_attn.": "attention_bias"}  # what config.json calls those that are optional


def placed(checkpoint: Checkpoint, found: Architecture, sizes: Sizes) -> dict[str, tuple[str, Tensor]]:
    """(name in the checkpoint, row of the table) by the name that transformers gives a tensor, in the file's order.

    Raises ModelFileError for a tensor that is missing, unknown, or has another shape than config.json implies.
    """
    needed, done = dict(_places(checkpoint, found, sizes.layers)), dict[str, tuple[str, Tensor]]()
    for source in checkpoint.names():
        if source.endswith(BUFFERS) or (source == HEAD and found.is_tied(checkpoint.config)):
            continue
        name = canonical_name(found, source)
        where = f"{checkpoint.tensors[source].file}: tensor {source}"
        if name not in needed:
            raise ModelFileError(f"{where} has no place in a {found.name} model of {sizes.layers} layers")
        shape, wanted = checkpoint.shape(source), sizes.shape(needed[name].shape)
        if shape != wanted:
            raise ModelFileError(f"{where} has the shape {shape}, config.json implies {wanted}")
        checkpoint.check_type(source)
        done[name] = source, needed.pop(name)
    if needed:
        raise ModelFileError(f"{checkpoint.folder} lacks {len(needed)} tensors, the first is {next(iter(needed))}")
    return done


def _places(checkpoint: Checkpoint, found: Architecture, layers: int) -> Iterator[tuple[str, Tensor]]:
    """(name, row of the table) of every tensor that there must be."""
    for name, tensor in found.outer.items():
        if name != HEAD or not found.is_tied(checkpoint.config):
            yield name, tensor
    flags = {rest: flag for rest in found.layer for begin, flag in _BIASES.items() if rest.startswith(begin)}
    for layer in range(layers):
        for rest, tensor in found.layer.items():
            if not tensor.is_optional or checkpoint.config.get(flags[rest]):
                yield f"{found.layer_prefix}{layer}.{rest}", tensor
