"""Commands about backups of a data directory. They ask no service."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn

from datastore_service.cli.options import AsJson, EncryptionKeys, operator_keys
from datastore_service.cli.output import progress, table_of, tables

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="what `specstore backup` has written to")]


def backup(
    directory: Annotated[Path, typer.Argument(metavar="DATA_DIR", help="the --data of a service")],
    destination: Annotated[
        str,
        typer.Argument(metavar="DESTINATION", help="a folder, or a URL of fsspec such as s3://BUCKET/FOLDER"),
    ],
    keep: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="then drop all backups there but the newest N; else all are kept", min=1
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Writes a data directory to a folder or an object store, also while its service runs. What is there already is not written again."""
    from datastore_service.server.descriptors import raise_limit
    from datastore_service.storage.backup import back_up
    from datastore_service.storage.backup_store import BackupStore

    raise_limit()  # a folder's files are open together
    with progress(DownloadColumn()) as bar:
        task = bar.add_task("writing", total=None)
        written = back_up(
            directory,
            BackupStore(destination),
            keep,
            lambda file: bar.update(task, advance=file.size, description=file.name),
        )
    made, removed = written.backup, len(written.removed)
    if as_json:
        fields = {
            "backup": made.name,
            "files": len(made.files),
            "bytes": made.nbytes,
            "new": written.new,
            "dropped": removed,
        }
        print(json.dumps(fields))
    else:
        dropped = f"; dropped {removed} older" if removed else ""
        print(
            f"backup {made.name}: {len(made.files)} files, {made.nbytes:,} bytes, {written.new:,} of them new{dropped}"
        )


def backups(source: Source, as_json: AsJson = False) -> None:
    """Lists backups, oldest first."""
    from datastore_service.storage.backup import backup_names, read_backup
    from datastore_service.storage.backup_store import BackupStore

    store = BackupStore(source)
    found = [read_backup(store, name) for name in backup_names(store)]
    if as_json:
        rows = [
            {"backup": b.name, "files": len(b.files), "bytes": b.nbytes, "created": b.created} for b in found
        ]
        print(json.dumps({"backups": rows}, indent=2))
    else:
        shown = [
            (
                b.name,
                len(b.files),
                f"{b.nbytes:,}",
                f"{datetime.fromtimestamp(b.created, UTC):%Y-%m-%d %H:%M:%S}",
            )
            for b in found
        ]
        tables().print(table_of(("backup", "files", "bytes", "begun (UTC)"), shown))


def restore_backup(
    source: Source,
    directory: Annotated[
        Path, typer.Argument(metavar="DATA_DIR", help="an empty directory, or one that is not there yet")
    ],
    name: Annotated[str, typer.Option("--backup", metavar="NAME", help="which one; else the newest")] = "",
    encryption_keys: EncryptionKeys = None,
    as_json: AsJson = False,
) -> None:
    """Makes a data directory of a backup. Everything is compared with its checksums before a service can open it."""
    from datastore_service.storage.backup import backup_names, read_backup
    from datastore_service.storage.backup_store import BackupStore
    from datastore_service.storage.restore import restore

    keys = operator_keys(encryption_keys)
    store = BackupStore(source)
    names = [name] if name else backup_names(store)
    if not names:
        raise ValueError(f"source: {source} has no backup")
    chosen = read_backup(store, names[-1])
    with progress(BarColumn(), DownloadColumn()) as bar:
        task = bar.add_task("reading", total=chosen.nbytes)
        vocab_size = restore(
            store,
            chosen,
            directory,
            lambda file: bar.update(task, advance=file.size, description=file.path),
            keys,
        )
    if as_json:
        print(
            json.dumps(
                {
                    "backup": chosen.name,
                    "files": len(chosen.files),
                    "bytes": chosen.nbytes,
                    "vocab_size": vocab_size,
                }
            )
        )
    else:
        print(
            f"{directory}: {len(chosen.files)} files, {chosen.nbytes:,} bytes of backup {chosen.name}; serve it with --vocab-size {vocab_size}"
        )
