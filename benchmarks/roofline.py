"""`python -m benchmarks.roofline`: cost of verification on a GPU that is not at hand, by calculation.

FLOPs and bytes of a forward pass by operation (SSSD, appendix B, table 2), each operation taking the longer of its computing
and its memory time (Williams et al. 2009). It prints the ridge point, the speculation length by the paper's rule
s_q = ridge point / batch (section 3.2), and what a step costs over plain decoding, which is also the number of tokens it has to
yield before speculation pays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.options import Parser
from benchmarks.report.records import finish

LONGEST = 32  # s_q at batch 1 in the paper: longer drafts yield little
BYTES = 2  # of a weight, an activation or a cached value
LENGTHS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Model:
    """A dense transformer of the Llama family. hidden: query heads x head dimension."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int

    @property
    def group(self) -> int:
        """Query heads that share a key-value head, g."""
        return self.heads // self.kv_heads

    @staticmethod
    def from_config(path: Path) -> Model:
        """A Hugging Face config.json; raises ValueError naming the field it lacks."""
        row = json.loads(path.read_text())
        names = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
            "vocab_size",
        )  # fmt: skip
        missing = [name for name in names if name not in row]
        if missing:
            raise ValueError(f"{path}: no field {missing[0]}")
        return Model(*(row[name] for name in names))


LLAMA_3_8B = Model(4096, 14336, 32, 8, 32, 128256)


@dataclass(frozen=True)
class Hardware:
    """teraflops: of dense matrix products in the model's type. bandwidth: of device memory, in TB/s. Measured values give
    better predictions than a data sheet's."""

    teraflops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which computing takes as long as reading, I_knee. All operations but attention do about
        b x s_q FLOPs per byte, so this is also the b x s_q up to which verification is almost free."""
        return self.teraflops / self.bandwidth

    def seconds(self, flops: float, moved: float) -> float:
        return max(flops / (self.teraflops * 1e12), moved / (self.bandwidth * 1e12))


def operations(model: Model, batch: int, rows: int, context: int) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of each operation of one forward pass on one device; rows: s_q, the root included.

    Table 2 without tensor parallelism, all layers together, and the output layer, which the table leaves out."""
    h, mlp, group, b_s = model.hidden, model.intermediate, model.group, batch * rows

    def product(inner: int, outer: int) -> tuple[float, float]:
        return 2.0 * b_s * inner * outer, BYTES * (b_s * inner + inner * outer + b_s * outer)

    keys = context + rows
    attention_bytes = BYTES * (2 * batch * h * keys / group + 2 * b_s * h) + b_s * keys
    gate_flops, _ = product(h, 2 * mlp)
    layer = {
        "query": product(h, h),
        "key": product(h, h // group),
        "value": product(h, h // group),
        "attention": (4.0 * b_s * keys * h, attention_bytes),
        "output": product(h, h),
        "gate and up": (gate_flops, BYTES * (b_s * h + 2 * h * mlp + b_s * mlp)),
        "down": product(mlp, h),
    }
    whole = {name: (flops * model.layers, moved * model.layers) for name, (flops, moved) in layer.items()}
    return whole | {"vocabulary": product(h, model.vocabulary)}


def step_seconds(model: Model, hardware: Hardware, batch: int, rows: int, context: int) -> float:
    """A lower bound: no kernel reaches both limits, and the engine around the model takes time too."""
    return sum(hardware.seconds(*cost) for cost in operations(model, batch, rows, context).values())


def speculation_length(hardware: Hardware, batch: int) -> int:
    """s_q by the paper's rule, the root included; 1 means plain decoding."""
    return max(1, min(LONGEST, int(hardware.ridge / batch)))


def records(model: Model, hardware: Hardware, batches: Sequence[int], context: int) -> list[dict]:
    """One a batch size: the rule's length, and a step's cost over a plain step's at several lengths."""
    found = []
    for batch in batches:
        plain = step_seconds(model, hardware, batch, 1, context)
        cost = {rows: step_seconds(model, hardware, batch, rows, context) / plain for rows in LENGTHS}
        row = {
            "batch": batch,
            "plain_ms": plain * 1e3,
            "speculation_length": speculation_length(hardware, batch),
        }
        found.append(row | {"cost": cost})
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("roofline", __doc__)
    parser.add("--config", None, "a model's config.json (Hugging Face); Llama-3-8B if left out", type=Path)
    parser.add("--teraflops", 165.0, "of dense matrix products, a second")
    parser.add("--bandwidth", 0.95, "of device memory, TB/s")
    parser.add("--batch", [1, 2, 4, 8, 16, 32, 64], "requests of a step")
    parser.add("--context", 1024, "tokens already in each request's cache")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    model = Model.from_config(given.config) if given.config else LLAMA_3_8B
    hardware = Hardware(given.teraflops, given.bandwidth)
    results = records(model, hardware, given.batch, given.context)
    finish("roofline", given, model=asdict(model), ridge=hardware.ridge, results=results)


if __name__ == "__main__":
    main()
