"""Errors of the server that is asked."""


class ModelServerError(Exception):
    """The model's server gave no answer: one line that names the server, or the prompt that it refused."""
