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


def test_it_serves_the_loopback_without_a_warning(served):
    port = str(free_port())
    result = run("--port", port, "-t", "3", "--device", "Vulkan0, CPU")
    assert served == [(f"127.0.0.1:{port}", {"threads": 3, "names": ("Vulkan0", "CPU"), "cache_folder": None})]
    assert f"--rpc 127.0.0.1:{port}" in result.stdout
    assert "WARNING" not in result.stderr
    assert result.exit_code == 1 and "stopped by itself" in result.stderr  # it should never return


def test_another_address_is_served_with_a_warning(served, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    port = str(free_port())
    result = run("--host", "0.0.0.0", "--port", port, "--cache")
    assert "WARNING: an RPC server has no password" in result.stderr
    assert f"--rpc ADDRESS:{port}" in result.stdout
    assert served[0][1]["cache_folder"] == tmp_path / "cache" / "rpc"
    assert (tmp_path / "cache" / "rpc").is_dir()
