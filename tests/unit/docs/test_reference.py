"""The reference pages are what docs/reference.py writes from the code, and the other pages name what these have."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
from typer.main import get_command

from datastore_service.cli.main import app
from sglang_patches.options import Options
from tests.unit.deploy import exported
from tests.unit.docs.test_pages import CHECKOUT, each_page

REFERENCE = exported.REFERENCE
FLAGS = {f"--specstore-{option.name.replace('_', '-')}" for option in dataclasses.fields(Options)}
FLAGS.add("--specstore-config")
COMMANDS = get_command(app).commands
SERVICE, ENGINE = list(REFERENCE["of_the_service"]()), list(REFERENCE["of_the_engine"]())
OTHER_NAMES = {"specstore_cpu", "specstore_toy"}  # an attention backend, and a module of the tests
BEFORE = r"(?:^|exec datastore |-- |&& |^(?:\w+=\S+ )+)"  # what a command line has before the program


@pytest.mark.parametrize("name", REFERENCE["PAGES"])
def test_a_page_is_what_the_program_writes(name):
    assert (CHECKOUT / "docs" / name).read_text() == REFERENCE["page"](name), "`make reference` writes it"


def test_every_flag_has_its_row():
    page = (CHECKOUT / "docs" / "flags.md").read_text()
    rows = re.findall(r"^\| `(--specstore-[a-z-]+)` ", page, re.MULTILINE)
    assert sorted(rows) == sorted(FLAGS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_below_its_heading(name):
    page = (CHECKOUT / "docs" / "cli.md").read_text()
    shown = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert shown
    for parameter in COMMANDS[name].params:
        argument = parameter.metavar or parameter.name.upper()
        written = parameter.opts[0] if parameter.opts[0].startswith("--") else argument
        assert f"`{written}" in shown


def test_the_service_exports_what_its_table_has():
    scraped = {
        name: labels
        for name, labels in (exported.of_the_service() | exported.of_sharing()).items()
        if name.startswith("specstore_") and not name.endswith("_created")
    }
    assert scraped == exported.samples(SERVICE)


def test_sglang_has_the_gauges_that_the_page_shows():
    gauges = exported.of_sglang()
    if not gauges:
        pytest.skip("needs SGLang, whose gauges the page shows")
    assert REFERENCE["SGLANG"].keys() <= gauges.keys()


@each_page
def test_a_flag_that_a_page_names_is_one(page):
    assert set(re.findall(r"--specstore-[a-z]+(?:-[a-z]+)*", page.read_text())) <= FLAGS


@each_page
def test_a_command_that_a_page_names_is_one(page):
    for name, options in commands_in(page.read_text()):
        assert name in COMMANDS, name
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts} | {"--help"}
        assert options <= known, name


@each_page
def test_a_metric_that_a_page_names_is_one(page):
    known = {metric.name for metric in (*SERVICE, *ENGINE)} | exported.samples((*SERVICE, *ENGINE)).keys()
    assert set(re.findall(r"\bspecstore(?:_[a-z]+)+", page.read_text())) <= known | OTHER_NAMES


def commands_in(page: str) -> Iterator[tuple[str, set[str]]]:
    """The uses of `specstore` in a page's code, each with its options."""
    page = re.sub(r"^```.*?^```", "", page.replace("\\\n", " "), flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^ {4,}(.*)$", page, re.MULTILINE)
    for code in (*lines, *re.findall(r"`([^`]+)`", page.replace("\n", " "))):
        for name, words in re.findall(rf"{BEFORE}specstore ([a-z-]+)([^|;&#]*)", code.partition(" #")[0]):
            yield name, set(re.findall(r"(?<=\s)--[a-z-]+", words))


def test_commands_are_found_in_code():
    page = (
        "as `specstore stats --json` says\n\n    X=1 specstore serve \\\n      --data DIR  # specstore no\n"
    )
    assert list(commands_in(page)) == [("serve", {"--data"}), ("stats", {"--json"})]
