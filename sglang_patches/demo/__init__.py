"""A model and a one-command launcher to try specstore with, on any machine."""
