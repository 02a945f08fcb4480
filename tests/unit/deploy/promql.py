"""What is wrong with a PromQL expression, given the metrics that exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import promql_parser

SCRAPED = {"job", "instance"}  # Prometheus adds them to every sample
PARTS = ("expr", "lhs", "rhs", "args", "vector_selector")


def problems(
    expression: str, exported: dict[str, set[str]], values: set[str], shown: Iterable[str] = ()
) -> list[str]:
    """Names of metrics and labels that nobody exports. shown: labels that a legend or a text names. values: that a label
    may have."""
    nodes = list(_nodes(promql_parser.parse(expression)))
    selectors = [node for node in nodes if isinstance(node, promql_parser.VectorSelector)]
    found = [f"{node.name} is no metric" for node in selectors if node.name not in exported]
    matchers = [(node, matcher) for node in selectors for matcher in node.matchers.matchers]
    found += [
        f"{node.name} has no label {matcher.name}"
        for node, matcher in matchers
        if matcher.name not in exported.get(node.name, set()) | SCRAPED
    ]
    found += [
        f"{matcher.name} is never {matcher.value}"
        for _, matcher in matchers
        if matcher.op == promql_parser.MatchOp.Equal and matcher.value not in values
    ]
    labels = SCRAPED.union(*(exported.get(node.name, set()) for node in selectors))
    used = [label for node in nodes for label in _grouped(node)]
    return found + [f"no metric has a label {label}" for label in (*used, *shown) if label not in labels]


def metrics(expression: str) -> set[str]:
    nodes = _nodes(promql_parser.parse(expression))
    return {node.name for node in nodes if isinstance(node, promql_parser.VectorSelector)}


def _nodes(node: object) -> Iterator[object]:
    yield node
    for part in PARTS:
        inner = getattr(node, part, None)
        for child in inner if isinstance(inner, list) else [] if inner is None else [inner]:
            yield from _nodes(child)


def _grouped(node: object) -> list[str]:
    """Labels by which a node aggregates or joins."""
    modifier = getattr(node, "modifier", None)
    if isinstance(modifier, promql_parser.AggModifier):
        return modifier.labels
    if isinstance(modifier, promql_parser.BinModifier):
        return [*(modifier.matching.labels if modifier.matching else []), *(modifier.group_labels or [])]
    return []
