"""Tables of `python -m benchmarks.pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.report.markdown import Cell, Picture, columns, interval, no_picture, pivot, table


def cell(value: object) -> str:
    """A dash where there is none."""
    if value is None:
        return "–"
    return interval(value) if isinstance(value, dict) else f"{value:.2f}"


def figure(name: str) -> Callable[[dict], str]:
    return lambda row: cell(row[name])


def over_baseline(row: dict, name: str) -> str:
    return f"{cell(row[f'over_{name}'])}; {row[f'{name}_lookahead']}"


def by_session(row: dict) -> str:
    """The least, the median and the most share of steps with a hit."""
    return ", ".join(f"{share:.2f}" for share in row["hits_by_session"])


FIGURES: dict[str, Cell] = {
    "over plain": figure("over_plain"),
    "over synchronous; its K": lambda row: over_baseline(row, "synchronous"),
    "over the datastore alone; its K": lambda row: over_baseline(row, "datastore"),
    "synchronous over plain": figure("synchronous_over_plain"), "hits": figure("hit_rate"), "by session": by_session,
    "tokens per step": figure("tokens_a_step"), "time waiting": figure("waiting"), "draft time hidden": figure("hidden"),
}  # fmt: skip


def tables(record: dict, picture: Picture = no_picture) -> list[str]:
    settings = record["manifest"]["settings"]
    lines = [
        "## Drafting beside the target, simulated",
        "",
        f"A virtual clock, not a measurement: a target forward takes {' '.join(settings['target'])} and a draft forward"
        f" {' '.join(settings['draft'])} (rows:ms), a message {settings['delay_ms']} ms; K = {settings['lookahead']}"
        f"{_budget(settings) if record.keys() & SECTIONS.keys() - OWN_BUDGET else ''}"
        f"{_models(settings) if record.keys() & SECTIONS.keys() - OWN_MODELS else ''}.",
        "",
    ]
    for name, (title, tabulate) in SECTIONS.items():
        if name in record:
            lines += [f"### {title}", "", *tabulate(record[name]), *picture(name, title)]
    return lines


def _budget(settings: dict) -> str:
    return (
        f"; {settings['draft_rows']} rows per draft forward, and as many guesses per step, over all requests"
    )


def _models(settings: dict) -> str:
    if settings["pairs"]:
        return "; recorded answers beside a real datastore"
    return f"; synthetic pairs, {settings['e_miss']} tokens per step from the datastore after a miss"


def models(rows: Sequence[dict]) -> list[str]:
    """The fields that say which models a row is of."""
    return [name for name in ("acceptance", "agreement", "temperature", "load") if name in rows[0]]


def by_rows(rows: Sequence[dict], *by: str, **cells: Cell) -> list[str]:
    """A line for each row: of which models, what else it is by, and the cells."""
    return columns(rows, {name: f"{{{name}}}" for name in (*models(rows), *by)} | cells)


def forecast(rows: Sequence[dict]) -> list[str]:
    return by_rows(rows, "batch", **FIGURES)


def misses(found: dict) -> list[str]:
    counts, cells = pivot(found["rows"], ("after",), "fan_out", lambda row: interval(row["miss_rate"]))
    of = ", ".join(f"{name} {found['rows'][0][name]}" for name in models(found["rows"]))
    laws = "; ".join(f"after {kind}: {interval(law)}" for kind, law in found["exponents"].items())
    return [
        *table(("the step before", *(f"F = {count}" for count in counts)), cells),
        f"{of}; r of c F^-r {laws}. F guesses at each of the K + 1 positions, in one forward: the paper's budget, not the product's.",
        "",
    ]


def compared(rows: Sequence[dict], over: str) -> list[str]:
    """Rows of which the first of each group is compared with the others."""
    first = rows[0][over]
    named = {
        "hits": "hit_rate", f"hits over {first}": "hits_over_first", "over plain": "over_plain",
        f"speed over {first}": "speed_over_first",
    }  # fmt: skip
    return by_rows(rows, "batch", over, **{heading: figure(name) for heading, name in named.items()})


def fallbacks(found: dict) -> list[str]:
    critical = ", ".join(f"{value:.2f} for {name}" for name, value in found["critical"].items())
    text = f"Batch below which Theorem 17 waits instead, b*: {critical}."
    return [*compared(found["rows"], "fallback"), text, ""]


def ratios(found: dict) -> list[str]:
    def both(row: dict) -> str:
        return f"{over_baseline(row, 'synchronous')}, {over_baseline(row, 'datastore')}"

    speeds, cells = pivot(found["rows"], ("batch",), "speed", both)
    pays = ", ".join(f"batch {batch}: {at and f'{at:.1f}'}" for batch, at in found["break_even"].items())
    headings = ("batch; over synchronous; its K, over the datastore alone; its K, at:", *speeds)
    return [*table(headings, cells), f"It pays beside the datastore from these speed ratios on: {pays}.", ""]


_ROOM = " A draft forward has room for a verified tree and a phrase, which is more rows than the product's default."


def ceiling(found: dict) -> list[str]:
    def said(row: dict) -> str:
        over, least = cell(row["over_plain"]), row["over_plain"]["low"]
        past = f"**{over}**" if least is not None and least > row["ratio"] else over
        return f"{past}; {row['tokens_a_step']['value']:.1f}; {cell(row['tokens_a_miss'])}"

    by = [*models(found["rows"]), "ratio"]
    names, cells = pivot(found["rows"], by, "retrieves", said)
    text = (
        "Throughput over plain decoding, bold where its interval is above the speed ratio C; tokens per round; tokens between two misses."
        f"{_ROOM}"
        " `neither` is plain parallel speculation. "
        + (
            f"Synthetic pairs; a real datastore has a copy of each text, of whose tokens {found['known']:.0%} are right."
            if found["known"]
            else "Recorded answers beside a real datastore."
        )
    )
    return [*table((*by[:-1], "C; retrieval by:", *names), cells), text, ""]


def datastores(rows: Sequence[dict]) -> list[str]:
    by = [*models(rows), "method", "ratio"]

    def by_datastore(of: Sequence[dict], said: Callable[[dict], str]) -> list[str]:
        names, cells = pivot(of, by, "datastore", said)
        lines = ([cell(value) if value is None else value for value in line] for line in cells)
        return table((*by[:-1], "C; the datastore begins with:", *names), lines)

    def said(row: dict) -> str:
        return f"{cell(row['over_plain'])}; {row['tokens_a_step']['value']:.1f}; {cell(row['over_other'])}"

    text = (
        "Throughput over plain decoding; tokens per round; throughput over another column's: `nothing` over `none`, which has no"
        " datastore, `another domain` and `corpus` over `nothing`, `rejected tokens` and `asked again` over `corpus`. Recorded answers;"
        " both models ask one datastore, which keeps each answer when it ends. `asked again` has kept all of them before."
        f"{_ROOM}"
    )
    double = [row for row in rows if row["method"] == "DOUBLE"]
    alone = "The same over that datastore alone, under `none` over plain decoding:"
    return [*by_datastore(rows, said), text, "", alone, "", *by_datastore(double, figure("over_alone"))]


def methods(rows: Sequence[dict]) -> list[str]:
    by = [*models(rows), "ratio", "batch"]
    names, cells = pivot(rows, by, "method", figure("over_plain"))
    last = {tuple(row[name] for name in by): row for row in rows if "best" in row}
    best = [last[tuple(line[: len(by)])] for line in cells]
    lines = _with_best(cells, best, "over_best", "best")
    text = (
        "Throughput over plain decoding, and last that of ADAPTIVE over the best of the others, which is named; bold where its"
        " interval is below 1."
    )
    return [
        *table((*by[:-2], "C", "batch; over plain:", *names, "over the best"), lines),
        text,
        "",
        *_sessions(rows, by),
    ]


def _sessions(rows: Sequence[dict], by: Sequence[str]) -> list[str]:
    """Of the methods that have hits."""
    drafting = {row["method"] for row in rows if row["hits_by_session"][-1]}
    names, cells = pivot([row for row in rows if row["method"] in drafting], by, "method", by_session)
    text = "The share of a session's steps that had a hit: the least of a session, the median, the most."
    return [*table((*by[:-2], "C", "batch; hits by session:", *names), cells), text, ""]


def _with_best(lines: Sequence[Sequence], best: Sequence[dict], over: str, name: str) -> list[list[object]]:
    """Each line, and the ratio to the best of the others with its name. over, name: the fields of these."""
    return [[*line, f"{_or_behind(row[over])} {row[name]}"] for line, row in zip(lines, best, strict=True)]


def _or_behind(over: dict) -> str:
    """Bold where it is below 1 for certain."""
    behind = over["high"] is not None and over["high"] < 1
    return f"**{cell(over)}**" if behind else cell(over)


def shapes(rows: Sequence[dict]) -> list[str]:
    by = [*models(rows), "ratio"]
    names, cells = pivot(rows, by, "shape", lambda row: f"{row['tokens_a_step']['value']:.2f}")
    others: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["shape"] != "planner":
            others.setdefault(tuple(row[name] for name in by), []).append(row)
    closest = [min(of, key=lambda row: row["planner_over"]["value"]) for of in others.values()]
    lines = _with_best(cells, closest, "planner_over", "shape")
    text = (
        "Tokens a verification, and last those of the planner over the best of the others, which is named; bold where its interval is"
        " below 1. All shapes have the same rows per draft forward, and no datastore. `split in k`: the static rows of DUO's table 2;"
        " gamma: its table 3."
    )
    return [*table((*by[:-1], "C; shape:", *names, "over the best"), lines), text, ""]


def exits(found: dict) -> list[str]:
    return [*_by_choices(found["choices"]), *_bounds(found["bounds"]), *_by_window(found["windows"])]


def _by_choices(rows: Sequence[dict]) -> list[str]:
    by = [*models(rows), "ratio", "exit"]

    def said(row: dict) -> str:
        figures = f"{1 - row['hit_rate']['value']:.2f}; {cell(row['over_plain'])}"
        return figures if row["exit"] == "draft" else f"{figures}; {cell(row['hits_over_draft'])}"

    own = [row for row in rows if row["exit"] == "draft"]
    names, cells = pivot([row for row in rows if row["exit"] != "draft"], by, "choices", said)
    draft = table(
        (*by[:-2], "C", "misses; over plain"), ([*(row[n] for n in by[:-1]), said(row)] for row in own)
    )
    text = (
        "Misses; throughput over plain decoding; hits over those of the draft model's own predictions with as many guesses, which the"
        " second table has. Nothing answers a miss. An exit speaks when as much of the target's forward has passed as it has layers below it."
    )
    return [*table((*by[:-2], "C", "exit; kappa:", *names), cells), text, "", *draft]


def _bounds(rows: Sequence[dict]) -> list[str]:
    by = [*models(rows), "ratio"]
    names, cells = pivot(
        rows, by, "exit", lambda row: f"{cell(row['over_plain'])}; {cell(row['speed_over_draft'])}"
    )
    text = (
        "An exit that always knows the target's token: throughput over plain decoding, and over drafting after the draft model's own"
        " predictions."
    )
    return [*table((*by[:-1], "C; right exit:", *names), cells), text, ""]


def _by_window(rows: Sequence[dict]) -> list[str]:
    names, cells = pivot(
        rows,
        ("ratio", "predicts"),
        "window",
        lambda row: f"{row['critical']:.2f}; {row['tokens_a_step']:.2f}",
    )
    text = (
        "Drafting on the critical path of a step, in target forwards; tokens per step. A draft that was not prepared is waited for."
        " `exit`: the middle one; `right exit`: it always knows the target's token; `draft`: the draft model predicts itself;"
        " `serial`: nothing is drafted beside the target."
    )
    return [*table(("C", "predicts; gamma:", *names), cells), text, ""]


def timelines(rows: Sequence[dict]) -> list[str]:
    said = {
        "method": "{method}",
        "target forwards": lambda row: str(len(row["target"])),
        "tokens": "{tokens}",
        "target busy": lambda row: _share(row, "target"),
        "draft model busy": lambda row: _share(row, "draft"),
    }
    text = (
        f"One request, {rows[0]['milliseconds']:g} ms of it. C = 5; a datastore has a copy of each text in which some tokens are others."
        " MIRROR's early exit speaks after half of the target's forward and is right as often as the draft model."
    )
    return [*columns(rows, said), text, ""]


def _share(row: dict, who: str) -> str:
    return f"{sum(end - begin for begin, end, *_ in row[who]) / row['milliseconds']:.0%}"


CEILING, STORES, METHODS, SHAPES = "ceiling", "datastores", "methods", "shapes"
EXITS, TIMELINES = "exits", "timelines"
# Sections that do not have the settings' draft rows, and whose text says itself what the models are.
OWN_BUDGET = {"misses", CEILING, STORES}
OWN_MODELS = {CEILING, STORES, METHODS, SHAPES, EXITS, TIMELINES}
SECTIONS = {
    "forecast": ("Forecast", forecast),
    "misses": ("Misses by guesses (SAGUARO, figure 3)", misses),
    "spreads": ("How guesses are spread (SAGUARO, figure 4)", partial(compared, over="fan_out")),
    "fallbacks": ("What answers a miss (SAGUARO, figure 6)", fallbacks),
    "ratios": ("By the target's time over the draft's", ratios),
    CEILING: ("Past the ceiling of parallel speculation (DOUBLE, table 1 and figure 5)", ceiling),
    STORES: ("By what the datastore has seen (DOUBLE, tables 3 and 9)", datastores),
    METHODS: ("All methods", methods),
    EXITS: ("Drafting after an early exit (MIRROR, figures 3a and 7)", exits),
    SHAPES: ("The planner against fixed shapes (DUO, tables 2 and 3)", shapes),
    TIMELINES: ("Who runs when", timelines),
}
