"""When a folder that is made once is made again."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_patches.demo.folder import DemoModelError, made_once


class Writer:
    """Writes one file; counts how often."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, folder: Path) -> None:
        self.runs += 1
        (folder / "weights").write_text("right")


@pytest.fixture
def write() -> Writer:
    return Writer()


def test_an_intact_folder_is_kept(tmp_path, write):
    first, second = made_once(tmp_path / "m", write), made_once(tmp_path / "m", write)
    assert first == second == tmp_path / "m"
    assert write.runs == 1


def test_two_that_need_it_at_once_make_it_once(tmp_path, write):
    """flock(2) tells apart who opened the folder, thread or process."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda out: made_once(out, write), [tmp_path / "m"] * 8))
    assert write.runs == 1


@pytest.mark.parametrize("harm", [lambda f: f.write_text("wrong"), lambda f: f.unlink()])
def test_a_broken_folder_is_made_again(tmp_path, write, harm):
    harm(made_once(tmp_path / "m", write) / "weights")
    assert (made_once(tmp_path / "m", write) / "weights").read_text() == "right"
    assert write.runs == 2


@pytest.mark.timeout(300)
def test_what_is_made_of_another_folder_makes_that_first(tmp_path, write):
    def from_another(folder):
        (folder / "weights").write_text((made_once(tmp_path / "a", write) / "weights").read_text())

    assert (made_once(tmp_path / "b", from_another) / "weights").read_text() == "right"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_a_failure_leaves_nothing_behind(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise DemoModelError("weights: not these")

    with pytest.raises(DemoModelError, match="not these"):
        made_once(tmp_path / "m", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_is_refused(tmp_path, write):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DemoModelError, match="holds something else"):
        made_once(tmp_path, write)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
