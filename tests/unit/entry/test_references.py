"""The texts that a request expects its answer to follow, as the process that answers it makes tokens of them."""

import copy
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput  # noqa: E402

from sglang_patches.entry.references import FIELD, MOST_BYTES, _after_tokenized  # noqa: E402
from sglang_patches.entry.request_wishes import wishes_of  # noqa: E402
from sglang_patches.ledger.reference import SEPARATOR  # noqa: E402
from sglang_patches.ledger.requests import REFERENCE_TOKENS, reference_of  # noqa: E402
from tests.unit.entry.test_request_checks import tokenized  # noqa: E402

BYTES = SimpleNamespace(encode=lambda text, add_special_tokens: list(text.encode()))
SHORT = {"reference": "abc"}


def custom_of(wishes: object, tokenizer: object = BYTES, **custom: object) -> dict:
    """The `custom_params` of a message to the scheduler."""
    message = tokenized({"custom_params": {"specstore": wishes, **custom}})
    _after_tokenized(message, SimpleNamespace(tokenizer=tokenizer), GenerateReqInput(text="a"))
    return message.sampling_params.custom_params


def test_a_text_becomes_tokens():
    wishes = {"reference": "abc", "conversation": "c"}
    assert custom_of(wishes, other=1) == {
        "specstore": {"conversation": "c"},
        "other": 1,
        REFERENCE_TOKENS: [97, 98, 99],
    }


@pytest.mark.parametrize("given", [5, "ab", {"a": 1}, ["x"], [1.0], [True], [[1]]])
def test_what_is_no_list_of_tokens_is_no_reference(given):
    """SGLang's Rust server passes on what a client wrote."""
    message = tokenized({"custom_params": {REFERENCE_TOKENS: given}})
    assert reference_of(message, 100) is None


def test_numbers_that_are_no_tokens_end_a_text():
    message = tokenized({"custom_params": {REFERENCE_TOKENS: [7, -7, 100, 2**70, 9]}})
    reference = reference_of(message, 100)
    assert reference._tokens.tolist() == [7, SEPARATOR, SEPARATOR, SEPARATOR, 9, SEPARATOR]


def test_several_texts_are_apart():
    assert custom_of({"reference": ["ab", "", "c"]})[REFERENCE_TOKENS] == [97, 98, SEPARATOR, 99]


@pytest.mark.parametrize("nothing", ["", [], [""]])
def test_without_text_there_is_no_reference(nothing):
    custom = custom_of({"reference": nothing})
    assert custom == {"specstore": {}, REFERENCE_TOKENS: []}
    assert reference_of(SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom)), 100) is None


@pytest.mark.parametrize("wishes", [None, {}, {"reference": None}, {"publish": False}])
def test_a_request_without_one_stays_as_it_is(wishes):
    assert custom_of(wishes) == {"specstore": wishes}


def test_half_of_a_surrogate_pair_is_no_error():
    assert custom_of({"reference": "a\ud800"})[REFERENCE_TOKENS] == [97, ord("?")]


def test_what_the_client_wrote_is_left_for_further_samples():
    given = {"specstore": {"reference": ["abc"]}}
    message, before = tokenized({"custom_params": given}), copy.deepcopy(given)
    _after_tokenized(message, SimpleNamespace(tokenizer=BYTES), GenerateReqInput(text="a"))
    assert given == before and message.sampling_params.custom_params != before


def test_embeddings_are_not_looked_at():
    message = SimpleNamespace(sampling_params=None)
    _after_tokenized(message, SimpleNamespace(), EmbeddingReqInput(text="a"))


def test_the_most_text_is_taken():
    assert len(custom_of({"reference": ["a" * (MOST_BYTES - 2), "é"]})[REFERENCE_TOKENS]) == MOST_BYTES + 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wishes": {"reference": "é" * (MOST_BYTES // 2) + "a"}}, f"{FIELD}: {MOST_BYTES + 1} bytes exceed {MOST_BYTES}"),
        ({"wishes": {"reference": ["a" * MOST_BYTES, "a"]}}, f"{FIELD}: {MOST_BYTES + 1} bytes exceed {MOST_BYTES}"),
        ({"wishes": {"reference": ["a", 7]}}, f"{FIELD}: 7 is not a string"),
        ({"wishes": {"reference": [["a"]]}}, rf"{FIELD}: \['a'\] is not a string"),
        ({"wishes": SHORT, "tokenizer": None}, f"{FIELD}: not on a server without a tokenizer"),
        ({"wishes": SHORT, REFERENCE_TOKENS: [1]}, f"custom_params.{REFERENCE_TOKENS}: not from a client"),
    ],
)  # fmt: skip
def test_what_is_none_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        custom_of(**given)


@pytest.mark.parametrize("given", [7, True, {"a": "b"}])
def test_another_type_is_refused_where_the_request_enters(given):
    with pytest.raises(ValueError, match=f"^{FIELD}: .* is not a string or a list of strings"):
        wishes_of(
            GenerateReqInput(text="a", sampling_params={"custom_params": {"specstore": {"reference": given}}})
        )
