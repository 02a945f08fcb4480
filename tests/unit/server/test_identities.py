"""The table's decisions: whose proof is whose, and which tenants a pattern means."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.server.identities import (
    ADMIN_TOKEN,
    ANYBODY,
    Identity,
    Need,
    OneToken,
    Proof,
    Right,
    Table,
    Tenants,
    UnprovenError,
    certificate_names,
    token_digest,
)
from datastore_service.server.json_web_tokens import JwtKeys
from tests.unit.server.identity_files import AUDIENCE, ISSUER, Issuer, write_keys

FIRST, SECOND = "first-token-012345", "second-token-01234"


def identity(name: str, **proofs) -> Identity:
    return Identity(name, {Right.READ: Tenants(["*"])}, **proofs)


def bearer(token: str) -> Proof:
    return Proof(f"Bearer {token}")


@pytest.mark.parametrize(
    ("patterns", "meant", "others"),
    [
        (["acme"], ["acme"], ["", "acme2", "Acme", "ac"]),
        (["*"], ["", "acme", "a\nb"], []),
        ([""], [""], ["acme"]),
        (["team-*", "b"], ["team-", "team-a.b", "b"], ["team", "xteam-a", "bb"]),
        (["a.c"], ["a.c"], ["abc"]),
        (["a|b", "*-(x)"], ["a|b", "y-(x)"], ["a", "b", "y-x"]),
    ],
)
def test_what_a_tenant_s_pattern_means(patterns, meant, others):
    pattern = Tenants(patterns)
    assert [name for name in (*meant, *others) if name in pattern] == meant


@pytest.mark.parametrize(
    ("pattern", "meant", "others"),
    [
        ("dns:*.engines.example", ["dns:a.engines.example"], ["dns:a.b.engines.example", "dns:.engines.example", "uri:a.engines.example"]),
        ("dns:ENGINE.example", ["dns:engine.example"], ["dns:engine.example.evil"]),
        ("uri:spiffe://c/ns/*/sa/engine", ["uri:spiffe://c/ns/x.y/sa/engine"], ["uri:spiffe://c/ns/x/y/sa/engine", "uri:SPIFFE://c/ns/x/sa/engine"]),
    ],
)  # fmt: skip
def test_what_a_certificate_s_pattern_means(pattern, meant, others):
    table = Table([identity("one", certificates=certificate_names([pattern]))])

    def proves(name: str) -> bool:
        try:
            return table.identify(Proof(names=(name,)), Right.READ).by == f"certificate {name}"
        except UnprovenError:
            return False

    assert [name for name in (*meant, *others) if proves(name)] == meant


def test_the_case_of_a_dns_name_is_no_matter():
    table = Table([identity("one", certificates=certificate_names(["dns:engine.example"]))])
    assert table.identify(Proof(names=("dns:Engine.EXAMPLE",)), Right.READ).identity.name == "one"


def test_each_of_several_tokens_proves_its_identity_and_is_not_told():
    rows = [identity("one", tokens=(token_digest(FIRST), token_digest(SECOND)))]
    table = Table([*rows, identity("two", tokens=(token_digest("x" * 16),))])
    for token in (FIRST, SECOND):
        proven = table.identify(bearer(token), Right.READ)
        assert proven.identity.name == "one"
        assert proven.by == f"token sha256:{token_digest(token)[:8]}" and token not in proven.by
    assert table.identify(bearer("x" * 16), Right.READ).identity.name == "two"


def test_the_first_identity_that_is_proven_is_the_caller():
    names = certificate_names(["dns:*"])
    table = Table([identity("one", certificates=names), identity("two", certificates=names)])
    assert table.identify(Proof(names=("dns:a",)), Right.READ).identity.name == "one"


@pytest.mark.parametrize(
    ("authorization", "reason"),
    [
        ("", "no token"),
        (FIRST, "not of the form 'Bearer TOKEN'"),
        (f"Basic {FIRST}", "not of the form 'Bearer TOKEN'"),
        (f"Bearer  {FIRST}", "a token that the service does not know"),
        (f"Bearer {FIRST} ", "a token that the service does not know"),
        (f"Bearer {token_digest(FIRST)}", "a token that the service does not know"),
        ("Bearer a.b.c", "a token that the service does not know"),
    ],
)
def test_what_proves_nothing(authorization, reason):
    table = Table([identity("one", tokens=(token_digest(FIRST),))])
    with pytest.raises(UnprovenError) as refused:
        table.identify(Proof(authorization), Right.READ)
    assert str(refused.value) == reason


def test_a_call_that_needs_nothing_is_asked_for_nothing():
    assert Table([identity("one")]).identify(bearer("wrong"), Need.NOTHING).identity is ANYBODY
    with pytest.raises(UnprovenError):
        Table([identity("one")]).identify(Proof(), Need.IDENTITY)


def test_without_a_table_the_token_opens_the_admin_calls_alone():
    one = OneToken("secret")
    for need in (Need.NOTHING, Need.IDENTITY, Right.DRAFT):
        assert one.identify(Proof(), need).identity is ANYBODY
    for need in (Right.PUBLISH, Right.READ, Right.ADMINISTER):
        assert one.identify(bearer("secret"), need).by == ADMIN_TOKEN
        for wrong in (Proof(), bearer("secret2"), Proof("secret"), bearer("s\u00e9cret")):
            with pytest.raises(UnprovenError):
                one.identify(wrong, need)
        assert OneToken().identify(Proof(), need).identity is ANYBODY


class TestJwt:
    @pytest.fixture(scope="class")
    def issuers(self):
        return Issuer("one"), Issuer("two")

    @pytest.fixture
    def table(self, issuers, tmp_path):
        keys = JwtKeys(write_keys(tmp_path / "keys", *issuers).read_bytes(), ["ES256"], AUDIENCE, ISSUER)
        rows = [
            identity("both", claims={"sub": "w", "groups": "engines"}),
            identity("one", claims={"sub": "w"}),
        ]
        return Table(rows, keys.claims)

    def test_all_claims_of_an_identity_must_be_there(self, table, issuers):
        for issuer in issuers:
            assert table.identify(bearer(issuer.token("w")), Right.READ).identity.name == "one"
            for groups in ("engines", ["x", "engines"]):
                token = issuer.token("w", groups=groups, jti="7")
                proven = table.identify(bearer(token), Right.READ)
                assert proven.identity.name == "both"
                assert proven.by == f"jwt iss={ISSUER} sub=w jti=7"

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"seconds": -60.0}, "the JWT has expired"),
            ({"exp": None}, "the JWT has no exp"),
            ({"aud": None}, "the JWT has no aud"),
            ({"aud": "other"}, "the JWT is for another audience"),
            ({"iss": None}, "the JWT has no iss"),
            ({"iss": "https://other"}, "the JWT is of another issuer"),
            ({"nbf": 1 << 40}, "the JWT is not valid yet"),
            ({"subject": "x"}, "no claim of the JWT is an identity's"),
            ({"subject": "x", "groups": ["w"]}, "no claim of the JWT is an identity's"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_with_a_token_is_told(self, table, issuers, changed, reason):
        with pytest.raises(UnprovenError) as refused:
            table.identify(bearer(issuers[0].token(**{"subject": "w"} | changed)), Right.READ)
        assert str(refused.value) == reason

    def test_an_unknown_key_and_a_forged_signature_are_refused(self, table, issuers):
        stranger = Issuer("one")  # by the name of one that is known
        for token in (stranger.token("w"), Issuer("three").token("w")):
            with pytest.raises(UnprovenError, match="^the JWT is not signed by a key of the service's$"):
                table.identify(bearer(token), Right.READ)

    def test_a_token_that_names_no_algorithm_or_another_is_refused(self, table, issuers):
        _, payload, signature = issuers[0].token("w").split(".")
        for header in ('{"alg":"none","kid":"one"}', '{"alg":"HS256","kid":"one"}'):
            forged = ".".join(
                (base64.urlsafe_b64encode(header.encode()).decode().rstrip("="), payload, signature)
            )
            with pytest.raises(UnprovenError, match="another algorithm"):
                table.identify(bearer(forged), Right.READ)

    @given(
        header=st.binary(max_size=60) | st.sampled_from([b"[" * 5000, b'{"alg":7,"kid":[]}']),
        rest=st.binary(),
    )
    def test_any_bytes_are_refused(self, header, rest):
        encoded = [base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (header, rest, rest)]
        keys = JwtKeys(KEYS, ["ES256"])
        with pytest.raises(UnprovenError):
            Table([identity("one", claims={"sub": "w"})], keys.claims).identify(
                bearer(".".join(encoded)), Right.READ
            )


KEYS = b'{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}'
