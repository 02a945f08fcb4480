"""The user of a request, through SGLang's HTTP endpoints and their request classes."""

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from datastore_service.protocol.names import bounded_name, hashed_name  # noqa: E402
from tests.tenant_names import PAIRS  # noqa: E402
from tests.unit.entry.test_request_conversations import ENDPOINTS, TENANT, call, enter  # noqa: E402

__all__ = ["call", "enter"]


@pytest.fixture
def users(enter):
    """Posts to an endpoint; returns the users of what has entered."""
    return lambda *given: [opening.user for opening in enter(*given)]


def test_a_user_is_found_at_every_endpoint_and_hashed(answering, users):
    answering()
    for path in ENDPOINTS:
        assert users(path) == [""]
        for field in ("user", "safety_identifier"):
            assert users(path, {field: "ada"}) == [hashed_name("", "ada")]
    assert users("/generate", {"user": "ada", "safety_identifier": "bob"}) == [hashed_name("", "ada")]


def test_what_a_request_says_itself_counts_and_what_is_no_name_does_not(answering, users):
    answering()

    def saying(name):
        params = {"custom_params": {"specstore": {"user": name}}}
        return users("/generate", {"sampling_params": params, "user": "bob"})

    assert saying("ada") == ["ada"]
    assert saying(None) == [hashed_name("", "bob")]
    assert saying("") == [""]
    assert saying("x" * 300) == [bounded_name("x" * 300)]
    for value in (7, None, "", ["ada"], {"id": "ada"}):
        assert users("/generate", {"user": value}) == [""]


def test_a_server_that_takes_no_wishes_knows_the_user_of_the_body_all_the_same(answering, users):
    answering(wishes="off")
    assert users("/generate", {"user": "ada"}) == [hashed_name("", "ada")]


def test_a_user_is_one_of_its_tenant(answering, users):
    answering(tenant=f"header:{TENANT}")
    assert users("/generate", {"user": "ada"}, {TENANT: "acme"}) == [hashed_name("acme", "ada")]
    for tenant, other in PAIRS.values():
        assert hashed_name(tenant, "ada") != hashed_name(other, "ada")


def test_a_user_is_one_of_the_servers_tenant_too(answering, users, call, monkeypatch):
    """So that `specstore forget --tenant` finds it."""
    monkeypatch.setenv("SPECSTORE_TENANT", "acme")
    answering()
    assert users("/generate", {"user": "ada"}) == [hashed_name("acme", "ada")]
    assert call("/generate", {"conversation_id": "talk"}) == [hashed_name("acme", "talk")]
