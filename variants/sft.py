r"""Supervised training on dialogues: with --successes, rejection fine-tuning (the paper's Table 2).

  1. Episodes are read as the agent sees them; with --successes only those that succeeded.
  2. The loss is the negative log-likelihood of the agent's tokens.        supervised_objective

    python variants/sft.py --episodes episodes.jsonl --successes --model toy/base --output rft \
        --batch_size 16 --lr 1e-3 --epochs 12
    python variants/sft.py --episodes demonstrations.jsonl --model MODEL --output warm_start

The defaults are for an 8B model, with the numbers of the paper's Table 5. The tiny toy/base needs
the values shown with it.

Reads episodes (collect.py; `--agent scripted` plays demonstrations in an embedded world). Writes a
checkpoint that from_pretrained opens, run.json and metrics.jsonl.

Difference from the paper: none known; it says neither which dialogues count as successes (here:
all tests passed; a page: a similarity of 0.9; a log: a reward of at least 1) nor how tokens are
weighted (here: all alike).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from colbench import succeeded
from formats.read import custom_prompt, load_episodes, truncation_in_words
from runtime.flags import FlagParser
from runtime.models import load_tokenizer, open_to_train
from runtime.processes import launch
from runtime.training import Run
from train_policy import dialogue_row, learning_rate, plan_batches, turn_logprobs


def supervised_objective(model, rows, mean_tokens):
    """Negative log-likelihood of each dialogue divided by `mean_tokens`; a dict of (R,) tensors.

    `mean_tokens` is the mean number of agent tokens of a dialogue. Every token thus has the same
    weight. Dividing by each dialogue's own number would give more weight to the tokens of short
    dialogues, and so teach the model to stop early.
    """
    logprobs, tokens = turn_logprobs(model, rows)  # (R, S) each
    return {"loss": -logprobs.sum(1) / mean_tokens}


def main(args):
    if args.packed:  # the same numbers, with logits in parts
        global turn_logprobs
        from fast.packed import turn_logprobs
    run = Run(args, args.episodes)
    if run.complete:
        return
    tokenizer = load_tokenizer(args.model)
    episodes, omitted = load_episodes(args.episodes)
    chosen = [episode for episode in episodes if succeeded(episode) or not args.successes]
    rows = [dialogue_row(tokenizer, episode, args.max_length)
            for episode in run.watch(chosen, "episode")]
    truncation = truncation_in_words(rows, args.max_length)
    rows = [row for row in rows if row]
    run.say(f"{len(episodes)} episodes ({omitted} failed ones omitted): {len(rows)} to learn from;"
            f" {truncation}")
    if not any(row.turns for row in rows):  # a turn that was cut at once has no token
        raise SystemExit(f"{' '.join(args.episodes)}: found no episode to learn from, expected"
                         f" {'a success' if args.successes else 'one'} whose last turn fits into"
                         f" --max_length {args.max_length}; a model that never succeeds has none:"
                         " give demonstrations, without --successes")
    run.refuse_unequal_data([row.ids for row in rows])
    mean_tokens = sum(turn >= 0 for row in rows for turn in row.turn_index) / len(rows)

    model = open_to_train(args, run)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=run.device != "cpu")
    batches = plan_batches([rows], args.epochs, args.batch_size, "pairs", args.seed)
    steps = run.limit(len(batches))
    for step in range(run.resume(model, optimizer), steps):
        lr = learning_rate(step, len(batches), args.lr)
        optimizer.param_groups[0]["lr"] = lr
        batch = sorted(batches[step], key=lambda row: row.last_turn_start)
        for mine, weight in run.share(batch, args.micro_batch_size):
            metrics = supervised_objective(model, mine, mean_tokens)
            (weight * metrics["loss"].sum() / len(batch)).backward()
            run.add("train", metrics, weight / len(batch))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        run.log(step, {"optim/lr": lr, "optim/grad_norm": norm})
        run.save_state_if_due(step + 1, model, optimizer)
    run.save(model, tokenizer, custom_prompt(chosen, run.say))


def parse_args(argv=None):
    parser = FlagParser(__doc__)
    parser.add_argument("--episodes", nargs="+", action="extend", required=True,
                        help="episode files")
    parser.add_argument("--successes", action="store_true",
                        help="learn from successful episodes alone: rejection fine-tuning")
    parser.add_argument("--model", required=True, help="model to start from")
    parser.add_argument("--output", required=True, help="checkpoint directory to write")
    parser.add_argument("--max_length", type=int, least=1, default=8192,
                        help="tokens of a dialogue; a longer one loses its oldest turns, and is"
                        " omitted if the last does not fit")
    # the defaults are the paper's Table 5
    parser.add_argument("--lr", type=float, least=0, default=2e-7, help="peak learning rate")
    parser.add_argument("--epochs", type=int, least=1, default=4, help="passes over the dialogues")
    parser.add_argument("--batch_size", type=int, least=1, default=32,
                        help="dialogues per step over all processes")
    parser.add_argument("--max_norm", type=float, above=0, default=1.0,
                        help="gradient clipping: maximum norm")
    parser.add_argument("--seed", type=int, least=0, below=2**63, default=0,
                        help="random seed of data order")
    parser.add_machine_flags()
    return parser.parse_args(argv)


if __name__ == "__main__":
    launch(main, parse_args())
