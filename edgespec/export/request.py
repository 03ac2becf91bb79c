"""The checked options of an export: formats, quantisations, source of the draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgespec.config.table import did_you_mean
from edgespec.config.values import EngineName
from edgespec.errors import ConfigError

Format = Literal["gguf", "onnx"]
FORMATS: tuple[Format, ...] = ("gguf", "onnx")
BOTH = "both"  # what `--to` calls them
ENGINES: Mapping[Format, EngineName] = {"gguf": "llamacpp", "onnx": "onnx"}
TILED = ("q8_0", "q4_k_m")  # ONNX types for our own kernels
ONNX_QUANTS = ("int4", "int8", *TILED, "fp32")
OPTIMUM_QUANTS = ("int4", "int8", "fp32")
STRAIGHT_GGUF = ("f32", "f16", "bf16", "q8_0")  # written directly; others are quantised from a 16-bit file
EXPORTERS = ("edgespec", "optimum")
# int8 products of ONNX Runtime take 7 to 14% less time with groups of 64 than of 32, most at the 2 to 8 rows of a
# verifying pass. Groups of 128 are faster still, but use a kernel whose bits depend on the width of a pass, so output
# would not be reproducible. 4-bit weights need the accuracy of small groups.
GROUP_SIZES = {"int8": 64, "int4": 32}
DEFAULT_QUANTS: Mapping[Format, str] = {"gguf": "q8_0", "onnx": "int8"}


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """One export. `source` and `draft` are folders, hub ids or GGUF files; `heads`: trained heads as the draft.

    `quants`: one quantisation per requested format; `draft_quants`: those of the draft that differ; `threads` None:
    automatic; `made_by`: program and version. Raises ConfigError for conflicting options.
    """

    source: str
    output: Path
    quants: Mapping[Format, str]
    draft: str | None = None
    draft_quants: Mapping[Format, str] = field(default_factory=dict)
    exporter: str = "edgespec"
    revision: str | None = None
    name: str | None = None
    licence: str | None = None
    check: bool = True
    force: bool = False
    threads: int | None = None
    made_by: str = "edgespec"
    heads: Path | None = None

    def __post_init__(self) -> None:
        if self.draft_quants and self.draft is None:
            what = "heads go into the pair as they are" if self.heads else "there is no draft"
            raise ConfigError(f"--draft-quant has nothing to quantise: {what}")
        if self.exporter == "optimum":
            if "onnx" not in self.quants:
                raise ConfigError("--exporter is for ONNX: give --to onnx or --to both")
            for quant in (self.quant_of(role, "onnx") for role in self.roles):
                if quant not in OPTIMUM_QUANTS:
                    allowed = ", ".join(OPTIMUM_QUANTS)
                    raise ConfigError(f"--exporter optimum does not write {quant}; allowed: {allowed}")
        if self.is_gguf:
            self._check_gguf()

    def _check_gguf(self) -> None:
        """Raise ConfigError for what a GGUF cannot give."""
        source = Path(self.source).name
        if self.formats != ("onnx",):
            raise ConfigError(f"{source} is a GGUF already: give --to onnx to convert it")
        if self.revision is not None:
            raise ConfigError(f"--revision is for hub ids, and {source} is a file: omit it")
        if self.exporter == "optimum":
            raise ConfigError(
                "--exporter optimum does not read GGUF: omit it, or give the folder or hub id of the original model"
            )

    @property
    def is_gguf(self) -> bool:
        """Whether the source is a GGUF file rather than the folder or hub id of a checkpoint."""
        return self.source.lower().endswith(".gguf") and not Path(self.source).expanduser().is_dir()

    @property
    def writes_graphs(self) -> bool:
        """Whether ONNX graphs are edgespec's own."""
        return "onnx" in self.quants and self.exporter == "edgespec"

    def has_gguf_between(self, role: str) -> bool:
        """Whether a folder becomes a GGUF in its own precision, of which the files are made."""
        is_rounded = "gguf" in self.quants and self.quant_of(role, "gguf") not in STRAIGHT_GGUF
        return not self.is_gguf and (is_rounded or self.writes_graphs)

    @property
    def formats(self) -> tuple[Format, ...]:
        return tuple(wanted for wanted in FORMATS if wanted in self.quants)

    @property
    def roles(self) -> tuple[str, ...]:
        """The models that are made."""
        return ("target",) if self.draft is None else ("target", "draft")

    def quant_of(self, role: str, wanted: Format) -> str:
        quant = self.quants[wanted]
        return self.draft_quants.get(wanted, quant) if role == "draft" else quant


def parse_quants(flag: str, given: Sequence[str], formats: Sequence[Format]) -> dict[Format, str]:
    """Quantisation by format, from values such as `q4_k_m` or `onnx=int8`; formats without a value are absent.

    Raises ConfigError for an unknown name (suggests the closest one), a format that is not exported, and a second
    value for a format, CapabilityError without the package gguf. A name that both formats have is GGUF's, a second one
    then ONNX's.
    """
    known: dict[str, tuple[str, ...]] = {"onnx": ONNX_QUANTS}
    if "gguf" in formats:
        from edgespec.export.gguf.convert import GGUF_QUANTS

        known["gguf"] = GGUF_QUANTS
    chosen: dict[Format, str] = {}
    for text in given:
        prefix, separator, name = text.lower().rpartition("=")
        if separator and prefix not in formats:
            raise ConfigError(f"{flag} {text!r}: {prefix!r} is not exported; allowed: {', '.join(formats)}")
        among = [wanted for wanted in formats if not separator or wanted == prefix]
        owners = [wanted for wanted in among if name in known[wanted]]
        if not owners:
            names = [each for wanted in among for each in known[wanted]]
            raise ConfigError(
                f"{flag} {text!r} is not a type of {' or '.join(among)}{did_you_mean(name, names)}; allowed: "
                f"{', '.join(names)}"
            )
        owner = next((each for each in owners if each not in chosen), owners[0])
        if owner in chosen:
            raise ConfigError(f"{flag} names {owner} twice, {chosen[owner]} and {name}: keep one")
        chosen[owner] = name
    return chosen
