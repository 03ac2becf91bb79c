"""The weights of a graph, in it or in a file beside it: read one by one, written one after another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError

ALIGNMENT = 4096  # so that ONNX Runtime can map a tensor
INLINE_BYTES = 1024  # what is smaller stays in the graph


def external_entry(tensor: Any) -> dict[str, str]:
    """Where a weight outside the graph lies: location, offset, length; empty for one inside."""
    return {item.key: item.value for item in tensor.external_data} if tensor.data_location == 1 else {}


def read_tensor(tensor: Any, folder: Path, *, mapped: bool = False) -> NDArray[Any]:
    """The values of a weight, in the graph or in a file of `folder`; `mapped`: read-only. Raises ModelFileError.

    onnx's own reader refuses files with several names, which caches of downloads are full of.
    """
    from onnx import helper, numpy_helper

    entry = external_entry(tensor)
    try:
        if not entry:
            found: NDArray[Any] = numpy_helper.to_array(tensor)
            return found
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
        shape = tuple(tensor.dims)
        file, offset = folder / entry["location"], int(entry.get("offset", 0))
        if mapped:
            return np.memmap(file, kind, "r", offset, (math.prod(shape),)).reshape(shape)
        return np.fromfile(file, kind, math.prod(shape), offset=offset).reshape(shape)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelFileError(f"the weights {tensor.name!r} in {folder} cannot be read: {exc}. Export it again") from exc


class DataWriter:
    """Appends tensors to `file`, which the graph knows as `location`."""

    def __init__(self, file: IO[bytes], location: str) -> None:
        self._file, self._location = file, location

    def add(self, name: str, values: NDArray[Any]) -> Any:
        """The description (TensorProto) of `values` [any shape]; small ones are in it, the others in the file."""
        from onnx import TensorProto, helper, numpy_helper

        if values.nbytes < INLINE_BYTES:
            return numpy_helper.from_array(values, name)
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=values.shape)
        self.place(tensor, np.ascontiguousarray(values).data.cast("B"))
        return tensor

    def place(self, tensor: Any, content: Any) -> None:
        """Write bytes and let `tensor` point at them."""
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        del tensor.external_data[:]
        tensor.data_location = 1  # external
        length = len(content)
        places = {"location": self._location, "offset": str(self._file.tell()), "length": str(length)}
        for key, value in places.items():
            tensor.external_data.add(key=key, value=value)
        self._file.write(content)
