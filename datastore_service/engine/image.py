"""Tells Numba where an image has its compiled kernels (NUMBA_CACHE_LOCATOR_CLASSES in docker/*.Dockerfile)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import UserProvidedCacheLocator

from datastore_service.engine import SOURCES_DIGEST


class ImageKernels(UserProvidedCacheLocator):
    """Finds compiled kernels in NUMBA_CACHE_DIR.

    They are fresh whatever the sources' times are: `docker load` rounds those to seconds, and Numba would compile every kernel again. A
    kernel's name has the digest of its sources.
    """

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> ImageKernels | None:
        """Numba's own asks for a directory that it can write to. In a container whose root is read-only a kernel that the image
        has is read all the same."""
        return super().from_function(py_func, py_file) or cls._there(py_func, py_file)

    @classmethod
    def _there(cls, py_func: Callable[..., Any], py_file: str) -> ImageKernels | None:
        locator = cls(py_func, py_file)
        name = f"{Path(py_file).stem}.{py_func.__qualname__}-{locator.get_disambiguator()}.*.nbi"
        return locator if any(Path(locator.get_cache_path()).glob(name)) else None

    def get_source_stamp(self) -> str:
        return SOURCES_DIGEST
