"""From the records of a run of benchmarks.beside.loads to its tables. What a broken run has measured is summarised too."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.beside.summary import figures
from benchmarks.report.statistics import throughput_ratio

BASELINE, BAR, PLANNER = "plain", "sssd", "specstore"
WITH_EXIT, WITHOUT_EXIT = "mirror", "saguaro"
Cell = tuple[float, int, str]  # speed ratio, batch size, load
Groups = dict[str, list[dict]]  # by variant, in one order


def summarise(journal: Path) -> dict:
    """`rows`: one a load, speed ratio, batch size and variant. `planner`: one a load, ratio and batch size, SPECSTORE over the fastest
    of the other variants, which the other groups choose for each group; and for each ratio and batch size one of all loads (`load` is
    "all"), each over the fastest of its load. `exits`: the same of MIRROR over SAGUARO, which lacks its early exit.
    `first_tokens`: one a variant, time to the first token over plain decoding's, by prompt. `sessions`: one a speed ratio, batch size and variant, what each request of a batch accepted of the draft model,
    in all rounds. `best_by`: what chooses the fastest. `left_out`: groups without a timed part."""
    records = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    cells = _cells([row for row in records if row["kind"] == "group"])
    rows = [
        {"load": load, "speed": speed, "batch": batch, "variant": variant}
        | figures(of, groups[BASELINE], groups.get(BAR, []))
        for (speed, batch, load), groups in cells.items()
        for variant, of in groups.items()
    ]
    return {
        "rows": rows,
        "planner": list(_planner(cells)),
        "best_by": "the other groups",
        "exits": list(_exits(cells)),
        "first_tokens": list(_first_tokens([row for row in records if row["kind"] == "first"])),
        "sessions": list(_sessions([row for row in records if row["kind"] == "sessions"])),
        "left_out": sum(row["kind"] == "left_out" for row in records),
    }


def _cells(rows: Sequence[dict]) -> dict[Cell, Groups]:
    """Without the groups that not every variant has had."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    had: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for row in rows:
        had[row["speed"], row["batch"], row["load"], row["group"]][row["variant"]] = row
    cells: dict[Cell, Groups] = {}
    for (*cell, _), by_variant in had.items():
        if len(by_variant) == len(variants):
            groups = cells.setdefault(tuple(cell), {variant: [] for variant in variants})
            for variant, row in by_variant.items():
                groups[variant].append(row)
    return cells


def _planner(cells: dict[Cell, Groups]) -> Iterable[dict]:
    pooled: dict[tuple[float, int], list[tuple[dict, dict]]] = defaultdict(list)
    for (speed, batch, load), groups in cells.items():
        if PLANNER not in groups:
            return
        best, pairs = _fastest(groups), _beside_best(groups)
        pooled[speed, batch] += pairs
        yield {"load": load, "speed": speed, "batch": batch, "best": best, "over_best": _over(pairs)}
    for (speed, batch), pairs in pooled.items():
        yield {"load": "all", "speed": speed, "batch": batch, "best": None, "over_best": _over(pairs)}


def _exits(cells: dict[Cell, Groups]) -> Iterable[dict]:
    pooled: dict[tuple[float, int], list[tuple[dict, dict]]] = defaultdict(list)
    for (speed, batch, load), groups in cells.items():
        if not {WITH_EXIT, WITHOUT_EXIT} <= groups.keys():
            return
        pairs = list(zip(groups[WITH_EXIT], groups[WITHOUT_EXIT], strict=True))
        pooled[speed, batch] += pairs
        yield {"load": load, "speed": speed, "batch": batch, "over_saguaro": _over(pairs)}
    for (speed, batch), pairs in pooled.items():
        yield {"load": "all", "speed": speed, "batch": batch, "over_saguaro": _over(pairs)}


def _fastest(groups: Groups) -> str:
    """The fastest variant but for the planner."""
    return max((name for name in groups if name != PLANNER), key=lambda name: _throughput(groups[name]))


def _beside_best(groups: Groups) -> list[tuple[dict, dict]]:
    """The planner's groups, each with that of the variant which was the fastest in all other groups: one that is chosen by the same
    measurement is favoured by it. A single group is compared with its own fastest."""
    found = []
    for at, row in enumerate(groups[PLANNER]):
        others = {name: rows[:at] + rows[at + 1 :] or rows for name, rows in groups.items()}
        found.append((row, groups[_fastest(others)][at]))
    return found


def _throughput(rows: Sequence[dict]) -> float:
    return sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def _over(pairs: Sequence[tuple[dict, dict]]) -> object:
    columns = [[pair[side][key] for pair in pairs] for side in (0, 1) for key in ("tokens", "seconds")]
    return throughput_ratio(*columns)


def _sessions(rows: Sequence[dict]) -> Iterable[dict]:
    """accepted: tokens of each request, summed over the rounds."""
    found: dict[tuple, list[list[int]]] = defaultdict(list)
    for row in rows:
        found[row["speed"], row["batch"], row["variant"]].append(row["accepted"])
    for (speed, batch, variant), rounds in found.items():
        accepted = [sum(of) for of in zip(*rounds, strict=True)]
        yield {
            "speed": speed,
            "batch": batch,
            "variant": variant,
            "rounds": len(rounds),
            "accepted": accepted,
        }


def _first_tokens(rows: Sequence[dict]) -> Iterable[dict]:
    """Prompts that every variant has had."""
    by_prompt: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        by_prompt[row["prompt"]][row["variant"]] = row["seconds"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    whole = [of for of in by_prompt.values() if len(of) == len(variants)]
    for variant in variants if whole else []:
        mine, base = ([of[name] for of in whole] for name in (variant, BASELINE))
        ones = [1.0] * len(whole)
        over = throughput_ratio(ones, base, ones, mine)  # seconds over plain decoding's
        yield {
            "variant": variant,
            "prompts": len(whole),
            "seconds": sum(mine) / len(whole),
            "over_plain": over,
        }
