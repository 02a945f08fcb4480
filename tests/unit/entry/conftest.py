"""A process that answers requests, as far as a request's entry needs one."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def answering(plugin, model_path, monkeypatch):
    """Makes this process one that answers requests, with this value of the option that says where requests name their tenant."""
    from tests.unit.plugin.resolution import server_args

    def start(tenant: str = "", **given: object) -> None:
        monkeypatch.setenv("SPECSTORE_REQUEST_TENANT", tenant)
        server_args(model_path("dense"), "ampere", **given)

    return start


def manager() -> SimpleNamespace:
    """As far as a request's state needs one."""
    return SimpleNamespace(enable_trace=False, rid_to_state={}, disaggregation_mode=None)
