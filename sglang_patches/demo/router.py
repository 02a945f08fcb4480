"""`python -m sglang_patches.demo.router`: SGLang's router before whatever instances two names resolve to.

Reads PREFILL and DECODE, the groups' HOST:PORT (a name may have many addresses), BOOTSTRAP_PORT of the prefill instances
and PORT, where it listens on all addresses. An instance that appears is added once it is healthy; one whose address is
gone is taken out. Other words of the command line go to the router.
"""

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

from .processes import Child, ChildDiedError, require_running

POLL_SECONDS = 2.0
FORGET_SECONDS = 120.0  # an instance that the router was told of and still does not list is told again
# An instance that is gone is noticed within seconds; a busy one on a small machine answers its health check late.
ROUTER_FLAGS = (
    *("--health-check-interval-secs", "5", "--health-check-timeout-secs", "20"),
    *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
)


@dataclass(frozen=True)
class Group:
    """Instances of one role, at every address of a name. bootstrap_port: None for decode instances."""

    role: str
    host: str
    port: int
    bootstrap_port: int | None = None

    def urls(self) -> set[str]:
        """Of the addresses that the name has now; none if it has none."""
        try:
            found = socket.getaddrinfo(self.host, self.port, socket.AF_INET, socket.SOCK_STREAM)
        except socket.gaierror:
            return set()
        return {f"http://{address[0]}:{address[1]}" for *_, address in found}


@dataclass
class Membership:
    """Keeps a router's list of workers equal to the groups. router: its base URL."""

    router: str
    groups: list[Group]
    _told: dict[str, float] = field(default_factory=dict)  # URL to when the router was told of it

    def update(self) -> None:
        """One round. Raises requests.RequestException if the router does not answer."""
        listed = requests.get(f"{self.router}/workers", timeout=10).json()["workers"]
        known = {worker["url"].rstrip("/"): worker["id"] for worker in listed}
        wanted = {url: group for group in self.groups for url in group.urls()}
        for url in known.keys() - wanted.keys():
            requests.delete(f"{self.router}/workers/{known[url]}", timeout=10)
            self._told.pop(url, None)
        for url in wanted.keys() - known.keys():
            if self._due(url) and _healthy(url):
                self._add(url, wanted[url])

    def _due(self, url: str) -> bool:
        return time.monotonic() - self._told.get(url, float("-inf")) > FORGET_SECONDS

    def _add(self, url: str, group: Group) -> None:
        worker = {"url": url, "worker_type": group.role}
        if group.bootstrap_port is not None:
            worker["bootstrap_port"] = group.bootstrap_port
        print(f"router: adding {group.role} {url}", file=sys.stderr, flush=True)
        requests.post(f"{self.router}/workers", json=worker, timeout=10)
        self._told[url] = time.monotonic()


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def read_groups(environment: Mapping[str, str]) -> list[Group]:
    """Raises ValueError naming the variable."""
    bootstrap = _port(environment.get("BOOTSTRAP_PORT") or "8998", "BOOTSTRAP_PORT")
    return [
        Group("prefill", *_place(environment, "PREFILL"), bootstrap),
        Group("decode", *_place(environment, "DECODE")),
    ]


def _place(environment: Mapping[str, str], variable: str) -> tuple[str, int]:
    host, _, port = environment.get(variable, "").rpartition(":")
    if not host:
        raise ValueError(f"{variable}={environment.get(variable, '')!r}: give HOST:PORT")
    return host, _port(port, variable)


def _port(text: str, variable: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError(f"{variable}: {text!r} is not a port number, 1 to 65535")
    return int(text)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(0)


def main() -> int:
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        port = _port(os.environ.get("PORT") or "30000", "PORT")
        groups = read_groups(os.environ)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--host", "0.0.0.0", "--port", str(port), *ROUTER_FLAGS, *sys.argv[1:]]
    router = Child("router", command, {}, Path(tempfile.mkdtemp(prefix="specstore-router-")) / "log")
    membership = Membership(f"http://127.0.0.1:{port}", groups)
    try:
        while True:
            require_running([router])
            with contextlib.suppress(requests.RequestException):  # it is starting, or busy: the next round
                membership.update()
            time.sleep(POLL_SECONDS)
    except ChildDiedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        router.stop()


if __name__ == "__main__":
    sys.exit(main())
