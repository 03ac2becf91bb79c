"""A target in a child process: what happens when that process, or the RPC server that it depends on, is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec.contained import Child
from edgespec.engines.llamacpp.remote import RemoteEngine, ask
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import Cancelled, CapabilityError, ConfigError, ModelFileError, Unreachable
from edgespec.types import Batch
from rpc import Server, free_port, needs_rpc, started
from waiting import until

CONTEXT = 400
IDS = list(range(5, 45))


def load(path: Path, *endpoints: str, **options: object) -> RemoteEngine:
    options = {"context_length": CONTEXT, "threads": TEST_THREADS, "reproducible": False} | options
    return RemoteEngine.load(path, endpoints=endpoints, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    needs_rpc()
    with started() as found:
        yield found


def pid_of(engine: RemoteEngine) -> int:
    assert engine._child is not None
    return engine._child._process.pid


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_lost_process_is_an_error_and_its_texts_are_read_again(tiny_path):
    with load(tiny_path, reproducible=True, max_sequences=3) as engine:
        one, other = CachedSequence(engine), CachedSequence(engine, 1)
        expected = one.feed(np.array(IDS, np.int32)).copy()
        other.feed(np.array(IDS[:3], np.int32))
        os.kill(pid_of(engine), signal.SIGKILL)
        with pytest.raises(Unreachable, match="SIGKILL"):
            one.feed(np.array([1, 2, 3], np.int32))
        assert (engine.length(), engine.length(1)) == (0, 0)
        with pytest.raises(Unreachable, match="has to be read again"):  # a pass that was under way for a lost text
            engine.forward(Batch.chain([4], sequence=1))
        assert one.reuse(np.array([*IDS, 5], np.int32)) == 0
        np.testing.assert_array_equal(one.feed(np.array(IDS, np.int32)), expected)
        assert other.reuse(np.array(IDS, np.int32)) == 0
        assert engine.forward(Batch.chain([7], sequence=2)).shape[0] == 1  # it held no text
        engine.load_state(engine.save_state(), 1)
        assert engine.length(1) == len(IDS)


def test_an_interrupt_in_a_call_costs_the_child_and_no_more(tiny_path, monkeypatch):
    with load(tiny_path, reproducible=True) as engine:
        expected = engine.forward(Batch.chain(IDS)).copy()
        first = pid_of(engine)

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Child, "_next", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.forward(Batch.chain(IDS))
        engine.rollback(0)
        np.testing.assert_array_equal(engine.forward(Batch.chain(IDS)), expected)
        until(lambda: not Path(f"/proc/{first}").exists())


def test_errors_of_a_load_keep_their_types(tiny_path, tmp_path):
    with pytest.raises(ConfigError, match="context"):
        load(tiny_path, context_length=1 << 22)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    with pytest.raises(ModelFileError):
        load(broken)


def test_a_child_ends_with_its_parent(tiny_path):
    code = (
        "import sys, os; from pathlib import Path; from edgespec.engines.llamacpp.remote import RemoteEngine\n"
        f"engine = RemoteEngine.load(Path({str(tiny_path)!r}), endpoints=(), reproducible=False, threads=1)\n"
        "print(engine._child._process.pid, flush=True); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    child = int(done.stdout)
    until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2])


def test_a_server_that_is_not_there_is_named():
    port = free_port()
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port} .*refused.*that edgespec rpc-server runs there"):
        ask(f"127.0.0.1:{port}")
    with pytest.raises(Unreachable, match=r"no-such-host.invalid:50052 does not answer"):
        ask("no-such-host.invalid:50052")


@pytest.mark.parametrize(
    ("says", "expected"),
    [(b"", "no answer within 0.3 s"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no RPC server of a matching version")],
)
def test_something_else_that_listens_is_no_server(says, expected):
    def answer() -> None:
        with listener.accept()[0] as connection, suppress(ConnectionError):
            connection.sendall(says)
            while connection.recv(1 << 16):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Unreachable, match=expected):
            ask(f"127.0.0.1:{listener.getsockname()[1]}", 0.3)
        thread.join()


def test_a_build_without_rpc_says_how_to_get_one(tiny_path, monkeypatch):
    from edgespec.engines.llamacpp.library import library

    monkeypatch.setattr(library(), "llama_supports_rpc", lambda: False)
    with pytest.raises(CapabilityError, match=r"DGGML_RPC=ON|--backend rpc"):
        load(tiny_path, "127.0.0.1:50052")


@pytest.mark.quiet
def test_a_server_lost_in_mid_answer_is_an_error_and_the_next_answer_works(target_path, server):
    """The whole way: an answer fails, the model stays usable, and the text is that of before."""
    with started() as other:
        rpc = f"{server.endpoint},{other.endpoint}"
        with edgespec.load(target_path, rpc=rpc, threads=TEST_THREADS, drafter="ngram", reproducible=True) as model:
            assert model.target.facts.device == f"rpc {rpc}"
            expected = model.generate("Once upon a time", options=edgespec.GenerateOptions(max_tokens=24)).token_ids
            with pytest.raises(Unreachable, match="the process with the target ended"):
                for count, _ in enumerate(model.stream("A bus to", options=edgespec.GenerateOptions(max_tokens=300))):
                    if count == 5:
                        other.kill()
            with pytest.raises(Unreachable, match=f"{other.endpoint} .*refused"):
                model.generate("Once upon a time")
            other.start()
            again = model.generate("Once upon a time", options=edgespec.GenerateOptions(max_tokens=24))
            assert again.token_ids == expected


@pytest.mark.quiet
@pytest.mark.skipif(sys.platform == "win32", reason="nothing to freeze a process with")
def test_a_server_that_hangs_does_not_keep_a_cancelled_pass(target_path):
    needs_rpc()
    with started() as server, load(target_path, server.endpoint) as engine:
        engine.forward(Batch.chain(IDS))
        server.freeze()
        threading.Timer(0.3, engine.cancel).start()
        with pytest.raises(Cancelled, match="its process was ended"):
            engine.forward(Batch.chain(IDS))
        engine.rollback(0)
        with pytest.raises(Unreachable, match="no answer within"):
            engine.forward(Batch.chain(IDS))
