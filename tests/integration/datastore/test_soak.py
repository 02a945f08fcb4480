"""Half a minute of `python -m benchmarks.soak`, which runs for longer by hand."""

import json

from benchmarks.soak.command import main


def test_half_a_minute(tmp_path, capsys):
    status = main(["--minutes", "0.5", "--seed", "7", "--json", str(tmp_path / "soak.json")])
    summary = json.loads((tmp_path / "soak.json").read_text())
    assert (status, summary["violations"]) == (0, [])
    assert "all was right" in capsys.readouterr().out
    counts = summary["counts"]
    assert summary["disturbances"] and summary["starts"] >= 2
    # However slow the machine, each kind of check was made.
    assert all(counts[name] for name in ("found", "gone", "recalled", "closed sessions", "broken streams"))
    assert summary["segment_files"] > 0
