"""The tensors of a GGUF by their Hugging Face names: the bytes of rows as they are in the file, vectors as floats."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.formats.architectures.rows import PERMUTE_K, PERMUTE_Q, Tensor
from edgespec.formats.gguf.header import TensorInfo
from edgespec.formats.gguf.model import GgufModel
from edgespec.formats.onnx.forms import EMBEDDING, HEAD


class GgufTensors:
    """The tensors of an opened model. The output projection is `lm_head.weight`, also where it is the embedding."""

    def __init__(self, model: GgufModel) -> None:
        self._tensors, self._config = model.tensors, model.config
        self._path, self._start, self.is_tied = model.path, model.header.data_start, model.is_tied
        self.file_type = model.header.metadata.get("general.file_type")  # llama.cpp's number, if the file has one

    def kind(self, name: str) -> str:
        """The type of a matrix, such as Q4_K."""
        return self._matrix(name)[0].kind

    def shape(self, name: str) -> tuple[int, int]:
        """(outputs, inputs) of a matrix."""
        inputs, outputs = self._matrix(name)[0].shape
        return outputs, inputs

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's weights or a bias [width]. Raises ModelFileError for infinity, NaN and quantised vectors."""
        tensor, row = self._tensors[name]
        found = self._floats(self._raw(tensor, 0, rows_of(tensor)).reshape(1, -1), tensor)[0]
        order = self._order(tensor.shape[-1], row)
        return self._checked(found if order is None else found[order], tensor)

    def spans(self, name: str, bytes_at_once: int, multiple: int) -> Iterator[tuple[int, int]]:
        """Rows (from, to) of a matrix that are read at once; their number is a `multiple`, but at the end.

        One span where the file has the rows in another order than Hugging Face.
        """
        tensor, row = self._matrix(name)
        outputs = tensor.shape[1]
        step = max(bytes_at_once * outputs // tensor.num_bytes // multiple, 1) * multiple
        step = outputs if self._order(outputs, row) is not None else step
        return ((start, min(start + step, outputs)) for start in range(0, outputs, step))

    def some_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes [rows, bytes] of the rows of one of `spans`, in Hugging Face's order.

        They are read, not mapped, so that a file that is cut meanwhile ends in ModelFileError and not in a signal.
        """
        tensor, row = self._matrix(name)
        found, order = self._raw(tensor, start, stop), self._order(stop - start, row)
        return found if order is None else found[order]

    def wrong_numbers(self, name: str) -> ModelFileError:
        """The error of a matrix that holds infinity or NaN."""
        return self._wrong_numbers(self._matrix(name)[0])

    def _wrong_numbers(self, tensor: TensorInfo) -> ModelFileError:
        return ModelFileError(f"{self._path}: the tensor {tensor.name} holds infinity or NaN. Download it again")

    def _matrix(self, name: str) -> tuple[TensorInfo, Tensor]:
        return self._tensors[EMBEDDING if name == HEAD and self.is_tied else name]

    def _raw(self, tensor: TensorInfo, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes [rows, bytes] of some rows."""
        size = tensor.num_bytes // rows_of(tensor)
        place = self._start + tensor.offset + start * size
        found = np.fromfile(self._path, np.uint8, (stop - start) * size, offset=place)
        if found.size < (stop - start) * size:
            raise ModelFileError(f"{self._path} became shorter while {tensor.name} was read. Download it again")
        return found.reshape(stop - start, size)

    def _order(self, count: int, row: Tensor) -> NDArray[np.intp] | None:
        """Where the rows of queries and keys lie: llama.cpp keeps rotary pairs side by side, Hugging Face in halves."""
        if row.change not in (PERMUTE_Q, PERMUTE_K):
            return None
        heads = self._config.num_heads if row.change == PERMUTE_Q else self._config.num_kv_heads
        found: NDArray[np.intp] = np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return found

    def _floats(self, raw: NDArray[np.uint8], tensor: TensorInfo) -> NDArray[np.float32]:
        """Floats [rows, columns] of the bytes [rows, bytes] of a tensor that is not quantised."""
        if tensor.kind == "BF16":
            widened: NDArray[np.float32] = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            return widened
        kinds = {"F32": np.float32, "F16": np.float16}
        if tensor.kind not in kinds:
            raise ModelFileError(
                f"{self._path} holds {tensor.name} as {tensor.kind}; a norm or bias has to be F32, F16 or BF16. "
                "Download a file that was quantised by llama.cpp"
            )
        return raw.view(kinds[tensor.kind]).astype(np.float32, copy=False)

    def _checked(self, values: NDArray[np.float32], tensor: TensorInfo) -> NDArray[np.float32]:
        if not np.isfinite(values).all():
            raise self._wrong_numbers(tensor)
        return values


def rows_of(tensor: TensorInfo) -> int:
    """Number of rows; a vector is one."""
    return tensor.shape[-1] if len(tensor.shape) > 1 else 1
