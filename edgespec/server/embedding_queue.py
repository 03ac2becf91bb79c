"""Runs the embeddings that clients ask for, one request at a time. Between passes, answers have their turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import EdgespecError
from edgespec.runtime import Model
from edgespec.server.daemon_threads import DaemonThreads
from edgespec.server.http_errors import HttpError
from edgespec.server.metrics import Metrics
from edgespec.types import TokenIds


class EmbeddingQueue:
    """First come, first served. `max_queued`: requests that may wait while one runs."""

    def __init__(self, model: Model, max_queued: int, metrics: Metrics) -> None:
        self._model, self._max_queued, self._metrics = model, max_queued, metrics
        self._thread = DaemonThreads("edgespec-embed")
        self._num_open = 0  # changed in the event loop only
        self._is_stopping = threading.Event()

    async def embed(self, texts: Sequence[TokenIds]) -> NDArray[np.float32]:
        """Embeddings [n, size] of encoded texts. Cancelling the task ends it after at most a few passes.

        Raises HttpError 429 if too many wait, 503 while the server stops, and the errors of `Model.embed`.
        """
        if self._is_stopping.is_set():
            raise stopping()
        if self._num_open > self._max_queued:
            self._metrics.refused += 1
            raise HttpError(429, f"{self._num_open} requests for embeddings are waiting, the limit: try again later",
                            code="queue_full")  # fmt: skip
        has_left = threading.Event()

        def is_wanted() -> bool:
            return not (has_left.is_set() or self._is_stopping.is_set())

        self._num_open += 1
        work = asyncio.wrap_future(self._thread.submit(lambda: self._model.embedder.embed(texts, is_wanted)))
        work.add_done_callback(self._closed)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            has_left.set()
            work.cancel()  # where it has not begun
            raise
        except EdgespecError:  # at a stop: cancelled between passes, or the model was closed under it
            if self._is_stopping.is_set():
                raise stopping() from None
            raise

    def _closed(self, work: asyncio.Future[NDArray[np.float32]]) -> None:
        self._num_open -= 1
        if not work.cancelled():
            work.exception()  # of a request whose client has left, nobody asks for it

    def stop(self) -> None:
        """Refuse new requests, and end what runs soon."""
        self._is_stopping.set()

    def close(self) -> None:
        """`stop`; the thread ends by itself."""
        self.stop()
        self._thread.close()


def stopping() -> HttpError:
    """The error of requests that come, or still wait, when the server ends."""
    return HttpError(503, "the server is stopping", code="stopping")
