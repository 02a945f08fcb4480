"""A scrape while a process makes its metrics files."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

def scraped():
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return generate_latest(registry).decode()

if sys.argv[1] == "whole":
    from sglang_patches.draft_process.metric_files import make_them_whole
    make_them_whole()
begun, before = [], MmapedDict.__init__
def watched(self, filename, read_mode=False):
    open(filename, "a").close()  # what prometheus_client does first
    begun.append(filename)
    scraped()
    before(self, filename, read_mode)
MmapedDict.__init__ = watched
Counter("a", "a").inc(2)
Gauge("b", "b", multiprocess_mode="livesum").set(3)
Histogram("c", "c", ["l"]).labels("x").observe(1)
Summary("d", "d").observe(5)
shown = [line for line in scraped().splitlines() if line.startswith(("a_total", "b ", "c_count", "d_sum"))]
print(len(begun), sorted(shown))
"""


@pytest.mark.parametrize("files", ["whole", "as they are"])
def test_no_scrape_meets_a_file_without_its_size(files, tmp_path):
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if files == "whole":
        values = ["a_total 2.0", "b 3.0", 'c_count{l="x"} 1.0', "d_sum 5.0"]
        assert done.stdout.strip() == f"4 {values}", done.stderr
        assert not list(tmp_path.glob("*.new"))
    else:
        assert "struct.error" in done.stderr, (
            "prometheus_client makes them whole: this module is not needed any more"
        )
