"""Packs: candidates after one prompt as one sequence, so that the prompt is computed once.

The results equal those of separate rows. `in_packs` is the door: train_critic.py's `turn_sums` and
`turn_values` go through it.
Letters in shapes: R rows (here, packs side by side), S turns, T tokens, V vocabulary.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from speakers.attention import use_attention

# A pack may be as long as the longest dialogue by default; its mask grows with the square
PACK_LIMIT = 8192
# Agent tokens of a pack at most: each has logits over the vocabulary
SCORED_LIMIT = 2048
# Agent tokens whose logits are in fp32 at a time
LOGITS_AT_ONCE = 512


def in_packs(forward_packs, model, rows, packs_at_once=None):
    """Both tables that `forward_packs` gives for packs, with a line for each row: (R, S) each.

    Candidates that stand side by side and share a prompt are packed, so that it is computed once:

        prompt        candidate 0   candidate 1
        p0 p1 p2 p3   a0 a1 </>     b0 b1 b2 </>     ids of the pack
        0  1  2  3    4  5  6       4  5  6  7       positions: each candidate follows the prompt
                      sees p, a     sees p, b        nobody sees another candidate

    Sums and gradients equal those of separate rows. One forward computes all packs, padded, or
    `packs_at_once` of them. A row with pictures comes alone.
    """
    packs = pack_rows(rows, pack_limit(model))
    if rows[0].opening:
        packs_at_once = 1
    step = packs_at_once or len(packs)
    tables = [], []  # of each row: (its turns,)
    for start in range(0, len(packs), step):
        group = packs[start:start + step]
        for lines, table in zip(tables, forward_packs(model, group), strict=True):
            for pack, line in zip(group, table, strict=True):
                lines += [pack.turns_of(index, line) for index in range(len(pack.rows))]
    return tuple(pad_sequence(lines, batch_first=True) for lines in tables)


class Pack:
    """Rows that are computed as one sequence: one row as it is, or candidates after one prompt."""

    def __init__(self, row):
        self.rows, self.ids, self.turn_index = [row], row.ids, row.turn_index

    @property
    def shared_length(self):
        """Tokens of the shared prompt; 0 for a row alone, which is plain causal."""
        return self.rows[0].prompt_length if len(self.rows) > 1 else 0

    @property
    def turns(self):
        return len(self.rows) if self.shared_length else self.rows[0].turns

    def admits(self, row, limit):
        """Whether the row continues the pack's prompt and fits."""
        length = row.prompt_length
        together = len(self.ids) + len(row.ids) - length
        return (length > 0 and self.rows[0].prompt_length == length
                and not row.opening and not self.rows[0].opening
                and together <= limit and together - length <= SCORED_LIMIT
                and self.ids[:length] == row.ids[:length])

    def add(self, row):
        turn = row.ids[row.prompt_length:]
        self.ids = self.ids + turn
        self.turn_index = self.turn_index + [len(self.rows)] * len(turn)
        self.rows.append(row)

    def turns_of(self, index, line):
        """The part of a table's line, (S,), that belongs to row `index`."""
        return line[index:index + 1] if self.shared_length else line[:self.rows[0].turns]

    def positions(self, width):
        """Position of each token, (T,): every candidate starts right after the prompt.

        Padding counts on, since transformers takes a jump back for another sequence and would build
        a mask of (R, 1, T, T).
        """
        positions = list(range(self.shared_length))
        for row in self.rows:
            positions += range(self.shared_length, len(row.ids))
        last = positions[-1]
        return positions + list(range(last + 1, last + 1 + width - len(positions)))

    def sources(self):
        """Column whose logits predict each token, (T,): the one before, or the prompt's last."""
        sources = [max(0, column - 1) for column in range(len(self.ids))]
        if self.shared_length:
            start = self.shared_length
            for row in self.rows:
                if start < len(self.ids):
                    sources[start] = self.shared_length - 1
                start += len(row.ids) - self.shared_length
        return sources


def pack_limit(model):
    """Tokens of a pack at most; 0 for models whose rows are computed separately."""
    return PACK_LIMIT if can_pack(model) else 0


def pack_rows(rows, limit=PACK_LIMIT):
    """Packs of adjacent rows.

    A pack of several rows has at most `limit` tokens and SCORED_LIMIT agent tokens.
    """
    packs = []
    for row in rows:
        if packs and packs[-1].admits(row, limit):
            packs[-1].add(row)
        else:
            packs.append(Pack(row))
    return packs


def can_pack(model):
    """Whether the model uses plain causal attention, so that packing is exact.

    Sliding windows, attention sinks and recurrent layers are not: their candidates are computed
    separately.
    """
    config = model.config.get_text_config()
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return False
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    plain = model.config._attn_implementation in ("sdpa", "packed", "shared_prompts")
    return plain and not model._is_stateful and set(kinds) == {"full_attention"}


def token_logprobs(model, packs):
    """(log-probs of agent tokens, turn indices), (R, T) each; packs are the rows here.

    Logits exist only where an agent token is next, and their fp32 copies only a part at a time: the
    backward computes those again. Together they would be the peak of a step's memory.
    """
    batch = collate(packs, model.device)
    row, column = (batch["turn_index"] >= 0).nonzero(as_tuple=True)  # the n scored tokens
    source = batch["sources"][row, column]  # (n,): the column whose logits predict each token
    with head_at(model.get_output_embeddings(), row, source):
        logits, = forward(model, packs, batch)  # (n, V)
    target = batch["ids"][row, column]
    picked = torch.cat([checkpoint(picked_logprobs, *part, use_reentrant=False) for part in zip(
        logits.split(LOGITS_AT_ONCE), target.split(LOGITS_AT_ONCE), strict=True)])  # (n,)
    logprobs = torch.zeros_like(batch["ids"], dtype=picked.dtype)
    logprobs = logprobs.index_put((row, column), picked)
    return logprobs, batch["turn_index"]


def picked_logprobs(logits, target):
    """Log-probs of the target tokens, in fp32: (n, V), (n,) -> (n,)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(-1)


@contextlib.contextmanager
def head_at(head, row, column):
    """Within it the output layer computes only these n positions: (R, T, H) -> (1, n, V)."""
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][row, column][None],))
    try:
        yield
    finally:
        hook.remove()


def forward_values(model, packs):
    """(values, exists), (R, S) each: the value head at the mean state of all tokens up to each
    turn's end, and 1 where the turn exists.

    The head is linear, so its value at the mean of the states is the mean of its values at them.
    """
    batch = collate(packs, model.device)
    values = forward(model, packs, batch)[..., 0].float()  # (R, T)
    read = torch.zeros(len(packs), max(pack.turns for pack in packs), values.shape[1])  # (R, S, T)
    for row, pack in enumerate(packs):
        for column, turn in enumerate(pack.turn_index):
            if turn >= 0 and pack.shared_length:
                read[row, turn, :pack.shared_length] = 1.0
                read[row, turn, column] = 1.0
            elif turn >= 0:
                read[row, turn, :column + 1] = 1.0
    read = read.to(model.device)
    counts = read.sum(-1)
    means = (read @ values[..., None])[..., 0] / counts.clamp(min=1)
    return means, (counts > 0).float()


def collate(packs, device):
    """Packs side by side, padded on the right: (R, T) each, and a mask if one has a prompt."""
    width = max(len(pack.ids) for pack in packs)

    def table(lists, filler):
        padded = [values + [filler] * (width - len(values)) for values in lists]
        return torch.tensor(padded, device=device)

    batch = {"ids": table([pack.ids for pack in packs], 0),
             "turn_index": table([pack.turn_index for pack in packs], -1),
             "positions": table([pack.positions(width) for pack in packs], 0),
             "sources": table([pack.sources() for pack in packs], 0),
             "mask": None}
    if any(pack.shared_length for pack in packs):
        batch["mask"] = packed_mask(packs, batch["turn_index"])
    return batch


def forward(model, packs, batch):
    """Logits of a batch; rows alone are plain causal, since no token looks at padding on the right.
    """
    opening = packs[0].rows[0].opening
    if opening:
        inputs = opening().to(model.device, model.dtype)
        return forward_seen(model, batch["ids"], **inputs).logits
    if batch["mask"] is not None and model.config._attn_implementation != "packed":
        use_attention(model, "packed", packed_attention)
    return model(input_ids=batch["ids"], position_ids=batch["positions"],
                 attention_mask=batch["mask"], use_cache=False).logits


def forward_seen(model, ids, input_ids, attention_mask, **seen):
    """One row with the pictures of its opening `input_ids`; the model finds their positions."""
    ids = ids.clone()
    later = ids[:, input_ids.shape[1]:]  # a view
    later[later == model.config.image_token_id] = 0  # an agent that spells it out shows no picture
    for name, values in seen.items():
        if values.shape == input_ids.shape:  # the kind of each token, which is 0 for text
            seen[name] = F.pad(values, (0, later.shape[1]))
    return model(input_ids=ids, use_cache=False, **seen)


def packed_mask(packs, turn_index):
    """True where a token may attend: to earlier tokens of the prompt and of the same turn.

    (R, 1, T - P, T), without the P tokens that are a prompt in every row: those are plain causal.
    """
    width = turn_index.shape[1]
    column = torch.arange(width, device=turn_index.device)
    # a row alone is all prompt: causal
    prompt = torch.tensor([pack.shared_length if pack.shared_length else width for pack in packs],
                          device=turn_index.device)
    own = turn_index[:, :, None] == turn_index[:, None, :]  # (R, T, T)
    shared = (column[None] < prompt[:, None])[:, None, :]  # (R, 1, T)
    causal = column[:, None] >= column[None]  # (T, T)
    return ((own | shared) & causal)[:, None, prompt.min():]


def packed_attention(module, query, key, value, attention_mask, **options):
    """Attention under `packed_mask`: the prompts keep the fast causal kernel."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None:  # rows alone
        return sdpa_attention_forward(module, query, key, value, None, **options)
    prompt = query.shape[2] - attention_mask.shape[2]
    turns, _ = sdpa_attention_forward(
        module, query[:, :, prompt:], key, value, attention_mask, **options)
    if prompt == 0:
        return turns, None
    before, _ = sdpa_attention_forward(
        module, query[:, :, :prompt], key[:, :, :prompt], value[:, :, :prompt], None, **options)
    return torch.cat([before, turns], 1), None
