"""Pages as tasks and answers: extraction, WebSight, similarities, the human's view."""

import contextlib
import io
import json
import random
import re
import shutil
import threading
import time
import types

import pytest
from conftest import LINK, PAGE, dialogue, png, read_rows, write_rows
from PIL import Image
from safetensors.torch import load_file, save_file

from colbench import DOMAINS, human_page_view, image_part
from formats.commands import websight
from judge.browser import MAX_PAGE_CHARACTERS, PageError, placeholder_picture
from judge.pages import (
    ClipReward, PageJudge, embedded_similarity, extract_html, grade_page, graded_page, last_page,
    official_addresses, solution_page)
from judge.sandbox import SOLUTION_FAILED, Grade
from speakers.vision import local_images

# -----------------------------------------------------------------------------
# Extraction and WebSight


def test_blocks_are_those_of_the_official_expressions():
    draw = random.Random(0)
    pieces = ["<html", "</html>", "<body", "</body>", ">", " class=a", "\n", "<p>", "<html>"]
    for _ in range(3000):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 12)))
        blocks = (re.search(f"<{tag}.*?>.*?</{tag}>", text, re.DOTALL) for tag in ("html", "body"))
        assert extract_html(text) == next((block[0] for block in blocks if block), "")
    assert extract_html(None) == ""


def test_the_page_that_counts_is_the_answers_or_else_the_last_one_of_the_agent():
    history = dialogue("<html>u</html>", "<html>o</html>", "no", "<html>a</html>",
                       "<html>v</html>", "no page")
    assert graded_page("no page", history) == last_page(history) == "<html>a</html>"
    assert graded_page("so: <html>b</html>", history) == "<html>b</html>"
    assert graded_page("x", dialogue("<html>u</html>", "no page")) == ""
    assert graded_page(None, history[:1]) == ""


def test_an_opening_tag_that_never_ends_takes_no_time():
    began = time.monotonic()
    assert extract_html("<html>" * 20_000) == ""
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("address, pinned", [
    ("https://source.unsplash.com/random/300x200/?cat=1", "https://picsum.photos/id/48/300/200"),
    ("https://picsum.photos/40/50", "https://picsum.photos/id/48/40/50"),
    ("https://picsum.photos/id/7/1/2", "https://picsum.photos/id/7/1/2"),
])
def test_random_pictures_become_picture_48_and_pinned_ones_stay(address, pinned):
    assert official_addresses(f"{address} and {address}") == f"{pinned} and {pinned}"


def test_websight_sends_the_first_rows_to_train_and_the_rest_to_test(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("formats.commands.TRAIN_ROWS", 2)
    text = "https://picsum.photos/4/5"
    write_rows(tmp_path / "rows.jsonl", [
        {"llm_generated_idea": f"idea {index}", "text": text, "image": None} for index in range(3)])
    paths = [tmp_path / "new/train.jsonl", tmp_path / "another/test.jsonl"]
    websight(tmp_path / "rows.jsonl", *paths)
    assert capsys.readouterr().out == f"{paths[0]}: 2 tasks\n{paths[1]}: 1 task\n"
    train, test = map(read_rows, paths)
    assert [task["problem_description"] for task in train] == ["idea 0", "idea 1"]
    assert [task["problem_description"] for task in test] == ["idea 2"]
    assert test[0]["ground_truth"] == "https://picsum.photos/id/48/4/5"
    with pytest.raises(SystemExit, match="found something else"):
        websight(tmp_path / "rows.jsonl", tmp_path / "rows.jsonl", paths[1])


def test_a_bad_websight_row_is_named_and_leaves_no_output(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "no idea"}')
    with pytest.raises(SystemExit, match="line 1: .*'llm_generated_idea'"):
        websight(tmp_path / "rows.jsonl", tmp_path / "train.jsonl", tmp_path / "test.jsonl")
    with pytest.raises(SystemExit, match="no such file"):
        websight(tmp_path / "none.jsonl", tmp_path / "train.jsonl", tmp_path / "test.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


# -----------------------------------------------------------------------------
# Similarities and grades


@pytest.mark.slow
def test_embedded_similarity_ranks_graded_edits_and_is_one_for_the_same_page(browser, real_pages):
    picture = '<img src="https://picsum.photos/id/48/300/200">'
    line = "<p>One more line.</p>"
    heading = f"<h1 class='text-6xl p-8'>More</h1>{picture}"
    block = f"<div class='bg-black h-96'></div>{picture * 8}"
    other = f"<body class='bg-purple-900'><div class='h-96'></div>{picture * 40}</body>"
    for page in real_pages[:6]:
        edits = [page, *(page.replace("</body>", f"{more}</body>")
                         for more in (line, heading, block)), f"<html>{LINK}{other}</html>"]
        pngs = [browser.picture(edit) for edit in edits]
        scores = [embedded_similarity(pngs[0], png) for png in pngs]
        assert scores[0] == 1.0
        assert scores == sorted(scores, reverse=True)
        assert scores[1] > scores[3] > scores[4] >= 0
        assert scores[2] == pytest.approx(embedded_similarity(pngs[2], pngs[0]))


def test_a_blank_page_is_far_from_every_real_page(browser, real_pages):
    blank = browser.render("<html></html>")
    pictures = [browser.picture(page) for page in real_pages[:10]]
    assert max(embedded_similarity(blank, picture) for picture in pictures) < 0.7


def test_answers_without_a_page_score_zero_and_say_so(browser):
    task = {"ground_truth": PAGE}
    too_long = "<html>" + "x" * 10**6 + "</html>"
    grades = [grade_page(task, answer, browser.render) for answer in ("no page", too_long, PAGE)]
    assert grades[0] == Grade(0.0, None, {"page": "no page in the answer"})
    assert grades[1].reward == 0.0
    assert "characters" in grades[1].reasons["page"]
    assert grades[2] == Grade(1.0, None, {"page": "rendered"})


def test_an_answer_equal_to_the_solution_scores_one_whatever_stands_around_its_html(browser):
    wide = '<div style="height: 50%; background: red">half</div>'  # half of what, a doctype decides
    solution = f"<!DOCTYPE html>\n<html><body>{wide}</body></html>\n"
    answer = f"<html><body>{wide}</body></html>"
    assert grade_page({"ground_truth": solution}, solution, browser.render).reward == 1.0
    assert grade_page({"ground_truth": wide}, answer, browser.render).reward == 1.0


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory):
    import torch
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**size, "vocab_size": 100},
        vision_config={**size, "image_size": 64, "patch_size": 16})
    processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    folder = tmp_path_factory.mktemp("clip")
    transformers.CLIPModel(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def test_a_page_is_like_itself_and_its_solution_is_embedded_once(tiny_clip):
    clip = ClipReward(tiny_clip)
    addresses = [f"https://picsum.photos/id/{width}/{width}/90" for width in (60, 90, 120)]
    pictures = [placeholder_picture(address) for address in addresses]
    found = [clip.similarity(picture, pictures[0]) for picture in pictures]
    assert found[0] == pytest.approx(1.0, abs=1e-5) and max(found[1:]) < found[0]
    assert clip.embed_solution.cache_info().misses == 1


def test_a_missing_clip_is_refused(tiny_clip, tmp_path):
    with pytest.raises(SystemExit, match="--clip none"):
        ClipReward(tmp_path / "nothing")
    shutil.copytree(tiny_clip, tmp_path / "half")
    weights = load_file(tmp_path / "half/model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, tmp_path / "half/model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match="found no weights visual_projection.weight, expected"):
        ClipReward(tmp_path / "half")


# -----------------------------------------------------------------------------
# The human's view


def parts_of(message, kind):
    return [part for part in message["content"] if part["type"] == kind]


def test_the_human_sees_two_pictures_each_after_its_own_sentence_and_none_of_the_html():
    drawn = {"<html>mine</html>": png("red"), "<html>yours</html>": png("blue")}
    task = {"problem_description": "a {message}", "ground_truth": "so: <html>yours</html> ."}
    history = dialogue("a page", "<html>old</html>", "no", "now <html>mine</html>")
    judge = types.SimpleNamespace(picture=drawn.get)
    (message,) = human_page_view(task, history, "{problem_description}: {message} {other}",
                                 judge)
    assert message["content"] == [
        {"type": "text", "text": "a {message}: now [the page below] {other}"},
        {"type": "text", "text": "The designer's page:"}, image_part(png("red")),
        {"type": "text", "text": "The page you want:"}, image_part(png("blue"))]
    (local,), _ = local_images([message])
    assert [part["image"].size for part in parts_of(local, "image")] == [(100, 60)] * 2
    (message,) = human_page_view(task, history, DOMAINS["frontend"].human_prompt, judge)
    assert "yours" not in json.dumps(parts_of(message, "text"))  # none of the solution's HTML


def test_human_is_told_which_page_there_is_no_picture_of(browser):
    too_long = f"<html>{' ' * MAX_PAGE_CHARACTERS}</html>"
    task = {"problem_description": "a page", "domain": "frontend", "ground_truth": too_long}
    with PageJudge("none") as judge:
        (none,), (unseen,) = (human_page_view(task, dialogue("a page", said), "{message}", judge)
                              for said in ("no page", too_long))
    undrawn = "The page you want cannot be drawn."
    for message, texts in ((none, ["no page", "The designer shows no page.", undrawn]), (
            unseen, ["[the page below]", "The designer's page cannot be drawn.", undrawn])):
        assert message["content"] == [{"type": "text", "text": text} for text in texts]


def striped(rows):
    """A screenshot of so many rows of cells, each half black and half white."""
    picture = Image.new("RGB", (1280, 20 * rows), "white")
    for row in range(rows):
        picture.paste("black", (0, 20 * row, 1280, 20 * row + 10))
    stored = io.BytesIO()
    picture.save(stored, "PNG")
    return stored.getvalue()


def test_a_judge_that_is_closed_draws_no_page_that_others_still_wait_for(monkeypatch):
    began, drawn = threading.Event(), []

    def render(page):
        drawn.append(page)
        began.set()
        time.sleep(0.2)
        return b""

    def ask(number):
        with contextlib.suppress(SystemExit):  # of a judge that is closed
            judge.picture(str(number))

    with PageJudge(clip="none") as judge:
        monkeypatch.setattr(judge.browser, "render", render)
        threads = [threading.Thread(target=ask, args=(number,), daemon=True)
                   for number in range(30)]
        for thread in threads:
            thread.start()
        began.wait()
    for thread in threads:
        thread.join()
    assert len(drawn) < 5


def test_the_embedded_similarity_is_the_mean_of_layout_detail_and_colour():
    assert embedded_similarity(png("red"), png("red")) == 1.0  # without any contrast
    # another colour everywhere, as little contrast, no colour in common
    assert embedded_similarity(png("red"), png("black")) == pytest.approx(1 / 3)
    # a page of twice the height: half of the layout, half of the contrast, the same colours
    assert embedded_similarity(striped(10), striped(20)) == pytest.approx(2 / 3, abs=0.01)
    # half the greatest difference of a colour is none of the layout: 128 / 255 apart
    assert embedded_similarity(png("#808080"), png("black")) == pytest.approx(1 / 3, abs=1e-3)


def test_the_page_below_is_named_even_where_its_random_pictures_were_replaced():
    page = "<html><img src=https://picsum.photos/300/200></html>"
    judge = types.SimpleNamespace(picture=lambda page: None)
    task = {"ground_truth": PAGE}
    (message,) = human_page_view(task, dialogue("a", f"see {page}"), "{message}", judge)
    assert message["content"][0]["text"] == "see [the page below]"


def test_a_page_that_cannot_be_drawn_is_worth_nothing_and_the_first_html_is_drawn():
    assert extract_html("<body>a</body> <html>b</html> <html>c</html>") == "<html>b</html>"
    assert extract_html("</html> <html>b</html>") == "<html>b</html>"
    random_picture = "<p><img src=https://picsum.photos/300/200>"
    assert "id/48/300/200" in solution_page(random_picture)

    def draw(page):
        if "bad" in page:
            raise PageError("too slow")
        return png("red")

    for answer, solution, reasons in (
            ("<html>bad</html>", "<html></html>", {"page": "too slow"}),
            ("<html></html>", "<html>bad</html>",
             {"page": SOLUTION_FAILED, "solution": "too slow"})):
        assert grade_page({"ground_truth": solution}, answer, draw) == Grade(0.0, None, reasons)
