"""Runs clients and service, breaks the service at random times, and judges the end."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console

from datastore_service.protocol.tree import Tier
from datastore_service.storage.errors import StorageError
from datastore_service.storage.segment_file import SUFFIX, SegmentFile
from tests.soak.client import END, STOP, VERIFY, Report, run_tenants
from tests.soak.service import ServiceError, ServiceProcess
from tests.soak.tenant import Plan
from tests.soak.texts import IDS

PROCESSES, TENANTS = 3, 2  # client processes, and tenants of each
WORKERS, SESSIONS = 2, 4  # of a tenant, and of a worker
GRACE = 2.0
BETWEEN = (2.0, 12.0)  # seconds between two disturbances
PAUSE = (0.05, 2.0)
DOWN = (0.0, 1.0)  # seconds from an end to the next start
SETTLE_SECONDS = 30.0
REPORT_SECONDS = 600.0
LIVE_TOKENS = 1 << 24  # the service's default
# Resident bytes that are allowed: what the process has at its start, scratch memory of its threads, and for each token
# the largest of what a session (90 bytes), a fresh text and a merge take for it.
SPARE, PER_TOKEN = 384 << 20, 120


class ClientError(Exception):
    """A client process is of no more use."""


class Client:
    """A client process and the pipe to it."""

    def __init__(self, plan: Plan, tenants: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders: Connection
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=run_tenants, args=(plan, tenants, theirs), daemon=True)
        self._process.start()

    def tell(self, order: str) -> None:
        self._orders.send(order)

    def report(self) -> list[Report]:
        """Raises ClientError if none comes."""
        try:
            if self._orders.poll(REPORT_SECONDS):
                return self._orders.recv()
        except EOFError:
            raise ClientError("a client process has died; its traceback is above") from None
        raise ClientError(f"a client process has not reported for {REPORT_SECONDS:.0f} s")

    def end(self) -> None:
        with contextlib.suppress(OSError):  # it has died
            self.tell(END)
        self._process.join(10)
        self._process.kill()


def disturb(
    service: ServiceProcess, seconds: float, between: tuple[float, float], rng: random.Random
) -> Counter[str]:
    """Kills, stops and restarts until the time is over. Raises ServiceError if the service ends by itself."""
    done: Counter[str] = Counter()
    until = time.monotonic() + seconds
    while (wait := min(rng.uniform(*between), until - time.monotonic())) > 0:
        time.sleep(wait)
        if not service.running:
            raise ServiceError(f"the service died: {service.log.read_text()[-2000:]}")
        how = rng.choices(("kill", "pause", "terminate"), (4, 4, 1))[0]
        if how == "pause":
            service.pause_for(rng.uniform(*PAUSE))
        else:
            service.kill() if how == "kill" else service.terminate()
            time.sleep(rng.uniform(*DOWN))
            service.start()
        done[how] += 1
    return done


def check_rest(service: ServiceProcess, first_bytes: int, first_descriptors: int) -> list[str]:
    """After the last client has left and the grace has passed."""
    limit = time.monotonic() + SETTLE_SECONDS
    stats = service.stats()
    while (stats.streams or any(n.sessions for n in stats.namespaces)) and time.monotonic() < limit:
        time.sleep(0.2)
        stats = service.stats()
    found = []
    if stats.streams or any(n.sessions for n in stats.namespaces):
        found.append(f"left: {stats.streams} streams, {sum(n.sessions for n in stats.namespaces)} sessions")
    tiers = [tier for n in stats.namespaces for tier in n.tiers]
    allowed = first_bytes + SPARE + PER_TOKEN * sum(tier.tokens for tier in tiers)
    if service.peak > allowed:
        found.append(f"memory: {service.peak >> 20} MiB resident, {allowed >> 20} MiB allowed")
    segments = sum(tier.segments for tier in tiers if tier.tier == Tier.LIVE)
    descriptors = first_descriptors + 64 + 8 * segments
    if service.descriptors > descriptors:
        found.append(f"descriptors: {service.descriptors} open, {descriptors} allowed")
    return found


def check_files(data: Path) -> tuple[int, list[str]]:
    """How many segment files there are, and what is wrong with them."""
    paths, found = sorted(data.rglob(f"*{SUFFIX}")), []
    for path in paths:
        try:
            file = SegmentFile(path)
            file.verify()
            file.segment.check_integrity()
        except (StorageError, ValueError) as error:
            found.append(f"{path.name}: {error}")
    return len(paths), found


def soak(minutes: float, seed: int, folder: Path, between: tuple[float, float] = BETWEEN) -> dict:
    """One run; its summary, with everything found wrong under `violations`. between: seconds from one disturbance to the
    next, at least and at most."""
    token, tenants = secrets.token_hex(16), PROCESSES * TENANTS
    service = ServiceProcess(folder, token, "--vocab-size", tenants * IDS, "--grace", GRACE)
    service.start()
    first_bytes, first_descriptors = service.nbytes, service.descriptors
    plan = Plan(service.endpoint, token, seed, WORKERS, SESSIONS, LIVE_TOKENS // 2, service.stops)
    clients = [Client(plan, range(first, first + TENANTS)) for first in range(0, tenants, TENANTS)]
    violations: list[str] = []
    disturbances: Counter[str] = Counter()
    try:
        for client in clients:
            client.report()  # it works
        disturbances = disturb(service, 60 * minutes, between, random.Random(seed))
        _tell(clients, STOP)
        violations += check_rest(service, first_bytes, first_descriptors)
        for end in (service.kill, service.terminate):
            end()
            service.start()
            reports = _tell(clients, VERIFY)
        violations += check_rest(service, first_bytes, first_descriptors)
        service.terminate()
        violations += [finding for report in reports for finding in report.findings]
    except (ServiceError, ClientError) as error:
        reports = []
        violations.append(str(error))
    finally:
        for client in clients:
            client.end()
        if service.running:
            service.kill()
    segments, damaged = check_files(service.data)
    violations += damaged + [f"log: {traceback}" for traceback in service.tracebacks()]
    counts = sum((Counter(report.counts) for report in reports), Counter())
    return {
        "seed": seed, "minutes": minutes, "starts": service.starts, "peak_mib": service.peak >> 20,
        "segment_files": segments, "disturbances": dict(disturbances), "counts": dict(sorted(counts.items())),
        "violations": violations,
    }  # fmt: skip


def _tell(clients: Sequence[Client], order: str) -> list[Report]:
    for client in clients:
        client.tell(order)
    return [report for client in clients for report in client.report()]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="The datastore under load, kills and stops."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="of texts, sessions and disturbances; a new one if left out")
    parser.add_argument("--keep", type=Path, help="folder for data and log, which must be new; kept")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if anything was wrong."""
    given = parse(argv)
    seed = given.seed if given.seed is not None else secrets.randbelow(1 << 31)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=not given.keep)
    try:
        summary = soak(given.minutes, seed, folder)
    finally:
        if not given.keep:
            shutil.rmtree(folder)
    show(summary)
    return 1 if summary["violations"] else 0


def show(summary: dict) -> None:
    errors = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    for violation in summary["violations"]:
        errors.print(violation)
    counts, disturbances = Counter(summary["counts"]), summary["disturbances"]
    print(
        f"soak: seed {summary['seed']}, {summary['minutes']:g} min, {summary['starts']} starts "
        f"({', '.join(f'{number} {how}' for how, number in sorted(disturbances.items()))}), "
        f"{counts['messages']:,} messages, {counts['entries']:,} entries, {counts['closed sessions']:,} sessions, "
        f"{counts['found']:,} of {counts['found'] + counts['gone'] + counts['unsure']:,} look-ups had to find, "
        f"{counts['admin calls']:,} admin calls, {summary['segment_files']} segment files, "
        f"peak {summary['peak_mib']:,} MiB: "
        + (f"{len(summary['violations'])} VIOLATIONS" if summary["violations"] else "all was right"),
        file=sys.stdout,
    )
