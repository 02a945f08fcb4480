"""Servers that a launcher started are asked directly: a proxy of the environment could not reach a loopback address."""

PROXIES = {"no_proxy": "*"}  # an argument of `requests`
