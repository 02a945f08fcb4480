"""Regenerates this package from ``protos/``: `python -m proto_gen.generate [TARGET]`, needs grpcio-tools.

Generated code refuses runtimes older than its generator, so what is committed comes from the oldest grpcio-tools that
``pyproject.toml`` admits: `uv run --no-project --with grpcio-tools==1.80.0 python -m proto_gen.generate`.
"""

from __future__ import annotations

import argparse
import re
from importlib.resources import files
from pathlib import Path

PACKAGE = Path(__file__).parent
PROTOS = PACKAGE.parent / "protos"
OWN_IMPORT = re.compile(r"^from specstore\.", re.MULTILINE)


def generate(target: Path) -> list[Path]:
    """Writes modules, service stubs and type stubs under `target`; returns the files. Raises RuntimeError if protoc fails."""
    from grpc_tools import protoc

    include = files("grpc_tools") / "_proto"
    sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{include}", *outputs, *sources]):
        raise RuntimeError(f"protoc failed on {', '.join(sources)}")
    written = sorted(path for path in target.rglob("*_pb2*") if path.suffix in (".py", ".pyi"))
    for path in written:
        path.write_text(_below_this_package(path.read_text()))
    return written


def _below_this_package(code: str) -> str:
    """protoc knows only the proto package's name; the modules live in `proto_gen`."""
    return OWN_IMPORT.sub("from proto_gen.specstore.", code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, nargs="?", default=PACKAGE, help="folder to write to")
    for file in generate(parser.parse_args().target):
        print(file)
