"""A trie of what may follow a session's last committed token, as the worker and the draft side both keep it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

ROOT = 0  # of an epoch's trie, before it advances
MOST_NODES = 1 << 13  # of a session's trie in the worker; a draft side that is sound has some hundred


class Trie:
    """Nodes keep their numbers when the trie advances. The root of a new epoch is node 0. length: committed tokens.
    turn: of the epoch's next growth.

    The draft side's nodes have positive numbers, those that the worker adds (`graft`) negative ones. Both may give the same
    continuation a number: the one that came first stays, the other becomes its alias.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        # Never given twice: what an epoch keeps of the one before has its old numbers.
        self.next_node = ROOT + 1
        self._next_graft = ROOT - 1
        self.begin_epoch(1)

    def begin_epoch(self, epoch: int) -> None:
        """An empty trie. The worker numbers the epochs, the draft side takes its numbers."""
        self.epoch = epoch
        self.turn = 0
        self.root = ROOT
        self._aliases: dict[int, int] = {}
        self._parents: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._probabilities: dict[int, float] = {}
        self._children: dict[int, dict[int, int]] = {ROOT: {}}  # of a node, by token

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def full(self) -> bool:
        """Whether it has as many numbers as the worker allows."""
        return len(self._tokens) + len(self._aliases) >= MOST_NODES

    def child(self, node: int, token: int) -> int | None:
        return self._children[node].get(token)

    def children(self, node: int) -> Iterator[tuple[int, int, float]]:
        """Node, token and probability of each."""
        for token, child in self._children[node].items():
            yield child, token, self._probabilities[child]

    def __contains__(self, node: int) -> bool:
        return self._aliases.get(node, node) in self._children

    def is_free(self, node: int, parent: int, token: int) -> bool:
        """Whether this token below this node may have the number: no other node has it. Two nodes of one number would make a circle
        of parents."""
        if node in self:
            return self.child(self.resolve(parent), token) == self.resolve(node)
        return node != ROOT

    def resolve(self, node: int) -> int:
        """The node that the number stands for."""
        return self._aliases.get(node, node)

    def parent(self, node: int) -> int:
        """The parent of a node below the root."""
        return self._parents[node]

    def token(self, node: int) -> int:
        """The token of a node below the root."""
        return self._tokens[node]

    def probability(self, node: int) -> float:
        """The probability of a node below the root, after its parent."""
        return self._probabilities[node]

    def path(self, node: int) -> list[int]:
        """The nodes from below the root down to this one."""
        nodes = []
        while node != self.root:
            nodes.append(node)
            node = self._parents[node]
        return nodes[::-1]

    def add(self, node: int, parent: int, token: int, probability: float) -> int:
        """Returns the node's number: a sibling with the same token stays as it is, and a replay changes nothing. Raises KeyError if
        the parent is gone."""
        if node >= self.next_node:
            self.next_node = node + 1
        parent = self._aliases.get(parent, parent)
        siblings = self._children[parent]
        there = siblings.get(token)
        if there is not None:
            if there != node:
                self._aliases[node] = there
            return there
        siblings[token] = node
        self._children[node] = {}
        self._parents[node] = parent
        self._tokens[node] = token
        self._probabilities[node] = probability
        return node

    def weigh(self, node: int, probability: float) -> None:
        """Sets the probability of a node below the root, after its parent."""
        self._probabilities[node] = probability

    def remove(self, nodes: Iterable[int]) -> None:
        """Takes out nodes below the root. What is below them must be among them."""
        for node in nodes:
            parent, token = self._parents.pop(node), self._tokens.pop(node)
            del self._probabilities[node], self._children[node]
            if parent in self._children:
                del self._children[parent][token]

    def graft(self, parent: int, token: int, probability: float) -> int:
        """Adds a node of the worker's; returns its number."""
        node = self.add(self._next_graft, parent, token, probability)
        self._next_graft -= 1
        return node

    def follow(self, tokens: list[int]) -> list[int]:
        """The nodes that carry the tokens, from below the root on, as far as the trie has them."""
        path = [self.root]
        for token in tokens:
            node = self.child(path[-1], token)
            if node is None:
                break
            path.append(node)
        return path[1:]

    def advance(self, path: list[int], count: int) -> bool:
        """Moves on by `count` committed tokens, whose nodes are `path` (from `follow`); whether the trie had them all. If not, a new epoch
        begins."""
        self.length += count
        if len(path) < count:
            self.begin_epoch(self.epoch + 1)
            return False
        self._keep(path[-1] if path else self.root)
        return True

    def restart(self, epoch: int) -> None:
        """A new epoch with the same nodes: the root is node 0 again, those below keep their numbers."""
        self.epoch = epoch
        self.turn = 0
        if self.root != ROOT:
            children = self._children[ROOT] = self._children.pop(self.root)
            self._parents |= dict.fromkeys(children.values(), ROOT)
            self.root = ROOT
        self._aliases.clear()

    def _keep(self, root: int) -> None:
        """The subtree alone."""
        kept, waiting = [], [root]
        while waiting:
            node = waiting.pop()
            kept.append(node)
            waiting += self._children[node].values()
        self.root = root
        self._children = {node: self._children[node] for node in kept}
        below = kept[1:]
        self._parents = {node: self._parents[node] for node in below}
        self._tokens = {node: self._tokens[node] for node in below}
        self._aliases = {node: there for node, there in self._aliases.items() if there in self._children}
        self._probabilities = {node: self._probabilities[node] for node in below}
