"""A page of results, dialogues and training curves; and pairs for other trainers.

    python -m report base=base.jsonl sweet=sweet.jsonl --critic critic \
        --metrics sweet=sweet/metrics.jsonl --output report.html
    python -m report --metrics sweet=sweet/metrics.jsonl --output training.html
                                                  # watch a training run; no episodes yet
    python -m report pairs ranked.jsonl --output pairs.jsonl
                                                  # prompt / chosen / rejected, for TRL and others

The page is one file that needs no network. Its numbers are those of evaluate.py. It reads the
run.json beside the files it is given, too.

To change what is drawn, edit report/charts.py; what is told of a run, report/training.py; how
it looks, report/page.html; what the page holds, report/page.py.
"""

import sys
import tempfile
from pathlib import Path

from colbench import DOMAINS
from evaluate import score
from formats.policies import named_files, read_policies
from formats.read import read_candidates
from formats.verdict import all_tables, verdict
from report.page import annotate, overview, page_of
from report.training import (
    held_out_tasks, ranking_sentences, read_training, training_sentences)
from runtime.files import write_atomically, write_new
from runtime.flags import FlagParser
from runtime.processes import launch
from runtime.text import counted
from train_policy import PAIRINGS, state_pairs
from variants.value_critic import open_critic


def main(args):
    if args.command == "pairs":
        write_pairs(args)
        return
    folder = Path(args.output).parent
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()  # fails before the work, if at all
    training = [read_training(name, path) for name, path in metrics_files(args)]
    policies = read_policies(args.policies)
    if policies:
        results = score(policies)
        sentences, tables = verdict(results), all_tables(results)
        if DOMAINS[results["domain"]].logged:  # which turns helped is the question, not who won
            sentences = [*ranking_sentences(training), *sentences]
        if args.critic:
            annotate(policies, open_critic(args.critic), held_out_tasks(args.critic))
        else:
            annotate(policies, critic=None, held_out=())
    else:  # to watch a training run
        results, sentences, tables = None, list(training_sentences(training)), []
    data = overview(results, policies, named_files(args.policies), training)
    data |= {"sentences": sentences, "tables": tables}
    write_atomically(args.output, page_of(data, policies))
    print("\n".join([*sentences, f"report: {args.output}"]))


def metrics_files(args):
    """(name, path) of each metrics.jsonl to show: those of --metrics, and that of --critic."""
    metrics = named_files(args.metrics)
    if args.critic:
        of_critic = Path(args.critic, "metrics.jsonl")
        given = [Path(path).resolve() for _, path in metrics]
        if of_critic.is_file() and of_critic.resolve() not in given:
            metrics.insert(0, ("critic", of_critic))
    names = [name for name, _ in metrics]
    if len(set(names)) < len(names):
        raise SystemExit(f"found metrics of the names {', '.join(names)}, expected a name of its"
                         " own for each")
    return metrics


def write_pairs(args):
    """Write pairs as TRL takes them; `finished` (not cut) and `advantages` are of both sides."""
    states, omitted = read_candidates(args.candidates, ranked=True)
    rows = []
    for state in states:
        for pair in state_pairs(state, args.pairing, args.pairs_per_state, args.seed):
            chosen, rejected = [[{"role": "assistant", "content": state["candidates"][index]}]
                                for index in pair]
            rows.append({"prompt": state["messages"], "chosen": chosen, "rejected": rejected,
                         "finished": [state["finished"][index] for index in pair],
                         "advantages": [state["advantages"][index] for index in pair]})
    if not rows:
        raise SystemExit(f"{args.candidates}: found no pair with --pairing {args.pairing}, expected"
                         " candidates of different advantage; try the other --pairing")
    write_new(args.output, rows)
    said = f"{args.output}: {counted(len(rows), 'pair')} of {counted(len(states), 'state')}"
    if omitted:
        said += f" ({omitted} more have no advantages)"
    cut = sum(not all(row["finished"]) for row in rows)
    if cut:
        said += (f"; {cut} with a candidate that was cut at the token limit (`finished`): other"
                 " trainers teach to stop there, so filter these")
    print(said)
    below = sum(row["advantages"][0] < 0 for row in rows)
    if below:
        print(f"{below} chosen candidates have an advantage below 0: the better half of a state may"
              " be bad, too; --pairing positive_vs_negative has none of these (of a value head, 0"
              " means nothing: for it, keep --pairing halves)")


def parse_args(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["pairs"]:
        return parse_pairs(argv[1:])
    parser = FlagParser(__doc__)
    parser.prog = "python -m report"
    parser.add_argument("policies", nargs="*", metavar="NAME=EPISODES.jsonl",
                        help="as for evaluate.py; a NAME given again is another seed")
    parser.add_argument("--metrics", nargs="+", action="extend", default=[],
                        metavar="NAME=METRICS.jsonl",
                        help="metrics.jsonl of checkpoints, for training curves")
    parser.add_argument("--critic", help="checkpoint of a critic: its advantages shade the turns"
                        " (of Eq. (3), also where it ranked with --reference plain), and its"
                        " metrics are shown, too")
    parser.add_argument("--output", required=True, help="FILE.html to write")
    args = parser.parse_args(argv)
    args.command = "page"
    if not args.output.endswith(".html") or Path(args.output).is_dir():
        raise SystemExit(f"found --output {args.output}, expected FILE.html")
    if not args.policies and not args.metrics:
        raise SystemExit("found neither episodes nor --metrics, expected NAME=EPISODES.jsonl of"
                         " some policies, or --metrics to watch a training run")
    if not args.policies:
        parser.refuse_ignored(args, ["critic"], "without episodes")
    return args


def parse_pairs(argv):
    parser = FlagParser("Write ranked candidates as pairs that TRL's DPOTrainer takes.")
    parser.prog = "python -m report pairs"
    parser.add_argument("candidates", metavar="RANKED.jsonl", help="ranked candidates")
    parser.add_argument("--output", required=True, help="FILE.jsonl to write")
    # the same flags give the same pairs as in train_policy.py
    parser.add_argument("--pairing", choices=PAIRINGS, default="halves",
                        help="which candidates are paired, see train_policy.py")
    parser.add_argument("--pairs_per_state", type=int, least=1, default=4,
                        help="pairs drawn from a state's candidates")
    parser.add_argument("--seed", type=int, least=0, default=0, help="random seed of the pairs")
    args = parser.parse_args(argv)
    args.command = "pairs"
    return args


if __name__ == "__main__":
    launch(main, parse_args(), advice="Nothing was written; rerun the same command.")
