"""A real datastore service process."""

from __future__ import annotations

from pathlib import Path

from tests.support.servers.datastore import DatastoreService

TOKEN = "end-to-end"
AUTHORIZED = (("authorization", f"Bearer {TOKEN}"),)


def serving(log: Path, prior: Path | None = None, *flags: str) -> DatastoreService:
    """One to be entered, with the token of these tests."""
    of_prior = ("--prior", prior) if prior else ()
    return DatastoreService(log, *of_prior, *flags, token=TOKEN)
