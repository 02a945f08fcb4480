"""Collects a served model's own answers: prompts in, a corpus out. `specstore collect` is its command.

Reading order: `prompts` (what is asked), `chat_server` (who is asked), `asking` (many at a time), `answer_file` (where
the answers are kept, and how an interrupted run goes on).
"""
