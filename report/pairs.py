"""The pairs of candidates that train_policy.py learns from, as a file."""

from formats.read import read_candidates
from runtime.files import as_jsonl, write_new
from runtime.text import counted
from train_policy import state_pairs


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
    write_new(args.output, as_jsonl(rows))
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
              " be bad, too; --pairing positive_vs_negative has none of these (below 0, a value"
              " head predicts less than even odds of success: for it, keep --pairing halves)")
