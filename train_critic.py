r"""Train the critic: an advantage for each turn from the outcome of whole dialogues (SWEET-RL section 4.1).

How it works:
  1. episodes of one task are paired by outcome: a better (chosen) and a worse one (rejected);
  2. critic and reference model read the dialogue with the reference solution in front, which the policy never sees;
  3. the advantage of a turn is the mean log-ratio of its tokens, critic to reference (Eq. 3, `advantage`);
  4. a Bradley-Terry loss on the sums of both dialogues' advantages trains the critic (Eq. 2, `critic_loss`).
One forward scores all turns of a dialogue; logits exist only for agent tokens; reference log-probs are computed once.

    python train_critic.py --episodes episodes.jsonl --model toy/base --output runs/out/critic --lr 1e-4
    torchrun --nproc_per_node 8 train_critic.py --episodes episodes.jsonl --model meta-llama/Llama-3.1-8B-Instruct \
        --output critic

Reads: episodes (collect.py, or the official file). Writes: a checkpoint directory with run.json and metrics.jsonl.
Letters in shapes: B pairs, R rows of a forward, S turns, T tokens, C scored columns, V vocabulary.

Differences from the paper: none in the equations. Differences from the official code: the mean is per turn and not over
the trajectory (`--normalise trajectory` is theirs); the NLL term of the paper's Table 5 is on (`--nll 0` is theirs); the
end-of-turn token is scored and headers are not; long dialogues lose their oldest turns and not their answer.
For pages, `--head value` with a vision-language `--model` is the paper's frontend critic: it sees the reference's screenshot.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import pickle
import random
import shutil
import time
import typing
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from tqdm import tqdm

from colbench import (
    ANSWER_MARKER,
    Browser,
    LocalSpeaker,
    agent_messages,
    check_checkpoint,
    compute_dtype,
    critic_messages,
    default_device,
    derive_seed,
    encode_dialogue,
    end_of_turn,
    extract_html,
    first_request,
    has_toy_credit,
    instructions,
    load_model,
    load_processor,
    load_tokenizer,
    picture_inputs,
    read_episodes,
    read_jsonl,
    read_prompt,
    sees_pictures,
    toy_credit,
    use_attention,
    write_atomically,
)
from collect import add_dtype_flag, claim_output, flag_parser, join_processes, launch, read_run, records, require_at_least

# -----------------------------------------------------------------------------
# The equations


def turn_logprobs(logprobs, turn_index, turns):
    """Sums and counts of token log-probs by turn: (R, T), (R, T) -> (R, S), (R, S). Tokens with turn_index -1 are out."""
    member = turn_index >= 0
    index = turn_index.clamp(min=0)
    sums = logprobs.new_zeros(len(logprobs), turns).scatter_add(1, index, logprobs * member)
    counts = logprobs.new_zeros(len(logprobs), turns).scatter_add(1, index, member.to(logprobs))
    return sums, counts


def advantage(sums, reference_sums, counts, normalise="turn"):
    """SWEET-RL Eq. (3): A(o_t, a_t, c) = 1/L sum_l [log pi_theta(a_l | o_t, a_<l, c) - log pi_ref(a_l | o_t, a_<l, c)].

    All arguments (R, S): turn sums of log-probs, and L, the tokens of the turn; a turn without tokens gets 0.
    Official code: one mean over all agent tokens of the trajectory (`trajectory`). `none` is the ablation of Table 3.
    """
    ratio = sums - reference_sums  # log pi_theta - log pi_ref, summed over l
    if normalise == "turn":
        return ratio / counts.clamp(min=1)
    if normalise == "trajectory":
        return ratio / counts.sum(1, keepdim=True).clamp(min=1)
    return ratio


def critic_loss(chosen, rejected, beta):
    """SWEET-RL Eq. (2): -log sigma(sum_t beta A(o+_t, a+_t, c) - sum_t beta A(o-_t, a-_t, c)); (B, S), (B, S) -> (B,)."""
    return -F.logsigmoid(beta * chosen.sum(1) - beta * rejected.sum(1))


def value_loss(logits, rewards, turn_exists):
    """The "regression head" of the paper's Table 3: each turn predicts the outcome; (R, S), (R,), (R, S) -> (R,)."""
    losses = F.binary_cross_entropy_with_logits(logits, rewards[:, None].expand_as(logits), reduction="none")
    return (losses * turn_exists).sum(1) / turn_exists.sum(1)


# -----------------------------------------------------------------------------
# Rows: encoded dialogues, alone or packed, and their log-probs by turn


@dataclasses.dataclass
class Row:
    """A sequence of tokens to score. A packed row holds several turns after one prompt (train_policy.py)."""

    ids: list  # T token ids
    turn_index: list  # T turn numbers, -1 where the token is not an agent token
    turns: int
    prompt: int = 0  # packed: length of the shared prompt; 0: an ordinary causal row
    reference: list | None = None  # S log-prob sums under the reference model
    answered: bool = False  # whether the last turn is marked as the answer
    look: typing.Callable | None = None  # gives a vision-language critic what it reads before the first turn

    def opens(self, place):
        """Whether a packed turn begins at this place of the row."""
        return bool(self.prompt) and place >= self.prompt and self.turn_index[place] != self.turn_index[place - 1]

    def positions(self, width):
        """Position of each token: packed turns all start right after the prompt. (T,), padding included.

        Padding counts on, since transformers takes a jump back for another sequence and would build a (R, 1, T, T) mask.
        """
        positions = []
        for place in range(len(self.ids)):
            positions.append(self.prompt if self.opens(place) else positions[-1] + 1 if positions else 0)
        return positions + list(range(positions[-1] + 1, positions[-1] + 1 + width - len(positions)))

    def apart(self):
        """The same turns, each after a prompt of its own: what an ordinary causal model can read."""
        if not self.prompt:
            return [self]
        places = [[place for place in range(len(self.ids)) if place < self.prompt or self.turn_index[place] == turn]
                  for turn in range(self.turns)]
        return [Row([self.ids[place] for place in chosen], [min(self.turn_index[place], 0) for place in chosen], 1)
                for chosen in places]

    def sources(self):
        """Column whose logits predict each token: the one before, or the prompt's last for a packed turn's first. (T,)"""
        return [self.prompt - 1 if self.opens(place) else max(0, place - 1) for place in range(len(self.ids))]


def encode_row(tokenizer, messages, finished, max_length, look=None):
    """(row, dropped turns) of a dialogue within `max_length` tokens; (None, dropped) if its last turn does not fit.

    A dialogue that is too long loses whole oldest turns after the first user message, never part of a scored turn.
    `look` gives what a vision-language critic reads in place of what stands before the first turn.
    """
    first = first_request(messages) + 1
    if look:
        opening, plain = look()["input_ids"][0].tolist(), len(encode_dialogue(tokenizer, messages[:first])[0])
    for dropped in range((len(messages) - first) // 2 + 1):
        kept = messages[:first] + messages[first + 2 * dropped:]
        ids, turn_index = encode_dialogue(tokenizer, kept, finished[dropped:])
        if look:
            ids, turn_index = opening + ids[plain:], [-1] * len(opening) + turn_index[plain:]
        if len(ids) <= max_length:
            return Row(ids, turn_index, max(turn_index) + 1, look=look), dropped
    return None, dropped


def collate(rows, device):
    """Rows side by side, padded on the right: ids, turn_index, positions, sources (R, T), and a mask if one is packed."""
    width = max(len(row.ids) for row in rows)

    def table(lists, filler):
        return torch.tensor([values + [filler] * (width - len(values)) for values in lists], device=device)

    batch = {"ids": table([r.ids for r in rows], 0), "turn_index": table([r.turn_index for r in rows], -1),
             "positions": table([r.positions(width) for r in rows], 0), "sources": table([r.sources() for r in rows], 0)}
    batch["mask"] = packed_mask(rows, batch["turn_index"]) if any(row.prompt for row in rows) else None
    batch["seen"] = rows[0].look() if rows[0].look else None  # such a row comes alone
    return batch


def packed_mask(rows, turn_index):
    """Who may look at whom: at earlier tokens of the prompt and of the own turn, never of another turn.

    (R, 1, T - P, T), without the P tokens that are a prompt in every row, since those are plain causal.
    """
    width = turn_index.shape[1]
    column = torch.arange(width, device=turn_index.device)
    prompt = torch.tensor([row.prompt or width for row in rows], device=turn_index.device)
    own = turn_index[:, :, None] == turn_index[:, None, :]  # (R, T, T)
    shared = (column[None] < prompt[:, None])[:, None, :]  # (R, 1, T)
    causal = column[:, None] >= column[None]  # (T, T)
    return ((own | shared) & causal)[:, None, prompt.min():]


def packed_attention(module, query, key, value, attention_mask, **options):
    """Attention under `packed_mask`: prompts keep the fast causal kernel, and only the turns after them pay for a mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    shared = query.shape[2] - (query.shape[2] if attention_mask is None else attention_mask.shape[2])
    turns, _ = sdpa_attention_forward(module, query[:, :, shared:], key, value, attention_mask, **options)
    if not shared:  # an ordinary row
        return turns, None
    prompt, _ = sdpa_attention_forward(module, *(part[:, :, :shared] for part in (query, key, value)), None, **options)
    return torch.cat([prompt, turns], 1), None


def sees_everything(model):
    """Whether each token looks at all before it, by scaled dot products alone, as `packed_attention` lets it.

    Not so with sliding windows, attention sinks or recurrent layers: their packed turns are read apart.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    plain = model.config._attn_implementation in ("sdpa", "packed", "shared_prompts") and not model._is_stateful
    return plain and not window and {*kinds} == {"full_attention"}


def read_turns(forward_fn, model, rows, device):
    """The two tables (R, S) of `forward_turns` or `forward_values`, of packed and ordinary rows, by any model."""
    if sees_everything(model) or not any(row.prompt for row in rows):
        return forward_fn(model, rows, device)
    apart = [row.apart() for row in rows]
    tables = forward_fn(model, [single for singles in apart for single in singles], device)
    return tuple(torch.nn.utils.rnn.pad_sequence(table[:, 0].split([len(singles) for singles in apart]), batch_first=True)
                 for table in tables)


def forward_turns(model, rows, device):
    """Log-prob sums and token counts of each turn, (R, S) and (R, S), with logits only where an agent token is next."""
    batch = collate(rows, device)
    row, column = (batch["turn_index"] >= 0).nonzero(as_tuple=True)  # the scored tokens, (n,) and (n,)
    columns, place = batch["sources"][row, column].unique(return_inverse=True)  # the C columns that predict them
    logits = forward(model, batch, logits_to_keep=columns)  # (R, C, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    picked = logits[row, place, batch["ids"][row, column]] - logits.logsumexp(-1)[row, place]  # (n,)
    logprobs = torch.zeros_like(batch["ids"], dtype=picked.dtype).index_put((row, column), picked)
    return turn_logprobs(logprobs, batch["turn_index"], max(r.turns for r in rows))


def forward_values(model, rows, device):
    """Value head: the logit at the last token of each turn, and whether the turn exists; (R, S) and (R, S)."""
    batch = collate(rows, device)
    turns = max(row.turns for row in rows)
    last = [{turn: place for place, turn in enumerate(row.turn_index)} for row in rows]  # turn -> its last token
    ends = torch.tensor([[places.get(turn, 0) for turn in range(turns)] for places in last], device=device)
    values = forward(model, batch)[..., 0].float()  # (R, T)
    exists = torch.tensor([[float(turn < row.turns) for turn in range(turns)] for row in rows], device=device)
    return values.gather(1, ends) * exists, exists


def forward(model, batch, **options):
    if batch["seen"]:
        return forward_seen(model, batch["ids"], **batch["seen"].to(model.device, model.dtype)).logits
    # Without a mask and without cache every row is plain causal; padding stands on the right, where no token looks
    if batch["mask"] is not None and model.config._attn_implementation != "packed":
        use_attention(model, "packed", packed_attention)
    return model(input_ids=batch["ids"], position_ids=batch["positions"], attention_mask=batch["mask"], use_cache=False,
                 **options).logits


def forward_seen(model, ids, input_ids, attention_mask, **seen):
    """One row with the pictures of its opening `input_ids`; the model itself finds the positions of a picture's tokens."""
    later = ids[:, input_ids.shape[1]:]
    later[later == model.config.image_token_id] = 0  # an agent that spells a picture's token out shows no picture
    for name, values in seen.items():
        if values.shape == input_ids.shape:  # the kind of each token, which is 0 for text
            seen[name] = F.pad(values, (0, later.shape[1]))
    return model(input_ids=ids, use_cache=False, **seen)


def grouped(rows, micro_batch_size):
    """Rows for one forward each. One unpadded row at a time wastes nothing; small models want many rows at once."""
    if micro_batch_size == 1 or rows[0].look:
        return [[row] for row in rows]
    return [rows]


def turn_scores(model, rows, device, micro_batch_size=1, forward_fn=forward_turns):
    """(sums, counts) of all rows, (R, S) each, whether they are forwarded one by one or together."""
    turns = max(row.turns for row in rows)
    parts = [read_turns(forward_fn, model, group, device) for group in grouped(rows, micro_batch_size)]
    return tuple(torch.cat([F.pad(part[side], (0, turns - part[side].shape[1])) for part in parts]) for side in (0, 1))


def turns_in_order(table, rows):
    """(R, S) -> (turns of all rows,): without the padding of rows that hold fewer turns than others."""
    return torch.cat([turns[:row.turns] for row, turns in zip(rows, table, strict=True)])


# -----------------------------------------------------------------------------
# A critic that sees: the paper's frontend critic is a vision-language model with a regression head


class Sight:
    """What a vision-language critic reads with: its processor, and a browser that draws each reference page once."""

    def __init__(self, path, privileged):
        self.processor, self.privileged = load_processor(path), privileged
        self.draw = None if privileged == "none" else functools.cache(Browser().picture)
        self.read = functools.lru_cache(8)(self._read)  # the rows of a task, and candidates of a state, come together

    def look(self, task, messages):
        """A function that gives what the critic reads of `messages` up to the first request, with the reference's picture.

        Rows keep the function and not its result: the pixels of all tasks at once would fill the memory.
        """
        opening = messages[:first_request(messages) + 1]
        return functools.partial(self.read, json.dumps([{name: task[name] for name in ("domain", "ground_truth")}, opening]))

    def _read(self, known):
        task, opening = json.loads(known)
        shown = task["domain"] == "frontend" and self.privileged != "none"
        picture = self.draw(extract_html(task["ground_truth"])) if shown else None  # none that can be drawn: its text
        return picture_inputs(self.processor, [critic_messages(task, opening, self.privileged, picture)])


def vision_value_class(path):
    """The class of a vision-language checkpoint, with the value of everything read so far in place of the next token."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig
    from transformers.modeling_outputs import TokenClassifierOutput

    base = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(AutoConfig.from_pretrained(path))]

    class VisionValue(base):
        _tied_weights_keys = None

        def __init__(self, config):
            super().__init__(config)
            del self.lm_head
            self.score = torch.nn.Linear(config.get_text_config().hidden_size, 1)
            self.post_init()

        def forward(self, **inputs):
            hidden = self.model(**inputs).last_hidden_state
            if "pixel_values" not in inputs:  # ranks reduce the gradients that they have, so that all must have the same ones
                decoder = set(map(id, self.get_decoder().parameters()))
                hidden = hidden + 0.0 * sum(p.sum() for p in self.model.parameters() if id(p) not in decoder)
            scores = self.score(hidden).float()  # (R, T, 1)
            read = torch.arange(1, scores.shape[1] + 1, device=scores.device)[:, None]
            return TokenClassifierOutput(logits=scores.cumsum(1) / read)  # a linear head's mean is the head of the mean

    # transformers looks up by these names how a checkpoint spells its weights
    VisionValue.__name__, VisionValue.__module__ = base.__name__, base.__module__
    return VisionValue


# -----------------------------------------------------------------------------
# Pairs of episodes


def load_episodes(paths, agent_prompt=None):
    """Episodes that can be trained on, and how many had to be left out because of an error.

    Samples of a task that an earlier file has, too, are numbered on. `agent_prompt` names a file with the instructions of
    episodes that do not tell theirs, such as the official ones.
    """
    episodes, samples, prompt = [], {}, read_prompt(agent_prompt)
    for path in paths:
        found = read_episodes(path)
        start = {task_id: samples.get(task_id, 0) for task_id in group_by_task(found)}
        for episode in found:
            task_id = episode["task"]["task_id"]
            episode["sample"] += start[task_id]
            samples[task_id] = max(samples.get(task_id, 0), episode["sample"] + 1)
            if episode.get("agent_prompt") is None:
                episode["agent_prompt"] = prompt
        episodes += found
    sound = [episode for episode in episodes if not episode["error"]]
    return sound, len(episodes) - len(sound)


def group_by_task(episodes):
    groups = {}
    for episode in episodes:
        groups.setdefault(episode["task"]["task_id"], []).append(episode)
    return groups


def succeeded(episode, success_reward):
    """Whether the episode's answer passed all tests; a page has none, and needs `success_reward`."""
    return episode["reward"] >= success_reward if episode["success"] is None else episode["success"]


def pair_episodes(group, rule="best_vs_rest", margin=0.0, success_reward=0.9):
    """(chosen, rejected) episodes of one task.

    best_vs_rest (official code): the first best episode against all that are worse; backend tasks only if the best one
    passes every test. success_vs_failure: every success against every failure. all: every two episodes of different
    outcome. Frontend pairs differ by at least `margin`.
    """
    if rule == "best_vs_rest":
        best = max(group, key=lambda episode: episode["reward"])
        chosen, rejected = [best] if best["success"] or best["task"]["domain"] != "backend" else [], group
    elif rule == "success_vs_failure":
        chosen, rejected = ([e for e in group if succeeded(e, success_reward) == wanted] for wanted in (True, False))
    else:
        chosen, rejected = group, group
    return [(a, b) for a in chosen for b in rejected if a["reward"] > b["reward"] and a["reward"] - b["reward"] >= margin]


def split_tasks(groups, holdout, seed):
    """(task ids to train on, held out): whole tasks, by a seeded shuffle of their ids."""
    names = sorted(groups)
    random.Random(derive_seed(seed, "holdout")).shuffle(names)
    count = math.ceil(holdout * len(names)) if holdout else 0
    return names[count:], names[:count]


def dialogue_row(tokenizer, episode, privileged, max_length, sight=None):
    """(row, dropped turns) of an episode as the critic sees it."""
    history, prompt = episode["dialogue_history"], instructions(episode["task"], episode.get("agent_prompt"))
    last = max(number for number, message in enumerate(history) if message["role"] == "assistant")
    view = agent_messages(episode["task"], history[:last + 1], prompt)
    messages = critic_messages(episode["task"], view, privileged)
    finished = [message.get("finished") is not False for message in history if message["role"] == "assistant"]
    row, dropped = encode_row(tokenizer, messages, finished, max_length, sight and sight.look(episode["task"], view))
    if row:
        row.answered = ANSWER_MARKER in history[last]["content"]
    return row, dropped


@dataclasses.dataclass
class Item:
    """What one term of the loss needs: its rows, the rewards of their episodes, and the pairs of turns to compare."""

    rows: list
    rewards: list
    pairs: list  # (chosen, rejected): places among the item's rows (critic) or turns (policy)


def pairs_by_item(pairs, share):
    """Which pairs of a state are an item: all of them together (`state`), or each for itself."""
    return [pairs] if share == "state" and pairs else [[pair] for pair in pairs]


def batch_pairs(items, sizes):
    """The pairs of all items as places in the batch, where each item takes the next of the `sizes` places. (B, 2)"""
    starts = itertools.accumulate(sizes, initial=0)
    return [(start + a, start + b) for start, item in zip(starts, items, strict=False) for a, b in item.pairs]


def mean_by_item(values, items):
    """(B,) -> (items,): the mean over each item's pairs."""
    return torch.stack([part.mean() for part in values.split([len(item.pairs) for item in items])])


def pair_items(tokenizer, groups, names, args, privileged, sight=None):
    """(items, report) of the tasks `names`: an item is a pair of episodes, or with `--share state` all pairs of a task."""
    items, report = [], {"pairs": 0, "tasks_with_pairs": 0, "tasks_without": 0, "turns_dropped": 0, "too_long": 0}
    for name in names:
        pairs = pair_episodes(groups[name], args.pairs, args.margin, args.success_reward)
        report["tasks_with_pairs" if pairs else "tasks_without"] += 1
        rows = {}
        for episode in {id(e): e for pair in pairs for e in pair}.values():
            rows[id(episode)], dropped = dialogue_row(tokenizer, episode, privileged, args.max_length, sight)
            report["turns_dropped"] += dropped if rows[id(episode)] else 0
            report["too_long"] += rows[id(episode)] is None
        pairs = [(a, b) for a, b in pairs if rows[id(a)] and rows[id(b)]]
        for wanted in pairs_by_item(pairs, args.share):
            used = {id(e): e for pair in wanted for e in pair}
            place = {key: number for number, key in enumerate(used)}
            items.append(Item([rows[key] for key in used], [e["reward"] for e in used.values()],
                              [(place[id(a)], place[id(b)]) for a, b in wanted]))
        report["pairs"] += len(pairs)
    return items, report


# -----------------------------------------------------------------------------
# The training loop of both trainers


def shard(model, process, checkpointing=None, dtype=None):
    """FSDP2: each decoder layer and the root; fp32 master weights, which compute in `--dtype`. In place."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if checkpointing or (checkpointing is None and process.device != "cpu"):
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # its newer name
        enable({"use_reentrant": False})
    model.train()
    dtype = compute_dtype(process.device, dtype)
    if process.world == 1 and process.device == "cpu" and dtype == "float32":
        return  # nothing to share, and DTensors would slow small models down
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    mesh = torch.distributed.init_device_mesh(process.device.split(":")[0], (process.world,))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


@contextlib.contextmanager
def scoring(model):
    """No gradients, and afterwards the root's parameters are shards again, as optimiser and checkpoints need them.

    FSDP2 leaves the root unsharded after a forward, to spare the backward a gather that never comes here.
    """
    with torch.no_grad():
        yield
    if hasattr(model, "reshard"):
        model.reshard()


def load_trainable(path, process, auto_class="AutoModelForCausalLM", **options):
    """fp32 master weights. They are read as the checkpoint has them, so that hosts need not hold fp32 copies of bf16."""
    return load_model(path, process.device, auto_class, dtype="auto", **options).float()


def my_share(entries, process):
    """(entry, weight) pairs of this rank. Every rank gets equally many; fillers have weight 0, since ranks that run
    different numbers of forwards would wait for each other for ever."""
    count = -(-len(entries) // process.world)
    mine = [(entry, 1.0) for entry in entries[process.rank::process.world]]
    return mine + [(entries[0], 0.0)] * (count - len(mine))


def gather_shares(mine, process, count):
    """The results of all `count` entries in order, from what every rank found for its share."""
    gathered = [None] * process.world
    torch.distributed.all_gather_object(gathered, mine)
    return [gathered[number % process.world][number // process.world] for number in range(count)]


def share_scores(model, rows, score, process, micro_batch_size):
    """The tables (R, S) that `score` gives, as lists over each row's turns; ranks share the work and then the results."""
    share = [row for row, _ in my_share(rows, process)]
    found, size = [], 2 * micro_batch_size  # as many rows as the pairs of a micro-batch have
    with scoring(model):
        for start in range(0, len(share), size):
            group = share[start:start + size]
            found += [[turns[:row.turns].tolist() for turns in tables]
                      for row, *tables in zip(group, *score(group), strict=True)]
    return gather_shares(found, process, len(rows))


def score_rows(model, rows, process, micro_batch_size=1):
    """Fill `reference` of every row with its turn sums under `model`."""
    unique = list({id(row): row for row in rows}.values())
    unique.sort(key=lambda row: len(row.ids))
    scores = share_scores(model, unique, lambda group: turn_scores(model, group, process.device, micro_batch_size), process,
                          micro_batch_size)
    for row, (sums, _) in zip(unique, scores, strict=True):
        row.reference = sums


def reference_tensor(rows, like):
    """The rows' reference sums as one tensor of the shape of `like`, (R, S)."""
    turns = like.shape[1]
    return torch.tensor([row.reference + [0.0] * (turns - len(row.reference)) for row in rows]).to(like)


def plan_batches(count, batch_size, epochs, seed):
    """Item numbers of each step: every epoch a new seeded order, known in advance, so a resumed run follows it."""
    batches = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(derive_seed(seed, "order", epoch)).shuffle(order)
        batches += [order[start:start + batch_size] for start in range(0, count, batch_size)]
    return batches


def learning_rate(step, steps, args):
    """Linear warm-up over `--warmup` of the steps, then cosine down to a tenth."""
    warmup = max(1, round(args.warmup * steps))
    if step < warmup:
        return args.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return args.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def idle_forwards(model, parts, micro_batch_size, process):
    """0, from as many forwards as other ranks have more rows to do in this micro-batch (`parts`: that of every rank).

    All ranks gather the shards of the weights in each forward: who did fewer would let the others wait for ever.
    """
    counts = [len(grouped([row for item, _ in part for row in item.rows], micro_batch_size)) for part in parts]
    row = parts[process.rank][0][0].rows[0]
    row = row if row.look else Row([0], [-1], 1)  # text needs no more than a token
    idle = (forward(model, collate([row], process.device)).sum() for _ in range(max(counts) - counts[process.rank]))
    return 0.0 * sum(idle)


def train_step(model, optimizer, batch, objective, args, process):
    """One optimiser step on a global batch; returns its metrics, averaged over the batch on all ranks."""
    total = sum(len(item.pairs) for item in batch)
    # like items are computed at the same time: little of a forward is padding, and ranks hardly wait for each other
    batch = sorted(batch, key=lambda item: (len(item.rows), max(len(row.ids) for row in item.rows)))
    shares = [my_share(batch, process._replace(rank=rank)) for rank in range(process.world)]
    sums = {}
    for start in range(0, len(shares[0]), args.micro_batch_size):
        parts = [share[start:start + args.micro_batch_size] for share in shares]
        items, weights = zip(*parts[process.rank], strict=True)
        weights = torch.tensor([weight * len(item.pairs) for item, weight in zip(items, weights, strict=True)],
                               device=process.device)
        metrics = objective(model, items)
        loss = (metrics["train/loss"] * weights).sum() / total + idle_forwards(model, parts, args.micro_batch_size, process)
        (loss * process.world).backward()  # FSDP averages the gradients of the ranks; the batch wants their sum
        for name, values in metrics.items():
            sums[name] = sums.get(name, 0.0) + (values.detach() * weights).sum().double()
    reduced = torch.stack(list(sums.values()))
    torch.distributed.all_reduce(reduced)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    metrics = dict(zip(sums, (reduced / total).tolist(), strict=True)) | {"optim/grad_norm": norm.item()}
    if math.isfinite(metrics["train/loss"]) and math.isfinite(metrics["optim/grad_norm"]):
        optimizer.step()
    optimizer.zero_grad()
    return metrics


def train(model, items, objective, args, process, holdout=None):
    """The loop: plan, resume, step, log, save. `holdout()` adds its metrics after each epoch."""
    output = Path(args.output)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=process.device != "cpu")  # the usual one needs 4 more bytes a parameter on a GPU
    batches = plan_batches(len(items), args.batch_size, args.epochs, args.seed)[:args.max_steps]
    start = load_state(output / "state", model, optimizer, process)
    log = MetricsLog(output / "metrics.jsonl", start, process)
    for step in log.progress(start, len(batches)):
        began = time.perf_counter()
        torch.manual_seed(derive_seed(args.seed, step))  # dropout, if a model has it, must not depend on resuming
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches), args)
        batch = [items[number] for number in batches[step]]
        metrics = train_step(model, optimizer, batch, objective, args, process)
        stop_if_not_finite(metrics, step, batches[step], output, process)
        metrics |= {"optim/lr": optimizer.param_groups[0]["lr"], "time/step": time.perf_counter() - began}
        metrics["data/tokens"] = sum(len(row.ids) for item in batch for row in item.rows)
        if holdout and ((step + 1) % math.ceil(len(items) / args.batch_size) == 0 or step + 1 == len(batches)):
            metrics |= holdout()
        log.write(step, metrics)
        if (step + 1) % args.save_every == 0 and step + 1 < len(batches):
            save_state(output / "state", step + 1, model, optimizer, process)


def stop_if_not_finite(metrics, step, numbers, output, process):
    if math.isfinite(metrics["train/loss"]) and math.isfinite(metrics["optim/grad_norm"]):
        return
    if process.leads:
        write_atomically(output / "bad_batch.json", json.dumps({"step": step, "items": numbers, "metrics": metrics}))
    raise SystemExit(f"step {step}: found loss {metrics['train/loss']} and gradient norm {metrics['optim/grad_norm']},"
                     f" expected finite numbers; the weights were left as they were and {output}/bad_batch.json names"
                     " the items of the batch; lower --lr or look at these items")


class MetricsLog:
    """metrics.jsonl: one line a step. Lines after the step that a run resumes from are dropped."""

    def __init__(self, path, start, process):
        self.path, self.process, self.bar, self.norms = path, process, None, []
        if process.leads and path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [row for row in rows if row["step"] < start]
            self.norms = [row["optim/grad_norm"] for row in kept]
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))

    def progress(self, start, steps):
        self.bar = tqdm(range(start, steps), initial=start, total=steps, unit="step", **self.process.bar)
        return self.bar

    def write(self, step, metrics):
        if self.process.leads:
            self.norms.append(metrics["optim/grad_norm"])
            metrics["optim/spike"] = float(self.norms[-1] > 10 * numpy.median(self.norms[-50:]))
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": step} | metrics) + "\n")
            shown = {name: metrics[name] for name in ("train/loss", "train/accuracy") if name in metrics}
            self.bar.set_postfix({name.split("/")[1]: f"{value:.3f}" for name, value in shown.items()}, refresh=False)
            if metrics["optim/spike"]:
                self.bar.write(f"step {step}: gradient norm {metrics['optim/grad_norm']:.3g}, over ten times the median")


# -----------------------------------------------------------------------------
# Checkpoints


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def writing(folder):
    """A full disk, which torch and safetensors report in ways of their own, is an OSError."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        raise OSError(f"{folder} could not be written ({error})") from None


def save_state(folder, step, model, optimizer, process):
    """What an exact resume needs; each rank writes its shards. The folder gets its name only when it is whole."""
    partial = folder.with_name("state.partial")
    if process.leads:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    process.barrier()
    with writing(partial):
        torch.save({"step": step, "world": process.world, "parameters": [local(p) for p in model.parameters()],
                    "moments": [{name: local(value) for name, value in optimizer.state[p].items()}
                                for p in model.parameters()]}, partial / f"rank{process.rank}.pt")
    process.barrier()
    if process.leads:
        old = folder.with_name("state.old")
        if folder.exists():  # otherwise a kill came between the two renames, and the old one is all there is
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def load_state(folder, model, optimizer, process):
    """The step to go on from, 0 if there is no state; restores weights and moments bit for bit."""
    if not folder.is_dir() and folder.with_name("state.old").is_dir():
        folder = folder.with_name("state.old")  # killed between the two renames of save_state
    path = folder / f"rank{process.rank}.pt"
    if not folder.is_dir():
        return 0
    try:
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=True) if path.is_file() else {"world": 0}
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise SystemExit(f"{path}: found a state that cannot be read ({str(error).splitlines()[0]}), expected one that this"
                         " command saved; remove the folder to start again") from None
    if state["world"] != process.world:
        raise SystemExit(f"{folder}: found the state of a run of {len(list(folder.iterdir()))} processes, expected"
                         f" {process.world}; use as many as before, or remove the folder to start again")
    parameters = list(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # a step of length 0 makes the moments, which are then filled
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, saved, moments in zip(parameters, state["parameters"], state["moments"], strict=True):
            local(parameter).copy_(saved)
            for name, value in moments.items():
                local(optimizer.state[parameter][name]).copy_(value)
    return state["step"]


def save_checkpoint(output, model, tokenizer, agent_prompt, process):
    """A directory that from_pretrained opens, weights as trained (fp32: bf16 would lose steps as small as the paper's).

    config.json comes last, so that a half-written checkpoint never opens.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    kept = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}  # a tied weight has one name here
    weights = {name: weight for name, weight in weights.items() if name in kept}
    if process.leads:
        partial = output / "checkpoint.partial"
        shutil.rmtree(partial, ignore_errors=True)
        model.config.dtype = torch.float32
        with writing(partial):
            model.save_pretrained(partial, state_dict=weights)
            tokenizer.save_pretrained(partial)
        if agent_prompt is not None:  # the instructions travel with the weights that were trained on them
            (partial / "agent_prompt.txt").write_text(agent_prompt + "\n")
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, output / path.name)
        partial.rmdir()
        shutil.rmtree(output / "state", ignore_errors=True)
    process.barrier()


def is_complete(output, process):
    """Whether the directory already holds the finished checkpoint of this very command."""
    if (Path(output) / "config.json").is_file():
        if process.leads:
            for name in ("state", "state.old", "state.partial", "checkpoint.partial"):
                shutil.rmtree(Path(output) / name, ignore_errors=True)  # of a kill right after config.json was written
            print(f"{output}: this run is complete; nothing to do")
        return True
    return False


# -----------------------------------------------------------------------------
# The critic's objective, its use as a scorer, and what it reports


def turn_worths(model, rows, args, device):
    """(worth, counts, sums) of the rows' turns, (R, S) each: advantages, and the token counts and log-prob sums they are of.

    A value head's worths are logits of the outcome; it has no sums, and its counts are 1 for each turn that exists.
    """
    if args.head == "value":
        values, exists = turn_scores(model, rows, device, args.micro_batch_size, forward_values)
        return values, exists, None
    sums, counts = turn_scores(model, rows, device, args.micro_batch_size)
    return advantage(sums, reference_tensor(rows, sums), counts, args.normalise), counts, sums


def critic_objective(model, items, args, device):
    """Losses and metrics of a micro-batch, (items,) each: means over an item's pairs of episodes."""
    rows = [row for item in items for row in item.rows]
    chosen, rejected = torch.tensor(batch_pairs(items, [len(item.rows) for item in items]), device=device).unbind(1)
    worths, counts, sums = turn_worths(model, rows, args, device)
    if args.head == "value":
        rewards = torch.tensor([reward for item in items for reward in item.rewards], device=device)
        losses, worth = value_loss(worths, rewards, counts), worths.sum(1) / counts.sum(1)
        metrics = {"train/loss": (losses[chosen] + losses[rejected]) / 2,
                   "train/accuracy": (worth[chosen] > worth[rejected]).float()}
    else:
        margin = worths[chosen].sum(1) - worths[rejected].sum(1)
        nll = (-sums.sum(1) / counts.sum(1))[chosen]
        metrics = {"train/loss": critic_loss(worths[chosen], worths[rejected], args.beta) + args.nll * nll,
                   "train/accuracy": (margin > 0).float(), "train/margin": margin, "train/nll": nll}
    return {name: mean_by_item(values, items) for name, values in metrics.items()}


def holdout_metrics(model, items, args, process):
    """What the critic says of held-out pairs: does it rank them, and at which level are answers and other turns?

    Bradley-Terry on sums leaves the level of the answering turn free when every dialogue has exactly one; a critic that
    has drifted there teaches the policy never to answer, so both levels are reported for chosen and rejected.
    """
    if not items:
        return {}
    rows = [row for item in items for row in item.rows]
    scored = share_scores(model, rows, lambda group: turn_worths(model, group, args, process.device)[:2], process,
                          args.micro_batch_size)
    pairs = batch_pairs(items, [len(item.rows) for item in items])
    worth = [numpy.mean(turns) if args.head == "value" else sum(turns) for turns, _ in scored]  # as the loss has it
    margins = numpy.array([worth[chosen] - worth[rejected] for chosen, rejected in pairs])
    metrics = {"holdout/accuracy": float((margins > 0).mean()), "holdout/pairs": len(pairs)}
    if args.head == "logratio":
        metrics["holdout/loss"] = float(numpy.logaddexp(0, -args.beta * margins).mean())
    turns = []  # of both sides of each pair: (name, advantage, tokens)
    for pair in pairs:
        for side, number in zip(("chosen", "rejected"), pair, strict=True):
            for turn, (value, tokens) in enumerate(zip(*scored[number], strict=True)):
                answer = rows[number].answered and turn == rows[number].turns - 1
                turns.append((f"{'answer' if answer else 'other'}_{side}", value, tokens))
    names, values, lengths = map(numpy.array, zip(*turns, strict=True))
    if lengths.std() > 0 and values.std() > 0:
        metrics["holdout/length_correlation"] = float(numpy.corrcoef(values, lengths)[0, 1])
    return metrics | {f"holdout/{name}": float(values[names == name].mean()) for name in sorted({*names})}


def packed_rows(tokenizer, messages, texts, finished, max_length, look=None):
    """Rows [prompt | a1 | a2 | ...] that hold the candidate `texts` of one state; None if the longest does not fit.

    A candidate is its text and, when finished, the end-of-turn token: cut ones keep none, so nobody learns to stop there.
    A vision-language critic numbers positions its own way, so each candidate has a row of its own.
    """
    end = end_of_turn(tokenizer)[0]
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    turns = [ids + [end] * done for ids, done in zip(encoded, finished, strict=True)]
    longest = max(map(len, turns))
    row, _ = encode_row(tokenizer, messages, [True] * len(messages), max_length - longest, look)
    if row is None:
        return None
    rows = []
    for ids in turns:
        if not rows or look or len(rows[-1].ids) + len(ids) > max_length:
            rows.append(Row(list(row.ids), [-1] * len(row.ids), 0, prompt=len(row.ids), look=look))
        rows[-1].turn_index += [rows[-1].turns] * len(ids)
        rows[-1].ids += ids
        rows[-1].turns += 1
    for row in rows:
        row.prompt *= row.turns > 1  # a row of one turn is an ordinary causal row and needs no mask
    return rows


def exact(head):
    """An output layer that computes in fp32: rounded to bf16, as on GPUs, it hides advantages as small as a training step."""
    if head.weight.dtype == torch.float32:
        return head
    head = copy.deepcopy(head).float()  # a copy, since it may be the input embeddings, too
    head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    return head


def critic_flags(path):
    """What a critic was trained with; stops if the directory holds none."""
    run = Path(path) / "run.json"
    if not run.is_file():
        raise SystemExit(f"{path}: found no run.json, expected a directory written by train_critic.py")
    check_checkpoint(path)
    flags = read_run(run)["flags"]
    if not {"head", "normalise", "privileged", "max_length", "model"} <= flags.keys():
        raise SystemExit(f"{path}: found a policy's run.json, expected a critic written by train_critic.py")
    return flags


class Critic:
    """A trained critic as a scorer: the advantage of each candidate turn of a state (Eq. 3)."""

    def __init__(self, path, device, reference="privileged", dtype=None):
        flags = critic_flags(path)
        self.head, self.normalise, self.privileged = flags["head"], flags["normalise"], flags["privileged"]
        self.reference, self.max_length, self.device = reference, flags["max_length"], device or default_device()
        self.sight = Sight(path, self.privileged) if self.head == "value" and sees_pictures(path) else None
        self.tokenizer = self.sight.processor.tokenizer if self.sight else load_tokenizer(path)
        kind = "AutoModelForTokenClassification" if self.head == "value" else "AutoModelForCausalLM"
        kind = vision_value_class(path) if self.sight else kind
        self.model = load_model(path, self.device, kind, dtype).eval()
        self.reference_model = None
        if self.head == "logratio":
            self.reference_model = load_model(flags["model"], self.device, dtype=dtype).eval()
            for model in (self.model, self.reference_model):
                model.set_output_embeddings(exact(model.get_output_embeddings()))
        else:
            self.model.score = exact(self.model.score)

    def score(self, task, messages, texts, finished):
        """One advantage per text; equal texts are scored once. None where a state is too long to be scored."""
        distinct = list(dict.fromkeys(zip(texts, finished, strict=True)))
        view = critic_messages(task, messages, self.privileged)
        look = self.sight and self.sight.look(task, messages)
        rows = packed_rows(self.tokenizer, view, *zip(*distinct, strict=True), self.max_length, look)
        if rows is None:
            return None
        reference_rows = rows
        if self.reference == "plain":  # official ranking: the reference does not see the solution
            reference_rows = packed_rows(self.tokenizer, messages, *zip(*distinct, strict=True), self.max_length)
        by_text = dict(zip(distinct, self._advantages(rows, reference_rows), strict=True))
        return [by_text[candidate] for candidate in zip(texts, finished, strict=True)]

    def score_dialogue(self, episode):
        """The advantage of each agent turn of an episode, in one forward; None for turns that it is too long for."""
        row, dropped = dialogue_row(self.tokenizer, episode, self.privileged, self.max_length, self.sight)
        return [None] * dropped + self._advantages([row], [row]) if row else [None] * (len(episode["dialogue_history"]) // 2)

    @torch.no_grad()
    def _advantages(self, rows, reference_rows):
        """The turns of `rows` in order, scored one row at a time; the reference may see them in other rows."""
        if self.head == "value":
            values, _ = turn_scores(self.model, rows, self.device, forward_fn=forward_values)
            return turns_in_order(values, rows).tolist()
        sums, counts = (turns_in_order(table, rows) for table in turn_scores(self.model, rows, self.device))
        references = turns_in_order(turn_scores(self.reference_model, reference_rows, self.device)[0], reference_rows)
        # one turn a row: what a candidate is worth has nothing to do with the tokens of its rivals
        return advantage(sums[:, None], references[:, None], counts[:, None], self.normalise)[:, 0].tolist()


def states_of(episodes):
    """Every agent turn as a state: (episode, turn, what the agent saw before it)."""
    for episode in episodes:
        history, prompt = episode["dialogue_history"], instructions(episode["task"], episode.get("agent_prompt"))
        for place, message in enumerate(history):
            if message["role"] == "assistant":
                yield episode, place // 2, agent_messages(episode["task"], history[:place], prompt)


CREDIT_KINDS = ("all", "question_question", "answer_answer", "answer_question_known", "answer_question_unknown")


def credit_pairs(credits, known):
    """(kind, better, worse) of the candidates of one state whose true worth differs, by their places."""
    for a, first in enumerate(credits):
        for b, second in enumerate(credits):
            if first.worth > second.worth:
                answers = ("answer" in first.kind) + ("answer" in second.kind)
                kind = {0: "question_question", 2: "answer_answer",
                        1: "answer_question_known" if known else "answer_question_unknown"}[answers]
                yield kind, a, b


def credit_auc(critic, episodes, policy, seed, max_states=200, num_candidates=16):
    """Within-state AUC of the critic's credit on toy tasks: how often the truly better of two candidates scores higher."""
    states = list(states_of(episodes))
    random.Random(derive_seed(seed, "credit")).shuffle(states)
    states = states[:max_states]
    spoken = policy.speak([messages for _, _, messages in states], num_candidates,
                          [derive_seed(seed, "credit", number) for number in range(len(states))])
    hits = {kind: [] for kind in CREDIT_KINDS}
    for (episode, turn, messages), utterances in zip(states, spoken, strict=True):
        texts, finished = zip(*dict.fromkeys(utterances), strict=True)
        scores = critic.score(episode["task"], messages, texts, finished)
        if scores is None:  # too long to be scored
            continue
        history = episode["dialogue_history"][:2 * turn + 1]
        credits = [toy_credit(episode["task"], history + [{"role": "assistant", "content": text}], turn) for text in texts]
        known = not any(credit.kind in ("useful question", "early answer") for credit in credits)
        for kind, better, worse in credit_pairs(credits, known):
            hit = 0.5 * (scores[better] == scores[worse]) + (scores[better] > scores[worse])
            hits[kind].append(hit)
            hits["all"].append(hit)
    return {f"credit_auc/{kind}": float(numpy.mean(found)) for kind, found in hits.items() if found}


def print_report(output, held_episodes, args, device):
    """The last lines of a run: what the critic says of held-out pairs, and on toy tasks how true its turn credit is."""
    report = {}
    for _, line in read_jsonl(output / "metrics.jsonl"):
        report |= {name: value for name, value in line.items() if name.startswith(("holdout/", "credit_auc/"))}
    toy = [episode for episode in held_episodes if has_toy_credit(episode["task"])]
    if toy and not any(name.startswith("credit_auc/") for name in report) and not sees_pictures(args.model):
        policy = LocalSpeaker(args.model, max_new_tokens=256, device=device, dtype=args.dtype)
        credit = credit_auc(Critic(output, device, dtype=args.dtype), toy, policy, args.seed)
        with open(output / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": line["step"] + 1} | credit) + "\n")
        report |= credit
    for name, value in report.items():
        print(f"{name:40s} {value:.4f}")


# -----------------------------------------------------------------------------
# Command line


def add_training_flags(parser, epochs):
    """The flags that both trainers share."""
    # data
    parser.add_argument("--episodes", nargs="+", required=True, help="episode files of collect.py, or official ones")
    parser.add_argument("--model", required=True, help="model to start from; also the frozen reference")
    parser.add_argument("--output", required=True, help="checkpoint directory to write")
    parser.add_argument("--pairs", choices=("best_vs_rest", "success_vs_failure", "all"), default="best_vs_rest",
                        help="which episodes of a task are paired")
    parser.add_argument("--success_reward", type=float, default=0.9, help="least reward of a page that counts as a success")
    parser.add_argument("--margin", type=float, default=0.0, help="least difference of reward in a pair (frontend: 0.1)")
    parser.add_argument("--max_length", type=int, default=8192, help="tokens of a dialogue; longer ones lose oldest turns")
    parser.add_argument("--agent_prompt", help="file with the agent's instructions in episodes that do not tell them, such as"
                        " the official ones (default: ours)")
    # algorithm: the defaults are the paper's Table 5
    parser.add_argument("--beta", type=float, default=0.1, help="beta of Eq. (2) and Eq. (4)")
    parser.add_argument("--nll", type=float, default=0.01, help="weight of the likelihood of the chosen side")
    # optimisation
    parser.add_argument("--lr", type=float, default=2e-7, help="peak learning rate")
    parser.add_argument("--epochs", type=int, default=epochs, help="passes over the data (default: 4; --method sweet: 1)")
    parser.add_argument("--max_steps", type=int, help="stop after so many steps, for short runs")
    parser.add_argument("--batch_size", type=int, default=8, help="items per step over all processes")
    parser.add_argument("--micro_batch_size", type=int, default=1, help="items per backward; 1 wastes nothing on padding")
    parser.add_argument("--warmup", type=float, default=0.03, help="share of the steps that warm up")
    parser.add_argument("--max_norm", type=float, default=1.0, help="gradient clipping")
    add_dtype_flag(parser)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=None,
                        help="recompute activations in the backward (default: on GPUs)")
    parser.add_argument("--save_every", type=int, default=200, help="steps between saved training states")
    parser.add_argument("--seed", type=int, default=0, help="of data order, hold-out and sampling")


TRAINING_COST_FLAGS = ("micro_batch_size", "sampling_batch_size", "checkpointing", "save_every")


def parse_args(argv=None):
    parser = flag_parser(__doc__)
    add_training_flags(parser, epochs=4)
    parser.add_argument("--privileged", choices=("ground_truth", "none"), default="ground_truth",
                        help="what the critic sees besides the dialogue")
    parser.add_argument("--normalise", choices=("turn", "trajectory", "none"), default="turn",
                        help="mean over the turn's tokens (paper), over the trajectory's (official code), or the sum")
    parser.add_argument("--head", choices=("logratio", "value"), default="logratio",
                        help="advantage as log-ratio (paper), or a regression head on the outcome")
    parser.add_argument("--share", choices=("state", "pair"), default="pair", help="state: a task's dialogues, which start from"
                        " one state, are computed once for all their pairs, which are then in the same step")
    parser.add_argument("--holdout", type=float, default=0.05, help="share of tasks to report on and not to train on")
    args = parser.parse_args(argv)
    check_training_flags(args)
    return args


def check_training_flags(args):
    require_at_least(1, args, "batch_size", "micro_batch_size", "epochs", "max_length", "save_every", "max_steps")
    require_at_least(0, args, "lr", "beta", "nll", "margin", "max_norm", "success_reward")
    for name in ("warmup", "holdout"):
        if not 0 <= getattr(args, name, 0) < 1:
            raise SystemExit(f"found --{name} {getattr(args, name)}, expected a share of at least 0 and below 1")
    if not 0 <= args.seed < 2**63:
        raise SystemExit(f"found --seed {args.seed}, expected a number from 0 up, below 2^63")


def main(args):
    process = join_processes(always=True)
    episodes, failed = load_episodes(args.episodes, args.agent_prompt)
    groups = group_by_task(episodes)
    sight = Sight(args.model, args.privileged) if args.head == "value" and sees_pictures(args.model) else None
    tokenizer = sight.processor.tokenizer if sight else load_tokenizer(args.model)
    training, held_out = split_tasks(groups, args.holdout, args.seed)
    items, report = pair_items(tokenizer, groups, training, args, args.privileged, sight)
    held_items, held_report = pair_items(tokenizer, groups, held_out, args, args.privileged, sight)
    if process.leads:
        print(f"{len(episodes)} episodes of {len(groups)} tasks ({failed} failed ones left out): {report['pairs']} pairs from"
              f" {report['tasks_with_pairs']} tasks, {report['tasks_without']} tasks without mixed outcome,"
              f" {held_report['pairs']} pairs of {len(held_out)} tasks held out; {report['turns_dropped']} turns dropped and"
              f" {report['too_long']} episodes left out for --max_length {args.max_length}")
    if not items:
        raise SystemExit(f"{' '.join(args.episodes)}: found no task with a better and a worse episode, expected at least"
                         " one; collect more episodes per task, or try --pairs all")
    output = Path(args.output)
    claim_output(output / "run.json", args, [*args.episodes, args.agent_prompt, *records(args.model)], process,
                 TRAINING_COST_FLAGS)
    if not is_complete(output, process):
        torch.manual_seed(args.seed)  # a value head starts from random weights, the same on every rank
        if sight:
            model = load_trainable(args.model, process, vision_value_class(args.model))
        elif args.head == "value":
            model = load_trainable(args.model, process, "AutoModelForTokenClassification", num_labels=1)
            model.dropout.p = 0.0  # ranks would draw different masks than one process
        else:
            model = load_trainable(args.model, process)
        shard(model, process, args.checkpointing, args.dtype)
        if args.head == "logratio":
            rows = [row for item in items + held_items for row in item.rows]
            score_rows(model, rows, process, args.micro_batch_size)
        train(model, items, lambda model, batch: critic_objective(model, batch, args, process.device), args, process,
              lambda: holdout_metrics(model, held_items, args, process))
        save_checkpoint(output, model, sight.processor if sight else tokenizer, episodes[0].get("agent_prompt"), process)
        del model
    if process.leads:
        print_report(output, [episode for name in held_out for episode in groups[name]], args, process.device)


if __name__ == "__main__":
    launch(main, parse_args())
