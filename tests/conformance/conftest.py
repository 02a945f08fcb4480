"""The suite's parameters: every method of the registry, and two of the heads that retrieval stands beside. A method that is added there
inherits every test.

`--method NAME` runs it for one. `--draft DRAFT` takes another draft for methods that have a draft process (`drafts.py`).
`--method-plugin FILE` takes the methods from a plugin instead: a module with METHODS. The servers have `--device cpu` and
`--sampling-backend pytorch`; with DEVICE=cuda in the environment they run on a GPU.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.servers import engine
from tests.support.servers.engine import CPU_ENVIRONMENT, DEVICE, Endpoint, ServerSpec

ON_CPU = DEVICE == "cpu"
if ON_CPU:
    os.environ |= CPU_ENVIRONMENT  # SGLang decides at import whether it serves on a CPU

from sglang_patches.methods.registry import HEADS, METHODS, Method  # noqa: E402
from tests.conformance.drafts import AGREEMENTS, LYING  # noqa: E402
from tests.e2e.services import serving  # noqa: E402
from tests.parts import TESTED_HEADS  # noqa: E402
from tests.support.servers.datastore import DatastoreService  # noqa: E402
from tests.support.servers.forked import SglangServer, running  # noqa: E402
from tests.support.slow_proxy import SlowProxy  # noqa: E402
from tests.support.tiny_drafts import spelling_draft  # noqa: E402
from tests.support.tiny_exits import train_tiny_exits  # noqa: E402
from tests.support.tiny_head import train_tiny_head  # noqa: E402
from tests.support.tiny_model import texts_of, write_spelling_model  # noqa: E402

# The first two start no server. The third forks its servers, which a process that has seen a GPU cannot do.
collect_ignore = [] if ON_CPU else ["test_in_process.py", "test_references.py", "test_split.py"]

TESTED = METHODS | {name: HEADS[name] for name in TESTED_HEADS}
# They make a worker without SGLang's, or two that share requests.
WITHOUT_HEADS = {"test_in_process.py", "test_references.py", "test_split.py"}
LYING_PLUGIN = Path(__file__).parent / "lying_plugin"
OVERLAP_PLUGIN = Path(__file__).parent / "overlap_plugin"
CONTEXT = 1024
# Seconds that a session waits for its decode instance: longer than from a prompt's first chunk to its first decode step on a
# busy machine. ENDED_SECONDS: after which no session is left, one that nobody took included.
GRACE, ENDED_SECONDS = 5, 60.0
NAMESPACES = 1024  # some tenants a method


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "method" in metafunc.fixturenames:
        methods = _methods(metafunc.config)
        metafunc.parametrize("method", methods.values(), ids=list(methods), scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A method after the other and, of one, a setup after the other: no server is started twice. A test with the mark `draft_process` is
    for methods that have one."""
    ours = {item for item in items if Path(__file__).parent in item.path.parents}
    foreign = {item for item in ours if _is_foreign(item)}
    config.hook.pytest_deselected(items=list(foreign))
    items[:] = [item for item in items if item not in foreign]
    methods, setups = list(_methods(config)), [None, *SETUPS]

    def place(item: pytest.Item) -> tuple[int, int]:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if "method" not in given:
            return -1, 0
        # A split goes on through the first setup's tests, one of which asks both.
        setup = setups[1] if "stack" in item.fixturenames else given.get("server")
        return methods.index(given["method"].name), setups.index(setup)

    ordered = iter(sorted(filter(ours.__contains__, items), key=place))
    items[:] = [next(ordered) if item in ours else item for item in items]  # others stay where they are


def _is_foreign(item: pytest.Item) -> bool:
    """Whether the item's method has not what the test is of."""
    method = item.callspec.params.get("method") if hasattr(item, "callspec") else None
    if item.get_closest_marker("draft_process"):
        return not method.draft_process
    return method is not None and method.name in HEADS and item.path.name in WITHOUT_HEADS


def _methods(config: pytest.Config) -> dict[str, Method]:
    plugin, name = config.getoption("--method-plugin"), config.getoption("--method")
    methods = TESTED if plugin is None else _imported(plugin).METHODS
    return methods if name is None else {name: methods[name]}


def _imported(plugin: Path) -> ModuleType:
    folder = str(plugin.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(plugin.stem)


@pytest.fixture(scope="session")
def draft(request) -> str:
    """Name of the draft that methods with a draft process have."""
    return request.config.getoption("--draft")


@pytest.fixture(scope="session")
def method_environment(request, method, draft, early_exits) -> dict[str, str]:
    """Environment of a server that finds the tested methods, the draft that lies, and the target's early exits where the method reads
    one."""
    plugin = request.config.getoption("--method-plugin")
    folders = [plugin.resolve().parent] if plugin is not None else []
    folders += [LYING_PLUGIN] if draft == LYING else []
    folders += [OVERLAP_PLUGIN] if method.name in HEADS and ON_CPU else []
    return plugin_path(*folders) | exit_of(method, early_exits)


def exit_of(method: Method, early_exits: Callable[[], Path]) -> dict[str, str]:
    """The environment of a method that reads an early exit."""
    return {"SPECSTORE_EARLY_EXIT": str(early_exits())} if method.early_exit else {}


@pytest.fixture(scope="session")
def early_exits(spelling_model, tmp_path_factory) -> Callable[[], Path]:
    """File of the target's early exits, made when it is first asked for."""
    return functools.cache(
        lambda: train_tiny_exits(spelling_model, tmp_path_factory.mktemp("early-exits") / "exits.safetensors")
    )


def plugin_path(*folders: Path) -> dict[str, str]:
    """Environment of a server that finds the plugins in these folders."""
    if not folders:
        return {}
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH", "")]))
    }


@pytest.fixture(scope="session", autouse=True)
def cpu_engine() -> None:
    if not ON_CPU:
        return
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import is_cpu

    assert is_cpu(), "SGLang was imported for an accelerator before: name tests/conformance first, or alone"
    load_plugins()


@pytest.fixture
def murmur_hash(monkeypatch) -> None:
    """The hash of SGLang's seeds, which its library for CPUs lacks."""
    from sglang.srt.layers import sampler

    from tests.unit.verification.test_verification_distribution import murmur_hash32_reference

    monkeypatch.setattr(sampler, "murmur_hash32", murmur_hash32_reference)


@pytest.fixture(scope="session")
def logs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def spelling_model(tmp_path_factory) -> Path:
    return write_spelling_model(tmp_path_factory.mktemp("spelling-model"))


@pytest.fixture(scope="session")
def draft_model(method, draft, spelling_model, tmp_path_factory) -> Path | None:
    """For a method that drafts with one. Nobody loads that of a draft which lies."""
    if method.name in ("EAGLE", "EAGLE3"):
        return train_tiny_head(method.name, spelling_model, tmp_path_factory.mktemp("head"))
    if not method.draft_process and method.name not in HEADS:
        return None
    agreement = AGREEMENTS.get(draft, 1)
    return spelling_draft(spelling_model, tmp_path_factory.mktemp("draft-model"), agreement)


@pytest.fixture(scope="session")
def datastore(logs) -> Iterator[DatastoreService]:
    """One service for the whole suite; what it has been told survives it."""
    data = logs / "datastore"
    data.mkdir()
    flags = ("--data", str(data), "--grace", str(GRACE), "--namespaces", str(NAMESPACES))
    with serving(logs / "datastore.log", None, *flags) as service:
        yield service


@dataclass(frozen=True)
class Setup:
    """How a method is served: its scheduler (`--disable-overlap-schedule` or not), where its datastore is, its widest tree, its pages,
    its cache. adaptive: with the length and the deadline of whoever sets none, so that a draft may be late or not wanted."""

    overlap: bool
    embedded: bool
    nodes: int
    page_size: int
    max_total_tokens: int
    adaptive: bool = False


# Not the full product: each value of each part stands in one of them. The first is what users have. The second verifies a draft in every
# step, as an embedded datastore has no deadline; its cache is too small for what it is asked.
SETUPS = {
    "overlap, gRPC": Setup(
        True, embedded=False, nodes=15, page_size=16, max_total_tokens=16384, adaptive=True
    ),
    "synchronous, embedded": Setup(False, embedded=True, nodes=7, page_size=1, max_total_tokens=2048),
}
FLAGS = ("--chunked-prefill-size", "64", "--enable-metrics", "--enable-cache-report")
FLAGS += ("--context-length", str(CONTEXT), "--constrained-json-disable-any-whitespace")
FLAGS += ("--enable-return-hidden-states", "--enable-custom-logit-processor")
# Admits more than fits a small cache: requests are retracted.
DRAFTING = ("--schedule-conservativeness", "0.1")
# A deadline that a busy machine rarely misses.
STATIC = ("--specstore-length", "static", "--specstore-deadline-ms", "500")
DTYPE = "float32" if ON_CPU else "float16"  # SGLang has no float32 on a GPU
MOST_REQUESTS = 48
TENANT_HEADER = "X-Request-Id-Tenant"  # one that SGLang's router passes on


def start(spec: ServerSpec, folder: Path) -> AbstractContextManager[SglangServer]:
    """The one way in which the suite starts a server. A process that has seen a GPU cannot be forked."""
    return running(spec, folder) if ON_CPU else engine.running(spec, folder)


def is_adaptive(server: SglangServer) -> bool:
    return not set(STATIC) <= set(server.spec.flags)


def assert_drafted(server: SglangServer, answers: Sequence[dict]) -> None:
    """That equal answers show something: for each of them a draft was verified. A server of adaptive length may have wanted none."""
    if not is_adaptive(server):
        undrafted = [at for at, of in enumerate(answers) if not of["meta_info"]["specstore"]["drafted"]]
        assert not undrafted, f"no draft was verified for answers {undrafted}: their equality shows nothing"


class Plain(Endpoint):
    """A server that decodes plainly, and the greedy answers that it has given: every method is compared with the same ones."""

    def __init__(self, server: SglangServer) -> None:
        super().__init__(server.url)
        self._known: dict[str, str] = {}  # answers by request, both as JSON

    def generate(self, input_ids: Sequence[int], **sampling) -> dict:
        if sampling.get("temperature") != 0:
            return super().generate(input_ids, **sampling)
        request = json.dumps([list(input_ids), sampling], sort_keys=True)
        if request not in self._known:
            self._known[request] = json.dumps(super().generate(input_ids, **sampling))
        return json.loads(self._known[request])


@pytest.fixture(scope="session")
def plain(spelling_model, logs) -> Iterator[Plain]:
    """Plain decoding. Without overlap: with it, stock plain decoding applies penalties a token late."""
    sizes = {"max_running_requests": MOST_REQUESTS, "max_total_tokens": 16384}
    spec = ServerSpec("plain", spelling_model, dtype=DTYPE, flags=FLAGS, overlap=False, **sizes)
    with start(spec, logs) as server:
        yield Plain(server)


@pytest.fixture(scope="session")
def proxy(datastore) -> Iterator[SlowProxy]:
    """Between a method's server and the service."""
    proxy = SlowProxy()
    proxy.redirect(datastore.port)
    yield proxy
    proxy.close()


def drafting_spec(
    name: str, model: Path, draft: Path | None, setup: Setup, endpoint: str, environment: dict[str, str]
) -> ServerSpec:
    """name: the method's. draft: its draft model."""
    return ServerSpec(
        f"{name}-{'overlap' if setup.overlap else 'synchronous'}-{setup.nodes}-{setup.page_size}",
        model,
        name,
        dtype=DTYPE,
        nodes=setup.nodes,
        draft=draft,
        flags=(*FLAGS, *DRAFTING, *(() if setup.adaptive else STATIC), "--page-size", str(setup.page_size)),
        environment={
            "SPECSTORE_ENDPOINT": "embedded" if setup.embedded else endpoint,
            "SPECSTORE_TENANT": name,  # what another method's server has said is not known
            "SPECSTORE_REQUEST_TENANT": f"header:{TENANT_HEADER}",
            **environment,
        },
        max_running_requests=MOST_REQUESTS,
        max_total_tokens=setup.max_total_tokens,
        overlap=setup.overlap,
        beside_head=name in HEADS,
    )


@pytest.fixture(scope="session", params=list(SETUPS))
def server(
    request, method, spelling_model, draft_model, proxy, method_environment, logs
) -> Iterator[SglangServer]:
    """The method's. A test that wants one setup alone says so by `parametrize`."""
    spec = drafting_spec(
        method.name, spelling_model, draft_model, SETUPS[request.param], proxy.endpoint, method_environment
    )
    with start(spec, logs) as server:
        yield server


@pytest.fixture(scope="session")
def prompts(spelling_model) -> list[list[int]]:
    """The model's own texts."""
    return texts_of(spelling_model, 32, 120)
