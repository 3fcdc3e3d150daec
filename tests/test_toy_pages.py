"""The embedded frontend world is what it says."""

import random

from parties import first_texts

from judge.pages import extract_html, grade_page
from judge.sandbox import ANSWER_MARKER
from toy.frontend import (
    SLOTS, choice_of, frontend_demonstrator, frontend_human, frontend_task, page_of, split_pages)
from toy.world import toy_tasks


def first_words():
    return {slot: next(iter(words)) for slot, words in SLOTS.items()}


def test_following_the_human_reaches_the_wanted_page_within_the_limit():
    for index in range(100):
        task = frontend_task("test", index)
        choice = first_words()
        for _turn in range(8):
            page = page_of(task["toy"]["topic"], choice)
            reply = frontend_human(task, [{"role": "assistant", "content": page}], None)
            if reply == "looks right .":
                break
            word, slot = reply.removeprefix("i want ").removesuffix(" .").split()
            choice[slot] = word
        assert page == task["ground_truth"]


def test_every_page_of_the_grammar_is_in_one_split_and_neighbours_differ():
    splits = [split_pages(split) for split in ("train", "valid", "test")]
    sizes = [len(split) for split in splits]
    assert len(set().union(*splits)) == sum(sizes) and sizes[1] == sizes[2]
    assert abs(sizes[0] - 3 * sizes[1]) <= 5
    tasks = toy_tasks("toy:frontend:valid", sum(sizes))
    assert len({task["ground_truth"] for task in tasks}) == len(tasks) == sizes[1]
    pairs = zip(tasks, tasks[1:], strict=False)
    differing = [sum(one["toy"]["wanted"][slot] != other["toy"]["wanted"][slot] for slot in SLOTS)
                 for one, other in pairs]
    assert sum(differing) / len(differing) > 3.5


def test_the_human_asks_for_a_page_and_sees_what_is_missing():
    task = frontend_task("train", 0)

    def reply(text):
        return frontend_human(task, [{"role": "assistant", "content": text}], None)

    assert reply("hello") == "show me a page ."
    assert reply(task["ground_truth"].replace("<p> card", "", 1)).endswith("cards .")


def test_words_and_page_texts_belong_to_one_slot_each():
    words = [word for options in SLOTS.values() for word in options]
    texts = [text for options in SLOTS.values() for text in options.values()]
    assert len(set(words)) == len(words)
    assert len(set(texts)) == len(texts)
    page = page_of("bakery", first_words())
    assert all(page.count(next(iter(options.values()))) == 1 for options in SLOTS.values())


def test_the_demonstrator_follows_the_dialogue_and_only_the_informed_one_the_solution():
    task = frontend_task("train", 3)
    request = [{"role": "user", "content": "make a page for a museum . i want huge title ."}]
    shown = 0
    for seed in range(100):
        text = frontend_demonstrator({"domain": "frontend"}, request, random.Random(seed))
        assert text == frontend_demonstrator(task, request, random.Random(seed))
        assert "<h1" in text and " museum " in text
        shown += choice_of(text)["title"] == "huge"
    assert shown > 60
    informed = {"ground_truth": task["ground_truth"]}
    wanted = choice_of(task["ground_truth"])
    matches = []
    for seed in range(100):
        draw = random.Random(seed)
        page = choice_of(frontend_demonstrator(informed, request, draw, informed=True))
        matches += [page[slot] == wanted[slot] for slot in SLOTS if slot != "title"]
    assert sum(matches) / len(matches) > 0.6


def test_each_wrong_slot_lowers_the_similarity_of_a_page(browser):
    task = frontend_task("test", 1)
    wanted = choice_of(task["ground_truth"])
    for slot, options in SLOTS.items():
        wrong = next(word for word in options if word != wanted[slot])
        page = page_of(task["toy"]["topic"], {**wanted, slot: wrong})
        assert grade_page(task, page, browser.render).reward < 0.999
    assert grade_page(task, task["ground_truth"], browser.render).reward == 1.0


def test_the_base_policy_writes_pages_of_the_grammar():
    said = first_texts("toy/base_frontend", toy_tasks("toy:frontend:valid", 30), 200)
    choices = [choice_of(extract_html(text)) for text, _ in said]
    assert sum(None not in choice.values() for choice in choices) >= 27


def test_requests_state_none_one_or_two_wishes():
    counts = [sum(f"{word} {slot}" in task["problem_description"]
                  for slot, word in task["toy"]["wanted"].items())
              for task in toy_tasks("toy:frontend:train", 300)]
    assert {0, 1, 2} == set(counts) and min(map(counts.count, range(3))) > 60


def test_a_slot_counts_if_the_page_shows_one_word_of_it_and_cards_if_they_are_there():
    page = page_of("hotel", first_words())
    assert choice_of(page) == first_words()
    assert choice_of(page.replace("h-8", "h-8 h-64"))["footer"] is None
    assert choice_of(page.replace("<p> card", "<p> card <p> card", 1))["cards"] is None


def test_the_human_looks_at_the_last_message_alone():
    page = frontend_task("train", 0)["ground_truth"]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": page},
                {"role": "user", "content": "y"}, {"role": "assistant", "content": "done ?"}]
    draw = random.Random(0)
    assert frontend_human(frontend_task("train", 0), messages, draw) == "show me a page ."
    assert frontend_human(frontend_task("train", 0), messages[:2], draw) == "looks right ."


def test_the_designer_answers_never_at_once_rarely_early_and_often_when_all_is_right():
    task = frontend_task("train", 3)
    request = [{"role": "user", "content": task["problem_description"]}]
    shown = [*request, {"role": "assistant", "content": task["ground_truth"]}]
    shares = []
    for messages in (request, [*shown, {"role": "user", "content": "i want huge title ."}],
                     [*shown, {"role": "user", "content": "looks right ."}]):
        said = [frontend_demonstrator(task, messages, random.Random(seed)) for seed in range(400)]
        shares.append(sum(ANSWER_MARKER in text for text in said) / 400)
    assert shares[0] == 0 and 0.08 < shares[1] < 0.22 and 0.3 < shares[2] < 0.5
