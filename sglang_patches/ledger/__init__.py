"""What is known of the running requests: their texts, what became of their steps, and what they are counted for.

Read the modules in this order:

- `requests`: the request book, one text a request;
- `outcome`: what a verification made of a tree, and who hears of it (`Follower`);
- `verified`, `usage`: outcomes counted by who proposed, for the server and for one request's answer;
- `rates`: how often something comes true and how long it takes, learned with decay, and apart for each tenant;
- `shared_session`: the name of a session that two instances share.
"""
