"""Requests that public bug reports of speculative decoding led to, each compared with plain decoding's answer.

A case names the report where one stands behind it.
"""

from tests.conformance.request_cases import (  # noqa: F401 - they fill CASES
    answers,
    chat,
    edges,
    grammars,
    logits,
    serving,
    stops,
)
from tests.conformance.request_cases.asking import CASES, Client, Model, differences

__all__ = ["CASES", "Client", "Model", "differences"]
