"""The host-symbol table against the installed SGLang, and that drift is noticed."""

import pathlib
import re

import pytest

sglang = pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang_patches.host_api import HOST_SYMBOLS, HostSymbol, drift_message  # noqa: E402


def test_installed_sglang_matches_the_table():
    assert drift_message() is None


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        (HostSymbol("sglang.srt.server_args.no_such_thing", (), "x"), "missing"),
        (
            HostSymbol("sglang.srt.server_args.prepare_server_args", ("argv", "more"), "x"),
            "signature is (argv)",
        ),
    ],
)
def test_drift_names_the_row(symbol, expected):
    message = drift_message((*HOST_SYMBOLS, symbol))
    assert symbol.path in message and expected in message


def test_every_row_says_why():
    assert all(symbol.why for symbol in HOST_SYMBOLS)


def test_what_is_hooked_is_in_the_table():
    from sglang_patches.cpu.layers import HOOKS, WEIGHT_UPDATES
    from sglang_patches.workers import endings

    assert {*HOOKS, *WEIGHT_UPDATES, *endings.HOOKS} <= {symbol.path for symbol in HOST_SYMBOLS}


def _uses_in_sglang() -> set[str]:
    """Methods that SGLang calls on an algorithm object, by the names it gives such objects."""
    pattern = re.compile(r"\b(?:spec_algorithm|spec_algo)\.([a-z_]+)\(")
    root = pathlib.Path(sglang.__file__).parent / "srt"
    return {name for file in root.rglob("*.py") for name in pattern.findall(file.read_text(errors="replace"))}


def test_the_algorithm_has_all_that_the_scheduler_calls():
    from sglang_patches.algorithm import TreeAlgorithm

    uses = _uses_in_sglang()
    assert {"create_future_map", "is_none", "create_worker"} <= uses
    assert [name for name in sorted(uses) if not hasattr(TreeAlgorithm, name)] == []
