"""One model of `edgespec serve`: its settings, and how it comes into memory beside the server's other models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import click

from edgespec.chat.template import read_template
from edgespec.cli.options import sampling_of
from edgespec.cli.session import open_session, show_beginning
from edgespec.config.options import GenerateOptions, LoadOptions
from edgespec.config.sources import Settings
from edgespec.config.values import RANDOM_SEED
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import ModelPair
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import chosen_context, fit
from edgespec.memory.plan import Room, planned

if TYPE_CHECKING:
    from edgespec.config.options import Sampling
    from edgespec.runtime import Model
    from edgespec.server.residence import Loading
    from edgespec.server.service import Described, Service


@dataclass(slots=True)
class SharedMemory:
    """What the models of a server that has room for several may take together. `room`: before any was loaded."""

    room: Room
    services: Sequence[Service] = ()

    @property
    def taken(self) -> tuple[int, int]:
        """(own, mapped) bytes of the loaded models, by their plans, and of own ones what they may keep beyond them."""
        own = mapped = 0
        for service in self.services:
            report = None if (loaded := service.loaded) is None else loaded.model.memory
            if report is not None:
                plan = report.plan
                used = plan.working_bytes - plan.process.own - plan.process.mapped
                own += plan.own_bytes - plan.process.own + report.parked_bytes
                mapped += max(used - (plan.own_bytes - plan.process.own), 0)
        return own, mapped

    @property
    def left_bytes(self) -> int | None:
        """What the budget leaves for one more; None without a budget."""
        return None if self.room.budget_bytes is None else self.room.budget_bytes - sum(self.taken)

    def fits(self, options: LoadOptions, pair: ModelPair) -> bool:
        """Whether there is memory for one more, with nothing given up for it."""
        left = self.left_bytes
        if options.context_length == "auto" or (left is not None and left < 1):  # auto takes all there is
            return False
        with keeping_headers():
            try:
                found = fit(replace(options, memory=left), pair)
            except CapabilityError:
                return False
        more = self.taken[1] if left is None else 0  # other models' weights seem to be free memory to the system
        fits = found.verdict.needed_bytes + more <= found.verdict.free_bytes
        return found.verdict.fit == "fits" and not found.given_up and fits

    def share(self, settings: Settings) -> Settings:
        """`settings` with what is left in place of the whole budget."""
        left = self.left_bytes
        if left is None:
            return settings
        return Settings({**settings.values, "memory": max(left, 1)}, settings.sources)

    def keep(self, model: Model) -> None:
        """Hold `model` to the budget of all, of which it was told its share only."""
        if model.memory is not None and self.room.budget_bytes is not None:
            model.memory.watch.limit_bytes = self.room.most_in_budget(model.memory.plan)


@dataclass(slots=True)
class Served:
    """A model's `settings`; `parallel`: answers at once; `memory`: None where it is loaded alone."""

    settings: Settings
    pair: ModelPair
    service: Service
    parallel: int
    memory: SharedMemory | None = None
    context: click.Context = field(default_factory=click.get_current_context)
    has_begun: bool = False

    @property
    def options(self) -> LoadOptions:
        return LoadOptions(**self.settings.part("load"))

    @property
    def loading(self) -> Loading:
        """How the service gets its model."""
        from edgespec.server.residence import Loading

        alone = self.service.places is None  # no other model makes way for it
        return Loading(self.load) if alone else Loading(self.load, self.check, self.fits)

    def load(self) -> None:
        """Give the service its model."""
        with self.context.scope(cleanup=False):  # click knows its context by thread
            settings = self.settings if self.memory is None else self.memory.share(self.settings)
            session = open_session(settings, remembers=True, parallel=self.parallel)
            if self.memory is not None:
                self.memory.keep(session.model)
            session.sampling = self._seeded(session.sampling)
            self.service.use(session.model, session.sampling, session.options, session.shown.reasoning_format)
            if not self.has_begun:
                show_beginning(session)
            self.has_begun = True

    def check(self) -> None:
        """Raises what a load would raise of files that are missing, damaged or lack something."""
        options = self.options
        with self.context.scope(cleanup=False), keeping_headers():
            pair = resolve_pair(options)
            planned(chosen_context(options, pair, Room.now(options.memory)), pair)

    def fits(self) -> bool:
        """Whether there is memory for it beside the models that are loaded."""
        return self.memory is None or self.memory.fits(replace(self.options, parallel=self.parallel), self.pair)

    def at_rest(self) -> Described:
        """What is told of it before the first request for it. Raises as `check`."""
        from edgespec.server.facts import at_rest

        sampling = self._seeded(
            sampling_of(self.settings.below(self.pair.recommended, f"recommended for {self.pair.name}"))
        )
        most = GenerateOptions(**self.settings.part("generate")).max_tokens
        template = read_template(self.options.chat_template_file)
        return at_rest(self.service.name, self.options, self.pair, sampling, most, template)

    def _seeded(self, sampling: Sampling) -> Sampling:
        """Where nobody gave a seed, another one for each request."""
        is_given = self.settings.values.get("seed", RANDOM_SEED) != RANDOM_SEED
        return sampling if is_given else replace(sampling, seed=None)
