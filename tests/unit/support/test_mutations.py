"""The mutation harness tells what tests notice from what they do not, whatever they leave behind."""

import subprocess
from pathlib import Path

import pytest

from tests.mutations import __main__ as mutations
from tests.mutations.table import MUTANTS, Mutant

PRODUCT = "LIMIT, UNIT = 3, 'ms'\n"
TESTS = {
    "sound": "assert LIMIT == 3",
    "broken": "assert LIMIT == 5",
    "endless": "while LIMIT != 3: pass",
}
TEST = """from threading import Event, Thread
from product import LIMIT
def test_it():
    Thread(target=Event().wait).start()
    {}
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A mutant is given by what it makes of the product, and by its tests."""
    (tmp_path / "product.py").write_text(PRODUCT)
    for name, test in TESTS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(TEST.format(test))
    subprocess.run(("git", "init", "-q"), cwd=tmp_path, check=True)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "UNITS", "")

    def run(*changes, names=()):
        mutants = [Mutant(f"m{at}", "product.py", *change) for at, change in enumerate(changes)]
        monkeypatch.setattr(mutations, "MUTANTS", mutants)
        monkeypatch.setattr("sys.argv", ["mutations", *names])
        return mutations.main()

    return run


def told(capsys):
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_what_a_test_notices_is_killed(checkout, capsys):
    assert checkout(("3", "4", "sound"), ("ms", "s", "sound")) == 1
    killed, survived, last = told(capsys)
    assert (killed[0], survived[0], last) == ("killed", "survived", ["1", "of", "2", "killed"])
    assert killed[-1] == "sound/test_sound.py::test_it"
    assert checkout(("3", "4", "sound"), ("ms", "s", "sound"), names=["m0"]) == 0


def test_what_fails_anyway_or_does_not_end_shows_nothing(checkout, capsys, monkeypatch):
    monkeypatch.setattr(mutations, "LIMIT_SECONDS", 5.0)
    assert checkout(("3", "4", "broken"), ("3", "4", "endless")) == 1
    assert [line[0] for line in told(capsys)] == ["unclear", "unclear", "0"]


def test_a_name_that_no_mutant_has_is_refused(checkout):
    with pytest.raises(SystemExit, match="2"):
        checkout(("3", "4", "sound"), names=["m1"])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_every_mutant_is_in_its_file_once(mutant):
    assert Path(mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old and Path(mutations.UNITS, mutant.tests.partition("::")[0]).exists()


def test_every_mutant_has_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
