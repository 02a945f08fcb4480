"""A message's entries and trees in their other form: columns for entries, packed trees for nodes."""

from __future__ import annotations

import numpy as np

from proto_gen.specstore.v1 import drafting_pb2 as pb


def with_columns(request: pb.DraftRequest) -> pb.DraftRequest:
    """The same request with columns in place of entries."""
    changed = pb.DraftRequest()
    changed.CopyFrom(request)
    del changed.entries[:]
    columns = changed.columns
    columns.SetInParent()
    for row, entry in enumerate(request.entries):
        columns.sessions.append(entry.session)
        columns.starts.append(entry.start)
        columns.tokens.extend(entry.tokens)
        columns.counts.append(len(entry.tokens))
        columns.nodes.append(entry.budget.nodes)
        columns.depths.append(entry.budget.depth)
        columns.children.append(entry.budget.children)
        if entry.HasField("opening") or entry.rejected or entry.closing or entry.withheld:
            columns.more[row].CopyFrom(entry)
    if any(entry.tenant for entry in request.entries):
        columns.tenants.extend([entry.tenant for entry in request.entries])
    return changed


def pack_trees(reply: pb.DraftReply) -> None:
    """Packs the reply's nodes. Values that 32 bits cannot hold change."""
    reply.packed_trees = (
        np.array(reply.tokens[:], np.int64).astype("<i4").tobytes()
        + (np.array(reply.parents[:], np.int64) - 1).astype("<i4").tobytes()
        + np.array(reply.probs[:]).astype("<f4").tobytes()
        + reply.sources
    )
    for name in ("tokens", "parents", "probs", "sources"):
        reply.ClearField(name)
