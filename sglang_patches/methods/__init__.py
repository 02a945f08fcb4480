"""The methods. `registry` is the table of them, and nothing else names a method.

Each has a module with what is its own: what it does when a look-up fails (in the worker's process), and what it guesses and drafts (on
the draft side).
"""
