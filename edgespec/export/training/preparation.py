"""Checks the request, the target's folder and the data of a training before torch is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgespec.errors import ConfigError
from edgespec.export.training.documents import Document, read_documents, split_held_out
from edgespec.export.training.journal import Journal
from edgespec.export.training.request import DistillRequest
from edgespec.export.training.students import StudentShape, student_shape
from edgespec.export.training.target import TargetFacts, read_target


@dataclass(frozen=True)
class Preparation:
    """A checked request. Without data both lists of documents are empty."""

    request: DistillRequest
    facts: TargetFacts
    shape: StudentShape
    documents: list[Document]
    held_out: list[Document]

    def open_journal(self, *, restart: bool = False) -> Journal:
        """Open OUTPUT.partial, new or of an interrupted run. Raises the errors of `Journal`."""
        identity = self.request.identity(self.facts.fingerprint())
        return Journal(self.request.output, identity, restart=restart)


Shaper = Callable[[Any, TargetFacts], StudentShape]


def prepare(request: DistillRequest, target_name: str = "", shaper: Shaper = student_shape) -> Preparation:
    """Check a request against its target and its data; `shaper` computes the student's sizes.

    Raises ConfigError, ModelNotFound, ModelFileError or CapabilityError for the first problem.
    """
    request.check()
    facts = read_target(request.target, target_name)
    shape = shaper(request, facts)
    if request.window > facts.size("max_position_embeddings"):
        raise ConfigError(
            f"--window {request.window} is longer than the target's context of {facts.size('max_position_embeddings')}"
        )
    if not request.data:
        if facts.begin_id is None:
            raise ConfigError(f"{facts.folder} has no begin-of-text token to generate from: give texts with --data")
        return Preparation(request, facts, shape, [], [])
    documents, held_out = split_held_out(read_documents(request.data), request.held_out_prompts)
    if facts.chat_template is None and any(document.messages for document in (*documents, *held_out)):
        raise ConfigError(
            f'{facts.folder} has no chat template to render "messages" with: give records with "text", or add '
            "chat_template.jinja to the folder"
        )
    return Preparation(request, facts, shape, documents, held_out)
