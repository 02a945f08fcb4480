"""Turns value types into messages and messages into value types: the client's half. ``datastore_service.server.wire`` is
the server's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from datastore_service.engine.tree_check import Fault, find_faults
from datastore_service.protocol.tree import EMPTY_TREE, OTHER_TIER, DraftTree, Tier
from datastore_service.protocol.types import (
    MAX_VOCAB,
    Budget,
    Entry,
    Namespace,
    Opening,
    Query,
    Rejected,
    Reply,
    Status,
)
from proto_gen.specstore.v1 import drafting_pb2 as pb

# A service of a later version may refuse an entry for a reason, and draft from a tier, of which this client does not know.
_STATUSES = {status.value: status for status in Status}
_TIERS = np.full(256, OTHER_TIER, np.uint8)
_TIERS[list(Tier)] = list(Tier)


def namespace_message(namespace: Namespace) -> pb.Namespace:
    return pb.Namespace(model=namespace.model, tokenizer=namespace.tokenizer, tenant=namespace.tenant)


def request_message(step: int, entries: Sequence[Entry], with_rejected: bool = True) -> pb.DraftRequest:
    message = pb.DraftRequest(step=step)
    add = message.entries.add
    for (
        entry
    ) in entries:  # field by field: a constructor's words take longer, and a large batch has many entries
        added = add()
        added.session, added.start = entry.session, entry.start + entry.expected
        tokens = entry.tokens[entry.expected :] if entry.expected else entry.tokens
        added.tokens.extend(tokens.tolist())
        budget = entry.budget
        if budget.nodes:
            bounds = added.budget
            bounds.nodes, bounds.depth, bounds.children = budget.nodes, budget.depth, budget.children
        if entry.tenant:
            added.tenant = entry.tenant
        if entry.opening:
            added.opening.CopyFrom(_opening(entry.opening))
        if entry.closing:
            added.closing = True
        if entry.withheld:
            added.withheld = True
        if entry.rejected and with_rejected:
            added.rejected.extend([_rejected(refused) for refused in entry.rejected])
    queries = [query for entry in entries for query in entry.queries]
    if queries:
        message.queries.CopyFrom(_queries(queries))
        message.queries.counts.extend([len(entry.queries) for entry in entries])
    return message


def _queries(queries: Sequence[Query]) -> pb.Queries:
    budgets = [query.budget for query in queries]
    return pb.Queries(
        tokens=np.concatenate([query.tokens for query in queries]).tolist(),
        lengths=[len(query.tokens) for query in queries],
        nodes=[budget.nodes for budget in budgets],
        depths=[budget.depth for budget in budgets],
        children=[budget.children for budget in budgets],
    )


def _rejected(rejected: Rejected) -> pb.Rejected:
    return pb.Rejected(position=rejected.position, tokens=rejected.tokens.tolist())


def _opening(opening: Opening) -> pb.Opening:
    return pb.Opening(
        conversation=opening.conversation,
        forbid_publish=not opening.publish,
        prompt_length=opening.prompt_length,
        handing_over=opening.handing_over,
        priors=opening.priors,
        workspace=opening.workspace,
        user=opening.user,
        group=opening.group,
    )


def read_replies(
    message: pb.DraftReply, entries: Sequence[Entry], vocab_size: int = MAX_VOCAB
) -> tuple[list[Reply], list[Fault]]:
    """One Reply for each of the entries that were sent, and the faults of the trees that break an invariant of DraftTree, their budget
    or the vocabulary. Those are empty in the replies.

    Raises ValueError if the message's columns do not fit each other or the entries."""
    _check_columns(message, ("statuses", "known", "nodes"), len(entries), "entries")
    budgets, sizes = [entry.budget for entry in entries], list(message.nodes)
    answered = message.HasField("answers")
    if answered:
        budgets += [query.budget for entry in entries for query in entry.queries]
        sizes += _answer_sizes(message.answers, entries)
    trees, faults = _read_trees(message, sizes, budgets, vocab_size)
    replies = [
        Reply(_STATUSES.get(status, Status.OVER_BUDGET), known, tree)
        for status, known, tree in zip(message.statuses, message.known, trees, strict=False)
    ]
    for row, refusal in message.refusals.items():
        if row < len(replies):
            replies[row].refusal = refusal
    if answered:
        answers = iter(trees[len(entries) :])
        for reply, entry in zip(replies, entries, strict=True):
            reply.trees = tuple(islice(answers, len(entry.queries)))
    return replies, faults


def _read_trees(
    message: pb.DraftReply, sizes: list[int], budgets: Sequence[Budget], vocab_size: int
) -> tuple[list[DraftTree], list[Fault]]:
    nodes, most = sum(sizes), sum([budget.nodes for budget in budgets])
    _check_columns(message, ("tokens", "parents", "probs", "sources"), nodes, "nodes in all")
    if nodes > most:  # before anything of that length is made
        raise ValueError(f"nodes: {nodes} in all for budgets of {most}")
    if not nodes:
        return [EMPTY_TREE] * len(sizes), []
    tokens = np.fromiter(message.tokens, np.int64, nodes)
    parents = np.fromiter(message.parents, np.int64, nodes) - 1
    probs = np.array(message.probs, np.float32)
    bounds = np.array([(budget.nodes, budget.depth, budget.children) for budget in budgets], np.int64)
    faults = find_faults(tokens, parents, probs, np.array(sizes, np.int64), bounds, vocab_size).tolist()
    columns = (
        tokens.astype(np.int32),
        parents.astype(np.int32),
        probs,
        _TIERS[np.frombuffer(message.sources, np.uint8)],
    )
    trees, end = [], 0
    for size, fault in zip(sizes, faults, strict=True):
        begin, end = end, end + size
        whole = size and not fault
        trees.append(DraftTree(*[column[begin:end] for column in columns]) if whole else EMPTY_TREE)
    return trees, [Fault(fault) for fault in faults if fault]


def _answer_sizes(answers: pb.Answers, entries: Sequence[Entry]) -> list[int]:
    """Nodes of each query's tree."""
    counts = [len(entry.queries) for entry in entries]
    if list(answers.counts) != counts or len(answers.nodes) != sum(counts):
        raise ValueError(
            f"answers: counts of {len(answers.counts)} entries, in all {sum(answers.counts)}, and {len(answers.nodes)} trees for"
            f" {sum(counts)} queries of {len(entries)}"
        )
    return list(answers.nodes)


def _check_columns(message: pb.DraftReply, names: Sequence[str], size: int, of: str) -> None:
    for name in names:
        if len(getattr(message, name)) != size:
            raise ValueError(f"{name}: {len(getattr(message, name))} for {size} {of}")
