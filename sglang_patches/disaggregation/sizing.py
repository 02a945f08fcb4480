"""How many prefill and decode instances a load needs: `python -m sglang_patches.disaggregation.sizing --help`.

Requests queue at an instance that is loaded above `utilisation` of its rate. Little's law gives the number of requests that are
decoded at a time, and from it the KV cache they need.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def _given(meaning: str, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The load, and what one instance of each group was measured to do."""

    requests: float = _given("requests per second at the busiest time")
    prompt_tokens: float = _given("average tokens per prompt")
    output_tokens: float = _given("average tokens per answer")
    prefill_rate: float = _given("prompt tokens per second of one prefill instance")
    decode_rate: float = _given("output tokens per second of one decode instance, over all its requests")
    itl_ms: float = _given("milliseconds between two tokens of one request at that rate")
    cached: float = _given("share of the prompt tokens that are in the prefill's cache", 0.0)
    utilisation: float = _given("share of its rate to which an instance is loaded", 0.7)
    kv_tokens: float = _given("tokens in one decode instance's KV cache; 0: no bound", 0.0)
    kv_bytes: float = _given("bytes of KV per token, to compute the network traffic; 0: unknown", 0.0)

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_tokens", "output_tokens", "prefill_rate", "decode_rate", "itl_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)} is not a positive number")
        if not 0 <= self.cached < 1:
            raise ValueError(f"cached: {self.cached} is outside [0, 1)")
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation: {self.utilisation} is outside (0, 1]")
        for name in ("kv_tokens", "kv_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)} is negative or no number")


@dataclass(frozen=True)
class Size:
    """How many instances a load takes.

    prefill, decode: instances.
    decode_by_kv: whether the KV cache needs more decode instances than the rate does.
    decoding: requests decoded at a time.
    transfer: bytes per second from prefill to decode, 0 if unknown.
    unsplit: instances that do both, at the same rates.
    """

    prefill: int
    decode: int
    decode_by_kv: bool
    decoding: float
    transfer: float
    unsplit: int


def size(demand: Demand) -> Size:
    """The smallest groups that keep below the utilisation."""
    computed = demand.requests * demand.prompt_tokens * (1 - demand.cached) / demand.prefill_rate
    produced = demand.requests * demand.output_tokens / demand.decode_rate
    decoding = demand.requests * demand.output_tokens * demand.itl_ms / 1e3
    # A request holds its prompt all the time and its answer half of it, on average.
    held = decoding * (demand.prompt_tokens + demand.output_tokens / 2)
    by_rate = _instances(produced / demand.utilisation)
    by_kv = _instances(held / (demand.kv_tokens * demand.utilisation)) if demand.kv_tokens else 1
    return Size(
        prefill=_instances(computed / demand.utilisation),
        decode=max(by_rate, by_kv),
        decode_by_kv=by_kv > by_rate,
        decoding=decoding,
        transfer=demand.requests * demand.prompt_tokens * demand.kv_bytes,
        unsplit=_instances((computed + produced) / demand.utilisation),
    )


def _instances(load: float) -> int:
    return max(1, math.ceil(load - 1e-9))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_patches.disaggregation.sizing", description=__doc__.splitlines()[0]
    )
    for option in dataclasses.fields(Demand):
        required = option.default is dataclasses.MISSING
        parser.add_argument(
            "--" + option.name.replace("_", "-"),
            type=float,
            required=required,
            default=None if required else option.default,
            help=option.metadata["help"] + ("" if required else f" (default: {option.default:g})"),
        )
    try:
        found = size(Demand(**vars(parser.parse_args(argv))))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"prefill instances  {found.prefill}")
    print(f"decode instances   {found.decode}{'  (for their KV cache)' if found.decode_by_kv else ''}")
    print(
        f"decoded at a time  {found.decoding:.0f} requests, {found.decoding / found.decode:.0f} an instance"
    )
    if found.transfer:
        print(f"KV between them    {found.transfer / 1e9:.2f} GB/s")
    print(f"without a split    {found.unsplit} instances at the same rates (prefills would lower them)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
