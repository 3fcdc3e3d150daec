r"""A critic with a value head: the regression head of the paper's Table 3, and its critic of pages.

  1. Pairs and held-out tasks are those of train_critic.py.
  2. The value of a turn: a linear head at the mean state of all tokens up to
     its end. A dialogue has the value of its last turn.                      turn_values
  3. A Bradley-Terry loss on the values of both dialogues of a pair.          value_objective
  4. A candidate's value stands for its advantage in ranked.jsonl.            ValueCritic, rank

    python variants/value_critic.py --episodes episodes.jsonl --model toy/base --output value \
        --pairs success_vs_failure --batch_size 24 --lr 3e-3 --epochs 2 \
        --candidates candidates.jsonl
    python variants/value_critic.py --episodes pages.jsonl --pairs all --margin 0.1 \
        --model Qwen/Qwen2-VL-7B-Instruct --output value --candidates candidates.jsonl

A vision-language --model sees a screenshot of the solution in place of its text. Values compare
turns of one task, and a value of 0 means nothing, so train the policy with `--pairing halves`.
Letters in shapes: B pairs, R rows, S turns, T tokens.
"""

import dataclasses
import sys
import typing
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForTokenClassification

from colbench import (
    DOMAINS, agent_view, encode_candidates, encode_dialogue, encode_within, request_index)
from formats.ranking import rank_states, refuse_unrankable
from formats.read import load_episodes, truncation_in_words
from runtime.flags import FlagParser
from runtime.models import fp32_head, load_model, load_tokenizer, open_to_train, sees_pictures
from runtime.processes import launch
from runtime.record import read_flags
from runtime.training import Run
from train_critic import (
    PAIRS, PRIVILEGED, RANKING_FLAGS, Critic, Row, critic_messages, learning_rate, plan_batches,
    split_pairs)
from variants.sight import Sight, forward_seen, vision_value_class

# -----------------------------------------------------------------------------
# What the critic reads


@dataclasses.dataclass(eq=False)
class ValueRow(Row):
    # with pictures: gives the model's inputs up to the first request, see Sight.opening_reader
    read_opening: typing.Callable | None = None


class SeenDialogue(typing.NamedTuple):
    """A dialogue as the critic sees it.

    If the model sees pictures, a processor encodes all up to the first request, the opening. Its
    token ids, `opening_ids`, take the place of the first `text_length` ids of the text.
    """

    messages: list  # to be encoded as text
    text_limit: int  # the most tokens that the text may have
    opening_ids: tuple = ()
    text_length: int = 0
    read_opening: typing.Callable | None = None  # for the row

    def row(self, ids, turn_index, dropped):
        """The row of the encoded text: its opening is replaced."""
        ids = [*self.opening_ids, *ids[self.text_length:]]
        turn_index = [-1] * len(self.opening_ids) + turn_index[self.text_length:]
        return ValueRow(ids, turn_index, dropped, read_opening=self.read_opening)


class Reader:
    """How dialogues and candidates become rows, with the solution as text or as a picture."""

    def __init__(self, path, privileged, max_length):
        self.privileged, self.max_length = privileged, max_length
        self.sight = Sight(path, privileged) if sees_pictures(path) else None
        self.tokenizer = self.sight.processor.tokenizer if self.sight else load_tokenizer(path)

    def dialogue_row(self, episode):
        """The row of an episode; None if its last turn does not fit."""
        messages, finished = agent_view(episode)
        seen = self._seen(episode["task"], messages)
        encoded = encode_within(self.tokenizer, seen.messages, seen.text_limit, finished)
        return seen.row(*encoded) if encoded else None

    def candidate_rows(self, task, messages, texts, finished):
        """A row for each candidate; None if they do not fit."""
        seen = self._seen(task, messages)
        encoded = encode_candidates(self.tokenizer, seen.messages, texts, finished,
                                    seen.text_limit)
        return [seen.row(*fields) for fields in encoded] if encoded else None

    def _seen(self, task, messages):
        """The SeenDialogue of these messages, with the solution as text or as a picture."""
        if self.sight is None:
            return SeenDialogue(critic_messages(task, messages, self.privileged), self.max_length)
        if DOMAINS[task["domain"]].logged:
            raise SystemExit("found dialogues of your own logs, which have no pictures, and a"
                             " vision-language --model; expected a model of texts")
        opening = messages[:request_index(messages) + 1]
        read_opening = self.sight.opening_reader(task, opening)
        opening_ids = tuple(read_opening()["input_ids"][0].tolist())
        text_ids, _ = encode_dialogue(self.tokenizer, opening, generation_prompt=True)
        text_limit = self.max_length - len(opening_ids) + len(text_ids)
        return SeenDialogue(messages, text_limit, opening_ids, len(text_ids), read_opening)


# -----------------------------------------------------------------------------
# The objective


def turn_values(model, rows):
    """The value of each agent turn, (R, S); 0 for turns that a row lacks.

    A turn's value is the head's at the mean state of all tokens up to its end. The head is linear,
    so it is the mean of its logits at these tokens.
    """
    if rows[0].read_opening and len(rows) > 1:  # pictures differ in size: one row at a time
        return pad_sequence([turn_values(model, [row])[0] for row in rows], batch_first=True)
    ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)  # (R, T)
    turn_index = pad_sequence([torch.tensor(row.turn_index) for row in rows], batch_first=True,
                              padding_value=-1)  # (R, T)
    ids, turn_index = ids.to(model.device), turn_index.to(model.device)
    if rows[0].read_opening:
        inputs = rows[0].read_opening().to(model.device, model.dtype)
        logits = forward_seen(model, ids, **inputs).logits
    else:
        logits = model(ids, use_cache=False).logits
    logits = logits[..., 0].float()  # (R, T)
    means = logits.cumsum(1) / torch.arange(1, ids.shape[1] + 1, device=ids.device)
    ends = turn_index != F.pad(turn_index, (0, 1), value=-1)[:, 1:]  # (R, T)
    turns = torch.arange(max(row.turns for row in rows), device=ids.device)
    is_end = (turn_index[..., None] == turns) & ends[..., None]  # (R, T, S)
    return (means[..., None] * is_end).sum(1)


def value_objective(model, pairs):
    """-log sigma(V(better dialogue) - V(worse one)), V the value of the last turn: name -> (B,)."""
    rows = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]  # R = 2 B
    values = turn_values(model, rows)  # (R, S)
    numbers = torch.arange(1, values.shape[1] + 1, device=values.device)  # of turns, from 1
    turns = torch.tensor([row.turns for row in rows], device=values.device)
    is_last = numbers == turns[:, None]  # (R, S)
    chosen, rejected = (values * is_last).sum(1).chunk(2)  # (B,) each
    margin = chosen - rejected
    return {"loss": -F.logsigmoid(margin), "accuracy": margin > 0, "margin": margin}


# -----------------------------------------------------------------------------
# The run


def main(args):
    if args.episodes:
        if args.candidates:
            refuse_unrankable(args.candidates, PRIVILEGED[args.privileged])  # before the training
        train(args)
    if args.candidates:
        rank(args)


def train(args):
    run = Run(args, args.episodes, may_differ=RANKING_FLAGS)
    if run.complete:
        return
    run.remove("ranked.jsonl", "ranked.jsonl.r*")  # left by this critic after fewer steps
    reader = Reader(args.model, args.privileged, args.max_length)
    episodes, omitted = load_episodes(args.episodes)
    episodes.sort(key=lambda episode: episode["task"]["task_id"])  # a task's pictures are read once
    for episode in run.watch(episodes, "episode"):
        episode["row"] = reader.dialogue_row(episode)
    truncation = truncation_in_words([episode["row"] for episode in episodes], args.max_length)
    run.say(f"{len(episodes)} episodes ({omitted} failed ones omitted); {truncation}")
    groups, held_out = split_pairs(episodes, args, run)
    pairs = [pair for group in groups for pair in group] + held_out
    rows = dict.fromkeys(row for pair in pairs for row in pair)  # each once
    run.refuse_unequal_data([row.ids for row in rows])

    # FSDP2 warns of changing a head's output in place, which nothing does here
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    if reader.sight:
        model = open_to_train(args, run, vision_value_class(args.model))
    else:
        model = open_to_train(args, run, AutoModelForTokenClassification, num_labels=1)
    # a difference of two values has no bias, so only rounding would move it
    model.score.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=run.device != "cpu")
    # rows with pictures are computed one by one, and all ranks must run equally many forwards
    size = 1 if reader.sight else args.micro_batch_size
    batches = plan_batches(groups, args.epochs, args.batch_size, args.shuffle, args.seed)
    steps, steps_per_epoch = run.limit(len(batches)), len(batches) // args.epochs
    for step in range(run.resume(model, optimizer), steps):
        lr = learning_rate(step, len(batches), args.lr)
        optimizer.param_groups[0]["lr"] = lr
        batch = sorted(batches[step], key=lambda pair: max(row.last_turn_start for row in pair))
        for mine, weight in run.share(batch, size):
            metrics = value_objective(model, mine)
            (weight * metrics["loss"].sum() / len(batch)).backward()
            run.add("train", metrics, weight / len(batch))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if held_out and ((step + 1) % steps_per_epoch == 0 or step + 1 == steps):
            with run.scoring(model):
                for mine, weight in run.share(held_out, size):
                    run.add("holdout", value_objective(model, mine), weight / len(held_out))
        run.log(step, {"optim/lr": lr, "optim/grad_norm": norm, "holdout/pairs": len(held_out)})
        run.save_state_if_due(step + 1, model, optimizer)
    run.save(model, reader.sight.processor if reader.sight else reader.tokenizer)


# -----------------------------------------------------------------------------
# The trained critic as a ranker of turns


class ValueCritic:
    """As train_critic.Critic: opens a directory that this script wrote, and gives turns values."""

    def __init__(self, path, device=None, dtype=None):
        flags = read_value_flags(path)
        self.reader = Reader(path, flags["privileged"], flags["max_length"])
        kind = AutoModelForTokenClassification
        if self.reader.sight:
            kind = vision_value_class(path)
        self.model = load_model(path, device, kind, dtype).eval()
        self.model.score = fp32_head(self.model.score)

    def advantages(self, task, messages, texts, finished):
        """One value a text, as the next turn after `messages`; None if they are too long."""
        texts = [text.strip() for text in texts]  # as in the dialogues that the critic has read
        rows = self.reader.candidate_rows(task, messages, texts, finished)
        if rows is None:
            return None
        return self.turn_advantages(rows).sum(1).tolist()  # S is 1, or 0 if all are empty

    def dialogue_row(self, episode):
        """The row of an episode; None if its last turn does not fit."""
        return self.reader.dialogue_row(episode)

    @torch.no_grad()
    def turn_advantages(self, rows):
        """The value of each turn of the rows, (R, S)."""
        values = turn_values(self.model, rows)
        found = values[~values.isfinite()]
        if len(found):
            raise SystemExit(f"found {len(found)} values that are not finite ({found[0]}), expected"
                             " finite ones; rank again with --dtype float32 and a new --ranked,"
                             " without --episodes")
        return values


CRITIC_FLAGS = ("privileged", "holdout")  # flags that critics have, and no policy


def read_value_flags(path):
    """What a value critic was trained with. The flag `normalise` marks a critic of log-ratios."""
    flags = read_flags(path, ("max_length", "model", *CRITIC_FLAGS))
    if "normalise" in flags:
        raise SystemExit(f"{path}: found a critic of log-ratios, expected one with a value head;"
                         " give it to train_critic.py")
    return flags


def open_critic(path, device=None, dtype=None):
    """The critic in a directory, of log-ratios or with a value head."""
    kind = Critic if "normalise" in read_flags(path, CRITIC_FLAGS) else ValueCritic
    return kind(path, device, dtype)


def rank(args):
    """Give each candidate of --candidates its value."""
    read_value_flags(args.output)  # refuses another kind of critic
    rank_states(args, ValueCritic)


# -----------------------------------------------------------------------------
# Command line


def parse_args(argv=None):
    parser = FlagParser(__doc__)
    parser.add_argument("--episodes", nargs="+", action="extend", default=[],
                        help="episode files to train on; omit them to rank with a trained critic")
    parser.add_argument("--model", help="model to start from")
    parser.add_argument("--output", required=True, help="the critic's checkpoint directory")
    parser.add_argument("--max_length", type=int, least=1, default=8192,
                        help="tokens of a dialogue, pictures included; a longer one loses its"
                        " oldest turns, and is omitted if the last does not fit")
    parser.add_argument("--privileged", choices=tuple(PRIVILEGED), default="ground_truth",
                        help="what the critic sees besides the dialogue: the solution, or nothing")
    parser.add_argument("--pairs", choices=PAIRS, default="best_vs_rest",
                        help="which episodes of a task are paired, as in train_critic.py")
    parser.add_argument("--margin", type=float, least=0, default=0.0,
                        help="smallest difference in reward within a pair; for pages, give 0.1")
    parser.add_argument("--shuffle", choices=("pairs", "groups"), default="pairs",
                        help="what an epoch shuffles: single pairs, or tasks whose pairs stay side"
                        " by side")
    parser.add_argument("--holdout", type=float, least=0, below=1, default=0.05,
                        help="share of tasks, rounded up, that are held out for evaluation")
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
    parser.add_machine_flags()
    args = parser.parse_args(argv)
    parser.refuse_ignored(args, ["packed"], "by a value head, whose rows are computed apart")
    parser.refuse_idle_critic(args, RANKING_FLAGS)
    return args


if __name__ == "__main__":
    launch(main, parse_args())
