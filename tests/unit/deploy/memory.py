"""The memory that words of `specstore serve` permit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import typer

from datastore_service.cli.main import app
from datastore_service.engine.limits import Limits
from datastore_service.server.limits import ServiceLimits

SERVE = typer.main.get_command(app).commands["serve"]


def most_bytes(words: Sequence[str]) -> int:
    """words: its options."""
    given = SERVE.make_context("serve", list(words)).params
    limits = {field.name: given[field.name] for field in fields(Limits) if field.name in given}
    return ServiceLimits(namespaces=given["namespaces"]).most_bytes(Limits(**limits))
