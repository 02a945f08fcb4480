"""Which of a service's texts draft on a real server: those of the present epoch, which an update of the weights begins, and those of
the workspace that a request names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from datastore_service.protocol.tree import Tier
from sglang_patches.demo.variant import write_variant
from sglang_patches.launch.processes import PROXIES
from tests.e2e.services import TOKEN, serving
from tests.integration.datastore.conftest import specstore
from tests.support.servers.datastore import DatastoreService
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import SglangServer, running

HEAD = "lm_head.weight"
PROMPT = list(range(2, 12))


@pytest.fixture(scope="module")
def datastore(logs) -> Iterator[DatastoreService]:
    with serving(logs / "texts-datastore.log", None, "--workspace-tokens", "100000") as service:
        yield service


@pytest.fixture(scope="module")
def server(tiny_model, datastore, logs) -> Iterator[SglangServer]:
    flags = ("--specstore-endpoint", datastore.endpoint, "--specstore-length", "static")
    flags += ("--specstore-deadline-ms", "10000", "--specstore-request-wishes", "publish,workspace")
    flags += ("--specstore-request-tenant", "custom_params")
    spec = ServerSpec("texts", tiny_model, "SSSD", dtype="float32", flags=flags, max_total_tokens=8192)
    with running(spec, logs) as server:
        yield server


@pytest.fixture(scope="module")
def other_weights(tiny_model, tmp_path_factory) -> Path:
    """The same model, which says another word each time."""
    out = tmp_path_factory.mktemp("other-weights")
    write_variant(tiny_model, out, lambda weights, _: weights.update({HEAD: weights[HEAD].roll(1, 0)}))
    return out


def test_what_one_request_has_read_drafts_in_its_workspace(server):
    """And in no other."""
    prompt = [2 + 5 * place % 20 for place in range(24)]

    def ask(tokens: list[int], most: int, tenant: str, **wishes: object) -> tuple[list[int], int]:
        """The answer and its steps."""
        named = {"custom_params": {"specstore": {"tenant": tenant} | wishes}}
        said = server.generate(tokens, temperature=0, max_new_tokens=most, ignore_eos=True, **named)
        return said["output_ids"], said["meta_info"]["specstore"]["steps"]

    answer, _ = ask(prompt, 48, "", publish=False)
    steps = {}
    for tenant, workspace in {"same": "shop", "other": "shops", "none": None}.items():
        ask(prompt + answer, 2, tenant, workspace="shop")  # a file that one agent reads
        where = {"workspace": workspace} if workspace else {"publish": False}
        again, steps[tenant] = ask(prompt, 48, tenant, **where)
        assert again == answer
    assert steps["same"] < min(steps["other"], steps["none"]), steps


def test_an_update_of_the_weights_begins_an_epoch(server, datastore, tiny_model, other_weights):
    def answer() -> tuple[list[int], int]:
        """The tokens, and how many of them other answers had drafted."""
        said = server.generate(PROMPT, temperature=0, max_new_tokens=24, ignore_eos=True)
        return said["output_ids"], said["meta_info"]["specstore"]["accepted"].get("live", 0)

    def update(weights: Path, **named: str) -> None:
        body = {"model_path": str(weights), **named}
        done = requests.post(
            server.url + "/update_weights_from_disk", json=body, timeout=300, proxies=PROXIES
        )
        assert done.ok and done.json()["success"], done.text

    def epoch() -> int:
        return datastore.stats().namespaces[0].epoch

    before, (same, taken) = answer(), answer()
    assert same == before[0] and taken > 0 == epoch()
    update(other_weights)
    after, (same, taken) = answer(), answer()
    assert same == after[0] != before[0] and taken > 0 and epoch() == 1
    update(tiny_model, weight_version="7")
    back, taken = answer()
    assert back == before[0] and taken > 0 and epoch() == 7

    namespace = datastore.stats().namespaces[0].namespace
    name = ("--model", namespace.model, "--tokenizer", namespace.tokenizer, "--endpoint", datastore.endpoint)
    said = specstore("epoch", *name, "--keep", "1", SPECSTORE_ADMIN_TOKEN=TOKEN)
    assert said.stdout.startswith("epoch 7: removed "), said
    left = {tier.tier: tier.tokens for tier in datastore.stats().namespaces[0].tiers}
    assert len(back) < left[Tier.LIVE] < 2 * len(back)  # with a health check or two
    again, taken = answer()
    assert again == back and taken > 0
