"""What counts as a difference between two servers' answers to a request case."""

import pytest

from tests.conformance.request_cases import differences

ANSWER = {"ids": [1, 2], "text": "ab", "logprobs": [[-0.5, 1, None], [None, 2, "b"]], "told": None}


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"ids": [1, 3]}, "/ids[1]"),
        ({"ids": [1]}, "/ids"),
        ({"ids": [1, 2.0]}, "/ids[1]"),
        ({"text": "ab "}, "/text"),
        ({"told": False}, "/told"),
        ({"more": 1}, ""),
        ({"logprobs": [[-0.502, 1, None], [None, 2, "b"]]}, "/logprobs[0][0]"),
        ({"logprobs": [[float("nan"), 1, None], [None, 2, "b"]]}, "/logprobs[0][0]"),
        ({"logprobs": [[-0.5, 1, None], [-0.5, 2, "b"]]}, "/logprobs[1][0]"),
    ],
)
def test_what_differs_is_found_where_it_is(changed, where):
    (found,) = differences(ANSWER, ANSWER | changed)
    assert found.startswith(f"{where}: plain ")


def test_floats_may_differ_by_rounding_alone():
    rounded = {"logprobs": [[-0.5009, 1, None], [None, 2, "b"]]}
    assert differences(ANSWER, ANSWER | rounded) == differences(ANSWER, ANSWER) == []
