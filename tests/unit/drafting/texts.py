"""Requests as the request book sees them, and small trees."""

from array import array
from types import SimpleNamespace

import numpy as np

from datastore_service.protocol.tree import DraftTree
from sglang_patches.ledger.requests import RequestBook

SAMPLING = {
    "temperature": 1.0,
    "top_k": 1,
    "top_p": 1.0,
    "min_p": 0.0,
    "ignore_eos": False,
    "stop_token_ids": None,
}


def make_req(rid="r", prompt=(1, 2, 3), custom_params=None, **sampling):
    req = SimpleNamespace(
        rid=rid,
        origin_input_ids=array("q", prompt),
        output_ids=array("q"),
        finished_len=None,
        sampling_params=SimpleNamespace(custom_params=custom_params, **SAMPLING | sampling),
        eos_token_ids=None,
        tokenizer=None,
    )
    req.finished = lambda: req.finished_len is not None
    return req


def make_book(plain=None, begun_elsewhere=lambda req: None, tenant=""):
    return RequestBook(100, True, lambda req: tenant, lambda req: plain, begun_elsewhere)


def make_tree(tokens, parents):
    size = len(tokens)
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.full(size, 0.5, np.float32),
        np.full(size, 3, np.uint8),
    )
