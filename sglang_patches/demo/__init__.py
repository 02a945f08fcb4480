"""A model and a corpus to try specstore with, on any machine."""
