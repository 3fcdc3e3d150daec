"""A critic of one's own: it ranks candidates by their length, and prefers the shorter ones.

    python docs/forks/own_critic.py candidates.jsonl ranked.jsonl

Another critic replaces `advantages`. What it may read of a state: `task`, with the solution in
`ground_truth`; `messages`, what the agent saw; `candidates`; and `finished`, false for those that
were cut at the token limit. train_policy.py takes the file as it takes any critic's.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from formats.read import read_candidates
from runtime.files import write_jsonl


def advantages(state):
    """A number for each candidate; only their order, and for some rules their sign, matter."""
    lengths = [len(text) for text in state["candidates"]]
    mean = sum(lengths) / len(lengths)
    return [mean - length for length in lengths]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source, target = sys.argv[1:]
    states, _ = read_candidates(source)
    write_jsonl(target, [state | {"advantages": advantages(state), "ranker": "shortest"}
                         for state in states])
