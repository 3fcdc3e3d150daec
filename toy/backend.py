"""The embedded backend world: functions that change a text by hidden rules.

A topic ("invoice") makes some details likely, and a task needs most of those. No prompt says which
details go with which topic: a policy has to learn it, while whoever sees the solution can read off
what matters. In toy/world.py, World says how many topics and details there are, and Habits how the
demonstrators err.
"""

import functools
import random
import re

from colbench import request_index
from formats.read import complete_task
from judge.sandbox import ANSWER_MARKER
from runtime.seeds import derive_seed

# -----------------------------------------------------------------------------
# Tasks

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
# A world of fewer details lacks the first of these, whose clauses leave many texts as they are or
# undo what others did
OMITTED = ("margin", "zeros", "vowels", "direction", "length", "width")
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}  # in the request
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
INPUT_WORDS = "red apple Boat seven tea Green see lamp".split()
INPUT_NUMBERS = (10, 100, 201, 35, 1)


def details_of(world):
    """The details that the human of a world could be asked for."""
    omitted = OMITTED[:len(DETAILS) - world.details]
    return [detail for detail in DETAILS if detail not in omitted]


@functools.cache
def likely_details(topic, world):
    """The details that a topic makes likely: all that its tasks ever need."""
    return random.Random(f"topic {topic}").sample(details_of(world), world.likely)


# If so many draws for each topic give no new task, none is left: even the rarest task comes up once
# in some 2,500 draws of its topic.
MAX_MISSES = 20_000


def backend_tasks(split, num_tasks, world):
    """The first tasks of a split; fewer where it has no more.

    A task's content decides its split, so splits are disjoint.
    """
    draw = random.Random(f"toy:backend:{split}")
    tasks = []
    seen = set()
    misses = 0
    while len(tasks) < num_tasks and misses < MAX_MISSES * world.topics:
        misses += 1
        topic = draw.choice(TOPICS[:world.topics])
        needed = draw.sample(likely_details(topic, world), draw.choice(world.needed))
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
        tasks.append(backend_task(f"{split}-{len(tasks):05d}", topic, choice, inputs, world))
    return tasks


def backend_split(topic, choice):
    """The split of a task with this content: 20 % test, 10 % valid, 70 % train."""
    bucket = derive_seed(topic, choice) % 10
    if bucket < 2:
        return "test"
    if bucket == 2:
        return "valid"
    return "train"


def backend_task(name, topic, choice, inputs, world):
    """One task; `toy` holds what the human, the demonstrators and the true credit know of it."""
    calls = {f"test{count}": f"label({text!r})" for count, text in enumerate(inputs, 1)}
    return complete_task({
        "task_id": f"toy-backend-{name}",
        "domain": "backend",
        "problem_description": (
            f"Write a function that makes the {topic} label by {NUMBERS[len(choice)]} rules."
            " The signature of the function is: def label(text)"
        ),
        "ground_truth": code_of(choice),
        "test_cases": calls,
        "toy": {"topic": topic, "needed": dict(choice), "details": details_of(world),
                "likely": likely_details(topic, world)},
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
        replaced = [before + ((detail, other),) + after
                    for other in range(NUM_OPTIONS) if other != option]
        for variant in [before + after, *replaced]:
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
# Human


def asked_about(text):
    """The first detail that a message mentions, or None."""
    words = re.findall(r"[a-z]+", text.lower())
    return next((word for word in words if word in DETAILS), None)


def backend_human(task, messages, draw):
    """Reveals a needed detail when asked about it, one at a time."""
    detail = asked_about(messages[-1]["content"])
    needed = task["toy"]["needed"]
    if detail is None:
        return "I do not know."
    if detail not in needed:
        return "No wish there."
    return f"Please {phrase_of(detail, needed[detail])}."


# -----------------------------------------------------------------------------
# Demonstrators: they ask, listen and answer, with mistakes

QUESTIONS = ("What about the {}?", "Which {} do you want?", "Tell me the {}.")
PHRASES = {
    phrase_of(detail, option): (detail, option)
    for detail in DETAILS for option in range(NUM_OPTIONS)
}


def backend_demonstrator(task, messages, draw, habits, informed=False):
    """A noisy agent: it stops too early or asks for too long; habits say what it knows.

    An `informed` one reads in the solution which details to ask for. Its episodes show the tiny
    base model how to read a solution in its context, which a pretrained model can do from the
    start.
    """
    num_needed, details = read_request(messages), task["toy"]["details"]
    preferred = details_in(task["ground_truth"]) if informed else task["toy"]["likely"]
    asked = [asked_about(message["content"]) for message in messages
             if message["role"] == "assistant"]
    told = details_told(messages)
    known = [(detail, told[detail]) for detail in DETAILS if detail in asked and detail in told]
    complete = len(known) >= num_needed
    if draw.random() < (habits.answer_complete if complete else habits.answer_incomplete):
        return f"{ANSWER_MARKER}\n{code_of(with_slips(known, habits, draw))}"
    detail = detail_to_ask(asked, details, preferred, habits, draw)
    return draw.choice(QUESTIONS).format(detail)


def guessing_backend_demonstrator(task, messages, draw):
    """Answers at once, as one who may not ask has to: with details and options at random."""
    num_needed, details = read_request(messages), task["toy"]["details"]
    guessed = draw.sample(details, num_needed)
    choice = [(detail, draw.randrange(NUM_OPTIONS)) for detail in details if detail in guessed]
    return f"{ANSWER_MARKER}\n{code_of(choice)}"


def read_request(messages):
    """The number of needed details that a request names."""
    request = messages[request_index(messages)]["content"]
    found = re.search(r"makes the \w+ label by (\w+) rules", request)
    numbers = {word: number for number, word in NUMBERS.items()}
    if found is None or found[1] not in numbers:
        raise SystemExit(
            f"found the request {request!r}, expected one of the embedded backend world, with a"
            " known number of rules; the scripted agent can read no other: use a model"
        )
    return numbers[found[1]]


def details_in(solution):
    """The details whose clauses a solution contains."""
    lines = solution.splitlines()
    return [
        detail for detail, options in DETAILS.items()
        if any(f"    text = {clause}" in lines for _, clause in options)
    ]


def details_told(messages):
    """{detail: option} of all wishes that the human has stated; a later one replaces an earlier."""
    phrases = [phrase for message in messages if message["role"] == "user"
               for phrase in re.findall(r"Please ([^.]+)\.", message["content"])]
    return dict(PHRASES[phrase] for phrase in phrases if phrase in PHRASES)


def with_slips(known, habits, draw):
    """The clauses that the demonstrator writes: rarely, it forgets one or mistakes its option."""
    written = list(known)
    if draw.random() < habits.slip and known:
        index = draw.randrange(len(known))
        if draw.random() < 0.5:
            written[index] = (known[index][0], draw.randrange(NUM_OPTIONS))
        else:
            del written[index]
    return written


def detail_to_ask(asked, details, preferred, habits, draw):
    """The detail that the demonstrator asks for next."""
    if asked and draw.random() < habits.ask_again:
        return draw.choice(asked)
    hoped_for = [detail for detail in preferred if detail not in asked]
    if hoped_for and draw.random() < habits.ask_preferred:
        return draw.choice(hoped_for)
    not_asked = [detail for detail in details if detail not in asked]
    return draw.choice(not_asked or asked)
