"""Real servers for tests and benchmarks: `engine` starts SGLang, `split` prefill and decode instances, `datastore` a datastore service;
`forked` does the same from a process that has imported SGLang already."""
