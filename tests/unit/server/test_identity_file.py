"""A table of identities that is not right: the message names the file and the key."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datastore_service.server.identities import Proof, Right, token_digest
from datastore_service.server.identity_file import watched_table
from tests.unit.server.identity_files import Issuer, put, write_keys

DOCUMENT = Path(__file__).parents[3] / "docs" / "security.md"
TOKEN = "0123456789abcdef"
ONE = f'[identities.one]\ntokens = ["sha256:{token_digest(TOKEN)}"]\nread = ["*"]\n'
JWT = '[jwt]\nkeys = "keys"\nalgorithms = ["ES256"]\n'


@pytest.fixture
def folder(tmp_path):
    write_keys(tmp_path / "keys", Issuer())
    put(tmp_path / "token", f"{TOKEN}-2\n")
    put(tmp_path / "same", f"{TOKEN}\n")
    put(tmp_path / "short", "short")
    put(tmp_path / "secret", json.dumps({"keys": [{"kty": "oct", "k": "AAAA"}]}))
    put(tmp_path / "none", json.dumps({"keys": [{"kty": "new"}]}))
    put(tmp_path / "odd", json.dumps({"keys": [{"kty": "RSA", "n": 5, "e": "AQAB"}]}))
    put(tmp_path / "deep", "[" * 9999)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "identities: none; nobody could do anything"),
        ("read", "Expected '=' after a key"),
        (ONE + "[jtw]", "jtw: unknown, did you mean jwt?"),
        ("identities = 3", "identities: 3 is not a table"),
        ('[identities.""]\ntokens = []', "identities.: a name has 1 to 256 printable bytes"),
        ('[identities."admin token"]', "identities.admin token: a name has"),
        ("[identities.one]\nread = ['*']", "identities.one: proven by nothing; give one of certificates, claims"),
        ("[identities.one]\ntokens = []\ndarft = ['*']", "identities.one.darft: unknown, did you mean draft?"),
        (ONE.replace('["*"]', '"*"'), "identities.one.read: '*' is not a list of texts"),
        (ONE.replace('["*"]', "[7]"), "identities.one.read: [7] is not a list of texts"),
        ('[identities.one]\ntokens = ["hunter2"]', "identities.one.tokens[0]: not sha256: and 64 hexadecimal digits"),
        ('[identities.one]\ntokens = "hunter2"', "identities.one.tokens: not a list of texts"),
        ('[identities.one]\ntoken_files = ["token", "gone"]', "identities.one.token_files[1]: gone: No such file"),
        ('[identities.one]\ntoken_files = ["short"]', "identities.one.token_files[0]: short: a token has 16"),
        ('[identities.one]\ncertificates = ["engine"]', "identities.one.certificates[0]: 'engine' is neither dns:NAME nor"),
        ("[identities.one]\nclaims = 3", "identities.one.claims: 3 is not a table"),
        ("[identities.one]\nclaims = {sub = 3}", "identities.one.claims.sub: 3 is not a text"),
        ("[identities.one]\nclaims = {sub = 'x'}", "identities.one.claims: needs [jwt]"),
        (ONE + '[identities.two]\ntoken_files = ["same"]', "identities.two: has a token of identities.one"),
        (ONE + "[jwt]\nalgorithms = ['HS256']\nkeys = 'keys'", "jwt.algorithms: ['HS256'] is not some of RS256"),
        (ONE + "[jwt]\nkeys = 'keys'", "jwt.algorithms: [] is not some of RS256"),
        (ONE + "[jwt]\nalgorithms = ['ES256']", "jwt.keys: no file"),
        (ONE + JWT.replace('"keys"', '"gone"'), "jwt.keys: gone: No such file"),
        (ONE + JWT.replace('"keys"', '"token"'), "jwt.keys: token: not a JWK set"),
        (ONE + JWT.replace('"keys"', '"secret"'), "jwt.keys: secret: keys[0] is secret: give public keys alone"),
        (ONE + JWT.replace('"keys"', '"none"'), "jwt.keys: none: no usable key in it"),
        (ONE + JWT.replace('"keys"', '"odd"'), "jwt.keys: odd: no usable key in it"),
        (ONE + JWT.replace('"keys"', '"deep"'), "jwt.keys: deep: not a JWK set"),
        (ONE + JWT + 'audience = ""', "jwt.audience: '' is not a text"),
        (ONE + JWT + "issuer = 3", "jwt.issuer: 3 is not a text"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(folder, text, message):
    path = put(folder / "identities.toml", text)
    with pytest.raises(ValueError) as refused:
        watched_table(path)
    assert str(refused.value).startswith(f"identities: {path}: {message}")
    assert "hunter2" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="gone: No such file"):
        watched_table(tmp_path / "gone")
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="binary: not UTF-8"):
        watched_table(tmp_path / "binary")


def test_the_admin_token_beside_a_table_has_all_rights(folder):
    table = watched_table(put(folder / "identities.toml", ONE), "the admin token")
    identity = table.value.identify(Proof("Bearer the admin token"), Right.READ).identity
    assert identity.name == "admin token" and all(identity.may(right, "any") for right in Right)


def test_rights_do_not_imply_each_other(folder):
    for right in Right:
        text = ONE.replace("read", right.value)
        table = watched_table(put(folder / "identities.toml", text)).value
        identity = table.identify(Proof(f"Bearer {TOKEN}"), right).identity
        assert [each for each in Right if identity.may(each, "acme") or identity.may(each, None)] == [right]


def test_the_table_in_the_documents_is_one(tmp_path):
    (example,) = re.findall("```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    put(tmp_path / "jwks.json", write_keys(tmp_path / "keys", Issuer()).read_text())
    for name in ("operator.token", "operator.token.next"):
        put(tmp_path / name, f"{TOKEN}-{name}")
    table = watched_table(put(tmp_path / "identities.toml", example)).value
    name = "uri:spiffe://cluster.local/ns/serving/sa/engine-7"
    engine = table.identify(Proof(names=(name,)), Right.DRAFT).identity
    assert engine.may(Right.DRAFT, "globex") and not engine.may(Right.PUBLISH, "globex")
    assert table.identify(Proof("Bearer example"), Right.READ).identity.name == "dashboard"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "RSA", "EC", "OKP", "P-256", "AQAB", "é"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kty", "n", "e", "crv", "x", "y", "d", "kid", "keys"]), inner, max_size=5),
)  # fmt: skip


@given(
    keys=VALUES.map(lambda value: json.dumps({"keys": value}))
    | VALUES.map(json.dumps)
    | st.text()
    | st.just("[" * 9999)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_key_set_is_taken_or_refused(folder, keys):
    """Whatever else it raised would end the thread that looks after the files."""
    (folder / "keys").write_text(keys, errors="replace")
    with contextlib.suppress(ValueError):
        watched_table(put(folder / "identities.toml", ONE + JWT))


@given(
    value=VALUES,
    key=st.sampled_from(["identities", "jwt", "read", "tokens", "token_files", "claims", "certificates"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_of_a_table_is_taken_or_refused(folder, value, key):
    text = json.dumps(value).replace("{", "[").replace("}", "]").replace(":", ",").replace("null", "''")
    place = (
        f"{key} = {text}\n" + ONE
        if key in ("identities", "jwt")
        else f"{ONE}[identities.two]\n{key} = {text}"
    )
    with contextlib.suppress(ValueError):
        watched_table(put(folder / "identities.toml", place))


def test_a_table_that_is_nested_too_deeply_is_refused(folder):
    with pytest.raises(ValueError, match="recursion"):
        watched_table(put(folder / "identities.toml", "identities = " + "[" * 9999))
