"""When the model is in memory: loaded again once a request needs it, unloaded when none has for a while.

One thread loads and unloads, so that both never happen at once. Requests count as users from before they wait until
their answer has ended; nothing is unloaded under them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic

from edgespec.server.http_errors import HttpError

logger = logging.getLogger("edgespec")
_JOIN_S = 30.0
_LONGEST_WAIT_S = 3600.0  # of a lock, which takes no infinite times


class Residence:
    """`load`: loads the model and calls `has_loaded`, first of all by its owner; `unload`: frees it.

    `idle_s`: seconds without a request after which it is unloaded, None for never; a client may choose others for as
    long as the model then stays loaded.
    """

    def __init__(self, load: Callable[[], None], unload: Callable[[], None], idle_s: float | None) -> None:
        self._load, self._unload = load, unload
        self._usual_s = self._idle_s = math.inf if idle_s is None else idle_s
        self._changed = threading.Condition()
        self._num_users = 0
        self._unused_since_s = 0.0
        self._awaited: Future[None] | None = None  # of the users that wait until it is loaded
        self._is_loaded = self._is_stopping = False
        self.is_loading = True  # its owner does, the first time
        self._thread = threading.Thread(target=self._run, name="edgespec-residence", daemon=True)
        self._thread.start()

    @property
    def left_s(self) -> float:
        """Seconds until the model is unloaded if no request comes; infinite for never."""
        used_s = 0.0 if self._num_users else monotonic() - self._unused_since_s
        return max(self._idle_s - used_s, 0.0)

    async def enter(self) -> None:
        """Be a user from now on, and wait until the model is loaded. Raises HttpError 503 where that fails."""
        with self._changed:
            if self._is_stopping:
                raise _stopping()
            self._num_users += 1
            if self._is_loaded:
                return
            if self._awaited is None:
                self._awaited = Future()
                self._awaited.set_running_or_notify_cancel()  # one of its waiters cannot cancel it for all
                self._changed.notify()
            awaited = self._awaited
        try:
            await asyncio.wrap_future(awaited)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Be no user any more."""
        with self._changed:
            self._num_users -= 1
            self._unused_since_s = monotonic()
            self._changed.notify()

    def keep_for(self, idle_s: float) -> None:
        """Unload the model after `idle_s` without a request, infinite for never, until it is loaded the next time."""
        with self._changed:
            self._idle_s = idle_s
            self._changed.notify()

    def has_loaded(self) -> None:
        """The model answers from now on."""
        with self._changed:
            self._is_loaded, self.is_loading = True, False
            self._idle_s, self._unused_since_s = self._usual_s, monotonic()
            self._answer(None)
            self._changed.notify()

    def stop(self) -> None:
        """Load and unload nothing from now on, and refuse whoever waits."""
        with self._changed:
            self._is_stopping = True
            self._answer(_stopping())
            self._changed.notify()

    def close(self) -> None:
        """`stop`, and wait for what is being unloaded. A load cannot be interrupted: its model is freed after it."""
        self.stop()
        if not self.is_loading:
            self._thread.join(_JOIN_S)

    def _answer(self, failure: Exception | None) -> None:
        awaited, self._awaited = self._awaited, None
        if awaited is None:
            return
        if failure is None:
            awaited.set_result(None)
        else:
            awaited.set_exception(failure)

    def _run(self) -> None:
        while (step := self._next_step()) is not None:
            step()

    def _next_step(self) -> Callable[[], None] | None:
        """Wait until there is something to do; None when the server stops."""
        with self._changed:
            while not self._is_stopping:
                if self._awaited is not None and not self._is_loaded and not self.is_loading:
                    self.is_loading = True
                    return self._load_again
                is_unused = self._is_loaded and not self._num_users
                if is_unused and self.left_s <= 0:
                    self._is_loaded = False  # who comes from now on waits until it is loaded again
                    return self._unload_now
                self._changed.wait(min(self.left_s, _LONGEST_WAIT_S) if is_unused else None)
        return None

    def _load_again(self) -> None:
        began_s, failure = monotonic(), None
        try:
            self._load()
            logger.info("the model is loaded again, which took %.1f s", monotonic() - began_s)
        except BaseException as exc:  # whatever it is, who waits must learn of it and the thread must go on
            logger.warning("the model cannot be loaded again: %s", exc)
            failure = HttpError(503, "the model cannot be loaded again: the server's log says why", code="load_failed")
        with self._changed:
            self.is_loading = False
            self._answer(failure)
        if self._is_stopping and failure is None:
            self._unload_now()

    def _unload_now(self) -> None:
        try:
            self._unload()
            logger.info("the model is unloaded: the next request loads it again")
        except Exception as exc:  # as above
            logger.warning("unloading the model failed: %s: %s", type(exc).__name__, exc)


def _stopping() -> HttpError:
    return HttpError(503, "the server is stopping", code="stopping")
