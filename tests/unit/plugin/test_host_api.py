"""The host-symbol table against the installed SGLang, and that drift is noticed."""

import ast
import inspect
import pathlib
import re
from collections.abc import Iterator

import pytest

sglang = pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

import sglang_patches  # noqa: E402
from sglang_patches import plugin as plugin_module  # noqa: E402
from sglang_patches.host import versions  # noqa: E402
from sglang_patches.host.symbols import HOST_SYMBOLS, _resolve, check_host, drift_message, symbols_of  # noqa: E402
from sglang_patches.host.versions.rows import HostSymbol  # noqa: E402
from tests.unit.plugin.resolution import resolve  # noqa: E402

ROWS = {symbol.path for tested in versions.TESTED for symbol in symbols_of(tested)}
COMMANDS = {
    "sglang.launch_server"
}  # modules that are started with `python -m`: whoever reads the name sees the error


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


@pytest.mark.parametrize(
    ("installed", "table"),
    [
        ("0.5.16", "0.5.17"),
        ("0.5.17", "0.5.17"),
        ("0.5.21", "0.5.17"),
        ("0.5.22", "0.5.22"),
        ("0.5.22.post1", "0.5.22"),
        ("0.5.23", "0.5.23"),
        ("0.6.0", "0.5.23"),
    ],
)
def test_a_version_is_compared_with_the_newest_tested_one_that_is_not_newer(installed, table):
    assert versions.nearest(installed) == table


@pytest.mark.parametrize("other", [tested for tested in versions.TESTED if tested != versions.INSTALLED])
def test_tables_of_other_versions_do_not_fit(other):
    wrong = [symbol for symbol, drift in check_host(symbols_of(other)) if drift is not None]
    assert wrong and set(wrong) <= set(versions.module_of(other).ROWS)


def test_a_newer_version_that_fits_starts_and_the_log_says_so(plugin, model_path, monkeypatch, caplog):
    resolve(model_path("dense"), "hopper")
    assert "not tested" not in caplog.text
    monkeypatch.setattr(versions, "INSTALLED", "0.6.0")
    resolve(model_path("dense"), "hopper")
    assert "SGLang 0.6.0 was not tested (0.5.17, 0.5.22, 0.5.23 were)" in caplog.text


def test_a_newer_version_that_does_not_fit_is_refused_by_the_row(plugin, model_path, monkeypatch):
    monkeypatch.setattr(versions, "INSTALLED", "0.6.0")
    monkeypatch.delattr("sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode")
    with pytest.raises(
        RuntimeError,
        match=r"SGLang 0\.6\.0 differs from .*\.allocation_sizing\.get_alloc_reserve_per_decode: missing",
    ):
        resolve(model_path("dense"), "hopper")


def test_drift_that_stops_the_plugin_itself_names_the_row(monkeypatch):
    assert drift_message() is None  # so that all of SGLang is imported
    monkeypatch.setattr(plugin_module, "_registered", False)
    monkeypatch.delattr("sglang.srt.utils.is_cpu")
    with pytest.raises(RuntimeError, match=r"sglang\.srt\.utils\.is_cpu: missing .* the CPU support"):
        plugin_module.register()


def test_every_row_says_why():
    assert all(symbol.why for symbol in HOST_SYMBOLS)


def test_what_is_hooked_is_in_the_table():
    from sglang_patches import reports
    from sglang_patches.cpu import draft_steps
    from sglang_patches.cpu.layers import HOOKS, WEIGHT_UPDATES
    from sglang_patches.entry import predictions, references, request_checks, request_hook, request_tenants
    from sglang_patches.host.hooks import targets
    from sglang_patches.start import room
    from sglang_patches.step import ends, epoch

    assert {*HOOKS, *WEIGHT_UPDATES, *draft_steps.HOOKS, *request_checks.HOOKS} <= ROWS
    assert (
        targets(ends.HOOKS, epoch.HOOKS, room.HOOKS, request_hook.HOOKS, request_tenants.SESSION_HOOKS)
        <= ROWS
    )
    assert targets(references.HOOKS, predictions.HOOKS) <= ROWS
    assert targets(reports.SCHEDULER_HOOKS, reports.ENTRY_HOOKS) <= ROWS


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes under one, but for what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _running(child)


def _taken(node: ast.AST) -> list[str]:
    """What a node imports from SGLang, by dotted path."""
    if isinstance(node, ast.ImportFrom) and not node.level:
        paths = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        paths = [alias.name for alias in node.names]
    else:
        return []
    return [path for path in paths if path.startswith("sglang.")]


def _named(node: ast.AST) -> list[str]:
    """What of SGLang a string names: the target of a hook."""
    value = node.value if isinstance(node, ast.Constant) else None
    is_path = isinstance(value, str) and re.fullmatch(r"sglang(\.\w+)+", value) and value not in COMMANDS
    return [value] if is_path else []


def _uses_of_sglang() -> Iterator[tuple[str, str, bool]]:
    """(place, dotted path, is it in the table) of every import and hook in the package."""
    root = pathlib.Path(sglang_patches.__file__).parent
    for file in sorted(root.rglob("*.py")):
        for node in _running(ast.parse(file.read_text())):
            place = f"{file.relative_to(root.parent)}:{getattr(node, 'lineno', 0)}"
            # A row may name what is used of an imported class.
            yield from (
                (place, path, any(f"{row}.".startswith(f"{path}.") for row in ROWS)) for path in _taken(node)
            )
            yield from ((place, path, path in ROWS) for path in _named(node))


def _row_for(path: str) -> str:
    found = _resolve(path)
    parameters = [name for name in inspect.signature(found).parameters] if inspect.isfunction(found) else None
    signature = None if parameters is None else " ".join(parameters)
    return f"_row({path!r}, {signature!r}, 'what it is for')".replace("'", '"')


def test_every_import_and_hook_is_in_the_table():
    uses = list(_uses_of_sglang())
    found = {path for _, path, _ in uses}
    assert "sglang.srt.utils.is_cpu" in found  # imported in a function
    assert "sglang.srt.managers.scheduler.Scheduler" not in found  # for the type checker alone
    missing = {path: place for place, path, known in uses if not known}
    assert not missing, "add to HOST_SYMBOLS in sglang_patches/host/symbols.py:\n" + "\n".join(
        f"    {_row_for(path)},  # used in {place}" for path, place in missing.items()
    )


@pytest.fixture
def broken_package(tmp_path, monkeypatch) -> None:
    """A package with two modules that are there and cannot be imported; one tells as SGLang's kernel package does."""
    package = tmp_path / "broken_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text("import gone\n")
    pages = "CRITICAL: no library!\n\nError details:\n- ImportError: libgpu.so: not there\n- ImportError: no ops\n"
    (package / "kernels.py").write_text(f"raise ImportError({pages!r})\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("inner.f", "broken_package.inner cannot be imported: ModuleNotFoundError: No module named 'gone'"),
        (
            "kernels.f",
            "broken_package.kernels cannot be imported: ImportError: libgpu.so: not there; ImportError: no ops",
        ),
        ("nothing.f", "missing (module 'broken_package' has no attribute 'nothing')"),
    ],
)
def test_a_module_that_fails_is_told_from_one_that_is_missing(broken_package, path, reason):
    assert reason in drift_message((HostSymbol(f"broken_package.{path}", (), "x"),))


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
