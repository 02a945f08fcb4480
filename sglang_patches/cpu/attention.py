"""Attention on the CPU that honours draft trees: SGLang attention backend `specstore_cpu`.

Everything a step's layers share (which KV slots to read, the masks) is prepared once per step by `plan_step`; a layer
then stores its K and V and calls one scaled-dot-product attention per group of requests. Query heads that share a KV
head are folded into query rows, so a decode step multiplies matrices, not vectors, and K and V are never repeated.
"""

from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

# Rows per request up to which query heads are folded into rows; wider prefills fill the hardware by themselves.
_FOLD_ROWS = 32

# A row's result must not depend on what else is in the step, or bfloat16 output would change with the drafts. With
# whole blocks of query rows and keys and a mask always given, torch's kernel yields a row bit for bit the same alone, in
# a chain and in any batch (found by trial with torch 2.14 and AVX-512; tests/unit/cpu checks it).
_KEY_BLOCK = 32
_QUERY_BLOCK = 4
_FEW_ROWS = 8  # of a request, that another group is not worth


@dataclass
class Group:
    """Requests attended together: `rows` query rows each, keys padded to the longest and to whole key blocks.

    query_rows [b * rows]: their rows in the step's tokens, or None for all rows. A request with fewer rows has its last one again.
    kept: which of these are not such, None for all.
    slots [b, keys]: KV slot of every key (0, SGLang's dummy slot, where padded); or a slice if they are consecutive, which
    runs on into the slots that follow.
    query_positions [b, rows], key_positions [b, keys]: sequence positions. visible [b, rows, keys]: who sees whom;
    None with `causal`: one request without prefix, visible is the lower triangle.
    """

    rows: int
    query_rows: torch.Tensor | None
    slots: torch.Tensor | slice
    batch: int
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    visible: torch.Tensor | None
    causal: bool = False
    kept: torch.Tensor | None = None
    _masks: dict = field(default_factory=dict)

    def place(self, out: torch.Tensor, attended: torch.Tensor) -> None:
        """Writes what the group attended, [b * rows, heads * d], to the places of its rows in the step's."""
        if self.query_rows is None:
            out[:] = attended
        elif self.kept is None:
            out[self.query_rows] = attended
        else:
            out[self.query_rows[self.kept]] = attended[self.kept]

    def mask(self, window: int, fold: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [b, 1, fold * rows in whole query blocks, keys]; `window` >= 0 hides keys more than that many
        positions back."""
        key = (window, fold, dtype)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, fold, dtype)
        return self._masks[key]

    def _build_mask(self, window, fold, dtype):
        visible = self.visible
        if window >= 0:
            distance = self.query_positions.unsqueeze(2) - self.key_positions.unsqueeze(1)
            near = distance <= window
            visible = near & (distance >= 0) if visible is None else visible & near
        if visible is None:
            return None
        additive = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        folded = additive.repeat(1, fold, 1).unsqueeze(1)
        return pad(folded, (0, 0, 0, -folded.shape[2] % _QUERY_BLOCK))


def _slots_of(req_to_token, requests, lengths, width, slot_count):
    """[b, width] slots of positions 0..length-1, zero beyond. For one request in consecutive slots a slice, which runs on
    beyond the request's own slots up to slot_count."""
    longest = max(lengths)
    slots = req_to_token[requests, :longest].long()
    if len(lengths) == 1:
        first, last = int(slots[0, 0]), int(slots[0, -1])
        consecutive = last - first == longest - 1 and bool((slots[0, 1:] - slots[0, :-1] == 1).all())
        if consecutive and (width == longest or first + width <= slot_count):
            return slice(first, first + width)
    slots = pad(slots, (0, width - longest))
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


def _plan_uniform(table, requests, prefixes, rows, positions, tree):
    """Groups for a step in which every request has `rows` query rows after its `prefixes` cached tokens."""
    lengths = [prefix + rows for prefix in prefixes]
    classes = _length_classes(lengths)
    return [
        _uniform_group(table, requests, lengths, rows, positions, tree, members, len(classes) == 1)
        for members in classes
    ]


def _uniform_group(table, requests, lengths, rows, positions, tree, members, is_whole_batch):
    req_to_token, slot_count = table
    index = torch.tensor(members)
    lengths = [lengths[i] for i in members]
    width = -(-max(lengths) // _KEY_BLOCK) * _KEY_BLOCK
    query_positions = positions.view(-1, rows)[index]
    key_positions = torch.arange(width).repeat(len(members), 1)
    prefix = torch.tensor(lengths).unsqueeze(1) - rows
    own = prefix + torch.arange(rows)
    key_positions.scatter_(1, own, query_positions)
    visible = (torch.arange(width) < prefix).unsqueeze(1).repeat(1, rows, 1)
    if tree is None:
        tree = torch.ones(rows, rows, dtype=torch.bool).tril().expand(len(index), -1, -1)
    else:
        tree = tree[index]
    visible.scatter_(2, own.unsqueeze(1).expand(-1, rows, -1), tree)
    return Group(
        rows=rows,
        query_rows=None if is_whole_batch else (index.unsqueeze(1) * rows + torch.arange(rows)).flatten(),
        slots=_slots_of(req_to_token, requests[index], lengths, width, slot_count),
        batch=len(members),
        query_positions=query_positions,
        key_positions=key_positions,
        visible=visible,
    )


def _row_classes(widths: list[int]) -> list[list[int]]:
    """Requests grouped by their rows: up to `_FEW_ROWS` together, because another group costs more than their padding does, and beyond
    that so that padding at most doubles them."""
    classes: dict[int, list[int]] = {}
    for i, width in enumerate(widths):
        classes.setdefault(((width - 1) // _FEW_ROWS).bit_length(), []).append(i)
    return list(classes.values())


def _plan_by_request(table, requests, prefixes, positions, tree, widths):
    """Groups as of `_plan_uniform` for requests of which each has its own number of rows.

    positions: of the rows that there are.
    """
    counts = torch.tensor(widths).unsqueeze(1)
    first = counts.cumsum(0) - counts
    groups = []
    for members in _row_classes(widths):
        index, rows = torch.tensor(members), max(widths[i] for i in members)
        query_rows = first[index] + torch.minimum(torch.arange(rows), counts[index] - 1)
        kept = torch.arange(rows) < counts[index]
        own = [prefixes[i] for i in members]
        of_class = _plan_uniform(
            table, requests[index], own, rows, positions[query_rows.flatten()], tree[index, :rows, :rows]
        )
        for group in of_class:
            at = slice(None) if group.query_rows is None else group.query_rows
            group.query_rows, group.kept = query_rows.flatten()[at], kept.flatten()[at]
        groups += of_class
    return groups


def _causal_group(table, request, rows, positions):
    """A prefill without prefix."""
    req_to_token, slot_count = table
    return Group(
        rows=rows,
        query_rows=None,
        slots=_slots_of(req_to_token, request, [rows], rows, slot_count),
        batch=1,
        query_positions=positions.unsqueeze(0),
        key_positions=torch.arange(rows).unsqueeze(0),
        visible=None,
        causal=True,
    )


def _plan_ragged(table, requests, prefixes, rows, positions):
    """One group per request: a prefill, whose rows fill the machine on their own."""
    groups, start = [], 0
    for i, (prefix, count) in enumerate(zip(prefixes, rows, strict=True)):
        if count == 0:
            continue
        request, own = requests[i : i + 1], positions[start : start + count]
        if prefix == 0:
            group = _causal_group(table, request, count, own)
        else:
            group = _uniform_group(table, request, [prefix + count], count, own, None, [0], True)
        group.query_rows = torch.arange(start, start + count) if len(rows) > 1 else None
        groups.append(group)
        start += count
    return groups


def plan_step(
    req_to_token, requests, prefixes, rows, positions, custom_mask=None, slot_count=0, widths=None
) -> list[Group]:
    """What every layer of one step shares.

    req_to_token [requests, context]: slot table. requests [bs]: its rows. prefixes: cached tokens before the query rows.
    rows: query rows per request, one int for all (decode, verify) or a list (prefill). positions [tokens]: position of
    every query row. custom_mask: tree mask of a verify step, see `_tree_of`. slot_count: KV slots that may be read beyond a
    request's own, 0 if none may. widths: query rows of each request of a verify step, the first of `rows`; None for all of them.
    """
    table = req_to_token, slot_count
    if isinstance(rows, int):
        tree = None if custom_mask is None else _tree_of(custom_mask, prefixes, rows)
        if widths is not None:
            return _plan_by_request(table, requests, prefixes, positions, tree, widths)
        return _plan_uniform(table, requests, prefixes, rows, positions, tree)
    return _plan_ragged(table, requests, prefixes, rows, positions)


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
    fold = rows <= _FOLD_ROWS and not causal
    if fold:
        folded = folded.reshape(batch, kv_heads, share * rows, -1)
        folded = pad(folded, (0, 0, 0, -share * rows % _QUERY_BLOCK))
        mask = group.mask(window, share, query.dtype)
    else:
        # Heads of one KV head become a batch of their own that shares K and V through a zero stride.
        folded = folded.reshape(batch * kv_heads, share, rows, -1)
        folded = folded if causal else pad(folded, (0, 0, 0, -rows % _QUERY_BLOCK))
        key, value = (t.reshape(-1, 1, *t.shape[2:]).expand(-1, share, -1, -1) for t in (key, value))
        mask = group.mask(window, 1, query.dtype)
        if mask is not None and batch > 1:
            mask = mask.repeat_interleave(kv_heads, 0)
    if cap > 0:
        out = _soft_capped(folded, key, value, mask, scale, cap, causal)
    else:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    if fold:
        out = out[:, :, : share * rows]
    out = out.reshape(batch, kv_heads, share, -1, out.shape[-1])[:, :, :, :rows].permute(0, 3, 1, 2, 4)
    return out.reshape(batch * rows, -1)
