"""What a draft process is told at its start, as flags of its command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

_PARSERS: dict[str, Callable[[str], object]] = {"str": str, "int": int, "bool": lambda text: text == "True"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """model_path, dtype, trust_remote_code: as SGLang's flags of those names. tokenizer: folder of the target's, "" where requests
    bring token ids alone. device: `cpu`, `cuda` or `cuda:N`. tokens: slots of the draft model's KV cache. sessions: most that are
    drafted for at once. rows: of a draft forward, and outcomes guessed at once. lookahead: tokens drafted after each.
    context_length, vocabulary: the target's."""

    model_path: str
    tokenizer: str
    device: str
    tokens: int
    sessions: int
    rows: int
    lookahead: int
    context_length: int
    vocabulary: int
    dtype: str
    trust_remote_code: bool

    def flags(self) -> list[str]:
        return [f"--{name}={value}" for name, value in dataclasses.asdict(self).items()]

    @classmethod
    def parse(cls, parser: argparse.ArgumentParser) -> DraftSettings:
        for field in dataclasses.fields(cls):
            parser.add_argument(f"--{field.name}", type=_PARSERS[str(field.type)], required=True)
        return cls(**vars(parser.parse_args()))
