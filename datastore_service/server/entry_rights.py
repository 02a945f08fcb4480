"""Holds the entries of a stream to the rights of its caller, tenant by tenant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from datastore_service.protocol.types import Entry
from datastore_service.server.calls import Call
from datastore_service.server.identities import ANYBODY, Identity, Right

MOST_TOLD = 64  # tenants of a stream that the audit tells of: callers choose their names


class EntryRights:
    """An entry of a tenant for whom the caller may not draft is refused by itself, and the stream goes on. Where the caller may
    draft and not publish, whatever session it writes to stays out of the live tier, of workspaces and of groups, and begins no epoch. The
    audit tells of each tenant once a stream."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._told: set[tuple[Right, str]] = set()

    def permitted(self, entries: Sequence[Entry | str], tenant: str) -> Sequence[Entry | str]:
        """The entries as they may be stepped, with its refusal in place of one that may not.

        entries: with the refusal in place of one that was refused already. tenant: whose the entries are that name none.
        Raises RefusalError if the caller's identity is gone."""
        identity = self._call.caller.identity
        if identity is ANYBODY:
            return entries
        named = {entry.tenant or tenant for entry in entries if isinstance(entry, Entry)}
        lacking = {right: _lacking(identity, right, named) for right in (Right.DRAFT, Right.PUBLISH)}
        if not any(lacking.values()):
            return entries
        return [
            entry if isinstance(entry, str) else self._permitted(entry, entry.tenant or tenant, lacking)
            for entry in entries
        ]

    def _permitted(self, entry: Entry, tenant: str, lacking: Mapping[Right, set[str]]) -> Entry | str:
        if tenant in lacking[Right.DRAFT]:
            return self._denial(Right.DRAFT, tenant)
        if tenant in lacking[Right.PUBLISH] and (entry.opening or entry.closing or len(entry.tokens)):
            return self._withheld(entry, tenant)
        return entry

    def _withheld(self, entry: Entry, tenant: str) -> Entry:
        opening = entry.opening
        if opening and (opening.publish or opening.workspace or opening.group or opening.epoch):
            self._denial(Right.PUBLISH, tenant)
            opening = replace(opening, publish=False, workspace="", group="", epoch=0)
        return replace(entry, opening=opening, withheld=True)

    def _denial(self, right: Right, tenant: str) -> str:
        denial = self._call.caller.denial(right, tenant)
        if (right, tenant) not in self._told and len(self._told) < MOST_TOLD:
            self._told.add((right, tenant))
            self._call.tenant_refused(denial, tenant)
        return denial


def _lacking(identity: Identity, right: Right, tenants: Iterable[str]) -> set[str]:
    """The tenants for which the identity lacks the right."""
    return {tenant for tenant in tenants if not identity.may(right, tenant)}
