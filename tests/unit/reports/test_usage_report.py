"""The fields of an answer, through SGLang's own functions, hooked."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer  # noqa: E402
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context  # noqa: E402

from sglang_patches.ledger.requests import USAGE  # noqa: E402
from sglang_patches.ledger.usage import Usage  # noqa: E402
from sglang_patches.reports import SUMMARY, register_in_entry, register_in_scheduler  # noqa: E402
from tests.unit.plugin.resolution import server_args  # noqa: E402

NODES = 7
TOLD = {"steps": 4, "drafted": {"prior": 9, "session": 3}, "accepted": {"prior": 6}}


@pytest.fixture
def manager(plugin, model_path, monkeypatch):
    """A tokenizer manager as far as these functions look at it."""
    monkeypatch.setenv("SPECSTORE_NODES", str(NODES))
    arguments = server_args(model_path("dense"), "ampere")
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    register_in_entry()
    yield SimpleNamespace(_accumulate_request_meta_info=TokenizerManager._accumulate_request_meta_info)
    reset_context()


def metrics(manager, meta_info):
    """meta_info, after SGLang's own figures were added: 4 steps, 6 correct drafts, 11 tokens."""
    received = SimpleNamespace(
        spec_verify_ct=[4],
        spec_num_correct_drafts=[6],
        completion_tokens=[11],
        spec_correct_drafts_histogram=None,
    )
    TokenizerManager._calculate_spec_decoding_metrics(manager, meta_info, received, 0)
    return meta_info


def test_drafted_tokens_are_those_that_were_verified(manager):
    info = metrics(manager, {SUMMARY: TOLD})
    assert info["spec_num_proposed_drafts"] == 12 and info["spec_accept_rate"] == 0.5
    assert info["spec_accept_length"] == 11 / 4 and info[SUMMARY] == TOLD


def test_without_our_field_sglang_counts_the_widest_tree(manager):
    assert metrics(manager, {})["spec_num_proposed_drafts"] == 4 * NODES


def test_nothing_drafted_has_no_rate(manager):
    assert metrics(manager, {SUMMARY: TOLD | {"drafted": {}}})["spec_accept_rate"] == 0.0


def test_our_field_is_no_list_with_an_entry_a_token(manager):
    state = SimpleNamespace(customized_info_accumulated={}, customized_info_reported_keys=set())
    for message in ({"other": [["x"], []]}, {"other": [["y"], []], SUMMARY: [[TOLD], []]}):
        info: dict = {}
        TokenizerManager.update_request_meta_info(manager, info, state, message, 0, None)
    assert info == {"other": ["x", "y"], SUMMARY: TOLD}
    assert set(state.customized_info_accumulated) == {"other"}
    info = {}
    TokenizerManager.update_request_meta_info(manager, info, state, {SUMMARY: [[TOLD], []]}, 1, None)
    assert info == {}


def request(finished, usage=True):
    req = SimpleNamespace(finished=lambda: finished, output_ids_through_stop=[5, 6])
    if usage:
        setattr(req, USAGE, Usage(3))
    return req


def test_the_streamer_tells_of_requests_that_have_ended():
    register_in_scheduler()
    told = Scheduler.get_output_streamer_class(SimpleNamespace(rust_server=None))
    assert issubclass(told, SchedulerOutputStreamer) and told.has_additional_customized_info
    fields = told.build_additional_customized_info
    assert fields(None, [request(False), request(True), request(True, usage=False)]) == {
        SUMMARY: [[], [{"steps": 0, "drafted": {}, "accepted": {}}], []]
    }
    assert fields(None, [request(False)]) == {}


def test_sglang_s_rust_server_gets_none(caplog):
    register_in_scheduler()
    streamer = Scheduler.get_output_streamer_class(SimpleNamespace(rust_server=object()))
    assert streamer is SchedulerOutputStreamer and "Rust server" in caplog.text
