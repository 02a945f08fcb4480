"""What is known of the running requests: their texts, what became of their steps, and what they are counted for.

Read the modules in this order:

- `requests`: the request book, one text a request;
- `outcome`: what a verification made of a tree;
- `verified`, `usage`: outcomes counted for the server and for one request's answer;
- `per_tenant`: what is learned from one tenant's requests, apart from another's;
- `shared_session`: the name of a session that two instances share.
"""
