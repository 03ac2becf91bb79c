"""Finds the source model of an export: a local folder, or a hub id whose files are fetched into the hub's cache.

Small files (configuration, tokenizer, model card) are fetched first, so that an unsupported architecture or vocabulary
is reported before gigabytes are downloaded. Endpoint: HF_ENDPOINT or huggingface_hub's default; the library also reads
HF_HUB_OFFLINE, HF_TOKEN and HF_HOME.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.config.options import Sampling
from edgespec.config.values import is_number
from edgespec.errors import DownloadError, ModelFileError, ModelNotFound, SamplingError
from edgespec.formats.checkpoint import matching, read_optional_json, weight_names
from edgespec.loading.hub import describe, endpoint, hub_errors, library

SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "README.md", "*.jinja"),
    "model.safetensors.index.json",
)
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A model in Hugging Face format. `folder` contains the small files; the weights only after `fetch`.

    `weights`: size in bytes by file name; `missing`: those not fetched yet; `note`: a remark for the user about where
    the model was found.
    """

    name: str
    folder: Path
    weights: Mapping[str, int]
    missing: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    _fetch: Callable[[Iterable[str]], Path] | None = None

    def fetch(self) -> None:
        """Fetch the weights. Raises ModelNotFound."""
        if self._fetch is not None:
            self._fetch(self.missing)


def find_source(text: str, revision: str | None = None) -> CheckpointSource:
    """The model that `text` names: a folder if it exists, else a hub id at `revision`.

    Raises ModelNotFound (no folder, unknown id, or hub not reachable and no cached copy) and ModelFileError (no
    safetensors weights).
    """
    return source_here(text, revision) or hub_source(text, revision or "main")


def source_here(text: str, revision: str | None = None) -> CheckpointSource | None:
    """The model in the folder `text`; None for a hub id. Raises ModelNotFound, ModelFileError as `find_source`."""
    path = Path(text).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ModelNotFound(f"--revision {revision!r} is only for hub ids, and {text} is a folder: omit it")
        return local_source(path)
    if path.is_file():
        raise ModelFileError(f"{text} is a file: give the folder of a Hugging Face model, a hub id or a .gguf file")
    if not _HUB_ID.fullmatch(text):
        raise ModelNotFound(
            f"no folder {text!r}: give the folder of a Hugging Face model, or a hub id such as ORG/NAME"
        )
    return None


def local_source(folder: Path) -> CheckpointSource:
    """A local folder. Raises ModelFileError if it has no safetensors weights."""
    folder = folder.resolve()
    return CheckpointSource(folder.name, folder, _sizes(folder))


def hub_source(hub_id: str, revision: str) -> CheckpointSource:
    """A model of the hub: fetches its small files, or uses the cached copy if the hub is not reachable."""
    try:
        found = describe(hub_id, revision)
    except DownloadError as error:
        return _cached_source(hub_id, revision, error)
    sizes = {name: file.bytes for name, file in found.files.items()}
    weights = {name: sizes[name] for name in weight_names(f"{hub_id} at {endpoint()}", list(sizes))}
    if "config.json" not in sizes:
        raise ModelFileError(f"{hub_id} at {endpoint()} has no config.json: it is not a transformers model")

    def fetch(names: Iterable[str]) -> Path:
        with hub_errors(hub_id, revision):  # by branch, to be found offline
            load = partial(library().hf_hub_download, hub_id, revision=revision, endpoint=endpoint())
            places = [Path(load(name)) for name in names]
        return places[0].parent

    folder = fetch(sorted(matching(list(sizes), SMALL_FILES)))
    missing = {name: size for name, size in weights.items() if not (folder / name).is_file()}
    return CheckpointSource(hub_id.rpartition("/")[2], folder, weights, missing, "", fetch)


def _cached_source(hub_id: str, revision: str, error: Exception) -> CheckpointSource:
    """The cached copy of a model, used because of `error`. Raises ModelNotFound if there is none."""
    hub = library()
    try:
        folder = Path(hub.snapshot_download(hub_id, revision=revision, local_files_only=True))
        local = _sizes(folder)
    except (hub.errors.LocalEntryNotFoundError, ModelFileError) as problem:
        lacks = "is incomplete" if isinstance(problem, ModelFileError) else f"holds no copy of revision {revision!r}"
        raise ModelNotFound(
            f"{error}. {hub.constants.HF_HUB_CACHE} {lacks}: fetch it once where there is a network (hf download "
            f"{hub_id}), copy that cache here, or give a local folder"
        ) from error
    return CheckpointSource(hub_id.rpartition("/")[2], folder, local, note=f"using the cached copy {folder}: {error}")


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each weight file. Raises ModelFileError if there is none or a shard is missing."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return {name: (folder / name).stat().st_size for name in weight_names(str(folder), names)}


# what a folder says of its model

# In a manifest, and of generation_config.json, where these differ.
SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
THEIR_NAMES = {"repeat_penalty": "repetition_penalty"}


def card_licence(folder: Path) -> str:
    """The licence named in a model card's front matter; empty if there is none."""
    hub = library()
    from yaml import YAMLError  # type: ignore[import-untyped]  # what the library reads cards with

    try:
        card = hub.metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, RecursionError, YAMLError):  # no such file, or none of YAML
        return ""
    found = card.get("license")
    found = found[0] if isinstance(found, list) and found else found
    return str(card.get("license_name") or found or "") if found in (None, "", "other") else str(found)


def recommended_sampling(folder: Path) -> dict[str, float]:
    """Sampling settings of generation_config.json, by their name in `Sampling`; empty if it does not sample."""
    settings, chosen = dict[str, Any](), dict[str, float]()
    with suppress(ModelFileError):
        settings = read_optional_json(folder / "generation_config.json")
    if not settings.get("do_sample"):
        return {}
    for name in SAMPLING_NAMES:
        value = settings.get(THEIR_NAMES.get(name, name))
        with suppress(SamplingError):
            if is_number(value):
                Sampling(**{name: value})  # type: ignore[arg-type]
                chosen[name] = value
    return chosen
