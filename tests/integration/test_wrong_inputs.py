"""What a newcomer mistypes: each command is told in one line that names the option, with status 2 for a bad argument and 1 for
anything else."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from sglang_patches.launch.system import SPLIT
from tests.integration.datastore.conftest import write_tokenizer
from tests.support.system import require
from tests.unit.server.service import running, serving

CHECKOUT = Path(__file__).parents[2]
# Tracebacks, our classes as Python shows them, gRPC's and typer's own text.
RAW = re.compile(
    r"Traceback|Repo id|\b[A-Z]\w+\(\w*=?|object at 0x|last error|ipv[46]:|StatusCode|UNAVAILABLE|[╭│]|\bTIER_"
)


@dataclass(frozen=True)
class Place:
    """What the commands name. asking: a service that asks for its token, which is `secret`."""

    folder: Path
    service: str
    asking: str
    metrics: str
    nobody: str


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "model").mkdir()
    write_tokenizer(folder / "model", "w")
    (folder / "text").write_text("w1 w2")
    (folder / "empty").mkdir()
    trustme.CA().cert_pem.write_to_path(folder / "ca.pem")
    with running() as service, running(token="secret") as asking, serving(service) as page:
        with socket.create_server(("127.0.0.1", 0)) as free:
            nobody = f"127.0.0.1:{free.getsockname()[1]}"
        metrics = page.removeprefix("http://").rstrip("/")
        yield Place(folder, service.endpoint, asking.endpoint, metrics, nobody)


NAME = f"--model m --tokenizer {'ab' * 32}"
COMMANDS = [
    ("specstore serve --nope", 2, "--nope", "specstore serve --help"),
    ("specstore sreve", 2, "'sreve'", "'serve'"),
    ("specstore serve --sessions many", 2, "--sessions", "integer"),
    ("specstore serve --log-level loud", 2, "--log-level", "'info', 'warning', 'error'"),
    ("specstore serve --listen 50061", 2, "listen: '50061' is not HOST:PORT or unix:PATH"),
    ("specstore serve --listen 127.0.0.1:0 --data text", 2, "data: text is not a directory"),
    ("specstore serve --listen 127.0.0.1:0 --prior empty", 1, "empty/manifest.json"),
    ("specstore flush --model m", 2, "--tokenizer"),
    (f"specstore flush {NAME} --tier prior", 2, "tier: 'prior' is not live, session or rejected"),
    (f"specstore flush {NAME} --all --endpoint {{service}}", 1, "there is no model 'm'"),
    (f"specstore warmup text --server-file x {NAME}", 2, "SOURCES or --server-file, not both"),
    (f"specstore warmup {NAME}", 2, "SOURCES or --server-file is required"),
    (f"specstore warmup none {NAME}", 1, "none: file: No such file"),
    ("specstore warmup text --model m --tokenizer abc", 2, "tokenizer: abc is neither a folder with tokenizer.json nor a fingerprint (64 hex digits)"),
    ("specstore build text --out out --tokenizer empty", 2, "tokenizer: empty is neither a folder with tokenizer.json nor that file"),
    ("specstore build --out out --tokenizer model", 2, "'sources'"),
    ("specstore fingerprint none", 2, "tokenizer: none is neither"),
    (f"specstore query 'w1 w2' {NAME}", 2, "tokenizer: a fingerprint reads no text", "--ids"),
    (f"specstore query one --ids {NAME}", 2, "context: 'one' is not a token id"),
    (f"specstore query 1 --ids {NAME} --endpoint {{nobody}}", 1, "no datastore at {nobody} (connection refused)", "specstore serve", "SPECSTORE_ENDPOINT"),
    ("specstore stats --endpoint {nobody}", 1, "no datastore at {nobody} (connection refused)", "--endpoint"),
    ("specstore health --endpoint unix:none", 1, "no datastore at unix:none (there is no such socket)"),
    ("specstore stats --endpoint nowhere.invalid:1", 1, "nowhere.invalid:1 (unknown host)"),
    ("specstore stats --endpoint {metrics}", 1, "no datastore at {metrics} (speaks HTTP/1: is this the metrics port?)"),
    ("specstore stats --endpoint {service} --tls-ca ca.pem", 1, "no datastore at {service} (speaks no TLS)"),
    ("specstore stats --endpoint {asking}", 1, "asks who calls (no admin token)", "--token-file", "SPECSTORE_ADMIN_TOKEN"),
    ("specstore stats --endpoint {asking} --token-file text", 1, "does not take the token of --token-file text: another admin token"),
    ("SPECSTORE_ADMIN_TOKEN=x specstore stats --endpoint {asking}", 1, "does not take the token of SPECSTORE_ADMIN_TOKEN: another admin token"),
    ("specstore serve --listen unix:none/socket", 1, "cannot listen on unix:none/socket: none is no directory"),
    ("specstore serve --listen 0.0.0.0:0 --allow-remote", 2, "admin token: it or --identities is required to listen on 0.0.0.0:0"),
    ("python -m sglang_patches.demo.model --out text/model", 1, "error: ", "File exists"),
    ("python -m sglang_patches.training exits --model /nope --answers text --out out", 1, "error: /nope is neither a folder nor"),
    ("MODEL=/nope python -m sglang_patches.launch.serve", 2, "error: MODEL=/nope: no such folder"),
    ("ALGORITHM=SAGURAO MODEL=/nope python -m sglang_patches.launch.serve", 2, "ALGORITHM=SAGURAO", "did you mean SAGUARO?"),
    ("ALGORITHM=SAGUARO MODEL=model python -m sglang_patches.launch.serve", 2, "DRAFT_MODEL='': "),
    ("ALGORITHM=MIRROR EARLY_EXIT=none python -m sglang_patches.launch.serve", 2, "EARLY_EXIT=none: no such file"),
    ("PORT=http python -m sglang_patches.launch.demo", 2, "PORT='http': give a port number"),
    ("DATASTORE=redis python -m sglang_patches.launch.serve_pd", 2, "DATASTORE='redis': give grpc, embedded or HOST:PORT"),
    ("PREFILLS=0 DEVICE=cpu python -m sglang_patches.launch.serve_pd", 2, "PREFILLS='0': give a number of instances"),
    ("PREFILL=a python -m sglang_patches.launch.router", 2, "PREFILL: "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "status", "parts"), [(t, s, p) for t, s, *p in COMMANDS], ids=[row[0] for row in COMMANDS]
)
def test_a_wrong_input_is_told_in_one_line(place, typed, status, parts):
    require(*(SPLIT if "serve_pd" in typed else ()))
    done = subprocess.run(
        ["bash", "-c", typed.format_map(vars(place))],
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ
        | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and not RAW.search(done.stderr), done.stderr
    for part in parts:
        assert part.format_map(vars(place)) in done.stderr
