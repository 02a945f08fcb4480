"""The benchmark of services that share, on real services."""

from __future__ import annotations

import json

from benchmarks.sharing import main


def test_each_arrangement_is_replayed_and_an_answer_helps_where_it_is_known(tmp_path):
    words = {
        "rounds": 1,
        "requests": 9,
        "outputs": 2,
        "turns": 1,
        "stored": 130,
        "later": 3,
        "json": tmp_path / "record",
    }
    main([word for name, value in words.items() for word in (f"--{name}", str(value))])
    record = json.loads((tmp_path / "record").read_text())
    drafts = {(row["services"], row["asked"]): row["per_step"] for row in record["drafts"]}
    assert set(drafts) == {
        (kind, asked) for kind in ("shared", "one", "apart") for asked in ("first", "again")
    }
    assert drafts["one", "again"] > drafts["apart", "again"]
    (rebuilt,) = record["rebuilt"]
    assert rebuilt["tokens"] == 133 * 200 and rebuilt["serving"] > 0 and rebuilt["caught_up"] > 0
    assert len(record["seconds"]) == 2 and set(record["steps"][0]) == {
        "sharing_50",
        "sharing_99",
        "alone_50",
        "alone_99",
    }
