"""What the target retrieves beside a draft (Eq. 6): continuations of the text, and of the draft's end."""

from datastore_service.protocol.tree import EMPTY_TREE
from datastore_service.protocol.types import Budget
from sglang_patches.drafting.union import Part
from sglang_patches.ledger.usage import DRAFT_MODEL
from sglang_patches.methods.double import Guidance, deepest_path
from tests.unit.drafting.trees import tree_of

NODES = 6
DRAFTED = tree_of([(5, -1, 0.8), (6, 0, 0.6), (7, 1, 0.4)], DRAFT_MODEL)


def test_the_path_to_the_deepest_node():
    branching = tree_of([(5, -1, 0.8), (6, -1, 0.7), (7, 1, 0.6), (8, 0, 0.5), (9, 2, 0.4)])
    assert deepest_path(branching).tolist() == [1, 2, 4]
    assert deepest_path(DRAFTED).tolist() == [0, 1, 2] and deepest_path(EMPTY_TREE).tolist() == []


class Feed:
    """Answers as a datastore does that knows one continuation of the text, and one of the draft."""

    def __init__(self, text, draft):
        self.text, self.draft, self.asked = text, draft, []

    def ask(self, states, budgets, queries):
        self.asked += [[query.tokens.tolist() for query in of] for of in queries]
        return [(self.text, (self.draft,) * len(of)) for of in queries]


def test_the_end_of_the_draft_is_asked_about():
    feed = Feed(tree_of([(9, -1, 0.3)]), tree_of([(1, -1, 0.9)]))
    drafted, missed = Guidance(feed, Budget(NODES)).parts([None, None], [DRAFTED, EMPTY_TREE])
    assert feed.asked == [[[5, 6, 7]], []]
    assert drafted == [Part(feed.text), Part(feed.draft, anchor=2)]
    assert missed == [Part(feed.text)]
