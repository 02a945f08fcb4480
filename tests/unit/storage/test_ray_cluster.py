"""What is refused before there is a cluster. tests/integration/datastore/test_ray_build.py builds on a real one."""

import socket
import sys
import types

import pytest

from datastore_service.storage.ray_cluster import RayCluster


@pytest.fixture
def installed(monkeypatch):
    """Whether it is or not: nothing here gets as far as using it."""
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OSError, match=r"ray: is not installed; `pip install specstore\[ray\]`"):
        RayCluster("local")


@pytest.mark.parametrize(
    "address", ["nowhere", "head:", "head:port", ":6379", "head:70000", "ray://head:10001", "unix:/a"]
)
def test_an_address_of_another_form_is_refused(installed, address):
    with pytest.raises(ValueError, match=f"ray: '{address}' is neither HOST:PORT nor 'local'"):
        RayCluster(address)


def test_an_address_that_nobody_listens_on_is_named(installed, free_port):
    with pytest.raises(OSError, match=f"ray: 127.0.0.1:{free_port} does not answer: Connection refused"):
        RayCluster(f"127.0.0.1:{free_port}")


def test_a_listener_that_is_not_ray_is_named(installed, monkeypatch):
    monkeypatch.setattr("datastore_service.storage.ray_cluster.CHECK_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(OSError, match=f"ray: {address} does not answer as the head of a Ray cluster"):
            RayCluster(address)
