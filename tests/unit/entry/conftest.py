"""A process that answers requests, as far as a request's entry needs one."""

from types import SimpleNamespace

import pytest

from sglang_patches.options import Options


@pytest.fixture
def answering(plugin, model_path, monkeypatch):
    """Makes this process one that answers requests, with these values of the options that say where requests name their tenant and their
    conversation, and which wishes they may have."""
    from tests.unit.plugin.resolution import server_args

    def start(
        tenant: str = "",
        conversation: str = "agents",
        wishes: str = Options().request_wishes,
        endpoint: str = "embedded",
        **given: object,
    ) -> None:
        monkeypatch.setenv("SPECSTORE_REQUEST_TENANT", tenant)
        monkeypatch.setenv("SPECSTORE_REQUEST_CONVERSATION", conversation)
        monkeypatch.setenv("SPECSTORE_REQUEST_WISHES", wishes)
        monkeypatch.setenv("SPECSTORE_ENDPOINT", endpoint)
        server_args(model_path("dense"), "ampere", **given)

    return start


def manager() -> SimpleNamespace:
    """As far as a request's state needs one."""
    return SimpleNamespace(enable_trace=False, rid_to_state={}, disaggregation_mode=None)
