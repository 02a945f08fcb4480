"""`python -m benchmarks.rows`: rows by request against as many rows for each request of a step, on a virtual clock.

A batch is half of requests whose answers the datastore knows, and half of others. SSSD drafts, its length policy chooses the rows,
recorded answers accept, and each step takes what the roofline of a GPU says (benchmarks.roofline). A group is one steady load with a
datastore that begins anew; what a policy has learned stays, as on a server, and the first groups are for that alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.options import Parser
from benchmarks.replay.methods import Corpus
from benchmarks.report.records import finish
from benchmarks.report.statistics import throughput_ratio
from benchmarks.roofline import LLAMA_3_8B, Hardware, step_seconds
from benchmarks.serve.cases import prompts_for
from benchmarks.serve.prediction import Expected, Simulation, StepTime, fixed_load
from benchmarks.traces import SHIPPED, SHIPPED_PRIOR, Trace, load_traces

VOCABULARY = 49152
WARM_UP = 4  # groups that do not count
CONTEXT = 1024  # tokens of a request; the step's time says so, whatever the recorded text's length


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("rows", __doc__)
    parser.add("--batch", [8, 16, 32], "requests of a step")
    parser.add("--known", 0.5, "share of the requests whose answers the datastore knows")
    parser.add("--groups", 12, "loads of each batch size")
    parser.add("--nodes", 15, "drafted tokens a tree")
    parser.add("--teraflops", 989.0, "of dense matrix products, a second")
    parser.add("--bandwidth", 3.35, "of device memory, TB/s")
    given = parser.parse_args(argv)
    hardware, traces, results = (
        Hardware(given.teraflops, given.bandwidth),
        load_traces(SHIPPED, SHIPPED_PRIOR),
        [],
    )
    for batch in given.batch:
        time = _time(hardware, batch, given.nodes)
        groups = [_group(traces, batch, given.known, seed) for seed in range(WARM_UP + given.groups)]
        loads = {
            "rows by request": _loads(groups, batch, given.nodes, time, True),
            "one width": _loads(groups, batch, given.nodes, time, False),
            "plain": [fixed_load(lambda traces: 1.0, batch, 1, load, time) for load, _ in groups[WARM_UP:]],
        }
        for name, others in (
            ("rows by request", "one width"),
            ("rows by request", "plain"),
            ("one width", "plain"),
        ):
            ratio = _ratio(loads[name], loads[others])
            results.append({"batch": batch, "of": name, "over": others} | ratio.as_dict())
    finish("rows", given, [SHIPPED, SHIPPED_PRIOR], results=results)


def _time(hardware: Hardware, batch: int, nodes: int) -> StepTime:
    widths = range(1, nodes + 2)
    return StepTime(widths, [step_seconds(LLAMA_3_8B, hardware, batch, width, CONTEXT) for width in widths])


def _group(traces: Sequence[Trace], batch: int, known: float, seed: int) -> tuple[list[Trace], Corpus]:
    """A load, and what the datastore knows before it."""
    load = random.Random(seed).sample(traces, min(prompts_for(batch), len(traces)))
    answers = [trace.output for at, trace in enumerate(load) if int((at + 1) * known) > int(at * known)]
    return load, Corpus(answers, vocab_size=VOCABULARY)


def _loads(
    groups: Sequence[tuple[list[Trace], Corpus]], batch: int, nodes: int, time: StepTime, by_request: bool
) -> list[Expected]:
    def linear(rows: float) -> float:
        return time(rows / batch, 0.0)

    policy, loads = None, []
    for load, corpus in groups:
        simulation = Simulation(corpus, batch, nodes, time, linear, by_request=by_request)
        simulation.policy = policy = policy or simulation.policy
        loads.append(simulation.load(load))
    return loads[WARM_UP:]


def _ratio(loads: Sequence[Expected], others: Sequence[Expected]):
    return throughput_ratio(*zip(*loads, strict=True), *zip(*others, strict=True))


if __name__ == "__main__":
    main()
