"""The embedded frontend world: pages of a small grammar, wished for slot by slot."""

import functools
import itertools
import random
import re

from colbench import OUTPUT_MARKER, request_index
from judge.pages import extract_html, last_page
from judge.sandbox import ANSWER_MARKER

# -----------------------------------------------------------------------------
# Tasks

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
    stated = draw.sample(sorted(choice), draw.choice([0, 1, 2]))
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
# Human and demonstrators


def frontend_human(task, messages, draw):
    """Names the largest difference between the agent's last page and the wanted one."""
    html = extract_html(messages[-1]["content"])
    if not html:
        return "show me a page ."
    shown = choice_of(html)
    wanted = choice_of(task["ground_truth"])
    for slot, word in wanted.items():
        if shown[slot] != word:
            return f"i want {word} {slot} ."
    return "looks right ."


def frontend_demonstrator(task, messages, draw, informed=False):
    """A noisy designer that mostly does what the human says.

    It sometimes ignores a wish, misreads it, breaks another slot, answers too early, or continues
    when all is right: if haste and delay never failed, outcomes would teach nothing about them.
    An `informed` one follows the solution, too, where the human names no wish. Its episodes show
    the tiny base model how to read a solution in its context.
    """
    wanted = choice_of(task["ground_truth"]) if informed else {}
    last_words = messages[-1]["content"]
    last = last_page(messages)
    choice = {slot: word or draw.choice(list(SLOTS[slot]))
              for slot, word in choice_of(last).items()}
    plan = []
    for slot, words in SLOTS.items():
        wish = wish_in(last_words, slot) or wanted.get(slot)
        if wish and draw.random() < 0.75:
            choice[slot] = wish if draw.random() < 0.85 else draw.choice(list(words))
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
    return next((word for word in SLOTS[slot] if f"{word} {slot}" in text), None)


def page_topic(messages):
    """The topic that a request names."""
    request = messages[request_index(messages)]["content"]
    for topic in PAGE_TOPICS:
        if topic in request:
            return topic
    raise SystemExit(
        f"found the request {request!r}, expected one of the embedded frontend world, about a"
        f" {', '.join(PAGE_TOPICS)}; the scripted agent can read no other: use a model"
    )
