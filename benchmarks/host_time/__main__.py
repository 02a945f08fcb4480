"""`python -m benchmarks.host_time`: time of a decode step on the host before the forward pass is launched.

An accelerator waits for it in every step. The worker, the requests, the batch and the embedded datastore are the real ones and run
on the CPU; the target's forward is nothing, and what it would say is a recorded answer. Answers replace each other, so the batch
stays full. Results lag one step behind, as overlap scheduling has it.

SAGUARO's draft side is in this process. It drafts between two steps, which is not counted. What is counted is what its worker does
with it: messages as frames, growth, look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.options import Parser
from benchmarks.report.records import finish
from benchmarks.traces import SHIPPED, SHIPPED_PRIOR, load_traces
from sglang_patches.methods.registry import METHODS
from sglang_patches.options import Options

LENGTHS = {"one width": "static", "many widths": "adaptive"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("host_time", __doc__)
    parser.add("--method", ["SSSD", "SAGUARO"], "what drafts", choices=METHODS)
    parser.add("--batch", [1, 8, 48], "requests of a step")
    parser.add("--nodes", 15, "drafted tokens a tree")
    parser.add("--draft-rows", Options().draft_rows, "of a draft forward")
    parser.add("--steps", 150, "that are timed")
    given = parser.parse_args(argv)
    from sglang.srt.plugins import load_plugins

    from benchmarks.host_time.step import VOCABULARY, measure
    from datastore_service.engine.engine import Engine
    from datastore_service.engine.segment import build_segment

    load_plugins()
    traces = load_traces(SHIPPED)
    prior = [trace.output for trace in load_traces(SHIPPED_PRIOR)]
    engine = Engine(VOCABULARY, [build_segment(prior, VOCABULARY)])
    results = [
        {"method": method, "widths": name, "batch": size}
        | measure(traces, engine, size, given.nodes, length, given.steps, method, given.draft_rows)
        for method in given.method
        for name, length in LENGTHS.items()
        for size in given.batch
    ]
    finish("host_time", given, [SHIPPED, SHIPPED_PRIOR], results=results)


if __name__ == "__main__":
    main()
