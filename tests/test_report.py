"""The report, opened and used in headless Chromium: python -m pytest tests/test_report.py"""

import base64
import json
import re
import time
import zlib

import pytest

import evaluate
from judge.browser import DevTools, find_chromium

HOSTILE = (
    '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
    '<a href="javascript:window.hacked = 3">x</a> <!-- <script> {{7*7}} \u2028 '
    "${window.hacked = 4}"
)


class Reader:
    """Opens reports as a person does, and looks at what is drawn."""

    def __init__(self):
        self.devtools = DevTools()
        self.devtools.set_deadline(30)
        self.devtools.open_page()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.devtools.call(f"{domain}.enable")

    def run(self, expression):
        """The value of a JavaScript expression, awaited where it is a promise."""
        answer = self.devtools.call("Runtime.evaluate", expression=expression, returnByValue=True,
                                    awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, url, width=1280, dark=False):
        call = self.devtools.call
        self.devtools.set_deadline(60)
        self.devtools.events.clear()
        call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
             mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        call("Emulation.setEmulatedMedia", features=[scheme])
        # From a blank page, as a new fragment of the same address would load nothing.
        call("Page.navigate", url="about:blank")
        call("Page.navigate", url=url)
        until = time.monotonic() + 20
        loaded = "location.protocol === 'file:' && document.readyState === 'complete'"
        while not self.run(loaded):
            assert time.monotonic() < until, "the page did not load"
            time.sleep(0.05)

    def press(self, key):
        text = {"text": key} if len(key) == 1 else {}
        self.devtools.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.devtools.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def set(self, name, value):
        """Fill in a field and tell the page, as the browser does after typing."""
        field = f"document.getElementById({json.dumps(name)})"
        self.run(f"{field}.value = {json.dumps(value)};"
                 f"{field}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def each(self, selector, expression):
        """The value of a JavaScript expression in `e` for each element of the selector."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.run(f"{elements}.map(e => {expression})")

    def count(self, selector):
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def complaints(self):
        """Exceptions, log entries (a violated content policy is one), requests leaving the page."""
        found = []
        for event in self.devtools.events:
            if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(event)
            if event["method"] == "Network.requestWillBeSent":
                url = event["params"]["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")):
                    found.append(event)
        return found

    def close(self):
        self.devtools.close()


def png():
    """A picture of 4 x 3 pixels in base64."""
    def chunk(kind, data):
        checksum = zlib.crc32(kind + data)
        return len(data).to_bytes(4, "big") + kind + data + checksum.to_bytes(4, "big")

    header = (4).to_bytes(4, "big") + (3).to_bytes(4, "big") + b"\x08\x02\0\0\0"
    pixels = zlib.compress((b"\0" + b"\x40\x80\xc0" * 4) * 3)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


def episode(task, sample, passed=True, text="Round the result?", **more):
    solution, request = "def f(x):\n    return x", f"Write function number {task}"
    row = {
        "task": {
            "task_id": f"task{task}", "domain": "backend", "problem_description": request,
            "ground_truth": solution, "test_cases": {"test1": "f(1)", "test2": "f(2)"},
        },
        "sample": sample, "answer": solution, "reward": 1.0 if passed else 0.5, "success": passed,
        "turns": 2, "leak": 0.0,
        "reasons": {"test1": "passed", "test2": "passed" if passed else "timed out"},
        "dialogue_history": [
            {"role": "user", "content": request},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Yes, to two digits."},
            {"role": "assistant", "content": "I WANT TO ANSWER: def f"},
        ],
    }
    return row | more


def write_report(folder, *flags, **policies):
    """The path of a report over `policies`, name -> rows."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, rows in policies.items():
        files.append(str(folder / f"{name}.jsonl"))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = folder / "report.html"
    output = ["--output", str(folder), "--report", str(report), "--draws", "200"]
    evaluate.main(evaluate.parse_args(["--episodes", *files, *output, *flags]))
    return report


@pytest.fixture(scope="module")
def browser():
    try:
        find_chromium()
    except SystemExit as error:
        pytest.skip(f"the report cannot be opened: {error}")
    reader = Reader()
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    metrics = folder / "metrics.jsonl"
    steps = [{"step": i, "train/loss": 1 / (i + 1), "time/step": 1} for i in range(9)]
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    scores = {"advantages": [0.2, -0.1], "credits": ["useful", "wasted"]}
    ours = [episode(task, 0, passed=task % 2 == 0, **scores) for task in range(6)]
    ours[5] |= {"screenshot": png(), "solution_screenshot": png(), "leak": 0.9}
    texts = ["Why?", "Why?", "Why?", "Needle in the hay?", "Why?", "Why?"]
    theirs = [episode(task, 0, passed=False, text=text) for task, text in enumerate(texts)]
    theirs[4] |= {"error": "server gone", "reward": None, "success": None}
    return write_report(folder, "--metrics", f"critic={metrics}", ours=ours, theirs=theirs)


def test_report_opens_with_tables_charts_and_all_episodes_and_no_complaint(browser, report):
    browser.open(report.as_uri())
    assert browser.text("#count") == "12 of 12" and browser.count(".row") == 12
    assert "Success %" in browser.text("table") and browser.count("#charts svg") == 3
    assert browser.complaints() == []


def test_table_shows_the_numbers_of_the_markdown_table(browser, report):
    browser.open(report.as_uri())
    drawn = browser.each("tbody tr", "[...e.cells].map(cell => cell.innerText.trim())")
    lines = report.with_name("results.md").read_text().splitlines()[2:]
    assert drawn == [line.strip("| ").split(" | ") for line in lines]
    assert "backend · 6 tasks · 95 % bootstrap intervals over tasks, 200 draws" in (
        browser.text("#subtitle"))


def test_comparisons_have_a_table_of_their_own(browser, tmp_path):
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text(json.dumps(episode(0, 0, passed=False)) + "\n")
    report = write_report(tmp_path, "--against", str(theirs), ours=[episode(0, 0)])
    browser.open(report.as_uri())
    assert browser.each("#tables h2", "e.innerText") == ["Compared on the same tasks"]
    rows = browser.each("#tables table:last-of-type tbody tr", "e.innerText")
    assert [row for row in rows if "ours − theirs" in row and "1 / 0 / 0" in row]


def test_bars_are_as_long_as_their_numbers_inside_their_whiskers(browser, report):
    browser.open(report.as_uri())
    chart = "figure:nth-of-type(1)"
    assert browser.text(f"{chart} figcaption") == "Success %, with 95 % intervals"
    widths = browser.each(f"{chart} rect", "e.width.baseVal.value")
    labels = browser.each(f"{chart} text", "e.textContent")
    assert labels == ["ours", "50.0", "theirs", "0.0"] and widths[0] > widths[1] == 0
    ends = browser.each(f"{chart} .whisker", "[...e.points].map(point => point.x)")[0]
    assert ends[0] < 8 + widths[0] < ends[1]
    results = json.loads(report.with_name("results.json").read_text())
    number = results["policies"]["ours"]["numbers"]["success"]
    scale = widths[0] / number["value"]
    assert ends == pytest.approx([8 + scale * number["low"], 8 + scale * number["high"]], abs=0.1)


def test_lines_have_a_legend_an_axis_and_a_point_for_each_value(browser, report):
    browser.open(report.as_uri())
    turns, loss = "figure:nth-of-type(2)", "figure:nth-of-type(3)"
    titles = browser.each("figcaption", "e.innerText")
    assert titles[1:] == ["Turns per episode, % of episodes", "train/loss"]
    assert browser.each(f"{turns} .legend span", "e.innerText") == ["ours", "theirs"]
    assert browser.each(f"{turns} .axis", "e.textContent") == ["turns"]
    assert browser.each(f"{turns} .line", "e.points.length") == [2, 2]  # 0 % one turn, 100 % two
    assert browser.each(f"{loss} .legend span", "e.innerText") == ["critic"]
    assert browser.each(f"{loss} .axis", "e.textContent") == ["step"]
    (heights,) = browser.each(f"{loss} .line", "[...e.points].map(point => -point.y)")
    assert len(heights) == 9 and heights == sorted(heights, reverse=True)
    colours = browser.each(f"{turns} .line, {loss} .line", "getComputedStyle(e).stroke")
    assert len(set(colours)) == 3


def test_best_of_n_curve_comes_from_policies_that_name_their_candidates(browser, tmp_path):
    policies = {"plain": [episode(0, 0)]}
    for n in (4, 1, 2):
        policies[f"p{n}"] = [episode(0, 0, passed=n > 1, best_of_n=n, scorer="critic")]
    browser.open(write_report(tmp_path, **policies).as_uri())
    chart = "figure:nth-of-type(3)"
    assert browser.text(f"{chart} figcaption") == "Success % by number of candidates"
    assert browser.each(f"{chart} .legend span", "e.innerText") == ["critic"]
    (curve, *whiskers) = browser.each(f"{chart} .line", "[...e.points].map(p => [p.x, p.y])")
    assert len(curve) == len(whiskers) == 3
    (first, low), (second, high), (third, also_high) = curve
    assert second - first == pytest.approx(third - second) and second > first  # 1, 2, 4
    assert low > high == also_high  # from the top of the drawing: best of 1 solved nothing
    labels = f"{chart} text[text-anchor=middle]"
    places = dict(browser.each(labels, "[e.textContent, e.x.baseVal[0].value]"))
    assert [places["1"], places["2"], places["4"]] == pytest.approx([first, second, third])
    assert browser.complaints() == []


def test_frontend_report_draws_the_reward_as_there_is_no_success(browser, tmp_path):
    rows = []
    for task in range(3):
        row = episode(task, 0, reward=0.25, success=None, reasons={})
        row["task"] = row["task"] | {"domain": "frontend", "ground_truth": "<html>x</html>"}
        rows.append(row)
    browser.open(write_report(tmp_path, ours=rows).as_uri())
    assert browser.text("figcaption") == "Similarity × 100, with 95 % intervals"
    assert browser.each("figure:nth-of-type(1) text", "e.textContent") == ["ours", "25.0"]
    titles = browser.each(".pages figcaption", "e.innerText")
    assert titles == ["Agent's page", "Solution page"]
    assert "·" in browser.text(".row b") and browser.complaints() == []


def test_filters_by_outcome_policy_and_text_narrow_the_list(browser, report):
    browser.open(report.as_uri())
    for name, value, expected in (
        ("outcome", "solved", 3), ("outcome", "error", 1), ("outcome", "leaking", 1),
        ("policy", "theirs", 6), ("search", "NEEDLE", 1), ("search", "no such text", 0),
    ):
        browser.set(name, value)
        assert (name, value, browser.count(".row")) == (name, value, expected)
        browser.set(name, "")
    browser.set("order", "low")
    assert "reward 0.50" in browser.text(".row")


def test_clicking_a_row_shows_dialogue_tests_shading_and_solution(browser, report):
    browser.open(report.as_uri())
    browser.set("policy", "ours")
    browser.run("document.querySelectorAll('.row')[1].click()")
    shown = re.sub(r"\s+", " ", browser.text("#episode"))
    for part in ("task1 · sample 0", "unsolved", "advantage -0.100", "true credit: useful",
                 "1 of 2 passed", "f(2) – timed out", "Yes, to two digits.", "Solution", "Answer"):
        assert part in shown
    shades = browser.each(".assistant", "getComputedStyle(e).backgroundColor")
    assert len(set(shades)) == 2 and browser.complaints() == []


def test_outcomes_differ_in_sign_and_colour(browser, report):
    browser.open(report.as_uri())
    colours = dict(browser.each(".row b", "[e.textContent, getComputedStyle(e).color]"))
    assert set(colours) == {"✓", "✗", "!"} and colours["✓"] != colours["✗"]


def test_screenshots_stand_side_by_side_and_load(browser, report):
    browser.open(report.as_uri() + "#episode=ours%2Ftask5%2F0")
    browser.run("Promise.all([...document.images].map(image => image.decode())).then(() => 0)")
    assert browser.each(".pages img", "e.naturalWidth") == [4, 4]
    left, right = browser.each(".pages img", "e.getBoundingClientRect().top")
    assert left == right


def test_address_names_the_episode_and_opens_it_again(browser, report):
    browser.open(report.as_uri())
    browser.run("document.querySelectorAll('.row')[3].click()")
    address, title = browser.run("location.href"), browser.text("#episode")
    assert "#episode=" in address
    browser.open(address)
    assert browser.text("#episode") == title


def test_keys_move_search_and_never_steal_typing(browser, report):
    browser.open(report.as_uri())
    rows = "[...document.querySelectorAll('.row')]"
    selected = f"{rows}.findIndex(row => row.ariaSelected === 'true')"
    for key, expected in (("j", 1), ("j", 2), ("k", 1), ("ArrowDown", 1)):
        browser.press(key)
        assert (key, browser.run(selected)) == (key, expected)
    browser.run("document.getElementById('list').focus()")
    browser.press("ArrowDown")
    assert browser.run(selected) == 2
    browser.press("/")
    assert browser.run("document.activeElement.id") == "search"
    browser.press("j")
    assert browser.run("document.activeElement.value") == "j"
    assert browser.run(selected) == -1  # no episode has a j
    browser.press("Escape")
    assert browser.run("document.activeElement.id") == ""


def test_hostile_text_shows_as_text_and_runs_nothing(browser, tmp_path):
    hostile = {"text": HOSTILE, "answer": HOSTILE, "credits": [HOSTILE]}
    rows = [episode(task, 0, reasons={HOSTILE: HOSTILE}, **hostile) for task in (0, 1)]
    rows[0]["task"] |= {
        "problem_description": HOSTILE, "ground_truth": HOSTILE, "task_id": HOSTILE
    }
    rows[0]["dialogue_history"][1]["output"] = HOSTILE + " thought"
    rows[0]["screenshot"] = 'x" onerror="window.hacked = 5'
    rows[1] |= {"error": HOSTILE, "reward": None, "success": None}
    rows[1]["task"]["task_id"] = "__proto__"
    name = "<img src=x onerror=alert(1)>"
    report = write_report(tmp_path / "<b onclick=alert(1)>", **{name: rows})
    browser.open(report.as_uri())
    rows = "document.querySelectorAll('.row')"
    browser.run(f"{rows}[1].click(); {rows}[0].click()")
    time.sleep(0.2)  # for handlers that must not run
    assert browser.run("window.hacked") is None and browser.count("script") == 2
    assert browser.count("a, iframe, [onerror], [onclick]") == 0 and browser.count("img") == 1
    shown = browser.run("document.getElementById('episode').textContent")
    assert shown.count(HOSTILE) >= 6
    assert name in browser.text("thead") and name in browser.text("#charts")
    requests = [event for event in browser.complaints() if event["method"] != "Log.entryAdded"]
    assert requests == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_its_width_and_text_contrasts(browser, report, width, dark):
    browser.open(report.as_uri(), width, dark)
    assert browser.run("document.documentElement.scrollWidth") <= width

    def brightness(name):
        colour = browser.run(f"getComputedStyle(document.body).{name}")
        return sum(int(number) for number in re.findall(r"\d+", colour)[:3])

    ink, page = brightness("color"), brightness("backgroundColor")
    assert abs(ink - page) > 500 and (page < 200) == dark


def test_thousand_episodes_open_quickly_below_20_megabytes(browser, tmp_path):
    text, advantages = "word " * 700, [0.1, 0.2]
    rows = [episode(task, sample, text=text, advantages=advantages)
            for task in range(250) for sample in range(4)]
    report = write_report(tmp_path, many=rows)
    assert report.stat().st_size < 20_000_000
    start = time.monotonic()
    browser.open(report.as_uri())
    assert browser.text("#count") == "1000 of 1000" and browser.count(".row") <= 120
    browser.set("search", "number 249")
    assert browser.text("#count") == "4 of 1000" and time.monotonic() - start < 10


def test_too_much_omits_screenshots_first_then_episodes():
    run = [episode(task, 0, screenshot="A" * 5000, error=None) for task in range(10)]
    policies = {"p": [run]}
    size = len(evaluate.as_json(evaluate.browser_data(policies, 0.5)))
    tight = evaluate.browser_data(policies, 0.5, room=size - 20_000)
    tiny = evaluate.browser_data(policies, 0.5, room=4000)
    assert tight["omitted"]["episodes"] == 0 < tight["omitted"]["screenshots"] < 10
    assert 0 < tiny["omitted"]["episodes"] < 10 and len(evaluate.as_json(tiny)) < 4200


def test_page_is_one_file_with_a_policy_that_allows_nothing_else(report):
    page = report.read_text()
    assert "default-src 'none'" in page and "unsafe" not in page
    assert not re.findall(r"(?:src|href)=[\"']?(?:http|//)", page) and "innerHTML" not in page


def test_page_without_data_opens_and_says_so(browser):
    browser.open(evaluate.PAGE.as_uri())
    assert "JavaScript" in browser.text("#subtitle") and browser.complaints() == []
