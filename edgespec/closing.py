"""What has to be closed: by a `with` block, or because the step that was to take it over failed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class Closing(ABC):
    """An object that has to be closed; a `with` block closes it at its end."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def closed_on_failure(owned: Closing) -> Iterator[None]:
    """If the block ends with any exception, KeyboardInterrupt included, close `owned`."""
    try:
        yield
    except BaseException:
        owned.close()
        raise
