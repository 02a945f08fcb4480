"""The rules of the house that a program can count (docs/house.py)."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]


def house():
    spec = importlib.util.spec_from_file_location("house", ROOT / "docs" / "house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docstrings_stand_without_the_signature():
    of = house()
    wrong = [found for path in of.sources(of.PLUGIN, of.DATASTORE) for found in of.dependent_docstrings(path)]
    assert wrong == []


def test_a_docstring_that_does_not_is_found():
    of = house()
    for said in ("Of a step.", "tokens: int32.", "tokens, nbytes: of a tier.", "With a segment."):
        assert of.NOT_ALONE.match(said)
    assert not of.NOT_ALONE.match("The tokens of a step.")
