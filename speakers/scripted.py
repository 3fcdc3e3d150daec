"""The scripted parties of the embedded worlds, as speakers. No model is needed."""

import random

from judge.sandbox import ANSWER_MARKER
from runtime.seeds import derive_seed
from speakers.interface import Speaker, Utterance
from toy.world import SCRIPTED


class ScriptedSpeaker(Speaker):
    """The embedded worlds' own human, or their noisy demonstrator as agent.

    `manner` chooses among several: `scripted:informed` is an agent that reads the solution.
    Without a manner, the speaker says fixed lines in tasks of no embedded world. They are enough
    for a dry run of the stages.
    """

    reads_history = True

    def __init__(self, role, manner=""):
        party = f"{role} {spec_of(manner)}"
        parties = {f"{other} {spec_of(its_manner)}" for _, other, its_manner in SCRIPTED}
        if party not in parties:
            raise SystemExit(f"found the {party}, expected one of: {', '.join(sorted(parties))}")
        self.role, self.manner = role, manner

    def reply(self, request):
        texts = [self._line(request.task, request.messages, derive_seed(request.seed, index))
                 for index in range(request.n)]
        return [Utterance(text, finished=True) for text in texts]

    def _line(self, task, messages, seed):
        if "toy" not in task and not self.manner:
            return self._dry_run_line(messages)
        script = SCRIPTED.get((task["domain"], self.role, self.manner))
        if script is None:
            raise SystemExit(f"found the {self.role} {spec_of(self.manner)} for {task['domain']}"
                             " tasks, expected one that this domain has (see SCRIPTED in"
                             " toy/world.py)")
        dialogue = [message for message in messages if message["role"] != "system"]
        return script(task, dialogue, random.Random(seed))

    def _dry_run_line(self, messages):
        if self.role == "human":
            return "I do not know."
        if any(message["role"] == "assistant" for message in messages):
            return f"{ANSWER_MARKER} pass"
        return "What else should I know?"


def spec_of(manner):
    """How --agent and --human name a manner."""
    return f"scripted:{manner}" if manner else "scripted"
