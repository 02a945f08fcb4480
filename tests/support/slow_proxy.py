"""A proxy that makes a service slow."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class SlowProxy:
    """Forwards TCP connections to a port; each chunk waits `delay` seconds."""

    def __init__(self) -> None:
        self.delay = 0.0
        self._target: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def redirect(self, target: int) -> None:
        """New connections go to this port of the machine."""
        self._target = target

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target or 0))
            except OSError:  # nobody there: the client sees a closed connection
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                time.sleep(self.delay)
                sink.sendall(chunk)
        for end in (source, sink):  # shutdown, not close: it wakes the thread that reads the other direction
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
