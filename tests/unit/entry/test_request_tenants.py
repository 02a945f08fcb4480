"""The tenant of a request, through SGLang's own functions, hooked."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402
from starlette.datastructures import Headers  # noqa: E402

from sglang_patches.entry.request_tenants import MOST_BYTES, NOT_DIVIDED, of_tenant  # noqa: E402
from sglang_patches.entry.request_wishes import WISHES  # noqa: E402
from sglang_patches.host.versions import INSTALLED, TESTED  # noqa: E402
from sglang_patches.ledger.requests import tenants_of  # noqa: E402
from sglang_patches.options import Options  # noqa: E402
from tests.unit.entry.conftest import manager  # noqa: E402

HEADER = "x-tenant"
FROM_HEADER, FROM_BODY = f"header:{HEADER}", "custom_params"


def sent(body: dict | None = None, header: str | bytes | None = None, **fields: object) -> GenerateReqInput:
    """A request as SGLang has it when it makes its state."""
    sampling = {"sampling_params": {"custom_params": {"specstore": body}}} if body is not None else {}
    obj = GenerateReqInput(**{"text": "a question", **sampling, **fields})
    obj.normalize_batch_and_arguments()
    values = [] if header is None else [header.encode() if isinstance(header, str) else header]
    request = SimpleNamespace(headers=Headers(raw=[(HEADER.encode(), value) for value in values]))
    TokenizerManager._init_req_state(manager(), obj, request)
    return obj


def tenant(sampling: dict, source: str = FROM_HEADER) -> str:
    """As the scheduler reads it."""
    params = SimpleNamespace(custom_params=sampling.get("custom_params"))
    return tenants_of(Options(request_tenant=source))(SimpleNamespace(sampling_params=params))


def test_a_header_names_the_tenant_of_every_request_of_a_batch(answering):
    answering(FROM_HEADER)
    assert tenant(sent(header="acme").sampling_params) == "acme"
    batch = sent(text=["one", "two"], header="acme", sampling_params={"n": 1})
    assert [tenant(each) for each in batch.sampling_params] == ["acme", "acme"]
    assert tenant(sent().sampling_params) == ""


def test_a_header_is_utf_8(answering):
    answering(FROM_HEADER)
    assert tenant(sent(header="müller").sampling_params) == "müller"
    assert tenant(sent(header="ü" * (MOST_BYTES // 2)).sampling_params) == "ü" * (MOST_BYTES // 2)
    with pytest.raises(ValueError, match=f"^{HEADER}: 258 bytes exceeds 256"):
        sent(header="ü" * 129)
    with pytest.raises(ValueError, match=f"^{HEADER}: not UTF-8"):
        sent(header="müller".encode("latin-1"))


def test_a_header_given_twice_is_refused(answering):
    """The client's own, and the one that its gateway has added."""
    answering(FROM_HEADER)
    obj = GenerateReqInput(text="a question")
    obj.normalize_batch_and_arguments()
    twice = Headers(raw=[(HEADER.encode(), value) for value in (b"alice", b"eve")])
    with pytest.raises(ValueError, match=f"^{HEADER}: given 2 times"):
        TokenizerManager._init_req_state(manager(), obj, SimpleNamespace(headers=twice))


def test_further_samples_of_a_prompt_are_their_tenant_s(answering):
    """SGLang makes the state of each by itself, from a copy without a request."""
    answering(FROM_HEADER)
    several = sent(header="acme", sampling_params={"n": 3})
    sample = copy.copy(several[0])
    sample.regenerate_rid()
    TokenizerManager._init_req_state(manager(), sample)
    assert tenant(several[0].sampling_params) == tenant(sample.sampling_params) == "acme"
    assert several[0].extra_key == sent(header="acme").extra_key


def test_what_a_request_asks_for_besides_stays(answering):
    answering(FROM_HEADER)
    custom = {"other": 1, "specstore": {"conversation": "c"}}
    obj = sent(header="acme", sampling_params={"temperature": 0, "custom_params": custom})
    assert obj.sampling_params == {
        "temperature": 0,
        "custom_params": {"other": 1, "specstore": {"conversation": "c", "tenant": "acme"}},
    }
    assert custom == {"other": 1, "specstore": {"conversation": "c"}}


def test_a_client_cannot_name_another_tenant_than_its_header(answering):
    answering(FROM_HEADER)
    for header in ("acme", None):
        with pytest.raises(
            ValueError, match="custom_params.specstore.tenant: the tenant is that of the header"
        ):
            sent({"tenant": "other"}, header)


def test_a_body_names_the_tenant(answering):
    answering(FROM_BODY)
    assert tenant(sent({"tenant": "acme"}).sampling_params, FROM_BODY) == "acme"
    sampling = [{}, {"custom_params": {"specstore": {"tenant": "acme"}}}]
    batch = sent(text=["one", "two"], sampling_params=sampling)
    assert [tenant(each, FROM_BODY) for each in batch.sampling_params] == ["", "acme"]


@pytest.mark.parametrize(
    ("name", "message"), [(7, "7 is not a string"), ("x" * (MOST_BYTES + 1), "257 bytes exceeds 256")]
)
def test_what_is_no_name_is_refused(answering, name, message):
    answering(FROM_BODY)
    with pytest.raises(ValueError, match=f"custom_params.specstore.tenant: .*{message}"):
        sent({"tenant": name})
    answering(FROM_HEADER)
    if isinstance(name, str):
        with pytest.raises(ValueError, match=f"{HEADER}: {message}"):
            sent(header=name)


def test_a_name_that_is_not_unicode_is_refused_by_name(answering):
    answering(FROM_BODY)
    with pytest.raises(ValueError, match=r"^custom_params\.specstore\.tenant: '\\ud800' is not Unicode"):
        sent({"tenant": "\ud800"})


WRONG_WISHES = [
    ({"publish": "false"}, "publish: 'false' is not true or false"),
    ({"publish": 0}, "publish: 0 is not true or false"),
    ({"sources": "yes"}, "sources: 'yes' is not true or false"),
    ({"conversation": 7}, "conversation: 7 is not a string"),
    ({"conversation": ["c"]}, "conversation: .* is not a string"),
    ({"draft": "no"}, "draft: 'no' is not true, false or a list of datastore, draft_model, head, reference"),
    ({"draft": ["datastore", "cache"]}, r"draft: \['datastore', 'cache'\] is not true, false or a list of"),
    ({"draft": [["head"]]}, "draft: .* is not true, false or a list of"),
    ({"nodes": -1}, "nodes: -1 is not a whole number of at least 0"),
    ({"nodes": 1.5}, "nodes: 1.5 is not a whole number"),
    ({"nodes": True}, "nodes: True is not a whole number"),
    (
        {"conversations": "c"},
        "'conversations' is none of conversation, draft, group, nodes, priors, publish, reference, sources, user, workspace, tenant",
    ),
]


@pytest.mark.parametrize("source", ["", FROM_BODY, FROM_HEADER])
@pytest.mark.parametrize(("wishes", "message"), WRONG_WISHES, ids=str)
def test_a_wish_of_another_type_is_refused_by_name(answering, source, wishes, message):
    answering(source)
    with pytest.raises(ValueError, match=rf"^custom_params\.specstore[.:] ?{message}"):
        sent(wishes)


def test_a_null_is_a_wish_that_is_not_given(answering):
    answering(FROM_BODY)
    sent(dict.fromkeys(WISHES))


@pytest.mark.parametrize("source", ["", FROM_BODY, FROM_HEADER])
@pytest.mark.parametrize(
    ("custom", "field"), [(["x"], "custom_params"), ({"specstore": "x"}, "custom_params.specstore")]
)
def test_what_is_no_object_is_refused(answering, source, custom, field):
    answering(source)
    with pytest.raises(ValueError, match=f"^{field}: .* is not an object"):
        sent(header="acme", sampling_params={"custom_params": custom})


def test_a_server_of_one_tenant_takes_none_from_requests(answering):
    answering("")
    with pytest.raises(ValueError, match="takes no tenants from requests"):
        sent({"tenant": "acme"})
    assert sent(header="acme").sampling_params == {}
    assert tenant({"custom_params": {"specstore": {"tenant": "acme"}}}, source="") == ""


def test_tenants_do_not_share_cached_prompts(answering):
    answering(FROM_HEADER)
    keys = [
        sent(header=header, extra_key=key).extra_key
        for header in (None, "a", "ab", "1:a:")
        for key in (None, "b", "1:a:", "0::")
    ]
    assert None not in keys and len(set(keys)) == len(keys)
    assert sent(header="a").extra_key == sent(header="a").extra_key
    assert sent(header="a", extra_key="b:x").extra_key != sent(header="a:b", extra_key="x").extra_key
    batch = sent(text=["one", "two"], header="a", extra_key=["x", "y"])
    assert batch.extra_key == [sent(header="a", extra_key=key).extra_key for key in "xy"]
    answering("")
    assert sent().extra_key is None


@given(*[st.text(":0123456789ab", max_size=6)] * 4)
def test_no_tenant_can_write_a_name_of_another(tenant, name, other, other_name):
    same = of_tenant(tenant, name) == of_tenant(other, other_name)
    assert same == ((tenant, name) == (other, other_name))


def test_a_session_is_named_by_its_tenant_too(answering):
    answering(FROM_HEADER)
    names = [
        sent(header=header, session_params={"id": name, "rid": "r"}).session_params["id"]
        for header in (None, "a", "ab", "1:a:")
        for name in ("s", "1:a:s", "0::s")
    ]
    assert len(set(names)) == len(names)
    assert sent(header="a", session_params={"id": "s", "rid": "r"}).session_params["rid"] == "r"
    assert sent(header="a", session_id="s").session_id != sent(header="b", session_id="s").session_id
    batch = sent(text=["one", "two"], header="a", session_params={"id": "s"})
    assert batch.session_params == sent(header="a", session_params={"id": "s"}).session_params
    answering("")
    assert sent(session_params={"id": "s"}).session_params == {"id": "s"}


@pytest.mark.parametrize(
    "wrong", [{"session_params": {"id": {}}}, {"session_params": ["s"]}, {"session_id": 7}]
)
def test_what_names_no_session_is_refused(answering, wrong):
    answering(FROM_HEADER)
    with pytest.raises(ValueError, match="^session_"):
        sent(header="a", **wrong)


def test_a_batch_of_several_tenants_shares_no_session(answering):
    answering(FROM_BODY)
    sampling = [{}, {"custom_params": {"specstore": {"tenant": "acme"}}}]
    with pytest.raises(ValueError, match="^session_params: one session for requests of several tenants"):
        sent(text=["one", "two"], sampling_params=sampling, session_params={"id": "s"})


@pytest.mark.parametrize("field", NOT_DIVIDED)
def test_what_is_not_divided_is_refused(answering, field):
    for source in (FROM_HEADER, FROM_BODY):
        answering(source)
        obj = sent()
        setattr(obj, field, ["abc"])
        with pytest.raises(ValueError, match=f"^{field}: not on a server whose requests name tenants"):
            TokenizerManager._init_req_state(manager(), obj)
    answering("")
    TokenizerManager._init_req_state(manager(), obj)


# Every field of a request that SGLang takes: whether it can lead to what another request has said. One that is new in SGLang is to be
# looked at before it gets its place here.
DIVIDED = {"extra_key", "session_params", "session_id", "sampling_params"}
BESIDE_EXTRA_KEY = {  # further parts of the key that `extra_key` begins
    "cache_salt",
    "lora_path",
    "lora_id",
}
OF_AN_OPERATOR_S_NETWORK = {  # instances, which only their router may reach (docs/security.md)
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
    "disagg_prefill_dp_rank", "encoder_urls", "need_wait_for_mm_inputs", "num_items_assigned", "http_worker_ipc",
}  # fmt: skip
OWN_CONTENT = {
    "text", "input_ids", "input_embeds", "image_data", "video_data", "audio_data", "modalities", "positional_embed_overrides",
    "multi_item_delimiter_indices", "token_indices_to_pool",
}  # fmt: skip
OWN_ANSWER = {
    "rid", "watermark", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_sampling_mask",
    "sampling_logprobs_mode", "return_text_in_logprobs", "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs_b64", "stream", "return_hidden_states", "return_routed_experts", "routed_experts_start_len",
    "return_indexer_topk", "custom_logit_processor", "return_bytes", "return_entropy", "return_prompt_token_ids",
    "require_reasoning", "max_thinking_tokens", "background",
}  # fmt: skip
OWN_TREATMENT = {
    "use_audio_in_video", "video_config", "log_metrics", "routed_dp_rank", "data_parallel_rank", "routing_key", "conversation_id",
    "priority", "no_logs", "custom_labels", "external_trace_header", "received_time", "max_dynamic_patch", "min_dynamic_patch",
    "image_max_dynamic_patch", "video_max_dynamic_patch", "images_config", "mm_processor_kwargs",
}  # fmt: skip


@pytest.mark.skipif(TESTED[-1] != INSTALLED, reason="the fields are those of the newest version")
def test_every_field_of_a_request_has_been_looked_at():
    looked_at = [
        *DIVIDED,
        *NOT_DIVIDED,
        *BESIDE_EXTRA_KEY,
        *OF_AN_OPERATOR_S_NETWORK,
        *OWN_CONTENT,
        *OWN_ANSWER,
        *OWN_TREATMENT,
    ]
    assert sorted(looked_at) == sorted(field.name for field in dataclasses.fields(GenerateReqInput))


@pytest.mark.parametrize("source", [FROM_HEADER, FROM_BODY])
@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"grpc_port": 40000}, "SGLang's gRPC server"),
        ({"enable_response_store": True}, "--enable-response-store"),
    ],
)
def test_ways_around_are_refused(answering, source, given, flag):
    with pytest.raises(ValueError, match=f"--specstore-request-tenant: not with {flag}"):
        answering(source, **given)
    answering("", **given)


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [("SGLANG_GRPC_PORT", "40000", "gRPC"), ("SGLANG_RUST_SERVER", "1", "Rust server")],
)
def test_ways_around_by_environment_are_refused(answering, monkeypatch, variable, value, named):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"--specstore-request-tenant: not with SGLang's {named}"):
        answering(FROM_HEADER)


def test_what_names_no_source_is_refused():
    for wrong in ("header:", "header:a b", "body"):
        with pytest.raises(ValueError, match="request_tenant"):
            Options(request_tenant=wrong)
