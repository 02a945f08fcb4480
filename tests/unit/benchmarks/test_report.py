"""Records, pages and plots: made from results alone, losses under the same rule as wins."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import roofline
from benchmarks.replay.tables import strongest
from benchmarks.report import plots
from benchmarks.report.__main__ import main
from benchmarks.report.page import Run, command, page, tables_of
from benchmarks.report.records import PROJECT, dumps, finish
from benchmarks.report.statistics import Interval, throughput_ratio

RUNS = PROJECT / "docs" / "benchmarks"
MADE = {
    "command": "serve", "packages": {"specstore": "0.1.0"}, "commit": "c" * 40, "lock": "l" * 64, "python": "3.11",
    "processor": "a processor", "cores": 2, "prompts": {"p.jsonl": "d" * 64}, "settings": {"batch": [1, 8], "seed": 0},
}  # fmt: skip


def value(middle: float, spread: float = 0.05) -> dict:
    return {"value": middle, "low": middle - spread, "high": middle + spread}


def served(case: str, variant: str, ratio: float, **more) -> dict:
    return {
        "case": case, "batch": 1, "category": "all", "variant": variant, "groups": 3, "throughput_ratio": value(ratio),
        "tokens_per_step": value(1.5), "milliseconds_per_step": 50.0, "tokens_per_second": 20.0, "ttft_p50": 0.1,
        "gap_mean": 0.05, "gap_p50": 0.04, "gap_p99": 0.09, "outputs_differing": 0.0, "breakdown": {},
    } | more  # fmt: skip


def replayed(method: str, ratio: float, nodes: int = 8) -> dict:
    return {
        "method": method, "nodes": nodes, "category": "all", "tokens_per_step": value(2.0), "ours_over_it": value(ratio),
        "p50_us": 20.0, "p99_us": 60.0,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "named"
    folder.mkdir()
    summary = [
        served("good", "plain", 1.0, predicted_tokens_per_second=25.0),
        served("good", "sssd", 1.8, predicted_tokens_per_second=24.0),
        served("bad", "plain", 1.0), served("bad", "sssd", 0.8), served("same", "sssd", 1.0),
        served("streamed", "sssd", 1.2, breakdown={"forward": 0.9, "rest": 0.1}),
        served("single", "sssd", 1.4, throughput_ratio={"value": 1.4, "low": None, "high": None}),
    ]  # fmt: skip
    (folder / "curve.json").write_text(json.dumps({"manifest": MADE, "summary": summary}))
    cold = [served("empty", "plain", 1.0), served("empty", "sssd_cold", 1.5)]
    (folder / "cold.json").write_text(json.dumps({"manifest": MADE, "summary": cold}))
    drawn = [
        served("sampled", variant, ratio)
        for variant, ratio in (("plain", 1.0), ("ngram", 3.0), ("sssd", 1.1))
    ]
    (folder / "drawn.json").write_text(json.dumps({"manifest": MADE, "summary": drawn}))
    (folder / "curve-curve.png").write_bytes(b"")
    results = {"methods": [replayed("specstore", 1.0), replayed("other", 1.2), replayed("better", 0.9)]}
    (folder / "replay.json").write_text(
        json.dumps({"manifest": MADE | {"command": "replay"}, "results": results})
    )
    return folder


def test_losses_are_listed_beside_wins(folder, tmp_path):
    out = tmp_path / "kept"
    main([str(folder), "--out", str(out)])
    text = (out / "README.md").read_text()
    assert "**Faster** (3 of 6): good at batch 1 1.80" in text
    assert "**Slower** (1 of 6): bad at batch 1 0.80" in text
    assert "only one group** (1 of 6): single at batch 1 1.40\n" in text
    assert "**Faster** (1 of 1): empty at batch 1 1.50" in text.split("`sssd_cold`")[1]
    assert "same at batch 1 1.00" in text.split("No difference")[1].splitlines()[0]
    assert "| ours over the strongest other | 8 nodes |\n" in text
    assert "Ours is behind in: all, 8 nodes: 0.90 [0.85, 0.95] of better" in text
    assert "0 of 2 are within" in text and "1 of 1 are within" in text
    assert "| good at batch 1 | sssd | 24.0 | 20.0 | +20% | -4% |" in text
    assert "3.00 [2.95, 3.05] (1.50)* | 1.10" in text and "greedy" in text and text.count(")*") == 1
    assert "](./curve-cases.png)" in text and "](./replay-methods.png)" in text
    assert "    python -m benchmarks.serve --batch 1 8 --json var/kept/curve.json\n" in text
    assert json.loads((out / "curve.json").read_text())["manifest"] == MADE


def test_runs_beside_it_are_linked(folder):
    other = folder.parent / "other"
    other.mkdir()
    (other / "README.md").touch()
    (folder.parent / "no-run").mkdir()
    where = folder.parent / "page.md"
    assert "Other runs: [other](./other/README.md).\n" in page(Run.read(folder, where))


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(ValueError, match="no results"):
        Run.read(tmp_path, tmp_path / "page.md")


def test_strongest_is_the_one_we_gain_least_over():
    rows = [
        {"method": m, "nodes": 8, "category": "a", "ours_over_it": {"value": r}}
        for m, r in (("x", 1.2), ("y", 1.1))
    ]
    assert strongest(rows, "a", 8)["method"] == "y"


def test_a_record_is_a_line_a_row_and_names_files_without_their_folders(tmp_path, capsys):
    given = argparse.Namespace(
        json=tmp_path / "deep" / "engine.json", tokenizer=tmp_path / "tokenizer.json", millions=[1.0]
    )
    row = {
        "prior_tokens": 10, "prior_bytes": 60, "build_seconds": np.float64(1 / 3), "batch": 1, "nodes": 16, "steps": 3,
        "p50_us": 20.0, "p99_us": 30.0, "tokens_per_step": 2.5,
    }  # fmt: skip
    finish("engine", given, results=[row, row])
    text = given.json.read_text()
    record = json.loads(text)
    assert record["manifest"]["settings"]["tokenizer"] == "tokenizer.json"
    assert (
        command(record["manifest"]) == "python -m benchmarks.engine --tokenizer tokenizer.json --millions 1.0"
    )
    assert record["results"][0]["build_seconds"] == 0.333333
    assert sum('"p50_us": 20.0' in line for line in text.splitlines()) == 2
    assert "tokens per step" in capsys.readouterr().out
    plots.draw("engine", record, tmp_path)
    assert (tmp_path / "engine.png").stat().st_size > 1000


def test_intervals_and_rows_without_tables_are_plain_json():
    record = {"a": Interval(1.23456789, None, 2.0), "b": [], "c": {"d": [{"e": (1, Path("x/y"))}]}}
    assert json.loads(dumps(record)) == {
        "a": {"value": 1.23457, "low": None, "high": 2.0}, "b": [], "c": {"d": [{"e": [1, "x/y"]}]},
    }  # fmt: skip


def made_by(name: str, **settings: object) -> dict:
    return {"manifest": MADE | {"command": name, "settings": settings}}


def test_every_cost_has_tables():
    rounds = [{"service": 300.0, "echo": 100.0, "engine": 100.0}]
    text = "\n".join(tables_of(made_by("rpc", batch=8, nodes=4) | {"results": rounds}))
    assert "| 300 | 100 | 100 | 1.50 [1.50, 1.50] |" in text
    times = [{"method": "SSSD", "widths": "one width", "batch": 1, "entries": 0.25, "all": 1.0}]
    assert "| SSSD | one width | 1 | 0.25 | 1.00 |" in tables_of(made_by("host_time") | {"results": times})
    merging = {
        name: {"p50": 1.0, "p99": p99} for name, p99 in (("quiet", 2.0), ("busy", 4.0), ("merging", 8.0))
    }
    build = {"tokens": 1e6, "bytes_per_token": 5.0, "raw_seconds": 1.0, "build_seconds": 1.1, "ratio": 1.1}
    sessions = {"sessions": 20, "bytes_per_token": 55.0, "resident_bytes": [1e6, 2e6]}
    text = "\n".join(
        tables_of(made_by("upkeep") | {"build": build, "merging": merging, "sessions": sessions})
    )
    assert "| 20 | 55.0 | 1.0 | 2.0 |" in text and "4.00 times that at rest and 2.00 times" in text
    seconds = {"backup_seconds": 1.0, "second_seconds": 0.5, "restore_seconds": 2.0, "start_seconds": 0.25}
    backup = {"tokens": 8_000_000, "bytes": 45_000_000, "second_bytes": 900} | seconds
    record = made_by("upkeep") | {"build": build, "merging": merging, "sessions": sessions, "backup": backup}
    assert "| 8,000,000 | 45,000,000 | 1.00 | 900 | 0.50 | 2.00 | 0.25 |" in tables_of(record)


def test_strangers_are_compared_round_by_round():
    row = {"alone_50": 500.0, "alone_99": 1000.0, "beside_50": 510.0, "beside_99": 1030.0}
    text = "\n".join(tables_of(made_by("strangers", batch=8) | {"results": [row] * 12}))
    assert (
        "| 99th percentile | 1000 | 1030 | 1.03 [1.03, 1.03] |" in text
        and "12 rounds with strangers and" in text
    )
    noisy = made_by("strangers", batch=8, noisy=4, messages=20)
    text = "\n".join(tables_of(noisy | {"results": [row] * 12}))
    assert "4 workers of a noisy tenant, whose quota is 20 messages a second, and as many without" in text


def test_sharing_is_compared_with_one_service_and_with_none():
    drafts = {"services": "apart", "asked": "again", "per_step": 1.5, "value": 0.5, "low": 0.4, "high": 0.6}
    steps = {"alone_50": 100.0, "alone_99": 200.0, "sharing_50": 110.0, "sharing_99": 210.0}
    seconds = [{"seconds": at / 10} for at in (1, 2, 9)]
    text = "\n".join(
        tables_of(made_by("sharing") | {"drafts": [drafts], "seconds": seconds, "steps": [steps] * 12})
    )
    assert "| apart | again | 1.500 | 0.500 [0.400, 0.600] |" in text
    assert "after 0.20 s (median) and 0.90 s (the longest of 3)" in text
    assert "| median | 100 | 110 | 1.10 [1.10, 1.10] |" in text and "1.05 [1.05, 1.05]" in text


def test_the_rooflines_record_has_a_page_of_its_own(tmp_path):
    roofline.main(["--batch", "1", "--json", str(tmp_path / "roofline.json")])
    main([str(tmp_path)])
    text = (tmp_path / "README.md").read_text()
    assert "The ridge point is 174" in text and "![roofline](./roofline.png)" in text


@pytest.mark.parametrize("folder", sorted(RUNS.iterdir()), ids=lambda folder: folder.name)
def test_committed_pages_are_those_of_the_committed_results(folder):
    where = RUNS.with_suffix(".md") if folder.name == "two-cores" else folder / "README.md"
    assert where.read_text() == page(Run.read(folder, where))


@pytest.mark.parametrize("file", sorted(RUNS.glob("*/*.json")), ids=lambda file: file.name)
def test_committed_results_follow_from_their_groups(file):
    record = json.loads(file.read_text())
    assert "/" not in json.dumps(record["manifest"])
    rows = [row for row in record.get("summary", ()) if "by_group" in row]
    plain = {(row["case"], row["batch"], row["category"]): row for row in rows if row["variant"] == "plain"}
    for row in rows:
        base = plain[row["case"], row["batch"], row["category"]]
        columns = [side["by_group"][key] for side in (row, base) for key in ("tokens", "seconds")]
        ratio = throughput_ratio(*columns).as_dict()
        assert ratio == pytest.approx(row["throughput_ratio"], rel=2e-3)
