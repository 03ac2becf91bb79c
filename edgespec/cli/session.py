"""From settings to a loaded model, the options of its generations, and a conversation with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from edgespec.chat.conversation import Conversation, fit_context
from edgespec.chat.reasoning import Reasoning, before_structure
from edgespec.chat.template import answer_prefix, read_template
from edgespec.cli import continue_command
from edgespec.cli.answer import AnswerPrinter
from edgespec.cli.terminal import counted, detail, note, reply, runner, verbosity, waiting
from edgespec.closing import closed_on_failure
from edgespec.config.options import RANDOM_SEED, REMEMBERING, GenerateOptions, LoadOptions, Sampling, SessionOptions
from edgespec.config.sources import Settings
from edgespec.config.values import LOSSY, NumSequences
from edgespec.drafters.spec import learnt_texts
from edgespec.errors import ConfigError, EdgespecError, PromptError, StateError
from edgespec.generation.handle import Generation
from edgespec.loading.opening import has_chat_template
from edgespec.loading.requirements import resolve_pair
from edgespec.platform.files import exists, write_errors
from edgespec.reports import Stats
from edgespec.runtime import Model, load

HERE = "this chat"  # where a setting comes from that was changed after loading


@dataclass(slots=True)
class Session:
    """A loaded model and the settings of its answers, which may be replaced between two of them."""

    model: Model
    settings: Settings
    seen_notes: set[str] = field(default_factory=set)  # notes of answers that were shown

    @property
    def sampling(self) -> Sampling:
        return Sampling(**self.settings.part("sampling"))

    @property
    def options(self) -> GenerateOptions:
        return GenerateOptions(**self.settings.part("generate"))

    @property
    def shown(self) -> SessionOptions:
        return SessionOptions(**self.settings.part("session"))

    @property
    def seed(self) -> int:
        """The seed of the next answer; `completed` chose one where none was given."""
        return int(self.settings.values["seed"])

    def use(self, settings: Settings) -> None:
        """Other settings from the next answer on.

        Raises SamplingError, ConfigError for a value out of range, a bad schema or reasoning that has no switch.
        """
        changed = replace(self, settings=settings)
        _, options, _ = changed.sampling, changed.options, changed.shown
        changed.require_switch()
        self.model.check_structure(options)  # here, and not at the next message
        self.settings = settings

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation. Raises as `encode_chat`."""
        chosen = {} if self.shown.thinking is None else {"enable_thinking": self.shown.thinking}
        prompt_ids = self.model.encode_chat(messages, template_arguments=chosen)
        return before_structure(self.model.target.vocabulary, prompt_ids, self.options, answer_prefix(messages))

    def stream(self, prompt_ids: Sequence[int]) -> Generation:
        """The answer to a prompt. Raises as `Model.stream`."""
        return self.model.stream(prompt_ids, self.sampling, replace(self.options, logprobs=False))

    @property
    def splits_reasoning(self) -> bool:
        """Whether reasoning is told apart from the answer."""
        return self.shown.chat_template and self.shown.reasoning_format != "none"

    def printer(self, prompt_ids: Sequence[int], prefix: str = "") -> AnswerPrinter:
        """What prints the answer to a prompt, which has begun with `prefix`, in the way that the settings ask for."""
        vocabulary = self.model.target.vocabulary
        reasoning = Reasoning.of(vocabulary, prompt_ids, prefix) if self.splits_reasoning else None
        return AnswerPrinter(vocabulary, reasoning, raw=self.shown.raw)

    def require_switch(self) -> None:
        """Raises ConfigError where the chat template is to be told whether to reason, and cannot be."""
        template = self.model.target.vocabulary.chat_template or ""
        if self.shown.thinking is not None and "enable_thinking" not in template:
            raise ConfigError(
                f"the chat template of {self.model.pair.name} has no switch for reasoning (enable_thinking): leave "
                "out --thinking and --no-thinking"
            )

    def configuration(self, *, whole: bool = True) -> str:
        """The effective configuration in one line; else of what runs the model only what changes a text, or rules out
        speculation.
        """
        model, options = self.model, self.options
        facts, engine = model.target.facts, runner(model.pair.files["target"])
        drafter = options.drafter or model.drafter_name
        rule = options.verify or model.options.verify
        if not whole:
            parts = [f"{model.pair.name} on {engine}" + (f", {facts.device}" if facts.device != "cpu" else "")]
            if not facts.writes:
                parts.append("embeddings only")
            elif not facts.can_speculate:
                parts.append("no speculation (the model cannot roll back)")
            elif drafter == "none":
                parts.append("drafter none")
            return " | ".join([*parts, *([f"verify {rule} (changes the text)"] if rule in LOSSY else [])])
        length = model.options.draft_length if options.draft_length is None else options.draft_length
        mode = "fastest mode" if facts.pinned_class is None else "reproducible"
        return " | ".join(
            (
                model.pair.name,
                f"{engine} on {facts.device}, threads {facts.threads}, context {facts.context_length}",
                f"drafter {drafter}" if drafter == "none" else f"drafter {drafter}, draft length {length}, rule {rule}",
                mode if rule == "coupled" else "not reproducible",
                f"seed {self.seed}",
            )
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


def completed(settings: Settings, model: Model) -> Settings:
    """`settings` with what the model recommends, and with a seed where none is given."""
    settings = settings.below(model.pair.recommended, f"recommended for {model.pair.name}")
    return settings.below({"seed": Sampling().seeded().seed}, "chosen at random")


def open_session(settings: Settings, *, remembers: bool = False, parallel: NumSequences = 1) -> Session:
    """Load what the settings name. Every option is checked before any file is opened.

    `parallel`: answers at once. `remembers`: a command whose answers may be stored on disk and drafted from, if the
    settings ask for it; the others never do.
    Raises ConfigError, SamplingError, and whatever `edgespec.load` raises.
    """
    if not remembers:
        settings = settings.without(REMEMBERING)
    if settings.values.get("seed") == RANDOM_SEED:  # one for all answers, which is told
        settings = settings.without(("seed",))
    Sampling(**settings.part("sampling"))
    GenerateOptions(**settings.part("generate"))
    SessionOptions(**settings.part("session"))
    with waiting(f"loading {settings.values.get('model', 'demo')}"):
        model = load(**settings.part("load"), parallel=parallel)
    with closed_on_failure(model):
        session = Session(model, completed(settings, model))
        session.require_switch()
    return session


def open_measured(settings: Settings, command: str, usual: Mapping[str, Any]) -> Session:
    """As `open_session`, for a command that compares speculation with plain decoding, with all that it runs with shown.

    `usual`: its own defaults. Raises ConfigError where speculation is turned off.
    """
    for name, off in (("drafter", "none"), ("draft_length", 0)):
        if settings.values.get(name) == off:
            given = f"--{name.replace('_', '-')} {off} ({settings.sources[name]})"
            raise ConfigError(f"{command} compares speculation with plain decoding, and {given} turns speculation off")
    session = open_session(settings.below(usual, command))
    show_beginning(session, measures=True)
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


def show_beginning(session: Session, *, measures: bool = False) -> None:
    """What a person should know before the first answer, on stderr: the model's banner and one line; more with -v.

    `measures`: of a command whose result depends on all of the configuration.
    """
    model = session.model
    if model.pair.banner:
        (detail if measures else note)(model.pair.banner)
    if model.options.learn and not exists(learnt_texts(model.target.vocabulary).path):
        note("Learning from answers: on (edgespec corpus rm --learnt deletes it)")
    is_whole = measures or verbosity() == "verbose"
    if model.memory is not None and model.memory.note and not is_whole:
        note(f"note: {model.memory.note}")
    note(session.configuration(whole=is_whole))
    for line in model.notes:
        detail(line)


def length_note(stats: Stats, options: GenerateOptions, *, in_chat: bool = False) -> str | None:
    """Why the answer stops in the middle, and how to get more; None where the model ended it."""
    if stats.finish_reason != "length":
        return None
    if stats.new_tokens == options.max_tokens:
        more = "/continue goes on, /set max-tokens gives more" if in_chat else "a larger -n (--max-tokens) gives more"
        return f"cut at {counted(stats.new_tokens, 'token')}: {more}"
    return "cut: the context is full; a larger -c (--ctx-size) gives more"


def stats_lines(stats: Stats) -> Iterable[str]:
    reused = f" ({stats.reused_tokens} cached)" if stats.reused_tokens else ""
    yield (
        f"{counted(stats.new_tokens, 'token')} at {stats.tokens_per_second:.1f} tokens/s, "
        f"prompt {stats.prompt_tokens}{reused} in {stats.prefill_s:.2f} s"
    )
    if stats.drafted_tokens:
        yield (
            f"{stats.target_passes} target passes, {stats.drafted_tokens} drafted, {stats.accepted_tokens} accepted "
            f"({stats.acceptance_rate:.0%}), {stats.mean_accepted_length:.2f} tokens per pass"
        )
    else:
        yield f"{stats.target_passes} target passes, nothing drafted"
    planned = f" of {stats.planned_bytes / 1e6:.0f} planned" if stats.planned_bytes else ""
    yield (
        f"draft {stats.draft_s:.3f} s, verify {stats.verify_s:.3f} s, overhead {stats.overhead_s:.3f} s; "
        f"peak memory {stats.peak_rss_bytes / 1e6:.0f} MB{planned}"
    )


# -- one conversation: asks, prints the answer and remembers it; with `chat --session FILE` it is kept in FILE, written
# after every answer. The model's state lies beside it, so that nothing is read again: it may take megabytes and is
# written at the end. Without it, or with that of another model, the text is read again.

STATE_SUFFIX = ".state"
LEAST_ANSWER = 256  # tokens kept free for an answer of unlimited length, where the context allows


class Chat:
    """The conversation, the session it runs in, and the counters of its last answer."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.conversation = Conversation(session.shown.system)
        self.last = Stats()  # of the last answer
        self.attached: list[str] = []  # texts that go behind the next message

    def say(self, text: str) -> None:
        """Ask `text` and print the answer; a failure leaves the conversation as it was."""
        before = self.conversation.copy()
        self.conversation.ask("\n\n".join((text, *self.attached)))
        self.attached = []  # first: with what no context holds, every message would be refused
        self._answer(before)

    def say_again(self) -> None:
        """Answer the last message again with the next seed; the same seed would give the same text."""
        before = self.conversation.copy()
        if (text := self.conversation.undo()) is None:
            reply("there is nothing to answer yet")
            return
        self.conversation.ask(text)
        seed = (self.session.seed + 1) % (1 << 64)  # never -1, which is any
        self.session.settings = self.session.settings.above({"seed": seed}, HERE)
        is_greedy = self.session.sampling.temperature == 0
        reply("temperature 0: the answer will be the same" if is_greedy else f"seed {seed}")
        self._answer(before)

    def go_on(self) -> None:
        """Go on with the last answer, which was cut or stopped."""
        before = self.conversation.copy()
        prefix = before.last_answer
        if not prefix.strip():
            reply("there is no answer to go on with")
            return
        self._answer(before, prefix)

    def _answer(self, before: Conversation, prefix: str = "") -> None:
        """Fit, generate, print, remember. `before`: what to return to when there is no answer; `prefix`: its begin."""
        session = self.session
        try:
            self._make_room()
            prompt_ids = session.encode(self.conversation.messages)
            printer = session.printer(prompt_ids, prefix)
            answer = session.stream(prompt_ids)
            self.last = answer.stats
            if printer.print_all(answer):
                note("stopped")
        except BaseException:
            self.conversation = before
            raise
        reasoning, text = printer.parts
        if prefix:
            self.conversation.continue_answer(text)
            if not text:
                note("the answer was complete: the model adds nothing")
        elif text:
            self.conversation.answer(text, reasoning)
        else:
            self.conversation = before
            note(f"no answer{' after the reasoning' if reasoning else ''}; the message is dropped")
        session.show_end(self.last, in_chat=True)

    def _make_room(self) -> None:
        model, wanted = self.session.model, self.session.options.max_tokens
        reserve = min(wanted or LEAST_ANSWER, model.context_length // 4)
        dropped = fit_context(
            self.conversation, lambda messages: len(self.session.encode(messages)), model.context_length, reserve
        )
        if dropped:
            oldest = counted(dropped, "exchange")
            note(f"the context of {model.context_length} tokens is full: dropped the oldest {oldest}")


class SavedChat:
    """The file of a conversation.

    Raises StateError, before a model is loaded, for a file that is something else, or where none can be written.
    """

    def __init__(self, path: Path) -> None:
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        with write_errors(path), TemporaryFile(dir=nearest):
            pass  # a missing folder is made with the first answer
        self._path = path
        self._state_path = path.with_name(path.name + STATE_SUFFIX)
        self._conversation = Conversation.load(path) if exists(path) else None
        self._stamp = self._found_stamp()
        self._is_changed = False

    def begin(self, chat: Chat) -> None:
        """Continue the conversation, with the system prompt of the settings where they have one."""
        if self._conversation is None:
            return
        if (system := chat.session.shown.system) is not None:
            self._conversation.system = system
        chat.conversation = self._conversation
        note(f"continuing {self._path}: {counted(chat.conversation.num_exchanges, 'exchange')}")
        if not self._state_path.exists():
            return
        try:
            chat.session.model.load_state(self._state_path)
        except EdgespecError as exc:
            detail(str(exc))

    def keep(self, chat: Chat) -> None:
        """Write the conversation. Raises StateError when it cannot be written, or another program changed the file."""
        if not chat.conversation.turns and self._stamp is None:
            return
        if self._found_stamp() != self._stamp:
            raise StateError(
                f"another program changed {self._path}: keep this conversation with /save and another name"
            )
        chat.conversation.save(self._path)
        self._stamp = self._found_stamp()
        self._is_changed = True

    def end(self, chat: Chat) -> None:
        """Write the state, if the conversation went on."""
        if self._is_changed:
            chat.session.model.save_state(self._state_path)

    def _found_stamp(self) -> tuple[int, int, int] | None:
        """What tells whether the file is still the one that was read or written here; None where there is none."""
        if not exists(self._path):
            return None
        found = self._path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
