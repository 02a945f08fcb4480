"""What is learned from one tenant's requests, apart from what is learned from another's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

# Most servers run fewer requests at once: there no running request's tenant is forgotten.
MOST_TENANTS = 1024

Learned = TypeVar("Learned")


def per_tenant(make: Callable[[], Learned]) -> Callable[[str], Learned]:
    """The tenant's own, made at its first use. Of more than MOST_TENANTS the one used least recently is forgotten: names come from
    requests, so there is no end of them."""
    return functools.lru_cache(MOST_TENANTS)(lambda tenant: make())
