"""Requests as the request book sees them, and small trees."""

from array import array
from types import SimpleNamespace

import numpy as np

from datastore_service.protocol.tree import DraftTree
from sglang_patches.drafting.requests import RequestBook


def make_req(rid="r", prompt=(1, 2, 3), custom_params=None):
    req = SimpleNamespace(
        rid=rid,
        origin_input_ids=array("q", prompt),
        output_ids=array("q"),
        finished_len=None,
        sampling_params=SimpleNamespace(custom_params=custom_params),
    )
    req.finished = lambda: req.finished_len is not None
    return req


def make_book(plain=None, begun_elsewhere=lambda req: None):
    return RequestBook(100, True, "", lambda req: plain, begun_elsewhere)


def make_tree(tokens, parents):
    size = len(tokens)
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.full(size, 0.5, np.float32),
        np.full(size, 3, np.uint8),
    )
