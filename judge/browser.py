"""Draws web pages that a model wrote: one headless Chromium, driven over its DevTools pipe.

    render(html) -> PNG of the full page, or PageError with the reason

`DevTools` starts Chromium and talks to it; `Browser`, on top of it, draws pages that nobody trusts:
  - script is off;
  - no request leaves this machine: Tailwind's style sheet and placeholder pictures are answered
    from here, every other request fails, and below that the network is closed by flags;
  - files stay hidden, as a page comes from an http address and is not opened as a file;
  - a page is a document of its own, of which nothing is left when the next one is drawn;
  - a page has limits of time, size and height, and whatever it does to Chromium ends with it:
    after an error the next page gets a new Chromium.

    we --descriptor 3--> Chromium    commands  {"id", "method", "params", "sessionId"}
    we <--descriptor 4-- Chromium    answers   {"id", "result" or "error"}
                                     events    {"method", "params"}

Every message is JSON, closed by a zero byte. A session names the page that a command is meant for;
a command without one is for Chromium itself.
Protocol: https://chromedevtools.github.io/devtools-protocol
"""

import base64
import contextlib
import gzip
import hashlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

PAGE_WIDTH, VIEW_HEIGHT, MAX_HEIGHT = 1280, 800, 4000  # pixels
MAX_PAGE_CHARACTERS = 500_000
START_SECONDS = 30
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
if sys.platform == "darwin":
    CHROMIUM_NAMES += ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
                       "/Applications/Chromium.app/Contents/MacOS/Chromium")
CHROMIUM_FLAGS = [
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--use-mock-keychain",  # on macOS, it asks for the user's keychain otherwise
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-dev-shm-usage",
    # Documents that were left are not kept, and http addresses stay as they are.
    "--disable-features=BackForwardCache,HttpsUpgrades",
    # Browser answers or fails every request. These close the network for what never becomes a
    # request there (preconnect, DNS prefetch): no host name resolves, and the proxy, for loopback
    # addresses too, is a closed port.
    "--proxy-server=127.0.0.1:1",
    "--proxy-bypass-list=<-loopback>",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]
# Script is off here, too: a frame with `sandbox` has a process of its own, which the command that
# turns script off for a page does not reach. Animated pictures show their first frame.
PAGE_SETTINGS = "--blink-settings=scriptEnabled=false,imageAnimationPolicy=2"
# The shell gives Chromium our pipes as descriptors 3 and 4. It removes the profile in the end, even
# if our process was killed, as Chromium quits when its pipe closes.
CHROMIUM_SHELL = '"$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1; rm -rf "$HOME"'

TAILWIND_FILE = Path(__file__).parent / "tailwind-2.2.19.min.css.gz"
TAILWIND_ADDRESS = re.compile(
    r"https?://(cdn\.tailwindcss\.com|[^/]+/([^?#]*/)?tailwindcss(@(\^|%5E)?|/)[12])"
)
TAILWIND_SCRIPT = re.compile(  # of versions 3 and 4; the lookahead keeps the time linear
    r"(?i)<script(?=[^<>]*(?:cdn\.tailwindcss\.com|@tailwindcss/browser))[^<>]*>[^<]*</script>"
)
TAILWIND_LINK = '<link rel="stylesheet" href="https://cdn.tailwindcss.com">'
PICTURE_HOST = re.compile(
    r"https?://(fastly\.)?(picsum\.photos|source\.unsplash\.com|images\.unsplash\.com)/"
)


class PageError(Exception):
    """A page that could not be rendered; the text is the reason."""


class Crash(PageError):
    """Chromium has ended: through the page, or through a machine without memory for it.

    So the page gets a second attempt.
    """


def find_chromium():
    """The path of Chromium: the environment variable CHROMIUM, else a known name on PATH."""
    names = (os.environ["CHROMIUM"],) if "CHROMIUM" in os.environ else CHROMIUM_NAMES
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise SystemExit(
        f"found no program {' or '.join(names)}, expected Chromium to render pages with; "
        "install it (Debian: `apt-get install chromium`), or set the environment variable CHROMIUM"
        " to its path"
    )


# -----------------------------------------------------------------------------
# Chromium and its DevTools pipe


class DevTools:
    """One headless Chromium and the pipe to it. It ends with `close`, or with this process.

    on_event      is called with each event {"method", "params"}
    session       is the page that commands are for, None for Chromium itself
    set_deadline  has to be called first

    A failure of any kind is a PageError.
    """

    def __init__(self, flags, on_event):
        self.executable = find_chromium()
        self.on_event = on_event
        self.session = None
        self.seconds, self.deadline = None, None
        self._last_id = 0
        self._received = bytearray()

        self.profile = tempfile.mkdtemp(prefix="colbench-chromium-")
        command = [self.executable, *flags, f"--user-data-dir={self.profile}"]
        if os.geteuid() == 0:
            command.append("--no-sandbox")  # Chromium refuses root with its sandbox
        self.process = subprocess.Popen(
            ["sh", "-c", CHROMIUM_SHELL, "sh", *command],
            bufsize=0,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": self.profile},
        )
        os.set_blocking(self.process.stdin.fileno(), False)

    def close(self):
        """End Chromium with all its children and remove its profile."""
        # it may have ended by itself; of a group of zombies, macOS says that it is not permitted
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        # A path in the profile would be too long for a socket, so Chromium puts the socket into a
        # folder of its own in /tmp and links to it.
        socket = Path(self.profile, "SingletonSocket")
        if socket.is_symlink():
            outside = socket.readlink().parent
            with contextlib.suppress(OSError):
                (outside / "SingletonSocket").unlink()
                (outside / "SingletonCookie").unlink()
                outside.rmdir()
        shutil.rmtree(self.profile, ignore_errors=True)

    def set_deadline(self, seconds):
        """All that follows, until the next call of this method, takes at most so many seconds."""
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def open_page(self):
        """Open a blank page. Later commands are for it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]

    def call(self, method, **parameters):
        """The result of a command. Events that arrive before it are handled first."""
        command_id = self.send(method, **parameters)
        message = self.wait()
        while message.get("id") != command_id:
            message = self.wait()
        if "error" in message:
            raise PageError(f"the browser refused {method}: {message['error'].get('message')}")
        return message["result"]

    def send(self, method, **parameters):
        """Send a command and return its id; the answer is not waited for."""
        self._last_id += 1
        command_id = self._last_id
        message = {"id": command_id, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        unsent = memoryview(json.dumps(message).encode() + b"\0")
        while unsent:
            self._wait_until_ready(self.process.stdin, select.POLLOUT)
            try:
                written = os.write(self.process.stdin.fileno(), unsent)
            except OSError as error:
                raise Crash("the browser crashed") from error
            unsent = unsent[written:]
        return command_id

    def wait(self):
        """Wait for one message and return it, after handling it if it is an event."""
        while b"\0" not in self._received:
            self._wait_until_ready(self.process.stdout, select.POLLIN)
            data = os.read(self.process.stdout.fileno(), 1 << 20)
            if not data:
                raise Crash("the browser crashed")
            self._received += data
        text, _, self._received = self._received.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.on_event(message)
        return message

    def _wait_until_ready(self, file, event):
        poll = select.poll()  # unlike select.select, it takes descriptors from 1024 on
        poll.register(file, event)
        while (left := self.deadline - time.monotonic()) > 0:
            looked, patience = time.monotonic(), min(left, 1)
            ready = poll.poll(1000 * patience)
            stopped = time.monotonic() - looked - patience
            if stopped > 1:  # this process had been stopped (Ctrl-Z, docker pause): no slow page
                self.deadline += stopped
            if ready:
                return
        raise PageError(f"the page took more than {self.seconds:g} seconds")


# -----------------------------------------------------------------------------
# Drawing pages that nobody trusts


class Browser:
    """Renders pages to PNG bytes. One Chromium draws many pages; it starts with the first one."""

    def __init__(self, seconds_per_page=6.0, pages_per_start=200):
        find_chromium()  # a missing Chromium is an error now, not at the first page
        self.seconds_per_page = seconds_per_page
        self.pages_per_start = pages_per_start
        self.stylesheet = gzip.decompress(TAILWIND_FILE.read_bytes())
        self.devtools = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def render(self, html):
        """The full page as PNG bytes; PageError says why there is none."""
        if len(html) > MAX_PAGE_CHARACTERS:
            raise PageError(
                f"page of {len(html)} characters, at most {MAX_PAGE_CHARACTERS} are rendered"
            )
        try:
            return self._draw_in_time(html)
        except Crash:
            return self._draw_in_time(html)

    def _draw_in_time(self, html):
        try:
            if self.devtools is None or self.pages_left == 0:
                self._start()
            self.pages_left -= 1
            self.devtools.set_deadline(self.seconds_per_page)
            return self._draw(html)
        except BaseException:  # also Ctrl-C, after which a notebook goes on
            self.close()  # whatever the page did to Chromium ends here
            raise

    def picture(self, html):
        """The PNG of a page, None where it could not be rendered."""
        try:
            return self.render(html)
        except PageError:
            return None

    def close(self):
        """End Chromium; the next page would start another one."""
        if self.devtools:
            self.devtools.close()
            self.devtools = None

    def _start(self):
        self.close()
        self.devtools = devtools = DevTools([*CHROMIUM_FLAGS, PAGE_SETTINGS], self._handle_event)
        devtools.set_deadline(START_SECONDS)
        self.pages_left = self.pages_per_start
        try:
            devtools.open_page()
            devtools.call("Page.enable")
            devtools.call("Fetch.enable")
            devtools.call("Browser.setDownloadBehavior", behavior="deny")
            devtools.call("Emulation.setScriptExecutionDisabled", value=True)
            # `settled_page` stops animations, but not those of a page's own !important
            devtools.call("Animation.enable")
            devtools.call("Animation.setPlaybackRate", playbackRate=0)
            devtools.call("Emulation.setDeviceMetricsOverride", width=PAGE_WIDTH,
                          height=VIEW_HEIGHT, deviceScaleFactor=1, mobile=False)
        except PageError as error:
            raise SystemExit(
                f"found that {devtools.executable} does not start ({error}), expected a"
                " headless Chromium; try `chromium --headless --dump-dom about:blank` in a shell"
            ) from error

    def _draw(self, html):
        devtools = self.devtools
        # Each page is a new document: in one that is written again, a <meta> of the page before
        # would stay in force. No page can guess the address of the next one. All have one host,
        # which is faster.
        self.address = f"http://page.invalid/{secrets.token_hex(8)}"
        self.html = settled_page(html)
        self.arrived = self.loaded = False
        devtools.call("Page.navigate", url=self.address)
        while not self.loaded:
            devtools.wait()
        metrics = devtools.call("Page.getLayoutMetrics")
        height = min(metrics["cssContentSize"]["height"], MAX_HEIGHT)
        part = {}
        if height > VIEW_HEIGHT:  # lower pages that run from right to left would be shifted
            left = metrics["cssLayoutViewport"]["pageX"]  # 0 but where such a page is too wide
            clip = {"x": left, "y": 0, "width": PAGE_WIDTH, "height": height, "scale": 1}
            part = {"clip": clip, "captureBeyondViewport": True}
        screenshot = devtools.call(
            "Page.captureScreenshot", format="png", optimizeForSpeed=True, **part)
        return base64.b64decode(screenshot["data"])

    def _handle_event(self, event):
        method, parameters = event["method"], event.get("params", {})
        if method == "Fetch.requestPaused":
            address = parameters["request"]["url"]
            self._answer_request(parameters["requestId"], address, parameters["resourceType"])
        elif method == "Inspector.targetCrashed":
            raise Crash("the page crashed")
        elif method == "Page.frameNavigated":
            self.arrived = self.arrived or parameters["frame"]["url"] == self.address
        elif method == "Page.loadEventFired":
            self.loaded = self.arrived  # and not that of an earlier page

    def _answer_request(self, request, address, kind):
        """Answer a request from here, or fail it. Only data: addresses pass.

        A page may use pictures and styles but not go to them: links to them would then be drawn as
        visited, in later pages, too.
        """
        is_document = kind == "Document"
        if address == self.address and self.html is not None:
            page, self.html = self.html, None  # a page that asks for its own address gets nothing
            self._fulfil(request, "text/html; charset=utf-8", page.encode())
        elif TAILWIND_ADDRESS.match(address) and not is_document:
            self._fulfil(request, "text/css", self.stylesheet)
        elif PICTURE_HOST.match(address) and not is_document:
            self._fulfil(request, "image/png", placeholder_picture(address))
        elif address.startswith("data:"):
            self.devtools.send("Fetch.continueRequest", requestId=request)
        else:
            # "Aborted" leaves the page as it is; others show Chromium's error page
            reason = "Aborted" if is_document else "BlockedByClient"
            self.devtools.send("Fetch.failRequest", requestId=request, errorReason=reason)

    def _fulfil(self, request, content_type, body):
        fields = {
            "Content-Type": content_type,
            "Cache-Control": "max-age=31536000",
            "Access-Control-Allow-Origin": "*",
            # else a <meta> refresh or a frame has Chromium start a program for mailto: addresses
            "Content-Security-Policy": "sandbox allow-same-origin",
        }
        self.devtools.send(
            "Fetch.fulfillRequest",
            requestId=request,
            responseCode=200,
            responseHeaders=[{"name": name, "value": value} for name, value in fields.items()],
            body=base64.b64encode(body).decode(),
        )


def settled_page(html):
    """The page without animations, with Tailwind's script replaced by its style sheet."""
    html = html.encode(errors="replace").decode()  # half of a surrogate pair cannot be sent
    html = TAILWIND_SCRIPT.sub(TAILWIND_LINK, html)
    html = re.sub(r"(?i)</?(animate\w*|set|marquee)(?![-\w])[^<>]*>", "", html)
    # the height of such a part depends on whether Chromium has come to draw it
    html = re.sub(r"(?i)content-visibility\s*:\s*auto", "content-visibility:visible", html)
    # such a picture may come after the screenshot
    html = re.sub(r"(?i)(?<![-\w])decoding\s*=\s*([\"']?)async\1(?=[\s/>])", "", html)
    # controls change when their video fails to load, before or after the screenshot
    html = re.sub(r"(?i)<(video|audio)(?![-\w])", r"<\1 preload=none ", html)
    # the style below reaches neither pictures in SVG nor frames
    html = re.sub(r"(?i)(@|%40)(-\w+-)?keyframes", r"\1still", html)
    stop = "*,::before,::after{animation:none!important;transition:none!important}"
    stop += "progress:not([value]){appearance:none}"
    # autofocus comes before or after the screenshot, scrolls the page, and its caret blinks
    stop += "html{interactivity:inert!important}"
    return re.sub(r"(?i)^\s*(<!doctype[^>]*>)?", rf"\g<0><style>{stop}</style>", html)


def placeholder_picture(address):
    """A PNG of the size that the address asks for, in one colour made from the rest of it."""
    identity = re.search(r"/id/\d+|/seed/[^/?]+|/photo-[^?]*", address)
    path = address.split("//", 1)[-1]
    if identity:
        path = path.replace(identity.group(), "", 1)
    # Sizes are written /300/200, /300x200, /300 (a square) or ?w=300&h=200.
    size = (re.search(r"/(\d+)(?:[/x](\d+))?", path)
            or re.search(r"[?&]w=(\d+)(?:.*[?&]h=(\d+))?", path))
    width, height = size.groups() if size else ("800", "600")
    width, height = (max(1, min(int(side[:6]), 2000)) for side in (width, height or width))
    # a picture keeps its colour in another size, as a photo would
    picture = path.replace(size.group(), "", 1) if size else path
    if identity:
        picture = identity.group()
    digest = hashlib.sha256(picture.encode()).digest()
    colour = bytes(64 + byte // 2 for byte in digest[:3])

    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits a pixel, into a palette
    pixels = zlib.compress(bytes((width + 1) * height), 9)  # each row has one byte more: its filter
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"PLTE", colour), (b"IDAT", pixels), (b"IEND", b"")):
        png += struct.pack(">I", len(data)) + kind + data
        png += struct.pack(">I", zlib.crc32(kind + data))
    return png
