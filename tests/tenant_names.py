"""Pairs of names that something might take for one. They are names of two tenants."""

PAIRS = {
    "case": ("acme", "Acme"),
    "normal form": ("caf\u00e9", "cafe\u0301"),
    "compatible letters": ("A", "\uff21"),
    "prefix": ("a", "ab"),
    "one in two parts": ("a", "a:b"),
    "separator": ("a b", "a-b"),
    "line": ("a b", "a\nb"),
    "folder": ("a", "../a"),
    "space at the end": ("a", "a "),
    "long": ("x" * 40 + "1", "x" * 40 + "2"),
    "none": ("", "a"),
}
