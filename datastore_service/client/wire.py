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
_NODE_BYTES = 13  # in packed_trees
_TIERS = np.full(256, OTHER_TIER, np.uint8)
_TIERS[list(Tier)] = list(Tier)


def namespace_message(namespace: Namespace) -> pb.Namespace:
    return pb.Namespace(model=namespace.model, tokenizer=namespace.tokenizer, tenant=namespace.tenant)


def request_message(
    step: int, entries: Sequence[Entry], with_rejected: bool = True, columns: bool = False
) -> pb.DraftRequest:
    """A step's message. with_rejected: whether the service wants the refused tokens. columns: whether it reads the entries as columns."""
    message = pb.DraftRequest(step=step)
    if columns:
        _add_columns(message.columns, entries, with_rejected)
    else:
        for entry in entries:
            _add_entry(message.entries.add(), entry, with_rejected)
    queries = [query for entry in entries for query in entry.queries]
    if queries:
        message.queries.CopyFrom(_queries(queries))
        message.queries.counts.extend([len(entry.queries) for entry in entries])
    return message


def _add_columns(columns: pb.EntryColumns, entries: Sequence[Entry], with_rejected: bool) -> None:
    tokens = [entry.tokens[entry.expected :] if entry.expected else entry.tokens for entry in entries]
    columns.sessions.extend([entry.session for entry in entries])
    columns.starts.extend([entry.start + entry.expected for entry in entries])
    columns.counts.extend([len(part) for part in tokens])
    columns.tokens.extend(np.concatenate(tokens).tolist() if tokens else ())
    budgets = [entry.budget for entry in entries]
    columns.nodes.extend([budget.nodes for budget in budgets])
    columns.depths.extend([budget.depth for budget in budgets])
    columns.children.extend([budget.children for budget in budgets])
    if any([entry.tenant for entry in entries]):
        columns.tenants.extend([entry.tenant for entry in entries])
    for row, entry in enumerate(entries):
        if entry.opening or entry.closing or entry.withheld or (entry.rejected and with_rejected):
            _add_rare(columns.more[row], entry, with_rejected)


def _add_entry(added: pb.Entry, entry: Entry, with_rejected: bool) -> None:
    """Writes an entry field by field: a constructor's words take longer, and a large batch has many entries."""
    added.session, added.start = entry.session, entry.start + entry.expected
    tokens = entry.tokens[entry.expected :] if entry.expected else entry.tokens
    added.tokens.extend(tokens.tolist())
    budget = entry.budget
    if budget.nodes:
        bounds = added.budget
        bounds.nodes, bounds.depth, bounds.children = budget.nodes, budget.depth, budget.children
    if entry.tenant:
        added.tenant = entry.tenant
    _add_rare(added, entry, with_rejected)


def _add_rare(added: pb.Entry, entry: Entry, with_rejected: bool) -> None:
    """Writes what few entries have."""
    if entry.opening:
        added.opening.CopyFrom(_opening(entry.opening))
    if entry.closing:
        added.closing = True
    if entry.withheld:
        added.withheld = True
    if entry.rejected and with_rejected:
        added.rejected.extend([_rejected(refused) for refused in entry.rejected])


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
        epoch=opening.epoch,
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
        for status, known, tree in zip(message.statuses[:], message.known[:], trees, strict=False)
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
    _check_nodes(message, nodes)
    if nodes > most:  # before anything of that length is made
        raise ValueError(f"nodes: {nodes} in all for budgets of {most}")
    if not nodes:
        return [EMPTY_TREE] * len(sizes), []
    tokens, parents, probs, sources = _node_columns(message, nodes)
    flat = [bound for budget in budgets for bound in (budget.nodes, budget.depth, budget.children)]
    bounds, lengths = np.array(flat, np.int64).reshape(-1, 3), np.array(sizes, np.int64)
    faults = find_faults(tokens, parents, probs, lengths, bounds, vocab_size).tolist()
    tokens, parents = tokens.astype(np.int32), parents.astype(np.int32)
    trees, end = [], 0
    for size, fault in zip(sizes, faults, strict=True):
        i, end = end, end + size
        tree = DraftTree(tokens[i:end], parents[i:end], probs[i:end], sources[i:end])
        trees.append(tree if size and not fault else EMPTY_TREE)
    return trees, [Fault(fault) for fault in faults if fault]


def _check_nodes(message: pb.DraftReply, nodes: int) -> None:
    if not message.packed_trees:
        _check_columns(message, ("tokens", "parents", "probs", "sources"), nodes, "nodes in all")
    elif len(message.packed_trees) != _NODE_BYTES * nodes:
        raise ValueError(f"packed_trees: {len(message.packed_trees)} bytes for {nodes} nodes in all")


def _node_columns(
    message: pb.DraftReply, nodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens and parents as int64, probabilities as float32, and sources, of all trees."""
    if packed := message.packed_trees:
        tokens, parents = np.frombuffer(packed, "<i4", 2 * nodes).reshape(2, nodes).astype(np.int64)
        probs = np.frombuffer(packed, "<f4", nodes, 8 * nodes)
        return tokens, parents, probs, _TIERS[np.frombuffer(packed, np.uint8, nodes, 12 * nodes)]
    tokens = np.array(message.tokens, np.int64)  # protobuf copies a whole column, which iterating would not
    parents = np.array(message.parents, np.int64) - 1
    return (
        tokens,
        parents,
        np.array(message.probs, np.float32),
        _TIERS[np.frombuffer(message.sources, np.uint8)],
    )


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
