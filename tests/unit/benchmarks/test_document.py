"""The page of benchmarks: made from results alone, losses under the same rule as wins."""

import json

import pytest

from benchmarks import document
from benchmarks.document import DOCS, Run

MADE = {
    "command": "serve", "packages": {"specstore": "0.1.0"}, "commit": "c" * 40, "lock": "l" * 64, "python": "3.11",
    "processor": "a processor", "cores": 2, "prompts": {"p.jsonl": "d" * 64}, "settings": {"batch": [1, 8], "seed": 0},
}  # fmt: skip


def value(middle: float, spread: float = 0.05) -> dict:
    return {"value": middle, "low": middle - spread, "high": middle + spread}


def served(case: str, arm: str, ratio: float, **more) -> dict:
    return {
        "case": case, "batch": 1, "category": "all", "arm": arm, "groups": 3, "throughput_ratio": value(ratio),
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
    drawn = [served("sampled", arm, ratio) for arm, ratio in (("plain", 1.0), ("ngram", 3.0), ("sssd", 1.1))]
    (folder / "drawn.json").write_text(json.dumps({"manifest": MADE, "summary": drawn}))
    (folder / "curve-curve.png").write_bytes(b"")
    results = {"methods": [replayed("specstore", 1.0), replayed("other", 1.2), replayed("better", 0.9)]}
    (folder / "replay.json").write_text(
        json.dumps({"manifest": MADE | {"command": "replay"}, "results": results})
    )
    return folder


def test_losses_are_listed_beside_wins(folder, tmp_path):
    page = tmp_path / "page.md"
    document.main([str(folder), "--out", str(page)])
    text = page.read_text()
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
    assert "](named/curve-curve.png)" in text
    assert "`python -m benchmarks.serve --batch 1 8`" in text


def test_runs_beside_it_are_linked(folder):
    other = folder.parent / "other"
    other.mkdir()
    (other / "README.md").touch()
    (folder.parent / "no-run").mkdir()
    assert "Other runs: [other](./other/README.md).\n" in document.document(
        Run.read(folder, folder.parent / "page.md")
    )


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(ValueError, match="no results"):
        Run.read(tmp_path, tmp_path / "page.md")


@pytest.mark.parametrize("folder", sorted((DOCS / "benchmarks").iterdir()), ids=lambda folder: folder.name)
def test_committed_pages_are_those_of_the_committed_results(folder):
    page = DOCS / "benchmarks.md" if folder.name == "two-cores" else folder / "README.md"
    assert page.read_text() == document.document(Run.read(folder, page))


@pytest.mark.parametrize("report", sorted((DOCS / "benchmarks").glob("*/*.json")), ids=lambda file: file.name)
def test_committed_results_name_files_without_their_folders(report):
    assert "/" not in json.dumps(json.loads(report.read_text())["manifest"])
