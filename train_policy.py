r"""Train the policy of SWEET-RL from ranked candidates (arXiv 2503.15478, section 4.3).

  1. The input: a ranker, usually the critic, gave each candidate of a state its advantage
     (train_critic.py --candidates). The policy never sees the solution.
  2. Pairs are drawn: a candidate of the better half and one of the worse.     make_pairs
  3. DPO on these pairs of turns trains the policy: Eq. (4).                   dpo_loss
With --episodes, this script is multi-turn DPO, a baseline: the same loss on whole dialogues.

    python train_policy.py --candidates critic/ranked.jsonl --model toy/base --output policy \
        --lr 3e-4 --beta 0.3 --nll 3
    torchrun --nproc_per_node 8 train_policy.py --candidates critic/ranked.jsonl \
        --model meta-llama/Llama-3.1-8B-Instruct --output policy --packed
    python train_policy.py --episodes episodes.jsonl --model toy/base --output mtdpo \
        --pairs success_vs_failure --shuffle groups --batch_size 24 --micro_batch_size 24 \
        --lr 1e-3 --beta 0.3 --nll 10 --epochs 12

The defaults are for an 8B model, with the numbers of the paper's Table 5. The tiny toy/base needs
the values shown with it.

Reads episodes, or the ranked candidates of any ranker, one state a line:

    {"task": {...}, "sample": 0, "turn": 2, "messages": [...], "agent_prompt": "You help ...",
     "max_turns": 10, "candidates": ["Which unit?", ...], "finished": [true, ...],
     "advantages": [0.021, ...], "ranker": "critic"}

Writes a Hugging Face checkpoint, with run.json and metrics.jsonl beside it.

To change                     edit
    the loss                  dpo_loss, for candidates and for episodes; dpo_objective for the NLL
                              term and what is logged
    inputs of the loss        fields of Row, which candidate_pairs and dialogue_row fill in
    which states are used     read_candidate_pairs
    the pairs of candidates   make_pairs, PAIRINGS
    the pairs of episodes     pair_episodes, PAIRS
    the forward pass          turn_logprobs; run without --packed, which replaces it
    optimiser, schedule       main, learning_rate
    saving, resuming, log     Run in runtime/training.py
    FSDP, precision           shard and open_to_train in runtime/models.py
docs/forks has such edits as patches, and says what some of them need elsewhere. Supervised training
is variants/sft.py.

Code that both trainers share is duplicated, so that each can be read alone. If you know
train_critic.py, you can skip PAIRS, pair_episodes, Row, dialogue_pairs, turn_logprobs,
set_reference, learning_rate and plan_batches here: tests/test_twins.py keeps the copies equal.
Letters in shapes: B pairs, R rows, S turns, T tokens, V vocabulary, N candidates.

Difference from the paper: four pairs are drawn in a state, as in the official code; the paper draws
one (`--pairs_per_state 1`). From the official code: no two candidates are paired twice, and equal
texts are never a pair; the NLL term covers agent tokens only; candidates that were cut at the token
limit get no end-of-turn token; long dialogues lose their oldest turns, not their end.
docs/differences.md has the rest.
"""

import dataclasses
import math
import random

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from colbench import agent_view, encode_candidates, encode_within, succeeded
from formats.read import (
    custom_prompt, group_by_task, load_episodes, read_candidates, state_key, truncation_in_words)
from runtime.flags import FlagParser
from runtime.models import load_tokenizer, open_to_train
from runtime.processes import launch
from runtime.seeds import derive_seed
from runtime.training import Run

# -----------------------------------------------------------------------------
# The equation


def dpo_loss(chosen, rejected, beta):
    """SWEET-RL Eq. (4), DPO: -log sigma(beta log pi/pi_ref(a+|o) - beta log pi/pi_ref(a-|o)).

    Log-ratios of whole turns (or dialogues), policy to reference: (B,) and (B,) -> (B,).
    """
    return -F.logsigmoid(beta * chosen - beta * rejected)


# -----------------------------------------------------------------------------
# Pairs of candidates, and of episodes

PAIRINGS = ("halves", "positive_vs_negative")


def make_pairs(texts, advantages, pairing, pairs_per_state, rng):
    """At most `pairs_per_state` drawn pairs (chosen, rejected), as indices of the N candidates.

    halves (paper) pairs the better half, by advantage, with the worse; positive_vs_negative pairs
    advantages above 0 with those below. A text that was sampled k times counts as k candidates.
    Under every rule, the chosen candidate has the greater advantage, the two texts differ, and
    neither is empty.
    """
    ranked = sorted(range(len(texts)), key=lambda index: -advantages[index])
    if pairing == "halves":
        half = len(ranked) // 2  # with an odd number, the middle one is in neither half
        better, worse = ranked[:half], ranked[len(ranked) - half:]
    elif pairing == "positive_vs_negative":
        better = [index for index in ranked if advantages[index] > 0]
        worse = [index for index in ranked if advantages[index] < 0]
    else:
        raise ValueError(f"found pairing {pairing!r}, expected one of {', '.join(PAIRINGS)}")
    pairs = [(chosen, rejected) for chosen in better for rejected in worse
             if advantages[chosen] > advantages[rejected] and texts[chosen] != texts[rejected]
             and texts[chosen].strip() and texts[rejected].strip()]
    return rng.sample(pairs, min(pairs_per_state, len(pairs)))


def state_pairs(state, pairing, pairs_per_state, seed):
    """The pairs of a ranked state, which depend on this state and the seed alone."""
    rng = random.Random(derive_seed(seed, "pairs", *state_key(state)))
    return make_pairs(state["candidates"], state["advantages"], pairing, pairs_per_state, rng)


PAIRS = ("best_vs_rest", "success_vs_failure", "all")


def pair_episodes(episodes, rule="best_vs_rest", margin=0.0):
    """Pairs (chosen, rejected) of episodes of one task, whose rewards differ by at least `margin`.

    best_vs_rest (official code) pairs the best episode (the first of a tie) with every worse one,
    unless the best failed its tests. success_vs_failure pairs every success with every failure;
    `all` pairs any two episodes of different reward.
    """
    if rule == "best_vs_rest":
        best = max(episodes, key=lambda episode: episode["reward"])
        better = [] if best["success"] is False else [best]  # None: no tests (pages, logs)
        worse = episodes
    elif rule == "success_vs_failure":
        better = [episode for episode in episodes if succeeded(episode)]
        worse = [episode for episode in episodes if not succeeded(episode)]
    elif rule == "all":
        better, worse = episodes, episodes
    else:
        raise ValueError(f"found the rule {rule!r} for pairs, expected one of {', '.join(PAIRS)}")
    # 1e-9, because 0.3 - 0.2 is below 0.1 in floating point
    return [(chosen, rejected) for chosen in better for rejected in worse
            if chosen["reward"] > rejected["reward"]  # needed with a margin of 0
            and chosen["reward"] - rejected["reward"] >= margin - 1e-9]


# -----------------------------------------------------------------------------
# What the policy reads: the dialogue as the agent sees it


@dataclasses.dataclass(eq=False)  # compared and hashed by identity, so a row can be a dict key
class Row:
    """The tokens of one text that the model reads: a dialogue, or a prompt and one candidate.

        <user> hi <end> <agent> hello <end> <user> more <end> <agent> bye <end>      ids
        -1     -1 -1    -1      0     0     -1     -1   -1    -1      1   1          turn_index
    """

    ids: list  # T token ids
    turn_index: list  # T: the agent turn that a token belongs to, -1 if it is not the agent's
    dropped: int = 0  # how many of the oldest turns did not fit
    reference: torch.Tensor | None = None  # (S,): log-probs of its turns under pi_ref

    @property
    def turns(self):
        return max(self.turn_index) + 1  # S, up to the last turn with a token; may be 0

    @property
    def last_turn_start(self):
        """The number of tokens before the last turn. Batches are sorted by it: rows of similar
        length need little padding. It is the same for all candidates of a state, so they stay
        together, and --packed computes their prompt once.
        """
        return self.turn_index.index(self.turns - 1)


def candidate_pairs(tokenizer, states, pairing, pairs_per_state, max_length, seed):
    """(pairs of rows, one list per state; the number of pairs in states that do not fit)."""
    pairs_of_states, too_long = [], 0
    for state in states:
        pairs = state_pairs(state, pairing, pairs_per_state, seed)
        if not pairs:
            continue
        # not stripped (for the critic they are): the policy trains on the texts that it sampled
        encoded = encode_candidates(tokenizer, state["messages"], state["candidates"],
                                    state["finished"], max_length)
        if encoded is None:  # the longest does not fit
            too_long += len(pairs)
            continue
        rows = [Row(*fields) for fields in encoded]
        pairs_of_states.append([(rows[chosen], rows[rejected]) for chosen, rejected in pairs])
    return pairs_of_states, too_long


def dialogue_row(tokenizer, episode, max_length):
    """The row of an episode; None if even its last turn does not fit. Beyond `max_length` tokens,
    the oldest turns are dropped.
    """
    messages, finished = agent_view(episode)
    fields = encode_within(tokenizer, messages, max_length, finished)  # ids, turn_index, dropped
    return Row(*fields) if fields else None


def dialogue_pairs(episodes, rule, margin):
    """Task id -> its pairs of rows, in the order of the ids.

    It reads episode["row"], which the caller has set: None if the episode does not fit.
    """
    pairs_of = {}
    for task_id, group in sorted(group_by_task(episodes).items()):
        fitting = [episode for episode in group if episode["row"]]
        pairs = pair_episodes(fitting, rule, margin) if fitting else []
        pairs_of[task_id] = [(chosen["row"], rejected["row"]) for chosen, rejected in pairs]
    return pairs_of


# -----------------------------------------------------------------------------
# The objective


def turn_logprobs(model, rows):
    """(logprobs, tokens): the summed log-prob of each turn's tokens, and their number; (R, S) each.

    Rows are padded on the right without a mask: no token of a causal model sees what follows.
    """
    ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)  # (R, T)
    turn_index = pad_sequence([torch.tensor(row.turn_index) for row in rows], batch_first=True,
                              padding_value=-1)  # (R, T)
    ids, turn_index = ids.to(model.device), turn_index.to(model.device)
    logits = model(ids, use_cache=False).logits.float()  # (R, T, V); at t, those of token t + 1
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])  # (R, T - 1, 1)
    turn_numbers = torch.arange(max(row.turns for row in rows), device=model.device)  # (S,)
    in_turn = turn_index[:, 1:, None] == turn_numbers  # (R, T - 1, S): token t + 1 is in turn s
    return torch.where(in_turn, logprobs, 0).sum(1), in_turn.sum(1)


def dpo_objective(model, pairs, beta, nll):
    """Eq. (4) plus Table 5's NLL term; a dict of (B,) tensors."""
    rows = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]  # R = 2 B
    logprobs, tokens = turn_logprobs(model, rows)  # (R, S) each; a candidate is one turn
    reference = pad_sequence([row.reference for row in rows], batch_first=True).to(logprobs)
    chosen, rejected = (logprobs - reference).sum(1).chunk(2)  # (B,) each
    margin = beta * (chosen - rejected)  # sigma's argument in Eq. (4), only logged
    row_nll = -logprobs.sum(1) / tokens.sum(1).clamp(min=1)  # mean over the agent's tokens, (R,)
    chosen_nll = row_nll[:len(pairs)]  # (B,)
    return {"loss": dpo_loss(chosen, rejected, beta) + nll * chosen_nll,
            "accuracy": margin > 0, "margin": margin, "nll": chosen_nll,
            "chosen_reward": beta * chosen}  # DPO's implicit reward


def set_reference(model, rows, run, rows_at_once):
    """Set row.reference, the log-prob of each turn under pi_ref: `model` before its first step."""
    rows = sorted(rows, key=lambda row: row.last_turn_start)
    with run.scoring(model):  # without gradients; the processes share the rows
        # as lists: the processes exchange them far faster than as many small tensors
        logprobs = run.map(lambda part: turn_logprobs(model, part)[0].tolist(), rows, rows_at_once,
                           description="reference")
    for row, padded in zip(rows, logprobs, strict=True):  # S numbers each
        row.reference = torch.tensor(padded[:row.turns])


# -----------------------------------------------------------------------------
# The run


def learning_rate(step, steps, peak):
    """Linear warm-up over 3 % of the steps, then cosine down to a tenth, as in the official code.
    Here the warm-up is a step ahead, so that no step has a rate of 0.
    """
    warmup = max(1, round(0.03 * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def plan_batches(groups, epochs, batch_size, shuffle, seed):
    """The pairs of each step. Every epoch takes all pairs, in a new seeded order.

    `groups` are lists of pairs, one per task (or state). With shuffle "groups", the pairs of one
    group stay together, so that --packed computes what they share once per micro-batch.
    """
    if shuffle not in ("pairs", "groups"):
        raise ValueError(f"found shuffle {shuffle!r}, expected 'pairs' or 'groups'")
    batches = []
    for epoch in range(epochs):
        rng = random.Random(derive_seed(seed, "order", epoch))
        if shuffle == "groups":
            groups = rng.sample(groups, len(groups))
        pairs = [pair for group in groups for pair in group]
        if shuffle == "pairs":
            rng.shuffle(pairs)
        batches += [pairs[start:start + batch_size] for start in range(0, len(pairs), batch_size)]
    return batches


def read_candidate_pairs(tokenizer, args, run):
    """(pairs of rows, one list per state; the agent's instructions to save, or None)."""
    states, omitted = read_candidates(args.candidates, ranked=True)
    groups, too_long = candidate_pairs(tokenizer, run.watch(states, "state"), args.pairing,
                                       args.pairs_per_state, args.max_length, args.seed)
    rankers = ", ".join(sorted({state["ranker"] for state in states}))
    shorter = sum(pairs[0][0].dropped > 0 for pairs in groups)  # all rows of a state are cut alike
    run.say(f"{len(states)} states ({omitted} failed or unranked ones omitted), ranked by"
            f" {rankers}: {sum(map(len, groups))} pairs; with --max_length {args.max_length},"
            f" {shorter} states lose their oldest turns, and {too_long} more pairs are omitted,"
            " of states whose longest candidate does not fit")
    if not groups:
        raise SystemExit(f"{args.candidates}: found no pair of a better and a worse candidate of"
                         f" one state with --pairing {args.pairing}, expected at least one; sample"
                         " more candidates, or give another --pairing, or more tokens than"
                         f" --max_length {args.max_length}")
    return groups, custom_prompt(states, run.say)


def read_episode_pairs(tokenizer, args, run):
    """(pairs of rows, one list per task; the agent's instructions to save, or None)."""
    episodes, omitted = load_episodes(args.episodes)
    for episode in run.watch(episodes, "episode"):
        episode["row"] = dialogue_row(tokenizer, episode, args.max_length)
    groups = list(dialogue_pairs(episodes, args.pairs, args.margin).values())
    truncation = truncation_in_words([episode["row"] for episode in episodes], args.max_length)
    run.say(f"{len(episodes)} episodes of {len(groups)} tasks ({omitted} failed ones omitted):"
            f" {sum(map(len, groups))} pairs; {truncation}")
    if not any(groups):
        raise SystemExit(f"{' '.join(args.episodes)}: found no pair of a better and a worse episode"
                         " of one task, expected at least one; collect more episodes of each task,"
                         " or allow more pairs (--pairs all, a smaller --margin, more tokens"
                         f" than --max_length {args.max_length})")
    return groups, custom_prompt(episodes, run.say)


def main(args):
    if args.packed:  # faster, and equal up to rounding: replaces this file's turn_logprobs
        global turn_logprobs
        from fast.packed import turn_logprobs
    inputs = [args.candidates] if args.candidates else args.episodes
    run = Run(args, inputs)  # processes, log, saved states
    if run.complete:
        return

    # pairs of rows
    tokenizer = load_tokenizer(args.model)
    if args.candidates:
        groups, agent_prompt = read_candidate_pairs(tokenizer, args, run)
    else:
        groups, agent_prompt = read_episode_pairs(tokenizer, args, run)
    pairs = [pair for group in groups for pair in group]
    rows = list(dict.fromkeys(row for pair in pairs for row in pair))  # each once
    run.refuse_unequal_data([row.ids for row in rows])  # all processes must have read the same

    # the policy. Its weights are those of pi_ref until run.resume below, so no second model is
    # needed. open_to_train removes dropout and shards (FSDP2): fp32 weights, on GPUs bf16 compute
    model = open_to_train(args, run)
    set_reference(model, rows, run, 2 * args.micro_batch_size)  # a pair is two rows

    # steps
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=run.device != "cpu")
    batches = plan_batches(groups, args.epochs, args.batch_size, args.shuffle, args.seed)
    steps = run.limit(len(batches))  # fewer with --max_steps, which leaves the schedule as it is
    # resume loads the last saved state, if any, and returns the step to continue from (or 0)
    for step in range(run.resume(model, optimizer), steps):
        lr = learning_rate(step, len(batches), args.lr)
        optimizer.param_groups[0]["lr"] = lr

        # sorted, so that pairs of similar length share a micro-batch
        batch = sorted(batches[step], key=lambda pair: max(row.last_turn_start for row in pair))
        # `mine` are this process's pairs. FSDP averages gradients over the processes, but a sum is
        # needed, so `weight` is the number of processes. All must run equally many forwards: one
        # that has no pair left gets some pair again, with weight 0
        for mine, weight in run.share(batch, args.micro_batch_size):
            metrics = dpo_objective(model, mine, args.beta, args.nll)
            (weight * metrics["loss"].sum() / len(batch)).backward()
            run.add("train", metrics, weight / len(batch))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()

        # a line of metrics.jsonl: these numbers, and the means over pairs of what `add` was given
        run.log(step, {"optim/lr": lr, "optim/grad_norm": norm})
        run.save_state_if_due(step + 1, model, optimizer)
    run.save(model, tokenizer, agent_prompt)  # collect.py plays the policy with this prompt


# -----------------------------------------------------------------------------
# Command line


def parse_args(argv=None):
    parser = FlagParser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--candidates", help="ranked candidates: SWEET-RL")
    source.add_argument("--episodes", nargs="+", action="extend",
                        help="episode files: multi-turn DPO")
    parser.add_argument("--model", required=True,
                        help="model to start from; also the frozen reference")
    parser.add_argument("--output", required=True, help="checkpoint directory to write")
    parser.add_argument("--max_length", type=int, least=1, default=8192,
                        help="longest dialogue, in tokens; a longer one loses its oldest turns, and"
                        " is omitted if even its last turn does not fit")
    parser.add_argument("--pairing", choices=PAIRINGS, default="halves", needs="candidates",
                        help="which candidates are paired. halves: one of the better half and one"
                        " of the worse (paper); positive_vs_negative: one of positive and one of"
                        " negative advantage")
    parser.add_argument("--pairs_per_state", type=int, least=1, default=4, needs="candidates",
                        help="pairs drawn from a state's candidates")
    parser.add_argument("--pairs", choices=PAIRS, default="best_vs_rest", needs="episodes",
                        help="which episodes of a task are paired, as in train_critic.py")
    parser.add_argument("--margin", type=float, least=0, default=0.0, needs="episodes",
                        help="smallest difference in reward in a pair of episodes; for pages, give"
                        " 0.1")
    parser.add_argument("--shuffle", choices=("pairs", "groups"), default="pairs",
                        help="what an epoch shuffles: single pairs, or states (with --episodes,"
                        " tasks) whose pairs stay side by side")
    # --beta, --nll, --lr, --epochs and --batch_size: the defaults are the paper's Table 5
    parser.add_argument("--beta", type=float, least=0, default=0.1, help="beta of Eq. (4)")
    parser.add_argument("--nll", type=float, least=0, default=0.01,
                        help="weight of the chosen side's negative log-likelihood")
    parser.add_argument("--lr", type=float, least=0, default=2e-7, help="peak learning rate")
    parser.add_argument("--epochs", type=int, least=1, default=1,
                        help="passes over the pairs (multi-turn DPO in the paper: 4)")
    parser.add_argument("--batch_size", type=int, least=1, default=8,
                        help="pairs per step over all processes")
    parser.add_argument("--max_norm", type=float, above=0, default=1.0,
                        help="gradient clipping: maximum norm")
    parser.add_argument("--seed", type=int, least=0, below=2**63, default=0,
                        help="random seed of data order and pairs")
    # --packed, --micro_batch_size, --dtype, --max_steps, --save_minutes, --lora_rank, ...
    parser.add_machine_flags()
    return parser.parse_args(argv)


if __name__ == "__main__":
    launch(main, parse_args())
