"""What answers and logs say of decoding: `usage_report` in an answer, `accept_rate` in the log and SGLang's metrics, and `ollama_stream`
for the last message of a stream.
"""
