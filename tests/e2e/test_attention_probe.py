"""A server whose attention backend ignores tree masks does not start; one with room for a single request does."""

import os
from pathlib import Path

import pytest

from sglang_patches.launch.processes import ChildDiedError
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import running
from tests.waiting import eventually

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
    refusal = "attention backend specstore_cpu does not honour draft trees"
    eventually(lambda: refusal in (logs / "tiny-blind.log").read_text(), "the log does not say why")


def test_a_server_for_one_request_at_a_time_starts(tiny_model, logs):
    spec = ServerSpec("tiny-alone", tiny_model, "SSSD", dtype="float32", max_running_requests=1)
    with running(spec, logs) as server:
        assert len(server.generate([5, 6], temperature=0, max_new_tokens=4)["output_ids"]) > 0
