"""Prefill and decode on separate instances: what a method needs where a request moves from one to the other."""
