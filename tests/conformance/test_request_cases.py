"""Every answer to the request cases is plain decoding's, with every method: the sharpest at every change, all with `--long`.

Those that need words run on the demo model: tests/e2e/test_request_cases.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.conftest import CONTEXT, is_adaptive
from tests.conformance.request_cases import CASES, Client, Model, differences
from tests.support.tiny_model import SPELLING_VOCABULARY

NAMES = [
    pytest.param(name, marks=() if case.sharp else pytest.mark.long)
    for name, case in CASES.items()
    if not case.demo
]


@pytest.fixture(scope="session")
def model(prompts) -> Model:
    """Texts that go on with more than one character over and over."""
    return Model([prompts[i] for i in (7, 13, 17, 19)], SPELLING_VOCABULARY, eos=1, context=CONTEXT)


@pytest.fixture(scope="session")
def expected(plain, model) -> Callable[[str], Any]:
    """Plain decoding's answer to a case."""
    return functools.cache(lambda name: CASES[name].ask(Client(plain.url, model)))


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_plain_decodings(server, expected, model, name):
    plain = expected(name)
    assert differences(plain, CASES[name].ask(Client(server.url, model, is_adaptive(server)))) == []
