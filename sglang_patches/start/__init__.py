"""What is checked or timed before a server serves.

- `tree_attention`: which attention backend verifies trees; `attention_probe`: whether it does so rightly here;
- `room`: room for trees in SGLang's tables, and for the widest step in memory;
- `row_cost`: how the target's linear layers grow with the rows of a step.
"""
