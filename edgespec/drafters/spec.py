"""One table: what each drafter needs, owns and costs, where it is allowed, whether `auto` takes it, and how it is made.

A new drafter is its class, a line in `SPECS` and its name in `config.DrafterName`. Only what reads files is elsewhere:
`loading` opens the drafters that run a model of the pair, or heads. Drafters are imported when they are made: commands
that load nothing read the table too, and do without numpy.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from edgespec.config.options import LoadOptions
from edgespec.config.values import DrafterName, EngineName
from edgespec.errors import CapabilityError, StateError
from edgespec.platform.files import is_folder

if TYPE_CHECKING:
    from edgespec.corpus.index import SuffixIndex
    from edgespec.corpus.texts import LearntTexts
    from edgespec.drafters.base import Drafter
    from edgespec.vocabulary import Vocabulary

logger = logging.getLogger("edgespec")


def learnt_texts(vocabulary: Vocabulary) -> LearntTexts:
    """What models wrote in `vocabulary` in earlier runs."""
    from edgespec.corpus.texts import LearntTexts, vocabulary_key

    return LearntTexts(vocabulary_key(vocabulary), vocabulary.size)


def user_corpus(vocabulary: Vocabulary) -> SuffixIndex | None:
    """The user's corpus in `vocabulary`; None when there is none, or when it cannot be used, which is logged."""
    from edgespec.corpus.texts import Corpus, texts_folder, vocabulary_key

    if not is_folder(texts_folder()):
        return None
    try:
        return Corpus(vocabulary_key(vocabulary), vocabulary.size).index()
    except StateError as exc:
        logger.warning("the corpus is not used: %s; edgespec corpus rm removes one text, or --all", exc)
        return None


@dataclass(frozen=True, slots=True)
class Need:
    """What a drafter needs beside the target.

    `option` of LoadOptions and `flag` give it; `role`: the file of a pair that is it; `must_be_asked`: a pair that has
    it is loaded without it unless the options name it or the drafter.
    """

    what: str
    option: str
    flag: str
    role: str | None = None
    must_be_asked: bool = False


DRAFT = Need("a draft model", "draft", "-md/--model-draft", "draft")
# In a draft model's place. A layer of `mtp` is in the target's own file where the pair has no such file.
HEAD_FILES: Mapping[DrafterName, Need] = {
    "eagle3": replace(DRAFT, what="an EAGLE-3 head"),
    "dflash": replace(DRAFT, what="a DFlash head"),
    "mtp": replace(DRAFT, what="a multi-token prediction layer"),
}
MEDIUM = Need("a medium model", "medium", "--medium", "medium", must_be_asked=True)
EXIT = Need("an early exit of a GGUF target", "exit_layer", "--exit-layer", "target", must_be_asked=True)
HEADS = Need("heads", "heads", "--heads")
MTP_LAYERS = Need("multi-token prediction layers in the target's own GGUF or beside it", "drafter", "a model with them")


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One line of the table.

    `needs`: beside the target; the last one is what it runs. `owns`: an engine of its own, or nothing that runs on an
    engine (tables and heads, or the draft model borrowed from drafter `model`). `cost` of
    drafting: next to nothing ("free"), passes of a model or a head ("passes"), or further rows of the
    target's pass ("rows"). `engines`: of the target. `is_made`: on demand, from nothing or from drafter `model`; else
    it is opened when the pair is loaded. `auto` takes what was opened or can be made, unless it is not `in_auto`.
    `bytes_per_token`: most that its tables take per token, of at most `most_tokens`.
    """

    needs: tuple[Need, ...] = ()
    owns: Literal["nothing", "engine"] = "nothing"
    cost: Literal["free", "passes", "rows"] = "passes"
    engines: tuple[EngineName, ...] = ("llamacpp", "onnx")
    is_made: bool = False
    bytes_per_token: int = 0
    most_tokens: int = 1 << 17
    in_auto: bool = True

    @property
    def roles(self) -> tuple[str, ...]:
        """The files of a pair that it needs."""
        return tuple(need.role for need in self.needs if need.role is not None)

    def can_be_made(self, opened: Container[DrafterName]) -> bool:
        """Whether it can be made of those that were `opened` with the pair."""
        return self.is_made and (not self.needs or "model" in opened)

    @property
    def is_pairs_draft(self) -> bool:
        """Whether a pair's draft file, or the first layers of its target, become this drafter."""
        return self.owns == "engine" and self.roles[-1:] in (("draft",), ("target",))

    @property
    def borrows_model(self) -> bool:
        """Whether it drafts with the draft model of drafter `model`."""
        return DRAFT in self.needs and not self.is_pairs_draft


# In the order in which `auto` considers them: of equal expectations the first one wins.
SPECS: dict[DrafterName, DrafterSpec] = {
    # In one text `suffix` finds what `ngram` finds.
    "ngram": DrafterSpec(cost="free", is_made=True, bytes_per_token=400, in_auto=False),
    "suffix": DrafterSpec(cost="free", is_made=True, bytes_per_token=600, most_tokens=1 << 16),
    "model": DrafterSpec((DRAFT,), "engine"),
    "eagle3": DrafterSpec((HEAD_FILES["eagle3"],), "engine"),
    "dflash": DrafterSpec((HEAD_FILES["dflash"],), "engine"),
    "mtp": DrafterSpec((MTP_LAYERS,), "engine"),
    "early-exit": DrafterSpec((EXIT,), "engine", engines=("onnx",)),
    "hierarchical": DrafterSpec((DRAFT, MEDIUM), "engine"),
    "medusa": DrafterSpec((HEADS,)),
    "eagle": DrafterSpec((HEADS,)),
    # Beside the others neither gains anything on real texts, however cheap a row is (docs/benchmarks/control.md).
    "tree": DrafterSpec((DRAFT,), cost="rows", is_made=True, in_auto=False),
    "lookahead": DrafterSpec(cost="rows", is_made=True, bytes_per_token=800, most_tokens=1 << 15, in_auto=False),
}
FALLBACK: DrafterName = "ngram"  # with a fixed draft length and no draft; it needs nothing and works on any text


AUTOMATIC = [name for name, spec in SPECS.items() if spec.in_auto]
"""The drafters that `auto` may take, whether or not they were opened or can be made."""


def check_makeable(name: DrafterName, opened: Mapping[DrafterName, Drafter], pair: str) -> None:
    """Raises CapabilityError for a drafter that needs what was not loaded; arguments as `made`'s."""
    spec = SPECS[name]
    if spec.can_be_made(opened):
        return
    need = spec.needs[-1]
    problem = f"drafter {name!r} needs {need.what}, but {pair!r} was loaded without"
    if need.must_be_asked:
        raise CapabilityError(f"{problem}: load it with --drafter {name}, or use --drafter auto")
    raise CapabilityError(f"{problem}: give {need.flag}, or use --drafter {FALLBACK}")


def made(
    name: DrafterName, options: LoadOptions, vocabulary: Vocabulary, opened: Mapping[DrafterName, Drafter], pair: str
) -> Drafter:
    """The drafter `name`, given those that were `opened` with the models of the pair called `pair`.

    Raises CapabilityError for one that needs what was not loaded.
    """
    check_makeable(name, opened, pair)
    if name == "suffix":
        return _suffix(options, vocabulary)
    if name == "tree":
        from edgespec.drafters.model import ModelDrafter
        from edgespec.drafters.tree import TreeDrafter

        model = opened["model"]
        assert isinstance(model, ModelDrafter)
        return TreeDrafter(model)
    from edgespec.drafters.lookahead import LookaheadDrafter
    from edgespec.drafters.ngram import NgramDrafter

    return NgramDrafter() if name == "ngram" else LookaheadDrafter()


def _suffix(options: LoadOptions, vocabulary: Vocabulary) -> Drafter:
    """It copies from the corpus, common texts and kept answers, where the options say so."""
    from edgespec.corpus.index import SuffixIndex, joined
    from edgespec.corpus.texts import CommonTexts
    from edgespec.drafters.suffix import SuffixDrafter

    earlier = learnt_texts(vocabulary).read() if options.learn else []
    found = [user_corpus(vocabulary) if options.corpus else None, SuffixIndex.of(joined(earlier)) if earlier else None]
    common = CommonTexts(vocabulary) if options.corpus else None
    return SuffixDrafter(corpora=[index for index in found if index is not None], common=common)
