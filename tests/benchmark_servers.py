"""The part of benchmark.py about rollouts against servers of unequal latency."""

import itertools
import time
from collections import Counter

from chat_server import latencies, talking_apart

from colbench import DOMAINS
from collect import Rules, play
from speakers.interface import Speaker, SpeakerSettings, Utterance
from speakers.pool import run
from speakers.server import ServerSpeaker
from toy.world import toy_tasks


class Recorded(Speaker):
    """A party that says again what it said in earlier episodes, at once."""

    reads_history = True

    def __init__(self, episodes, role):
        self.lines = {}  # (dialogue, turn) -> text
        for episode in episodes:
            key = (episode["task"]["task_id"], episode["sample"])
            said = [message for message in episode["dialogue_history"][1:]
                    if message["role"] == role]
            for turn, message in enumerate(said):
                self.lines[key, turn] = message.get("output", message["content"])
        self.asked = Counter()

    def reply(self, request):
        turn = self.asked[request.key]
        self.asked[request.key] += 1
        return [Utterance(self.lines[request.key, turn], True)]


def played(tasks, agent, human, in_flight, max_turns=10):
    """(wall seconds, episodes) of a dialogue of each task, the judge's time included."""
    rules = Rules("Ask.", "Reply.", max_turns, 400, seed=0)
    with DOMAINS["backend"].open_judge(workers=1) as judge:
        began = time.perf_counter()
        episodes = list(run(lambda task: play(task, 0, agent, human, judge, rules), tasks,
                            in_flight))
        return time.perf_counter() - began, episodes


def said_in(episodes):
    """What was said, sorted by dialogue, since the order of arrival differs."""
    return sorted((episode["task"]["task_id"], episode["sample"],
                   [message["content"] for message in episode["dialogue_history"]])
                  for episode in episodes)


def bench_served(quick):
    """Wall seconds with both parties served, and the ideal: requests x latency / in flight."""
    count, mean = (40, 0.02) if quick else (400, 0.3)
    in_flight = 64
    tasks = toy_tasks("toy:backend:train", count)
    with talking_apart(mean) as url:
        agent, human = (ServerSpeaker(url, SpeakerSettings(name, batch_size=in_flight))
                        for name in ("agent", "human"))
        seconds, episodes = played(tasks, agent, human, in_flight)
    if any(episode["error"] for episode in episodes):
        raise SystemExit("found failed dialogues, expected none")
    requests = sum(len(episode["dialogue_history"]) - 1 for episode in episodes)
    return seconds, sum(itertools.islice(latencies(mean), requests)) / in_flight


def bench_overlap(folder, quick):
    """Wall seconds of a local agent with a served human, and of each of them alone.

    Alone means that the other party says at once what it said in the whole run.
    """
    from speakers.local import LocalSpeaker

    count, turns, mean = (16, 2, 0.02) if quick else (64, 4, 1.5)
    in_flight = 16
    tasks = toy_tasks("toy:backend:train", count)
    settings = SpeakerSettings(max_new_tokens=32, batch_size=in_flight, device="cpu")
    model = LocalSpeaker(folder, settings)  # loaded once; each run starts with no kept caches

    def agent():
        return LocalSpeaker(folder, settings, model.model, model.tokenizer)

    with talking_apart(mean) as url:
        def human():
            return ServerSpeaker(url, SpeakerSettings("human", batch_size=in_flight))

        together, episodes = played(tasks, agent(), human(), in_flight, turns)
        agent_alone, again = played(tasks, agent(), Recorded(episodes, "user"), in_flight, turns)
        human_alone, once_more = played(tasks, Recorded(episodes, "assistant"), human(), in_flight,
                                        turns)
    if not said_in(episodes) == said_in(again) == said_in(once_more):
        raise SystemExit("found other dialogues with one party recorded, expected the same")
    return together, agent_alone, human_alone


def print_servers(folder, quick, repeats):
    print("\n| key | what | seconds (wall) | against | ratio | target |\n|---|---|---|---|---|---|")
    seconds, ideal = median_run([bench_served(quick) for _ in range(repeats)])
    print(ratio_line("rollout_both_served", "400 dialogues, 64 in flight", seconds,
                     "requests x latency / in flight", ideal, 1.5))
    together, agent_alone, human_alone = median_run(
        [bench_overlap(folder, quick) for _ in range(repeats)])
    setting = f"local agent (alone {agent_alone:.1f} s), served human (alone {human_alone:.1f} s)"
    print(ratio_line("rollout_overlap", setting, together, "the slower alone",
                     max(agent_alone, human_alone), 1.2))


def median_run(runs):
    """The run of the median ratio to its slowest comparison."""
    runs = sorted(runs, key=lambda run: run[0] / max(run[1:]))
    return runs[len(runs) // 2]


def ratio_line(key, setting, seconds, against, peer, target):
    missed = "" if seconds <= target * peer else " (missed)"
    return (f"| [{key}] | {setting} | {seconds:.1f} | {against}: {peer:.1f}"
            f" | {seconds / peer:.2f}{missed} | <= {target} |")
