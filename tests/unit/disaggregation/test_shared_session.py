"""One name for a request on both instances, none for what only one of them sees."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST  # noqa: E402

from sglang_patches.ledger.shared_session import shared_session  # noqa: E402


def request(host="10.0.0.1", room=7):
    return SimpleNamespace(bootstrap_host=host, bootstrap_port=8998, bootstrap_room=room)


def test_both_instances_name_it_alike_and_requests_apart():
    assert shared_session(request()) == shared_session(request())
    assert len({shared_session(request(host, room)) for host in "ab" for room in (0, 1)}) == 4


def test_it_fits_what_the_service_takes():
    assert len(shared_session(request("h" * 200, 2**63 - 1)).encode()) <= 256


@pytest.mark.parametrize("own", [request(room=None), request(FAKE_BOOTSTRAP_HOST)])
def test_an_instance_s_own_requests_have_none(own):
    assert shared_session(own) is None
