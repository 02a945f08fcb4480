"""Proposes what may follow a node at no cost to the draft model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from datastore_service.protocol.tree import DraftTree
from sglang_patches.drafting.draft import Draft
from sglang_patches.drafting.model import Row


class Retriever(ABC):
    """The draft model checks a proposal in the forward that runs the node: a retrieval forward (DOUBLE, section 2.2)."""

    @abstractmethod
    def phrases(self, rows: Sequence[Row], nodes: int) -> list[DraftTree]:
        """A tree of at most `nodes` nodes for each row, of what may follow it. Never raises."""

    def closed(self, draft: Draft) -> None:  # noqa: B027 - may be nothing
        """The request has ended."""

    def forgotten(self, draft: Draft) -> None:  # noqa: B027 - may be nothing
        """The session begins again with another draft."""
