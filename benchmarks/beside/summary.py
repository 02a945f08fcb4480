"""Makes tables of the records of a run's loads. What a broken run has measured is summarised too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.beside.servers import VARIANTS
from benchmarks.beside.tables import FORECASTS
from benchmarks.pipeline.experiments import break_even
from benchmarks.report.records import journalled
from benchmarks.report.statistics import ratio_of_sums, throughput_ratio

BASELINE, BAR, PLANNER = "plain", "sssd", "adaptive"
WITH_EXIT, WITHOUT_EXIT = "mirror", "saguaro"
Cell = tuple[float, int, str]  # speed ratio, batch size, load
Groups = dict[str, list[dict]]  # by variant, in one order
Pairs = list[tuple[dict, dict]]  # of groups


def cells_of(rows: Sequence[dict]) -> dict[Cell, Groups]:
    """The records of groups by where they were measured, without the groups that not every variant has had."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    had: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for row in rows:
        had[row["speed"], row["batch"], row.get("load", ""), row["group"]][row["variant"]] = row
    cells: dict[Cell, Groups] = {}
    for (*cell, _), by_variant in had.items():
        if len(by_variant) == len(variants):
            groups = cells.setdefault(tuple(cell), {variant: [] for variant in variants})
            for variant, row in by_variant.items():
                groups[variant].append(row)
    return cells


def summarise(journal: Path) -> dict:
    """`rows`: one a speed ratio, batch size and variant. `break_even`: by batch size the ratio from which on a method is faster than
    SSSD, as measured and as forecast; None where it is not at the highest."""
    _, records = journalled(journal)
    cells = sorted(cells_of(records["group"]).items(), key=lambda item: item[0])
    rows = [
        {"speed": speed, "batch": batch, "variant": name, **figures(of[name], of[BASELINE], of[BAR])}
        for (speed, batch, _), of in cells
        for name in (*VARIANTS, *FORECASTS.values())
        if name in of
    ]
    return {"rows": _with_errors(rows), "break_even": list(_break_even(rows))}


def summarise_loads(journal: Path) -> dict:
    """`rows`: one a load, speed ratio, batch size and variant. `planner`: one a load, ratio and batch size, ADAPTIVE over the fastest
    of the other variants, which the other groups choose for each group; and for each ratio and batch size one of all loads (`load` is
    "all"), each over the fastest of its load. `exits`: the same of MIRROR over SAGUARO, which lacks its early exit.
    `first_tokens`: one a variant, time to the first token over plain decoding's, by prompt. `sessions`: one a speed ratio, batch size
    and variant, what each request of a batch accepted of the draft model, in all rounds. `best_by`: what chooses the fastest.
    `left_out`: groups without a timed part."""
    _, records = journalled(journal)
    cells = cells_of(records["group"])
    rows = [
        {"load": load, "speed": speed, "batch": batch, "variant": variant}
        | figures(of, groups[BASELINE], groups.get(BAR, []))
        for (speed, batch, load), groups in cells.items()
        for variant, of in groups.items()
    ]
    return {
        "rows": rows,
        "planner": list(_pooled(cells, "over_best", {PLANNER}, _beside_best)),
        "best_by": "the other groups",
        "exits": list(_pooled(cells, "over_saguaro", {WITH_EXIT, WITHOUT_EXIT}, _beside_saguaro)),
        "first_tokens": list(_first_tokens(records["first"])),
        "sessions": list(_sessions(records["sessions"])),
        "left_out": len(records["left_out"]),
    }


def _pooled(
    cells: dict[Cell, Groups], name: str, needed: set[str], compared: Callable[[Groups], tuple[Pairs, dict]]
) -> Iterable[dict]:
    """Nothing where a needed variant is missing. compared: pairs of groups, and what more its row says; pooled rows say None."""
    pooled: dict[tuple[float, int], Pairs] = defaultdict(list)
    more: dict = {}
    for (speed, batch, load), groups in cells.items():
        if not needed <= groups.keys():
            return
        pairs, more = compared(groups)
        pooled[speed, batch] += pairs
        yield {"load": load, "speed": speed, "batch": batch, **more, name: _over(pairs)}
    for (speed, batch), pairs in pooled.items():
        yield {"load": "all", "speed": speed, "batch": batch, **dict.fromkeys(more), name: _over(pairs)}


def _beside_saguaro(groups: Groups) -> tuple[Pairs, dict]:
    return list(zip(groups[WITH_EXIT], groups[WITHOUT_EXIT], strict=True)), {}


def figures(rows: Sequence[dict], base: Sequence[dict], bar: Sequence[dict]) -> dict:
    """Element i of all three is the same group."""

    def over(others: Sequence[dict]) -> object:
        return throughput_ratio(
            *([row[key] for row in side] for side in (rows, others) for key in ("tokens", "seconds"))
        )

    tokens, seconds, steps = (sum(row[key] for row in rows) for key in ("tokens", "seconds", "steps"))
    batch = rows[0]["batch"]
    return {
        "groups": len(rows),
        "over_plain": over(base),
        "over_sssd": over(bar) if bar else None,
        "tokens_per_second": tokens / seconds,
        "tokens_per_step": ratio_of_sums([row["tokens"] for row in rows], [row["steps"] for row in rows]),
        "milliseconds_per_step": 1e3 * seconds * batch / steps,
        **_lookups(rows),
        "by_group": {key: [row[key] for row in rows] for key in ("tokens", "seconds", "steps")},
    }


def _lookups(rows: Sequence[dict]) -> dict:
    """Shares of the look-ups in the speculation cache, for a method with a draft process and its forecast."""
    counts: dict[str, float] = {}
    for row in rows:
        for kind, count in (row.get("kinds") or row.get("draft", {}).get("lookups", {})).items():
            counts[kind] = counts.get(kind, 0.0) + count
    total = sum(counts.values())
    return {f"{kind}_share": counts.get(kind, 0.0) / total for kind in ("hit", "waited")} if total else {}


def _with_errors(rows: Sequence[dict]) -> list[dict]:
    """A row whose variant has a forecast tells what that was over what was measured."""
    found = {(row["speed"], row["batch"], row["variant"]): row for row in rows}
    for row in rows:
        forecast = found.get((row["speed"], row["batch"], FORECASTS.get(row["variant"])))
        if forecast is not None:
            row["forecast_over_measured"] = forecast["over_plain"].value / row["over_plain"].value
    return list(rows)


def _break_even(rows: Sequence[dict]):
    for batch in sorted({row["batch"] for row in rows}):
        found: dict[str, object] = {"batch": batch}
        for variant in (*FORECASTS, *FORECASTS.values()):
            ratios = [
                {"speed": row["speed"], "over": row["over_sssd"]}
                for row in rows
                if (row["variant"], row["batch"]) == (variant, batch) and row["over_sssd"] is not None
            ]
            if len(ratios) > 1:
                found[variant] = break_even(ratios, "over")
        yield found


def _fastest(groups: Groups) -> str:
    """The fastest variant but for the planner."""
    return max((name for name in groups if name != PLANNER), key=lambda name: _throughput(groups[name]))


def _beside_best(groups: Groups) -> tuple[Pairs, dict]:
    """The planner's groups, each with that of the variant which was the fastest in all other groups: one that is chosen by the same
    measurement is favoured by it. A single group is compared with its own fastest."""
    found = []
    for at, row in enumerate(groups[PLANNER]):
        others = {name: rows[:at] + rows[at + 1 :] or rows for name, rows in groups.items()}
        found.append((row, groups[_fastest(others)][at]))
    return found, {"best": _fastest(groups)}


def _throughput(rows: Sequence[dict]) -> float:
    return sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def _over(pairs: Pairs) -> object:
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
        mean = sum(mine) / len(whole)
        yield {"variant": variant, "prompts": len(whole), "seconds": mean, "over_plain": over}
