"""The first of two tensor-parallel ranks does with recorded sessions what a single worker does, and the other verifies the same."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each has written; in processes of their own: SGLang asks at its import whether it serves on a CPU."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.unit.step.two_ranks", str(folder)]
    subprocess.run(command, env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}, check=True)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def recorded() -> list[str]:
    from tests.unit.step.recorded_sessions import RECORDED
    from tests.unit.step.two_ranks import CASE

    return (RECORDED / f"{CASE}.txt").read_text().splitlines()


def test_the_first_does_what_one_alone_does(ranks, recorded):
    assert ranks[0]["lines"] == recorded


def test_the_other_verifies_and_emits_the_same_and_asks_no_datastore(ranks, recorded):
    *verified, _ = (line for line in recorded if not line.startswith(("step ", "post ")))
    *lines, _ = ranks[1]["lines"]  # the last is what it has learned of trees: nothing
    assert lines == verified


def test_steps_are_counted_once(ranks):
    first, other = ranks
    assert first["steps"] > 100 and first["seconds"] > 0
    assert (other["steps"], other["seconds"]) == (0, 0)


def test_what_differs_between_ranks_is_the_first_s(ranks):
    assert [rank["of_first"] for rank in ranks] == [[0], [0]]


def test_an_early_exit_has_the_whole_vocabulary(ranks):
    for rank in ranks:
        assert rank["divided"] == rank["whole"]
    assert max(map(max, ranks[0]["whole"])) >= 32  # a token of the second rank's part
