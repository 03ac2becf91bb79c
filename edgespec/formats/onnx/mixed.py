"""Two forms in one graph: whole numbers for most matrices, groups of 8 bits for those that lose too much by it.

w8a8 has one scale for a row of inputs. Where single inputs stand out in every row, as those of the last product of a
feed-forward layer do, the others get few codes; groups of 64 have a scale each. Their kernel reads the weights and
scales anew for each row of a pass, so each matrix in groups makes wide passes dearer, and single tokens cheaper.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edgespec.formats.onnx.forms import HEAD, Form

GROUPABLE = ("down_proj", "o_proj", "gate_proj", "up_proj", "q_proj", "lm_head")


class Mixed:
    """`whole` for all matrices but those of the kinds `grouped`, such as down_proj or lm_head, which `blocks` writes.

    A tied embedding is looked up in the head's own table where that is in groups.
    """

    def __init__(self, whole: Form, blocks: Form, grouped: Collection[str]) -> None:
        self._whole, self._blocks, self._grouped = whole, blocks, grouped
        self.vector = whole.vector

    def embed(self, output: str) -> None:
        self._form_of(HEAD).embed(output)

    def product(self, name: str, value: str, sources: Sequence[str], output: str) -> None:
        self._form_of(sources[0]).product(name, value, sources, output)

    def _form_of(self, matrix: str) -> Form:
        return self._blocks if matrix.removesuffix(".weight").rpartition(".")[2] in self._grouped else self._whole
