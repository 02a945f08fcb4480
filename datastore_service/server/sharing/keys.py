"""The keys of a namespace on the server. All of a tenant's begin alike, so one pattern of an access control list permits them."""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple
from urllib.parse import quote

from datastore_service.protocol.types import Namespace

VERSION = 1


class Keys(NamedTuple):
    """The keys of one namespace.

    texts: the stream. sent: by service, the number of the newest output that it has added; also how far the stream was cut. lease: how
    the keys begin that say which process speaks for a service. namespaces: the set of the tenant's streams."""

    texts: str
    sent: str
    lease: str
    namespaces: str


def keys_of(namespace: Namespace) -> Keys:
    """Namespaces of other models or tokenizers have other streams."""
    names = json.dumps([namespace.model, namespace.tokenizer])
    digest = hashlib.sha256(names.encode(errors="surrogatepass")).hexdigest()[:32]
    return keys_named(namespace.tenant, digest)


def keys_named(tenant: str, digest: str) -> Keys:
    """The keys of a tenant's namespace. digest: the namespace's, a member of the set."""
    prefix = tenant_prefix(tenant)
    return Keys(
        f"{prefix}texts:{digest}", f"{prefix}sent:{digest}", f"{prefix}lease:{digest}:", f"{prefix}namespaces"
    )


def digest_in(keys: Keys) -> str:
    return keys.texts.rpartition(":")[2]


def tenant_prefix(tenant: str) -> str:
    """What every key of a tenant's begins with. The name is percent-encoded, so that it holds nothing that a pattern takes for more than
    itself. The braces keep a tenant's keys in one slot of a cluster."""
    return f"specstore:{VERSION}:{{tenant={quote(tenant, safe='', errors='surrogatepass')}}}:"
