"""Code generated from ``protos/``; `python -m proto_gen.generate` writes it anew."""
