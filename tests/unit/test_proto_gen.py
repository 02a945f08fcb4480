"""What is committed in proto_gen is what protoc makes of protos/."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from proto_gen.generate import PACKAGE, generate
from proto_gen.specstore.v1 import admin_pb2, drafting_pb2

pytest.importorskip("grpc_tools")

FILES = ["drafting_pb2", "drafting_pb2_grpc", "admin_pb2", "admin_pb2_grpc"]
# The generator's version is written into what it generates; its newer versions also spell some lines otherwise.
VERSION = re.compile(
    r"^# Protobuf Python Version.*$|^GRPC_GENERATED_VERSION.*$|^    \d+,$|\(object\)", re.MULTILINE
)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("generated")
    generate(target)
    return target / "specstore" / "v1"


@pytest.mark.parametrize("name", FILES)
def test_code_is_current(fresh, name):
    committed = PACKAGE / "specstore" / "v1" / f"{name}.py"
    assert VERSION.sub("", committed.read_text()) == VERSION.sub("", (fresh / f"{name}.py").read_text())


@pytest.mark.parametrize("name", ["drafting_pb2", "admin_pb2"])
def test_type_stubs_are_current(fresh, name):
    declared = re.compile(r"^ *(?:class \w+|\w+: [\w\[\]., ]+|__slots__ = .*)", re.MULTILINE)
    committed = (PACKAGE / "specstore" / "v1" / f"{name}.pyi").read_text()
    assert declared.findall(committed) == declared.findall((fresh / f"{name}.pyi").read_text())


def _oldest(package: str) -> Version:
    """The oldest version that the project admits."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    wanted = {found.name: found for found in map(Requirement, project["dependencies"])}
    (bound,) = wanted[package].specifier
    assert bound.operator == ">="
    return Version(bound.version)


@pytest.mark.parametrize(
    ("package", "suffix", "stated"),
    [
        ("protobuf", "_pb2.py", r"# Protobuf Python Version: (\S+)"),
        ("grpcio", "_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '(\S+)'"),
    ],
)
def test_code_runs_on_the_oldest_runtime(package, suffix, stated):
    """It refuses one that is older than its generator."""
    texts = [path.read_text() for path in PACKAGE.rglob(f"*{suffix}")]
    generators = [Version(re.search(stated, text)[1]) for text in texts]
    assert len(generators) == 2 and max(generators) <= _oldest(package)


def test_drift_is_noticed(fresh):
    """The comparison sees a changed field number."""
    code = (fresh / "drafting_pb2.py").read_text()
    changed = code.replace(r"step\x18\x01", r"step\x18\x02")
    assert changed != code
    assert VERSION.sub("", changed) != VERSION.sub("", code)


def test_field_numbers_stay():
    """What is in use is never renumbered."""
    numbers = {field.name: field.number for field in drafting_pb2.Entry.DESCRIPTOR.fields}
    assert numbers == {
        "session": 1, "start": 2, "tokens": 3, "rejected": 4, "budget": 5, "opening": 6, "closing": 7,
        "tenant": 8, "withheld": 9,
    }  # fmt: skip
    numbers = {field.name: field.number for field in drafting_pb2.DraftReply.DESCRIPTOR.fields}
    assert numbers == {
        "step": 1, "statuses": 3, "known": 4, "nodes": 5, "tokens": 6, "parents": 7, "probs": 8, "sources": 9,
        "answers": 10, "without_rejected": 11, "tenants": 12, "refusals": 13, "columns": 14, "packed_trees": 15,
    }  # fmt: skip


def test_tiers_have_the_numbers_of_the_engine():
    from datastore_service.protocol.tree import Tier

    assert {f"TIER_{tier.name}": int(tier) for tier in Tier} == {
        name: number for name, number in admin_pb2.Tier.items() if number
    }
