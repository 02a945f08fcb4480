"""Stands in for SGLang's compiled CUDA library, which no machine without a GPU can load: it loads, and has no operator for a CPU."""
