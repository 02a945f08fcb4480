"""Several real services that share the sessions of one client: drained, killed, added."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from datastore_service.client import open_datastore, tokenizer_fingerprint
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening
from tests.integration.datastore.conftest import VOCAB
from tests.support.remembering import Remembering
from tests.support.servers.datastore import DatastoreService
from tests.waiting import eventually

SESSIONS = 12
SECONDS = 60.0  # also the deadline of a step: a busy machine misses none


class Batch:
    """Decodes texts of ten documents of the corpus each side by side, one token a step: the prior alone can draft them."""

    def __init__(self, services: list[DatastoreService], tokenizer, corpus) -> None:
        endpoint = ",".join(service.endpoint for service in services)
        namespace = Namespace("m", tokenizer_fingerprint(tokenizer))
        self.datastore = Remembering(lambda texts: open_datastore(endpoint, namespace, VOCAB, texts=texts))
        self.texts = corpus[1][: 10 * SESSIONS].reshape(SESSIONS, -1).astype(np.int32)
        self.length = 100
        self.datastore.post(
            [
                Entry(f"s{i}", tokens=text[: self.length], opening=Opening(prompt_length=self.length))
                for i, text in enumerate(self.texts)
            ]
        )

    def step(self) -> list[bool]:
        """Which sessions the prior drafted rightly for."""
        at = self.length
        self.length += 1
        entries = [
            Entry(f"s{i}", at, text[at : at + 1], budget=Budget(4)) for i, text in enumerate(self.texts)
        ]
        replies = self.datastore.step(entries, SECONDS)
        return [
            bool(len(r.tree)) and r.tree.sources[0] == Tier.PRIOR and r.tree.tokens[0] == text[at + 1]
            for r, text in zip(replies, self.texts, strict=True)
        ]

    def until_all_are_drafted(self) -> None:
        """And they are from then on."""
        eventually(lambda: all(self.step()), "not all are drafted", SECONDS)
        assert all(all(self.step()) for _ in range(20))


@pytest.fixture
def services(prior, tmp_path):
    flags = ("--prior", prior, "--log-level", "warning", "--grace", 1)
    made = [DatastoreService(tmp_path / f"log{i}", *flags) for i in range(3)]
    for service in made[:2]:
        service.start()
    yield made
    for service in made:
        if service.running:
            service.kill()


@pytest.fixture
def batch(services, tokenizer, corpus):
    """The third service is not there yet."""
    batch = Batch(services, tokenizer, corpus)
    yield batch
    batch.datastore.close()


@pytest.mark.parametrize("how", ["drained", "killed"])
def test_sessions_of_a_service_that_ends_go_on_with_another(services, batch, how):
    batch.until_all_are_drafted()
    if how == "drained":
        services[0].signal(signal.SIGTERM)
        assert services[0].wait(SECONDS) == 0
    else:
        services[0].kill()
    batch.until_all_are_drafted()
    assert not batch.datastore.links[services[0].endpoint].usable


def test_a_service_that_is_added_takes_new_sessions(services, batch, tokenizer):
    batch.until_all_are_drafted()
    services[2].start()
    added = batch.datastore.links[services[2].endpoint]
    eventually(lambda: added.usable, "it is not used", SECONDS)
    posted: list[str] = []
    post, added.post = added.post, lambda entries: (posted.extend(e.session for e in entries), post(entries))
    text = batch.texts[0][:100]
    # So many that the added service, whose port is new each time, gets one of them.
    batch.datastore.post([Entry(f"n{i}", tokens=text, opening=Opening()) for i in range(5 * SESSIONS)])
    assert posted and all(name.startswith("n") for name in posted)
    entries = [Entry(name, 100, batch.texts[0][100:101], budget=Budget(4)) for name in posted]
    assert all(len(reply.tree) for reply in batch.datastore.step(entries, SECONDS))
