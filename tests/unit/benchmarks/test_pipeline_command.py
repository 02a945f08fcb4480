"""`python -m benchmarks.pipeline`: each experiment answers, and its record is tabulated, drawn and put on a page."""

import json

import pytest

from benchmarks.pipeline.__main__ import main
from benchmarks.pipeline.drafts import shapes
from benchmarks.pipeline.pairs import save, synthetic_pairs
from benchmarks.report import plots
from benchmarks.report.page import Run, page
from tests.unit.benchmarks.test_drafts import LAYERS, made

PLAIN, AT_TWO, WITH_EXITS = "plain", "at two temperatures", "with exits"  # pairs
SAGUARO = "--tokens 300 --batch 1 2 --speed 4 8 --acceptance 0.6 0.8 --draft-rows 8 --lookahead 3"
LONG = "--lookahead 15 --tokens 200 --speed 6 --batch 1"


def pairs_of(kind, folder):
    """Options for files of recorded pairs."""
    if kind == WITH_EXITS:
        pairs = made({5: 0.4, 10: 0.7}, count=3, length=40)
        save(folder / "a.npz", pairs, load="mixed", agreement=0.6, layers=LAYERS)
    for at in range({None: 0, PLAIN: 1, AT_TWO: 2, WITH_EXITS: 0}[kind]):
        pairs = synthetic_pairs(3, 60, 0.8 - 0.2 * at, 0.6, 0.5, 0)
        save(folder / f"{at}.npz", pairs, load="mixed", agreement=0.8, temperature=at)
    return ["--pairs", *map(str, sorted(folder.glob("*.npz"))), "--vocab-size", "50000"] if kind else []


@pytest.mark.parametrize(
    ("words", "pairs", "said", "drawn"),
    [
        (SAGUARO, None, ("8 rows per draft", "its K", "by session", "Forecast", "figure 3", "figure 4", "figure 6", "b*", "speed ratios"),
         {"misses", "spreads", "fallbacks", "ratios"}),
        ("--ask spreads fallbacks --batch 1 2 --lookahead 3 --draft-rows 8", AT_TWO,
         ("temperature",), {"spreads", "fallbacks"}),
        (f"--ask ceiling {LONG} --acceptance 0.8 0.95", None, ("Past the ceiling", "70% are right"), {"ceiling"}),
        (f"--ask ceiling {LONG}", PLAIN, ("Past the ceiling", "Recorded answers"), {"ceiling"}),
        (f"--ask datastores {LONG}", PLAIN, ("By what the datastore has seen",), set()),
        (f"--ask methods shapes {LONG} --acceptance 0.8", None, ("hits by session", "All methods", "The planner against fixed shapes"),
         set()),
        ("--ask timelines --lookahead 7 --tokens 4000", None, ("Who runs when",), {"timelines"}),
        ("--ask timelines --lookahead 7", PLAIN, ("Who runs when",), {"timelines"}),
        (f"--ask methods shapes {LONG}", PLAIN, ("hits by session", "All methods", "The planner against fixed shapes"), set()),
        ("--ask exits methods --lookahead 7 --speed 6 --batch 1", WITH_EXITS,
         ("Drafting after an early exit", "10/20", "right exit"), {"choices", "windows"}),
    ],
)  # fmt: skip
def test_an_experiment_answers(words, pairs, said, drawn, tmp_path, capsys):
    main([*words.split(), *pairs_of(pairs, tmp_path), "--json", str(tmp_path / "found.json")])
    shown = " ".join(capsys.readouterr().out.split())
    assert [text for text in said if text not in shown] == []
    assert ("guesses per step" in shown) == ("ceiling" not in words and "datastores" not in words)
    record = json.loads((tmp_path / "found.json").read_text())
    plots.draw("found", record, tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == {f"found-{name}" for name in drawn}
    text = page(Run.read(tmp_path, tmp_path / "README.md"))
    of_sections = drawn - {"choices", "windows"}  # a page shows the picture that has its section's name
    assert all(f"found-{name}.png" in text for name in of_sections) and "--draft 1:2" in text
    if "datastores" in words:
        assert {"prior.jsonl.gz", "french.jsonl.gz"} < set(record["manifest"]["prompts"])
        assert len(record["datastores"]) == 24
    if "shapes" in words:
        assert {row["shape"] for row in record["shapes"]} == set(shapes())
        loads = {"mixed", "repeated"} if pairs else {"partly known"}
        assert {row["load"] for row in record["methods"]} == loads
    if pairs == WITH_EXITS:
        assert {row["method"] for row in record["methods"]} >= {"MIRROR", "SAGUARO"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--draft-rows 0", "--draft-rows"), ("--e-miss 9", "--e-miss"), ("--ask datastores --lookahead 15", "--ask datastores"),
        ("--ask exits", "--ask exits"),
    ],
)  # fmt: skip
def test_bad_input_is_named(words, named, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    assert named in capsys.readouterr().err
