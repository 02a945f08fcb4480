"""What is checked or timed before a server serves.

- `tree_attention`: which attention backend verifies trees; `attention_probe`: whether it does so rightly here;
- `cache_room`: room for trees in SGLang's tables; `verification_memory`: whether the widest step fits into memory;
- `row_cost`: how the target's linear layers grow with the rows of a step.
"""
