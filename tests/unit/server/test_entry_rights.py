"""Entries of a caller that may draft for a tenant and not publish."""

from types import SimpleNamespace

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Opening, Status
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
    rights, told = guest()
    for _ in range(2):
        entries = [Entry("s", opening=opening), Entry("s", closing=True)]
        opened, closed = rights.permitted(entries, "acme")
        assert opened.opening == Opening(publish=False)
        assert opened.withheld and closed.withheld
    assert told == denials


@pytest.mark.parametrize("closes", ["the publisher", "nobody"])
def test_what_it_writes_in_another_s_session_leaves_no_text(closes):
    """A prefill instance that may publish has opened it, and handed it over."""
    rights, _ = guest()
    engine = Engine(100)

    def step(entry):
        (reply,) = engine.step([entry])
        assert reply.status is Status.OK

    step(Entry("s", 0, ids(1, 2), opening=Opening(prompt_length=2, workspace="w", group="g")))
    (written,) = rights.permitted([Entry("s", 2, ids(3, 4, 5))], "acme")
    step(written)
    (asked,) = rights.permitted([Entry("s", 5, budget=Budget(4))], "acme")
    assert not asked.withheld, "it writes nothing"
    step(Entry("s", 5, ids(6) if closes == "the publisher" else ids(), closing=True))
    assert [engine.stats().tiers[tier].tokens for tier in (Tier.LIVE, Tier.SESSION)] == [0, 0]
    for opening in (Opening(workspace="w"), Opening(group="g"), Opening()):
        (reply,) = engine.step([Entry("q", 0, ids(3, 4), opening=opening, budget=Budget(4))])
        assert reply.tree.tokens.tolist() == []
        engine.step([Entry("q", closing=True, withheld=True)])


def ids(*tokens):
    return np.array(tokens, np.int32)


def guest():
    """The rights of one that may draft and not publish, and what the audit is told."""
    told = []
    caller = SimpleNamespace(
        identity=Identity("engine", {Right.DRAFT: Tenants(["acme"])}),
        denial=lambda right, tenant: f"{right.value} {tenant}",
    )
    call = SimpleNamespace(caller=caller, tenant_refused=lambda denial, tenant: told.append(denial))
    return EntryRights(call), told
