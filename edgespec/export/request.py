"""The checked options of an export: formats, quantisations, source of the draft."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from edgespec.config.habits import did_you_mean
from edgespec.errors import ConfigError, UsageError
from edgespec.export.onnx import EXPORTERS, GROUP_SIZES, ONNX_QUANTS
from edgespec.export.onnx.convert import FORMS, GROUPED, TILED, Exporter, choose_exporter
from edgespec.formats.manifest import sha256_of

if TYPE_CHECKING:
    from edgespec.export.onnx.draft_vocabulary import DraftVocabulary

Format = Literal["gguf", "onnx"]
FORMATS: tuple[Format, ...] = ("gguf", "onnx")
# A draft runs single-row passes, in which integer products are not faster and int8 is more accurate.
DRAFT_QUANTS: Mapping[str, str] = {"w8a8": "int8"}
LEAST_DRAFTED = 256  # tokens of a draft
DEFAULT_QUANTS: Mapping[Format, str] = {"gguf": "q8_0", "onnx": "int8"}


@dataclass(frozen=True, slots=True)
class Derivation:
    """A draft derived from the target: its first `exit_layer` layers, or the layers `kept` (ascending)."""

    kind: Literal["early-exit", "prune"]
    kept: tuple[int, ...]

    @property
    def exit_layer(self) -> int:
        """Number of leading layers of an early exit."""
        return len(self.kept)

    @staticmethod
    def parse(text: str) -> Derivation:
        """Parse `early-exit:5` or `prune:0-3,8` (layers to keep, from 0). Raises ConfigError."""
        kind, _, layers = text.partition(":")
        if kind == "early-exit":
            if not re.fullmatch(r"[1-9]\d{0,3}", layers):
                raise ConfigError(
                    f"--derive {text!r}: give the number of leading layers, such as early-exit:5, or auto"
                )
            return Derivation("early-exit", tuple(range(int(layers))))
        if kind == "prune":
            return Derivation("prune", _layers(text, layers))
        hint = did_you_mean(kind, ("early-exit", "prune"))
        raise ConfigError(f"--derive {text!r} is not known; allowed: early-exit:LAYERS, prune:LAYERS{hint}")

    def check(self, num_layers: int) -> None:
        """Raise ConfigError unless this keeps some but not all layers of a model of `num_layers`."""
        if self.kept[-1] >= num_layers:
            raise ConfigError(
                f"--derive {self}: the target has {num_layers} layers, 0..{num_layers - 1}; layer {self.kept[-1]} "
                "does not exist"
            )
        if len(self.kept) == num_layers:
            raise ConfigError(f"--derive {self} keeps all {num_layers} layers: a draft must have fewer than its target")

    def __str__(self) -> str:
        if self.kind == "early-exit":
            return f"early-exit:{self.exit_layer}"
        return f"prune:{','.join(map(str, self.kept))}"


def _layers(text: str, spec: str) -> tuple[int, ...]:
    kept: set[int] = set()
    for part in spec.split(","):
        found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        first = int(found.group(1)) if found else 0
        last = int(found.group(2) or first) if found else -1
        if last < first:
            raise ConfigError(f"--derive {text!r}: give the layers to keep, from 0, such as prune:0-3,8")
        kept.update(range(first, last + 1))
    return tuple(sorted(kept))


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """One export. `source` and `draft` are folders or hub ids; `heads`: a file of trained heads as the draft.

    `quants`: one quantisation per requested format; `grouped`: kinds of matrices that a w8a8 graph of edgespec's own
    writer keeps in groups, None for the default; `draft_quants`: those of the draft that differ; `threads` None:
    automatic; `made_by`: program and version; `draft_vocab`: tokens that an ONNX draft's head keeps, the likeliest by
    `draft_text`, None for all. Raises ConfigError for conflicting options.
    """

    source: str
    output: Path
    quants: Mapping[Format, str]
    draft: str | None = None
    draft_quants: Mapping[Format, str] = field(default_factory=dict)
    derivation: Derivation | None = None
    group_size: int | None = None
    grouped: tuple[str, ...] | None = None
    imatrix: Path | None = None
    exporter: str = "auto"
    revision: str | None = None
    name: str | None = None
    licence: str | None = None
    check: bool = True
    force: bool = False
    threads: int | None = None
    made_by: str = "edgespec"
    draft_vocab: int | None = None
    draft_text: Path | None = None
    heads: Path | None = None

    def __post_init__(self) -> None:
        if (self.draft or self.heads) is not None and self.derivation is not None:
            raise ConfigError("--draft and --derive both give a draft: use one of them")
        if self.draft_quants and not self.has_own_draft_files:
            what = "an early-exit draft shares the target's weights" if self.derivation else "there is no draft"
            what = "heads go into the pair as they are" if self.heads else what
            raise ConfigError(f"--draft-quant has nothing to quantise: {what}")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise ConfigError(f"--group-size {self.group_size} is not possible; allowed: {_listed(GROUP_SIZES)}")
        if self.exporter not in EXPORTERS:
            raise ConfigError(f"--exporter {self.exporter!r} is not known; allowed: {_listed(EXPORTERS)}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads {self.threads} is not possible: give 1 or more")
        if "onnx" not in self.quants and (self.exporter != "auto" or self.group_size is not None):
            raise ConfigError("--exporter and --group-size are for ONNX: give --to onnx or --to both")
        if self.group_size is not None and (quant := self.quants["onnx"]) in TILED:
            raise ConfigError(f"--group-size is not for {quant}, whose groups are fixed: omit it")
        if self.grouped is not None and not self.is_grouping_possible:
            raise ConfigError(
                "--in-groups is for the ONNX type w8a8 and edgespec's own writer: give --to onnx --quant w8a8, and no "
                "other --exporter"
            )
        self._check_own_writer()
        self._check_draft_vocabulary()
        self._check_imatrix()

    def _check_own_writer(self) -> None:
        for role in ("target", "draft") if "onnx" in self.quants and self.exporter == "edgespec" else ():
            if (quant := self.quant_of(role, "onnx")) not in FORMS:
                raise ConfigError(f"--exporter edgespec does not write {quant}; allowed: {_listed(FORMS)}")

    def _check_draft_vocabulary(self) -> None:
        if self.draft_vocab is None:
            if self.draft_text is not None:
                raise ConfigError("--draft-text chooses the tokens of --draft-vocab N: give that, too")
            return
        if self.draft_vocab < LEAST_DRAFTED:
            raise ConfigError(f"--draft-vocab {self.draft_vocab} is not possible: give {LEAST_DRAFTED} or more")
        if "onnx" not in self.quants or self.exporter not in ("auto", "edgespec"):
            raise ConfigError("--draft-vocab is for ONNX by edgespec's own writer: give --to onnx, no other --exporter")
        if not self.has_own_draft_files:
            raise ConfigError(
                "--draft-vocab needs a draft with files of its own: give --draft, or --derive prune:LAYERS"
            )
        if self.draft_text is not None:
            _read_text("--draft-text", self.draft_text)

    def vocabulary_of(self, role: str) -> DraftVocabulary | None:
        """The tokens that the ONNX graph of a role keeps, None for all. Raises UsageError for an unreadable text."""
        if role != "draft" or self.draft_vocab is None:
            return None
        from edgespec.export.onnx.draft_vocabulary import DraftVocabulary

        if self.draft_text is None:
            return DraftVocabulary(self.draft_vocab)
        return DraftVocabulary(self.draft_vocab, _read_text("--draft-text", self.draft_text))

    def _check_imatrix(self) -> None:
        if self.imatrix is None:
            return
        if "gguf" not in self.quants:
            raise ConfigError("--imatrix is for GGUF: give --to gguf or --to both")
        _read_text("--imatrix", self.imatrix)

    def identity(self) -> dict[str, Any]:
        """All options that the files depend on, as JSON values."""
        return {
            "made_by": self.made_by,
            "quants": dict(self.quants),
            "draft_quants": dict(self.draft_quants),
            "derivation": str(self.derivation),
            "group_size": self.group_size,
            "grouped": self.groups,
            "draft_vocab": self.draft_vocab,
            "heads": None if self.heads is None else sha256_of(self.heads),
            "draft_text": None if self.draft_text is None else sha256_of(self.draft_text),
            "exporter": self.exporter,
            "imatrix": None if self.imatrix is None else sha256_of(self.imatrix),
            "name": self.name,
            "licence": self.licence,
        }

    @property
    def formats(self) -> tuple[Format, ...]:
        return tuple(wanted for wanted in FORMATS if wanted in self.quants)

    @property
    def has_own_draft_files(self) -> bool:
        """Whether the draft has files of its own; an early exit shares the target's weights."""
        return self.draft is not None or (self.derivation is not None and self.derivation.kind == "prune")

    @property
    def is_grouping_possible(self) -> bool:
        return self.exporter in ("auto", "edgespec") and self.quants.get("onnx") == "w8a8"

    @property
    def groups(self) -> tuple[str, ...]:
        """Kinds of matrices that a w8a8 graph keeps in groups."""
        return GROUPED if self.grouped is None else self.grouped

    def exporter_of(self, role: str, architecture: str) -> Exporter:
        """Which exporter makes the ONNX graph of a role, whose model is of this architecture."""
        return choose_exporter(architecture, cast("Exporter", self.exporter), self.quant_of(role, "onnx"))

    def quant_of(self, role: str, wanted: Format) -> str:
        """The quantisation of one role. A draft's default is the target's, except for DRAFT_QUANTS."""
        quant = self.quants[wanted]
        return self.draft_quants.get(wanted, DRAFT_QUANTS.get(quant, quant)) if role == "draft" else quant


def _read_text(flag: str, path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path} cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise UsageError(f"{flag} {path} is empty: give text similar to later use")
    return text


def known_quants(wanted: Format) -> tuple[str, ...]:
    """Names of a format's quantisations. Raises CapabilityError if the package for them is missing."""
    if wanted == "onnx":
        return ONNX_QUANTS
    from edgespec.export.gguf import GGUF_QUANTS

    return GGUF_QUANTS


def parse_formats(to: str) -> tuple[Format, ...]:
    """`gguf`, `onnx` or `both`. Raises ConfigError."""
    if to == "both":
        return FORMATS
    for wanted in FORMATS:
        if to == wanted:
            return (wanted,)
    hint = did_you_mean(to, (*FORMATS, "both"))
    raise ConfigError(f"--to {to!r} is not known; allowed: gguf, onnx, both{hint}")


def parse_grouped(text: str) -> tuple[str, ...]:
    """Kinds of matrices by commas, or `none`. Raises ConfigError."""
    from edgespec.formats.onnx.forms import GROUPABLE

    names = tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text.strip() != "none" else ()
    for name in names:
        if name not in GROUPABLE:
            hint = did_you_mean(name, GROUPABLE)
            raise ConfigError(f"--in-groups {name!r} is not known{hint}; allowed: {_listed(GROUPABLE)}, or none")
    return names


def parse_quants(flag: str, given: Sequence[str], formats: Sequence[Format]) -> dict[Format, str]:
    """Quantisation by format, from values such as `q4_k_m` or `onnx=int8`; formats without a value are absent.

    Raises ConfigError for an unknown name (suggests the closest one), a format that is not exported, and a second
    value for a format. A name that both formats have is GGUF's, a second one then ONNX's.
    """
    known = {wanted: known_quants(wanted) for wanted in formats}
    chosen: dict[Format, str] = {}
    for text in given:
        prefix, separator, name = text.rpartition("=")
        name = name.lower()
        owners = [f for f in formats if name in known[f] and (not separator or f == prefix)]
        if not owners:
            raise _unknown_quant(flag, text, prefix, name, known)
        owner = next((f for f in owners if f not in chosen), owners[0])
        if owner in chosen:
            raise ConfigError(f"{flag} names {owner} twice, {chosen[owner]} and {name}: keep one")
        chosen[owner] = name
    return chosen


def _unknown_quant(
    flag: str, text: str, prefix: str, name: str, known: Mapping[Format, tuple[str, ...]]
) -> ConfigError:
    if prefix and prefix not in known:
        return ConfigError(f"{flag} {text!r}: {prefix!r} is not exported; allowed: {_listed(tuple(known))}")
    names = known[prefix] if prefix in known else tuple(name for names in known.values() for name in names)  # type: ignore[index]
    hint = did_you_mean(name, names)
    return ConfigError(
        f"{flag} {text!r} is not a type of {prefix or ' or '.join(known)}{hint}; allowed: {_listed(names)}"
    )


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
