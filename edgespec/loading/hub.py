"""A model hub through huggingface_hub: what a repository holds, which files of it make a model, and its errors as ours.

The library supplies the HTTP client, the token, proxies and addresses. Endpoint: HF_ENDPOINT, else the library's
default; it also reads HF_TOKEN, HF_HOME and HF_HUB_OFFLINE. What makes a model: the quantisation, the parts of a split
GGUF, a draft beside it, ONNX files. Only names are known at this point; after the download the files themselves say
what they are.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import DownloadError, ModelFileError, ModelNotFound, StateError
from edgespec.formats.gguf.check import SPLIT_NAME

REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")  # 96 letters each, as the hub allows
DISK_FIX = "free some space, or set EDGESPEC_MODELS to a folder on another disk"
_TOKEN = "set HF_TOKEN to a token that may read it"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `sha256` is known for large files."""

    path: str
    bytes: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository at one `commit`; `is_package`: a package of the Python index in that version."""

    repo: str
    commit: str
    files: Mapping[str, HubFile]
    licence: str = ""
    is_package: bool = False


def library() -> Any:  # a module whose HTTP library differs between releases
    """huggingface_hub, which takes 100 ms to import."""
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


def endpoint() -> str:
    """The hub's address without a slash at its end."""
    return (os.environ.get("HF_ENDPOINT") or str(library().constants.ENDPOINT)).strip().rstrip("/")


def describe(repo: str, revision: str) -> HubRepo:
    """What `repo` holds at `revision`. Raises ModelNotFound, DownloadError."""
    hub = library()
    with hub_errors(repo, revision):
        api, timeout = hub.HfApi(endpoint=endpoint()), hub.constants.HF_HUB_ETAG_TIMEOUT
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=timeout)
    files = {}
    for each in info.siblings or ():
        lfs = each.lfs or {}
        files[each.rfilename] = HubFile(each.rfilename, int(lfs.get("size") or each.size or 0), lfs.get("sha256"))
    card = info.card_data.to_dict() if info.card_data else {}
    return HubRepo(repo, str(info.sha), files, str(card.get("license_name") or card.get("license") or ""))


@contextlib.contextmanager
def hub_errors(repo: str, revision: str = "") -> Iterator[None]:
    """Raises what goes wrong on the way to the hub as ModelNotFound or DownloadError that name `repo` and the fix.

    An error of this machine's disk is a StateError.
    """
    at, errors = endpoint(), library().errors
    known: dict[type[Exception], str] = {
        errors.GatedRepoError: f"{repo} at {at} is gated: accept its terms on the hub's page, and {_TOKEN}",
        errors.RepositoryNotFoundError: f"{at} has no model {repo!r} that this user may read: check the spelling, or "
        f"{_TOKEN}",
        errors.RevisionNotFoundError: f"{repo} at {at} has no revision {revision!r}: see its branches on the hub",
        errors.OfflineModeIsEnabled: f"HF_HUB_OFFLINE forbids downloads, so {repo} was not asked for at {at}: unset "
        "it, or give a local file",
    }
    try:
        yield
    except (errors.HTTPError, OSError, ValueError, KeyError, TypeError) as error:  # the last three: no hub's answers
        if isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError):
            raise StateError(f"{repo} cannot be written: {error.strerror}; {DISK_FIX}") from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
        other = (
            f"{repo} could not be fetched from {at} ({reason}): run the same command again to resume, or check "
            "HF_ENDPOINT and HF_TOKEN"
        )
        status = getattr(getattr(error, "response", None), "status_code", 0)
        as_ours = ModelNotFound if status in (401, 403, 404, 410) else DownloadError
        raise as_ours(next((text for kind, text in known.items() if isinstance(error, kind)), other)) from error


# The first that a repository has is taken where none is asked for: 4 bits, then the next larger, then smaller ones.
PREFERRED = (
    *("Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0"),
    *("Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "BF16", "F16", "F32"),
)
# Of a head, which is small: one of 4 bits was accepted for 4% of its tokens where one of 8 bits was for 59%.
HEADS_PREFERRED = tuple(dict.fromkeys(("Q8_0", "BF16", "F16", *PREFERRED)))
ONNX_PREFERRED = ("model", "model_quantized", "model_int8", "model_q4", "model_q4f16", "model_fp16")
ONNX_COMPANIONS = (
    *("config.json", "genai_config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("chat_template.jinja", "special_tokens_map.json"),
)
_QUANT = re.compile(
    r"(?:^|[-_./])((?:UD-)?(?:I?Q\d(?:_[0-9A-Z]+)*|T?Q\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32))(?=[-_.]|$)", re.I
)
_DRAFT = re.compile(r"(?:^|[-_./])draft\w*(?:[-_.]|$)", re.IGNORECASE)
_HEAD = re.compile(r"(?:^|[-_./])(eagle\d?\w*|mtp|dflash\d?|dspark|speculator|assistant)(?:[-_.]|$)", re.IGNORECASE)
NO_MODEL = re.compile(r"mmproj|imatrix|lora|adapter|(?:^|[-_.])vocab", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one model in one quantisation, the one to open first; `model`: its name without both."""

    model: str
    quant: str
    files: tuple[HubFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def engine(self) -> str:
        return "onnx" if self.files[0].path.endswith(".onnx") else "llamacpp"

    @property
    def is_head(self) -> bool:
        return _HEAD.search(self.files[0].path.rpartition("/")[2]) is not None

    @property
    def is_draft(self) -> bool:
        return self.is_head or _DRAFT.search(self.files[0].path.rpartition("/")[2]) is not None


@dataclass(frozen=True, slots=True)
class HubModel:
    """What to fetch of a repository; `others`: quantisations that it has too."""

    target: Group
    draft: Group | None
    others: tuple[str, ...]


def choose(repo: str, files: Mapping[str, HubFile], wanted: str = "") -> HubModel:
    """The model of a repository. `wanted`: a quantisation, or the name of a file; empty: the usual one.

    Raises ModelNotFound, listing what there is, where `wanted` is not there or nothing can be run.
    """
    groups = gguf_groups(files.values()) or _onnx_groups(files)
    if not groups:
        raise _nothing_to_run(repo, files)
    by_file = [group for group in groups if wanted in (group.files[0].path, group.files[0].path.rpartition("/")[2])]
    if by_file:
        return HubModel(by_file[0], None, ())
    targets = [group for group in groups if not group.is_draft] or groups
    drafts = [group for group in groups if group.is_draft and group not in targets]
    if len({group.model for group in targets}) > 1:
        names = ", ".join(sorted(group.files[0].path.rpartition("/")[2] for group in targets))
        raise ModelNotFound(f"{repo} holds several models: name a file, as in {repo}:FILE. It has {names}")
    target = _pick(repo, targets, wanted)
    others = tuple(group.quant for group in targets if group.quant != target.quant)
    return HubModel(target, _best_draft(drafts, target), others)


def _pick(repo: str, groups: Sequence[Group], wanted: str) -> Group:
    by_quant = {group.quant.upper(): group for group in groups}
    if wanted:
        if wanted.upper() in by_quant:
            return by_quant[wanted.upper()]
        known = ", ".join(sorted(group.quant or "one file" for group in groups))
        raise ModelNotFound(f"{repo} has no {wanted}: it has {known}")
    order = ONNX_PREFERRED if groups[0].engine == "onnx" else HEADS_PREFERRED if groups[0].is_head else PREFERRED
    ranks = {quant.upper(): rank for rank, quant in enumerate(order)}
    return min(groups, key=lambda group: (ranks.get(group.quant.upper(), len(order)), group.bytes))


def _best_draft(drafts: Sequence[Group], target: Group) -> Group | None:
    """The smallest draft model of a repository, in the target's quantisation if it has that and is no head."""
    fitting = [group for group in drafts if group.engine == target.engine]
    if not fitting:
        return None
    smallest = min(fitting, key=lambda group: group.bytes).model
    same = [group for group in fitting if group.model == smallest]
    return next((group for group in same if group.quant == target.quant and not group.is_head), _pick("", same, ""))


def head_beside(target: str, sizes: Mapping[str, int]) -> str | None:
    """The head that is named for the GGUF `target`, among the files of a folder and their sizes: mtp-NAME-Q8_0.gguf for
    NAME-Q4_K_M.gguf, as llama.cpp finds it."""
    groups = gguf_groups(HubFile(name, size) for name, size in sizes.items())
    own = next((group for group in groups if any(file.path == target for file in group.files)), None)
    if own is None or own.is_draft:
        return None
    named = [group for group in groups if group.is_head and _HEAD.sub("-", group.model).strip("-_.") == own.model]
    best = _best_draft(named, own)
    return None if best is None else best.files[0].path


def gguf_groups(files: Iterable[HubFile]) -> list[Group]:
    """The complete GGUF models among `files`, by name and quantisation."""
    found: dict[tuple[str, str], list[HubFile]] = {}
    for file in files:
        name = file.path.rpartition("/")[2]
        if not name.endswith(".gguf") or NO_MODEL.search(name):
            continue
        parts = SPLIT_NAME.fullmatch(name)
        stem = parts["stem"] if parts else name.removesuffix(".gguf")
        quant = _QUANT.search(stem) or _QUANT.search(file.path.rpartition("/")[0])
        label = quant[1] if quant else ""
        model = stem.replace(label, "").strip("-_.") if label else stem
        found.setdefault((model, label), []).append(file)
    groups = [Group(m, q, tuple(sorted(parts, key=lambda f: f.path))) for (m, q), parts in found.items()]
    return [group for group in groups if _is_complete(group)]


def _is_complete(group: Group) -> bool:
    """Whether all parts of a split model are there, and nothing beside them."""
    parts = SPLIT_NAME.fullmatch(group.files[0].path.rpartition("/")[2])
    return len(group.files) == (int(parts["count"]) if parts else 1)


def _onnx_groups(files: Mapping[str, HubFile]) -> list[Group]:
    """One group for every graph, with its external weights and the tokenizer beside it or in the root."""
    groups = []
    for path, file in files.items():
        if not path.endswith(".onnx"):
            continue
        folder, _, name = path.rpartition("/")
        prefix = f"{folder}/" if folder else ""
        data = [f for p, f in files.items() if re.fullmatch(re.escape(path) + r"[._]data(?:_\d+)?", p)]
        companions = [files.get(prefix + each) or files.get(each) for each in ONNX_COMPANIONS]
        label = name.removesuffix(".onnx") if folder in ("", "onnx") else path.removesuffix(".onnx")
        groups.append(Group("", label, (file, *data, *(each for each in companions if each))))
    return [group for group in groups if any(f.path.endswith("tokenizer.json") for f in group.files)]


def _nothing_to_run(repo: str, files: Mapping[str, HubFile]) -> ModelFileError:
    if any(path.endswith(".safetensors") for path in files):
        return ModelFileError(f"{repo} holds weights that must be converted first: edgespec export {repo}")
    names = ", ".join(list(files)[:5]) or "nothing"
    return ModelFileError(f"{repo} holds no complete GGUF or ONNX model, only {names}: give another repository")
