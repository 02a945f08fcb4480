"""SGLang's scheduler, hooked: the worker hears of requests that end while they wait."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.managers.scheduler import Scheduler  # noqa: E402

from sglang_patches.workers.aborts import tell_worker_of_aborts  # noqa: E402


def test_the_worker_hears_of_an_abort_once_and_the_client_too():
    tell_worker_of_aborts()
    tell_worker_of_aborts()
    ended, told = [], []
    scheduler = SimpleNamespace(
        rust_server=None,
        ipc_channels=SimpleNamespace(
            send_to_tokenizer=SimpleNamespace(send_output=lambda *output: told.append(output))
        ),
        draft_worker=SimpleNamespace(note_request_finished=lambda **request: ended.append(request)),
    )
    req = SimpleNamespace(rid="r")
    Scheduler.send_abort_output(scheduler, "an abort", req)
    assert told == [("an abort", req)]
    assert ended == [{"rid": "r", "natural_stop": False}]
