"""JSON Web Tokens (RFC 7519) that others have signed, read with the keys of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jwt

from datastore_service.server.identities import UnprovenError

LEEWAY_SECONDS = 30.0  # between the clocks of who signs and of this machine
# Signatures that are made with a private key. A shared secret would let this machine sign as well.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError)  # what values of another kind raise
_FAULTS: dict[type[Exception], str] = {
    jwt.ExpiredSignatureError: "the JWT has expired",
    jwt.ImmatureSignatureError: "the JWT is not valid yet",
    jwt.InvalidAudienceError: "the JWT is for another audience",
    jwt.InvalidIssuerError: "the JWT is of another issuer",
    jwt.InvalidAlgorithmError: "the JWT is signed by another algorithm",
    jwt.InvalidSignatureError: "the JWT is not signed by a key of the service's",
}


class JwtKeys:
    """The public keys that sign JWTs, and what their tokens must say.

    keys: a JWK set (RFC 7517). algorithms: of ALGORITHMS. audience, issuer: "" leaves them unchecked.
    Raises ValueError for a set without usable keys, and for one with a secret in it."""

    def __init__(self, keys: bytes, algorithms: Sequence[str], audience: str = "", issuer: str = "") -> None:
        self._keys = _key_set(keys)
        self._algorithms, self._audience, self._issuer = list(algorithms), audience or None, issuer or None

    def claims(self, token: str) -> Mapping[str, Any]:
        """What a token says that is signed and valid now. Raises UnprovenError."""
        try:
            return jwt.decode(
                token,
                self._key_of(token),
                self._algorithms,
                {"require": ["exp"], "verify_aud": self._audience is not None},
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_SECONDS,
            )
        except jwt.MissingRequiredClaimError as error:
            raise UnprovenError(f"the JWT has no {error.claim}") from None
        except (jwt.PyJWTError, RecursionError) as error:  # the latter of JSON that is nested too deeply
            raise UnprovenError(_FAULTS.get(type(error), "no JWT that can be read")) from None

    def _key_of(self, token: str) -> jwt.PyJWK:
        """The key that the token names; it need not name the only one."""
        name = jwt.get_unverified_header(token).get("kid")
        named = [key for key in self._keys if key.key_id == name]
        keys = named or (self._keys if name is None and len(self._keys) == 1 else [])
        if not keys:
            raise jwt.InvalidSignatureError
        return keys[0]


def _key_set(data: bytes) -> list[jwt.PyJWK]:
    try:
        keys = json.loads(data)["keys"]
        secret = [i for i, key in enumerate(keys) if key.get("kty") == "oct" or "d" in key]
    except (*_MALFORMED, RecursionError):
        raise ValueError("not a JWK set") from None
    if secret:
        raise ValueError(f"keys[{secret[0]}] is secret: give public keys alone")
    try:
        return jwt.PyJWKSet(keys).keys
    except (jwt.PyJWTError, *_MALFORMED):
        raise ValueError("no usable key in it") from None
