"""The quotas of tenants while the service runs: set, kept, and what each tenant has of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from weakref import WeakValueDictionary

from datastore_service.server.refusal import exhausted
from datastore_service.server.tenant_use import TenantUse
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.storage.quota_file import Quota


class Quotas:
    """What is known of each tenant that has a quota, a namespace or a stream; of others nothing is kept, because callers choose names.

    limit: tenants that may have a quota. data: keeps the quotas; None keeps them in memory alone."""

    def __init__(self, limit: int, data: DataDirectory | None) -> None:
        self._limit, self._data = limit, data
        self._lock = threading.Lock()
        self._in_use: WeakValueDictionary[str, TenantUse] = WeakValueDictionary()
        self._bounded: dict[str, TenantUse] = {}
        for tenant, quota in (data.quotas if data else {}).items():
            self._bound(tenant, quota)

    def __iter__(self) -> Iterator[TenantUse]:
        """Gives them in the order of the tenants' names."""
        return iter(sorted(self._in_use.values(), key=lambda use: use.tenant))

    @property
    def bounded(self) -> list[TenantUse]:
        """Those of tenants that have a quota."""
        return list(self._bounded.values())

    def of(self, tenant: str) -> TenantUse:
        """Whoever counts something of the tenant holds on to this object."""
        with self._lock:
            return self._of(tenant)

    def set(self, tenant: str, quota: Quota) -> bool:
        """Replaces a tenant's quota, durably where there is a data directory; returns whether there is one. Raises RefusalError if too
        many tenants have a quota, OSError if it cannot be stored; then nothing changes."""
        with self._lock:
            known = {name: use.quota for name, use in self._bounded.items() if name != tenant}
            if quota.bounds():
                known[tenant] = quota
            if len(known) > self._limit:
                raise exhausted(f"tenant: {self._limit} tenants have a quota, the limit")
            if self._data:
                self._data.keep_quotas(known)
            self._bound(tenant, quota)
        return self._data is not None

    def _of(self, tenant: str) -> TenantUse:
        use = self._in_use.get(tenant)
        if use is None:
            self._in_use[tenant] = use = TenantUse(tenant)
        return use

    def _bound(self, tenant: str, quota: Quota) -> None:
        use = self._of(tenant)
        use.quota = quota
        if quota.bounds():
            self._bounded[tenant] = use
        else:
            self._bounded.pop(tenant, None)
