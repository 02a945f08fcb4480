"""Each parameter of a test has an effect: `parametrize` gives it to a test, or to a fixture, that reads it. One that nothing reads makes
cases that repeat the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def unread(sources: dict[str, str]) -> list[str]:
    """Where a parameter is read by nothing, as FILE:FUNCTION:PARAMETER. sources: by file."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    shared = {name: mark for tree in trees.values() for name, mark in _assigned(tree)}
    fixtures = [f for tree in trees.values() for f in _functions(tree) if _fixture(f) is not None]
    of_fixtures = {argument.arg for fixture in fixtures for argument in fixture.args.args}
    found = []
    for file, tree in trees.items():
        for function in _functions(tree):
            names = _parameters(function, shared)
            found += [f"{file}:{function.name}:{name}" for name in names - _read(function) - of_fixtures]
            if _has_params(function) and "request" not in _read(function):
                found.append(f"{file}:{function.name}:params")
    return found


def _functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Marks that a module gives a name, as `LAGS = pytest.mark.parametrize(...)`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _parameters(function: Function, shared: dict[str, ast.expr]) -> set[str]:
    """Names that the function's own marks give values to, other than fixtures'."""
    names: set[str] = set()
    for mark in function.decorator_list:
        mark = shared.get(mark.id, mark) if isinstance(mark, ast.Name) else mark
        indirect = isinstance(mark, ast.Call) and any(word.arg == "indirect" for word in mark.keywords)
        if _called(mark, "parametrize") and not indirect:
            given = ast.literal_eval(mark.args[0])
            names |= set(given.replace(",", " ").split() if isinstance(given, str) else given)
    return names


def _called(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def _fixture(function: Function) -> ast.expr | None:
    marks = function.decorator_list
    return next((mark for mark in marks if "pytest.fixture" in ast.unparse(mark)), None)


def _has_params(function: Function) -> bool:
    mark = _fixture(function)
    return isinstance(mark, ast.Call) and any(word.arg == "params" for word in mark.keywords)


def _read(function: Function) -> set[str]:
    return {n.id for part in function.body for n in ast.walk(part) if isinstance(n, ast.Name)}


def test_every_parameter_is_read():
    sources = {str(file.relative_to(TESTS)): file.read_text() for file in TESTS.rglob("*.py")}
    assert len(sources) > 300
    assert unread(sources) == []


MARK = "import pytest\nEACH = pytest.mark.parametrize('late', [False, True])\n"
UNREAD = [
    "@pytest.mark.parametrize('late', [1])\ndef test_it(late):\n    pass\n",
    "@pytest.mark.parametrize(('late', 'size'), [(1, 2)])\ndef test_it(size, late):\n    assert size\n",
    "@pytest.mark.parametrize('late, size', [(1, 2)])\nclass Test:\n  pass\n@EACH\ndef test_it(late): pass\n",
    "class Test:\n  @EACH\n  async def test_it(self, late): pass\n",
]
READ = [
    "@pytest.mark.parametrize('late', [1])\ndef test_it(late):\n    assert [x for x in (late,)]\n",
    "@pytest.mark.parametrize('late', [1], indirect=True)\ndef test_it(late): pass\n",
    "@pytest.fixture\ndef server(late): pass\n@EACH\ndef test_it(late, server): pass\n",
]


@pytest.mark.parametrize("source", UNREAD)
def test_one_that_nothing_reads_is_found(source):
    assert unread({"a.py": MARK + source}) == ["a.py:test_it:late"]


@pytest.mark.parametrize("source", READ)
def test_one_that_is_read_is_not(source):
    assert unread({"a.py": MARK + source}) == []


def test_a_fixture_that_does_not_read_which_of_its_parameters_it_is_for_is_found():
    fixture = "@pytest.fixture(params=[1, 2])\ndef server({0}):\n    return {0}\n"
    assert unread({"a.py": MARK + fixture.format("request")}) == []
    assert unread({"a.py": MARK + fixture.format("tmp_path")}) == ["a.py:server:params"]
