"""A server whose attention backend ignores tree masks does not start. That a right one passes, every other server shows."""

import os
from pathlib import Path

import pytest

from sglang_patches.launch.processes import ChildDiedError
from sglang_patches.launch.servers import ServerSpec
from tests.support.servers import running

BLIND_PLUGIN = Path(__file__).parent / "blind_plugin"


def test_backend_that_ignores_the_mask_is_refused_by_name(tiny_model, logs):
    path = os.pathsep.join(filter(None, [str(BLIND_PLUGIN), os.environ.get("PYTHONPATH")]))
    spec = ServerSpec(
        "tiny-blind",
        tiny_model,
        "SSSD",
        dtype="float32",
        flags=["--page-size", "16"],
        environment={"PYTHONPATH": path},
    )
    with pytest.raises(ChildDiedError, match="tiny-blind"), running(spec, logs):
        raise AssertionError("the server became healthy")
    log = (logs / "tiny-blind.log").read_text()
    assert "attention backend specstore_cpu does not honour draft trees" in log
