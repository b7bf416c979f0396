"""The page at /: what it may do, and in a real browser what it does.

The browser is a Chromium that is installed, driven by Playwright (`pip install 'minispec[browser]'`); axe-core, which
looks for what a screen reader or a keyboard would stumble over, is taken from the folder in AXE_CORE. Without them the
tests that need them are skipped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_server import Running, options, ready, tiny  # noqa: F401  the fixture

from minispec.config import Config
from minispec.serve.page import page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core")) / "axe.min.js"


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Running]:  # noqa: F811
    running = ready(Running(Config(**options(tiny, api_key="the-key"))))
    yield running
    running.stop()


# ---- without a browser -----------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """The elements of a page, with their attributes and what script and style hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.held: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Note that what follows is outside."""
        self.found.append(("/" + tag, {}))

    def handle_data(self, data: str) -> None:
        """Note what an element holds."""
        name = self.found[-1][0] if self.found else ""
        self.held[name] = self.held.get(name, "") + data


def test_the_policy_admits_the_pages_own_script_and_style_and_nothing_else(served: Running) -> None:
    status, text, headers = served.call("/")
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert status == 200 and headers.get_content_type() == "text/html" and text == page()[0]
    elements = Elements(text)
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.held[tag].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'" and sum(name == tag for name, _ in elements.found) == 1
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["img-src"] == "data:" and len(policy) == 8


def test_the_page_asks_for_nothing_outside_itself_and_makes_no_markup_of_text() -> None:
    text, _ = page()
    elements = Elements(text)
    for tag, attributes in elements.found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
        for name in ("src", "href", "action", "srcset"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|import\("
    assert not re.search(markup, elements.held["script"])
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}, "a namespace is no request"
    assert not re.search(r"@import|url\(", elements.held["style"])
    labelled = {attributes["for"] for tag, attributes in elements.found if tag == "label" and "for" in attributes}
    assert labelled == {"prompt"} and ("html", {"lang": "en"}) in elements.found


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'minispec[browser]'")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Visit:
    """The page in a window of its own, with what its console said and what it asked for."""

    def __init__(self, browser: Any, served: Running, width: int, scheme: str) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.origin = f"http://127.0.0.1:{served.port}"
        self.page.goto(self.origin + "/")

    def give_key(self) -> None:
        """Type the key where the page asks for it."""
        self.page.fill("#key", "the-key")
        self.page.press("#key", "Enter")
        self.page.wait_for_selector("#state.ready")

    def ask(self, text: str, tokens: int = 60) -> None:
        """Send a prompt by keyboard, and wait for the end of the answer."""
        self.page.evaluate("count => document.getElementById('max_new_tokens').value = count", tokens)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.page.wait_for_selector("#send", state="hidden")
        self.page.wait_for_selector("#send", state="visible")

    def end(self) -> None:
        """Close the window; nothing may have been said on the console, nothing asked of another host."""
        self.context.close()
        unwanted = [line for line in self.said if "401" not in line]  # that a key is wanted, the browser logs
        assert not unwanted and len(self.asked) > 3
        assert all(url.startswith((self.origin + "/", "data:")) for url in self.asked), self.asked


def faults(visit: Visit) -> list[Any]:
    """Return what axe-core finds on a page that is serious or worse; nothing where it is not installed."""
    if not AXE.is_file():
        return []
    visit.page.evaluate(AXE.read_text("utf-8"))
    found = visit.page.evaluate("axe.run()")["violations"]
    return [(v["id"], [node["html"] for node in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")]


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")])
def test_a_prompt_gets_coloured_tokens_and_a_tree_and_is_compared(
    browser: Any, served: Running, width: int, scheme: str
) -> None:
    visit = Visit(browser, served, width, scheme)
    visit.give_key()
    page = visit.page
    assert not faults(visit) and page.is_visible("#empty")
    page.check("#compare")
    visit.ask("Once upon a time")
    answer = page.locator(".answer").first
    drafted, written = answer.locator(".t.d1").count(), answer.locator(".t:not(.d1):not(.d2):not(.d3):not(.d4)").count()
    assert drafted > 3 and written > 1 and answer.locator(".t.d4").count() > 1
    assert "😀" in answer.inner_text() and "60 tokens" in answer.inner_text()
    tree = page.locator("#tree svg")
    assert "accepted" in tree.get_attribute("aria-label") and tree.locator("g.root").count() == 1
    page.locator(".t.d2[data-step]").first.click()
    accepted = tree.locator("g.yes").count()
    assert accepted >= 2 and tree.locator("path.edge.yes").count() >= accepted and page.locator(".t.here").count() > 2
    assert float(page.inner_text("#length")) > 1 and page.is_visible("#bars")
    count = page.inner_text("#title").rpartition(" ")[2]
    page.focus("#slider")
    for key, step in (("Home", "1"), ("ArrowRight", "2"), ("End", count)):
        page.keyboard.press(key)
        assert page.inner_text("#title") == f"Step {step} of {count}"
    assert page.locator(".answer").count() == 2 and "The same 60 tokens" in page.inner_text(".verdict"), "in float32"
    assert page.locator(".answer.alone .t.d1").count() == 0, "without speculation nothing was drafted"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    assert not faults(visit)
    visit.end()


@pytest.mark.browser
def test_where_two_answers_part_the_page_says_by_what_margin(browser: Any, served: Running) -> None:
    """In float32 they never do, so the second answer is changed on its way: its last but one token is another."""
    visit = Visit(browser, served, 1280, "light")
    visit.give_key()
    changed: list[Any] = []

    def change(route: Any) -> None:
        answer = route.fetch()
        body = answer.text()
        if route.request.post_data_json.get("sampling_params", {}).get("speculative") is False:
            events = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: {")]
            event = events[-1]
            at = len(event["output_ids"]) - 2
            (step,) = (s for e in events for s in e["trace"]["steps"] if s["at"] <= at < s["at"] + len(s["emitted"]))
            event["output_ids"][at] += 1
            changed.append((at, step["margins"][at - step["at"]], step["emitted_texts"][at - step["at"]]))
            body = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
        route.fulfill(response=answer, body=body)

    visit.page.route("**/generate", change)
    visit.page.check("#compare")
    visit.ask("Once upon", 12)
    ((at, margin, text),) = changed
    said = visit.page.inner_text(".verdict")
    assert f"part at token {at + 1}:" in said and said.count("ahead by") == 2, said
    assert f"{text.strip() or text}”, ahead by {margin:g} without" in said and margin > 0
    assert visit.page.locator(".t.part").count() == 2 and visit.page.locator(".t.here").count() > 0
    visit.end()


@pytest.mark.browser
def test_a_second_turn_has_the_first_in_its_prompt_and_stop_ends_an_answer(browser: Any, served: Running) -> None:
    visit = Visit(browser, served, 1280, "light")
    visit.give_key()
    bodies: list[dict[str, Any]] = []
    visit.page.on("request", lambda r: bodies.append(r.post_data_json) if r.url.endswith("/tokenize") else None)
    visit.ask("Once upon", 5)
    visit.ask("a time", 5)
    assert [m["role"] for m in bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert bodies[1]["messages"][1]["content"] and visit.page.locator("#turns > li:not(#empty)").count() == 2
    visit.page.evaluate("document.getElementById('max_new_tokens').value = 800")
    visit.page.fill("#prompt", "there was")
    visit.page.click("#send")
    visit.page.wait_for_selector("#stop", state="visible")
    visit.page.locator("#turns > li:last-child .t").nth(3).wait_for()
    visit.page.click("#stop")
    visit.page.wait_for_selector("#send", state="visible")
    count = visit.page.locator("#turns > li").last.locator(".t").count()
    assert 3 < count < 700 and not visit.page.locator(".failed").count()
    visit.end()
    headers = {"Authorization": "Bearer the-key"}
    assert served.call("/server_info", None, None, headers)[1]["internal_states"][0]["num_running_reqs"] == 0


HOSTILE = """# <img src=x onerror=alert(1)>
<script>alert(2)</script> **bold <b>not** [click](javascript:alert(3)) [data](data:text/html,<script>alert(4)</script>)
[fine](https://example.com/a"onmouseover="alert) `<svg onload=alert(6)>` ![x](https://evil.example/x.png)
- <iframe src=//evil.example></iframe>
  1. *a* nested
> "><style>*{display:none}</style>

```html"><script>alert(7)</script>
</code></pre><script>alert(8)</script>
```
&lt;script&gt; <a href="javascript:alert(9)">x</a> ****** [[[[[[ ```` `` * a * \\<b\\>
```
unclosed <b>"""


@pytest.mark.browser
def test_hostile_markdown_stays_text(browser: Any, served: Running) -> None:
    visit = Visit(browser, served, 1280, "light")
    visit.page.on("dialog", lambda dialog: visit.said.append("a dialog opened"))
    tags = visit.page.evaluate("""(source) => {
        const mark = (from, to) => [document.createTextNode(source.slice(from, to))];
        const element = render(source, mark);
        document.querySelector("#turns").append(element);
        const all = [...element.querySelectorAll("*")];
        const names = (e) => e.getAttributeNames().join(" ");
        return all.map((e) => [e.localName, names(e), e.getAttribute("href") || "", e.textContent]);
    }""", HOSTILE)  # fmt: skip
    names = {name for name, *_ in tags}
    assert names <= {"h4", "p", "br", "strong", "em", "code", "a", "ul", "ol", "li", "blockquote", "pre", "div"}, names
    assert names >= {"h4", "strong", "em", "code", "a", "ul", "ol", "blockquote", "pre"}
    assert {attributes for _, attributes, _, _ in tags} <= {"", "href rel target", "tabindex", "class", "start"}
    links = [href for _, _, href, _ in tags if href]  # an image is a link too, and nothing fetches it
    assert links == ['https://example.com/a"onmouseover="alert', "https://evil.example/x.png"]
    shown = " ".join(text for *_, text in tags)
    for said in ("<script>alert(8)</script>", "<img src=x onerror=alert(1)>", "unclosed <b>", "javascript:alert(3)"):
        assert said in shown
    for deep in ("*" * 20000, "[" * 20000, "`" * 20000, "- " * 8000, "> " * 8000, "**a " * 6000, "(" + " \n- x" * 3000):
        seconds = visit.page.evaluate("""(source) => {
            const began = performance.now();
            render(source, (from, to) => [document.createTextNode(source.slice(from, to))]);
            return (performance.now() - began) / 1000;
        }""", deep)  # fmt: skip
        assert seconds < 3, (deep[:8], seconds)
    assert not any("alert" in url or "evil" in url for url in visit.asked)
    visit.context.close()
    assert not [line for line in visit.said if "401" not in line], visit.said


@pytest.mark.browser
def test_while_the_model_loads_the_page_shows_how_far_it_is(browser: Any, tiny: Path) -> None:  # noqa: F811
    import threading

    from minispec.server import build_llm

    go = threading.Event()

    def build(config: Config, progress: Any) -> Any:
        progress("warm-up 3/9: decode, batch 4")
        go.wait(30)
        return build_llm(config, progress)

    running = Running(Config(**options(tiny)), build)
    try:
        visit = Visit(browser, running, 390, "light")
        visit.page.wait_for_selector("#loading", state="visible")
        visit.page.get_by_text("warm-up 3/9").wait_for()
        assert visit.page.is_disabled("#send") and not faults(visit)
        go.set()
        visit.page.wait_for_selector("#state.ready")
        assert not visit.page.is_visible("#loading")
        visit.said = [line for line in visit.said if "503" not in line]  # as the browser logs what /health answers
        visit.end()
    finally:
        go.set()
        running.stop()
