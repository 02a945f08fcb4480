"""Entries of a caller that may draft for a tenant and not publish."""

from types import SimpleNamespace

import pytest

from datastore_service.protocol.types import Entry, Opening
from datastore_service.server.entry_rights import EntryRights
from datastore_service.server.identities import Identity, Right, Tenants


@pytest.mark.parametrize(
    ("opening", "denials"),
    [
        (Opening(publish=False, workspace="project"), ["publish acme"]),
        (Opening(publish=False, group="prompt 7"), ["publish acme"]),
        (Opening(publish=False, epoch=3), ["publish acme"]),
        (Opening(publish=True), ["publish acme"]),
        (Opening(publish=False), []),
    ],
    ids=["a workspace", "a group", "an epoch", "the live tier", "nothing"],
)
def test_its_sessions_leave_text_nowhere(opening, denials):
    told = []
    caller = SimpleNamespace(
        identity=Identity("engine", {Right.DRAFT: Tenants(["acme"])}),
        denial=lambda right, tenant: f"{right.value} {tenant}",
    )
    call = SimpleNamespace(caller=caller, tenant_refused=lambda denial, tenant: told.append(denial))
    rights = EntryRights(call)
    for _ in range(2):
        entries = [Entry("s", opening=opening), Entry("s", closing=True)]
        opened, closed = rights.permitted(entries, "acme")
        assert opened.opening == Opening(publish=False)
        assert opened.withheld and closed.withheld
    assert told == denials
