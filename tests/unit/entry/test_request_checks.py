"""Requests as the process that answers them makes them for the scheduler."""

import inspect
from array import array
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.managers.io_struct import (  # noqa: E402
    EmbeddingReqInput,
    GenerateReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from sglang_patches.entry import request_checks  # noqa: E402
from sglang_patches.entry.request_checks import (  # noqa: E402
    GRAMMARS,
    SET_BY_SGLANG,
    RequestFields,
    SamplingFields,
    SessionFields,
    _check_places,
    _drop_unsayable_stops,
    check,
)
from sglang_patches.host.versions import INSTALLED, TESTED, host  # noqa: E402

VOCAB = 100
TESTED_NOTHING = SimpleNamespace(encode=lambda text, **_: list(text))


def tokenized(sampling=None, **fields) -> TokenizedGenerateReqInput:
    params = SamplingParams(**sampling or {})
    params.normalize(TESTED_NOTHING)
    whole = {
        "rid": "r", "input_text": None, "input_ids": array("q", [1, 2]), "input_embeds": None, "mm_inputs": None,
        "token_type_ids": None, "sampling_params": params, "return_logprob": False, "logprob_start_len": -1,
        "top_logprobs_num": 0, "token_ids_logprob": None, "stream": False,
    }  # fmt: skip
    return TokenizedGenerateReqInput(**whole | fields)


@pytest.mark.parametrize(
    "request_",
    [
        tokenized(),
        tokenized({"temperature": 0, "stop": "a", "stop_token_ids": [VOCAB], "logit_bias": {"5": 1}, "json_schema": "{}"}),
        tokenized({"stop": ["a", "b"], "logit_bias": {5: 0.5}, "ignore_eos": 1, "custom_params": {"a": [{"b": []}]}}),
        tokenized(top_logprobs_num=VOCAB, token_ids_logprob=[0], return_hidden_states="last"),
        tokenized(input_ids=array("q"), session_params=SessionParams(id="s", rid="r")),
        tokenized(session_params=SessionParams(id="s", rid="r", replace=True)),
        tokenized({"logit_bias": {"5": float("-inf"), "6": -100.0}}),
        tokenized(input_ids=array("q"), mm_inputs=object()),  # the scheduler puts hashes in the place of images
        tokenized(input_ids=None, input_embeds=[[0.5]]),
    ],
)  # fmt: skip
def test_what_sglang_serves_passes(request_):
    check(request_, VOCAB)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (tokenized(input_ids=array("q")), "prompt: it has no tokens"),
        (tokenized(input_ids=array("q", [1, VOCAB])), r"input_ids: 100 is outside \[0, 100\)"),
        (tokenized(input_ids=array("q", [-1, 1])), "input_ids: -1 is outside"),
        (tokenized(top_logprobs_num=VOCAB + 1), r"top_logprobs_num: 101 is outside 0..100"),
        (tokenized(top_logprobs_num=-1), "top_logprobs_num: -1 is outside"),
        (tokenized(top_logprobs_num=[1]), "top_logprobs_num: Expected `int`, got `array`"),
        (
            tokenized(session_params=SessionParams(id={})),
            "session_params.id: Expected `str | null`, got `object`",
        ),
        (tokenized(session_params=SessionParams(id="s", offset="1")), "session_params.offset: Expected"),
        (tokenized(rid=7), "rid: Expected `str`, got `int`"),
        (tokenized({"max_new_tokens": 2.5}), "sampling_params.max_new_tokens: Expected"),
        (tokenized({"json_schema": {"a": 1}}), "sampling_params.json_schema: Expected"),
        (tokenized({"stop_token_ids": [3, -1]}), r"sampling_params.stop_token_ids: -1 is below 0"),
        (tokenized(token_ids_logprob=[0, VOCAB]), rf"token_ids_logprob: {VOCAB} is outside \[0, {VOCAB}\)"),
        (tokenized(token_ids_logprob=[-1]), rf"token_ids_logprob: -1 is outside \[0, {VOCAB}\)"),
        (tokenized({"logit_bias": {"5": "x"}}), r"sampling_params.logit_bias\[...\]: Expected"),
        (tokenized(extra_key=["a"]), "extra_key: Expected"),
        (tokenized(token_indices_to_pool=["a"]), r"token_indices_to_pool\[0\]: Expected"),
        (tokenized(multi_item_delimiter_indices=3), "multi_item_delimiter_indices: Expected"),
        (tokenized(lora_id=["a"]), "lora_id: Expected"),
        (tokenized(logprob_start_len=-2), "logprob_start_len: Expected `int` >= -1"),
        (tokenized({"top_k": 2**31}), "sampling_params.top_k: Expected `int` <= 2147483647"),
        (
            tokenized({"min_new_tokens": 2**31, "max_new_tokens": None}),
            "sampling_params.min_new_tokens: Expected",
        ),
        (tokenized({"max_new_tokens": 2**64}), "sampling_params.max_new_tokens: "),
        (tokenized({"sampling_seed": 2**63}), "sampling_params.sampling_seed: "),
        (
            tokenized({"logit_bias": {"5": float("inf")}}),
            "sampling_params.logit_bias: inf of token 5 is above 1e",
        ),
        (tokenized({"logit_bias": {"5": float("nan")}}), "sampling_params.logit_bias: nan of token 5"),
        (tokenized({"logit_bias": {"5": 3e38}}), "sampling_params.logit_bias: 3e.38 of token 5"),
        (tokenized({"temperature": float("nan")}), "sampling_params.temperature: nan is no finite number"),
        (tokenized({"min_p": float("nan")}), "sampling_params.min_p: nan is no finite number"),
        (
            tokenized(session_params=SessionParams(id="s", replace=True)),
            "session_params.replace: needs session_params.rid",
        ),
        (tokenized(positional_embed_overrides=""), "positional_embed_overrides: not from a client"),
    ],
)
def test_what_would_end_the_scheduler_is_refused_by_name(request_, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        check(request_, VOCAB)


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("text", ["\0", r'{"pattern": "\u0000"}'])
def test_a_grammar_has_no_nul_where_that_ends_the_scheduler(name, text, monkeypatch):
    request = tokenized({name: text})
    monkeypatch.setattr(host, "GRAMMARS_TAKE_NUL", True)
    check(request, VOCAB)
    monkeypatch.setattr(host, "GRAMMARS_TAKE_NUL", False)  # as it is on 0.5.17
    check(tokenized({name: "a"}), VOCAB)
    with pytest.raises(ValueError, match=f"^sampling_params.{name}: it has the character NUL"):
        check(request, VOCAB)


def hooked(obj, error=None, **fields):
    """A call of SGLang's function, hooked, that makes a message of what the client wrote."""

    def original(manager, obj, *_):
        if error:
            raise error
        return tokenized(**fields)

    collector = SimpleNamespace(labels={"model_name": "m"})
    manager = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=VOCAB),
        server_args=None,
        enable_metrics=True,
        metrics_collector=collector,
    )
    return request_checks._around_tokenized(original, manager, obj, "text", [])


@pytest.mark.parametrize("name", SET_BY_SGLANG)
def test_what_sglang_notes_among_the_parameters_comes_from_no_client(name):
    assert name in inspect.signature(SamplingParams).parameters
    with pytest.raises(ValueError, match=f"^sampling_params.{name}: not from a client"):
        hooked(GenerateReqInput(text="a", sampling_params={"temperature": 0, name: 1}))
    assert hooked(GenerateReqInput(text="a", sampling_params={"temperature": 0})).rid == "r"


@pytest.mark.parametrize(
    "error", [TypeError("unexpected keyword argument 'x'"), OverflowError("int too big")]
)
def test_an_error_of_a_type_is_one_of_a_value_which_is_answered_400(error):
    with pytest.raises(ValueError, match=str(error)) as raised:
        hooked(GenerateReqInput(text="a"), error)
    assert raised.value.__cause__ is error


def test_embeddings_have_no_tokens_to_generate():
    assert hooked(EmbeddingReqInput(text="a"), input_ids=array("q")) is not None
    with pytest.raises(ValueError, match="no tokens"):
        hooked(GenerateReqInput(text="a"), input_ids=array("q"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs --disable-radix-cache"),
        ({"disable_radix_cache": True}, "needs --disable-radix-cache and --chunked-prefill-size -1"),
        ({"disable_radix_cache": True, "chunked_prefill_size": -1}, r"2 is outside \[0, 2\)"),
    ],
)
def test_places_of_a_prompt_are_in_what_one_prefill_reads(given, message):
    view = SimpleNamespace(**{"disable_radix_cache": False, "chunked_prefill_size": 64} | given)
    with pytest.raises(ValueError, match=f"^token_indices_to_pool: {message}"):
        _check_places(tokenized(token_indices_to_pool=[0, 2]), view)
    _check_places(tokenized(), view)


def test_labels_are_those_of_the_server_s_metrics():
    assert hooked(GenerateReqInput(text="a", custom_labels={"model_name": "x"})) is not None
    with pytest.raises(ValueError, match=r"^custom_labels: 'x' is none of \['model_name'\]"):
        hooked(GenerateReqInput(text="a", custom_labels={"x": "y"}))


@pytest.mark.skipif(TESTED[-1] != INSTALLED, reason="earlier versions lack some of them")
def test_the_fields_are_sglang_s():
    """A field that SGLang renames would not be checked any more."""
    pairs = [
        (RequestFields, TokenizedGenerateReqInput),
        (SamplingFields, SamplingParams),
        (SessionFields, SessionParams),
    ]
    for ours, theirs in pairs:
        assert set(ours.__struct_fields__) <= set(theirs.__struct_fields__)


def test_stops_that_the_model_cannot_say_are_dropped():
    """SGLang's min_new_tokens and ours look each of them up in the logits."""
    params = SamplingParams(min_new_tokens=3, stop_token_ids=[5, VOCAB - 1, VOCAB, 2**40])
    _drop_unsayable_stops(params, VOCAB)
    assert params.stop_token_ids == {5, VOCAB - 1}
    params = SamplingParams()
    _drop_unsayable_stops(params, VOCAB)
    assert not params.stop_token_ids
