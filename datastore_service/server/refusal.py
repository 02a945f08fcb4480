"""Why a call was refused, as a gRPC status."""

from __future__ import annotations

import errno

import grpc

from datastore_service.storage.errors import StorageError


class RefusalError(Exception):
    """code: the status to end the call with. The message names the field and the limit."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    def within(self, field: str) -> RefusalError:
        """The same of a message inside `field`."""
        return RefusalError(self.code, f"{field}.{self}")


def invalid(message: str) -> RefusalError:
    return RefusalError(grpc.StatusCode.INVALID_ARGUMENT, message)


def exhausted(message: str) -> RefusalError:
    return RefusalError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def disk_refused(error: OSError) -> RefusalError:
    """Says why, but not where: paths are no caller's business."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = grpc.StatusCode.RESOURCE_EXHAUSTED if full else grpc.StatusCode.INTERNAL
    return RefusalError(code, f"data directory: {error.strerror or error}")


def storage_refused(error: StorageError) -> RefusalError:
    """Names the file alone."""
    return RefusalError(grpc.StatusCode.DATA_LOSS, f"{error.path.name}: {without_path(error)}")


def without_path(error: StorageError) -> str:
    """The field at fault, and why."""
    return str(error).removeprefix(f"{error.path}: ")


def precondition(message: str) -> RefusalError:
    return RefusalError(grpc.StatusCode.FAILED_PRECONDITION, message)
