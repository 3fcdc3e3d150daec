r"""Train the critic: an advantage for each turn from dialogues' outcomes (SWEET-RL section 4.2).

How it works:
  1. episodes of one task are paired by outcome: a better (chosen) and a worse one (rejected);
  2. critic and reference model read both with the solution, which the policy never sees, in front;
  3. the advantage of a turn is the mean log-ratio of its tokens, critic to reference (`advantage`);
  4. a Bradley-Terry loss on the sums of both dialogues' advantages trains it (`critic_loss`).

    python train_critic.py --episodes episodes.jsonl --model toy/base --output critic --lr 1e-4
    torchrun --nproc_per_node 8 train_critic.py --episodes episodes.jsonl \
        --model meta-llama/Llama-3.1-8B-Instruct --output critic

Reads: episodes (collect.py, or the official file). Writes: a checkpoint directory with run.json and
metrics.jsonl. Down to `main`, the file follows the method; rows in detail, the training loop and
reports come after it. Packing, sharding and checkpoints are in training/.
Letters in shapes: B pairs, R rows, S turns, T tokens, V vocabulary.

To change the loss: `critic_loss`, which `holdout_metrics` calls, too; the advantage: `advantage`
and NORMALISERS; the pairs: `pair_episodes`; what the critic reads: `colbench.critic_messages`.
Another kind of critic is an objective like `value_objective`, and a branch wherever `head` is
compared: here, in `train_policy.check_critic`, and HEADS of the report.

Differences from the paper: none in the equations. From the official code: the mean is per turn, not
over the trajectory (`--normalise trajectory` is theirs); the NLL term of the paper's Table 5 is on
(`--nll 0` is theirs); the end-of-turn token is scored; long dialogues lose their oldest turns, not
their answer. The paper's frontend critic is `--head value` with a vision-language `--model`.
"""

import argparse
import copy
import dataclasses
import functools
import itertools
import json
import math
import random
import time
import typing
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from tqdm import tqdm

from colbench import (
    ANSWER_MARKER, agent_messages, critic_messages, custom_prompt, derive_seed, encode_dialogue,
    end_of_turn, first_request, group_by_task, load_episodes, prompt_of_episode, read_jsonl,
    states_of, write_atomically)
from speakers.interface import SpeakerSettings
from speakers.local import (
    LocalSpeaker, default_device, load_model, load_tokenizer, refuse_changing_positions)
from speakers.lora import LINEAR_LAYERS, load_matrices, matrices_off
from speakers.names import check_checkpoint
from speakers.vision import Sight, sees_pictures, vision_value_class
from stages.flags import (
    add_dtype_flag, flag_parser, refuse_flag, refuse_ignored, require_at_least)
from stages.processes import join_processes, launch
from stages.record import claim_output, file_hash, read_run, records
from toy.world import credit_auc, has_toy_credit
from training.checkpoints import (
    REFERENCE, is_complete, load_state, remove_leftovers, save_checkpoint, save_state)
from training.packing import forward_values, in_packs, pack_limit, pack_rows, token_logprobs
from training.ranks import (
    check_same_items, items_digest, load_trainable, score_on_all_ranks, shard, shard_settings,
    split_over_ranks, trained_parameters)

# -----------------------------------------------------------------------------
# The equations


def turn_logprobs(logprobs, turn_index, turns):
    """(sums, counts) of each turn's token log-probs: (R, T), (R, T) -> (R, S), (R, S).

    logprobs[r, t] = log_softmax(logits[r, t - 1])[ids[r, t]]; `token_logprobs` computes it for
    agent tokens only. Tokens with turn_index -1 belong to no agent turn and add nothing.
    """
    member = turn_index >= 0
    index = turn_index.clamp(min=0)
    zeros = logprobs.new_zeros(len(logprobs), turns)
    sums = zeros.scatter_add(1, index, logprobs * member)
    counts = zeros.scatter_add(1, index, member.to(logprobs))
    return sums, counts


# name -> L of Eq. (3), from the token counts of the turns, (R, S). A ranked candidate is a row of
# one turn, where `trajectory` equals `turn`
NORMALISERS = {
    "turn": lambda counts: counts,
    "trajectory": lambda counts: counts.sum(1, keepdim=True),  # the official code
    "none": torch.ones_like,  # the ablation of Table 3
}


def advantage(sums, reference_sums, counts, normalise="turn"):
    """SWEET-RL Eq. (3): A(o_t, a_t, c) =
    1/L sum_l [log pi_theta(a_l | o_t, a_<l, c) - log pi_ref(a_l | o_t, a_<l, c)].

    All arguments are (R, S): turn sums of log-probs under critic and reference, and the tokens of
    each turn. A turn without tokens gets 0, and so do those that a shorter dialogue does not have.
    """
    ratio = sums - reference_sums  # log pi_theta - log pi_ref, summed over l
    length = NORMALISERS[normalise](counts)  # L
    return ratio / torch.where(counts > 0, length, 1)


def critic_loss(chosen, rejected, beta):
    """SWEET-RL Eq. (2): -log sigma(sum_t beta A(o+_t, a+_t, c) - sum_t beta A(o-_t, a-_t, c)).

    Advantages of all turns of both dialogues, padded with 0, (B, S) and (B, S) -> (B,).
    """
    return -F.logsigmoid(beta * chosen.sum(1) - beta * rejected.sum(1))


# -----------------------------------------------------------------------------
# Pairs of episodes


SUCCESS_REWARD = 0.9  # of a page, which no test passes or fails; the paper names no number


def split_tasks(groups, holdout, seed):
    """(task ids to train on, held out): whole tasks, by a seeded shuffle of their ids."""
    task_ids = sorted(groups)
    random.Random(derive_seed(seed, "holdout")).shuffle(task_ids)
    count = min(math.ceil(holdout * len(task_ids)), len(task_ids) - 1)  # one is left to train on
    return task_ids[count:], task_ids[:count]


def succeeded(episode, success_reward):
    """Whether the answer passed all tests; a page, which has none, needs `success_reward`."""
    if episode["success"] is None:
        return episode["reward"] >= success_reward
    return episode["success"]


def pair_episodes(group, rule="best_vs_rest", margin=0.0, success_reward=SUCCESS_REWARD):
    """(chosen, rejected) episodes of one task; chosen ones have a reward at least `margin` greater.

    best_vs_rest (official code): the best episode, the first of equals, against every worse one; a
    backend task without success gives no pair. success_vs_failure: every success against every
    failure. all: every two episodes of different outcome.
    """
    if rule == "best_vs_rest":
        best = max(group, key=lambda episode: episode["reward"])
        failed = best["success"] is False  # a page has None: its best is always chosen
        chosen = [] if failed else [best]
        rejected = group
    elif rule == "success_vs_failure":
        chosen = [episode for episode in group if succeeded(episode, success_reward)]
        rejected = [episode for episode in group if not succeeded(episode, success_reward)]
    elif rule == "all":
        chosen, rejected = group, group
    else:
        raise ValueError(f"found the rule {rule!r} for pairs, expected 'best_vs_rest',"
                         " 'success_vs_failure' or 'all'")
    return [(better, worse) for better in chosen for worse in rejected
            if better["reward"] > worse["reward"]
            and better["reward"] - worse["reward"] >= margin - 1e-9]  # 0.3 - 0.2 < 0.1 in floats


# -----------------------------------------------------------------------------
# What the model reads: rows of tokens


@dataclasses.dataclass(eq=False)  # two episodes may hold the same tokens and are still two rows
class Row:
    """One sequence of tokens to score: a dialogue, or a prompt and one candidate turn."""

    ids: list  # T token ids
    turn_index: list  # T turn indices, -1 where the token is not an agent token
    turns: int
    prompt_length: int = 0  # of a candidate: the tokens before its turn; 0: a dialogue
    dropped: int = 0  # oldest turns that max_length left out
    reference: list | None = None  # S log-prob sums under the reference model
    outcome: float | None = None  # of a dialogue: 1 or 0; of a page, its reward
    answered: bool = False  # whether the last turn is marked as the answer
    # returns the inputs up to the first request, with pictures (vision-language critic only)
    opening: typing.Callable | None = None


@dataclasses.dataclass
class Item:
    """What a batch counts as one: rows, and which of them are compared.

    By default one pair, so two rows. With `--share state` all pairs of a state (critic and
    multi-turn DPO: of a task); a row in several pairs is computed once. In supervised training one
    dialogue, without pairs. To weight pairs, change `weight` (of an item in its batch) and
    `mean_by_item` (of a pair in its item).
    """

    rows: list
    pairs: list  # (chosen, rejected): indices into rows

    @property
    def weight(self):
        return max(1, len(self.pairs))


class Reader(typing.NamedTuple):
    """How dialogues become rows."""

    tokenizer: typing.Any
    privileged: str  # "ground_truth": the solution stands in front; "none"
    max_length: int
    sight: Sight | None = None  # of a vision-language critic


def dialogue_row(reader, episode):
    """The row of an episode as the reader sees it; None if its last turn does not fit."""
    task, history = episode["task"], episode["dialogue_history"]
    agent_turns = [index for index, m in enumerate(history) if m["role"] == "assistant"]
    view = agent_messages(history[:agent_turns[-1] + 1], prompt_of_episode(episode))
    messages = critic_messages(task, view, reader.privileged)
    finished = [history[index].get("finished") is not False for index in agent_turns]
    opening = reader.sight.opening_reader(task, view) if reader.sight else None
    row = encode_row(reader, messages, finished, opening)
    if row:
        row.outcome = episode["reward"]
        if episode["success"] is not None:
            row.outcome = float(episode["success"])
        row.answered = ANSWER_MARKER in history[agent_turns[-1]]["content"]
    return row


def pair_items(reader, pairs_by_task, share):
    """(items, counts) of (chosen, rejected) episodes: an item is a pair, or all pairs of a task."""
    counts = {"pairs": 0, "tasks_with_pairs": 0, "tasks_without": 0,
              "turns_dropped": 0, "too_long": 0}
    items = []
    for pairs in pairs_by_task:
        if pairs:
            counts["tasks_with_pairs"] += 1
        else:
            counts["tasks_without"] += 1
        rows = {}  # sample -> row: each episode is encoded once, however many pairs it is in
        for episode in itertools.chain(*pairs):
            if episode["sample"] in rows:
                continue
            row = dialogue_row(reader, episode)
            rows[episode["sample"]] = row
            if row:
                counts["turns_dropped"] += row.dropped
            else:
                counts["too_long"] += 1
        row_pairs = [(rows[chosen["sample"]], rows[rejected["sample"]])
                     for chosen, rejected in pairs]
        row_pairs = [(chosen, rejected) for chosen, rejected in row_pairs if chosen and rejected]
        counts["pairs"] += len(row_pairs)
        for group in group_pairs(row_pairs, share):
            used = list(dict.fromkeys(itertools.chain(*group)))
            index = {row: i for i, row in enumerate(used)}
            items.append(Item(used, [(index[a], index[b]) for a, b in group]))
    return items, counts


# -----------------------------------------------------------------------------
# The objective


class CriticSettings(typing.NamedTuple):
    head: str
    normalise: str
    beta: float
    nll: float


def critic_objective(model, items, settings):
    """Eq. (2) over Eq. (3), with the NLL term: metrics of a micro-batch, name -> (items,).

    `TrainingLoop.optimise` minimises "train/loss". An item's value is the mean over its pairs, and
    an item weighs as much as it has pairs, so that every pair of a batch counts the same.
    """
    rows = [row for item in items for row in item.rows]
    chosen, rejected = pair_indices(items, model.device)  # indices into rows, (B,) each
    sums, counts = turn_sums(model, rows)  # (R, S): log pi_theta of each turn, and its tokens
    reference_sums = reference_table(rows, sums)  # (R, S): log pi_ref, computed before step 1
    advantages = advantage(sums, reference_sums, counts, settings.normalise)
    losses = critic_loss(advantages[chosen], advantages[rejected], settings.beta)
    tokens = counts.sum(1).clamp(min=1)
    nll = (-sums.sum(1) / tokens)[chosen]  # mean over the agent tokens of the chosen dialogue
    losses = losses + settings.nll * nll
    margin = advantages[chosen].sum(1) - advantages[rejected].sum(1)
    metrics = {"train/loss": losses, "train/accuracy": accuracy(margin),
               "train/margin": margin, "train/nll": nll}
    return {name: mean_by_item(values, items) for name, values in metrics.items()}


# -----------------------------------------------------------------------------
# The run


def main(args):
    process = join_processes(training=True)
    output = Path(args.output)
    settings = CriticSettings(args.head, args.normalise, args.beta, args.nll)

    # 1. pairs of episodes, by outcome
    episodes, failed = load_episodes(args.episodes, args.agent_prompt)
    refuse_page_flags(args, episodes)
    reader = open_reader(args)
    inputs = [*args.episodes, args.agent_prompt, *records(args.model)]
    claim_output(output / "run.json", vars(args), inputs, process, COST_FLAGS)
    groups = group_by_task(episodes)
    train_tasks, held_out_tasks = split_tasks(groups, args.holdout, args.seed)

    def pairs_of(task_ids):
        return [pair_episodes(groups[task_id], args.pairs, args.margin, args.success_reward)
                for task_id in task_ids]

    # 2. what the critic reads: the dialogues with the solution in front
    items, counts = pair_items(reader, pairs_of(train_tasks), args.share)
    held_items, held_counts = pair_items(reader, pairs_of(held_out_tasks), args.share)
    if process.leads:
        print(f"{len(episodes)} episodes of {len(groups)} tasks ({failed} failed ones omitted):"
              f" {counts['pairs']} pairs from {counts['tasks_with_pairs']} tasks,"
              f" {counts['tasks_without']} tasks without mixed outcome, {held_counts['pairs']}"
              f" pairs of {len(held_out_tasks)} tasks held out; {counts['turns_dropped']} turns"
              f" dropped and {counts['too_long']} episodes omitted for --max_length"
              f" {args.max_length}")
    if not items:
        advice = length_advice(counts, args.max_length)
        advice = advice or "; collect more episodes per task"
        if args.pairs != "all":
            advice += ", or try --pairs all"
        if args.margin:
            advice += f", or lower --margin {args.margin}"
        if held_items:
            advice = f"; lower --holdout: all {held_counts['pairs']} pairs are of held-out tasks"
        raise SystemExit(f"{' '.join(args.episodes)}: found no task with a better and a worse"
                         f" episode, expected at least one{advice}")
    check_same_items(items + held_items, process)

    if not is_complete(output, args.max_steps, process):
        # 3. the model. No step has been taken yet: now it is pi_ref
        model = load_critic(args, reader, process)
        if args.head == "value":
            objective = functools.partial(value_objective, model)
        else:
            precompute_reference(model, items + held_items, process, args.micro_batch_size,
                                 output / REFERENCE)
            objective = functools.partial(critic_objective, model, settings=settings)

        # 4. steps
        loop = TrainingLoop(model, items, loop_settings(args), process)
        for step, batch in loop.steps():
            metrics = loop.optimise(batch, objective)
            if loop.ends_epoch(step):
                metrics |= holdout_metrics(model, held_items, settings, process,
                                           args.micro_batch_size)
            loop.log_and_save(step, metrics)
        tokenizer = reader.sight.processor if reader.sight else reader.tokenizer
        loop.save(tokenizer, custom_prompt(episodes))
        del model, loop, objective

    # 5. how the critic does on held-out tasks
    if process.leads:
        held_episodes = [episode for task_id in held_out_tasks for episode in groups[task_id]]
        print_report(output, held_episodes, args, process.device)


# The algorithm ends here. What follows is how it is computed, saved and reported:
#   encode_row, candidate_rows   messages -> token ids and turn indices
#   turn_sums                    one forward: log-probs of agent tokens, summed over turns
#   TrainingLoop.optimise        losses of micro-batches -> one step
#   Critic.advantages            Eq. (3) for candidates, as train_policy.py asks for it
# And in training/, which a reader of the method can skip:
#   packing.py                   candidates share the computation of their prompt; equal results
#   ranks.py, checkpoints.py     sharding, sharing the work; what from_pretrained and a resume need
# -----------------------------------------------------------------------------
# Rows, items and models in detail


def encode_row(reader, messages, finished, opening=None):
    """The row of messages; a dialogue that is too long loses its oldest turns.

    After the first user message, whole turns are dropped, each with the human's reply to it, never
    part of a scored turn. The row is None if the last turn does not fit. `opening` gives what a
    vision-language critic reads in place of the text before the first turn.
    """
    first = first_request(messages) + 1
    if opening:
        opening_ids = opening()["input_ids"][0].tolist()
        text_length = len(encode_dialogue(reader.tokenizer, messages[:first])[0])
    for dropped in range((len(messages) - first) // 2 + 1):
        kept = messages[:first] + messages[first + 2 * dropped:]
        ids, turn_index = encode_dialogue(reader.tokenizer, kept, finished[dropped:])
        if opening:
            ids = opening_ids + ids[text_length:]
            turn_index = [-1] * len(opening_ids) + turn_index[text_length:]
        if len(ids) <= reader.max_length:
            # counted, since a turn that was cut may be empty: nothing but spaces up to the limit
            turns = sum(message["role"] == "assistant" for message in kept)
            return Row(ids, turn_index, turns, dropped=dropped, opening=opening)
    return None


def candidate_rows(reader, messages, candidates, opening=None):
    """A row for each (text, finished) candidate of one state, all after the same prompt.

    None if the longest does not fit. A candidate is its text and, when finished, the end-of-turn
    token: one that was cut keeps none, so nobody learns to stop there.
    """
    end_id, _ = end_of_turn(reader.tokenizer)
    texts = [text for text, _ in candidates]
    turns = reader.tokenizer(texts, add_special_tokens=False)["input_ids"]
    turns = [ids + [end_id] if finished else ids
             for ids, (_, finished) in zip(turns, candidates, strict=True)]
    room = reader.max_length - max(len(ids) for ids in turns)
    prompt = encode_row(reader._replace(max_length=room), messages, [True] * len(messages), opening)
    if prompt is None:
        return None
    length = len(prompt.ids)
    return [Row(prompt.ids + ids, [-1] * length + [0] * len(ids), 1, prompt_length=length,
                dropped=prompt.dropped, opening=opening) for ids in turns]


def group_pairs(pairs, share):
    """Which pairs of a state make one item of a batch: each alone, or all together."""
    if share == "pair":
        return [[pair] for pair in pairs]
    if share == "state":
        return [pairs] if pairs else []
    raise ValueError(f"found share {share!r}, expected 'pair' or 'state'")


def reference_table(rows, like):
    """The rows' log-prob sums under pi_ref as one tensor of the shape of `like`, (R, S)."""
    table = torch.zeros(like.shape)
    for index, row in enumerate(rows):
        table[index, :row.turns] = torch.tensor(row.reference)
    return table.to(like)


def pair_indices(items, device):
    """(chosen, rejected): indices into the rows of all items, (B,) each."""
    pairs, start = [], 0
    for item in items:
        pairs += [(start + chosen, start + rejected) for chosen, rejected in item.pairs]
        start += len(item.rows)
    return torch.tensor(pairs, device=device).unbind(1)


def accuracy(margin):
    """1 where the chosen side is ahead, else 0; a tie, such as before step 1, is one half."""
    tie = margin.abs() < 1e-6  # rounding
    return torch.where(tie, 0.5, (margin > 0).float())


def mean_by_item(values, items):
    """(B,) -> (items,): the mean over each item's pairs."""
    parts = values.split([len(item.pairs) for item in items])
    return torch.stack([part.mean() for part in parts])


def length_advice(counts, max_length):
    """What to do where nothing is left to train on, if that may be due to the length, or ""."""
    too_long = counts.get("too_long", 0) + counts.get("pairs_too_long", 0)
    if not too_long:
        return ""
    return f"; raise --max_length {max_length}: {too_long} episodes or pairs are longer"


def open_reader(args):
    """The reader of the critic's view; a vision-language critic also has a processor."""
    sight = None
    if args.head == "value" and sees_pictures(args.model):
        if args.share == "state":
            raise SystemExit("found --share state with a vision-language critic, expected --share"
                             " pair: its rows are computed one by one")
        sight = Sight(args.model, args.privileged)
    refuse_changing_positions(args.model, args.max_length)
    tokenizer = sight.processor.tokenizer if sight else load_tokenizer(args.model)
    return Reader(tokenizer, args.privileged, args.max_length, sight)


def load_critic(args, reader, process):
    """The model to train, sharded over the ranks."""
    if reader.sight:
        model = load_trainable(args, process, vision_value_class(args.model))
    elif args.head == "value":
        model = load_trainable(args, process, "AutoModelForTokenClassification", num_labels=1)
        model.dropout.p = 0.0  # ranks would draw different masks than one process
    elif args.head == "logratio":
        model = load_trainable(args, process)
    else:
        raise ValueError(f"found head {args.head!r}, expected 'logratio' or 'value'")
    shard(model, process, shard_settings(args))
    return model


# -----------------------------------------------------------------------------
# Log-probs of turns, and those of the reference


def turn_sums(model, rows, packs_at_once=None):
    """(sums, counts): log-prob sums and token counts of the rows' turns, (R, S) each."""
    def forward(model, packs):
        logprobs, turn_index = token_logprobs(model, packs)
        return turn_logprobs(logprobs, turn_index, max(pack.turns for pack in packs))

    return in_packs(forward, model, rows, packs_at_once)


def turn_values(model, rows, packs_at_once=None):
    """(values, exists) of a value head at the rows' turns, (R, S) each."""
    return in_packs(forward_values, model, rows, packs_at_once)


def distinct_rows(items):
    return list(dict.fromkeys(row for item in items for row in item.rows))


def precompute_reference(model, items, process, micro_batch_size=1, path=None):
    """Fill `reference` of every row: its turns' log-prob sums under pi_ref.

    The reference model is the one that training starts from, so this comes before the first step.
    The sums are kept at `path`, where a resumed run reads them.
    """
    rows, digest = distinct_rows(items), items_digest(items)
    sums = load_reference(path, digest, process) if path else None
    if sums is None:
        found = score_on_all_ranks(model, rows, functools.partial(turn_sums, model), process,
                                   micro_batch_size)
        sums = [sums_of_row for sums_of_row, _ in found]
        if path and process.leads:
            write_atomically(path, json.dumps({"items": digest, "sums": sums}))
    for row, sums_of_row in zip(rows, sums, strict=True):
        row.reference = sums_of_row


def load_reference(path, digest, process):
    """The leader's saved sums if they belong to the same items, else None; equal on all ranks."""
    found = None
    if process.leads and path.is_file():
        saved = json.loads(path.read_text())
        if saved["items"] == digest:
            found = saved["sums"]
    return process.from_leader(found)


# -----------------------------------------------------------------------------
# The training loop of both trainers


class LoopSettings(typing.NamedTuple):
    output: Path
    lr: float
    epochs: int
    batch_size: int
    micro_batch_size: int
    max_steps: int | None
    warmup: float
    max_norm: float
    length_window: int
    save_minutes: float
    seed: int


def loop_settings(args):
    values = {name: getattr(args, name) for name in LoopSettings._fields}
    values["output"] = Path(args.output)
    return LoopSettings(**values)


class TrainingLoop:
    """The order of the items, the optimiser, the log and the saved states."""

    def __init__(self, model, items, settings, process):
        """Reads the state of an earlier run, if it left one."""
        self.model, self.items, self.settings, self.process = model, items, settings, process
        self.optimizer = torch.optim.AdamW(
            trained_parameters(model), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0,
            fused=process.device != "cpu")  # the default takes 4 more bytes a parameter on a GPU
        self.steps_per_epoch = math.ceil(len(items) / settings.batch_size)
        self.batches = plan_batches(  # item indices of each step
            len(items), lambda index: forward_shape(items[index]), settings)
        # steps of this run, fewer with --max_steps
        self.last = min(settings.max_steps or len(self.batches), len(self.batches))
        idle = process.world - settings.batch_size
        if idle > 0 and process.leads:
            print(f"--batch_size {settings.batch_size} is smaller than the number of processes,"
                  f" {process.world}: {idle} of them add nothing; raise it or start fewer")
        self.start = load_state(settings.output / "state", model, self.optimizer, process)
        self.log = MetricsLog(settings.output / "metrics.jsonl", self.start, process)
        process.barrier()  # nodes read at different speeds; from here on, no rank waits long
        self.began = time.perf_counter()  # the current step
        self.saved = time.monotonic()  # the last state

    def steps(self):
        """(step, batch of items), from where an earlier run stopped, with a progress bar."""
        for step in self.log.progress(self.start, self.last):
            self.began = time.perf_counter()
            # dropout, if a model has it, must not depend on resuming
            torch.manual_seed(derive_seed(self.settings.seed, step))
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(step, len(self.batches), self.settings)
            yield step, [self.items[index] for index in self.batches[step]]

    def optimise(self, batch, objective):
        """One optimiser step on a global batch; its metrics, averaged over it on all ranks.

        `objective(items)` gives the losses and metrics of a micro-batch, (items,) each.
        """
        process, size = self.process, self.settings.micro_batch_size
        total = sum(item.weight for item in batch)
        # sorted by length: micro-batches need little padding, and ranks take equally long
        mine = split_over_ranks(sorted(batch, key=forward_shape), process)
        sums = {}
        for start in range(0, len(mine), size):
            items, real = zip(*mine[start:start + size], strict=True)
            weights = [item.weight if is_real else 0
                       for item, is_real in zip(items, real, strict=True)]
            weights = torch.tensor(weights, device=process.device)
            metrics = objective(items)
            loss = (metrics["train/loss"] * weights).sum() / total
            # FSDP averages the gradients of the ranks; the batch wants their sum
            (loss * process.world).backward()
            for name, values in metrics.items():
                sums[name] = sums.get(name, 0.0) + (values.detach() * weights).sum().double()
        reduced = torch.stack(list(sums.values()))
        torch.distributed.all_reduce(reduced, group=process.group)
        metrics = dict(zip(sums, (reduced / total).tolist(), strict=True))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        metrics["optim/grad_norm"] = norm.item()
        if is_finite(metrics):
            self.optimizer.step()
        self.optimizer.zero_grad()
        limit = pack_limit(self.model)
        metrics["data/tokens"] = sum(len(pack.ids) for item in batch
                                     for pack in pack_rows(item.rows, limit))
        return metrics

    def ends_epoch(self, step):
        return (step + 1) % self.steps_per_epoch == 0 or step + 1 == self.last

    def log_and_save(self, step, metrics):
        """Log the step, and now and then save what a resumed run needs."""
        if not is_finite(metrics):
            batch = [self.items[index] for index in self.batches[step]]
            stop_with_batch(metrics, step, batch, self.settings.output, self.process)
        metrics["optim/lr"] = self.optimizer.param_groups[0]["lr"]
        metrics["time/step"] = time.perf_counter() - self.began
        self.log.write(step, metrics)
        done = step + 1
        if done == self.last:
            save = self.last < len(self.batches)  # cut: a larger --max_steps resumes it
        else:  # by the leader's clock: those of nodes differ
            minutes = (time.monotonic() - self.saved) / 60
            save = self.process.from_leader(minutes >= self.settings.save_minutes,
                                            self.process.group)
        if save:
            save_state(self.settings.output / "state", done, self.model, self.optimizer,
                       self.process)
            self.saved = time.monotonic()

    def save(self, tokenizer, agent_prompt):
        """Save the checkpoint, then remove the state, unless --max_steps has cut the run."""
        output = self.settings.output
        save_checkpoint(output, self.model, tokenizer, agent_prompt, self.process)
        if self.process.leads and self.last == len(self.batches):
            if (output / "state").is_dir():
                (output / "state").rename(output / "state.done")  # a kill leaves no half state
            remove_leftovers(output)
        self.process.barrier()
        self.log.print_end(output)


def forward_shape(item):
    """(sequences, tokens of the longest) in the item's forward, if candidates are packed."""
    packs = pack_rows(item.rows)
    return len(packs), max(len(pack.ids) for pack in packs)


def plan_batches(count, length_of, settings):
    """Item indices of each step: every epoch a new seeded order, known before the first step.

    length_of(index): of an item. The ranks of a step meet in every layer, and so all wait for the
    longest item. With `--length_window W`, items are therefore sorted by length within windows of W
    batches of the shuffled order, and the batches are shuffled in turn.
    """
    batches, size = [], settings.batch_size
    window = settings.length_window * size
    for epoch in range(settings.epochs):
        draw = random.Random(derive_seed(settings.seed, "order", epoch))
        order = list(range(count))
        draw.shuffle(order)
        if settings.length_window > 1:
            for start in range(0, len(order), window):
                order[start:start + window] = sorted(order[start:start + window],
                                                     key=length_of)
        of_epoch = [order[start:start + size] for start in range(0, len(order), size)]
        if settings.length_window > 1:
            draw.shuffle(of_epoch)
        batches += of_epoch
    return batches


def learning_rate(step, steps, settings):
    """Linear warm-up over a share of the steps, then cosine down to a tenth."""
    warmup = max(1, round(settings.warmup * steps))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return settings.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def is_finite(metrics):
    return math.isfinite(metrics["train/loss"]) and math.isfinite(metrics["optim/grad_norm"])


def stop_with_batch(metrics, step, batch, output, process):
    """End a run whose loss or gradient is not finite, and write down the batch that did it."""
    if process.leads:
        ids = [[row.ids for row in item.rows] for item in batch]
        bad_batch = {"step": step, "metrics": metrics, "items": ids}
        write_atomically(output / "bad_batch.json", json.dumps(bad_batch))
    raise SystemExit(f"step {step}: found loss {metrics['train/loss']} and gradient norm"
                     f" {metrics['optim/grad_norm']}, expected finite numbers; the weights were"
                     f" left as they were and {output}/bad_batch.json has the token ids of each row"
                     " of the batch; lower --lr (with a new --output) or look at these rows")


HARDLY_MOVED = 1e-3  # a margin starts at 0, and a model that has learnt its pairs is far above


class MetricsLog:
    """metrics.jsonl: one line a step. A resumed run drops the lines of the steps it repeats."""

    def __init__(self, path, start, process):
        self.path, self.process, self.bar = path, process, None
        if process.leads and path.exists():
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] < start]
            write_atomically(path, "".join(line + "\n" for line in kept))

    def progress(self, start, steps):
        self.bar = tqdm(range(start, steps), initial=start, total=steps, unit="step",
                        **self.process.bar)
        return self.bar

    def write(self, step, metrics):
        if not self.process.leads:
            return
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step} | metrics) + "\n")
        shown = {name.split("/")[1]: f"{metrics[name]:.3g}"
                 for name in ("train/loss", "train/accuracy", "train/margin") if name in metrics}
        self.bar.set_postfix(shown, refresh=False)

    def print_end(self, output):
        """Print the checkpoint's path, and warn if the last margins show that it hardly moved.

        Accuracy cannot show this: a difference in the last digit is enough to rank all pairs right.
        """
        if not self.process.leads:
            return
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        margins = [row["train/margin"] for row in rows[-20:] if "train/margin" in row]
        ending = f"{output}: the checkpoint, after {len(rows)} steps"
        if margins:
            margin = sum(margins) / len(margins)
            ending += f"; margin {margin:.2g}"
            if abs(margin) < HARDLY_MOVED:
                ending += ": the model hardly moved; raise --lr, or train for more steps"
        print(ending)


# -----------------------------------------------------------------------------
# The value head: the "regression head" of the paper's Table 3


def value_objective(model, items):
    """Losses and metrics of a micro-batch, (items,) each: each turn predicts the outcome."""
    rows = [row for item in items for row in item.rows]
    chosen, rejected = pair_indices(items, model.device)
    logits, exists = turn_values(model, rows)
    outcomes = torch.tensor([row.outcome for row in rows], device=model.device)
    losses = value_loss(logits, outcomes, exists)
    means = logits.sum(1) / exists.sum(1).clamp(min=1)
    metrics = {"train/loss": (losses[chosen] + losses[rejected]) / 2,
               "train/accuracy": accuracy(means[chosen] - means[rejected])}
    return {name: mean_by_item(values, items) for name, values in metrics.items()}


def value_loss(logits, outcomes, turn_exists):
    """Cross-entropy of each turn's logit with the outcome, its mean over turns that exist.

    (R, S), (R,), (R, S) -> (R,).
    """
    targets = outcomes[:, None].expand_as(logits)
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (losses * turn_exists).sum(1) / turn_exists.sum(1).clamp(min=1)


# -----------------------------------------------------------------------------
# The trained critic as a scorer of turns


class Critic:
    """Opens a directory written by this script; gives each candidate its advantage (Eq. 3)."""

    def __init__(self, path, device=None, reference="privileged", dtype=None):
        flags = critic_flags(path)
        self.head, self.normalise, self.reference = flags["head"], flags["normalise"], reference
        if reference not in ("privileged", "plain"):
            raise ValueError(f"found reference {reference!r}, expected privileged or plain")
        device = device or default_device()
        if self.head == "value" and sees_pictures(path):
            sight = Sight(path, flags["privileged"])
            tokenizer, kind = sight.processor.tokenizer, vision_value_class(path)
        else:
            sight, tokenizer = None, load_tokenizer(path)
            kind = "AutoModelForTokenClassification" if self.head == "value" else \
                "AutoModelForCausalLM"
        self.reader = Reader(tokenizer, flags["privileged"], flags["max_length"], sight)
        if self.head == "value":
            self.model, self.reference_model = load_model(path, device, kind, dtype).eval(), None
            self.model.score = fp32_head(self.model.score)
            return
        # pi_ref as training had it: full training starts from merged weights, LoRA does not
        self.reference_model = load_model(flags["model"], device, dtype=dtype,
                                          merged=not flags["lora_rank"]).eval()
        self.reference_model.set_output_embeddings(
            fp32_head(self.reference_model.get_output_embeddings()))
        if flags["lora_rank"]:  # one model: without its matrices, the critic is its reference
            self.model = load_matrices(self.reference_model, path)
        else:
            self.model = load_model(path, device, dtype=dtype).eval()
            self.model.set_output_embeddings(fp32_head(self.model.get_output_embeddings()))

    def advantages(self, task, messages, texts, finished):
        """One advantage per text; equal texts are scored once. None if the state is too long."""
        # in the dialogues that it was trained on, turns are stripped
        candidates = [(text.strip(), done) for text, done in zip(texts, finished, strict=True)]
        distinct = list(dict.fromkeys(candidates))
        privileged, sight = self.reader.privileged, self.reader.sight
        opening = sight.opening_reader(task, messages) if sight else None
        view = critic_messages(task, messages, privileged)
        rows = candidate_rows(self.reader, view, distinct, opening)
        if rows is None:
            return None
        reference_rows = rows
        if self.reference == "plain":  # official ranking: the reference does not see the solution
            reference_rows = candidate_rows(self.reader, messages, distinct)
        by_candidate = dict(zip(distinct, self._advantages(rows, reference_rows), strict=True))
        return [by_candidate[candidate] for candidate in candidates]

    def advantages_of_dialogue(self, episode):
        """The advantage of each agent turn of an episode; None for turns that do not fit."""
        row = dialogue_row(self.reader, episode)
        if row is None:
            return [None] * (len(episode["dialogue_history"]) // 2)
        return [None] * row.dropped + self._advantages([row], [row])

    @torch.no_grad()
    def _advantages(self, rows, reference_rows):
        """One advantage for each turn of `rows`: candidates of one turn each, or one dialogue."""
        if self.head == "value":
            table, _ = turn_values(self.model, rows, packs_at_once=1)
        else:
            sums, counts = turn_sums(self.model, rows, packs_at_once=1)
            with matrices_off(self.reference_model):
                reference, _ = turn_sums(self.reference_model, reference_rows, packs_at_once=1)
            # the trajectory of a candidate is its turn alone; turns of a dialogue are scored in the
            # same way, so that both can be compared
            normalise = "turn" if self.normalise == "trajectory" else self.normalise
            table = advantage(sums, reference, counts, normalise)
        values = table.flatten().tolist()
        if not all(map(math.isfinite, values)):
            raise SystemExit(f"found advantages that are no finite numbers ({values[:4]} ...),"
                             " expected a critic whose weights fit --dtype; try --dtype float32")
        return values


def critic_flags(path):
    """What a critic was trained with; stops if the directory holds none."""
    run = Path(path) / "run.json"
    if not run.is_file():
        raise SystemExit(f"{path}: found no run.json, expected a directory written by"
                         " train_critic.py")
    check_checkpoint(path)
    record = read_run(run)
    flags = record["flags"]
    if not {"head", "normalise", "privileged", "max_length", "model", "lora_rank"} <= flags.keys():
        raise SystemExit(f"{path}: found a policy's run.json, expected a critic written by"
                         " train_critic.py")
    if flags["head"] not in ("logratio", "value"):
        raise ValueError(f"found head {flags['head']!r}, expected 'logratio' or 'value'")
    if flags["head"] == "logratio":  # its reference model is read again
        check_checkpoint(flags["model"])
        for base in records(flags["model"]):
            if record["inputs"].get(base) != file_hash(base):
                raise SystemExit(f"{path}: found that {base} has changed since this critic was"
                                 " trained, expected the model that it started from; train the"
                                 " critic again")
    return flags


def fp32_head(head):
    """An output layer that computes in fp32: some advantages are as small as bf16's rounding."""
    if head.weight.dtype == torch.float32:
        return head
    head = copy.deepcopy(head).float()  # a copy, since it may be the input embeddings, too
    head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    return head


# -----------------------------------------------------------------------------
# What is reported on held-out tasks


def holdout_metrics(model, items, settings, process, micro_batch_size):
    """Accuracy, loss and mean advantages of answers and of other turns on held-out pairs.

    Where every dialogue has one answer, a constant added to all answers cancels in Eq. (2), so the
    loss cannot correct it. A critic that has drifted there teaches the policy never to answer.
    """
    if not items:
        return {}
    rows = distinct_rows(items)
    index = {row: i for i, row in enumerate(rows)}
    chosen = [index[item.rows[a]] for item in items for a, _ in item.pairs]
    rejected = [index[item.rows[b]] for item in items for _, b in item.pairs]

    def score(group):
        if settings.head == "value":
            return turn_values(model, group)
        sums, counts = turn_sums(model, group)
        return advantage(sums, reference_table(group, sums), counts, settings.normalise), counts

    scored = score_on_all_ranks(model, rows, score, process, micro_batch_size)
    advantages = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(of_turns, dtype=torch.float64) for of_turns, _ in scored], batch_first=True)
    totals = advantages.sum(1)
    if settings.head == "value":  # a mean over the turns that exist, as in its loss
        totals /= torch.tensor([max(1, sum(exists)) for _, exists in scored])
    metrics = {"holdout/accuracy": accuracy(totals[chosen] - totals[rejected]).mean().item(),
               "holdout/pairs": len(chosen)}
    if settings.head == "logratio":
        losses = critic_loss(advantages[chosen], advantages[rejected], settings.beta)
        metrics["holdout/loss"] = losses.mean().item()
    return metrics | advantage_levels(rows, scored, {"chosen": chosen, "rejected": rejected})


def advantage_levels(rows, scored, sides):
    """Mean advantage of answers and other turns on both sides; its correlation with turn length.

    scored[row]: the advantages of its turns, and their token counts. A value head gives 1 for each
    count, and so no correlation.
    """
    advantages, lengths = [], []
    levels = {}
    for side, indices in sides.items():
        for index in indices:
            for turn, (value, length) in enumerate(zip(*scored[index], strict=True)):
                is_answer = rows[index].answered and turn == rows[index].turns - 1
                kind = "answer" if is_answer else "other"
                levels.setdefault(f"holdout/{kind}_{side}", []).append(value)
                advantages.append(value)
                lengths.append(length)
    metrics = {name: float(numpy.mean(levels[name])) for name in sorted(levels)}
    if numpy.std(lengths) > 0 and numpy.std(advantages) > 0:
        correlation = numpy.corrcoef(advantages, lengths)[0, 1]
        metrics["holdout/length_correlation"] = float(correlation)
    return metrics


def print_report(output, held_episodes, args, device):
    """The last hold-out metrics; on toy tasks, how the advantages agree with true credit, too."""
    report, last_step = {}, 0
    for _, line in read_jsonl(output / "metrics.jsonl"):
        last_step = line["step"]
        report |= {name: value for name, value in line.items()
                   if name.startswith(("holdout/", "credit_auc/"))}
    toy = [episode for episode in held_episodes if has_toy_credit(episode["task"])]
    has_credit = any(name.startswith("credit_auc/") for name in report)
    if toy and not has_credit and not sees_pictures(args.model):
        credit = toy_credit_metrics(output, toy, args, device)
        with open(output / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": last_step + 1} | credit) + "\n")
        report |= credit
    for name, value in report.items():
        print(f"{name:40s} {value:.4f}")


def toy_credit_metrics(output, episodes, args, device):
    """AUC of the saved critic against true credit, on 200 states of the embedded world."""
    states = list(states_of(episodes))
    random.Random(derive_seed(args.seed, "credit")).shuffle(states)
    settings = SpeakerSettings(max_new_tokens=256, device=device, dtype=args.dtype)
    policy = LocalSpeaker(args.model, settings)
    critic = Critic(output, device, dtype=args.dtype)
    return credit_auc(critic, policy, states[:200], args.seed)


# -----------------------------------------------------------------------------
# Command line

COST_FLAGS = ("micro_batch_size", "checkpointing_every", "reshard", "save_minutes")


def add_training_flags(parser, epochs, batch_size):
    """The flags that both trainers share. Without a number, the method decides on a default."""
    add = parser.add_argument_group("data").add_argument
    add("--episodes", nargs="+", required=True,
        help="episode files of collect.py, or official ones")
    add("--model", required=True, help="model to start from; also the frozen reference")
    add("--output", required=True, help="checkpoint directory to write")
    add("--max_length", type=int, default=8192,
        help="tokens of a dialogue; longer ones lose their oldest turns, and are omitted if the"
        " last turn does not fit")
    add("--agent_prompt", help="file with the agent's instructions for episodes that omit them,"
        " such as the official ones (default: ours)")
    add = parser.add_argument_group("pairs of episodes").add_argument
    add("--pairs", choices=("best_vs_rest", "success_vs_failure", "all"), default="best_vs_rest",
        help="which episodes of a task are paired: best_vs_rest: the best with every worse one, if"
        " it passed all tests (official code); success_vs_failure: every success with every"
        " failure; all: every two of different reward")
    add("--success_reward", type=float, default=SUCCESS_REWARD,
        help="least reward of a page that counts as a success")
    add("--margin", type=float, default=0.0,
        help="least difference of reward in a pair; for pages, give 0.1")
    add("--share", choices=("pair", "state"), default="pair",
        help="which pairs share a forward pass and a step: pair: each alone; state: all pairs that"
        " start from one state (or task) are one item of a batch")
    # the defaults are the paper's Table 5
    add = parser.add_argument_group("algorithm").add_argument
    add("--beta", type=float, default=0.1, help="beta of Eq. (2); of Eq. (4) in DPO")
    add("--nll", type=float, default=0.01,
        help="weight of the negative log-likelihood of the chosen side")
    group = parser.add_argument_group("optimisation")
    add = group.add_argument
    add("--lr", type=float, default=2e-7, help="peak learning rate")
    add("--epochs", type=int, default=epochs,
        help="passes over the data" + ("" if epochs else " (default: 4; --method sweet: 1)"))
    add("--max_steps", type=int, help="stop after this many steps; a larger one resumes the run")
    add("--batch_size", type=int, default=batch_size,
        help="pairs per step over all processes; with --share state, states or tasks; supervised,"
        " dialogues" + ("" if batch_size else " (default: 8; --method rft: 32)"))
    add("--micro_batch_size", type=int, default=1,
        help="how many of these per forward and backward")
    add("--warmup", type=float, default=0.03, help="share of the steps that warm up")
    add("--max_norm", type=float, default=1.0, help="gradient clipping")
    add_dtype_flag(group)
    add("--lora_rank", type=int, default=0,
        help="LoRA: train matrices of this rank beside frozen linear layers (0: all weights)")
    add("--lora_alpha", type=float,
        help="LoRA: the matrices' output is scaled by alpha / rank (default: twice the rank)")
    add("--lora_targets", nargs="+", default=list(LINEAR_LAYERS),
        help="linear layers of the decoder that get matrices")
    add("--length_window", type=int, default=1,
        help="sort items by length within windows of this many batches, so that ranks wait less"
        " (1: plain shuffle)")
    add("--checkpointing_every", type=int, metavar="N",
        help="recompute the activations of every N-th layer in the backward; 0: of none (default: 1"
        " on GPUs, 0 on CPUs)")
    add("--reshard", action=argparse.BooleanOptionalAction, default=True,
        help="free the gathered weights of a layer between forward and backward")
    add("--save_minutes", type=float, default=20, help="minutes between saved training states")
    add("--seed", type=int, default=0, help="of data order, hold-out and sampling")


def check_training_flags(parser, args):
    require_at_least(1, args, "batch_size", "micro_batch_size", "epochs", "max_length",
                     "max_steps", "length_window")
    require_at_least(0, args, "lr", "beta", "nll", "margin", "success_reward",
                     "checkpointing_every", "save_minutes", "lora_rank")
    if not args.lora_rank:
        refuse_ignored(parser, args, ("lora_alpha", "lora_targets"), "without --lora_rank")
    for name in ("lora_alpha", "max_norm"):  # with 0, nothing would be trained
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise SystemExit(f"found --{name} {value}, expected a number above 0")
    for name in ("warmup", "holdout"):
        if not 0 <= getattr(args, name, 0) < 1:
            raise SystemExit(f"found --{name} {getattr(args, name)}, expected a share of at least 0"
                             " and below 1")
    if not 0 <= args.seed < 2**63:
        raise SystemExit(f"found --seed {args.seed}, expected a number from 0 up, below 2^63")


def refuse_page_flags(args, episodes):
    """Tests decide on the success of a function, so a reward that counts as one does nothing."""
    has_pages = any(episode["success"] is None for episode in episodes)
    if args.success_reward != SUCCESS_REWARD and not has_pages:
        refuse_flag(args, "success_reward", "for episodes without pages")


def parse_args(argv=None):
    parser = flag_parser(__doc__)
    add_training_flags(parser, epochs=4, batch_size=8)
    add = parser.add_argument_group("critic").add_argument
    add("--privileged", choices=("ground_truth", "none"), default="ground_truth",
        help="what the critic sees besides the dialogue")
    add("--normalise", choices=tuple(NORMALISERS), default="turn",
        help="what divides a turn's log-ratio: its tokens (paper), those of the trajectory"
        " (official code), or nothing")
    add("--head", choices=("logratio", "value"), default="logratio",
        help="advantage as log-ratio (paper), or a regression head on the outcome")
    add("--holdout", type=float, default=0.05,
        help="share of tasks to report on and not to train on")
    args = parser.parse_args(argv)
    check_training_flags(parser, args)
    if args.head == "value":
        refuse_ignored(parser, args, ("normalise", "beta", "nll"), "with --head value")
    if args.pairs != "success_vs_failure":
        refuse_ignored(parser, args, ("success_reward",), f"with --pairs {args.pairs}")
    return args


if __name__ == "__main__":
    launch(main, parse_args())
