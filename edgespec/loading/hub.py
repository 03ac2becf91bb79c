"""A model hub through huggingface_hub: what a repository holds, where a file is, and its errors as ours.

The library supplies the HTTP client, the token, proxies and addresses. Endpoint: HF_ENDPOINT, else the library's
default; it also reads HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import CapabilityError, ConfigError, DownloadError, ModelNotFound
from edgespec.installation import install_command

REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TRANSIENT = (408, 500, 502, 503, 504)
_ADDRESS = re.compile(r"https?://[^/\s]")
_TOKEN = "set HF_TOKEN to a token that may read it"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `sha256` is known for large files, `blob_id` (git's SHA-1 of a blob) for all."""

    path: str
    bytes: int
    sha256: str | None = None
    blob_id: str | None = None


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository at one `commit`."""

    repo: str
    commit: str
    files: Mapping[str, HubFile]
    licence: str = ""


class Overloaded(Exception):
    """The hub asks to come back later (429). `wait_s`: when, in seconds; None: it does not say."""

    def __init__(self, wait_s: float | None) -> None:
        super().__init__(wait_s)
        self.wait_s = wait_s


def library() -> Any:  # a module whose HTTP library differs between releases
    """huggingface_hub. Raises CapabilityError where it is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ModuleNotFoundError as error:
        raise CapabilityError(
            f"a hub id needs the package huggingface_hub: {install_command()}, or give a file or folder"
        ) from error
    return huggingface_hub


def endpoint() -> str:
    """The hub's address without a slash at its end. Raises ConfigError for an HF_ENDPOINT that is no address."""
    found = (os.environ.get("HF_ENDPOINT") or str(library().constants.ENDPOINT)).strip().rstrip("/")
    if not _ADDRESS.match(found):
        raise ConfigError(
            f"HF_ENDPOINT is {found[:80]!r}, which is not an address: write http:// or https:// and a host"
        )
    return found


def is_offline() -> bool:
    """Whether the user forbids downloads (HF_HUB_OFFLINE)."""
    return bool(library().constants.HF_HUB_OFFLINE)


def describe(repo: str, revision: str) -> HubRepo:
    """What `repo` holds at `revision`. Raises ModelNotFound, DownloadError, Overloaded."""
    hub = library()
    with hub_errors(repo, revision):
        api, timeout = hub.HfApi(endpoint=endpoint()), hub.constants.HF_HUB_ETAG_TIMEOUT
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=timeout)
    files = {}
    for each in info.siblings or ():
        lfs = each.lfs or {}
        files[each.rfilename] = HubFile(
            each.rfilename, int(lfs.get("size") or each.size or 0), lfs.get("sha256"), each.blob_id
        )
    card = info.card_data.to_dict() if info.card_data else {}
    licence = card.get("license_name") or card.get("license") or ""
    return HubRepo(repo, str(info.sha), files, licence if isinstance(licence, str) else ", ".join(map(str, licence)))


def address(repo: HubRepo, path: str) -> str:
    return str(library().hf_hub_url(repo.repo, path, revision=repo.commit, endpoint=endpoint()))


def cached(repo: HubRepo, path: str) -> Path | None:
    """The file in the hub's own cache on this machine, where an earlier download of any program left it."""
    found = library().try_to_load_from_cache(repo.repo, path, revision=repo.commit)
    return Path(found) if isinstance(found, str) else None


@contextlib.contextmanager
def open_stream(url: str, begin: int) -> Iterator[Any]:
    """A response with the contents of `url` from byte `begin`; raises what `hub_errors` translates."""
    hub = library()
    headers = hub.utils.build_hf_headers() | {"Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    timeout = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    with hub.utils.get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
        if response.status_code != 416:  # what is there already is not the beginning of this file
            if response.status_code >= 400:
                response.read()
            hub.utils.hf_raise_for_status(response)
        yield response


@contextlib.contextmanager
def hub_errors(repo: str, revision: str = "") -> Iterator[None]:
    """Raises what the hub answers as ModelNotFound, DownloadError or Overloaded that name `repo` and the fix.

    ConnectionError stands for a failure that may pass: no network, a connection that broke, an overloaded server.
    """
    hub = library()
    at = endpoint()
    try:
        yield
    except hub.errors.GatedRepoError as error:
        raise ModelNotFound(f"{repo} at {at} is gated: accept its terms on the hub's page, and {_TOKEN}") from error
    except hub.errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{at} has no model {repo!r} that this user may read: check the spelling, or {_TOKEN}"
        ) from error
    except hub.errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repo} at {at} has no revision {revision!r}: see its branches on the hub") from error
    except hub.errors.EntryNotFoundError as error:
        raise ModelNotFound(f"{repo} at {at} no longer has a file it listed: run the same command again") from error
    except hub.errors.OfflineModeIsEnabled as error:
        raise DownloadError(
            f"{repo} is not on this machine and HF_HUB_OFFLINE forbids downloads: unset it, or give a local file"
        ) from error
    except hub.errors.HfHubHTTPError as error:
        raise _refusal(error, repo, at) from error
    except _transport_errors(hub) as error:
        raise ConnectionError(f"{at}: {reason_of(error)}") from error
    except hub.errors.HFValidationError as error:
        raise ModelNotFound(f"{repo!r} is not a valid repository name ({reason_of(error)}): give ORG/NAME") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DownloadError(
            f"{at} does not respond like a model hub ({reason_of(error)}): check HF_ENDPOINT, and whether this "
            "network requires a login"
        ) from error


def _refusal(error: Any, repo: str, at: str) -> Exception:
    status = error.response.status_code
    if status == 429:
        after = error.response.headers.get("Retry-After", "")
        return Overloaded(float(after) if after.isdigit() else None)
    if status in TRANSIENT:
        return ConnectionError(f"{at} answers with status {status}")
    if status in (401, 403):
        return ModelNotFound(f"{at} refuses {repo} (status {status}): {_TOKEN}, or unset one that has expired")
    if status in (404, 410):
        return ModelNotFound(f"{at} does not have what is wanted of {repo} (status {status}): check name and revision")
    return DownloadError(f"{at} refuses {repo} ({reason_of(error)}): run the same command again later")


def _transport_errors(hub: Any) -> tuple[type[Exception], ...]:
    """What the HTTP library raises; its class differs between releases of huggingface_hub."""
    http_error: type[Exception] = getattr(hub.errors, "HTTPError", OSError)
    return http_error, ConnectionError


def reason_of(error: Exception) -> str:
    """What an exception says, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]
