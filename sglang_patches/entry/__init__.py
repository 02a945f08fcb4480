"""The entry of requests, in the process that answers clients.

- `request_checks`: refuses requests that would end a process of SGLang;
- `request_tenants`: whose request it is.
"""
