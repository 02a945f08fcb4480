"""`python docs/house.py`: how simple the plugin's house is, in numbers.

With `SGLANG_USE_CPU_ENGINE=1` and SGLang installed, `--steps` also counts the classes that a reader meets in a decode step.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGIN, DATASTORE = ROOT / "sglang_patches", ROOT / "datastore_service"
CLIENT = DATASTORE / "client"
STEP = PLUGIN / "step" / "decode.py"
SHORT = 45  # lines of a module
BENCHMARKS = ("benchmarks", "tests/unit/benchmarks")
# What is kept from step to step by session or request; the request book's keys are the identities of requests.
SESSION_KEYS = re.compile(
    r"self\.\w+: (?:dict|set)\[\s*(?:SessionName|RequestState|Req|Draft|int, RequestState)\b"
)
# A docstring's first sentence that needs the signature to be understood.
NOT_ALONE = re.compile(r"(Of|As|By|With|Without|At|From|In|Over|See|Where|Whose)\b|\w+(, \w+)*: ")


def sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def imports(path: Path) -> set[str]:
    """Modules of the product that a module imports, where only a type checker reads it too."""
    return {
        node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith((PLUGIN.name, DATASTORE.name))
    }


def dependent_docstrings(path: Path) -> Iterator[str]:
    """Where a docstring's first sentence does not stand alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said and NOT_ALONE.match(said):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {said.splitlines()[0]}"


def numbers() -> dict[str, int]:
    modules = sources(PLUGIN)
    containers = [SESSION_KEYS.findall(path.read_text()) for path in [*modules, *sources(CLIENT)]]
    return {
        "modules of the plugin": len(modules),
        f"of these with {SHORT} lines or fewer": sum(lines(path) <= SHORT for path in modules),
        "modules of the product that the step's module imports": len(imports(STEP)),
        "containers whose key is a session or a request": sum(map(len, containers)),
        "docstrings that need the signature": sum(
            len(list(dependent_docstrings(path))) for path in sources(PLUGIN, DATASTORE)
        ),
        "lines of benchmarks and their tests": sum(
            lines(path) for path in sources(*(ROOT / folder for folder in BENCHMARKS))
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python docs/house.py", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", action="store_true", help="also count the classes of a decode step")
    parser.add_argument(
        "--docstrings", action="store_true", help="list the docstrings that need the signature"
    )
    given = parser.parse_args()
    if given.docstrings:
        print(
            *(found for path in sources(PLUGIN, DATASTORE) for found in dependent_docstrings(path)), sep="\n"
        )
        return
    for name, number in numbers().items():
        print(f"{number:6} {name}")
    if given.steps:
        subprocess.run([sys.executable, "-m", "tests.unit.step.step_classes"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
