"""The table of settings and request fields (docs/settings.py) says of each field of SGLang's what becomes of it, and is right."""

import argparse
import dataclasses
import inspect
import runpy
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from pydantic import BaseModel  # noqa: E402
from sglang.srt.entrypoints.openai import protocol  # noqa: E402
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_patches.algorithm import _ONLY_SUPPORTED, _REFUSED, is_without_effect  # noqa: E402
from sglang_patches.host.versions import INSTALLED, TESTED, host  # noqa: E402
from tests.unit.plugin.resolution import server_args  # noqa: E402

CHECKOUT = Path(__file__).parents[3]
TABLE = runpy.run_path(str(CHECKOUT / "docs" / "settings.py"))
SETTINGS, REQUESTS, flag = TABLE["SETTINGS"], TABLE["REQUESTS"], TABLE["flag"]
ROWS = (*SETTINGS, *REQUESTS)
NEWEST = pytest.mark.skipif(TESTED[-1] != INSTALLED, reason="the fields are those of the newest version")
HERE = inspect.signature(ServerArgs).parameters
# SGLang's own refusals are those of its newest version; ours hold in all.
REFUSALS = [
    (row, name)
    for row in SETTINGS
    for name in row.given
    if {name, *row.beside} <= HERE.keys() and (row.verdict == "refused" or TESTED[-1] == INSTALLED)
]

pytestmark = pytest.mark.usefixtures("plugin")


def names(rows) -> list[str]:
    return [name for row in rows for name in row.names]


@NEWEST
def test_every_setting_has_one_verdict():
    assert sorted(names(SETTINGS)) == sorted(HERE)


@NEWEST
def test_every_field_of_a_request_has_one_verdict():
    fields = {
        *SamplingParams.__struct_fields__,
        *(field.name for field in dataclasses.fields(GenerateReqInput)),
    }
    kinds = [
        kind
        for name, kind in vars(protocol).items()
        if isinstance(kind, type) and issubclass(kind, BaseModel) and name.endswith(("Request", "ReqInput"))
    ]
    assert sorted(names(REQUESTS)) == sorted(fields.union(*(kind.model_fields for kind in kinds)))


@NEWEST
def test_each_flag_is_sglang_s():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    shown = {flag(name) for name in names(SETTINGS)}
    assert {name for name in shown if name.startswith("-")} <= parser._option_string_actions.keys()
    told = {action.dest for action in parser._actions}
    assert {name for name in shown if not name.startswith("-")} == HERE.keys() - told


@pytest.mark.parametrize(("row", "name"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_refused_is_named(model_path, row, name):
    with pytest.raises((ValueError, AssertionError, NotImplementedError)) as raised:
        server_args(
            model_path("dense"), "hopper", **row.beside, **{name: row.given[name]}
        ).check_server_args()
    line = str(raised.value).splitlines()[0]
    assert (row.says or flag(name)) in line
    assert row.says or row.verdict != "refused" or line.removeprefix("SSSD: ").startswith("--")


@NEWEST
def test_what_we_refuse_is_in_the_table():
    ours = {*_ONLY_SUPPORTED, *_REFUSED, *host.ONLY_SUPPORTED, *filter(is_without_effect, HERE)}
    assert ours - {name for row in SETTINGS for name in row.given} <= set(TABLE["WITHOUT_FLAG"].names)


@pytest.mark.parametrize("row", [row for row in ROWS if row.verdict == "right"], ids=lambda row: row.names[0])
def test_what_is_right_is_in_the_tests_that_say_so(row):
    texts = [(CHECKOUT / test).read_text() for test in row.tests]
    assert texts
    for name in row.names:
        assert any(name in text or flag(name) in text for text in texts), name


def test_the_page_is_written_from_the_table():
    assert (CHECKOUT / "docs" / "settings.md").read_text() == TABLE["page"]()
