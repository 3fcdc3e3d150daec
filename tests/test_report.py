"""The report, opened and used in headless Chromium: python -m pytest tests/test_report.py"""

import base64
import fcntl
import json
import os
import re
import shutil
import subprocess
import time
import zlib

import pytest

import evaluate

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = ('</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
           '<a href="javascript:window.hacked = 3">x</a> <!-- <script> {{7*7}} \u2028 ${window.hacked = 4}')


class Browser:
    """Headless Chromium over the DevTools pipe: messages are JSON objects, each closed by a zero byte."""

    def __init__(self, profile):
        (to_browser, self.sending), (self.receiving, from_browser) = os.pipe(), os.pipe()
        # Chromium reads descriptor 3 and writes 4: copies from 10 on, so that neither is overwritten on the way there.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its own sandbox to root
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless", "--disable-gpu", *root, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            preexec_fn=lambda: (os.dup2(ends[0], 3), os.dup2(ends[1], 4)), close_fds=False, stderr=subprocess.DEVNULL)
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self.buffer, self.number, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.sending, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                piece = os.read(self.receiving, 1 << 16)
                assert piece, "Chromium closed the pipe"
                self.buffer += piece
            line, self.buffer = self.buffer.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def run(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, url, width=1280, dark=False):
        self.events = []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")  # else a new fragment of the same address loads nothing
        self.call("Page.navigate", url=url)
        until = time.monotonic() + 20
        while not self.run("location.protocol === 'file:' && document.readyState === 'complete'"):
            assert time.monotonic() < until, "the page did not load"
            time.sleep(0.05)

    def press(self, key):
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))

    def set(self, name, value):
        self.run(f"(() => {{ const field = document.getElementById({json.dumps(name)}); field.value = "
                 f"{json.dumps(value)}; field.dispatchEvent(new Event('input', {{bubbles: true}})); }})()")

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def count(self, selector):
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def complaints(self):
        """Exceptions, log entries (a broken content policy is one) and requests that left the page."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event["method"] in kinds or (
            event["method"] == "Network.requestWillBeSent"
            and not event["params"]["request"]["url"].startswith(("file:", "data:", "about:")))]

    def close(self):
        self.session = None
        self.call("Browser.close")
        self.process.wait(timeout=20)
        os.close(self.sending)
        os.close(self.receiving)


def png():
    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = (4).to_bytes(4, "big") + (3).to_bytes(4, "big") + b"\x08\x02\0\0\0"
    pixels = zlib.compress((b"\0" + b"\x40\x80\xc0" * 4) * 3)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


def episode(task, sample, passed=True, text="Round the result?", **more):
    name = f"task{task}"
    row = {
        "task": {"task_id": name, "domain": "backend", "problem_description": f"Write function number {task}",
                 "ground_truth": "def f(x):\n    return x", "test_cases": {"test1": "f(1)", "test2": "f(2)"}},
        "sample": sample, "answer": "def f(x):\n    return x", "reward": 1.0 if passed else 0.5, "success": passed,
        "turns": 2, "reasons": {"test1": "passed", "test2": "passed" if passed else "timed out"}, "leak": 0.0,
        "dialogue_history": [{"role": "user", "content": f"Write function number {task}"},
                             {"role": "assistant", "content": text}, {"role": "user", "content": "Yes, to two digits."},
                             {"role": "assistant", "content": "I WANT TO ANSWER: def f"}],
    }
    return row | more


def write_report(folder, metrics=(), **policies):
    """The path of a report over `policies`, name -> rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in policies.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(folder / f"{name}.jsonl") for name in policies]
    evaluate.main(evaluate.parse_args(["--episodes", *files, "--output", str(folder), "--draws", "200", "--report",
                                       str(folder / "report.html"), *(["--metrics", *metrics] if metrics else [])]))
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("Chromium is not installed, so the report cannot be opened")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    metrics = folder / "metrics.jsonl"
    steps = [{"step": i, "train/loss": 1 / (i + 1), "time/step": 1} for i in range(9)]
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    ours = [episode(task, 0, passed=task % 2 == 0, advantages=[0.2, -0.1], credits=["useful", "wasted"])
            for task in range(6)]
    ours[5] |= {"screenshot": png(), "reference_screenshot": png(), "leak": 0.9}
    theirs = [episode(task, 0, passed=False, text="Needle in the hay?" if task == 3 else "Why?") for task in range(6)]
    theirs[4] |= {"error": "server gone", "reward": None, "success": None}
    return write_report(folder, [f"critic={metrics}"], ours=ours, theirs=theirs)


def test_report_opens_with_tables_charts_and_all_episodes_and_no_complaint(browser, report):
    browser.open(report.as_uri())
    assert browser.text("#count") == "12 of 12" and browser.count(".row") == 12
    assert "Success %" in browser.text("table") and browser.count("#charts svg") == 3
    assert browser.complaints() == []


def test_filters_by_outcome_policy_and_text_narrow_the_list(browser, report):
    browser.open(report.as_uri())
    for name, value, expected in (("outcome", "solved", 3), ("outcome", "error", 1), ("outcome", "leaking", 1),
                                  ("policy", "theirs", 6), ("search", "NEEDLE", 1), ("search", "no such text", 0)):
        browser.set(name, value)
        assert (name, value, browser.count(".row")) == (name, value, expected)
        browser.set(name, "")
    browser.set("order", "low")
    assert "reward 0.50" in browser.text(".row")


def test_clicking_a_row_shows_dialogue_tests_shading_and_reference(browser, report):
    browser.open(report.as_uri())
    browser.set("policy", "ours")
    browser.run("document.querySelectorAll('.row')[1].click()")
    shown = browser.text("#episode")
    for part in ("task1 · sample 0", "unsolved", "advantage -0.100", "true credit: useful", "1 of 2 passed",
                 "f(2) – timed out", "Yes, to two digits.", "Reference", "Answer"):
        assert part in re.sub(r"\s+", " ", shown)
    turns = "[...document.querySelectorAll('.assistant')]"
    shades = browser.run(f"{turns}.map(turn => getComputedStyle(turn).backgroundColor)")
    assert len(set(shades)) == 2 and browser.complaints() == []


def test_outcomes_differ_in_sign_and_colour(browser, report):
    browser.open(report.as_uri())
    marks = browser.run("[...document.querySelectorAll('.row b')].map(b => [b.textContent, getComputedStyle(b).color])")
    colours = dict(marks)
    assert set(colours) == {"✓", "✗", "!"} and colours["✓"] != colours["✗"]


def test_screenshots_stand_side_by_side_and_load(browser, report):
    browser.open(report.as_uri() + "#episode=ours%2Ftask5%2F0")
    images = "[...document.querySelectorAll('.pages img')]"
    browser.run(f"Promise.all({images}.map(image => image.decode())).then(() => 0)")
    assert browser.run(f"{images}.map(image => image.naturalWidth)") == [4, 4]
    assert browser.run(f"{images}[0].getBoundingClientRect().top === {images}[1].getBoundingClientRect().top")


def test_address_names_the_episode_and_opens_it_again(browser, report):
    browser.open(report.as_uri())
    browser.run("document.querySelectorAll('.row')[3].click()")
    address, title = browser.run("location.href"), browser.text("#episode")
    assert "#episode=" in address
    browser.open(address)
    assert browser.text("#episode") == title


def test_keys_move_search_and_never_steal_typing(browser, report):
    browser.open(report.as_uri())
    selected = "[...document.querySelectorAll('.row')].findIndex(row => row.ariaSelected === 'true')"
    for key, expected in (("j", 1), ("j", 2), ("k", 1), ("ArrowDown", 1)):
        browser.press(key)
        assert (key, browser.run(selected)) == (key, expected)
    browser.run("document.getElementById('list').focus()")
    browser.press("ArrowDown")
    assert browser.run(selected) == 2
    browser.press("/")
    assert browser.run("document.activeElement.id") == "search"
    browser.press("j")
    assert browser.run("document.activeElement.value") == "j" and browser.run(selected) == -1  # no episode has a j
    browser.press("Escape")
    assert browser.run("document.activeElement.id") == ""


def test_hostile_text_shows_as_text_and_runs_nothing(browser, tmp_path):
    rows = [episode(task, 0, text=HOSTILE, answer=HOSTILE, credits=[HOSTILE], reasons={HOSTILE: HOSTILE})
            for task in (0, 1)]
    rows[0]["task"] |= {"problem_description": HOSTILE, "ground_truth": HOSTILE, "task_id": HOSTILE}
    rows[0]["dialogue_history"][1]["output"] = HOSTILE + " thought"
    rows[0]["screenshot"] = 'x" onerror="window.hacked = 5'
    rows[1] |= {"error": HOSTILE, "reward": None, "success": None}
    rows[1]["task"]["task_id"] = "__proto__"
    report = write_report(tmp_path / "<b onclick=alert(1)>", **{"<img src=x onerror=alert(1)>": rows})
    browser.open(report.as_uri())
    browser.run("document.querySelectorAll('.row')[1].click(); document.querySelectorAll('.row')[0].click()")
    time.sleep(0.2)
    assert browser.run("window.hacked") is None and browser.count("script") == 2
    assert browser.count("a, iframe, [onerror], [onclick]") == 0 and browser.count("img") == 1
    shown = browser.run("document.getElementById('episode').textContent")
    assert shown.count(HOSTILE) >= 6 and "<img src=x onerror=alert(1)>" in browser.text("thead")
    requests = [event for event in browser.complaints() if event["method"] != "Log.entryAdded"]
    assert requests == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_page_fits_its_width_and_text_contrasts(browser, report, width, dark):
    browser.open(report.as_uri(), width, dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    ink, page = (list(map(int, re.findall(r"\d+", browser.run(f"getComputedStyle(document.body).{name}"))))[:3]
                 for name in ("color", "backgroundColor"))
    assert abs(sum(ink) - sum(page)) > 500 and (sum(page) < 200) == dark


def test_thousand_episodes_open_quickly_below_20_megabytes(browser, tmp_path):
    rows = [episode(task, sample, text="word " * 700, advantages=[0.1, 0.2])
            for task in range(250) for sample in range(4)]
    report = write_report(tmp_path, many=rows)
    assert report.stat().st_size < 20_000_000
    began = time.monotonic()
    browser.open(report.as_uri())
    assert browser.text("#count") == "1000 of 1000" and browser.count(".row") <= 120
    browser.set("search", "number 249")
    assert browser.text("#count") == "4 of 1000" and time.monotonic() - began < 10


def test_too_much_leaves_out_screenshots_first_then_episodes():
    tasks = [episode(task, 0, screenshot="A" * 5000) | {"error": None} for task in range(10)]
    size = len(evaluate.as_json(evaluate.browser_data({"p": [tasks]}, 0.5)))
    tight = evaluate.browser_data({"p": [tasks]}, 0.5, room=size - 20_000)
    tiny = evaluate.browser_data({"p": [tasks]}, 0.5, room=4000)
    assert tight["left_out"]["episodes"] == 0 < tight["left_out"]["screenshots"] < 10
    assert 0 < tiny["left_out"]["episodes"] < 10 and len(evaluate.as_json(tiny)) < 4200


def test_page_is_one_file_with_a_policy_that_allows_nothing_else(report):
    page = report.read_text()
    assert "default-src 'none'" in page and "unsafe" not in page
    assert not re.findall(r"(?:src|href)=[\"']?(?:http|//)", page) and "innerHTML" not in page
