"""A deliberate fault for the probe's test: the attention backend verifies a causal chain, whatever tree it is given. Put on
the path of a server under test only; SGLang finds it as a plugin."""


def register() -> None:
    import torch

    from sglang_patches.cpu import attention_backend

    exact = attention_backend._query_layout

    def blind(batch):
        prefixes, rows, positions, mask = exact(batch)
        if mask is not None:
            mask = torch.ones(rows, rows, dtype=torch.bool).tril().repeat(len(prefixes), 1).flatten()
        return prefixes, rows, positions, mask

    attention_backend._query_layout = blind
