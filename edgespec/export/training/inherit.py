"""Loads a target and creates the student, initialised from it."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.export.training.students import StudentShape
from edgespec.export.training.target import TargetFacts

EMBEDDING_STD = 0.05  # of a new student's embedding
LAYER_STD = 0.02


def pick_device(wanted: str) -> torch.device:
    """The torch device. `auto`: CUDA, else Apple's GPU, else the CPU. Raises CapabilityError if not available."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        wanted = next(name for name, there in available.items() if there)
    if not available[wanted]:
        raise CapabilityError(f"--device {wanted}: torch finds no such device; --device cpu works everywhere")
    return torch.device(wanted)


def load_target(facts: TargetFacts, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the target, with frozen weights. Raises ModelFileError if transformers cannot load it."""
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(facts.folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as exc:
        raise ModelFileError(f"{facts.folder} cannot be loaded by transformers: {exc}") from exc
    return model.to(device).eval().requires_grad_(False)


def new_student(shape: StudentShape, facts: TargetFacts, target: Any, seed: int) -> Any:
    """A student in float32 on the target's device, initialised from `target`; determined by the seed."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**shape.config(facts))
    student = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        if shape.layers_of_target:
            _take_layers(student, target, shape.layers_of_target)
        else:
            _initialise(student, shape)
            embedding = target.get_input_embeddings().weight
            student.get_input_embeddings().weight.copy_(principal_embedding(embedding, shape.hidden))
    return student.to(target.device)


def principal_embedding(embedding: Tensor, width: int) -> Tensor:
    """Project `embedding` [vocab, hidden] on its `width` principal directions: [vocab, width], float32 on the CPU.

    The student then keeps the target's similarities of tokens; the embedding, tied to the head, is most of a small
    student. The mean is removed, since it adds the same to every logit. The result is scaled down, because a large tied
    head would initially repeat its input. Directions come from the covariance [hidden, hidden]: an SVD of 150,000 rows
    would take minutes. Columns beyond the target's width are noise.
    """
    centred = embedding.detach().cpu().float()
    centred = centred - centred.mean(dim=0)
    _, directions = torch.linalg.eigh(centred.double().T @ centred.double())
    projected = centred @ directions.flip(1)[:, :width].float()
    projected *= EMBEDDING_STD / projected.std().clamp(min=1e-12)
    beyond = torch.randn(len(projected), max(0, width - projected.shape[1])) * (EMBEDDING_STD / 10)
    return torch.cat((projected, beyond), dim=1)


def _initialise(student: Any, shape: StudentShape) -> None:
    """Small normal weights; smaller by depth for matrices that write to the residual stream."""
    for name, weight in student.named_parameters():
        if weight.ndim == 2:
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            weight.normal_(std=LAYER_STD / math.sqrt(2 * shape.layers) if is_output else LAYER_STD)


def _take_layers(student: Any, target: Any, layers: tuple[int, ...]) -> None:
    """Copy embedding, head, final norm and these layers of the target."""
    source = target.state_dict()
    renamed = {}
    for name in student.state_dict():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            parts[2] = str(layers[int(parts[2])])
        renamed[name] = source[".".join(parts)].float()
    student.load_state_dict(renamed)
