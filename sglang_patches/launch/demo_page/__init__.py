"""The page of `make demo` and its server."""
