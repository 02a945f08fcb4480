"""Refusals of calls, with their gRPC status."""

from __future__ import annotations

import errno

import grpc

from datastore_service.storage.errors import StorageError


class RefusalError(Exception):
    """Refuses a call. The message names the field and the limit.

    code: the status that ends the call."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    def within(self, field: str) -> RefusalError:
        """The same refusal of a message that is part of `field`."""
        return RefusalError(self.code, f"{field}.{self}")


def invalid(message: str) -> RefusalError:
    return RefusalError(grpc.StatusCode.INVALID_ARGUMENT, message)


def exhausted(message: str) -> RefusalError:
    return RefusalError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def disk_refused(error: OSError) -> RefusalError:
    """The message has the reason and no path: callers must not see paths."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = grpc.StatusCode.RESOURCE_EXHAUSTED if full else grpc.StatusCode.INTERNAL
    return RefusalError(code, f"data directory: {error.strerror or error}")


def storage_refused(error: StorageError) -> RefusalError:
    """The message names the file without its folder."""
    return RefusalError(grpc.StatusCode.DATA_LOSS, f"{error.path.name}: {without_path(error)}")


def without_path(error: StorageError) -> str:
    """The error's field and reason."""
    return str(error).removeprefix(f"{error.path}: ")


def not_found(message: str) -> RefusalError:
    return RefusalError(grpc.StatusCode.NOT_FOUND, message)


def precondition(message: str) -> RefusalError:
    return RefusalError(grpc.StatusCode.FAILED_PRECONDITION, message)
