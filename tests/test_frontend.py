"""Properties of the frontend half of colbench.py: the browser, both similarities, WebSight, the toy pages."""

import base64
import hashlib
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import colbench

DATA = Path(os.environ.get("COLBENCH_DATA", Path(__file__).parents[2] / "shared" / "data"))
ROWS = DATA / "colbench_frontend_40.jsonl"
LINK = '<link href="https://cdn.jsdelivr.net/npm/tailwindcss@2.2.19/dist/tailwind.min.css" rel="stylesheet">'
PAGE = f'<html>{LINK}<body class="bg-red-500"><h1 class="text-6xl p-8">A page</h1></body></html>'
CHROMIUM = next(filter(None, map(shutil.which, [os.environ.get("CHROMIUM", "chromium"), "google-chrome"])), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with colbench.Browser(seconds_per_page=5) as shared:
        yield shared


@pytest.fixture(scope="module")
def real_pages():
    if not ROWS.exists():
        pytest.skip(f"the real rows are not there: {ROWS}; set COLBENCH_DATA to their folder")
    return [json.loads(line)["ground_truth"] for line in ROWS.read_text().splitlines()]


class Listener:
    """A loopback server that remembers whether anything ever connected."""

    def __enter__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.settimeout(0.2)
        self.address, self.visits, self.open = f"127.0.0.1:{self.socket.getsockname()[1]}", [], True
        self.thread = threading.Thread(target=self.listen)
        self.thread.start()
        return self

    def listen(self):
        while self.open:
            try:
                visitor, _ = self.socket.accept()
            except TimeoutError:
                continue
            self.visits.append(visitor.recv(1000))
            visitor.close()

    def __exit__(self, *_):
        self.open = False
        self.thread.join()
        self.socket.close()


def colour_at(png, x, y):
    return colbench.open_picture(png).getpixel((x, y))


# -------------------------------------------------------------------------------
# Extraction and WebSight


def test_the_page_that_counts_is_the_answers_or_else_the_last_one_shown():
    history = [{"role": "user", "content": "a page"}, {"role": "assistant", "content": "<html>1</html>"},
               {"role": "user", "content": "<html>2</html>"}, {"role": "assistant", "content": "no page"}]
    assert colbench.graded_page("so: <html>3</html>", history) == "<html>3</html>"
    assert colbench.graded_page("no page", history) == "<html>1</html>"
    assert colbench.graded_page(None, history[:1]) == ""


def test_first_html_block_wins_over_body_and_nothing_gives_the_empty_string():
    assert colbench.extract_html("a <html lang=x>1\n</html> b <html>2</html>") == "<html lang=x>1\n</html>"
    assert colbench.extract_html("a <body>1</body> b") == "<body>1</body>"
    assert colbench.extract_html("no page, <html> never closed") == ""
    assert colbench.extract_html(None) == ""


def test_random_pictures_become_picture_48_and_pinned_ones_stay():
    text = "https://source.unsplash.com/random/300x200/?cat=1 https://picsum.photos/40/50 https://picsum.photos/id/7/1/2"
    wanted = "https://picsum.photos/id/48/300/200 https://picsum.photos/id/48/40/50 https://picsum.photos/id/7/1/2"
    assert colbench.official_addresses(text) == wanted


def test_websight_sends_the_first_rows_to_train_and_the_rest_to_test(tmp_path, monkeypatch):
    monkeypatch.setattr(colbench, "WEBSIGHT_TRAIN", 2)
    rows = [{"llm_generated_idea": f"idea {i}", "text": "https://picsum.photos/4/5", "image": None} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    colbench.websight(tmp_path / "rows.jsonl", tmp_path / "train.jsonl", tmp_path / "test.jsonl")
    train, test = ([json.loads(x) for x in open(tmp_path / name)] for name in ("train.jsonl", "test.jsonl"))
    assert [task["problem_description"] for task in train + test] == ["idea 0", "idea 1", "idea 2"]
    assert len(train) == 2 and test[0]["ground_truth"] == "https://picsum.photos/id/48/4/5"


def test_a_bad_websight_row_is_named_and_leaves_no_output(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "no idea"}')
    with pytest.raises(SystemExit, match="line 1: found no 'llm_generated_idea'"):
        colbench.websight(tmp_path / "rows.jsonl", tmp_path / "train.jsonl")
    with pytest.raises(SystemExit, match="no such file"):
        colbench.websight(tmp_path / "none.jsonl", tmp_path / "train.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_pages_have_no_tests_to_check_and_are_not_mixed_with_functions():
    with pytest.raises(SystemExit, match="expected backend tasks"):
        colbench.main(["check", "toy:frontend:train"])
    tasks = colbench.read_tasks("toy:frontend:test", 1) + colbench.read_tasks("toy:backend:test", 1)
    with pytest.raises(SystemExit, match="expected one domain"):
        colbench.Referee(None, tasks, None)


# -------------------------------------------------------------------------------
# Browser


def test_missing_chromium_is_one_sentence_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")
    with pytest.raises(SystemExit, match="apt-get install chromium"):
        colbench.Browser()


def test_a_program_that_is_no_chromium_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setenv("CHROMIUM", shutil.which("true"))
    with pytest.raises(SystemExit, match="does not start"):
        colbench.Browser().render(PAGE)


def test_tailwind_styles_apply_from_every_address_it_is_known_by(browser):
    for link in (
        LINK,
        '<link rel="stylesheet" href="https://unpkg.com/tailwindcss@^2/dist/tailwind.min.css">',
        '<script src="https://cdn.tailwindcss.com"></script>',
        '<link rel=stylesheet href="https://cdnjs.cloudflare.com/ajax/libs/tailwindcss/2.2.19/tailwind.min.css">',
    ):
        assert colour_at(browser.render(f'<html>{link}<body class="bg-red-500"></body></html>'), 5, 5) == (239, 68, 68)


@pytest.mark.parametrize(
    "address, size",
    [
        ("https://picsum.photos/id/48/300/200", (300, 200)),
        ("https://picsum.photos/1600/400-decor", (1600, 400)),
        ("https://picsum.photos/250", (250, 250)),
        ("https://source.unsplash.com/random/320x240/?cat", (320, 240)),
        ("https://images.unsplash.com/photo-15123-ab?w=640&h=480", (640, 480)),
        ("https://picsum.photos/99999999/0", (2000, 1)),
    ],
)
def test_placeholder_pictures_have_the_size_asked_for_within_caps(address, size):
    pillow = pytest.importorskip("PIL.Image")
    picture = pillow.open(io.BytesIO(colbench.placeholder_picture(address)))
    assert picture.size == size and picture.convert("RGB").getpixel((0, 0)) != (0, 0, 0)


def test_pictures_of_a_page_are_drawn(browser):
    picture = '<img src="https://picsum.photos/id/48/300/200" style="display:block">'
    png = browser.render(f'<html><body style="margin:0">{picture}</body></html>')
    assert colour_at(png, 299, 199) != (255, 255, 255) and colour_at(png, 301, 199) == (255, 255, 255)


def test_tall_pages_are_whole_up_to_the_cap(browser):
    pages = [f'<body style="height:{height}px;margin:0">' for height in (2000, 10**9)]
    sizes = [colbench.open_picture(png).size for png in map(browser.picture, pages)]
    assert sizes == [(1280, 2000), (1280, colbench.MAX_HEIGHT)]


def test_a_page_has_the_same_pixels_in_any_order_and_in_another_browser(browser, real_pages):
    pages = real_pages[:10]
    first, second = [browser.picture(page) for page in pages], [browser.picture(page) for page in pages[::-1]][::-1]
    with colbench.Browser() as other:
        third = [other.picture(page) for page in pages]
    digests = [[hashlib.sha256(png).hexdigest() for png in pngs] for pngs in (first, second, third)]
    assert digests[0] == digests[1] == digests[2] and len(set(digests[0])) == 10


def test_animated_pages_are_drawn_at_rest(browser):
    page = f'<html>{LINK}<body><div class="animate-pulse animate-spin h-96 w-64 bg-red-500"></div></body></html>'
    assert browser.render(page) == browser.render(page)


def test_script_never_runs(browser):
    attack = "document.body.style.background='red'"
    page = f'<html><body onload="{attack}"><script>{attack}</script></body></html>'
    assert colour_at(browser.render(page), 5, 5) == (255, 255, 255)


HOSTILE = [
    '<img src="{0}/a"><video src="{0}/b"></video><object data="{0}/c"></object><embed src="{0}/d">',
    '<iframe src="{0}/a"></iframe><iframe srcdoc="<img src={0}/b>"></iframe>',
    '<iframe src="data:text/html,<img src={0}/c>"></iframe><frameset><frame src="{0}/a"></frameset>',
    '<meta http-equiv="refresh" content="0;url={0}/a">',
    '<link rel=preconnect href="{0}"><link rel=dns-prefetch href="{0}"><link rel=prefetch href="{0}/a">',
    '<link rel=preload as=image href="{0}/a"><link rel=prerender href="{0}/b"><link rel=icon href="{0}/c">',
    '<link rel=manifest href="{0}/d"><link rel=modulepreload href="{0}/e">',
    '<style>@import "{0}/a"; body{{background:url({0}/b)}} @font-face{{font-family:f;src:url({0}/c)}}</style>',
    '<form action="{0}/a"><input type=image src="{0}/b" autofocus></form><base href="{0}/"><img src=rel>',
    '<svg><image href="{0}/a"/><use href="{0}/b#c"/></svg><script src="{0}/d"></script>',
    '<script>new WebSocket("{0}".replace("http","ws")); fetch("{0}/f"); location="{0}/g"</script>',
    '<audio src="{0}/h" autoplay></audio><a ping="{0}/p" href="{0}">x</a><portal src="{0}"></portal>',
]


def attack(browser, address):
    """Render every hostile page aimed at the address; how many requests the browser tried."""
    tried, answer = [], browser._answer
    browser._answer = lambda request, url, kind: (tried.append(url), answer(request, url, kind))
    pages = [f"<html><body>{page.format(address)}<p style='font-family:f'>x</body></html>" for page in HOSTILE]
    for page in pages:
        browser.picture(page)
    time.sleep(0.5)
    return len(tried)


@needs_chromium
def test_hostile_pages_reach_neither_loopback_nor_the_outside():
    with Listener() as listener, colbench.Browser() as browser:
        for address in (listener.address, listener.address.replace("127.0.0.1", "localhost"), "example.org"):
            assert attack(browser, f"http://{address}") > 10
        assert browser.starts == 1
    assert listener.visits == []


@needs_chromium
@pytest.mark.slow
def test_network_is_closed_even_where_requests_are_let_through_and_the_hostile_pages_are_not_duds(monkeypatch):
    def let_through(browser, request, address, kind):
        browser._send("Fetch.continueRequest", {"requestId": request})

    monkeypatch.setattr(colbench.Browser, "_answer", let_through)
    for open_network in (False, True):
        if open_network:
            flags = [flag for flag in colbench.CHROMIUM_FLAGS if "proxy" not in flag and "resolver" not in flag]
            monkeypatch.setattr(colbench, "CHROMIUM_FLAGS", flags)
        with Listener() as listener, colbench.Browser(seconds_per_page=3) as browser:
            attack(browser, f"http://{listener.address}")
        assert bool(listener.visits) == open_network


def test_pages_do_not_show_files_of_this_machine(browser, tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(colbench.placeholder_picture("https://picsum.photos/1280/800"))
    colour = colour_at(secret.read_bytes(), 0, 0)
    for page in (
        f'<body style="margin:0"><img src="file://{secret}"><iframe src="file://{secret}"></iframe></body>',
        f'<body style="background:url(file://{secret})"><object data="file://{secret}"></object></body>',
        f'<html><meta http-equiv=refresh content="0;file://{secret}"><embed src="file://{secret}"></html>',
    ):
        assert colour not in {seen for _, seen in colbench.open_picture(browser.render(page)).getcolors(1 << 24)}


def test_a_page_that_leaves_later_does_not_change_the_next_one(browser):
    wanted = browser.render(PAGE)
    browser.render('<html><meta http-equiv="refresh" content="1;url=about:blank"><body>first</body></html>')
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert browser.render(PAGE) == wanted


def test_bombs_cost_their_own_limit_only(browser):
    bombs = [
        "<html>" + "<div style='display:inline-grid;float:left;columns:3'>" * 30_000 + "</html>",
        "<html><body>" + "x" * colbench.MAX_PAGE_CHARACTERS + "</body></html>",
        "<svg>" + "".join(
            f'<g id="g{i}">' + f'<use href="#g{i + 1}"/>' * 10 + "</g>" for i in range(9)
        ) + '<g id="g9"><rect width="1" height="1"/></g></svg>',
    ]
    for bomb in bombs:
        start = time.monotonic()
        browser.picture(bomb)
        assert time.monotonic() - start < browser.seconds_per_page + 4
        assert colour_at(browser.render(PAGE), 5, 5) == (239, 68, 68)


def test_odd_text_is_rendered(browser):
    for html in ("", "\ud800 half a pair", "<html>\0 zero</html>", "<!doctype html><p>\u2028 \U0001f600"):
        assert colbench.open_picture(browser.render(html)).size == (1280, 800)


def test_a_killed_browser_costs_one_page(browser):
    browser.render(PAGE)
    os.killpg(browser.process.pid, 9)
    assert [png is None for png in map(browser.picture, [PAGE, PAGE])] == [True, False]


@needs_chromium
def test_browser_restarts_after_its_share_of_pages():
    with colbench.Browser(pages_per_start=2) as browser:
        assert len({browser.render(PAGE) for _ in range(5)}) == 1 and browser.starts == 3


@needs_chromium
def test_browser_and_profile_end_with_a_killed_owner(tmp_path):
    code = "import colbench; b = colbench.Browser(); b.render(''); print(b.process.pid, flush=True); input()"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(colbench.__file__).parent)}
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    group = int(owner.stdout.readline())
    assert list(tmp_path.glob("colbench-chromium-*"))
    owner.kill()
    owner.communicate()
    until = time.monotonic() + 10
    while time.monotonic() < until and (list(tmp_path.iterdir()) or group_lives(group)):
        time.sleep(0.1)
    assert not list(tmp_path.glob("colbench-chromium-*")) and not group_lives(group)


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_one_browser_is_three_times_as_fast_as_a_process_per_page(browser, real_pages, tmp_path):
    pages = real_pages[:6]
    browser.render(pages[0])
    start = time.monotonic()
    for page in pages:
        browser.picture(page)
    pooled = time.monotonic() - start
    start = time.monotonic()
    for number, page in enumerate(pages):
        (tmp_path / "page.html").write_text(page)
        with tempfile.TemporaryDirectory(dir=tmp_path, ignore_cleanup_errors=True) as profile:
            command = [CHROMIUM, *colbench.CHROMIUM_FLAGS, "--no-sandbox", f"--user-data-dir={profile}"]
            command.remove("--remote-debugging-pipe")
            command += ["--window-size=1280,800", f"--screenshot={tmp_path}/{number}.png", f"file://{tmp_path}/page.html"]
            subprocess.run(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=60, check=True)
        assert (tmp_path / f"{number}.png").exists()
    single = time.monotonic() - start
    print(f"\npages a second: one browser {6 / pooled:.1f}, a process each {6 / single:.1f}, x{single / pooled:.1f}")
    assert single > 3 * pooled


# -------------------------------------------------------------------------------
# Similarities and grades


def test_embedded_similarity_ranks_graded_edits_and_is_one_for_the_same_page(browser, real_pages):
    pictures = '<img src="https://picsum.photos/id/48/300/200">'
    for page in real_pages[:6]:
        edits = [
            page,
            page.replace("</body>", "<p>One more line.</p></body>"),
            page.replace("</body>", f"<h1 class='text-6xl p-8'>More</h1>{pictures}</body>"),
            page.replace("</body>", f"<div class='bg-black h-96'></div>{pictures * 8}</body>"),
            f"<html>{LINK}<body class='bg-purple-900'><div class='h-96'></div>{pictures * 40}</body></html>",
        ]
        pngs = [browser.picture(page) for page in edits]
        scores = [colbench.embedded_similarity(pngs[0], png) for png in pngs]
        assert scores[0] == 1.0 and scores == sorted(scores, reverse=True) and scores[1] > scores[3] > scores[4] >= 0
        assert scores[2] == pytest.approx(colbench.embedded_similarity(pngs[2], pngs[0]))


def test_a_blank_page_is_far_from_every_real_page(browser, real_pages):
    blank = browser.render("<html></html>")
    assert max(colbench.embedded_similarity(blank, png) for png in map(browser.picture, real_pages[:10])) < 0.7


def test_answers_without_a_page_score_zero_and_say_so(browser):
    task = {"ground_truth": PAGE}
    grades = colbench.grade_frontend_all([task] * 3, ["no page", "<html>" + "x" * 10**6 + "</html>", PAGE], browser)
    assert grades[0] == colbench.Grade(0.0, None, {"page": "no page in the answer"})
    assert grades[1].reward == 0.0 and "characters" in grades[1].reasons["page"]
    assert grades[2].reward == 1.0 and colbench.grade_frontend_all([task], [PAGE], browser) == grades[2:3]


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**size, "vocab_size": 100}, vision_config={**size, "image_size": 64, "patch_size": 16}
    )
    folder = tmp_path_factory.mktemp("clip")
    transformers.CLIPModel(config).save_pretrained(folder)
    square = {"height": 64, "width": 64}
    transformers.CLIPImageProcessorPil(size={"shortest_edge": 64}, crop_size=square).save_pretrained(folder)
    return folder


def tall_page(last_colour):
    from PIL import Image

    image = Image.new("RGB", (100, 400), "white")
    image.paste(last_colour, (0, 340, 100, 400))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_clip_batches_equal_single_pages_and_references_are_embedded_once(tiny_clip):
    clip = colbench.ClipReward(tiny_clip, batch_size=2)
    pictures = [colbench.placeholder_picture(f"https://picsum.photos/{n}/90") for n in (60, 90, 120)]
    together = clip.similarities(pictures, [pictures[0]] * 3)
    assert together[0] == pytest.approx(1.0, abs=1e-5) and len(clip.known) == 1
    alone = [clip.similarities([picture], [pictures[0]])[0] for picture in pictures]
    assert together == pytest.approx(alone, abs=1e-5)
    assert clip.similarities([], []) == []


def test_only_padding_sees_the_end_of_a_tall_page(tiny_clip):
    pages = [tall_page("red")], [tall_page("blue")]
    centre, padded = (colbench.ClipReward(tiny_clip, crop=crop).similarities(*pages)[0] for crop in ("center", "pad"))
    assert centre == pytest.approx(1.0, abs=1e-6) and padded < 0.9999


def test_missing_clip_is_one_sentence(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match="--clip none"):
        colbench.ClipReward(tmp_path / "nothing")


def test_human_sees_the_reference_picture_but_no_reference_html():
    task = {"problem_description": "a {page}", "ground_truth": PAGE}
    png = colbench.placeholder_picture("https://picsum.photos/4/5")
    history = [{"role": "user", "content": "a page"}, {"role": "assistant", "content": "see {x} " + PAGE}]
    messages = colbench.human_frontend_messages(task, history, png, png, colbench.HUMAN_PROMPT["frontend"])
    text = json.dumps([part for part in messages[0]["content"] if part["type"] == "text"])
    assert "a {page}" in text and "see {x}" in text and "bg-red-500" not in text
    addresses = [part["image_url"]["url"] for part in messages[0]["content"] if part["type"] == "image_url"]
    assert [base64.b64decode(address.split(",")[1]) for address in addresses] == [png, png]
    local = colbench.local_images(messages)[0]["content"]
    assert [part["image"].size for part in local if part["type"] == "image"] == [(4, 5)] * 2
    no_page = colbench.human_frontend_messages(task, history[:1], None, png, colbench.HUMAN_PROMPT["frontend"])[0]["content"]
    assert sum(part["type"] == "image_url" for part in no_page) == 1


# -------------------------------------------------------------------------------
# Toy pages


def toy_episode(task, seed):
    rng, history = random.Random(seed), [{"role": "user", "content": task["problem_description"]}]
    for turn in range(10):
        message = colbench.toy_frontend_demonstrator(task, history, rng)
        content = message.split("OUTPUT:")[1].strip()
        history.append({"role": "assistant", "content": content})
        if "I WANT TO ANSWER:" in content or turn == 9:
            return history
        history.append({"role": "user", "content": colbench.toy_frontend_human(task, history)})


def test_toy_splits_share_no_page_and_tasks_repeat_by_number():
    pages = {
        split: {colbench.toy_frontend_task(split, index)["ground_truth"] for index in range(3000)}
        for split in ("train", "test")
    }
    assert not pages["train"] & pages["test"] and len(pages["train"]) > 1000 and len(pages["test"]) > 250
    assert colbench.toy_frontend_task("train", 7) == colbench.toy_frontend_task("train", 7)


def test_following_the_toy_human_reaches_the_wanted_page_within_the_limit():
    for index in range(100):
        task = colbench.toy_frontend_task("test", index)
        choice = {slot: next(iter(words)) for slot, words in colbench.TOY_SLOTS.items()}
        topic = task["problem_description"].split(" for a ")[1].split()[0]
        for _turn in range(8):
            page = colbench.toy_page(topic, choice)
            reply = colbench.toy_frontend_human(task, [{"role": "assistant", "content": page}])
            if reply == "looks right .":
                break
            word, slot = reply.removeprefix("i want ").removesuffix(" .").split()
            choice[slot] = word
        assert page == task["ground_truth"]


def test_toy_human_asks_for_a_page_and_sees_what_is_missing():
    task = colbench.toy_frontend_task("train", 0)
    assert colbench.toy_frontend_human(task, [{"role": "assistant", "content": "hello"}]) == "show me a page ."
    missing = task["ground_truth"].replace("<p> card", "", 1)
    assert colbench.toy_frontend_human(task, [{"role": "assistant", "content": missing}]).endswith("cards .")


def test_toy_words_and_texts_belong_to_one_slot_each():
    words = [word for options in colbench.TOY_SLOTS.values() for word in options]
    texts = [text for options in colbench.TOY_SLOTS.values() for text in options.values()]
    assert len(set(words)) == len(words) and len(set(texts)) == len(texts)
    skeleton = colbench.toy_page("bakery", {slot: next(iter(words)) for slot, words in colbench.TOY_SLOTS.items()})
    assert all(skeleton.count(next(iter(options.values()))) == 1 for options in colbench.TOY_SLOTS.values())


def test_toy_dialogues_are_short_and_neither_hopeless_nor_perfect():
    episodes = [(task, toy_episode(task, i)) for i in range(300) for task in [colbench.toy_frontend_task("train", i)]]
    right = [colbench.toy_page_choice(colbench.last_page(history)) for _, history in episodes]
    share = sum(
        shown == colbench.toy_page_choice(task["ground_truth"])
        for shown, (task, _) in zip(right, episodes, strict=True)
    ) / len(episodes)
    words = [len(" ".join(entry["content"] for entry in history).split()) for _, history in episodes]
    print(f"\nright pages {share:.2f}, words {sum(words) / len(words):.0f}, at most {max(words)}")
    assert 0.15 < share < 0.6 and sum(words) / len(words) < 400


def test_each_wrong_slot_lowers_the_similarity_of_a_toy_page(browser):
    task = colbench.toy_frontend_task("test", 1)
    wanted = colbench.toy_page_choice(task["ground_truth"])
    topic = task["problem_description"].split(" for a ")[1].split()[0]
    for slot, options in colbench.TOY_SLOTS.items():
        wrong = next(word for word in options if word != wanted[slot])
        page = colbench.toy_page(topic, {**wanted, slot: wrong})
        assert colbench.grade_frontend_all([task], [page], browser)[0].reward < 0.999
    assert colbench.grade_frontend_all([task], [task["ground_truth"]], browser)[0].reward == 1.0


def test_the_base_policy_of_pages_writes_pages_of_the_grammar():
    speaker = colbench.LocalSpeaker("toy/base_frontend", max_new_tokens=200, device="cpu")
    tasks = colbench.read_tasks("toy:frontend:valid", 30)
    prompt = Path("toy/base_frontend/agent_prompt.txt").read_text().strip()
    said = speaker.speak([colbench.agent_messages(task, [], prompt) for task in tasks], seeds=range(30))
    choices = [colbench.toy_page_choice(colbench.extract_html(utterances[0].text) or "") for utterances in said]
    assert sum(None not in choice.values() for choice in choices) >= 27
