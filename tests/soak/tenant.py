"""A tenant of the soak: its texts, its ledger and its findings, shared by its threads."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized

import numpy as np

from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Budget, Entry, Opening
from proto_gen.specstore.v1 import drafting_pb2
from tests.soak.ledger import Ledger
from tests.soak.texts import Document, Texts

FINGERPRINT = "5" * 64
PROBE_BUDGET = Budget(32, 8, 4)
MOST_FINDINGS = 20
# A channel of its own, which does not wait longer with each failed attempt of another.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(frozen=True)
class Plan:
    """Of a run. bound: see Ledger. stops: the service's."""

    endpoint: str
    token: str
    seed: int
    workers: int  # of a tenant
    sessions: int  # of a worker
    bound: int
    stops: Synchronized


class Tenant:
    """keeps: whether nobody wipes this tenant's text."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan, self.number = plan, number
        self.keeps = number % 2 == 0
        self.texts = Texts(plan.seed, number)
        self.ledger = Ledger(plan.bound)
        self.namespace = drafting_pb2.Namespace(model="m", tokenizer=FINGERPRINT, tenant=f"tenant {number}")
        self.stopping = threading.Event()
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []
        self._numbers = itertools.count()
        self._pairs: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def write(self) -> Document:
        """The next document, which is about to be sent."""
        with self._lock:
            document = self.texts.document(next(self._numbers))
            tokens = document.tokens.tolist()
            self._pairs.update(itertools.pairwise(tokens))
        self.ledger.sent(len(tokens) + 1)
        return document

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.counts[what] += number

    def find(self, what: str) -> None:
        """Reports what must not be."""
        with self._lock:
            self.counts["violations"] += 1
            if len(self.findings) < MOST_FINDINGS:
                self.findings.append(f"tenant {self.number}: {what}")

    def may_be_cancelled(self, stops: int) -> bool:
        """Whether a call may be that began at so many stops: a service that is told to stop cancels what it has not answered after ten
        seconds."""
        return stops % 2 == 1 or self.plan.stops.value != stops

    def check_tree(self, tree: DraftTree, last: int, budget: Budget, what: str) -> None:
        """last: the context's last token."""
        try:
            tree.check_integrity(budget.nodes, budget.depth, budget.children)
        except ValueError as error:
            self.find(f"{what}: {error}")
            return
        if not self.texts.owns(tree.tokens):
            self.find(f"{what}: drafted another tenant's tokens {tree.tokens.tolist()}")
        before = np.where(tree.parents < 0, last, tree.tokens[tree.parents]).tolist()
        unwritten = set(zip(before, tree.tokens.tolist(), strict=True)) - self._pairs
        if unwritten:
            self.find(f"{what}: drafted what stands in no text: {sorted(unwritten)}")

    def check_probe(self, document: Document, tree: DraftTree, asked: float) -> None:
        """Of a draft for the document's own context, which was asked for at `asked`."""
        what = f"document {document.number}"
        self.check_tree(tree, int(document.context[-1]), PROBE_BUDGET, what)
        expected, depth = self.ledger.found(document.number, asked), followed(tree, document.continuation)
        self.count({True: "found", False: "gone", None: "unsure"}[expected])
        if expected is True and depth == 0:
            self.find(f"{what}: was acknowledged and is lost; {self.ledger.history(document.number)}")
        if expected is False and depth == len(document.continuation):
            history = self.ledger.history(document.number)
            self.find(f"{what}: was flushed, dropped or withheld and is drafted; {history}")

    def check_recall(self, document: Document, tree: DraftTree, conversation: str) -> None:
        """Of a draft in the conversation that the document was written in."""
        self.check_tree(tree, int(document.context[-1]), PROBE_BUDGET, conversation)
        self.count("recalled")
        if followed(tree, document.continuation) == 0:
            self.find(f"{conversation}: the conversation does not remember its text")


def probe(document: Document, name: str, conversation: str = "") -> Entry:
    """A session that only asks what follows the document's signature."""
    opening = Opening(conversation, publish=False)
    return Entry(name, 0, document.context, budget=PROBE_BUDGET, opening=opening, closing=True)


def followed(tree: DraftTree, continuation: list[int]) -> int:
    """How many of these tokens the tree has one after the other, from its root."""
    node = -1
    for depth, token in enumerate(continuation):
        found = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
        if len(found) == 0:
            return depth
        node = int(found[0])
    return len(continuation)
