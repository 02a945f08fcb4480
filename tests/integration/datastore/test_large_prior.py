"""Three million tokens of real text: built, queried, and mapped by two services that share its pages."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from datastore_service.client import tokenizer_fingerprint
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Namespace
from tests.integration.datastore.conftest import specstore
from tests.support.servers.datastore import DatastoreService

TOKENS = 3_000_000
CHARACTERS = 12_000_000
PROMPT = "def __init__(self, *args, **kwargs):\n        super().__init__("


@pytest.fixture(scope="module")
def large_prior(demo_model, tmp_path_factory) -> Path:
    """Python sources, the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("large")
    size, corpus = 0, folder / "corpus.jsonl"
    with corpus.open("w") as file:
        for path in sorted(Path(find_spec("torch").origin).parent.rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text)
            if size > CHARACTERS:
                break
    done = specstore("build", corpus, "--out", folder / "prior", "--tokenizer", demo_model)
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"([\d,]+) tokens", done.stdout)[1].replace(",", "")) >= TOKENS
    return folder / "prior"


def mapped_pages(pid: int, path: Path) -> dict[str, int]:
    """KiB of one process's mappings of a file, by kind (proc_pid_smaps(5))."""
    kinds: dict[str, int] = {}
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and line.endswith(" kB"):
            kind, size, _ = line.split()
            kinds[kind.rstrip(":")] = kinds.get(kind.rstrip(":"), 0) + int(size)
    return kinds


@pytest.mark.long
def test_two_services_share_a_large_prior(large_prior, demo_model, tmp_path):
    name = ("--model", "m", "--tokenizer", demo_model, "--json")
    alone = specstore("query", PROMPT, "--prior", large_prior, "--tokenizer", demo_model, "--json").stdout
    assert "prior" in {node["tier"] for node in json.loads(alone)}
    flags = ("--prior", large_prior)
    with DatastoreService(tmp_path / "one", *flags) as one, DatastoreService(tmp_path / "two", *flags) as two:
        for service in (one, two):
            worker = GrpcDatastore(service.endpoint, Namespace("m", tokenizer_fingerprint(demo_model)))
            assert worker.wait_connected(60)  # makes the namespace
            worker.close()
            assert specstore("query", PROMPT, "--endpoint", service.endpoint, *name).stdout == alone
        largest = max(large_prior.iterdir(), key=lambda path: path.stat().st_size)
        for service in (one, two):
            pages = mapped_pages(service.pid, largest)
            assert pages["Shared_Clean"] > 0.9 * pages["Rss"] > 0
            assert pages["Private_Dirty"] == pages["Shared_Dirty"] == 0
