"""What the call Forget does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from datastore_service.engine.provenance import Subject
from datastore_service.server import wire
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.namespaces import HostedNamespace, Namespaces
from datastore_service.server.refusal import invalid
from proto_gen.specstore.v1 import admin_pb2 as pb


class Forgetful(Protocol):
    """The services that this one shares text with."""

    def forget(self, tenant: str, subjects: Collection[Subject]) -> None:
        """Has them forget subjects of a tenant, soon: once it has returned, also if this process ends. Raises OSError."""
        ...


def forget(
    request: pb.ForgetRequest, namespaces: Namespaces, limits: ServiceLimits, others: Forgetful | None = None
) -> pb.ForgetReply:
    """Forgets subjects in all namespaces of a tenant, and empties its workspaces. Raises RefusalError, what engines raise, and StorageError
    for a snapshot of which nobody knows whose it is.

    others: forget them too."""
    tenant = _tenant(request, limits)
    hosted, faults = namespaces.of_tenant(tenant)
    subjects = _subjects(request, limits)
    if others:
        others.forget(tenant, subjects)
    removed = [each.engine.forget(subjects) for each in hosted]
    for each in hosted:
        each.check_not_dropped()  # its snapshots stay
    if faults:  # what can be forgotten is
        raise faults[0]
    documents = [document for texts in removed for document in texts]
    verification = _verify(hosted, subjects, documents) if request.verify else None
    return pb.ForgetReply(
        documents=len(documents),
        tokens=sum(map(len, documents)),
        namespaces=len(hosted),
        verification=verification,
    )


def _verify(
    hosted: Sequence[HostedNamespace], subjects: Collection[Subject], documents: Sequence[np.ndarray]
) -> pb.Verification:
    total = pb.Verification()
    for each in hosted:
        found = each.engine.search(subjects, documents)
        total.files += found.files
        total.bytes += found.nbytes
        total.documents += found.documents
        total.texts = max(total.texts, found.texts)
        total.found += found.found
    return total


def _tenant(request: pb.ForgetRequest, limits: ServiceLimits) -> str:
    # Without it nobody has asked for the caller's right for the tenant without a name.
    if not request.HasField("namespace"):
        raise invalid('namespace: missing; "" is the tenant without a name')
    for part in ("model", "tokenizer"):
        if getattr(request.namespace, part):
            raise invalid(f"namespace.{part}: must be empty, a subject is one of all the tenant's models")
    return wire.read_name(request.namespace.tenant, "namespace.tenant", limits)


def _subjects(request: pb.ForgetRequest, limits: ServiceLimits) -> frozenset[Subject]:
    named = [("user", "users", name) for name in request.users]
    named += [("conversation", "conversations", name) for name in request.conversations]
    if not named:
        raise invalid("users, conversations: at least one is required")
    if len(named) > limits.subjects:
        raise invalid(f"users, conversations: {len(named)} names in one message exceeds {limits.subjects}")
    for _, field, name in named:
        if not wire.read_name(name, field, limits):
            raise invalid(f"{field}: an empty name")
    return frozenset(Subject.named(kind, name) for kind, _, name in named)
