"""A service on a Unix socket, whatever the socket is called."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from datastore_service.cli.main import app
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Entry, Namespace, Opening, Status
from tests.unit.server.service import running

SECONDS = 60.0
NAMES = ["s.sock", "a#b", "a%20b", "a%zz", "a?b", "a b", "a\nb", "a:b@[c]", "a;b&c=d+e", "~\\", "ü", "\udcff"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "relative"])
def test_clients_reach_a_socket_of_any_name(tmp_path, monkeypatch, name, absolute):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datastore_service.cli.admin.HEALTH_SECONDS", SECONDS)
    endpoint = f"unix:{tmp_path / name if absolute else name}"
    with running(listen=endpoint) as service:
        assert service.endpoint == endpoint and Path(name).is_socket()
        datastore = GrpcDatastore(endpoint, Namespace("m", "t"))
        try:
            assert datastore.wait_connected(SECONDS), datastore.disconnect_reason
            entry = Entry("s", tokens=np.arange(9, dtype=np.int32), opening=Opening())
            (reply,) = datastore.step([entry], SECONDS)
            assert reply.status is Status.OK
        finally:
            datastore.close()
        health = CliRunner().invoke(app, ["health", "--endpoint", endpoint])
        assert health.stdout == "SERVING\n", health.output
