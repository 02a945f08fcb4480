"""Who may do what: the identities of a service, how each is proven, and for which tenants it has which rights.

Nothing here knows gRPC: a call arrives as the `Proof` that came with it and the `Right` that it needs.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

ALL = "*"
ADMIN_TOKEN = "admin token"  # the identity of who shows the service's admin token
_GAPS = {"dns:": "[^.]+", "uri:": "[^/]+"}  # what a * stands for in a name of that kind


class Right(Enum):
    """What an identity may do for a tenant. No right implies another."""

    DRAFT = "draft"  # open sessions, tell and ask of them
    PUBLISH = "publish"  # let outputs and documents enter the live tier
    READ = "read"  # sizes, counters and names, no text
    ADMINISTER = "administer"
    QUOTA = "quota"  # say how much it may take: who administers a tenant must not lift its bounds
    FORGET = "forget"  # have the text of a subject removed


class Need(Enum):
    """What a call needs that is about no tenant."""

    NOTHING = "nothing"
    IDENTITY = "identity"  # any


class UnprovenError(Exception):
    """Nothing that came with a call proves an identity. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What came with a call. authorization: its metadata of that name, "" for none. names: of the client's certificate, each as
    "dns:NAME" or "uri:NAME"."""

    authorization: str = ""
    names: tuple[str, ...] = ()


def _regex(pattern: str, gap: str) -> str:
    return gap.join(map(re.escape, pattern.split(ALL)))


def _folded(name: str) -> str:
    """DNS names are equal in any case."""
    return name.lower() if name.startswith("dns:") else name


class Tenants:
    """The tenants that some patterns mean. A * in a pattern stands for any characters."""

    def __init__(self, patterns: Iterable[str]) -> None:
        given = set(patterns)
        self._names = frozenset(pattern for pattern in given if ALL not in pattern)  # found without a search
        patterns = [_regex(pattern, ".*") for pattern in given - self._names]
        self._pattern = re.compile("|".join(patterns), re.DOTALL) if patterns else None

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._names or bool(self._pattern and self._pattern.fullmatch(tenant))


@dataclass(frozen=True, slots=True)
class Identity:
    """One row of the table. certificates, claims, tokens: each proves it. tokens: their SHA-256 in hexadecimal digits. rights: the
    tenants of each."""

    name: str
    rights: Mapping[Right, Tenants]
    certificates: re.Pattern[str] | None = None
    claims: Mapping[str, str] | None = None
    tokens: tuple[str, ...] = ()

    def may(self, right: Right, tenant: str | None) -> bool:
        """Whether it has the right for the tenant; None: for any."""
        tenants = self.rights.get(right)
        return tenants is not None and (tenant is None or tenant in tenants)


@dataclass(frozen=True, slots=True)
class Proven:
    """An identity and what has proven it, as the audit tells it: no secret is in it."""

    identity: Identity
    by: str = ""


class Identities(ABC):
    """Says whose call it is."""

    @abstractmethod
    def identify(self, proof: Proof, need: Right | Need) -> Proven:
        """Raises UnprovenError."""

    @abstractmethod
    def named(self, name: str) -> Identity | None:
        """The identity as it is now; None if there is none of that name any more."""


def certificate_names(patterns: Iterable[str]) -> re.Pattern[str]:
    """Matches each name of a certificate that one of the patterns means. A * stands for a part of it: no dot of a DNS name and no
    slash of a URI."""
    return re.compile("|".join(_regex(_folded(pattern), _GAPS[pattern[:4]]) for pattern in patterns))


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


EVERYTHING: Mapping[Right, Tenants] = {right: Tenants([ALL]) for right in Right}
ANYBODY = Identity("", EVERYTHING)


class OneToken(Identities):
    """A service without a table: one token opens the admin calls, and nothing else asks for one. token: "" opens them to all."""

    def __init__(self, token: str = "") -> None:
        self._token = token

    def identify(self, proof: Proof, need: Right | Need) -> Proven:
        if not self._token or need in (Need.NOTHING, Need.IDENTITY, Right.DRAFT):
            return Proven(ANYBODY)
        if hmac.compare_digest(proof.authorization.encode(), f"Bearer {self._token}".encode()):
            return Proven(ANYBODY, ADMIN_TOKEN)
        fault = "another admin token than the service's" if proof.authorization else "no admin token"
        raise UnprovenError(fault)

    def named(self, name: str) -> Identity | None:
        return ANYBODY


class Table(Identities):
    """A service's identities, the first of which that a call proves is the caller. A token or a JWT that comes with a call must
    prove one: the certificate does not make up for a wrong one.

    claims_of: the claims of a JWT, whose errors are UnprovenError; None if none is taken."""

    def __init__(
        self, identities: Iterable[Identity], claims_of: Callable[[str], Mapping[str, Any]] | None = None
    ) -> None:
        self._identities = {identity.name: identity for identity in identities}
        self._claims_of = claims_of

    def identify(self, proof: Proof, need: Right | Need) -> Proven:
        if need is Need.NOTHING:
            return Proven(ANYBODY)
        if proof.authorization:
            return self._by_authorization(proof.authorization)
        for identity in self._identities.values():
            for name in map(_folded, proof.names):
                if identity.certificates and identity.certificates.fullmatch(name):
                    return Proven(identity, f"certificate {name}")
        raise UnprovenError(
            "no token, and no name of the certificate is an identity's" if proof.names else "no token"
        )

    def named(self, name: str) -> Identity | None:
        return self._identities.get(name)

    def _by_authorization(self, authorization: str) -> Proven:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise UnprovenError("not of the form 'Bearer TOKEN'")
        if identity := self._of_token(digest := token_digest(token)):
            return Proven(identity, f"token sha256:{digest[:8]}")
        if self._claims_of is None or token.count(".") != 2:
            raise UnprovenError("a token that the service does not know")
        return self._by_claims(self._claims_of(token))

    def _of_token(self, digest: str) -> Identity | None:
        """Compares all, so that the time tells nothing."""
        found = None
        for identity in self._identities.values():
            for token in identity.tokens:
                if hmac.compare_digest(token, digest) and found is None:
                    found = identity
        return found

    def _by_claims(self, claims: Mapping[str, Any]) -> Proven:
        for identity in self._identities.values():
            if identity.claims and all(
                _has(claims.get(claim), value) for claim, value in identity.claims.items()
            ):
                shown = [f"{claim}={claims[claim]}" for claim in ("iss", "sub", "jti") if claim in claims]
                return Proven(identity, " ".join(["jwt", *shown]))
        raise UnprovenError("no claim of the JWT is an identity's")


def _has(claim: Any, value: str) -> bool:
    return value in claim if isinstance(claim, list) else claim == value
