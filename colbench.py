"""ColBench: tasks, dialogue rules, what each party sees (SWEET-RL, arXiv 2503.15478, section 3).

An agent talks up to ten turns with a simulated human who has something in mind that the agent
cannot see. Then the agent delivers a Python function (backend, graded by hidden tests) or a web
page (frontend, graded by image similarity).

  1. A task is one JSON line: what the human says first, what the human has in mind
     (`hidden_information`, by default the solution), the solution, hidden tests.
  2. Agent and human each see their own view of the dialogue: `agent_messages`, `human_messages`
     (for pages `human_page_view`). train_critic.py defines what the critic sees.
  3. A judge gives the answer its reward. Model-written code and pages run only in sandboxed child
     processes: judge/.
  4. DOMAINS holds all that differs between functions and pages. A new domain is one more entry.
  5. `encode_dialogue` turns a dialogue into token ids and says which agent turn each belongs to.

    python colbench.py check TASKS.jsonl            run every backend solution on its own tests
    python colbench.py import FILE --output EPISODES.jsonl     official trajectories, or your logs
    python colbench.py show EPISODES.jsonl [TASK]   dialogues to read, of all tasks or of one
    python colbench.py websight ROWS.jsonl TRAIN.jsonl TEST.jsonl     tasks from WebSight rows

To change                      edit
    what counts as an answer   split_message; the marker: ANSWER_MARKER in judge/sandbox.py
    what a party is told       the prompts below
    a kind of task             DOMAINS, Domain
    the tokens of a dialogue   encode_dialogue; of a candidate: encode_candidates; what is dropped
                               if it is long: encode_within
    the loop of a dialogue     play in collect.py
formats/read.py reads files and checks every line.
"""

import base64
import bisect
import re
import typing

from judge.pages import PageJudge, graded_page, last_page, replace_page, solution_page
from judge.sandbox import ANSWER_MARKER, BackendJudge
from runtime.files import expect, without_nulls
from runtime.templates import end_of_turn, render, template_ids, turn_ids

# -----------------------------------------------------------------------------
# Dialogue rules

MAX_TURNS = 10
OUTPUT_MARKER = "OUTPUT:"  # pages: the agent's plan stands before it, the human sees the rest


def split_message(task, text, last_turn):
    """An agent message, without its thoughts, as (what the human reads, the answer or None).

    The answer follows ANSWER_MARKER ("I WANT TO ANSWER:") and ends at the next marker, if there is
    one. If the last turn lacks the marker, its whole message is the answer.
    """
    content = without_thoughts(text) or ""
    if DOMAINS[task["domain"]].pages and OUTPUT_MARKER in content:
        content = content.split(OUTPUT_MARKER, 1)[1].strip()
    if ANSWER_MARKER in content:
        parts = [part.strip() for part in content.split(ANSWER_MARKER)[1:]]
        # the first that is not empty: some models write the marker twice
        return content, next((part for part in parts if part), "")
    return content, (content if last_turn else None)


THOUGHTS, END_OF_THOUGHTS = "<think>", "</think>"


def without_thoughts(text):
    """What a reasoning model says after its thoughts; None if they never end.

    Some chat templates put the opening tag into the prompt, so the text has only the closing one.
    """
    if END_OF_THOUGHTS in text:
        return text.rsplit(END_OF_THOUGHTS, 1)[1].strip()
    if text.lstrip().startswith(THOUGHTS):
        return None
    return text.strip()


# -----------------------------------------------------------------------------
# What each party sees

# {max_turns} is filled in. With --max_turns 1, the ONE_TURN prompts replace the other two
BACKEND_AGENT_PROMPT = (
    "You help a person who needs a Python function. The person has details in mind that the request"
    " leaves out. Each message of yours is either one short question about such a detail, or your"
    " answer. You may send {max_turns} messages in all. When you know enough, write"
    f' "{ANSWER_MARKER}" and after it the complete function as plain Python code, without comments'
    " on it. Only this code is tested, so keep to the signature that was asked for."
)
BACKEND_ONE_TURN_PROMPT = (
    "You help a person who needs a Python function. The person has details in mind that the request"
    " leaves out, but you cannot ask about them: you send one message, and it is your answer. Write"
    f' "{ANSWER_MARKER}" at once, and after it the complete function as plain Python code, guessing'
    " what is left open. Only this code is tested, so keep to the signature that was asked for."
)
FRONTEND_AGENT_PROMPT = (
    "You design a web page together with a person who has a finished look in mind and sees each"
    " page that you send as a picture. First write down what you will do, then"
    f' "{OUTPUT_MARKER}" and after it one whole page from <html> to </html>, styled with Tailwind'
    " classes; for pictures use https://picsum.photos/WIDTH/HEIGHT. You may send {max_turns} pages"
    " in all, and the last one counts. When the person has nothing more to change, write"
    f' "{ANSWER_MARKER}" after "{OUTPUT_MARKER}" and then the final page.'
)
FRONTEND_ONE_TURN_PROMPT = (
    "You design a web page for a person who has a finished look in mind. You send one message and"
    " hear nothing back. First write down what you will do, then"
    f' "{OUTPUT_MARKER} {ANSWER_MARKER}" and after it one whole page from <html> to </html>, styled'
    " with Tailwind classes; for pictures use https://picsum.photos/WIDTH/HEIGHT."
)
BACKEND_HUMAN_PROMPT = (
    "You asked a programmer for a Python function. What you asked was:\n{problem_description}\n\n"
    "This is the function that you have in mind; the programmer cannot see it:\n"
    "{hidden_information}\n\n"
    "Answer the programmer's questions from it, in one or two plain sentences. Tell only what was"
    " asked. When the function does not settle the question, say that you do not know. Never write"
    " or quote code."
)
FRONTEND_HUMAN_PROMPT = (
    "You asked a designer for a web page. What you asked was:\n{problem_description}\n\n"
    "You see two pictures: the designer's page as it is now, and the page as you have it in mind,"
    " which the designer cannot see. Name the most visible differences in a few plain sentences, as"
    " changes that you would like. If there are none, say so. Do not write HTML.\n\n"
    "The designer's last message: {message}"
)


def agent_prompt_of(task, prompt, max_turns=MAX_TURNS):
    """The agent's instructions: the given prompt (an empty one means none), or the domain's own."""
    if prompt is None:
        domain = DOMAINS[task["domain"]]
        prompt = domain.agent_prompt
        if max_turns == 1 and domain.one_turn_prompt:
            prompt = domain.one_turn_prompt
    return filled(prompt, {"max_turns": str(max_turns)})


def prompt_of_episode(episode):
    """The instructions that the agent had; the domain's own if the episode does not tell."""
    max_turns = episode.get("max_turns") or MAX_TURNS
    return agent_prompt_of(episode["task"], episode.get("agent_prompt"), max_turns)


def agent_messages(history, prompt):
    """What the agent sees: its instructions and the dialogue, with its own turns as it wrote them.

    This function is not given the task, so it can add neither hidden information nor the solution.
    """
    system = [{"role": "system", "content": prompt}] if prompt else []
    return system + [{"role": message["role"],
                      "content": (message.get("output") or message["content"]).strip()}
                     for message in history]


def agent_view(episode):
    """(messages, finished): what the agent saw and said; whether each turn ended by itself."""
    history = episode["dialogue_history"]
    finished = [message.get("finished") is not False for message in history
                if message["role"] == "assistant"]
    return agent_messages(history, prompt_of_episode(episode)), finished


def request_index(messages):
    """The index of the first user message; a system message may stand before it."""
    return next(index for index, message in enumerate(messages) if message["role"] == "user")


def human_messages(task, history, prompt, judge=None):
    """What the human of a backend task sees: what it has in mind, and the dialogue, roles swapped.

    A prompt with the placeholder {dialogue_history}, as the official one has, gives the messages of
    the official code instead. `judge` is for domains whose human sees pages.
    """
    if "{dialogue_history}" in prompt:
        said = [f"{message['role']}:{message['content']}\n\n\n\n" for message in history]
        text = filled(prompt, task | {"dialogue_history": "".join([*said, "agent:"])})
        return [{"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": text}]
    swapped = {"user": "assistant", "assistant": "user"}
    return [{"role": "system", "content": filled(prompt, task)}] + [
        {"role": swapped[message["role"]], "content": message["content"]}
        for message in history[1:]]  # history[0], the request, is {problem_description}


def human_page_view(task, history, prompt, judge):
    """What the human of a frontend task sees: the prompt, the agent's message, both screenshots.

    `judge.picture` draws a page. A sentence replaces a screenshot where there is no page, or where
    it could not be drawn.
    """
    shown, wanted = last_page(history), solution_page(task["ground_truth"])
    agent_png = judge.picture(shown) if shown else None
    solution_png = judge.picture(wanted)
    words = replace_page(history[-1]["content"], "[the page below]")
    parts = [{"type": "text", "text": filled(prompt, task | {"message": words})}]
    if agent_png is None:
        missing = "The designer's page cannot be drawn." if shown else "The designer shows no page."
        parts.append({"type": "text", "text": missing})
    else:
        parts += [{"type": "text", "text": "The designer's page:"}, image_part(agent_png)]
    if solution_png is None:
        parts.append({"type": "text", "text": "The page you want cannot be drawn."})
    else:
        parts += [{"type": "text", "text": "The page you want:"}, image_part(solution_png)]
    return [{"role": "user", "content": parts}]


def filled(prompt, fields):
    """The prompt with each {name} of a text field filled in; all other braces stay.

    One pass, so braces within a field stay, too.
    """
    def fill(match):
        value = fields.get(match[1])
        return value if isinstance(value, str) else match[0]
    return re.sub(r"\{(\w+)\}", fill, prompt)


def image_part(png):
    """A screenshot as a part of a message in the OpenAI format."""
    data = base64.b64encode(png).decode()
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}


# -----------------------------------------------------------------------------
# Domains: all that differs between kinds of tasks


class Domain(typing.NamedTuple):
    """A kind of task. To add one, write an entry of DOMAINS; every stage takes it.

    Its tasks must name it in their field `domain`; otherwise they are read as backend or frontend
    tasks. Its agent_prompt must ask for ANSWER_MARKER, which ends a dialogue (`split_message`). A
    flag of its judge also goes into `collect_parser` (collect.py).

    The agent sees the task's `problem_description` and nothing else of it. The human's prompt must
    hold {hidden_information}, except for pages, and may hold any other text field of the task.
    """

    agent_prompt: str  # may hold {max_turns}
    human_prompt: str
    # open_judge(**flags) opens the judge, a context manager. Many threads may call its
    # grade(task, answer), which returns a judge.sandbox.Grade: a reward from 0 to 1, success
    # (whether the reward is 1; None if has_success is False), reasons ({test: "passed" or why
    # not}; a test that is passed counts as a sign that there was an answer). open_judge is None for
    # logs, whose rewards come with the dialogues
    open_judge: typing.Callable | None
    # (task, history, prompt, judge) -> the messages that the human reads. The prompt's placeholders
    # are still to be filled in; of the judge's methods, only grade and picture are there
    human_view: typing.Callable = human_messages
    graded_text: typing.Callable = lambda answer, history: answer  # what the judge grades
    one_turn_prompt: str | None = None  # replaces agent_prompt where a dialogue has one turn
    # check_task(task, where) checks the fields that only this domain has, and tidies them in place
    check_task: typing.Callable = lambda task, where: None
    reply_chars: int = 400  # human replies are cut to this many characters
    # True: a reward of 1 is a success, less is a failure. False: episodes have only a reward
    has_success: bool = True
    success_reward: float = 1.0  # without has_success: the least reward that `succeeded` accepts
    reward_heading: str = "Reward × 100"
    pages: bool = False  # answers are web pages: drawn for human, value critic and report
    flags: typing.Mapping = {}  # collect.py's flags for the judge -> their defaults

    @property
    def logged(self):
        """Whether its dialogues come from logs alone, with any number as their reward."""
        return self.open_judge is None


def check_backend_task(task, where):
    """Backend tasks need tests, calls whose values are compared with the solution's."""
    task["test_cases"] = without_nulls(expect(task, "test_cases", dict, where))
    if not task["test_cases"]:
        raise SystemExit(f"{where}: found no test in 'test_cases', expected at least one call"
                         " expression")
    for name in task["test_cases"]:
        expect(task["test_cases"], name, str, f"{where}, test_cases")


DOMAINS = {
    "backend": Domain(
        agent_prompt=BACKEND_AGENT_PROMPT,
        human_prompt=BACKEND_HUMAN_PROMPT,
        open_judge=BackendJudge,
        one_turn_prompt=BACKEND_ONE_TURN_PROMPT,
        check_task=check_backend_task,
        reward_heading="Tests passed %",
        flags={"judge": "fixed", "require_protection": False},
    ),
    "frontend": Domain(
        agent_prompt=FRONTEND_AGENT_PROMPT,
        human_prompt=FRONTEND_HUMAN_PROMPT,
        open_judge=PageJudge,
        human_view=human_page_view,
        graded_text=graded_page,
        one_turn_prompt=FRONTEND_ONE_TURN_PROMPT,
        reply_chars=1000,
        has_success=False,
        success_reward=0.9,  # the paper names no number
        reward_heading="Similarity × 100",
        pages=True,
        flags={"clip": None},
    ),
    "logged": Domain(  # dialogues of your own, with the reward that your log gives them
        agent_prompt="",
        human_prompt="",
        open_judge=None,
        has_success=False,
        reward_heading="Reward",
    ),
}


def succeeded(episode):
    """Whether the answer passed all tests; without tests, whether the reward is high enough."""
    if episode["success"] is None:
        return episode["reward"] >= DOMAINS[episode["task"]["domain"]].success_reward
    return episode["success"]


# -----------------------------------------------------------------------------
# Token ids of a dialogue, and which agent turn each belongs to


def encode_dialogue(tokenizer, messages, finished=(), generation_prompt=False):
    """Token ids of a dialogue, and for each the index of its agent turn (-1: not an agent token).

    A turn is its text and, when finished, its end-of-turn token. The prompt before it and the turn
    itself are tokenised separately, as in sampling. If the second turn was cut at the token limit
    (finished = [True, False]):

        <user> hi <end> <agent> hello <end> <user> more <end> <agent> some     ids
        -1     -1 -1    -1      0     0     -1     -1   -1    -1      1        turn_index

    The ids end with the last agent turn or, with `generation_prompt`, with the prompt for another
    one. Turns for which `finished` has no entry count as finished.
    """
    end_id, end_text = end_of_turn(tokenizer)
    ids, turn_index = [], []
    rendered = ""  # the text of these ids
    for turn, index in enumerate(turn_starts(messages, generation_prompt)):
        before = render(tokenizer, messages[:index])  # with the generation prompt
        # some tokenizers encode text differently after an end-of-turn token
        after_turn = ids[-1:] == [end_id]  # not at the start, nor after a turn that was cut
        added = template_ids(tokenizer, rendered, before, after_turn)  # what `before` adds
        ids += added
        turn_index += [-1] * len(added)
        if index == len(messages):
            break
        text = messages[index]["content"]
        closed = finished[turn] if turn < len(finished) else True
        [added] = turn_ids(tokenizer, [text], [closed])
        ids += added
        turn_index += [turn] * len(added)
        rendered = before + text + (end_text if closed else "")
    return ids, turn_index


def turn_starts(messages, generation_prompt):
    """The index of each agent turn; with a generation prompt, also of the one still to be said."""
    starts = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [*starts, len(messages)] if generation_prompt else starts


def encode_within(tokenizer, messages, max_length, finished=(), generation_prompt=False):
    """(ids, turn_index, dropped) of a dialogue in at most `max_length` tokens.

    A longer one loses its oldest turns, each with the reply to it, never part of a turn; `dropped`
    is their number, and turn_index counts the others from 0. None if the last turn does not fit.
    What stands before the first turn stays: instructions and request.
    """
    whole = encode_dialogue(tokenizer, messages, finished, generation_prompt)
    if len(whole[0]) <= max_length:
        return *whole, 0
    starts = turn_starts(messages, generation_prompt)

    def without_oldest(dropped):
        kept = messages[:starts[0]] + messages[starts[dropped]:]
        return encode_dialogue(tokenizer, kept, finished[dropped:], generation_prompt)

    def fits(dropped):
        return len(without_oldest(dropped)[0]) <= max_length

    # the least number of turns to drop, by bisection: a log may have hundreds
    dropped = bisect.bisect_left(range(len(starts)), True, lo=1, key=fits)
    if dropped >= len(starts):
        return None
    return *without_oldest(dropped), dropped


def encode_candidates(tokenizer, messages, texts, finished, max_length):
    """(ids, turn_index, dropped) of each candidate for the next turn of one dialogue.

    Each is turn 0 after the same prompt. If the longest does not fit, the result is None. A
    candidate that was cut at the token limit (finished: False) gets no end-of-turn token, so that
    the policy does not learn to stop there.
    """
    turns = turn_ids(tokenizer, texts, finished)
    room = max_length - max(map(len, turns))
    encoded = encode_within(tokenizer, messages, room, generation_prompt=True)
    if encoded is None:
        return None
    prompt, _, dropped = encoded
    return [(prompt + turn, [-1] * len(prompt) + [0] * len(turn), dropped) for turn in turns]


# -----------------------------------------------------------------------------
# Commands


def main(argv=None):
    from formats.commands import main as parse_and_run  # `import colbench` needs none of it
    parse_and_run(__doc__, argv)


if __name__ == "__main__":
    main()
