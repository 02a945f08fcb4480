"""`python -m sglang_patches.launch.router`: SGLang's router in front of prefill and decode instances, any of which may die.

Reads PREFILL and DECODE, lists of HOST:PORT separated by commas; a prefill instance may be HOST:PORT:BOOTSTRAP_PORT (default
8998). A host name may have several addresses. The router listens at PORT on all addresses. An instance that appears is added
once it is healthy. An instance whose address is gone is removed. Other arguments go to the router.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import requests

from .halves import proxy
from .processes import PROXIES, Child, ChildDiedError, require_running
from .serve import sglang_flags

BOOTSTRAP_PORT = "8998"  # SGLang's own default
POLL_SECONDS = 2.0
FORGET_SECONDS = (
    120.0  # if the router does not list an instance this long after it was added, it is added again
)
ROUTER_FLAGS = (
    # The router notices within three seconds that an instance is gone or back. A busy instance on a small machine answers its
    # health check late.
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "10"),
    *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
    # Until then the router still chooses a dead instance, so its attempts last four seconds. With round robin the next attempt goes
    # to another decode instance. The other policies prefer an idle instance, and a dead one is idle.
    *("--retry-max-retries", "5", "--retry-initial-backoff-ms", "500", "--decode-policy", "round_robin"),
    # The router's circuit breaker counts the failure of one half against both: it would shut out healthy instances.
    "--disable-circuit-breaker",
    *("--shutdown-grace-period-secs", "5"),
)


@dataclass(frozen=True)
class Group:
    """Instances of one role, at every address of a name. bootstrap_port: None for decode instances."""

    role: str
    host: str
    port: int
    bootstrap_port: int | None = None

    def urls(self) -> set[str]:
        """One URL per address that the name has now."""
        try:
            found = socket.getaddrinfo(self.host, self.port, socket.AF_INET, socket.SOCK_STREAM)
        except socket.gaierror:
            return set()
        addresses = {str(address[0]) for *_, address in found}
        return {f"http://{address}:{self.port}" for address in addresses}


@dataclass
class Membership:
    """Keeps a router's list of workers equal to the groups. router: its base URL."""

    router: str
    groups: list[Group]
    _told: dict[str, float] = field(default_factory=dict)  # URL to when the router was told of it

    def update(self) -> None:
        """One round. Raises requests.RequestException if the router does not answer."""
        listed = requests.get(f"{self.router}/workers", proxies=PROXIES, timeout=10).json()["workers"]
        known = {worker["url"].rstrip("/"): worker["id"] for worker in listed}
        wanted = {url: group for group in self.groups for url in group.urls()}
        for url in known.keys() - wanted.keys():
            requests.delete(f"{self.router}/workers/{known[url]}", proxies=PROXIES, timeout=10)
            self._told.pop(url, None)
        for url in wanted.keys() - known.keys():
            if self._due(url) and _healthy(url):
                self._add(url, wanted[url])

    def _due(self, url: str) -> bool:
        return time.monotonic() - self._told.get(url, float("-inf")) > FORGET_SECONDS

    def _add(self, url: str, group: Group) -> None:
        worker: dict[str, str | int] = {"url": url, "worker_type": group.role}
        if group.bootstrap_port is not None:
            worker["bootstrap_port"] = group.bootstrap_port
        print(f"router: adding {group.role} {url}", file=sys.stderr, flush=True)
        requests.post(f"{self.router}/workers", json=worker, proxies=PROXIES, timeout=10)
        self._told[url] = time.monotonic()


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", proxies=PROXIES, timeout=5).status_code == 200
    except requests.RequestException:
        return False


def read_groups(environment: Mapping[str, str]) -> list[Group]:
    """Raises ValueError naming the variable."""
    return [
        *(_prefill(place) for place in _places(environment, "PREFILL")),
        *(Group("decode", *_place(place, "DECODE")) for place in _places(environment, "DECODE")),
    ]


def _places(environment: Mapping[str, str], variable: str) -> list[str]:
    return environment.get(variable, "").split(",")


def _prefill(place: str) -> Group:
    if place.count(":") < 2:
        place = f"{place}:{BOOTSTRAP_PORT}"
    meeting, _, bootstrap = place.rpartition(":")
    return Group("prefill", *_place(meeting, "PREFILL"), _port(bootstrap, "PREFILL"))


def _place(place: str, variable: str) -> tuple[str, int]:
    host, _, port = place.partition(":")
    if not host:
        raise ValueError(f"{variable}: {place!r} is not HOST:PORT")
    return host, _port(port, variable)


def _port(text: str, variable: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError(f"{variable}: {text!r} is not a port number, 1 to 65535")
    return int(text)


async def serve(port: int, groups: list[Group], words: list[str]) -> None:
    """Until it is cancelled. Raises ChildDiedError if the router ends."""
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--host", "0.0.0.0", "--port", str(port), *ROUTER_FLAGS, *words]
    log = Path(tempfile.mkdtemp(prefix="specstore-router-")) / "log"
    membership = Membership(f"http://127.0.0.1:{port}", groups)
    async with proxy() as address:
        way = {"http_proxy": address, "HTTP_PROXY": address, "no_proxy": "", "NO_PROXY": ""}
        router = Child("router", command, way, log, own_group=False)
        try:
            while True:
                require_running([router])
                with contextlib.suppress(
                    requests.RequestException
                ):  # it is starting or busy: the next round tries again
                    await asyncio.to_thread(membership.update)
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await asyncio.to_thread(router.stop)


async def _serve_until_stopped(port: int, groups: list[Group], words: list[str]) -> None:
    serving = asyncio.create_task(serve(port, groups, words))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def main() -> int:
    words = sglang_flags(sys.argv[1:])
    try:
        port = _port(os.environ.get("PORT") or "30000", "PORT")
        asyncio.run(_serve_until_stopped(port, read_groups(os.environ), words))
    except (ValueError, ChildDiedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
