"""The models of one server by name: which of them a request is for. One alone gets every request.

What is not known here: which of them are loaded; each `Service` sees to that, and `Places` to how many are.
"""

from __future__ import annotations

from edgespec.server.fields import Fields, parse_object
from edgespec.server.messages_input import asks_for_claude
from edgespec.server.metrics import Metrics
from edgespec.server.options import unknown_model, without_tag
from edgespec.server.service import Limits, Names, Service


class Services:
    """`all`, of which the first is the `default`: it answers requests that name no model. They share limits, the API
    key and, where there are several, places.
    """

    def __init__(self, *services: Service) -> None:
        self.all = services
        self.default = services[0]

    @classmethod
    def of(cls, given: Service | Services) -> Services:
        """`given`, or it alone."""
        return given if isinstance(given, Services) else cls(given)

    @property
    def are_several(self) -> bool:
        """Whether there is a choice."""
        return len(self.all) > 1

    @property
    def names(self) -> Names:
        """What clients may call any of them."""
        first, *others = (name for service in self.all for name in service.names.all)
        return Names(first, tuple(others), self.default.any_model or not self.are_several)

    @property
    def limits(self) -> Limits:
        return self.default.limits

    @property
    def api_key(self) -> str | None:
        return self.default.api_key

    @property
    def metrics(self) -> Metrics:
        """Counters of all of them."""
        return Metrics.sum_of(service.metrics for service in self.all) if self.are_several else self.default.metrics

    def count_request(self, path: str, status: int) -> None:
        """Count one that was answered."""
        self.default.metrics.answered[path, status] += 1

    @property
    def has_loaded(self) -> bool:
        """Whether a model is loaded."""
        return any(service.loaded is not None for service in self.all)

    @property
    def is_loading(self) -> bool:
        """Whether a model is being loaded."""
        return any(service.is_loading for service in self.all)

    def named(self, name: str | None, path: str = "") -> Service:
        """The one that a request to `path` asks for. Raises HttpError 404 where none has that name."""
        if not self.are_several or name is None:
            return self.default
        found = next((service for service in self.all if name in service.names.all), None)
        if found is None and path.startswith("/api/"):
            tagless = ((service, map(without_tag, service.names.all)) for service in self.all)
            found = next((service for service, names in tagless if without_tag(name) in names), None)
        if found is not None:
            return found
        if self.default.any_model or (path.startswith("/v1/messages") and asks_for_claude(name)):
            return self.default
        raise unknown_model(self.default.names)

    def asked_by(self, body: bytes, path: str) -> Service:
        """The one for a request with this `body`. Raises HttpError 400 and 404."""
        if not self.are_several:
            return self.default
        fields = Fields(parse_object(body))
        name = fields.text("model")
        if name is None and path == "/api/show":  # older clients
            name = fields.text("name")
        return self.named(name, path)

    @property
    def num_running(self) -> int:
        """Answers that are being written."""
        return sum(service.loaded.scheduler.num_running for service in self.all if service.loaded is not None)

    def stop(self) -> None:
        """Accept no more requests; the running ones go on."""
        for service in self.all:
            service.stop()

    def end_running(self) -> None:
        """End what runs, and tell its clients why."""
        for service in self.all:
            service.end_running()

    def close(self) -> None:
        """End what runs and free the models. Blocks until that is done, but not for a load."""
        self.stop()
        for service in self.all:
            service.close()
