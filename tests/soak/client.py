"""A client process: the workers and operators of some tenants."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tests.soak.operator import CALL_SECONDS, Operator
from tests.soak.tenant import Plan, Tenant
from tests.soak.worker import Worker

STOP, VERIFY, END = "stop", "verify", "end"
HANG_SECONDS = 60.0  # a reply that takes longer, stops and restarts of the service included, does not come
WATCH_SECONDS = 1.0
START_SECONDS = 0.05  # between two looks whether every tenant works
MOST_VERIFIED = 4000  # documents of a tenant, each time


@dataclass(frozen=True)
class Report:
    """Of one tenant."""

    tenant: int
    counts: dict[str, int]
    findings: list[str]


def run_tenants(plan: Plan, numbers: Sequence[int], orders: Connection) -> None:
    """Works until told to STOP, then looks everything up each time it is told to VERIFY, until told to END. Sends a report
    once every tenant has stored something, and one after each order."""
    tenants = [Tenant(plan, number) for number in numbers]
    workers = [Worker(tenant, number) for tenant in tenants for number in range(plan.workers)]
    operators = [Operator(tenant) for tenant in tenants]
    for member in (*workers, *operators):
        member.thread.start()
    working = False
    while not orders.poll(WATCH_SECONDS if working else START_SECONDS):
        _watch(workers)
        if not working and all(tenant.counts["closed sessions"] for tenant in tenants):
            orders.send(_reports(tenants))
            working = True
    if orders.recv() != STOP:
        return
    for tenant in tenants:
        tenant.stopping.set()
    _join(workers, operators)
    orders.send(_reports(tenants))
    while orders.recv() == VERIFY:
        for tenant in tenants:
            _verify(tenant)
        orders.send(_reports(tenants))


def _watch(workers: Sequence[Worker]) -> None:
    for worker in workers:
        since = worker.waiting
        if since is not None and time.monotonic() - since > HANG_SECONDS:
            worker.give_up(f"no reply for {HANG_SECONDS:.0f} s")


def _join(workers: Sequence[Worker], operators: Sequence[Operator]) -> None:
    limit = time.monotonic() + CALL_SECONDS
    while any(worker.thread.is_alive() for worker in workers) and time.monotonic() < limit:
        _watch(workers)
        time.sleep(0.05)
    for member in (*workers, *operators):
        member.thread.join(max(0.0, limit - time.monotonic()))


def _verify(tenant: Tenant) -> None:
    worker = Worker(tenant, -1)
    worker.verify(tenant.ledger.sample(MOST_VERIFIED, random.Random(tenant.number)))


def _reports(tenants: Sequence[Tenant]) -> list[Report]:
    return [Report(tenant.number, dict(tenant.counts), list(tenant.findings)) for tenant in tenants]
