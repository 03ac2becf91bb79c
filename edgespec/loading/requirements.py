"""What a run needs of a pair: which drafters it opens with models of their own, and which models these are."""

from __future__ import annotations

from edgespec.config import DrafterName, LoadOptions
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.eagle3 import is_eagle3
from edgespec.formats.gguf.split import is_early_exit
from edgespec.formats.manifest import ModelPair

ROLES: dict[DrafterName, tuple[str, ...]] = {
    "model": ("draft",),
    "tree": ("draft",),
    "hybrid": ("draft",),
    "early-exit": ("draft",),
    "eagle3": ("draft",),
    "hierarchical": ("draft", "medium"),
}
_FLAGS = {"draft": "-md/--model-draft (draft=...)", "medium": "--medium (medium=...)"}


def wanted_drafters(options: LoadOptions, pair: ModelPair, exit_layer: int | None) -> tuple[DrafterName, ...]:
    """Which drafters to open: a pair's medium only for whoever asks, since it costs memory and one more load.

    Raises CapabilityError when the pair lacks what a drafter needs.
    """
    own: tuple[DrafterName, ...] = ()
    if pair.draft is not None:
        own = (_kind_of_draft(pair),)
    if options.drafter == "auto":
        named: tuple[DrafterName, ...] = ("hierarchical",) if options.medium is not None else ()
        exits: tuple[DrafterName, ...] = ("early-exit",) if options.exit_layer is not None else ()
        wanted = tuple(dict.fromkeys((*own, *exits, *named)))
    else:
        wanted = (options.drafter,) if options.drafter in ROLES else ()
        if wanted == ("hierarchical",) and own == ("early-exit",) and pair.files["target"].engine == "llamacpp":
            wanted = (*own, *wanted)  # an exit in GGUF drafts over the target's weights: it is the small model
    if "early-exit" in wanted and exit_layer is None and "early-exit" not in own:
        hint = "--exit-layer N, or " if pair.files["target"].engine == "onnx" else ""
        raise CapabilityError(
            f"drafter 'early-exit' needs to know where {pair.name!r} ends early: give {hint}a pair made with edgespec "
            "export --derive early-exit:LAYERS"
        )
    for name in wanted:
        needs = () if name == "early-exit" else ROLES[name]
        if name == "hierarchical" and "early-exit" in wanted:
            needs = ("medium",)  # the exit looks ahead of it
        for role in needs:
            if role not in pair.files:
                what = "an EAGLE-3 head" if name == "eagle3" else f"a {role} model"
                raise CapabilityError(
                    f"drafter {name!r} needs {what} and {pair.name!r} has none: give {_FLAGS[role]}, or "
                    "use --drafter ngram"
                )
    _check_kind(wanted, own, pair)
    return wanted


def _check_kind(wanted: tuple[DrafterName, ...], own: tuple[DrafterName, ...], pair: ModelPair) -> None:
    """Raises CapabilityError where a model was asked for and the pair's draft is an EAGLE-3 head, or the other way."""
    is_head = own == ("eagle3",)
    for name in wanted:
        if name != "early-exit" and is_head != (name == "eagle3"):
            kinds = ("an EAGLE-3 head", "a draft model") if is_head else ("a draft model", "an EAGLE-3 head")
            raise CapabilityError(
                f"{pair.files['draft'].path.name} is {kinds[0]} and drafter {name!r} needs {kinds[1]}: give one with "
                f"-md/--model-draft (draft=...), or use --drafter {own[0]}"
            )


def _kind_of_draft(pair: ModelPair) -> DrafterName:
    """The drafter that the pair's draft file makes."""
    file = pair.files["draft"]
    if file.engine == "llamacpp" and is_eagle3(file.path):
        return "eagle3"
    return "early-exit" if _draft_is_exit(pair) else "model"


def exit_layer_of(options: LoadOptions, pair: ModelPair) -> int | None:
    """Layers after which an ONNX target is cut for an early exit; None: it stays in one piece.

    Raises CapabilityError where an exit was asked for and there is none.
    """
    target, draft = pair.files["target"], pair.files.get("draft")
    if options.drafter not in ("auto", "early-exit"):
        return None
    if options.exit_layer is not None:
        if target.engine != "onnx":
            raise CapabilityError(
                "--exit-layer is for ONNX targets; the exit of a GGUF is chosen when it is written: edgespec export "
                f"--derive early-exit:{options.exit_layer}"
            )
        return options.exit_layer
    if target.engine == "onnx" and draft is not None and draft.engine == "onnx":
        from edgespec.engines.onnx.partition import exit_layer_of as exit_layer_of_files

        return exit_layer_of_files(draft.path, target.path)
    return None


def _draft_is_exit(pair: ModelPair) -> bool:
    """Whether the pair's draft is the beginning of its target, over the same weights."""
    target, draft = pair.files["target"], pair.files["draft"]
    if target.engine != draft.engine:
        return False
    if target.engine == "onnx":
        return draft.path.parent == target.path.parent and draft.path != target.path
    return is_early_exit(draft.path, target.path)
