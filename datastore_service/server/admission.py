"""Which right each call of the service needs, and whether its caller has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from datastore_service.server.identities import Identities, Identity, Need, Proof, Right, UnprovenError
from datastore_service.server.refusal import RefusalError
from proto_gen.specstore.v1 import admin_pb2, drafting_pb2

Context: TypeAlias = grpc.ServicerContext | grpc.aio.ServicerContext

DRAFTING = drafting_pb2.DESCRIPTOR.services_by_name["Drafting"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
_OF_ADMIN = {
    Right.PUBLISH: ("Warmup",),
    Right.READ: ("Stats", "ListNamespaces", "ListSessions", "ListSnapshots", "ListQuotas"),
    Right.ADMINISTER: ("WarmupFile", "Flush", "Epoch", "Compact", "DropNamespace", "Snapshot", "Restore"),
    Right.QUOTA: ("SetQuota",),
    Right.FORGET: ("Forget",),
}
# By the call's full name. One that is not here is answered UNIMPLEMENTED, such as health's List, which gRPC's servicer lacks.
NEEDS: dict[str, Right | Need] = {
    f"{DRAFTING}/Draft": Right.DRAFT,
    **{f"{ADMIN}/{name}": right for right, names in _OF_ADMIN.items() for name in names},
    **{f"{health.SERVICE_NAME}/{name}": Need.NOTHING for name in ("Check", "Watch")},
    f"{reflection.SERVICE_NAME}/ServerReflectionInfo": Need.IDENTITY,
}
_MAY_NOT = {
    Right.DRAFT: "draft for",
    Right.PUBLISH: "publish for",
    Right.READ: "read the statistics of",
    Right.ADMINISTER: "administer",
    Right.QUOTA: "set the quota of",
    Right.FORGET: "forget subjects of",
}


class Caller:
    """Who makes one call, with the rights of the identities in force.

    A call has one identity, which is proven when it begins. What that identity may do is asked again at each message, and so are
    identities that were changed meanwhile. identities: returns those in force.
    Raises RefusalError (UNAUTHENTICATED) if nothing proves an identity.

    by: what proved it. namespace: the message that the call named last, None before; with the tenant alone if it named no more."""

    def __init__(self, identities: Callable[[], Identities], need: Right | Need, proof: Proof) -> None:
        self._identities, self._need, self._known = identities, need, identities()
        try:
            proven = self._known.identify(proof, need)
        except UnprovenError as error:
            raise _unauthenticated(str(error)) from None
        self._identity, self.by = proven.identity, proven.by
        self.namespace: drafting_pb2.Namespace | None = None

    @property
    def name(self) -> str:
        """The identity's; "" where none was asked for."""
        return self._identity.name

    @property
    def identity(self) -> Identity:
        """The identity as it is now. Raises RefusalError if there is none of that name any more."""
        if (known := self._identities()) is not self._known:
            now = known.named(self._identity.name)
            if now is None:
                raise _unauthenticated(f"the service has no identity {self._identity.name!r} any more")
            self._known, self._identity = known, now
        return self._identity

    def admit(self, message: Any) -> None:
        """Raises RefusalError (PERMISSION_DENIED) if the caller may not say this message of its call."""
        known = message.DESCRIPTOR.fields_by_name
        if "namespace" in known and message.HasField("namespace"):
            self.namespace = message.namespace
        if "tenant" in known and message.HasField("tenant"):
            self.namespace = drafting_pb2.Namespace(tenant=message.tenant)
        if isinstance(self._need, Right):
            self.require(self._need, None if self.namespace is None else self.namespace.tenant)

    def require(self, right: Right, tenant: str | None) -> None:
        """Raises RefusalError (PERMISSION_DENIED) without the right for that tenant; None: for any."""
        if not self.identity.may(right, tenant):
            raise RefusalError(grpc.StatusCode.PERMISSION_DENIED, self.denial(right, tenant))

    def denial(self, right: Right, tenant: str | None) -> str:
        """What a caller without the right is told. It names nothing that the caller has not named."""
        whom = "any tenant" if tenant is None else f"tenant {tenant!r}"
        return f"{right.value}: identity {self.name!r} may not {_MAY_NOT[right]} {whom}"


def proof_of(context: Context) -> Proof:
    """What came with a call. Raises RefusalError for two tokens, one of which may be another's."""
    given = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
    if len(given) > 1:
        raise _unauthenticated("given twice")
    shown = context.auth_context()
    names = [f"{kind}:{_text(name)}" for kind in ("uri", "dns") for name in shown.get(f"peer_{kind}", ())]
    return Proof(given[0] if given else "", tuple(names))


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _unauthenticated(reason: str) -> RefusalError:
    return RefusalError(grpc.StatusCode.UNAUTHENTICATED, f"authorization: {reason}")
