"""The benchmarks' `--help`: every option is explained, and what is slow to import is imported after the options are read."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SLOW = {"matplotlib", "pyarrow", "sglang", "torch", "transformers"}
# Runs a module in place of `python -m`, and says of its help what argparse's own text does not.
SHOW = """
import argparse, json, runpy, sys
def show(parser, *_):
    told = {tuple(of.option_strings) or of.dest: [of.help or "", of.default] for of in parser._actions}
    named = {" ".join(name) if isinstance(name, tuple) else name: of for name, of in told.items()}
    print(json.dumps({"options": named, "modules": [*sys.modules]}, default=str))
argparse.ArgumentParser.print_help = show
sys.argv = ["benchmark", "--help"]
runpy.run_module(MODULE, run_name="__main__")
"""


def programs() -> list[str]:
    found = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for file in (ROOT / "benchmarks").rglob("*.py")
        if re.search(r"^if __name__ == .__main__.:", file.read_text(), re.MULTILINE)
    ]
    assert len(found) >= 13
    return sorted(found)


@pytest.mark.parametrize("program", programs())
def test_help_explains_every_option_and_imports_nothing_slow(program):
    words = [sys.executable, "-c", SHOW.replace("MODULE", repr(program))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    for name, (meaning, default) in shown["options"].items():
        assert meaning, f"{name} has no help"
        unset = default in (None, False, [], "==SUPPRESS==")
        assert unset or "default" in meaning, f"{name} does not say that its default is {default}"
    slow = SLOW.intersection(shown["modules"])
    assert not slow
