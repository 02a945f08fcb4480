"""Whatever a client names or counts, the server goes on, and its neighbours' answers are plain decoding's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from sglang_patches.launch.servers import Endpoint

LENGTHS = (0, 1, 255, 256, 257, 300, 10**5)
NAMES = [*("x" * length for length in LENGTHS), "ü" * 129, "a\x00\x1b[31m\u202e\n", "sha256:" + "0" * 64]
NO_UNICODE = "\ud800"  # half of a surrogate pair: SGLang refuses the JSON


def post(server: Endpoint, path: str, body: dict[str, Any]) -> requests.Response:
    """JSON of any strings, lone surrogates included."""
    data = json.dumps(body).encode()
    return requests.post(server.url + path, data, headers={"Content-Type": "application/json"}, timeout=300)


def greedy_request(ids, **fields) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 12, **fields.pop("sampling_params", {})}
    return {"input_ids": ids, "sampling_params": sampling, **fields}


@pytest.mark.parametrize("field", ["rid", "conversation"])
def test_a_name_of_any_kind_is_served(server, plain, prompts, field):
    expected = plain.generate(prompts[0], temperature=0, max_new_tokens=12)["output_ids"]
    for name in NAMES:
        answer = post(server, "/generate", naming(prompts[0], field, name))
        assert answer.ok, (name[:20], len(name), answer.text[:300])
        assert answer.json()["output_ids"] == expected
    assert post(server, "/generate", naming(prompts[0], field, NO_UNICODE)).status_code == 400


def naming(ids, field: str, name: str) -> dict[str, Any]:
    if field == "rid":
        return greedy_request(ids, rid=name)
    wishes = {"custom_params": {"specstore": {"conversation": name}}}
    return greedy_request(ids, sampling_params=wishes)
