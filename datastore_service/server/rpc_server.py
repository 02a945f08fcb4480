"""A gRPC server on an event loop of its own: a call takes a thread while it works, not while it is read or waited for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from datastore_service.endpoint import Endpoint
from datastore_service.server.credentials import server_credentials
from datastore_service.server.reloading import Reloading
from datastore_service.tls import Tls

log = logging.getLogger(__name__)
T = TypeVar("T")
CALL_THREADS = 16  # for calls that are no coroutines: admin calls, warm-ups


class RpcServer:
    """Its methods may be called from any thread but the loop's.

    add_servicers: called with the server, on the loop's thread. interceptors, options: gRPC's.
    """

    def __init__(
        self,
        add_servicers: Callable[[grpc.aio.Server], None],
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, int]],
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specstore-rpc", daemon=True)
        self._thread.start()
        self._calls = ThreadPoolExecutor(CALL_THREADS, "specstore-call")
        self._loop.set_default_executor(self._calls)
        self._server = self.run(self._make(add_servicers, interceptors, options))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns, which runs on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def responds(self, seconds: float) -> bool:
        """Whether the loop does within that time what it is given."""
        done = threading.Event()
        try:
            self._loop.call_soon_threadsafe(done.set)
        except RuntimeError:  # it was closed
            return False
        return done.wait(seconds)

    def start(self, address: Endpoint, tls: Reloading[Tls] | None) -> int:
        """Returns the port, which is not 0. Raises RuntimeError if gRPC cannot listen."""
        return self.run(self._start(address, tls))

    def stop(self, grace: float, timeout: float) -> bool:
        """Takes no further call, cancels those that have not ended after `grace` seconds, and waits until they have; False after `timeout`
        seconds more."""
        stopping = asyncio.run_coroutine_threadsafe(self._stop(grace), self._loop)
        try:
            stopping.result(grace + timeout)
        except TimeoutError:
            return False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._calls.shutdown(wait=False)
        return True

    async def _stop(self, grace: float) -> None:
        """Ends what the server leaves on the loop, too: a call's task that is pending when it is collected is logged as an error, from
        whatever code runs then."""
        await self._server.stop(grace)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(error, Exception):
                log.error("a call failed while the server stopped", exc_info=error)

    async def _make(self, add_servicers, interceptors, options) -> grpc.aio.Server:
        server = grpc.aio.server(self._calls, interceptors=interceptors, options=options)
        add_servicers(server)
        return server

    async def _start(self, address: Endpoint, tls: Reloading[Tls] | None) -> int:
        if tls is None:
            port = self._server.add_insecure_port(address.target)
        else:
            port = self._server.add_secure_port(address.target, server_credentials(tls))
        await self._server.start()
        return port
