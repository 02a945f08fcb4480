"""Attention on the CPU that honours draft trees: SGLang attention backend `specstore_cpu`.

Everything a step's layers share (which KV slots to read, the masks) is prepared once per step by `plan_step`; a layer
then stores its K and V and calls one scaled-dot-product attention per group of requests. Query heads that share a KV
head are folded into query rows, so a decode step multiplies matrices, not vectors, and K and V are never repeated.
"""

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

# Rows per request up to which query heads are folded into rows; wider prefills fill the hardware by themselves.
_FOLD_ROWS = 32


@dataclass
class Group:
    """Requests attended together: `rows` query rows each, keys padded to the longest.

    requests: their indices in the batch. query_rows [b * rows]: their rows in the step's tokens, or None for all rows.
    slots [b, keys]: KV slot of every key (0, SGLang's dummy slot, where padded); a slice where they are consecutive.
    query_positions [b, rows], key_positions [b, keys]: sequence positions. visible [b, rows, keys]: who sees whom, or
    None if every row sees every key. `causal`: one request without prefix, visible is the lower triangle.
    """

    rows: int
    query_rows: torch.Tensor | None
    slots: torch.Tensor | slice
    batch: int
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    visible: torch.Tensor | None
    causal: bool = False
    _masks: dict = field(default_factory=dict)

    def mask(self, window: int, fold: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [b, 1, fold * rows, keys]; `window` >= 0 hides keys more than that many positions back."""
        key = (window, fold, dtype)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, fold, dtype)
        return self._masks[key]

    def _build_mask(self, window, fold, dtype):
        visible = self.visible
        if window >= 0:
            distance = self.query_positions.unsqueeze(2) - self.key_positions.unsqueeze(1)
            near = distance <= window
            if self.causal:
                near &= distance >= 0
            visible = near if visible is None else visible & near
        if visible is None:
            return None
        additive = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return additive.repeat(1, fold, 1).unsqueeze(1)


def _slots_of(req_to_token, requests, lengths, width):
    """[b, width] slots of positions 0..length-1, zero beyond; a slice for one request in consecutive slots."""
    slots = req_to_token[requests, :width].long()
    if len(lengths) == 1 and width > 0:
        first, last = int(slots[0, 0]), int(slots[0, -1])
        if last - first == width - 1 and bool((slots[0, 1:] - slots[0, :-1] == 1).all()):
            return slice(first, last + 1)
        return slots
    return slots.masked_fill_(torch.arange(width) >= torch.tensor(lengths).unsqueeze(1), 0)


def _length_classes(lengths: list[int]) -> list[list[int]]:
    """Requests grouped so that padding to the longest of a group at most doubles its keys (256 are always cheap)."""
    classes: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        classes.setdefault(max(length - 1, 255).bit_length(), []).append(i)
    return list(classes.values())


def _tree_of(custom_mask: torch.Tensor, prefixes: list[int], rows: int) -> torch.Tensor:
    """The [bs, rows, rows] tree part of a verify mask in either of SGLang's layouts.

    Query-length-only masks are bs * rows * rows bools; full masks are, request after request, rows * (prefix + rows).
    """
    batch = len(prefixes)
    if custom_mask.numel() == batch * rows * rows:
        return custom_mask.view(batch, rows, rows)
    cells = [rows * (prefix + rows) for prefix in prefixes]
    if custom_mask.numel() < sum(cells):
        raise ValueError(
            f"custom_mask has {custom_mask.numel()} cells; {batch} requests of {rows} draft tokens need"
            f" {batch * rows * rows} (query-length mask) or {sum(cells)} (full mask)"
        )
    parts = custom_mask[: sum(cells)].split(cells)
    return torch.stack([part.view(rows, -1)[:, -rows:] for part in parts])


def _plan_uniform(req_to_token, requests, prefixes, rows, positions, tree):
    """Groups for a step in which every request has `rows` query rows after its `prefixes` cached tokens."""
    lengths = [prefix + rows for prefix in prefixes]
    classes = _length_classes(lengths)
    return [
        _uniform_group(req_to_token, requests, lengths, rows, positions, tree, members, len(classes) == 1)
        for members in classes
    ]


def _uniform_group(req_to_token, requests, lengths, rows, positions, tree, members, is_whole_batch):
    index = torch.tensor(members)
    lengths = [lengths[i] for i in members]
    width = max(lengths)
    query_positions = positions.view(-1, rows)[index]
    key_positions = torch.arange(width).repeat(len(members), 1)
    prefix = torch.tensor(lengths).unsqueeze(1) - rows
    own = prefix + torch.arange(rows)
    key_positions.scatter_(1, own, query_positions)
    visible = None
    if rows > 1 or min(lengths) < width:
        visible = (torch.arange(width) < prefix).unsqueeze(1).repeat(1, rows, 1)
        tree = (
            torch.ones(rows, rows, dtype=torch.bool).tril().expand(len(index), -1, -1)
            if tree is None
            else tree[index]
        )
        visible.scatter_(2, own.unsqueeze(1).expand(-1, rows, -1), tree)
    return Group(
        rows=rows,
        query_rows=None if is_whole_batch else (index.unsqueeze(1) * rows + torch.arange(rows)).flatten(),
        slots=_slots_of(req_to_token, requests[index], lengths, width),
        batch=len(members),
        query_positions=query_positions,
        key_positions=key_positions,
        visible=visible,
    )


def _plan_ragged(req_to_token, requests, prefixes, rows, positions):
    """One group per request: a prefill, whose rows fill the machine on their own."""
    groups, start = [], 0
    for i, (prefix, count) in enumerate(zip(prefixes, rows, strict=True)):
        if count == 0:
            continue
        query_rows = torch.arange(start, start + count) if len(rows) > 1 else None
        own = positions[start : start + count]
        group = _uniform_group(
            req_to_token, requests[i : i + 1], [prefix + count], count, own, None, [0], True
        )
        group.query_rows = query_rows
        if prefix == 0:
            group.causal, group.visible = True, None
        groups.append(group)
        start += count
    return groups


def plan_step(req_to_token, requests, prefixes, rows, positions, custom_mask=None) -> list[Group]:
    """What every layer of one step shares.

    req_to_token [requests, context]: slot table. requests [bs]: its rows. prefixes: cached tokens before the query rows.
    rows: query rows per request, one int for all (decode, verify) or a list (prefill). positions [tokens]: position of
    every query row. custom_mask: tree mask of a verify step, see `_tree_of`.
    """
    if isinstance(rows, int):
        tree = None if custom_mask is None else _tree_of(custom_mask, prefixes, rows)
        return _plan_uniform(req_to_token, requests, prefixes, rows, positions, tree)
    return _plan_ragged(req_to_token, requests, prefixes, rows, positions)


def _soft_capped(query, key, value, mask, scale, cap, causal):
    scores = cap * torch.tanh(query @ key.transpose(-1, -2) * (scale / cap))
    if causal:
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype).triu(1)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value


def attend(query, keys, values, group: Group, scale: float, window: int = -1, cap: float = 0.0):
    """Attention of one group in one layer.

    query [b * rows, heads, d]; keys, values: the layer's KV buffers [slots, kv_heads, d or dv]. Returns
    [b * rows, heads * dv].
    """
    batch, rows = group.batch, group.rows
    kv_heads = keys.shape[1]
    share = query.shape[1] // kv_heads
    key = keys[group.slots].view(batch, -1, kv_heads, keys.shape[2]).transpose(1, 2)
    value = values[group.slots].view(batch, -1, kv_heads, values.shape[2]).transpose(1, 2)
    folded = query.view(batch, rows, kv_heads, share, -1).permute(0, 2, 3, 1, 4)
    causal = group.causal and window < 0
    if rows <= _FOLD_ROWS and not causal:
        folded = folded.reshape(batch, kv_heads, share * rows, -1)
        mask = group.mask(window, share, query.dtype)
    else:
        # Heads of one KV head become a batch of their own that shares K and V through a zero stride.
        folded = folded.reshape(batch * kv_heads, share, rows, -1)
        key, value = (t.reshape(-1, 1, *t.shape[2:]).expand(-1, share, -1, -1) for t in (key, value))
        mask = group.mask(window, 1, query.dtype)
        if mask is not None and batch > 1:
            mask = mask.repeat_interleave(kv_heads, 0)
    if cap > 0:
        out = _soft_capped(folded, key, value, mask, scale, cap, causal)
    else:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    out = out.reshape(batch, kv_heads, share, rows, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch * rows, -1)
