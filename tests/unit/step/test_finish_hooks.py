"""SGLang's scheduler, hooked: the worker hears of requests that end outside a decode step."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.managers import scheduler  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.managers.scheduler_components import batch_result_processor  # noqa: E402
from sglang.srt.session.session_controller import SessionReqNode  # noqa: E402

from sglang_patches.step.ends import register_ends, tell  # noqa: E402


@pytest.fixture
def hooked() -> SimpleNamespace:
    """A worker, after two of its kind have asked to be told; `ended`: what it was told."""
    register_ends()
    register_ends()
    ended: list[str] = []
    worker = SimpleNamespace(ended=ended, request_ended=lambda req: ended.append(req.rid))
    tell(worker)
    return worker


def test_of_an_abort_once_and_the_client_too(hooked, monkeypatch):
    """The scheduler ends a request that has a priority where it takes none."""
    monkeypatch.setattr(scheduler, "get_serving", lambda: SimpleNamespace(weight_version="1"))
    told = []
    output = SimpleNamespace(send_output=lambda *output: told.append(output))
    host = SimpleNamespace(
        rust_server=None,
        ipc_channels=SimpleNamespace(send_to_tokenizer=output),
        enable_priority_scheduling=False,
        abort_on_priority_when_disabled=True,
    )
    host.send_abort_output = lambda *abort: Scheduler.send_abort_output(host, *abort)  # called from 0.5.23 on
    trace = SimpleNamespace(abort=lambda abort_info: None)
    req = SimpleNamespace(
        rid="r",
        priority=1,
        weight_version_events=[],
        output_ids=[],
        time_stats=SimpleNamespace(trace_ctx=trace),
    )
    assert not Scheduler._set_or_validate_priority(host, req)
    assert [(abort.rid, of) for abort, of in told] == [("r", req)]
    assert hooked.ended == ["r"]


def test_of_a_request_that_had_to_finish_when_it_joined_the_batch(hooked, monkeypatch):
    """As one does that was retracted between its client's departure and the next step; the other goes on."""
    released = []
    config = SimpleNamespace(disaggregation_decode_enable_radix_cache=False, enable_hisparse=False)
    for name in ("get_disagg", "get_memory"):
        monkeypatch.setattr(batch_result_processor, name, lambda: config)
    monkeypatch.setattr(
        batch_result_processor, "release_kv_cache", lambda req, *_, **__: released.append(req.rid)
    )
    processor = SimpleNamespace(
        disaggregation_mode=batch_result_processor.DisaggregationMode.DECODE,
        draft_worker=hooked,
        tree_cache=None,
        output_streamer=SimpleNamespace(stream_output=lambda *_: None),
    )
    reqs = [
        SimpleNamespace(
            rid=rid,
            time_stats=SimpleNamespace(
                set_decode_prebuilt_finish_time=lambda: None, set_quick_finish_time=lambda: None
            ),
            update_finish_state=lambda: None,
            finished=lambda rid=rid: rid == "left",
        )
        for rid in ("left", "stays")
    ]
    batch = SimpleNamespace(reqs=reqs, return_logprob=False)
    batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prebuilt(processor, batch)
    assert released == ["left"]
    assert hooked.ended == ["left"]


def test_a_rid_that_an_open_session_has_twice_ends_no_scheduler(hooked):
    nodes: dict[str, SessionReqNode] = {}
    for rid, parent in (("a", None), ("b", "a"), ("b", "a")):
        req = SimpleNamespace(rid=rid, finished_reason=None)
        nodes[rid] = SessionReqNode(req, parent and nodes[parent])
    nodes["a"].clear_children(nodes)
    assert nodes.keys() == {"a"}
