"""The demo's error."""


class DemoModelError(RuntimeError):
    """The demo model's source is not the expected file, or what was made from it does not pass its checks."""
