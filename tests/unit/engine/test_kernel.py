"""The cache of compiled kernels, in a copy of the engine that a process of its own imports."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import datastore_service
from datastore_service.engine import SOURCES_DIGEST, batch, packing, segment, session, suffix_sorting
from datastore_service.engine.segment import build_segment
from datastore_service.engine.session import SessionIndex

QUERY = """
import numpy as np
from datastore_service.engine import batch
from datastore_service.engine.engine import Engine
from datastore_service.protocol.types import Budget, Entry, Opening

engine = Engine(100)
text = np.array([1, 2, 3, 4, 5, 6, 1, 2, 3], dtype=np.int32)
reply, = engine.step([Entry("a", tokens=text, opening=Opening(), budget=Budget(nodes=1))])
print(*reply.tree.tokens, sum(batch.run_batch.stats.cache_misses.values()))
"""

UNPACK = """
import json
import numpy as np
from datastore_service.engine import packing
values = packing.unpack(packing.pack(np.array([1, 2, 3], dtype=np.int32), 4), 4, 3)
misses = [sum(kernel.stats.cache_misses.values()) for kernel in (packing._pack, packing._unpack)]
print(json.dumps([values.tolist(), sum(misses)]))
"""

PACK = """
import numpy as np
from datastore_service.engine import packing
packing.pack(np.array([1, 2, 3], dtype=np.int32), 4)
print(sum(packing._pack.stats.cache_misses.values()))
"""


@pytest.fixture
def package(tmp_path) -> Path:
    """The engine's folder in a copy that holds nothing of the service but the engine and the protocol."""
    source = Path(datastore_service.__file__).parent
    copy = tmp_path / "datastore_service"
    for part in ("engine", "protocol"):
        shutil.copytree(source / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(source / "__init__.py", copy)
    return copy / "engine"


def python(package: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment = kept | {"PYTHONPATH": str(package.parents[1])} | variables
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=package.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def unpacked(package: Path) -> list:
    """1, 2 and 3, packed and unpacked; kernels compiled."""
    return json.loads(python(package, UNPACK).stdout)


def test_an_edit_of_another_module_is_compiled_and_nothing_else_is(package):
    assert unpacked(package) == [[1, 2, 3], 2]
    assert unpacked(package) == [[1, 2, 3], 0]
    edit(
        package / "memory.py",
        "return builder.load(pointer, align=1)",
        "return builder.not_(builder.load(pointer, align=1))",
    )
    assert unpacked(package) == [[14, 13, 12], 2]
    edit(
        package / "memory.py",
        "return builder.not_(builder.load(pointer, align=1))",
        "return builder.load(pointer, align=1)",
    )
    assert unpacked(package) == [[1, 2, 3], 0]


def test_a_start_that_compiles_says_so_once(package):
    said = [
        python(package, f"import logging\nlogging.basicConfig(level='INFO')\n{UNPACK}").stderr
        for _ in range(2)
    ]
    assert [text.count("compiling kernels, about 40 s") for text in said] == [1, 0]


def test_the_largest_kernel_is_compiled_once():
    """Compiling it takes half a minute: each service and each server would wait for it."""
    exec(QUERY, {})
    assert python(Path(datastore_service.__file__).parent / "engine", QUERY).stdout == "4 0\n"


def test_where_the_package_is_read_only_the_cache_is_the_users(package, tmp_path):
    _forbid_cache_in(package)
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "home")}
    assert python(package, PACK, **home).stdout == "1\n"
    assert python(package, PACK, **home).stdout == "0\n"
    assert python(package, PACK, **home, NUMBA_CACHE_DIR=str(tmp_path / "chosen")).stdout == "1\n"
    for place in ("home", "chosen"):
        assert len(list((tmp_path / place).rglob("packing._pack_*.nbc"))) == 1


def test_an_image_s_kernels_outlive_the_rounding_of_the_sources_times(package, tmp_path):
    image = {"NUMBA_CACHE_LOCATOR_CLASSES": "datastore_service.engine.image.ImageKernels"}
    for variables, compiled_again in (image, "0\n"), ({}, "1\n"):
        cache = {"NUMBA_CACHE_DIR": str(tmp_path / f"kernels-{len(variables)}")} | variables
        os.utime(package / "packing.py", (1_000_000.5, 1_000_000.5))
        assert python(package, PACK, **cache).stdout == "1\n"
        os.utime(package / "packing.py", (1_000_000, 1_000_000))
        assert python(package, PACK, **cache).stdout == compiled_again


READ_ONLY = """
import tempfile
def refuse(*words, **options): raise OSError(30, "Read-only file system")
tempfile.TemporaryFile = refuse
"""


def test_an_image_s_kernels_are_read_where_nothing_can_be_written(package, tmp_path):
    """As in a container whose root is read-only."""
    image = {
        "NUMBA_CACHE_LOCATOR_CLASSES": "datastore_service.engine.image.ImageKernels",
        "NUMBA_CACHE_DIR": str(tmp_path / "kernels"),
    }
    assert python(package, PACK, **image).stdout == "1\n"
    assert python(package, READ_ONLY + PACK, **image).stdout == "0\n"
    others = python(package, READ_ONLY + UNPACK, **image)
    assert json.loads(others.stdout)[0] == [1, 2, 3] and "NUMBA_CACHE_DIR" in others.stderr


def test_no_directory_at_all_is_reported_once_and_costs_only_the_cache(package, tmp_path):
    _forbid_cache_in(package)
    (tmp_path / "file").touch()
    done = python(package, PACK, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "file"))
    assert len(done.stderr.splitlines()) == 1
    assert "NUMBA_CACHE_DIR" in done.stderr


def _forbid_cache_in(package: Path) -> None:
    """A file in the folder's place: permissions would not hinder root."""
    (package / "__pycache__").touch()


@pytest.mark.parametrize("vocab_size", [200, 60_000, 70_000, 1 << 31])
def test_an_entry_point_has_one_signature_whatever_the_width(vocab_size):
    """Numba's index would not be safe between processes that add different ones."""
    document = np.arange(300) * (vocab_size // 300) if vocab_size > 300 else np.arange(200)
    for array in (document, document.astype(np.uint32)):
        array.flags.writeable = False
        build_segment([array], vocab_size).check_integrity()
        SessionIndex().append(array.astype(np.int32))
    modules = batch, packing, segment, session, suffix_sorting
    kernels = {name: value for module in modules for name, value in vars(module).items() if _is_cached(value)}
    assert kernels.keys() >= {"run_batch", "append_tokens", "_fill_keys", "_token_suffixes"}
    assert {name for name, value in kernels.items() if len(value.signatures) > 1} == set()


def _is_cached(value: object) -> bool:
    return value.__class__.__name__ == "CPUDispatcher" and SOURCES_DIGEST in value.__qualname__
