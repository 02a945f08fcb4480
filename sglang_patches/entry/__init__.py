"""The entry of requests, in the process that answers clients.

- `request_checks`: refuses requests that would end a process of SGLang;
- `request_hook`: what each request passes through;
- `request_wishes`: what it says in `custom_params.specstore`;
- `request_tenants`: whose request it is;
- `request_conversations`: which session of its client it belongs to;
- `references`: texts that it expects its answer to follow; `predictions`: OpenAI's field for one.
"""
