"""A faster `turn_logprobs` for the trainers: the same numbers, but what rows share computed once.

Candidates after one prompt become one sequence, so that the prompt is computed once:

    prompt        candidate 1   candidate 2
    p0 p1 p2 p3   a0 a1 <end>   b0 b1 b2 <end>     ids
    0  1  2  3    4  5  6       4  5  6  7         positions: each candidate follows the prompt
    0  0  0  0    1  1  1       2  2  2  2         segments: a token sees those before it in its
                                                   own segment and in segment 0

A row that occurs several times, such as a dialogue in several pairs, is computed once. Logits are
computed only where the next token is an agent's, and converted to fp32 a part at a time.
Letters in shapes: P packs, T tokens, n scored tokens, V vocabulary, H hidden size, R rows, S
turns.
"""

import contextlib
import inspect
import typing

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

PACK_TOKENS = 8192  # of a pack at most: its mask grows with the square
LOGITS_AT_ONCE = 512  # scored tokens whose logits are in fp32 at a time


def turn_logprobs(model, rows):
    """(logprobs, tokens): the summed log-prob of each turn's tokens, and their number; (R, S) each.
    """
    keys = [(tuple(row.ids), tuple(row.turn_index)) for row in rows]
    distinct = dict(zip(keys, rows, strict=True))  # equal rows are computed once
    number = {row: index for index, row in enumerate(distinct.values())}
    packs = pack_rows(distinct.values(), PACK_TOKENS if can_pack(model) else 0)
    layouts = [lay_out(pack) for pack in packs]
    # of each agent token: its pack, the column of the logits that predict it, its id, row and turn
    scored = [(pack, column, token, number[row], turn) for pack, layout in enumerate(layouts)
              for column, token, row, turn in layout.scored]
    scored = torch.tensor(scored, dtype=torch.long, device=model.device).reshape(-1, 5)
    pack_of, column_of, target, row_of, turn_of = scored.unbind(1)  # (n,) each

    inputs = {"input_ids": padded([layout.ids for layout in layouts], model.device)}  # (P, T)
    if len(packs) < len(distinct):  # otherwise all rows stand alone, and are plain causal
        inputs |= positions_and_mask(layouts, model.device)
    with head_at(model.get_output_embeddings(), pack_of, column_of):
        logits, = model(**inputs, use_cache=False).logits  # (n, V)
    parts = zip(logits.split(LOGITS_AT_ONCE), target.split(LOGITS_AT_ONCE), strict=True)
    logprobs = torch.cat([checkpoint(picked_logprobs, *part, use_reentrant=False)
                          for part in parts])  # (n,)

    turns = max(row.turns for row in rows)  # S
    sums = logprobs.new_zeros(len(distinct), turns).index_put(
        (row_of, turn_of), logprobs, accumulate=True)
    tokens = target.new_zeros(sums.shape).index_put(
        (row_of, turn_of), torch.ones_like(target), accumulate=True)
    order = [number[distinct[key]] for key in keys]
    return sums[order], tokens[order]


# -----------------------------------------------------------------------------
# Packs


def pack_rows(rows, limit):
    """Lists of rows: candidates of one prompt together, in at most `limit` tokens; others alone."""
    packs = {}  # a prompt, or a row without one -> its packs
    for row in rows:
        prompt = prompt_length(row)
        found = packs.setdefault(tuple(row.ids[:prompt]) or row, [[]])
        tokens = prompt + sum(len(member.ids) - prompt for member in [*found[-1], row])
        if found[-1] and tokens > limit:
            found.append([])
        found[-1].append(row)
    return [pack for found in packs.values() for pack in found]


def prompt_length(row):
    """Tokens before the agent's, if these end the row (a candidate, or a single turn); else 0."""
    if 0 not in row.turn_index:
        return 0
    start = row.turn_index.index(0)
    return 0 if -1 in row.turn_index[start:] else start


class Layout(typing.NamedTuple):
    """A pack as one sequence. The first three lists have an entry for each of its tokens."""

    ids: list
    positions: list
    segments: list
    scored: list  # (column of the logits that predict it, id, row, turn) of each agent token


def lay_out(pack):
    """The Layout of a pack: the prompt that its rows share, then the rest of each row."""
    prompt = prompt_length(pack[0]) if len(pack) > 1 else 0
    ids, positions, segments = pack[0].ids[:prompt], list(range(prompt)), [0] * prompt
    scored = []
    for segment, row in enumerate(pack, 1):
        shift = len(ids) - prompt  # how much further right the row's own tokens stand in the pack
        for index, turn in enumerate(row.turn_index):
            if turn < 0 or index == 0:  # not the agent's; nothing predicts the first token
                continue
            before = index - 1  # the logits at the token before predict this one
            column = before if before < prompt else before + shift
            scored.append((column, row.ids[index], row, turn))
        ids += row.ids[prompt:]
        positions += range(prompt, len(row.ids))
        segments += [segment] * (len(row.ids) - prompt)
    return Layout(ids, positions, segments, scored)


def positions_and_mask(layouts, device):
    """The two inputs of the model that packs need: positions (P, T), which token sees which."""
    segments = padded([layout.segments for layout in layouts], device)  # (P, T)
    seen = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    return {"position_ids": padded([layout.positions for layout in layouts], device),
            "attention_mask": seen.tril()[:, None]}  # (P, 1, T, T)


def padded(lists, device):
    """A table of lists of numbers, padded with 0 on the right."""
    return pad_sequence([torch.tensor(values) for values in lists], batch_first=True).to(device)


def can_pack(model):
    """Whether the model uses plain causal attention throughout, so that packing is exact.

    With sliding windows, attention sinks, recurrent layers or positions that cannot be given, each
    row is computed alone.
    """
    config = model.config.get_text_config()
    counts_by_itself = "position_ids" not in inspect.signature(model.forward).parameters
    if counts_by_itself or getattr(config, "sliding_window", None):
        return False
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    plain = model.config._attn_implementation == "sdpa" and not model._is_stateful
    return plain and set(kinds) == {"full_attention"}


# -----------------------------------------------------------------------------
# Logits


@contextlib.contextmanager
def head_at(head, row, column):
    """Within it the output layer computes only these n positions: (P, T, H) -> (1, n, V)."""
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][row, column][None],))
    try:
        yield
    finally:
        hook.remove()


def picked_logprobs(logits, target):
    """Log-probs of the target tokens, in fp32: (n, V), (n,) -> (n,)."""
    logits = logits.float()
    return logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(-1)
