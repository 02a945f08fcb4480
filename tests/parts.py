"""Which tests `make test` runs, and which `make test-all` alone. The page docs/tests.md shows the table, with what each part is for.

A test is in the part of the first row that it belongs to: the row names its file or a folder above it, and all its words are in the
test's name with its parameters. A test of no row is in `make test`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sglang_patches.methods.registry import METHODS

TEST, REST = PARTS = "test", "rest"
LEFT = pytest.StashKey[int]()  # how many tests of the rest were found and left out


@dataclass(frozen=True)
class Row:
    """path: below tests/. why: it can wait, or it cannot."""

    part: str
    path: str
    why: str
    words: tuple[str, ...] = ()

    def has(self, nodeid: str) -> bool:
        """nodeid: pytest's name of a test."""
        path, _, name = nodeid.removeprefix("tests/").partition("::")
        return (path + "/").startswith(self.path + "/") and all(word in name for word in self.words)


# The methods whose conformance `make test` shows, each on one setup of tests/conformance/conftest.py: the default without a draft
# process, and one that has a draft process. Together they have both setups.
SETUPS = {"SSSD": "overlap, gRPC", "ADAPTIVE": "synchronous, embedded"}
OTHER_SETUPS = {"SSSD": "synchronous, embedded", "ADAPTIVE": "overlap, gRPC"}
# Of the heads that retrieval stands beside, those whose conformance is shown: a draft model in the target's process, and weights that read
# the target's states.
TESTED_HEADS = ("STANDALONE", "EAGLE3")

ROWS = [
    *(
        Row(REST, "conformance", "ADAPTIVE stands for the methods with a draft process", (name,))
        for name in METHODS
        if name not in SETUPS
    ),
    *(
        Row(REST, "conformance", "heads have a worker of their own, which few changes reach", (name,))
        for name in TESTED_HEADS
    ),
    *(
        Row(
            REST,
            "conformance",
            "one server a method is enough, as the other method has this one",
            (name, setup),
        )
        for name, setup in OTHER_SETUPS.items()
    ),
    Row(REST, "conformance/test_split.py", "ADAPTIVE's split has a draft process besides", ("SSSD",)),
    Row(REST, "conformance/test_toy_methods.py", "tests the suite, not the product"),
    Row(TEST, "e2e/test_demo_model.py", "a model that writes text, plain", ("SSSD",)),
    Row(TEST, "e2e/test_serve.py", "what a new user types", ("test_it_answers_and_leaves_nothing_behind",)),
    Row(REST, "e2e", "starts servers, or a command, for each test"),
    Row(
        REST,
        "integration/datastore/test_backup.py",
        "test_crash.py kills as often",
        ("test_killed_at_every_call",),
    ),
    Row(REST, "integration/datastore/test_fuzz.py", "many random inputs"),
    Row(REST, "integration/datastore/test_ray_build.py", "starts Ray clusters"),
    Row(
        TEST,
        "integration/datastore/test_sharing.py",
        "what sharing is for",
        ("test_what_one_publishes_drafts_at_the_other",),
    ),
    Row(
        REST, "integration/datastore/test_sharing.py", "several services and a server of Redis for each test"
    ),
    Row(REST, "integration/datastore/test_sharing_kills.py", "the same, and kills them"),
    Row(REST, "integration/datastore/test_soak.py", "tests the soak, not the product"),
    Row(REST, "integration/datastore/test_strangers.py", "clients that say anything, for seconds each"),
    Row(REST, "unit/accelerator/test_interpreted.py", "a GPU's kernels, interpreted: few changes reach them"),
    Row(REST, "unit/cpu/test_install.py", "processes that import SGLang: few changes reach them"),
    Row(REST, "unit/benchmarks", "tests simulators and load programs, not the product"),
    Row(
        REST,
        "unit/launch/test_serve.py",
        "imports SGLang in a process of its own, as another test does",
        ("test_an_algorithm_that_there_is", "NEXTN"),
    ),
    Row(REST, "unit/plugin/test_hooks.py", "SGLang with other plugins, a process each"),
    Row(REST, "unit/step/test_two_ranks.py", "two processes that import SGLang"),
    Row(REST, "unit/support/test_lanes.py", "tests the runner of tests, in processes"),
    Row(REST, "unit/support/test_parts.py", "imports all tests", ("test_one_process_collects_every_test",)),
]


def part_of(nodeid: str) -> str:
    return next((row.part for row in ROWS if row.has(nodeid)), TEST)


def table() -> str:
    """ROWS as docs/tests.md has them, rows that differ in their words alone as one."""
    named: dict[tuple[str, str, str], list[str]] = {}
    for row in ROWS:
        named.setdefault((row.part, row.path, row.why), []).append(" and ".join(f"`{w}`" for w in row.words))
    lines = ["| tests | of these | in | why |", "|---|---|---|---|"]
    for (part, path, why), words in named.items():
        where = "`make test`" if part == TEST else "`make test-all` alone"
        lines.append(f"| `tests/{path}` | {'; '.join(filter(None, words)) or 'all'} | {where} | {why} |")
    return "\n".join(lines) + "\n"


def leave_others(config: pytest.Config, items: list[pytest.Item], part: str) -> None:
    """Deselects what is in another part. Of `make test`, counts what has gone to the rest."""
    others = [item for item in items if part_of(item.nodeid) != part]
    if others:
        items[:] = [item for item in items if part_of(item.nodeid) == part]
        config.hook.pytest_deselected(items=others)
    if part == TEST:
        config.stash[LEFT] = sum(item.get_closest_marker("long") is None for item in others)
