"""Formulas of the papers that explain what the simulation shows, one module a paper, and of what they have in common."""
