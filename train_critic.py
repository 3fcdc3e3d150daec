r"""Train the critic of SWEET-RL: an advantage for each turn (arXiv 2503.15478, section 4.2).

  1. A better and a worse dialogue of the same task form a pair.               pair_episodes
  2. Critic and reference read both dialogues, with the solution in front.
     (The policy never sees the solution.)                                     critic_messages
  3. The advantage of a turn is the mean log-ratio of its tokens, critic to
     reference: Eq. (3).                                                       advantage
  4. A Bradley-Terry loss on both dialogues' summed advantages trains the
     critic: Eq. (2).                                                          critic_loss
  5. The trained critic gives the candidates of a state their advantages.      Critic, rank

    python train_critic.py --episodes episodes.jsonl --model toy/base --output critic \
        --pairs success_vs_failure --shuffle groups --batch_size 24 --micro_batch_size 24 \
        --lr 5e-5 --beta 30 --nll 0.02 --epochs 1 --candidates candidates.jsonl
    torchrun --nproc_per_node 8 train_critic.py --episodes episodes.jsonl \
        --model meta-llama/Llama-3.1-8B-Instruct --output critic --packed
    python train_critic.py --output critic --candidates more.jsonl --ranked more.ranked.jsonl

Without --episodes, nothing is trained: the critic in --output ranks the candidates.

The defaults are for an 8B model, with the numbers of the paper's Table 5. The tiny toy/base needs
the values shown with it.

Reads episodes (their task, dialogue_history, agent_prompt, max_turns, reward and success) and
candidates, both of collect.py. Writes a Hugging Face checkpoint, with run.json and metrics.jsonl
beside it, and ranked candidates (`ranked.jsonl`) for train_policy.py, one state a line:

    {"task": {...}, "sample": 0, "turn": 2, "messages": [...], "agent_prompt": "You help ...",
     "max_turns": 10, "candidates": ["Which unit?", ...], "finished": [true, ...],
     "advantages": [0.021, ...], "ranker": "critic"}

To change                  edit
    the loss               critic_loss; critic_objective for the NLL term and what is logged;
                           train calls it twice, for the steps and for the held-out pairs
    inputs of the loss     fields of Row, which dialogue_row fills in
    the advantage          advantage, NORMALISERS
    the pairs              pair_episodes, PAIRS
    what the critic reads  PRIVILEGED, critic_messages
    the ranking            Critic.advantages; the file: rank_states in formats/ranking.py
    the forward pass       turn_logprobs; run without --packed, which replaces it
    optimiser, schedule    train, learning_rate
    saving, resuming, log  Run in runtime/training.py
    FSDP, precision        shard and open_to_train in runtime/models.py
docs/forks has such edits as patches, and says what some of them need elsewhere. Another kind of
critic is another file that writes ranked candidates, such as variants/value_critic.py.

Code that both trainers share is duplicated, so that each can be read alone; tests/test_twins.py
keeps the copies equal.
Letters in shapes: B pairs, R rows, S turns, T tokens, V vocabulary.

Differences from the paper: none in the equations. From the official code (in brackets: the flag
that restores it): the mean is per turn, not over the trajectory (`--normalise trajectory`); the NLL
term of the paper's Table 5 is on (`--nll 0`); the solution stands in the request, not before the
first token; the end-of-turn token is scored; long dialogues lose their oldest turns, not their
answer; the ranking's reference also sees the solution (`--reference plain`). docs/differences.md
has the rest.
"""

import dataclasses
import math
import random

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from colbench import agent_view, encode_candidates, encode_within, request_index, succeeded
from formats.ranking import rank_states, refuse_unrankable
from formats.read import group_by_task, load_episodes, solution_of, truncation_in_words
from runtime.flags import FlagParser
from runtime.models import load_tokenizer, open_to_train, open_with_reference
from runtime.processes import launch
from runtime.record import read_flags
from runtime.seeds import derive_seed
from runtime.training import Run

# -----------------------------------------------------------------------------
# The equations

NORMALISERS = {  # name -> L of Eq. (3) from the number of tokens of each turn, (R, S)
    "turn": lambda tokens: tokens,
    # the official code; a candidate to rank is a row of one turn, so there it equals "turn"
    "trajectory": lambda tokens: tokens.sum(1, keepdim=True),
    "none": torch.ones_like,  # the ablation of Table 3
}


def advantage(logprobs, reference, tokens, normalise="turn"):
    """SWEET-RL Eq. (3): A(o_t, a_t, c) =
    1/L sum_l [log pi_theta(a_l | o_t, a_<l, c) - log pi_ref(a_l | o_t, a_<l, c)].

    `logprobs` and `reference` are each turn's log-prob under critic and reference, summed over l;
    `tokens` is how many tokens each turn has; all (R, S). Empty turns, and the padding of shorter
    dialogues, get 0.
    """
    divisor = NORMALISERS[normalise](tokens).clamp(min=1)  # L; 1 for an empty turn, not 0
    return (logprobs - reference) / divisor


def critic_loss(chosen, rejected, beta):
    """SWEET-RL Eq. (2): -log sigma(sum_t beta A(o+_t, a+_t, c) - sum_t beta A(o-_t, a-_t, c)).

    Advantages of all turns of both dialogues: (B, S) and (B, S) -> (B,). S is the largest number of
    turns in the micro-batch, and missing turns have 0. That changes no sum, but it changes a mean.
    """
    return -F.logsigmoid(beta * chosen.sum(1) - beta * rejected.sum(1))


# -----------------------------------------------------------------------------
# Pairs of episodes

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
# What the critic reads

# Any words do, but toy/base has learnt to read the solution in these only, with nothing added
SOLUTION_NOTE = "Solution, known in training only:\n{solution}\n\n"
# An entry may show any field of the task. Both dialogues of a pair must get the same text (in logs,
# their tasks may differ); otherwise the critic learns from that difference, not from the turns
PRIVILEGED = {  # name -> what stands in front of the request
    "ground_truth": lambda task: SOLUTION_NOTE.format(solution=solution_of(task)),
    "none": lambda task: "",
}


def critic_messages(task, messages, privileged="ground_truth"):
    """What critic and reference read: the agent's messages, the solution c before the request."""
    index = request_index(messages)
    content = PRIVILEGED[privileged](task) + messages[index]["content"]
    return messages[:index] + [{"role": "user", "content": content}] + messages[index + 1:]


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


def dialogue_row(tokenizer, episode, max_length, privileged="ground_truth"):
    """The row of an episode; None if even its last turn does not fit. Beyond `max_length` tokens,
    the oldest turns are dropped.
    """
    messages, finished = agent_view(episode)
    messages = critic_messages(episode["task"], messages, privileged)
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


def critic_objective(model, pairs, beta, nll, normalise):
    """Eq. (2) of the advantages of Eq. (3), plus Table 5's NLL term; a dict of (B,) tensors."""
    rows = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]  # R = 2 B
    logprobs, tokens = turn_logprobs(model, rows)  # (R, S) each
    reference = pad_sequence([row.reference for row in rows], batch_first=True).to(logprobs)
    chosen, rejected = advantage(logprobs, reference, tokens, normalise).chunk(2)  # (B, S) each
    margin = beta * (chosen.sum(1) - rejected.sum(1))  # sigma's argument in Eq. (2), only logged
    row_nll = -logprobs.sum(1) / tokens.sum(1).clamp(min=1)  # mean over the agent's tokens, (R,)
    chosen_nll = row_nll[:len(pairs)]  # (B,)
    return {"loss": critic_loss(chosen, rejected, beta) + nll * chosen_nll,
            "accuracy": margin > 0, "margin": margin, "nll": chosen_nll}


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


def split_tasks(task_ids, holdout, seed):
    """(task ids to train on, held out): whole tasks, after a seeded shuffle."""
    task_ids = sorted(task_ids)
    random.Random(derive_seed(seed, "holdout")).shuffle(task_ids)
    count = math.ceil(holdout * len(task_ids) - 1e-9)  # as floats, 0.07 * 100 is more than 7
    count = min(count, len(task_ids) - 1)  # at least one task stays for training
    return task_ids[count:], task_ids[:count]


def split_pairs(episodes, args, run):
    """(pairs of rows to train on, one list per task; the pairs held out)."""
    pairs_of = dialogue_pairs(episodes, args.pairs, args.margin)
    train_tasks, held_out_tasks = split_tasks(pairs_of, args.holdout, args.seed)
    groups = [pairs_of[task_id] for task_id in train_tasks]
    held_out = [pair for task_id in held_out_tasks for pair in pairs_of[task_id]]
    run.say(f"{sum(map(len, groups))} pairs from {sum(map(bool, groups))} tasks, and"
            f" {len(held_out)} pairs of {len(held_out_tasks)} tasks held out")
    if not any(groups):
        raise SystemExit(f"{' '.join(args.episodes)}: found no pair of a better and a worse episode"
                         " of one task to train on, expected at least one; collect more episodes of"
                         " each task, or allow more pairs (--pairs all, a smaller --margin or"
                         f" --holdout, more tokens than --max_length {args.max_length}). Train a"
                         " model that never succeeds on demonstrations first (variants/sft.py)")
    return groups, held_out


# flags of `rank`: the training reads none, so a command that resumes it may differ in them
RANKING_FLAGS = ("candidates", "ranked", "reference")


def main(args):
    if args.packed:  # faster, and equal up to rounding: replaces this file's turn_logprobs
        global turn_logprobs
        from fast.packed import turn_logprobs
    if args.episodes:
        if args.candidates:
            refuse_unrankable(args.candidates, PRIVILEGED[args.privileged])  # before the training
        train(args)
    if args.candidates:
        rank(args)


def train(args):
    run = Run(args, args.episodes, may_differ=RANKING_FLAGS)  # processes, log, saved states
    if run.complete:
        return
    # if a larger --max_steps continues a run, what the critic has ranked so far is out of date
    run.remove("ranked.jsonl", "ranked.jsonl.r*")  # and ranked.jsonl.run.json, .rank0, ...

    # pairs of rows; some tasks are held out
    tokenizer = load_tokenizer(args.model)
    episodes, omitted = load_episodes(args.episodes)
    for episode in run.watch(episodes, "episode"):
        episode["row"] = dialogue_row(tokenizer, episode, args.max_length, args.privileged)
    truncation = truncation_in_words([episode["row"] for episode in episodes], args.max_length)
    run.say(f"{len(episodes)} episodes of {len(group_by_task(episodes))} tasks ({omitted} failed"
            f" ones omitted); {truncation}")
    groups, held_out = split_pairs(episodes, args, run)
    pairs = [pair for group in groups for pair in group] + held_out
    rows = list(dict.fromkeys(row for pair in pairs for row in pair))  # each once
    run.refuse_unequal_data([row.ids for row in rows])  # all processes must have read the same

    # the critic. Its weights are those of pi_ref until run.resume below, so no second model is
    # needed. open_to_train removes dropout and shards (FSDP2): fp32 weights, on GPUs bf16 compute
    model = open_to_train(args, run)
    set_reference(model, rows, run, 2 * args.micro_batch_size)  # a pair is two rows

    # steps
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=run.device != "cpu")
    batches = plan_batches(groups, args.epochs, args.batch_size, args.shuffle, args.seed)
    steps_per_epoch = len(batches) // args.epochs
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
            metrics = critic_objective(model, mine, args.beta, args.nll, args.normalise)
            (weight * metrics["loss"].sum() / len(batch)).backward()
            run.add("train", metrics, weight / len(batch))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()

        # the held-out pairs, after each epoch and at the end: Eq. (2) without the NLL term
        if held_out and ((step + 1) % steps_per_epoch == 0 or step + 1 == steps):
            with run.scoring(model):
                for mine, weight in run.share(held_out, args.micro_batch_size):
                    metrics = critic_objective(model, mine, args.beta, 0.0, args.normalise)
                    run.add("holdout", metrics, weight / len(held_out))
        # a line of metrics.jsonl: these numbers, and the means over pairs of what `add` was given
        run.log(step, {"optim/lr": lr, "optim/grad_norm": norm, "holdout/pairs": len(held_out)})
        run.save_state_if_due(step + 1, model, optimizer)
    run.save(model, tokenizer)


# -----------------------------------------------------------------------------
# The trained critic as a ranker of turns


def read_critic_flags(path):
    """What a critic was trained with; exits if this script did not train it."""
    flags = read_flags(path, ("privileged", "normalise", "max_length", "model", "lora_rank"))
    if flags["privileged"] not in PRIVILEGED or flags["normalise"] not in NORMALISERS:
        raise SystemExit(f"{path}: found a critic trained with --privileged {flags['privileged']}"
                         f" and --normalise {flags['normalise']}, expected modes that this script"
                         " has; rank with the code that trained it")
    return flags


class Critic:
    """Opens a directory that this script wrote, and gives turns their advantages.

    Models compute in `dtype`, their output layers in fp32 (`open_with_reference`): some advantages
    are as small as the rounding of bf16.
    """

    def __init__(self, path, device=None, dtype=None, reference="privileged"):
        if reference not in ("privileged", "plain"):
            raise ValueError(f"found reference {reference!r}, expected privileged or plain")
        flags = read_critic_flags(path)
        self.max_length, self.privileged = flags["max_length"], flags["privileged"]
        self.normalise = flags["normalise"]
        self.plain_reference = reference == "plain"
        self.tokenizer = load_tokenizer(path)
        self.model, self.reference_model = open_with_reference(
            path, flags["model"], device, dtype, lora=bool(flags["lora_rank"]))

    def advantages(self, task, messages, texts, finished):
        """Each text's advantage as the turn after `messages`; None if the longest does not fit.

        A text that was cut at the token limit (finished: False) gets no end-of-turn token.
        """
        rows = self.candidate_rows(task, messages, texts, finished, self.privileged)
        reference_rows = rows
        if self.plain_reference:  # it does not see the solution, as in the official ranking
            reference_rows = self.candidate_rows(task, messages, texts, finished, "none")
        if rows is None or reference_rows is None:
            return None
        advantages = self.turn_advantages(rows, reference_rows)  # (R, 1)
        return advantages.sum(1).tolist()  # not [:, 0]: S is 0 if no text has a token

    def candidate_rows(self, task, messages, texts, finished, privileged):
        """The rows of candidates; None if they do not fit."""
        messages = critic_messages(task, messages, privileged)
        texts = [text.strip() for text in texts]  # as in the dialogues that the critic has read
        encoded = encode_candidates(self.tokenizer, messages, texts, finished, self.max_length)
        return [Row(*fields) for fields in encoded] if encoded else None

    @torch.no_grad()
    def turn_advantages(self, rows, reference_rows=None):
        """Each turn's advantage, (R, S); the reference reads `reference_rows` instead, if given."""
        logprobs, tokens = turn_logprobs(self.model, rows)  # (R, S) each
        reference, _ = turn_logprobs(self.reference_model, reference_rows or rows)
        advantages = advantage(logprobs, reference, tokens, self.normalise)
        broken = advantages[~advantages.isfinite()]
        if len(broken):
            raise SystemExit(f"found {len(broken)} advantages that are not finite ({broken[0]}),"
                             " expected finite ones; rank again with --dtype float32 and a new"
                             " --ranked, without --episodes")
        return advantages

    def dialogue_row(self, episode):
        """The row of an episode, for the report; None if its last turn does not fit."""
        return dialogue_row(self.tokenizer, episode, self.max_length, self.privileged)


def rank(args):
    """Give each candidate of --candidates its advantage: `Critic.advantages` of every state."""
    trained_with = read_critic_flags(args.output)
    if trained_with["privileged"] == "none" and args.reference == "plain":
        raise SystemExit("found --reference plain with a critic that does not see the solution"
                         " either, so it changes nothing; omit --reference")
    rank_states(args, Critic, reference=args.reference)


# -----------------------------------------------------------------------------
# Command line


def parse_args(argv=None):
    parser = FlagParser(__doc__)
    parser.add_argument("--episodes", nargs="+", action="extend", default=[],
                        help="episode files to train on; omit them to rank with a trained critic")
    parser.add_argument("--model", help="model to start from; also the frozen reference")
    parser.add_argument("--output", required=True,
                        help="the critic's checkpoint directory; without --episodes, that of a"
                        " trained critic")
    parser.add_argument("--max_length", type=int, least=1, default=8192,
                        help="longest dialogue, in tokens; a longer one loses its oldest turns, and"
                        " is omitted if even its last turn does not fit")
    parser.add_argument("--privileged", choices=tuple(PRIVILEGED), default="ground_truth",
                        help="what the critic sees besides the dialogue: the solution, or nothing")
    parser.add_argument("--normalise", choices=tuple(NORMALISERS), default="turn",
                        help="what a turn's log-ratio is divided by: the number of its tokens"
                        " (turn; paper), of the dialogue's (trajectory; official code), or nothing")
    parser.add_argument("--pairs", choices=PAIRS, default="best_vs_rest",
                        help="which episodes of a task are paired. best_vs_rest: the best with"
                        " every worse one, unless the best failed a test (official code);"
                        " success_vs_failure: every success with every failure; all: every two of"
                        " different reward")
    parser.add_argument("--margin", type=float, least=0, default=0.0,
                        help="smallest difference in reward within a pair; for pages, give 0.1")
    parser.add_argument("--shuffle", choices=("pairs", "groups"), default="pairs",
                        help="what an epoch shuffles: single pairs, or tasks whose pairs stay side"
                        " by side")
    parser.add_argument("--holdout", type=float, least=0, below=1, default=0.05,
                        help="share of tasks, rounded up, that are held out for evaluation")
    # --beta, --nll, --lr, --epochs and --batch_size: the defaults are the paper's Table 5
    parser.add_argument("--beta", type=float, least=0, default=0.1, help="beta of Eq. (2)")
    parser.add_argument("--nll", type=float, least=0, default=0.01,
                        help="weight of the chosen dialogue's negative log-likelihood")
    parser.add_argument("--lr", type=float, least=0, default=2e-7, help="peak learning rate")
    parser.add_argument("--epochs", type=int, least=1, default=4, help="passes over the pairs")
    parser.add_argument("--batch_size", type=int, least=1, default=8,
                        help="pairs per step over all processes")
    parser.add_argument("--max_norm", type=float, above=0, default=1.0,
                        help="gradient clipping: maximum norm")
    parser.add_argument("--seed", type=int, least=0, below=2**63, default=0,
                        help="random seed of data order and hold-out")
    parser.add_argument("--candidates", help="candidates to rank (collect.py --states)")
    parser.add_argument("--ranked", needs="candidates",
                        help="where to write them (default: OUTPUT/ranked.jsonl)")
    parser.add_argument("--reference", choices=("privileged", "plain"), default="privileged",
                        needs="candidates",
                        help="privileged: the ranking's reference sees the solution (paper); plain:"
                        " it does not (official code)")
    # --packed, --micro_batch_size, --dtype, --max_steps, --save_minutes, --lora_rank, ...
    parser.add_machine_flags()
    args = parser.parse_args(argv)
    # the training needs --model; without a training, its flags would do nothing
    parser.refuse_idle_critic(args, RANKING_FLAGS)
    if args.privileged == "none":
        parser.refuse_ignored(args, ["reference"], "by a critic that does not see the solution")
    return args


if __name__ == "__main__":
    launch(main, parse_args())
