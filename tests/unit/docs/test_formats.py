"""The versions of files that docs/upgrade.md names are those that the code writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from datastore_service.storage import (
    backup,
    directory_file,
    live_manifest,
    live_segment,
    log,
    manifest,
    quota_file,
    segment_file,
    share_file,
)

PAGE = Path(__file__).parents[3] / "docs" / "upgrade.md"
WRITTEN = {
    "prior: manifest": {manifest.FORMAT},
    "prior, live tier, snapshot: segment": {segment_file.VERSION},
    "live tier, snapshot: manifest": {live_manifest.FORMAT},
    "live tier, snapshot: whose text a segment has (`.prov`)": {live_segment.VERSION},
    "live tier: log": {log.VERSION},
    "quotas, shared streams, backups, the name of a directory": {
        quota_file.FORMAT,
        share_file.FORMAT,
        backup.FORMAT,
        directory_file.FORMAT,
    },
}


@pytest.mark.parametrize("file", WRITTEN)
def test_the_page_names_the_version_that_is_written(file):
    (row,) = re.findall(rf"^\| {re.escape(file)} \| (\d+) \| ([\d a-z]+) \|", PAGE.read_text(), re.MULTILINE)
    assert {int(row[0])} == WRITTEN[file]
    assert row[1].endswith(row[0])
