"""What a prefill instance tells the datastore of a prompt, so that the decode instance finds it."""

import weakref
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_patches.disaggregation.prefill_worker import PrefillWorker  # noqa: E402
from sglang_patches.ledger.requests import tenants_of  # noqa: E402
from sglang_patches.ledger.shared_session import shared_session  # noqa: E402
from sglang_patches.options import Options  # noqa: E402
from tests.unit.drafting.texts import make_req  # noqa: E402


class Noting:
    def __init__(self):
        self.entries = []

    def post(self, entries):
        self.entries += entries


@pytest.fixture
def worker():
    """As far as prompts need one: without a model."""
    worker = PrefillWorker.__new__(PrefillWorker)
    worker._postbox, worker._sent, worker._publish, worker._vocab_size = (
        Noting(),
        weakref.WeakSet(),
        True,
        100,
    )
    worker._tenant_of = tenants_of(Options(request_tenant="custom_params"))
    return worker


class Request(SimpleNamespace):
    __hash__ = object.__hash__


def request(tenant):
    asked = make_req("r", custom_params={"specstore": {"tenant": tenant}})
    return Request(**vars(asked), bootstrap_host="10.0.0.1", bootstrap_port=8998, bootstrap_room=7)


def test_a_prompt_is_handed_over_once_under_the_session_and_the_tenant_of_its_request(worker):
    req = request("acme")
    for _ in range(2):  # chunks
        worker.observe_prefill(SimpleNamespace(reqs=[req]))
    (entry,) = worker._postbox.entries
    assert (entry.session, entry.tenant) == (shared_session(req), "acme")
    assert entry.opening.handing_over and entry.opening.prompt_length == 3
    assert entry.tokens.tolist() == [1, 2, 3]
