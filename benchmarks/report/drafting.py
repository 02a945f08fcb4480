"""The table of `python -m benchmarks.draft_trace`."""

from __future__ import annotations

from benchmarks.report.markdown import Picture, interval, no_picture, table

LOOKUPS, GUESSES = "specstore_speculation_lookups", "specstore_draft_guesses"
VERIFIED, ACCEPTED = "specstore_verified_nodes", "specstore_accepted_nodes"
RESULTS = ("hit", "waited", "miss")
SERIAL = "forced serial"  # the control
EXITS = "specstore_early_exit_tokens"


def tables(record: dict, picture: Picture = no_picture) -> list[str]:
    settings, rows = record["manifest"]["settings"], record["results"]
    emulated = settings["emulated_ms"]
    times = f"a target forward takes {rows[0]['target_ms']:.0f} ms" + (
        " (EMULATED, by a sleep in it)" if emulated else ""
    )
    headings = (
        "", "draft time hidden", "in a step: 10%, median, 90%", "time waiting for the draft", "hit / waited / missed",
        "step, ms", "tokens a second", "steps",
    )  # fmt: skip
    return [
        "## Draft time beside the target's",
        "",
        f"Recorded by both processes on one clock; {times}, a draft forward {rows[0]['draft_ms']:.0f} ms. Replays of the traces count"
        " exactly what the servers counted.",
        "",
        *table(headings, map(_row, rows)),
        *(line for row in rows for line in _counted(row)),
        *_early_exits(rows),
        "",
        *picture("", "Some steps"),
    ]


def _row(row: dict) -> list[object]:
    lookups = " / ".join(f"{row['counted'].get(f'{LOOKUPS}{{{result}}}', 0):.0f}" for result in RESULTS)
    by_step = ", ".join(f"{share:.2f}" for share in row["hidden_by_step"])
    return [
        row["variant"], interval(row["hidden"]), by_step, f"{row['waiting']:.2f}", lookups, f"{row['step_ms']:.0f}",
        f"{row['tokens'] / row['seconds']:.1f}", row["steps"],
    ]  # fmt: skip


def _counted(row: dict) -> list[str]:
    guesses = _labelled(row["counted"], GUESSES)
    verified, accepted = (_labelled(row["counted"], name) for name in (VERIFIED, ACCEPTED))
    total = sum(guesses.values()) or 1
    spread = ", ".join(f"{length}: {guesses[length] / total:.2f}" for length in sorted(guesses, key=int))
    by_source = ", ".join(
        f"{source} {accepted.get(source, 0):.0f} of {count:.0f}" for source, count in verified.items()
    )
    return [
        f"- {row['variant']}: share of the guesses by accepted length: {spread or 'no guesses'}; tokens accepted: {by_source}."
    ]


def _early_exits(rows: list[dict]) -> list[str]:
    """Of the servers that draft beside the target. In the control what the exit expects is held back."""
    of_exits = [row for row in rows if row["exit"] is not None and row["variant"] != SERIAL]
    if not of_exits:
        return []
    headings = (
        "layers below the exit", "their share", "posted", "heard by the draft process", "verifications", "a verification, ms",
        "the target's token: its first choice, another, none",
    )  # fmt: skip
    return [
        "",
        "### When the early exit speaks",
        "",
        "The share of its verification that has passed when what it expects is posted, and when the draft process hears it: median"
        " and quartiles.",
        "",
        *table(headings, map(_early_exit, of_exits)),
    ]


def _early_exit(row: dict) -> list[object]:
    of, came = row["exit"], _labelled(row["counted"], EXITS)
    total = sum(came.values()) or 1
    chosen = ", ".join(f"{came.get(choice, 0) / total:.2f}" for choice in ("first", "other", "none"))
    times = [f"{half:.3f} [{low:.3f}, {high:.3f}]" for low, half, high in (of["posted"], of["heard"])]
    return [
        f"{of['layer']} of {of['layers']}", f"{of['layer'] / of['layers']:.3f}", *times, of["verifications"],
        f"{row['target_ms']:.0f}", chosen,
    ]  # fmt: skip


def _labelled(counted: dict[str, float], name: str) -> dict[str, float]:
    """By label."""
    return {key[len(name) + 1 : -1]: value for key, value in counted.items() if key.startswith(name + "{")}
