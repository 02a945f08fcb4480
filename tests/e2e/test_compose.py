"""`docker compose up`, on a Docker engine of its own: healthy, answering, and still answering without its datastore; the
same split in two; and with a draft process, still answering without that."""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.support.servers.engine import one_architecture
from tests.unit.deploy.memory import most_bytes
from tests.waiting import eventually

pytestmark = [pytest.mark.workshop, pytest.mark.timeout(1800)]

CHECKOUT = Path(__file__).parents[2]
LOCK = CHECKOUT / "requirements" / "lock.txt"
DOCKERFILE = CHECKOUT / "docker" / "datastore.Dockerfile"
BASE_IMAGE = "python:3.11-slim"
BUILD_BACKEND = "hatchling==1.33.0"
PROJECT = "specstore-test"
PORT = 30000  # in the engine's own network namespace
QUESTION = "Count from one to thirty in words."


def run(command: list, environment: dict[str, str] | None = None, seconds: float = 600) -> str:
    """Its standard output; a failure shows what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=CHECKOUT,
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, (
        f"{shlex.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def lab(shared_folder) -> Path:
    """The scripts of the container lab, its engine installed."""
    scripts = shared_folder / "compose_lab"
    if not scripts.is_dir():
        pytest.skip("../shared/compose_lab is absent")
    if os.geteuid() != 0:
        pytest.skip("a Docker engine of its own needs root")
    if not (lab_cache() / "cfg" / "cli-plugins" / "docker-compose").exists() or not shutil.which("dockerd"):
        run([scripts / "install_engine.sh"])
    return scripts


def lab_cache() -> Path:
    """Where the lab's scripts keep what they install."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compose_lab"


@pytest.fixture(scope="module")
def compose_client(lab) -> dict[str, str]:
    """Environment for compose commands that need no engine."""
    return {"DOCKER_CONFIG": str(lab_cache() / "cfg")}


@pytest.fixture(scope="module")
def docker(lab) -> dict[str, str]:
    """A running engine with the base image; its environment."""
    exports = run([lab / "engine.sh", "start", "isolated"]).removeprefix("export ")
    environment = dict(word.split("=", 1) for word in shlex.split(exports))
    try:
        make_base_image(lab, environment)
        yield environment
    finally:
        run([lab / "engine.sh", "stop"])


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    """A folder that users inside and outside of the containers may write to: pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (Path(folder), Path(folder, "models")):
            path.mkdir(exist_ok=True)
            path.chmod(0o777)
        yield Path(folder)


def make_base_image(lab: Path, docker: dict[str, str]) -> None:
    """The stand-in for the public image, with the wheels the datastore's image installs; kept for the next run."""
    sources = (LOCK, CHECKOUT / "pyproject.toml", DOCKERFILE)
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    stamp = lab_cache() / "specstore-base-image"
    images = run(["docker", "images", "--quiet", "--no-trunc", BASE_IMAGE], docker).split()
    if stamp.exists() and images and stamp.read_text() == f"{key} {images[0]}":
        return
    wheels = lab_cache() / f"wheels-{key}"
    # As the image's Python resolves them, which is Debian's: an older patch version than that of the tests needs more.
    pip = [sys.executable, "-m", "pip", "--python", "/usr/bin/python3"]
    download = [*pip, "download", "--quiet", "--only-binary", ":all:"]
    run([*download, "--dest", wheels, "--constraint", LOCK, installed_in_the_image(), BUILD_BACKEND])
    run([lab / "base_image.sh"], docker | {"WHEELS": str(wheels), "TAG": BASE_IMAGE})
    shutil.rmtree(wheels)
    image = run(["docker", "images", "--quiet", "--no-trunc", BASE_IMAGE], docker).strip()
    stamp.write_text(f"{key} {image}")


def installed_in_the_image() -> str:
    """This package with the extras that the datastore's image installs."""
    (package,) = re.findall(r"pip install .*?'(\.\[[^']+\])'", DOCKERFILE.read_text())
    return package


@dataclass
class Stack:
    """The project's services of one profile on that engine."""

    environment: dict[str, str]
    profile: str

    def compose(self, *words: str) -> str:
        files = [
            "--file",
            "docker-compose.yml",
            "--file",
            "docker/compose.lab.yml",
            "--project-directory",
            ".",
        ]
        project = ["--project-name", PROJECT, "--profile", self.profile]
        return run(["docker", "compose", *project, *files, *words], self.environment, 1200)

    def inspect(self, service: str, template: str) -> str:
        container = self.compose("ps", "--all", "--quiet", service).strip()
        return run(["docker", "inspect", "--format", template, container], self.environment).strip()

    def becomes_healthy(self, service: str) -> None:
        """By Docker's next check: its last one may be older than what the test did."""
        healthy = "{{.State.Health.Status}}"
        eventually(lambda: self.inspect(service, healthy) == "healthy", f"{service} is not healthy")

    def complete(self, seconds: int = 120) -> str:
        """A greedy completion, asked for in the engine's network namespace. AssertionError if it fails."""
        request = {
            "model": "default",
            "max_tokens": 48,
            "temperature": 0,
            "messages": [{"role": "user", "content": QUESTION}],
        }
        program = (
            "import sys, urllib.request as u; "
            "r = u.Request(sys.argv[1], sys.argv[2].encode(), {'Content-Type': 'application/json'}); "
            "print(u.urlopen(r, timeout=float(sys.argv[3])).read().decode())"
        )
        url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
        inside = [
            "nsenter",
            "--target",
            self.environment["DOCKERD_PID"],
            "--net",
            sys.executable,
            "-c",
            program,
        ]
        reply = json.loads(run([*inside, url, json.dumps(request), seconds], seconds=seconds + 30))
        return reply["choices"][0]["message"]["content"]

    def drafts_asked_for(self) -> int:
        """Draft trees the datastore was asked for since it started."""
        stats = json.loads(self.compose("exec", "-T", "datastore", "specstore", "stats", "--json"))
        return sum(int(namespace["drafts"]) for namespace in stats["namespaces"])


@contextlib.contextmanager
def up(
    docker: dict[str, str], demo_model: Path, cache: Path, profile: str, **variables: str
) -> Iterator[Stack]:
    """Healthy services of a profile. cache: which the stacks of a session share. variables: of the compose file."""
    import sglang

    packages = Path(sglang.__file__).parents[1]
    mounts = {
        "SPECSTORE_LAB_PACKAGES": str(packages),
        "SPECSTORE_LAB_PLUGIN": str(distribution("specstore").locate_file("")),
        "SPECSTORE_LAB_MODEL": str(demo_model),
        "SPECSTORE_LAB_CACHE": str(cache),
    }
    stack = Stack(docker | mounts | one_architecture() | variables, profile)
    try:
        stack.compose("up", "--build", "--detach", "--wait")
        yield stack
    finally:
        print(stack.compose("logs", "--no-color", "--tail", "60"))
        stack.compose("down", "--volumes", "--timeout", "5")


@pytest.mark.parametrize(
    ("profile", "services"),
    [
        ((), {"datastore", "engine"}),
        (("--profile", "gpu"), {"datastore", "engine-gpu"}),
        (("--profile", "pd"), {"datastore", "prefill", "decode", "router"}),
        (("--profile", "gpu-pd"), {"datastore", "prefill-gpu", "decode-gpu", "router-gpu"}),
    ],
)
def test_every_profile_is_valid(compose_client, profile, services):
    words = ["docker", "compose", "--project-directory", ".", *profile, "config", "--format", "json"]
    config = json.loads(run(words, compose_client))
    assert set(config["services"]) == services
    ports = [port for service in config["services"].values() for port in service.get("ports", [])]
    assert [port["host_ip"] for port in ports] == ["127.0.0.1"]


@pytest.mark.parametrize("profile", ["cpu", "gpu", "pd", "gpu-pd"])
def test_every_service_is_bounded_and_writes_to_no_root(compose_client, profile):
    words = [
        "docker",
        "compose",
        "--project-directory",
        ".",
        "--profile",
        profile,
        "config",
        "--format",
        "json",
    ]
    services = json.loads(run(words, compose_client))["services"]
    for name, service in services.items():
        assert service["read_only"] and int(service["mem_limit"]) > 1 << 30, name
        assert 0 < service["pids_limit"] <= 8192, name
        mounts = [volume["target"] for volume in service.get("volumes", ())]
        mounts += [mount.partition(":")[0] for mount in service.get("tmpfs", ())]
        assert "/tmp" in mounts, name
    words = services["datastore"]["command"]
    assert words.pop(0) == "serve"
    permitted = most_bytes(words)
    assert 0.5 < permitted / int(services["datastore"]["mem_limit"]) < 0.9


def test_gpu_groups_are_set_by_variables(compose_client):
    variables = {
        "PREFILL_GPUS": "0,1",
        "PREFILL_TP": "2",
        "DECODE_GPUS": "2",
        "TRANSFER": "rdma",
        "IB_DEVICE": "mlx5_0",
    }
    words = [
        "docker",
        "compose",
        "--project-directory",
        ".",
        "--profile",
        "gpu-pd",
        "config",
        "--format",
        "json",
    ]
    services = json.loads(run(words, compose_client | variables))["services"]
    prefill, decode = services["prefill-gpu"], services["decode-gpu"]
    (gpus,) = prefill["deploy"]["resources"]["reservations"]["devices"]
    assert gpus["device_ids"] == ["0,1"] and prefill["command"][-2:] == ["--tp-size", "2"]
    assert decode["command"][-2:] == ["--tp-size", "1"]
    for half in (prefill, decode):
        assert (half["environment"]["MOONCAKE_PROTOCOL"], half["environment"]["IB_DEVICE"]) == (
            "rdma",
            "mlx5_0",
        )
        assert not half.get("ports")


def test_a_draft_model_and_its_gpu_are_set_by_variables(compose_client):
    variables = {"ALGORITHM": "SAGUARO", "MODEL": "/cache/large", "DRAFT_MODEL": "/cache/small", "GPUS": "2"}
    words = [
        "docker",
        "compose",
        "--project-directory",
        ".",
        "--profile",
        "gpu",
        "config",
        "--format",
        "json",
    ]
    engine = json.loads(run(words, compose_client | variables))["services"]["engine-gpu"]
    assert {name: engine["environment"][name] for name in variables if name != "GPUS"} == {
        name: value for name, value in variables.items() if name != "GPUS"
    }
    (gpus,) = engine["deploy"]["resources"]["reservations"]["devices"]
    assert gpus["count"] == 2


class TestOneInstance:
    @pytest.fixture(scope="class")
    def stack(self, docker, demo_model, cache):
        with up(docker, demo_model, cache, "cpu") as stack:
            yield stack

    @pytest.mark.parametrize("service", ["datastore", "engine"])
    def test_no_service_runs_as_root(self, stack, service):
        assert stack.compose("exec", "-T", service, "id", "-u").strip() == "10001"

    @pytest.mark.parametrize("service", ["datastore", "engine"])
    def test_no_service_can_write_to_its_root(self, stack, service):
        """As whoever it runs as: root too."""
        program = "import os\ntry: os.mkdir('/new')\nexcept OSError as error: print(error.strerror)"
        said = stack.compose("exec", "-T", "--user", "0", service, "python", "-c", program)
        assert said == "Read-only file system\n"
        assert int(stack.inspect(service, "{{.HostConfig.Memory}}")) > 1 << 30
        assert int(stack.inspect(service, "{{.HostConfig.PidsLimit}}")) > 0

    def test_the_datastore_s_image_has_every_kernel_for_its_level(self, stack):
        said = stack.compose("exec", "-T", "datastore", "python", "-m", "datastore_service.engine.precompile")
        assert re.fullmatch(r"\d+ kernels, 0 compiled, for x86-64-v3\n", said)

    def test_the_datastore_s_verbs_as_the_operator_s_page_shows_them(self, stack, tmp_path):
        texts = tmp_path / "texts.jsonl"
        texts.write_text('{"text": "The leaves change color in autumn."}\n')
        shown = re.findall(
            "^    docker compose ((?:cp|exec) .*)",
            (CHECKOUT / "docs" / "operations.md").read_text(),
            re.MULTILINE,
        )
        commands = [command.replace(" texts.jsonl ", f" {texts} ").split() for command in shown]
        stats, _, warmed, flushed = (stack.compose(*command) for command in commands)
        assert "SmolLM2-135M-Instruct" in stats
        assert re.fullmatch(r"added 1 documents, \d tokens\n", warmed)
        assert flushed == "flushed live\n"

    def test_completions_go_on_without_the_datastore(self, stack):
        with_datastore = stack.complete()
        assert len(with_datastore.split()) > 5
        assert stack.drafts_asked_for() > 0
        stack.compose("kill", "datastore")
        assert stack.inspect("datastore", "{{.State.Running}}") == "false"
        assert stack.complete() == with_datastore
        stack.becomes_healthy("engine")

    def test_a_datastore_that_comes_back_is_used_again(self, stack):
        before = stack.complete()
        stack.compose("kill", "datastore")
        stack.compose("up", "--detach", "--wait", "--no-build", "datastore")

        def is_asked() -> bool:
            assert stack.complete() == before
            return stack.drafts_asked_for() > 0

        eventually(is_asked, "the datastore was asked for no draft after it came back", seconds=180)


@pytest.mark.long  # test_split runs the same processes without containers
class TestSplit:
    @pytest.fixture(scope="class")
    def stack(self, docker, demo_model, cache):
        with up(docker, demo_model, cache, "pd") as stack:
            yield stack

    @pytest.mark.parametrize("service", ["prefill", "decode", "router"])
    def test_no_service_runs_as_root(self, stack, service):
        assert stack.compose("exec", "-T", service, "id", "-u").strip() == "10001"

    def test_a_decode_instance_that_is_killed_and_started_again(self, stack):
        before = stack.complete()
        assert len(before.split()) > 5 and stack.drafts_asked_for() > 0
        stack.compose("kill", "decode")
        with pytest.raises(AssertionError, match="HTTP Error 5|timed out"):
            stack.complete(seconds=20)
        stack.compose("up", "--detach", "--wait", "--no-build", "decode")
        assert self.first_answer(stack) == before

    @staticmethod
    def first_answer(stack: Stack) -> str:
        """Once the router has taken in who is there again."""
        limit = time.monotonic() + 120
        while time.monotonic() < limit:
            with contextlib.suppress(AssertionError):
                return stack.complete()
            time.sleep(2)
        raise TimeoutError("the router does not answer")


@pytest.mark.long
class TestDraftProcess:
    @pytest.fixture(scope="class")
    def stack(self, docker, demo_model, cache):
        with up(docker, demo_model, cache, "cpu", ALGORITHM="SAGUARO", MODEL="") as stack:
            yield stack

    def test_completions_go_on_without_the_draft_process_and_it_comes_back(self, stack):
        before = stack.complete()
        assert len(before.split()) > 5
        (killed,) = self.draft_processes(stack, "kill")
        assert stack.complete() == before
        limit = time.monotonic() + 600
        while stack.compose("logs", "engine").count("the draft process is ready") < 2:
            assert time.monotonic() < limit, "it did not come back"
            time.sleep(2)
        assert stack.complete() == before
        (back,) = self.draft_processes(stack)
        assert back != killed
        stack.becomes_healthy("engine")

    @staticmethod
    def draft_processes(stack: Stack, *kill: str) -> list[int]:
        """Their numbers in the engine's container. kill: whether they are killed."""
        program = (
            "import os, sys; from pathlib import Path\n"
            "for path in Path('/proc').glob('[0-9]*/cmdline'):\n"
            "    if b'sglang_patches.draft_process' in path.read_bytes().split(b'\\0'):\n"
            "        print(path.parent.name)\n"
            "        if sys.argv[1:]: os.kill(int(path.parent.name), 9)\n"
        )
        return [
            int(word)
            for word in stack.compose("exec", "-T", "engine", "python", "-c", program, *kill).split()
        ]
