"""From settings to a loaded model and the options of its generations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.chat.reasoning import Reasoning, before_structure
from edgespec.chat.template import answer_prefix, read_template
from edgespec.cli.answer import AnswerPrinter
from edgespec.cli.options import sampling_of
from edgespec.cli.shell import continue_command
from edgespec.cli.terminal import (
    configuration_line,
    detail,
    length_note,
    note,
    reply,
    short_configuration,
    stats_lines,
    verbosity,
    waiting,
)
from edgespec.config.options import REMEMBERING, GenerateOptions, LoadOptions, Sampling, SessionOptions
from edgespec.config.sources import Settings
from edgespec.config.values import RANDOM_SEED, NumSequences
from edgespec.drafters.spec import learnt_texts
from edgespec.errors import ConfigError, PromptError
from edgespec.loading.opening import has_chat_template
from edgespec.loading.requirements import resolve_pair
from edgespec.platform.files import exists
from edgespec.reports import Stats
from edgespec.runtime import Model, load

HERE = "this chat"  # where a setting comes from that was changed after loading
# Settings of `load` that a generation can override as well.
CHANGEABLE_LATER = ("drafter", "draft_length", "verify")


@dataclass(slots=True)
class Session:
    """A loaded model and the settings of its answers, which may be replaced between two of them."""

    model: Model
    settings: Settings
    seen_notes: set[str] = field(default_factory=set)  # notes of answers that were shown

    @property
    def sampling(self) -> Sampling:
        return sampling_of(self.settings)

    @property
    def options(self) -> GenerateOptions:
        later = {name: self.settings.values[name] for name in _changed_later(self.settings)}
        return GenerateOptions(**self.settings.part("generate"), **later)

    @property
    def shown(self) -> SessionOptions:
        return SessionOptions(**self.settings.part("session"))

    @property
    def seed(self) -> int:
        """The seed of the next answer; `open_session` chose one where none was given."""
        return int(self.settings.values["seed"])

    def use(self, settings: Settings) -> None:
        """Other settings from the next answer on.

        Raises SamplingError, ConfigError for a value out of range, a bad schema or reasoning that has no switch,
        CapabilityError for a drafter that this model does not have.
        """
        changed = replace(self, settings=settings)
        _, options, shown = changed.sampling, changed.options, changed.shown
        if shown.thinking is not None:
            self.require_switch()
        for check in (self.model.check_drafter, self.model.check_structure):  # here, and not at the next message
            check(options)
        self.settings = settings

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation. Raises as `encode_chat`."""
        chosen = self.shown.thinking
        prompt_ids = self.model.encode_chat(
            messages, template_arguments=None if chosen is None else {"enable_thinking": chosen}
        )
        return before_structure(self.model.target.vocabulary, prompt_ids, self.options, answer_prefix(messages))

    @property
    def splits_reasoning(self) -> bool:
        """Whether reasoning is told apart from the answer."""
        return self.shown.chat_template and self.shown.reasoning_format != "none"

    def printer(self, prompt_ids: Sequence[int], prefix: str = "") -> AnswerPrinter:
        """What prints the answer to a prompt, which has begun with `prefix`, in the way that the settings ask for."""
        reasoning = None
        if self.splits_reasoning:
            vocabulary = self.model.target.vocabulary
            found = Reasoning.of(vocabulary, prompt_ids, prefix)
            reasoning = None if found is None else (found, vocabulary)
        return AnswerPrinter(raw=self.shown.raw, reasoning=reasoning)

    def require_switch(self) -> None:
        """Raises ConfigError where the chat template cannot be told whether to reason."""
        if "enable_thinking" not in (self.model.target.vocabulary.chat_template or ""):
            raise ConfigError(
                f"the chat template of {self.model.pair.name} has no switch for reasoning (enable_thinking): leave "
                "out --thinking and --no-thinking"
            )

    def show_notes(self, stats: Stats) -> None:
        """What went wrong in an answer, such as a drafter that failed; each note once."""
        for line in stats.notes:
            if line not in self.seen_notes:
                self.seen_notes.add(line)
                note(f"note: {line}")

    def show_end(self, stats: Stats, *, in_chat: bool = False, says_cut: bool = True) -> None:
        """What is said after an answer: what went wrong, whether it was cut, and the counters if wanted."""
        self.show_notes(stats)
        if says_cut and (cut := length_note(stats, self.options, in_chat=in_chat)) is not None:
            note(cut)
        if self.shown.stats or verbosity() == "verbose":
            for line in (*stats_lines(stats), f"seed {self.seed}"):
                reply(line)


def completed(settings: Settings, model: Model, seed: int | None) -> Settings:
    """`settings` with what the model recommends, and with a `seed` where none is given."""
    settings = settings.below(model.pair.recommended, f"recommended for {model.pair.name}")
    return settings.below({"seed": seed}, "chosen at random")


def _changed_later(settings: Settings) -> list[str]:
    return [name for name in CHANGEABLE_LATER if settings.sources.get(name) == HERE]


def open_session(settings: Settings, *, remembers: bool = False, parallel: NumSequences = 1) -> Session:
    """Load what the settings name. Every option is checked before any file is opened.

    `parallel`: answers at once. `remembers`: a command whose answers may be stored on disk and drafted from, if the
    settings ask for it; the others never do.
    Raises ConfigError, SamplingError, and whatever `edgespec.load` raises.
    """
    if not remembers:
        settings = settings.without(REMEMBERING)
    seed = sampling_of(settings).seed
    if settings.values.get("seed") == RANDOM_SEED:  # one for all answers, which is told
        settings = settings.without(("seed",))
    GenerateOptions(**settings.part("generate"))
    shown = SessionOptions(**settings.part("session"))
    model = _load(settings.without(_changed_later(settings)), parallel)
    session = Session(model, completed(settings, model, seed))
    if shown.thinking is not None:
        try:
            session.require_switch()
        except ConfigError:
            model.close()
            raise
    return session


def require_chat_template(settings: Settings, *, is_chat: bool = False) -> None:
    """Check, before anything is loaded, that the model has the chat template that is wanted.

    Raises PromptError for a base model, ConfigError for a chat without a template, and as `resolve_pair`.
    """
    if not settings.values.get("chat_template", True):
        if is_chat:
            raise ConfigError(
                f"a chat needs the chat template, which {settings.sources['chat_template']} turns off; without one "
                "use edgespec run --no-chat-template"
            )
        return
    options = LoadOptions(**settings.part("load"))
    if read_template(options.chat_template_file) is not None:
        return
    pair = resolve_pair(options)
    if not has_chat_template(pair.files["target"]):
        command = continue_command(options.model)
        raise PromptError(
            f"model {pair.name!r} has no chat template, as usual for base models. To continue text: {command}; to "
            "chat, give a template with --chat-template-file"
        )


def _load(settings: Settings, parallel: NumSequences) -> Model:
    options = settings.part("load") | {"parallel": parallel}
    with waiting(f"loading {options.get('model', 'demo')}"):
        return load(**options)


def show_memory_note(model: Model) -> None:
    """What was given up for a budget of memory, if anything was."""
    if model.memory is not None and model.memory.note:
        note(f"note: {model.memory.note}")


def show_beginning(session: Session) -> None:
    """What a person should know before the first answer, on stderr: the model's banner and one line; more with -v."""
    model = session.model
    if model.pair.banner:
        note(model.pair.banner)
    if model.options.learn and not exists(learnt_texts(model.target.vocabulary).path):
        note("Learning from answers: on (edgespec corpus rm --learnt deletes it)")
    if verbosity() == "verbose":
        _show_all(session)
        return
    show_memory_note(model)
    note(short_configuration(model, session.options))


def show_configuration(session: Session) -> None:
    """The banner and the whole configuration, on stderr, for commands that measure; notes with --verbose."""
    if session.model.pair.banner:
        detail(session.model.pair.banner)
    _show_all(session)


def _show_all(session: Session) -> None:
    note(configuration_line(session.model, session.sampling, session.options))
    for line in session.model.notes:
        detail(line)
