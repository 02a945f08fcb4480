"""What several test packages share."""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings

from sglang_patches.launch import processes
from tests import parts, skips

DRAFTS, DRAFT = ("1", "0.9", "0.6", "0.3", "lying"), "0.9"  # of the conformance suite; what CI runs it with
LONG_FUZZ = "10"  # times the examples of every change
SHARED = Path(__file__).parents[2] / "shared"

pytest.register_assert_rewrite("tests.conformance.request_cases")  # whose modules assert, as tests do

# A busy machine takes as long as it likes for an example.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run what is too long for every change")
    parser.addoption(
        "--part", choices=parts.PARTS, help="what `make test` runs, or what `make test-all` runs besides"
    )
    parser.addoption("--method", metavar="NAME", help="run tests/conformance for this method alone")
    parser.addoption(
        "--draft",
        choices=DRAFTS,
        default=DRAFT,
        help="draft of tests/conformance: how often it agrees with the target, or a process that lies",
    )
    parser.addoption(
        "--method-plugin", type=Path, metavar="FILE", help="take its methods from METHODS of this module"
    )


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGTERM, interrupt)
    if config.getoption("--long"):
        os.environ.setdefault("SPECSTORE_FUZZ", LONG_FUZZ)  # read when the fuzz tests are imported


def interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a run as Ctrl-C does, so that fixtures stop the servers they started. `timeout` sends it twice: the second one would
    interrupt the fixtures."""
    signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    yield  # all others choose first, such as `-m`
    if part := config.getoption("--part"):
        parts.leave_others(config, items, part)
    if config.getoption("--long"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="too long for every change: --long runs it"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    skips.refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    skips.refuse(report)
    return report


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model, converted on first use (under a minute, kept in the cache directory)."""
    from sglang_patches.demo.model import ensure

    return ensure()


@pytest.fixture
def free_port() -> int:
    """A TCP port of 127.0.0.1 that stays free until the test binds it."""
    return processes.free_port()


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The workshop's folder beside the checkout; skips where there is none."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED.name}/ is not beside the checkout")
    return SHARED
