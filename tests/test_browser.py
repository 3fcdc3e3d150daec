"""The browser: what it draws, and what pages cannot do to it."""

import base64
import contextlib
import hashlib
import io
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from conftest import LINK, PAGE, ROOT, needs_chromium
from PIL import Image

from judge.browser import (
    CHROMIUM_FLAGS, MAX_HEIGHT, MAX_PAGE_CHARACTERS, Browser, DevTools, PageError,
    placeholder_picture, settled_page)
from judge.pages import open_picture

RED_500 = (239, 68, 68)
RED = (255, 0, 0)
WHITE = (255, 255, 255)


def colour_at(png, x, y):
    return open_picture(png).getpixel((x, y))


# -----------------------------------------------------------------------------
# Start and end


@pytest.mark.parametrize("program, found", [
    ("/nowhere/chromium", "apt-get install chromium"), (shutil.which("true"), "does not start")])
def test_a_missing_chromium_and_a_program_that_is_none_are_sentences(monkeypatch, program, found):
    monkeypatch.setenv("CHROMIUM", program)
    with pytest.raises(SystemExit, match=found):
        Browser().render(PAGE)


@needs_chromium
def test_browser_restarts_after_its_share_of_pages():
    with Browser(pages_per_start=2) as browser:
        drawn = [(browser.render(PAGE), browser.devtools) for _ in range(5)]
        profiles = dict.fromkeys(devtools.profile for _, devtools in drawn)
        assert list(map(os.path.exists, profiles)) == [False, False, True]  # others have ended
    assert [len(set(found)) for found in zip(*drawn, strict=True)] == [1, 3]


@needs_chromium
def test_a_browser_leaves_no_file_of_its_own_behind():
    with Browser() as browser:
        browser.render(PAGE)
        profile = Path(browser.devtools.profile)
        outside = (profile / "SingletonSocket").readlink().parent
        assert outside.is_dir()
    assert not profile.exists() and not outside.exists()


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # on macOS, of a group of zombies
        return sys.platform != "darwin"
    return True


@needs_chromium
def test_chromium_and_its_profile_end_with_an_owner_that_is_killed(tmp_path):
    code = (
        "from judge.browser import Browser\n"
        "browser = Browser()\n"
        "browser.render('')\n"
        "print(browser.devtools.process.pid, flush=True)\n"
        "input()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)})
    group = int(owner.stdout.readline())
    assert list(tmp_path.glob("colbench-chromium-*"))
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (list(tmp_path.iterdir()) or group_lives(group)):
        time.sleep(0.1)
    assert not list(tmp_path.glob("colbench-chromium-*"))
    assert not group_lives(group)


def test_a_killed_browser_costs_no_page(browser):
    before = browser.render(PAGE)
    os.killpg(browser.devtools.process.pid, 9)
    assert browser.render(PAGE) == before


def test_a_page_that_crashes_is_noticed_at_once_and_costs_no_page(browser, monkeypatch):
    before = browser.render(PAGE)
    browser.devtools.send("Page.crash")
    monkeypatch.setattr(browser, "seconds_per_page", 60)
    began = time.monotonic()
    assert browser.render(PAGE) == before
    assert time.monotonic() - began < 60


@needs_chromium
def test_ctrl_c_ends_chromium(monkeypatch):
    def interrupted(html):
        raise KeyboardInterrupt

    with Browser() as browser:
        before = browser.render(PAGE)
        profile = browser.devtools.profile
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(browser, "_draw", interrupted)
            browser.render(PAGE)
        assert not os.path.exists(profile)
        assert browser.render(PAGE) == before


@needs_chromium
def test_a_browser_that_stands_still_costs_the_time_of_a_page():
    with Browser() as browser:
        browser.render(PAGE)
        assert not os.get_blocking(browser.devtools.process.stdin.fileno())  # else this would hang
        os.killpg(browser.devtools.process.pid, signal.SIGSTOP)
        browser.devtools.set_deadline(1)
        began = time.monotonic()
        with pytest.raises(PageError, match="took more than 1 second"):
            browser.devtools.send("Page.navigate", url="x" * 10**7)  # more than a pipe holds
        assert time.monotonic() - began < 5


def test_a_command_that_the_browser_refuses_is_an_error_of_the_page(browser):
    browser.render(PAGE)
    browser.devtools.set_deadline(5)
    with pytest.raises(PageError, match="the browser refused No.such"):
        browser.devtools.call("No.such")


@needs_chromium
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_chromium_gets_no_secret_of_its_owners_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-this-is-secret")
    with Browser() as browser:
        browser.render(PAGE)
        environment = Path(f"/proc/{browser.devtools.process.pid}/environ").read_bytes()
    assert b"HOME" in environment and b"secret" not in environment


@pytest.mark.parametrize("user, sandboxed", [(0, False), (1000, True)])
def test_chromium_has_its_sandbox_except_for_root(monkeypatch, tmp_path, user, sandboxed):
    commands = []

    def note(command, **_):
        commands.append(command)
        raise OSError

    monkeypatch.setenv("CHROMIUM", shutil.which("true"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(subprocess, "Popen", note)
    with pytest.raises(OSError):
        DevTools(CHROMIUM_FLAGS, None)
    assert ("--no-sandbox" in commands[0]) != sandboxed


# -----------------------------------------------------------------------------
# What is drawn


def test_tailwind_styles_apply_from_every_address_it_is_known_by(browser):
    cdnjs = "https://cdnjs.cloudflare.com/ajax/libs/tailwindcss/2.2.19/tailwind.min.css"
    unpkg = "https://unpkg.com/tailwindcss@^2/dist/tailwind.min.css"
    links = [
        LINK,
        f'<link rel="stylesheet" href="{unpkg}">',
        '<script src="https://cdn.tailwindcss.com"></script>',
        f"<link rel=stylesheet href='{cdnjs}'>",
        '<script src="https://cdn.tailwindcss.com">tailwind.config = {}</script>',
        '<script src="https://cdn.jsdelivr.net/npm/@tailwindcss/browser@4"></script>',
        '<link rel="stylesheet" href="https://unpkg.com/tailwindcss@^1.0/dist/tailwind.min.css">',
    ]
    for link in links:
        png = browser.render(f'<html>{link}<body class="bg-red-500"></body></html>')
        assert colour_at(png, 5, 5) == RED_500


OTHER_SCRIPT = '<script src="x.js"></script>'
CARDS = "<set-card a=b></set-card><animated-card></animated-card>"
NO_PICTURE = "<p data-decoding='async'>"


@pytest.mark.parametrize("page, settled", [
    (f'{OTHER_SCRIPT}<SCRIPT defer src="https://CDN.tailwindcss.com?p=a"> </SCRIPT>',
     f'{OTHER_SCRIPT}<link rel="stylesheet" href="https://cdn.tailwindcss.com">'),
    (f"<animate x=1></animate>{CARDS}<Set y=2>", CARDS),
    ("<p style='Content-Visibility : auto'>", "<p style='content-visibility:visible'>"),
    (f"{NO_PICTURE}<img decoding=async src=a><img Decoding='async'>",
     f"{NO_PICTURE}<img  src=a><img >"),
])
def test_only_what_makes_a_page_restless_is_replaced(page, settled):
    assert settled_page(page).endswith(f"</style>{settled}")


def test_a_script_tag_that_never_ends_takes_no_time():
    for page in ("<script " * 50_000, "<script " + "cdn.tailwindcss.com" * 20_000):
        began = time.monotonic()
        assert settled_page(page).endswith(page)
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("address, size", [
    ("https://picsum.photos/id/48/300/200", (300, 200)),
    ("https://picsum.photos/1600/400-decor", (1600, 400)),
    ("https://picsum.photos/250", (250, 250)),
    ("https://source.unsplash.com/random/320x240/?cat", (320, 240)),
    ("https://images.unsplash.com/photo-15123-ab?w=640&h=480", (640, 480)),
    ("https://picsum.photos/99999999/0", (2000, 1)),
    (f"https://picsum.photos/{'9' * 5000}/{'9' * 5000}", (2000, 2000)),  # too long for int
])
def test_placeholder_pictures_have_the_size_asked_for_within_caps(address, size):
    picture = open_picture(placeholder_picture(address))
    assert picture.size == size
    assert picture.getpixel((0, 0)) != (0, 0, 0)


@pytest.mark.parametrize("address, same, other", [
    ("https://picsum.photos/id/48/300/200", "https://picsum.photos/id/48/800",
     "https://picsum.photos/id/49/300/200"),
    ("https://images.unsplash.com/photo-1-a?w=640&h=480",
     "https://images.unsplash.com/photo-1-a?w=64&h=48",
     "https://images.unsplash.com/photo-2-a?w=640&h=480"),
    ("https://source.unsplash.com/320x240/?cat", "https://source.unsplash.com/32x24/?cat",
     "https://source.unsplash.com/320x240/?dog"),
])
def test_a_placeholder_has_one_colour_in_all_sizes_and_others_another(address, same, other):
    colours = [colour_at(placeholder_picture(one), 0, 0) for one in (address, same, other)]
    assert colours[0] == colours[1] != colours[2]


def test_pictures_of_a_page_are_drawn(browser):
    picture = '<img src="https://picsum.photos/id/48/300/200" style="display:block">'
    png = browser.render(f'<html><body style="margin:0">{picture}</body></html>')
    assert colour_at(png, 299, 199) != WHITE
    assert colour_at(png, 301, 199) == WHITE


def test_tall_pages_are_whole_up_to_the_cap(browser):
    pages = [f'<body style="height:{height}px;margin:0">' for height in (2000, 10**9)]
    sizes = [open_picture(browser.picture(page)).size for page in pages]
    assert sizes == [(1280, 2000), (1280, MAX_HEIGHT)]


def test_a_page_has_the_same_pixels_in_any_order_and_in_another_browser(browser, real_pages):
    def digests(renderer, pages):
        return [hashlib.sha256(renderer.picture(page)).hexdigest() for page in pages]

    pages = real_pages[:10]
    first = digests(browser, pages)
    backwards = digests(browser, pages[::-1])
    with Browser() as other:
        elsewhere = digests(other, pages)
    assert first == backwards[::-1] == elsewhere
    assert len(set(first)) == 10


def moving_picture():
    """A GIF that changes its colour all the time, in base64."""
    red, *others = (Image.new("RGB", (30, 30), colour) for colour in ("red", "blue", "green"))
    file = io.BytesIO()
    red.save(file, "GIF", save_all=True, append_images=others, duration=60, loop=0)
    return base64.b64encode(file.getvalue()).decode()


MOVING_SVG = (
    "data:image/svg+xml,%3Csvg xmlns=%27http://www.w3.org/2000/svg%27%3E%3Cstyle%3E%40keyframes k"
    "{to{fill:red}} rect{animation:k .3s infinite}%3C/style%3E%3Crect width=%27900%27"
    " height=%27900%27/%3E%3C/svg%3E")


@pytest.mark.parametrize("moving", [
    f"{LINK}<div class='animate-pulse animate-spin h-96 w-64 bg-red-500'></div>",
    "<svg width=900 height=300><rect width=100 height=300><animate attributeName=x from=0 to=800"
    " dur=1s repeatCount=indefinite /></rect></svg>",
    "<marquee>to the left, to the left</marquee>", "<progress style='width:900px'></progress>",
    "<style>@keyframes k{to{margin-left:900px}} #x{animation:k .3s infinite !important}</style>"
    "<div id=x>x</div>", f"<div style='height:900px;background:url(\"{MOVING_SVG}\")'></div>",
    f"<img width=900 src='data:image/gif;base64,{moving_picture()}'>"])
def test_what_moves_is_drawn_at_rest(browser, moving):
    page = f"<html><body style='font-size:200px'>{moving}</body></html>"
    assert len({browser.render(page) for _ in range(4)}) == 1


def test_a_field_with_autofocus_is_drawn_as_one_without(browser):
    page = ('<html><body><nav style="position:fixed;top:0;width:9in;height:1in;background:red">'
            '</nav><div style="height:2000px"></div><input{}></body></html>')
    assert len({browser.render(page.format(word)) for word in ("", " autofocus") * 3}) == 1


@pytest.mark.parametrize("width", [200, 1500])
@pytest.mark.parametrize("height", [50, 2000])
def test_a_page_from_right_to_left_is_drawn_from_its_right_edge(browser, width, height):
    style = f"width:{width}px;height:{height}px;background:linear-gradient(90deg,blue 9px,red 9px)"
    png = browser.render(f"<html dir=rtl><body style='margin:0'><div style='{style}'></html>")
    assert colour_at(png, 1279, 9) == RED
    assert colour_at(png, 0, 9) == (WHITE if width == 200 else RED)


def test_odd_text_is_rendered(browser):
    odd = ("", "\ud800 half a pair", "<html>\0 zero</html>", "<!doctype html><p>\u2028 \U0001f600")
    for html in odd:
        assert open_picture(browser.render(html)).size == (1280, 800)


# -----------------------------------------------------------------------------
# Hostile pages


ATTACK = "document.body.style.background=`red`"


@pytest.mark.parametrize("body", [
    f"<body><script>{ATTACK}</script></body>", f"<body onload='{ATTACK}'></body>",
    # a frame that has a process of its own
    *[f'<body style="margin:0"><iframe sandbox="allow-scripts" {source}></iframe></body>'
      for source in (f"srcdoc='<body><script>{ATTACK}</script>'",
                     f"src='data:text/html,<body><script>{ATTACK}</script>'")]])
def test_script_never_runs(browser, body):
    assert colour_at(browser.render(f"<html>{body}</html>"), 50, 50) == WHITE


@needs_chromium
def test_the_command_alone_turns_script_off(monkeypatch):
    monkeypatch.setattr("judge.browser.PAGE_SETTINGS", "--blink-settings=imageAnimationPolicy=2")
    with Browser() as browser:
        png = browser.render(f"<html><body><script>{ATTACK}</script></body></html>")
        assert colour_at(png, 50, 50) == WHITE


OWN = "http://page.invalid/own"


@pytest.mark.parametrize("address, kind, fate", [
    (OWN, "Document", "a page"),
    ("data:image/png;base64,", "Image", "continues"),
    ("https://cdn.tailwindcss.com", "Stylesheet", "text/css"),
    ("https://picsum.photos/300", "Image", "image/png"),
    *[(address, kind, fate)
      for address in ("http://example.org/data:,", "https://example.org/?https://picsum.photos/3",
                      "file:///etc/passwd", "http://127.0.0.1/", "blob:http://page.invalid/1",
                      "http://page.invalid/another")
      for kind, fate in (("Image", "BlockedByClient"), ("Document", "Aborted"))],
    ("https://cdn.tailwindcss.com", "Document", "Aborted"),
    ("https://picsum.photos/300", "Document", "Aborted"),
])
def test_a_request_is_answered_from_here_or_fails_unless_it_is_for_data(
        monkeypatch, address, kind, fate):
    monkeypatch.setenv("CHROMIUM", shutil.which("true"))
    browser, sent = Browser(), []
    browser.devtools = types.SimpleNamespace(
        send=lambda method, **parameters: sent.append((method, parameters)))
    browser.address, browser.html = OWN, "a page"
    browser._answer_request("1", address, kind)
    (method, parameters), = sent
    found = {
        "Fetch.continueRequest": lambda: "continues",
        "Fetch.failRequest": lambda: parameters["errorReason"],
        "Fetch.fulfillRequest": lambda: parameters["responseHeaders"][0]["value"],
    }[method]()
    if address == OWN:
        assert base64.b64decode(parameters["body"]) == b"a page"
        browser._answer_request("2", address, kind)  # which a page could repeat for ever
        assert sent[1] == ("Fetch.failRequest", {"requestId": "2", "errorReason": "Aborted"})
    else:
        assert found == fate


@contextlib.contextmanager
def listener():
    """The address of a loopback server, and a list of whoever has connected to it."""
    visits = []

    def note(request, visitor, server):
        visits.append(visitor)

    with socketserver.TCPServer(("127.0.0.1", 0), note) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", visits
        server.shutdown()


HOSTILE = [
    '<img src="{0}/a"><video src="{0}/b"></video><object data="{0}/c"></object><embed src="{0}/d">',
    '<iframe src="{0}/a"></iframe><iframe srcdoc="<img src={0}/b>"></iframe>',
    '<iframe src="data:text/html,<img src={0}/c>"></iframe>'
    '<frameset><frame src="{0}/a"></frameset>',
    '<meta http-equiv="refresh" content="0;url={0}/a">',
    '<link rel=preconnect href="{0}"><link rel=dns-prefetch href="{0}">'
    '<link rel=prefetch href="{0}/a">',
    '<link rel=preload as=image href="{0}/a"><link rel=prerender href="{0}/b">'
    '<link rel=icon href="{0}/c">',
    '<link rel=manifest href="{0}/d"><link rel=modulepreload href="{0}/e">',
    '<style>@import "{0}/a"; body{{background:url({0}/b)}}'
    " @font-face{{font-family:f;src:url({0}/c)}}</style>",
    '<form action="{0}/a"><input type=image src="{0}/b" autofocus></form>'
    '<base href="{0}/"><img src=rel>',
    '<svg><image href="{0}/a"/><use href="{0}/b#c"/></svg><script src="{0}/d"></script>',
    '<script>new WebSocket("{0}".replace("http","ws")); fetch("{0}/f"); location="{0}/g"</script>',
    '<audio src="{0}/h" autoplay></audio><a ping="{0}/p" href="{0}">x</a>'
    '<portal src="{0}"></portal>',
]


def attack(browser, address):
    """Render every hostile page aimed at the address; how many requests the pages tried."""
    tried = []
    answer_request = browser._answer_request

    def counted(request, url, kind):
        if url != browser.address:
            tried.append(url)
        answer_request(request, url, kind)

    browser._answer_request = counted
    for page in HOSTILE:
        attacks = page.format(address)
        browser.picture(f"<html><body>{attacks}<p style='font-family:f'>x</body></html>")
    time.sleep(0.5)
    return len(tried)


@needs_chromium
def test_hostile_pages_reach_neither_loopback_nor_the_outside():
    with listener() as (loopback, visits), Browser() as browser:
        browser.render(PAGE)
        chromium = browser.devtools
        for address in (loopback, loopback.replace("127.0.0.1", "localhost"), "example.org"):
            assert attack(browser, f"http://{address}") > 10
        assert browser.devtools is chromium
    assert visits == []


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("dropped", [("proxy",), ("resolver",), ("proxy", "resolver")])
def test_either_flag_closes_the_network_and_without_both_the_attacks_arrive(monkeypatch, dropped):
    answer_request = Browser._answer_request

    def let_through(browser, request, address, kind):
        if address == browser.address:
            answer_request(browser, request, address, kind)
        else:
            browser.devtools.send("Fetch.continueRequest", requestId=request)

    monkeypatch.setattr(Browser, "_answer_request", let_through)
    monkeypatch.setattr("judge.browser.CHROMIUM_FLAGS", [
        flag for flag in CHROMIUM_FLAGS if not any(word in flag for word in dropped)])
    with listener() as (address, visits), Browser(seconds_per_page=3) as browser:
        attack(browser, f"http://{address}")
    assert bool(visits) == (len(dropped) == 2)


def test_pages_do_not_show_files_of_this_machine(browser, tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(placeholder_picture("https://picsum.photos/1280/800"))
    colour = colour_at(secret.read_bytes(), 0, 0)
    address = f"file://{secret}"
    pages = [
        f'<body style="margin:0"><img src="{address}"><iframe src="{address}"></iframe></body>',
        f'<body style="background:url({address})"><object data="{address}"></object></body>',
        f'<html><meta http-equiv=refresh content="0;{address}"><embed src="{address}"></html>',
    ]
    for page in pages:
        colours = open_picture(browser.render(page)).getcolors(1 << 24)
        assert colour not in {seen for _, seen in colours}


LASTING = [
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'">""",
    """<meta http-equiv="Content-Security&#45;Policy" content="style-src 'none'">""",
    '<meta name="color-scheme" content="dark"><meta name="viewport" content="width=300">',
    '<meta http-equiv="content-language" content="zh"><base href="http://example.org/">',
    '<style title="other">p { color: green }</style>',
    '<style>html { scroll-snap-type: y mandatory } p { scroll-snap-align: start }</style>'
    '<div style="height: 3000px"></div><p>below</p><input autofocus>',
    '<meta http-equiv="refresh" content="0;url=https://picsum.photos/300/200">',  # visits a link
]


@pytest.mark.parametrize("lasting", LASTING)
def test_nothing_of_a_page_is_left_when_the_next_one_is_drawn(browser, lasting):
    picture = '<img src="https://picsum.photos/300/200">'
    picture += '<a href="https://picsum.photos/300/200">a link</a>'
    title = '<style title="main">h1 { position: fixed; top: 300px }</style>'
    page = PAGE.replace("</h1>", f"</h1>{picture}{title}<input autofocus>")
    wanted = browser.render(page)
    browser.render(f"<html><head>{lasting}</head><body>first</body></html>")
    assert browser.render(page) == wanted


@pytest.mark.parametrize("page", [
    '<iframe src="{}"></iframe>', '<meta http-equiv="refresh" content="0;url={}">'])
def test_a_page_puts_no_file_on_the_disk(browser, page):
    browser.render(page.format("data:application/octet-stream,HELLO"))
    browser.render(PAGE)
    found = subprocess.run(["grep", "--recursive", "--line-regexp", "--files-with-matches", "HELLO",
                            browser.devtools.profile], capture_output=True, text=True)
    assert found.stdout == ""


@needs_chromium
@pytest.mark.skipif(sys.platform != "linux", reason="needs xdg-open")
@pytest.mark.parametrize("page", [
    '<meta http-equiv="refresh" content="0;url={}">', '<iframe src="{}"></iframe>',
    '<iframe srcdoc="<meta http-equiv=refresh content=0;url={}>"></iframe>'])
def test_no_address_on_a_page_starts_a_program_of_this_machine(monkeypatch, tmp_path, page):
    for name in ("xdg-settings", "xdg-email", "xdg-open"):
        tmp_path.joinpath(name).write_text(f"#!/bin/sh\ntouch '{tmp_path}/started'\n")
        tmp_path.joinpath(name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Browser() as browser:
        browser.render(f"<html>{page.format('mailto:a@example.org')}</html>")
        time.sleep(1)  # it would start within a fifth of that
    assert not tmp_path.joinpath("started").exists()


def test_a_page_that_leaves_later_does_not_change_the_next_one(browser):
    wanted = browser.render(PAGE)
    refresh = '<meta http-equiv="refresh" content="1;url=about:blank">'
    browser.render(f"<html>{refresh}<body>first</body></html>")
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        assert browser.render(PAGE) == wanted


def billion_rectangles():
    groups = [f'<g id="g{i}">' + f'<use href="#g{i + 1}"/>' * 10 + "</g>" for i in range(9)]
    return f'<svg>{"".join(groups)}<g id="g9"><rect width="1" height="1"/></g></svg>'


def test_bombs_cost_their_own_limit_only(browser):
    boxes = "<div style='display:inline-grid;float:left;columns:3'>" * 30_000
    bombs = [
        f"<html>{boxes}</html>",
        "<html><body>" + "x" * MAX_PAGE_CHARACTERS + "</body></html>",
        billion_rectangles(),
    ]
    for bomb in bombs:
        start = time.monotonic()
        browser.picture(bomb)
        assert time.monotonic() - start < browser.seconds_per_page + 4
        assert colour_at(browser.render(PAGE), 5, 5) == RED_500
