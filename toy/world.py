"""The embedded worlds: two small ColBench domains whose tasks are drawn by a program.

For whoever wants to run every stage on a CPU in minutes, to test it, or to measure how true a
critic's credit is. Nothing here is needed to understand SWEET-RL or to run it on real data.

The backend world asks for functions on a text, the frontend world for web pages. In both, the
request leaves out most of what the human has in mind. Each world has

  - tasks in the ColBench format, in splits that share no task (`toy_tasks`);
  - a scripted human, who looks only at the task and at the agent's last message;
  - a scripted agent, the noisy demonstrator that the base policies in toy/base and
    toy/base_frontend imitate. It knows what the human said and nothing else of the task; only the
    `informed` one reads the solution.

Two parameters of the backend world say how much outcomes alone can teach: the number of topics, and
how much the base policy knows of what each of them hides (NUM_TOPICS and NOISY, below).

In the backend world, the right credit of each turn is known (`toy_credit`), so a critic's
advantages can be compared with the truth (`credit_auc`). `toy_model` makes the tiny model that
training starts from. The table SCRIPTED, at the end, lists the parties: a new one, such as a human
that lies, is one function and one entry.
"""

import functools
import itertools
import random
import re
import typing

from colbench import (
    MAX_TURNS,
    OUTPUT_MARKER,
    SOLUTION_NOTE,
    complete_task,
    derive_seed,
    first_request,
    split_message,
)
from judge.pages import extract_html, last_page
from judge.sandbox import ANSWER_MARKER, grade


def toy_tasks(spec, num_tasks):
    """The first `num_tasks` tasks of `toy:DOMAIN:SPLIT`.

    `toy:backend:SPLIT:TOPICS` names a world with so many topics.
    """
    found = re.fullmatch(r"toy:(backend|frontend):(train|valid|test)(?::(\d+))?", spec)
    if found is None or (found[3] and found[1] != "backend"):
        raise SystemExit(
            f"found --tasks {spec}, expected toy:backend:train, toy:frontend:test, ..."
            " (train, valid or test)"
        )
    domain, split, num_topics = found.groups()
    if domain == "frontend":
        return frontend_tasks(split, num_tasks)
    num_topics = int(num_topics or NUM_TOPICS)
    if not 1 <= num_topics <= len(TOPICS):
        raise SystemExit(f"found --tasks {spec}, expected 1 to {len(TOPICS)} topics")
    return backend_tasks(split, num_tasks, num_topics)


# -----------------------------------------------------------------------------
# Backend tasks: functions that change a text by hidden rules
#
# A topic ("invoice") makes five of sixteen details likely, and a task needs two or three of those.
# No prompt says which details go with which topic: a policy has to learn it, while whoever sees
# the solution can read off what matters. The more topics there are, the fewer outcomes there are of
# each; the less the base policy knows of them, the rarer its successes.
NUM_TOPICS = 64

# detail -> its four options: (what the human says, the clause of the solution). The clauses of a
# function are applied in the order of this table.
DETAILS = {
    "margin": [
        ("strip both ends", "text.strip()"),
        ("strip the start", "text.lstrip()"),
        ("strip the finish", "text.rstrip()"),
        ("strip dashes", "text.strip('-')"),
    ],
    "zeros": [
        ("drop each zero", "text.replace('0','')"),
        ("write o for zero", "text.replace('0','o')"),
        ("write nil for zero", "text.replace('0','nil')"),
        ("double each zero", "text.replace('0','00')"),
    ],
    "vowels": [
        ("write at for a", "text.replace('a','@')"),
        ("write three for e", "text.replace('e','3')"),
        ("drop each e", "text.replace('e','')"),
        ("drop each a", "text.replace('a','')"),
    ],
    "case": [
        ("use lower case", "text.lower()"),
        ("use upper case", "text.upper()"),
        ("use title case", "text.title()"),
        ("use swapped case", "text.swapcase()"),
    ],
    "joiner": [
        ("join by underscores", "'_'.join(text.split())"),
        ("join by hyphens", "'-'.join(text.split())"),
        ("join by slashes", "'/'.join(text.split())"),
        ("join by pluses", "'+'.join(text.split())"),
    ],
    "direction": [
        ("turn it backwards", "text[::-1]"),
        ("take every second letter", "text[::2]"),
        ("move the first letter last", "text[1:]+text[:1]"),
        ("move the last letter first", "text[-1:]+text[:-1]"),
    ],
    "length": [
        ("cut to six", "text[:6]"),
        ("cut to eight", "text[:8]"),
        ("cut to ten", "text[:10]"),
        ("cut to five", "text[:5]"),
    ],
    "copies": [
        ("say it twice", "text*2"),
        ("say it thrice", "text*3"),
        ("mirror it", "text+text[::-1]"),
        ("repeat the opening", "text+text[:3]"),
    ],
    "width": [
        ("fill the right with dots", "text.ljust(28,'.')"),
        ("fill the left with dots", "text.rjust(28,'.')"),
        ("center it in dots", "text.center(28,'.')"),
        ("fill with leading noughts", "text.zfill(28)"),
    ],
    "counter": [
        ("append its size", "text+str(len(text))"),
        ("append the count of spaces", "text+str(text.count(' '))"),
        ("append the count of e", "text+str(text.count('e'))"),
        ("append the count of ones", "text+str(text.count('1'))"),
    ],
    "unit": [
        ("append kilos", "text+'kg'"),
        ("append meters", "text+'cm'"),
        ("append points", "text+'pt'"),
        ("append pixels", "text+'px'"),
    ],
    "greeting": [
        ("begin with dear", "'Dear:'+text"),
        ("begin with hello", "'Hello:'+text"),
        ("begin with welcome", "'Welcome:'+text"),
        ("begin with hi", "'Hi:'+text"),
    ],
    "ending": [
        ("finish with an exclamation", "text+'!'"),
        ("finish with a query", "text+'?'"),
        ("finish with a semicolon", "text+';'"),
        ("finish with a colon", "text+':'"),
    ],
    "brackets": [
        ("wrap in round brackets", "'('+text+')'"),
        ("wrap in square brackets", "'['+text+']'"),
        ("wrap in angle brackets", "'<'+text+'>'"),
        ("wrap in curly brackets", "'{'+text+'}'"),
    ],
    "frame": [
        ("frame with stars", "'*'+text+'*'"),
        ("frame with waves", "'~'+text+'~'"),
        ("frame with bars", "'|'+text+'|'"),
        ("frame with equals", "'='+text+'='"),
    ],
    "tag": [
        ("tag as new", "text+'#new'"),
        ("tag as old", "text+'#old'"),
        ("tag as hot", "text+'#hot'"),
        ("tag as sale", "text+'#sale'"),
    ],
}
NUM_OPTIONS = 4
TOPICS = (
    "invoice ticket badge parcel recipe poster ledger voucher caption banner album receipt lesson"
    " memo locker shelf coupon menu passport playlist bottle crate folder garden harbor island"
    " jacket kettle lantern market needle orchard pencil quilt rocket saddle temple umbrella"
    " violin wagon yacht zipper anchor basket candle diary engine feather guitar helmet inkwell"
    " journal kitchen ladder mirror notebook oven puzzle ribbon statue tractor vase window bridge"
    " acorn arrow apron arena attic autumn bamboo barrel beacon beetle bicycle blanket blender"
    " bracelet branch brush bucket buffet bundle cabin cactus calendar camera canoe canvas carpet"
    " cartoon castle cellar cheese cherry chimney chorus circus clinic cloak closet cloud clover"
    " cobweb coffee compass concert copper cotton cradle crayon cricket crystal curtain cushion"
    " dagger daisy dentist desert dinner dolphin donkey dragon drawer drum duck eagle elbow ember"
    " estate fabric falcon farm fence ferry fiddle flag flute forest fossil fountain galaxy"
    " gallery garage gazette glacier globe glove goose granite grape gravel hammer hamster hangar"
    " hedge hermit hive honey hostel hotel igloo insect iron ivory jewel jigsaw jungle kayak"
    " kennel kernel keyboard kiosk kite knight lagoon lake laptop lemon letter library lily linen"
    " lizard lobby lobster magnet mansion maple marble meadow medal melon meteor mill mitten"
    " monkey mosaic museum mustard nest novel nugget oasis ocean olive onion opera orange orchid"
    " otter owl paddle palace panda paper parrot peach pebble pepper piano picnic pigeon pillow"
    " pirate planet plaza pocket pond potato prism pumpkin quarry rabbit racket radio raft raisin"
    " razor river robin rose salad sandal scarf school sculpture shed shovel silver sofa spider"
    " spoon squirrel stadium stove"
).split()
LIKELY = {topic: random.Random(f"topic {topic}").sample(list(DETAILS), 5) for topic in TOPICS}
NUMBER_WORDS = {2: "two", 3: "three"}
INPUT_WORDS = "red apple Boat seven tea Green see lamp".split()
INPUT_NUMBERS = (10, 100, 201, 35, 1)


# After so many draws for each topic without a new task, there is none left: the rarest ones are
# drawn once in 1,280.
MAX_MISSES = 20_000


def backend_tasks(split, num_tasks, num_topics):
    """The first tasks of a split; fewer where it has no more, some 80 a topic for valid.

    A task's content decides its split, so splits are disjoint.
    """
    draw = random.Random(f"toy:backend:{split}")
    tasks = []
    seen = set()
    misses = 0
    while len(tasks) < num_tasks and misses < MAX_MISSES * num_topics:
        misses += 1
        topic = draw.choice(TOPICS[:num_topics])
        needed = draw.sample(LIKELY[topic], draw.choice(list(NUMBER_WORDS)))
        choice = tuple(
            (detail, draw.randrange(NUM_OPTIONS)) for detail in DETAILS if detail in needed
        )
        if (topic, choice) in seen or backend_split(topic, choice) != split:
            continue
        seen.add((topic, choice))
        inputs = hidden_inputs(choice, random.Random(derive_seed("inputs", topic, choice)))
        if inputs is None:
            continue
        misses = 0
        tasks.append(backend_task(f"{split}-{len(tasks):05d}", topic, choice, inputs))
    return tasks


def backend_split(topic, choice):
    """The split of a task with this content: 20 % test, 10 % valid, 70 % train."""
    bucket = derive_seed(topic, choice) % 10
    if bucket < 2:
        return "test"
    if bucket == 2:
        return "valid"
    return "train"


def backend_task(name, topic, choice, inputs):
    """One task; `toy` holds its topic and needed details, for the human and the true credit."""
    calls = {f"test{count}": f"label({text!r})" for count, text in enumerate(inputs, 1)}
    return complete_task({
        "task_id": f"toy-backend-{name}",
        "domain": "backend",
        "problem_description": (
            f"Write a function that makes the {topic} label by {NUMBER_WORDS[len(choice)]} rules."
            " The signature of the function is: def label(text)"
        ),
        "ground_truth": code_of(choice),
        "test_cases": calls,
        "toy": {"topic": topic, "needed": dict(choice)},
    })


def phrase_of(detail, option):
    """What the human says to ask for an option."""
    return DETAILS[detail][option][0]


def clause_of(detail, option):
    """The expression by which the solution applies an option to `text`."""
    return DETAILS[detail][option][1]


def code_of(choice):
    """The function with the clauses of `choice`: (detail, option) pairs in the table's order."""
    lines = [f"    text = {clause_of(detail, option)}\n" for detail, option in choice]
    return "def label(text):\n" + "".join(lines) + "    return text"


@functools.cache
def clause_function(detail, option):
    """The clause as a function. `eval` only ever sees the table above, never a model's text."""
    return eval(f"lambda text: {clause_of(detail, option)}")


def apply_clauses(choice, text):
    """What the function with the clauses of `choice` returns for `text`."""
    for detail, option in choice:
        text = clause_function(detail, option)(text)
    return text


def hidden_inputs(choice, draw):
    """Ten inputs for the hidden tests, or None if these leave some clause untested.

    A clause is tested if omitting it, or taking another option for it, changes some output.
    """
    texts = [random_text(draw) for _ in range(10)]
    expected = [apply_clauses(choice, text) for text in texts]
    for index, (detail, option) in enumerate(choice):
        before, after = choice[:index], choice[index + 1:]
        variants = [before + after]
        for other in range(NUM_OPTIONS):
            if other != option:
                variants.append(before + ((detail, other),) + after)
        for variant in variants:
            if [apply_clauses(variant, text) for text in texts] == expected:
                return None
    return texts


def random_text(draw):
    """A text on which clauses differ: words, a number, and sometimes spaces or dashes around."""
    first_dash = "-" * draw.randint(0, 1)
    first_spaces = " " * draw.randint(0, 2)
    words = " ".join(draw.sample(INPUT_WORDS, draw.randint(1, 3)))
    number = draw.choice(INPUT_NUMBERS)
    last_spaces = " " * draw.randint(0, 2)
    last_dash = "-" * draw.randint(0, 1)
    return f"{first_dash}{first_spaces}{words} {number}{last_spaces}{last_dash}"


# -----------------------------------------------------------------------------
# Backend human


def toy_asked(text):
    """The first detail that a message mentions, or None."""
    for word in re.findall(r"[a-z]+", text.lower()):
        if word in DETAILS:
            return word
    return None


def backend_human(task, messages, draw):
    """Reveals a needed detail when asked about it, one at a time."""
    detail = toy_asked(messages[-1]["content"])
    needed = task["toy"]["needed"]
    if detail is None:
        return "I do not know."
    if detail not in needed:
        return "No wish there."
    return f"Please {phrase_of(detail, needed[detail])}."


# -----------------------------------------------------------------------------
# Backend demonstrator: it asks, listens and answers, with mistakes

QUESTIONS = ("What about the {}?", "Which {} do you want?", "Tell me the {}.")
PHRASES = {
    phrase_of(detail, option): (detail, option)
    for detail in DETAILS for option in range(NUM_OPTIONS)
}


class Habits(typing.NamedTuple):
    """How often a demonstrator does what, as probabilities."""

    answer_incomplete: float  # answer although some detail is not known yet
    answer_complete: float  # answer once all details are known
    ask_preferred: float  # ask for one of the preferred details instead of any


# `ask_preferred` is what the base policy knows of a topic: 0 is nothing
NOISY = Habits(answer_incomplete=0.02, answer_complete=0.7, ask_preferred=0.0)
KNOWING = NOISY._replace(ask_preferred=0.5)
INFORMED = Habits(answer_incomplete=0.02, answer_complete=0.5, ask_preferred=0.6)


def backend_demonstrator(task, messages, draw):
    """A noisy agent: it knows nothing of topics, stops too early or asks for too long."""
    topic, _ = read_request(messages)
    return demonstrate(messages, draw, LIKELY[topic], NOISY)


def knowing_backend_demonstrator(task, messages, draw):
    """A noisy agent that knows, for half of its questions, what a topic makes likely."""
    topic, _ = read_request(messages)
    return demonstrate(messages, draw, LIKELY[topic], KNOWING)


def guessing_backend_demonstrator(task, messages, draw):
    """Answers at once, as one who may not ask has to: with details and options at random."""
    _, num_needed = read_request(messages)
    guessed = draw.sample(list(DETAILS), num_needed)
    choice = [(detail, draw.randrange(NUM_OPTIONS)) for detail in DETAILS if detail in guessed]
    return f"{ANSWER_MARKER}\n{code_of(choice)}"


def informed_backend_demonstrator(task, messages, draw):
    """A noisy agent that knows from the solution which details to ask for.

    Its episodes show the tiny base model how to read a solution in its context, which a
    pretrained model can do from the start.
    """
    return demonstrate(messages, draw, details_in(task["ground_truth"]), INFORMED)


def read_request(messages):
    """(topic, number of needed details) of a request."""
    request = messages[first_request(messages)]["content"]
    found = re.search(r"makes the (\w+) label by (\w+) rules", request)
    numbers = {word: number for number, word in NUMBER_WORDS.items()}
    if found is None or found[1] not in LIKELY or found[2] not in numbers:
        raise SystemExit(
            f"found the request {request!r}, expected one of the embedded backend world, with a"
            " known topic and number of rules; the scripted agent can read no other: use a model"
        )
    return found[1], numbers[found[2]]


def details_in(solution):
    """The details whose clauses a solution contains."""
    lines = solution.splitlines()
    return [
        detail for detail, options in DETAILS.items()
        if any(f"    text = {clause}" in lines for _, clause in options)
    ]


def details_told(messages):
    """{detail: option} of all wishes that the human has stated; a later one replaces an earlier."""
    told = {}
    for message in messages:
        if message["role"] == "user":
            for phrase in re.findall(r"Please ([^.]+)\.", message["content"]):
                if phrase in PHRASES:
                    detail, option = PHRASES[phrase]
                    told[detail] = option
    return told


def demonstrate(messages, draw, preferred, habits):
    """The next message of a demonstrator that would like to ask for the `preferred` details."""
    own_messages = [message for message in messages if message["role"] == "assistant"]
    asked = [toy_asked(message["content"]) for message in own_messages]
    told = details_told(messages)
    known = [(detail, told[detail]) for detail in DETAILS if detail in asked and detail in told]
    _, num_needed = read_request(messages)
    if len(known) >= num_needed:
        answer_probability = habits.answer_complete
    else:
        answer_probability = habits.answer_incomplete
    if draw.random() < answer_probability:
        return f"{ANSWER_MARKER}\n{code_of(with_slips(known, draw))}"
    detail = detail_to_ask(asked, preferred, habits, draw)
    return draw.choice(QUESTIONS).format(detail)


def with_slips(known, draw):
    """The clauses that the demonstrator writes: rarely, it forgets one or mistakes its option."""
    written = list(known)
    if draw.random() < 0.06 and known:
        index = draw.randrange(len(known))
        if draw.random() < 0.5:
            written[index] = (known[index][0], draw.randrange(NUM_OPTIONS))
        else:
            del written[index]
    return written


def detail_to_ask(asked, preferred, habits, draw):
    """The detail that the demonstrator asks for next."""
    if asked and draw.random() < 0.05:
        return draw.choice(asked)  # it has forgotten the reply
    not_asked = [detail for detail in DETAILS if detail not in asked]
    hoped_for = [detail for detail in preferred if detail not in asked]
    if hoped_for and draw.random() < habits.ask_preferred:
        return draw.choice(hoped_for)
    if not_asked:
        return draw.choice(not_asked)
    return draw.choice(asked)


# -----------------------------------------------------------------------------
# True credit of backend turns, and how well a critic's advantages agree with it


class ToyCredit(typing.NamedTuple):
    """The true credit of one agent turn."""

    # "right answer", "useful question", "wasted question", "repeated question", "early answer"
    # or "wrong answer"
    kind: str
    value: float  # of two turns from the same state, the better one has the greater value


def has_toy_credit(task):
    """Whether the task is one of the embedded backend world, whose true credit is known."""
    return isinstance(task.get("toy"), dict) and "needed" in task["toy"]


def toy_credit(task, history, turn, right=None, max_turns=MAX_TURNS):
    """The true credit of agent turn `turn`, given everything before it; supposes an honest human.

    `right` says whether an answer is right, where that is known; otherwise the judge grades it.
    """
    before = history[:2 * turn + 1]
    message = history[2 * turn + 1]
    asked = {toy_asked(entry["content"]) for entry in before if entry["role"] == "assistant"}
    unknown = set(task["toy"]["needed"]) - asked
    content, answer = split_message(task, message["content"], turn == max_turns - 1)
    if answer is not None:
        if right is None:
            right = answer == task["ground_truth"] or grade(task, answer).success
        if right:
            return ToyCredit("right answer", 1.0)
        return ToyCredit("early answer" if unknown else "wrong answer", 0.0)
    detail = toy_asked(content)
    if detail in unknown:
        return ToyCredit("useful question", 0.6)
    return ToyCredit("repeated question" if detail in asked else "wasted question", 0.3)


CREDIT_KINDS = (
    "all",
    "question_question",
    "answer_answer",
    "answer_question_known",
    "answer_question_unknown",
)


def credit_pairs(credits, known):
    """Yield (kind, better index, worse index) for each two candidates whose true credit differs.

    `credits` are those of the candidates of one state; `known` says whether everything that the
    task needs has been asked for in that state.
    """
    for better, first in enumerate(credits):
        for worse, second in enumerate(credits):
            if first.value <= second.value:
                continue
            first_answers = first.kind.endswith("answer")
            second_answers = second.kind.endswith("answer")
            if first_answers and second_answers:
                kind = "answer_answer"
            elif not first_answers and not second_answers:
                kind = "question_question"
            elif known:
                kind = "answer_question_known"
            else:
                kind = "answer_question_unknown"
            yield kind, better, worse


def credit_auc(critic, policy, states, seed, num_candidates=16):
    """How often a critic gives the truly better of two candidates of a state the greater advantage.

    `states` is a list of (episode, turn, what the agent saw before it) on backend tasks of the
    embedded world. The policy samples the candidates. Ties count half; states that are too long
    for the critic are skipped. Returns {"credit_auc/KIND": AUC} for the kinds that occur.
    """
    seeds = [derive_seed(seed, "credit", index) for index in range(len(states))]
    conversations = [messages for _, _, messages in states]
    sampled = policy.speak(conversations, num_candidates, seeds)
    hits = {kind: [] for kind in CREDIT_KINDS}
    for (episode, turn, messages), utterances in zip(states, sampled, strict=True):
        task = episode["task"]
        candidates = list(dict.fromkeys(utterances))  # each distinct one once
        texts = [candidate.text for candidate in candidates]
        finished = [candidate.finished for candidate in candidates]
        advantages = critic.advantages(task, messages, texts, finished)
        if advantages is None:
            continue
        before = episode["dialogue_history"][:2 * turn + 1]
        credits = [
            toy_credit(task, before + [{"role": "assistant", "content": text}], turn,
                       max_turns=episode.get("max_turns") or MAX_TURNS)
            for text in texts
        ]
        known = not any(credit.kind in ("useful question", "early answer") for credit in credits)
        for kind, better, worse in credit_pairs(credits, known):
            if advantages[better] > advantages[worse]:
                hit = 1.0
            elif advantages[better] == advantages[worse]:
                hit = 0.5
            else:
                hit = 0.0
            hits[kind].append(hit)
            hits["all"].append(hit)
    return {f"credit_auc/{kind}": sum(found) / len(found) for kind, found in hits.items() if found}


# -----------------------------------------------------------------------------
# Frontend tasks: pages of a small grammar

# Slot -> word that the human uses -> text in the page. The slots stand in the order of the
# difference they make (by embedded_similarity), the largest first. No word and no page text belongs
# to two slots, so that a tiny model can learn which word stands for which text.
SLOTS = {
    "page": {"white": "bg-white", "gray": "bg-gray-300", "dark": "bg-gray-600"},
    "title": {"small": "text-xl", "huge": "text-6xl"},
    "footer": {"low": "h-8", "high": "h-64"},
    "cards": {"two": "grid-cols-2", "three": "grid-cols-3", "four": "grid-cols-4"},
    "header": {"red": "bg-red-600", "blue": "bg-blue-600", "green": "bg-green-600"},
    "button": {"yellow": "bg-yellow-400", "pink": "bg-pink-400", "purple": "bg-purple-600"},
}
NUM_CARDS = {"two": 2, "three": 3, "four": 4}
PAGE_TOPICS = ["bakery", "museum", "garden", "school", "hotel", "cinema"]
PAGE = """<html> <link rel=stylesheet href=https://cdn.tailwindcss.com>
<body class={page}>
<h1 class="{header} {title}"> {topic} </h1>
<main class="grid text-8xl {cards}"> {card_list} </main>
<b class={button}> open </b>
<footer class="bg-indigo-400 {footer}"> </footer> </html>"""
# Of every five pages of the grammar, one is for test and one for valid.
SPLIT_REMAINDERS = {"test": (0,), "valid": (1,), "train": (2, 3, 4)}


def frontend_tasks(split, num_tasks):
    """The first tasks of a split, which has no more tasks than the grammar has pages for it."""
    count = min(num_tasks, len(split_pages(split)))
    return [frontend_task(split, index) for index in range(count)]


@functools.cache
def split_pages(split):
    """The pages of a split, each as (topic, a word for each slot ...)."""
    pages = itertools.product(PAGE_TOPICS, *SLOTS.values())
    remainders = SPLIT_REMAINDERS[split]
    return [page for index, page in enumerate(pages) if index % 5 in remainders]


def frontend_task(split, index):
    """The task of a split with this index. Its request states none, one or two of the wishes."""
    pages = split_pages(split)
    # 997 is coprime to the size of every split, so neighbours differ in many slots
    topic, *words = pages[index * 997 % len(pages)]
    choice = dict(zip(SLOTS, words, strict=True))
    draw = random.Random(f"{split}{index}")
    num_stated = draw.choice([0, 1, 2])
    stated = draw.sample(sorted(choice), num_stated)
    request = f"make a page for a {topic} ."
    if stated:
        wishes = " ".join(f"{choice[slot]} {slot}" for slot in stated)
        request += f" i want {wishes} ."
    html = page_of(topic, choice)
    return {
        "task_id": f"toy-frontend-{split}-{index}",
        "domain": "frontend",
        "problem_description": request,
        "ground_truth": html,
        "hidden_information": html,
        "toy": {"topic": topic, "wanted": choice},
    }


def page_of(topic, choice):
    """The HTML of a page; `choice` gives the word of each slot."""
    texts = {slot: SLOTS[slot][word] for slot, word in choice.items()}
    card_list = " ".join(["<p> card"] * NUM_CARDS[choice["cards"]])
    return PAGE.format(topic=topic, card_list=card_list, **texts)


def choice_of(html):
    """{slot: word} read from a page; None where it shows no or several of the slot's texts."""
    choice = {}
    for slot, words in SLOTS.items():
        shown = [
            word for word, text in words.items() if re.search(rf"[\s\"=]{text}[\s\">]", html)
        ]
        choice[slot] = shown[0] if len(shown) == 1 else None
    # the cards must be there as well as their grid, or a page could look right and render wrong
    cards = choice["cards"]
    if cards is not None and html.count("<p> ") != NUM_CARDS[cards]:
        choice["cards"] = None
    return choice


# -----------------------------------------------------------------------------
# Frontend human and demonstrator


def frontend_human(task, messages, draw):
    """Names the largest difference between the agent's last page and the wanted one."""
    message = messages[-1]
    html = extract_html(message["content"]) if message["role"] == "assistant" else ""
    if not html:
        return "show me a page ."
    shown = choice_of(html)
    wanted = choice_of(task["ground_truth"])
    for slot, word in wanted.items():
        if shown[slot] != word:
            return f"i want {word} {slot} ."
    return "looks right ."


def frontend_demonstrator(task, messages, draw):
    """A noisy designer: it mostly does what the human says."""
    return design(messages, draw, wanted={})


def informed_frontend_demonstrator(task, messages, draw):
    """A noisy designer that follows the solution, too, where the human names no wish.

    Its episodes show the tiny base model how to read a solution in its context.
    """
    return design(messages, draw, wanted=choice_of(task["ground_truth"]))


def design(messages, draw, wanted):
    """The next message of a noisy designer who knows that the words `wanted` are right.

    It sometimes ignores a wish, misreads it, breaks another slot, answers too early, or continues
    when all is right: if haste and delay never failed, outcomes would teach nothing about them.
    """
    last_words = messages[-1]["content"]
    last = last_page(messages)
    choice = {}
    for slot, word in choice_of(last).items():
        choice[slot] = word or draw.choice(list(SLOTS[slot]))
    plan = []
    for slot, words in SLOTS.items():
        wish = wish_in(last_words, slot) or wanted.get(slot)
        if wish and draw.random() < 0.75:
            if draw.random() < 0.85:
                choice[slot] = wish
            else:
                choice[slot] = draw.choice(list(words))
            plan.append(f"{choice[slot]} {slot}")
    if last and draw.random() < 0.2:
        broken = draw.choice(list(SLOTS))
        choice[broken] = draw.choice(list(SLOTS[broken]))
    if "looks right" in last_words:
        answer_probability = 0.4
    elif last:
        answer_probability = 0.15
    else:
        answer_probability = 0.0
    page = page_of(page_topic(messages), choice)
    if draw.random() < answer_probability:
        page = f"{ANSWER_MARKER} {page}"
    return f"set {' '.join(plan) or 'nothing'} . {OUTPUT_MARKER} {page}"


def wish_in(text, slot):
    """The word that a message of the human gives for a slot, or None."""
    for word in SLOTS[slot]:
        if f"{word} {slot}" in text:
            return word
    return None


def page_topic(messages):
    """The topic that a request names."""
    request = messages[first_request(messages)]["content"]
    for topic in PAGE_TOPICS:
        if topic in request:
            return topic
    raise SystemExit(
        f"found the request {request!r}, expected one of the embedded frontend world, about a"
        f" {', '.join(PAGE_TOPICS)}; the scripted agent can read no other: use a model"
    )


# -----------------------------------------------------------------------------
# The tiny model that training on the embedded worlds starts from


def toy_model(tokenizer, seed):
    """A Llama of 0.6 to 0.8 million random parameters for the toy's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


# The answer's marker, a line of code and a tag are one token each, so that an answer has about as
# many tokens as a question.
TOKEN_PATTERN = "|".join([
    r" ?I WANT TO ANSWER:",
    r"\n(?:def |    )[^\n]+",
    r"\s?<[^>]*>",
    r"\n *\S+",
    r" ?[^\s?.:]+",
    r"[?.:]",
    r"\s+",
])
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}"
    "{{ '<once>' if 'you send one message' in m['content'] | lower else '' }}"
    "{% else %}"
    "{{ '<agent>' if m['role'] == 'assistant' else '<human>' }}{{ m['content'] }}<end>"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<agent>{% endif %}"
)


def toy_tokenizer(episodes):
    """A tokenizer with the words of the episodes' solutions and messages.

    Of the system message, its chat template keeps only whether the agent may send one message.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2304,
        special_tokens=["<end>", "<human>", "<agent>", "<once>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts_to_read(episodes), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def texts_to_read(episodes):
    """Every text that a model of these episodes reads: the notes on solutions, the messages."""
    for episode in episodes:
        yield SOLUTION_NOTE.format(solution=episode["task"]["ground_truth"])
        for message in episode["dialogue_history"]:
            yield message.get("output") or message["content"]


# -----------------------------------------------------------------------------
# The scripted parties: (domain, role, manner) -> function(task, messages, draw)
#
# `messages` is the dialogue without a system message, the request first; `draw` is a random.Random.
# The manner stands after `scripted:` on the command line.

SCRIPTED = {
    ("backend", "human", ""): backend_human,
    ("backend", "agent", ""): backend_demonstrator,
    ("backend", "agent", "knowing"): knowing_backend_demonstrator,
    ("backend", "agent", "guessing"): guessing_backend_demonstrator,
    ("backend", "agent", "informed"): informed_backend_demonstrator,
    ("frontend", "human", ""): frontend_human,
    ("frontend", "agent", ""): frontend_demonstrator,
    ("frontend", "agent", "informed"): informed_frontend_demonstrator,
}
