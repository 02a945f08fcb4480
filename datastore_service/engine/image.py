"""Where an image has its compiled kernels (NUMBA_CACHE_LOCATOR_CLASSES in docker/*.Dockerfile)."""

from __future__ import annotations

from numba.core.caching import UserProvidedCacheLocator

from datastore_service.engine import SOURCES_DIGEST


class ImageKernels(UserProvidedCacheLocator):
    """In NUMBA_CACHE_DIR, and fresh whatever the sources' times are: `docker load` rounds those to seconds, and Numba would compile
    every kernel again. A kernel's name has the digest of its sources."""

    def get_source_stamp(self) -> str:
        return SOURCES_DIGEST
