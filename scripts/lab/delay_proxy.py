"""A network with a delay, for measurements on one machine: forwards TCP connections and holds back what passes.

`python scripts/lab/delay_proxy.py --to 127.0.0.1:50052 --port 50152 --round-trip 5`. What one side sends reaches the
other half of the round trip (milliseconds) later, however much it is: a delay, not a limit of bandwidth. It runs until
Ctrl-C. On the side of a receiver a busy machine adds some tenths of a millisecond.
"""

from __future__ import annotations

import argparse
import queue
import socket
import threading
import time
from contextlib import suppress

CHUNK = 1 << 18
Chunks = queue.SimpleQueue[tuple[float, bytes]]


def receive(source: socket.socket, chunks: Chunks, delay_s: float) -> None:
    """Put what arrives into `chunks`, with the time when it may leave; last an empty one."""
    data = b"x"
    while data:
        try:
            data = source.recv(CHUNK)
        except OSError:
            data = b""
        chunks.put((time.monotonic() + delay_s, data))


def send(destination: socket.socket, chunks: Chunks) -> None:
    """Send each chunk at its time, and close after the last."""
    while True:
        due_s, data = chunks.get()
        time.sleep(max(due_s - time.monotonic(), 0.0))
        if not data:
            break
        try:
            destination.sendall(data)
        except OSError:
            break
    with suppress(OSError):
        destination.shutdown(socket.SHUT_RDWR)


def forward(client: socket.socket, to: tuple[str, int], delay_s: float) -> None:
    """Carry one connection, both ways, until one side closes it."""
    with client, socket.create_connection(to) as server:
        threads = []
        for source, destination in ((client, server), (server, client)):
            destination.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            chunks: Chunks = queue.SimpleQueue()
            threads.append(threading.Thread(target=receive, args=(source, chunks, delay_s)))
            threads.append(threading.Thread(target=send, args=(destination, chunks)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def serve(port: int, to: tuple[str, int], round_trip_ms: float) -> None:
    """Forward connections to the loopback's `port`, for ever."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=forward, args=(client, to, round_trip_ms / 2000), daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="where connections go")
    parser.add_argument("--port", type=int, required=True, help="where they come in")
    parser.add_argument(
        "--round-trip", type=float, default=5.0, metavar="MS", help="added delay, both ways together [5]"
    )
    options = parser.parse_args()
    host, _, port = options.to.rpartition(":")
    with suppress(KeyboardInterrupt):
        serve(options.port, (host, int(port)), options.round_trip)


if __name__ == "__main__":
    main()
