r"""Best of N: at each turn the agent says the best of N candidates (the paper's Figure 3a).

  1. The agent is sampled `--n` times in the state before its turn.            BestOfN.reply
  2. A critic chooses one of them,                                             CriticChoice
     or a grader model, which reads all at once.                               GraderChoice

    python variants/best_of_n.py --n 16 --critic critic --tasks toy:backend:test --num_tasks 200 \
        --agent toy/base --output best16.jsonl
    python variants/best_of_n.py --n 4 --critic grader:http://localhost:8000/v1 \
        --critic_model meta-llama/Llama-3.1-70B-Instruct --tasks test.jsonl --agent policy \
        --human http://localhost:8000/v1 --human_model meta-llama/Llama-3.1-70B-Instruct \
        --output graded4.jsonl

All other flags are those of `collect.py --tasks`. Reads tasks and a critic; writes episodes as
collect.py does, with `best_of_n` and `scorer` noted in each. A critic that sees the solution cannot
choose for a deployed policy: with one, this measures the critic. The critic's reference sees the
solution, too, as in Eq. (3), even if the critic has ranked with --reference plain.

Torchrun would take `--n` for a flag of its own, so give it `--` before the name of this script.

To choose in another way, add a class with a method `best` and an attribute `given_up`, name it in
`open_choice`, and let `main` take its name, which is no critic's directory.

Differences from the paper: it says neither how a tie is broken (here: the first candidate) nor what
becomes of a state that is too long for the critic (here: the first candidate).
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from collect import collect_parser, episode_key, plan_episodes, play
from runtime.names import GRADER, check_spec, is_server
from runtime.processes import join_processes, launch
from runtime.record import open_rows, read_flags
from runtime.text import harmless
from speakers import load_speaker
from speakers.fill import fill, print_summary
from speakers.interface import Request, Speaker, SpeakerError, SpeakerSettings
from speakers.pool import gather
from speakers.roles import open_parties, refuse_unused
from variants.value_critic import CRITIC_FLAGS, open_critic


class BestOfN(Speaker):
    """An agent that says the best of n candidates."""

    def __init__(self, agent, choice, n):
        self.agent, self.choice, self.n = agent, choice, n

    def reply(self, request):
        """One Utterance: the best."""
        candidates = self.agent.reply(request._replace(n=self.n))
        # an empty message must never win, whoever chooses
        spoken = [candidate for candidate in candidates if candidate.text.strip()] or candidates
        return [spoken[self.choice.best(request, spoken)]]

    @property
    def given_up(self):
        return self.agent.given_up or self.choice.given_up


class CriticChoice:
    """The candidate of the greatest advantage."""

    given_up = None

    def __init__(self, critic):
        self.critic = critic

    def best(self, request, candidates):
        """Its index; 0 where the state is too long for the critic."""
        distinct = list(dict.fromkeys(candidates))  # equal ones are computed once
        texts = [candidate.text for candidate in distinct]
        finished = [candidate.finished for candidate in distinct]
        # the critic is a model, so it computes through `gather` (see speakers/pool.py)
        advantages = gather(self.advantages, (request.task, request.messages, texts, finished))
        if advantages is None:
            return 0
        return candidates.index(distinct[advantages.index(max(advantages))])

    def advantages(self, states):
        return [self.critic.advantages(*state) for state in states]


class GraderChoice:
    """The candidate that a language model names, which reads all of them at once."""

    def __init__(self, speaker):
        self.speaker = speaker
        self.unnamed = 0  # replies that named no candidate

    @property
    def given_up(self):
        return self.speaker.given_up

    def best(self, request, candidates):
        """Its index; 0 if the model names none."""
        dialogue = "\n".join(f"{message['role']}: {message['content']}"
                             for message in request.messages)
        listed = "\n".join(f"[{number}] {candidate.text}"
                           for number, candidate in enumerate(candidates, 1))
        question = (
            f"An assistant and a user talk:\n{dialogue}\n\n"
            f"Candidates for the assistant's next message:\n{listed}\n\n"
            "Which candidate brings the user's task furthest? Reply with its number alone."
        )
        try:
            answer = self.speaker.reply(Request([{"role": "user", "content": question}]))
            said = answer[0].spoken
        except SpeakerError as error:  # the first candidate would pass for the best of N
            raise SpeakerError(f"grader: {error}") from None
        number = number_named(said)
        if number and 1 <= number <= len(candidates):
            return number - 1
        self.unnamed += 1
        # if no reply names one, best of N is no more than one sample
        if self.unnamed in (1, 10, 100, 1000, 10_000):
            tqdm.write(f"the grader's reply {harmless(said[:60])!r} names no candidate, expected a"
                       f" number from 1 to {len(candidates)}; after such replies (so far"
                       f" {self.unnamed}) the first candidate is taken; if they are many, use"
                       " another grader", sys.stderr)
        return 0


def number_named(reply):
    """The number that a reply begins with, or its only one; None where it names none or several.

    "Of the 4 candidates, number 2 is best" names two, and the first is not meant.
    """
    begins = re.match(r"\W*(?:candidate|number|option)?\W*(\d{1,9})", reply, re.IGNORECASE)
    numbers = {begins[1]} if begins else set(re.findall(r"\d{1,9}", reply))
    return int(numbers.pop()) if len(numbers) == 1 else None


# -----------------------------------------------------------------------------
# The run


def main(args):
    if args.critic.startswith(GRADER):
        check_spec(args.critic.removeprefix(GRADER))
    elif is_server(args.critic):
        raise SystemExit(f"{args.critic}: found the address of a server, expected a critic's"
                         f" directory, or a grader model, as --critic {GRADER}{args.critic}")
    else:
        read_flags(args.critic, CRITIC_FLAGS)
    process = join_processes()
    episodes = collect_episodes(args, process)
    if process.leads:
        print_summary(episodes, args)


def collect_episodes(args, process):
    """As in collect.py, with best of N between agent and dialogue."""
    jobs, rules, domain, inputs = plan_episodes(args, process)
    scorer = args.critic.removeprefix(GRADER)
    store = open_rows(args.output, vars(args), inputs, process, episode_key,
                      models=(args.agent, args.human, scorer))
    if store.missing(jobs):
        with open_parties(args, process, domain, store) as (sampled, human, judge, played_by):
            played_by["best_of_n"] = args.n
            if args.critic_model:
                played_by["scorer"] = GRADER + args.critic_model
            else:
                played_by["scorer"] = args.critic.rstrip("/")  # as the record of the run has it
            agent = BestOfN(sampled, open_choice(args, process), args.n)

            def work(key):
                _, sample = key
                return play(jobs[key], sample, agent, human, judge, rules) | played_by

            fill(store, jobs, work, (agent, human, judge), in_flight=args.batch_size)
    return store.finish(jobs)


def open_choice(args, process):
    """The GraderChoice or CriticChoice that --critic names."""
    if args.critic.startswith(GRADER):
        settings = SpeakerSettings(
            model_name=args.critic_model, temperature=args.critic_temperature,
            max_new_tokens=args.critic_max_new_tokens, batch_size=args.batch_size,
            device=process.device, dtype=args.dtype)
        return GraderChoice(load_speaker(args.critic.removeprefix(GRADER), "grader", settings))
    return CriticChoice(open_critic(args.critic, process.device, args.dtype))


# -----------------------------------------------------------------------------
# Command line


def parse_args(argv=None):
    parser = collect_parser(__doc__)
    parser.add_argument("--n", type=int, least=1, needs="tasks", required=True,
                        help="candidates of each turn")
    parser.add_argument("--critic", required=True, help="a critic's checkpoint directory, or"
                        " grader:SPEC, a language model named as --agent is")
    parser.add_argument("--critic_model", help="model name to ask a grader's server for")
    parser.add_argument("--critic_temperature", type=float, least=0, default=0.0,
                        help="sampling temperature of a grader")
    parser.add_argument("--critic_max_new_tokens", type=int, least=1, default=16,
                        help="token limit of a grader's reply; a reasoning model needs thousands")
    args = parser.parse_args(argv)
    refuse_unused(parser, args, args.critic.removeprefix(GRADER))
    if not args.critic.startswith(GRADER):
        parser.refuse_ignored(args, ["critic_temperature", "critic_max_new_tokens"],
                              f"because {args.critic} is not a grader model")
    if not is_server(args.critic.removeprefix(GRADER)):
        parser.refuse_ignored(args, ["critic_model"],
                              f"because {args.critic} is not the address of a server")
    return args


if __name__ == "__main__":
    launch(main, parse_args())
