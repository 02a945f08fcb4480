"""What operators and issuers write: a table of identities, tokens, JWTs and the keys that sign them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

AUDIENCE, ISSUER = "specstore", "https://issuer.example"
# The part of a table that says which JWTs count: those of an `Issuer` whose keys `write_keys` wrote beside the table.
JWT_SECTION = f"""
[jwt]
keys = "keys.json"
algorithms = ["ES256"]
audience = "{AUDIENCE}"
issuer = "{ISSUER}"
"""


class Issuer:
    """Signs JWTs with one key, which has a name."""

    def __init__(self, name: str = "one") -> None:
        self.name, self._key = name, ec.generate_private_key(ec.SECP256R1())

    @property
    def public(self) -> dict:
        """The key as a JWK set has it."""
        return ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True) | {"kid": self.name}

    def token(self, subject: str, seconds: float = 3600.0, **claims: object) -> str:
        """A JWT that is valid for so long. claims: further ones, or None for one that it lacks."""
        said = {"sub": subject, "aud": AUDIENCE, "iss": ISSUER, "exp": time.time() + seconds} | claims
        given = {name: value for name, value in said.items() if value is not None}
        return jwt.encode(given, self._key, "ES256", {"kid": self.name})


def write_keys(path: Path, *issuers: Issuer) -> Path:
    """A JWK set with the keys of the issuers."""
    return put(path, json.dumps({"keys": [issuer.public for issuer in issuers]}))


def put(path: Path, text: str) -> Path:
    """Writes a file in one move, as an operator should."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    return new.replace(path)
