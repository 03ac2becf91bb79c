"""`edgespec rpc-server`: what it refuses and what it says. Serving itself is tested with the engines."""

from __future__ import annotations

from functools import partial

import pytest

import command_line
from edgespec.engines.llamacpp import remote
from rpc import free_port

run = partial(command_line.run, "rpc-server")


@pytest.fixture
def served(monkeypatch) -> list[tuple[str, dict[str, object]]]:
    """What would be served, in any build."""
    calls: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(remote, "require_rpc", lambda what: None)
    monkeypatch.setattr(remote, "serve_rpc", lambda endpoint, **options: calls.append((endpoint, options)))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return calls


def test_another_address_than_the_loopback_is_served_with_a_warning(served, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    port = str(free_port())
    alone = run("--port", port, "-t", "3", "--device", "Vulkan0, CPU")
    assert "WARNING" not in alone.stderr and f"--rpc 127.0.0.1:{port}" in alone.stdout
    assert alone.exit_code == 1 and "stopped by itself" in alone.stderr  # it should never return
    result = run("--host", "0.0.0.0", "--port", port, "-t", "3", "--cache")
    assert "WARNING: an RPC server has no password" in result.stderr and f"--rpc ADDRESS:{port}" in result.stdout
    folder = tmp_path / "cache" / "rpc"
    assert folder.is_dir() and served == [
        (f"127.0.0.1:{port}", {"threads": 3, "names": ("Vulkan0", "CPU"), "cache_folder": None}),
        (f"0.0.0.0:{port}", {"threads": 3, "names": (), "cache_folder": folder}),
    ]
