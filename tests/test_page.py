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
from test_server import Running, options, ready, script, scripted
from transformers import AutoTokenizer

from minispec.config import Config
from minispec.serve.page import page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core")) / "axe.min.js"


# The number of nodes is given: else the shape of a tree would depend on how fast steps are on this machine.
SERVED = {"api_key": "the-key", "speculative_num_draft_tokens": 8}


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
        self.sent: dict[str, list[dict[str, Any]]] = {"tokenize": [], "generate": []}  # bodies, by path
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", self.note)
        self.origin = f"http://127.0.0.1:{served.port}"
        self.page.goto(self.origin + "/")

    def note(self, request: Any) -> None:
        """Keep what a request asks for."""
        self.asked.append(request.url)
        self.sent.get(request.url.rpartition("/")[2], []).append(request.post_data_json)

    def give_key(self) -> None:
        """Type the key where the page asks for it."""
        self.page.fill("#key", "the-key")
        self.page.press("#key", "Enter")
        self.page.wait_for_selector("#state.ready")

    def ask(self, text: str, tokens: int = 60) -> None:
        """Send a prompt by keyboard, and wait for the end of the answer."""
        self.begin(text, tokens)
        self.page.wait_for_selector("#send", state="visible")

    def begin(self, text: str, tokens: int) -> None:
        """Send a prompt by keyboard."""
        self.page.evaluate("count => document.getElementById('max_new_tokens').value = count", tokens)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")  # it returns when the page has seen the key, so that Send is hidden then

    def token(self, number: int) -> None:
        """Wait until the newest answer has so many tokens."""
        self.page.locator("#turns > li:last-child .t").nth(number).wait_for(state="attached")

    def turns(self) -> int:
        """Return how many turns the page shows."""
        return int(self.page.locator("#turns > li:not(#empty)").count())

    def end(self, logged: str = "401") -> None:
        """Close the window; nothing may have been said on the console but what a browser logs of answers with errors,
        such as that a key is wanted, nothing asked of another host."""
        self.context.close()
        unwanted = [line for line in self.said if not re.search(logged, line)]
        assert not unwanted and len(self.asked) > 3
        assert all(url.startswith((self.origin + "/", "data:")) for url in self.asked), self.asked


@pytest.fixture
def visit(browser: Any, served: Running) -> Visit:
    """The page on a desk, with its key; who visits ends it."""
    visit = Visit(browser, served, 1280, "light")
    visit.give_key()
    return visit


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
    assert drafted > 1 and written > 1 and answer.locator(".t.d4").count() > 1
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
    assert page.locator(".answer").nth(1).locator(".t.d1").count() == 0, "without speculation nothing was drafted"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    assert not faults(visit)
    visit.end()


@pytest.mark.browser
def test_where_two_answers_part_the_page_says_by_what_margin(visit: Visit) -> None:
    """In float32 they never do, so the second answer is changed on its way: its last but one token is another."""
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
    assert "1.25 times as fast" in visit.page.evaluate("faster(50, 40)")
    assert "slower: it took 1.04 times as long" in visit.page.evaluate("faster(96, 100)")
    assert "slower" not in visit.page.evaluate("faster(100, 100)") and visit.page.evaluate("faster(null, 1)") == ""
    visit.page.check("#compare")
    visit.ask("Once upon", 12)
    ((at, margin, text),) = changed
    said = visit.page.inner_text(".verdict")
    assert f"part at token {at + 1}:" in said and said.count("ahead by") == 2, said
    assert f"{text.strip() or text}”, ahead by {margin:g} without" in said and margin > 0
    assert visit.page.locator(".t.part").count() == 2 and visit.page.locator(".t.here").count() > 0
    visit.end()


@pytest.mark.browser
def test_a_second_turn_has_the_first_in_its_prompt_and_stop_ends_an_answer(visit: Visit, served: Running) -> None:
    visit.ask("Once upon", 5)
    visit.ask("a time", 5)
    messages = visit.sent["tokenize"][1]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] and visit.turns() == 2
    visit.begin("there was", 800)
    visit.token(3)
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
def test_while_the_model_loads_the_page_shows_how_far_it_is(browser: Any, tiny: Path) -> None:
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
        visit.end("503")
    finally:
        go.set()
        running.stop()


# ---- what fails ------------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_a_turn_that_fails_leaves_the_conversation_and_its_text_goes_back_into_the_box(visit: Visit) -> None:
    page = visit.page
    visit.ask("Once upon", 5)
    long = "river " * 1500
    visit.ask(long)
    assert "longer than the longest possible" in page.inner_text("#told") and not page.is_visible("#again")
    assert page.input_value("#prompt") == long.strip() and visit.turns() == 1
    assert "ended early" not in page.inner_text("body") and page.inner_text("#state") == "ready" and not faults(visit)
    visit.ask("a time", 5)
    messages = visit.sent["tokenize"][2]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"] and messages[2]["content"] == "a time"
    assert visit.turns() == 2 and not page.is_visible("#alert")
    visit.end("40[01]")


@pytest.mark.browser
def test_of_a_server_that_is_gone_the_page_says_so_and_tries_again(browser: Any, tiny: Path) -> None:
    with ready(Running(Config(**options(tiny, shutdown_timeout=0)))) as running:
        visit = Visit(browser, running, 1280, "light")
        page = visit.page
        page.wait_for_selector("#state.ready")
        visit.begin("Once upon", 800)
        visit.token(3)
    page.get_by_text("Server not answering").wait_for()
    assert "It ended early: " in page.inner_text("#turns > li:last-child .failed")
    assert page.inner_text("#state") == "not answering" and page.is_disabled("#send")
    assert page.input_value("#prompt") == "Once upon", "it is not part of the conversation"
    page.fill("#prompt", "a time")
    page.click("#again")
    page.wait_for_selector("#state.wrong")
    assert page.input_value("#prompt") == "a time" and page.is_visible("#again") and not faults(visit)
    page.route("**/health", lambda route: route.abort())  # so that the page does not see by itself that it is back
    with ready(Running(Config(**options(tiny, port=running.port)))):
        page.unroute("**/health")
        page.evaluate("document.getElementById('max_new_tokens').value = 5")
        page.evaluate("document.getElementById('again').click()")
        visit.token(3)
        page.wait_for_selector("#state.ready")
        (message,) = visit.sent["tokenize"][-1]["messages"]
        assert message["content"] == "a time" and not page.is_visible("#alert") and page.input_value("#prompt") == ""
        visit.end("ERR_")


@pytest.mark.browser
def test_a_new_chat_has_no_tree(visit: Visit) -> None:
    page = visit.page
    visit.ask("Once upon", 20)
    assert page.locator("#tree svg").count() == 1
    page.click("#clear")
    assert page.locator("#tree *").count() == page.locator("#bars *").count() == visit.turns() == 0
    assert "tokens a step; 1 without drafts" in page.inner_text(".figures")
    assert page.inner_text("#title") == "No step yet" and page.inner_text("#length") == page.inner_text("#speed") == "–"
    assert page.is_visible("#empty") and not page.is_visible("#slider") and not page.is_visible("#clear")
    visit.ask("a time", 20)
    assert len(visit.sent["tokenize"][1]["messages"]) == 1 and page.locator("#tree svg").count() == 1
    visit.end()


@pytest.mark.browser
def test_number_fields_keep_their_bounds(visit: Visit) -> None:
    page = visit.page
    page.click("summary")
    for field, typed, holds in (
        ("temperature", "9", "5"), ("temperature", "-3", "0"), ("temperature", "0.7", "0.7"), ("temperature", "", "0"),
        ("top_p", "7", "1"), ("top_p", "0", "0.05"), ("top_k", "-7", "-1"), ("top_k", "2.6", "3"), ("top_k", "", "-1"),
        ("max_new_tokens", "0", "1"), ("seed", "-4", "0"), ("seed", "7", "7"),
    ):  # fmt: skip
        page.fill(f"#{field}", typed)
        page.press(f"#{field}", "Tab")
        assert page.input_value(f"#{field}") == holds, (field, typed)
    page.evaluate("document.getElementById('temperature').value = 9")  # nothing tells the page that it changed
    visit.ask("Once upon", 5)
    sent = visit.sent["generate"][0]["sampling_params"]
    assert sent == {"temperature": 5, "top_p": 0.05, "top_k": -1, "max_new_tokens": 5, "sampling_seed": 7}
    visit.end()


# ---- on a phone and on a desk ----------------------------------------------------------------------------------------


FOLLOWED = """async () => {
    const count = () => document.querySelectorAll(".t").length;
    const until = async (tokens) => {
        while (count() < tokens) await new Promise((resolve) => setTimeout(resolve, 5));
        return talk.scrollHeight - talk.scrollTop - talk.clientHeight;
    };
    const followed = await until(200), length = talk.scrollTop;
    talk.scrollTop = 40;
    const left = await until(count() + 100), there = talk.scrollTop;
    talk.scrollTop = talk.scrollHeight;
    return {followed, length, left, there, again: await until(count() + 100)};
}"""  # how much of the conversation lies below what is in view, while an answer grows


@pytest.mark.browser
def test_on_a_phone_the_answer_is_followed_and_the_tree_is_in_view(browser: Any, served: Running) -> None:
    visit = Visit(browser, served, 390, "light")
    visit.give_key()
    page = visit.page
    visit.begin("Once upon", 900)
    seen = page.evaluate(FOLLOWED)
    assert seen["followed"] < 8 and seen["length"] > 100 and seen["again"] < 8, seen
    assert seen["there"] == 40 and seen["left"] > 100, "who scrolls up is left there"
    top, tree, composer = (page.locator(name).bounding_box() for name in ("header", "#tree", "#form"))
    assert top["y"] == 0 and composer["y"] + composer["height"] == 850 and composer["height"] < 75
    assert tree["y"] + 50 < composer["y"], "a row of the tree is in view"
    page.evaluate("abort?.abort()")
    page.wait_for_selector("#send", state="visible")
    page.click("#fold")
    assert not page.is_visible("#tree") and page.is_visible("#length") and not faults(visit)
    page.click("#fold")
    assert page.is_visible("#tree")
    visit.end()


@pytest.fixture(scope="module")
def ending(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose answers end, with a draft model that is the target itself, and texts looked up beside it."""
    ids = script(AutoTokenizer.from_pretrained(demo_folder))
    folder = str(scripted(demo_folder, tmp_path_factory.mktemp("models") / "ending", [*ids, 2]))
    given = options(
        Path(folder), speculative_algorithm="STANDALONE", speculative_draft_model_path=folder, speculative_lookup=True,
        speculative_num_steps=2, speculative_eagle_topk=8, speculative_num_draft_tokens=17,
    )  # fmt: skip
    with ready(Running(Config(**given))) as running:
        yield running


def ask_for(visit: Visit, source: str) -> None:
    """Ask until a step of the answer verified a tree of that source, of six nodes at least, and choose the step."""
    visit.page.wait_for_selector("#state.ready")
    visit.page.evaluate("value => document.getElementById('temperature').value = value", 1 if source == "head" else 0)
    fits = "source => lens.answer.steps.findIndex((s) => s.source === source && s.tokens.length > 5)"
    for _ in range(9):  # a sampled answer is new, the greedy one is known better each time
        visit.ask("Once upon", 12)
        if (index := visit.page.evaluate(fits, source)) >= 0:
            visit.page.evaluate("index => select(lens.answer, index)", index)
            return
    pytest.fail(f"no step verified a tree of the source {source}")


@pytest.mark.browser
def test_on_a_desk_long_chains_and_tall_trees_scroll_where_they_are(browser: Any, ending: Running) -> None:
    visit = Visit(browser, ending, 1280, "light")
    page = visit.page
    page.wait_for_selector("#state.ready")
    assert page.evaluate("document.activeElement.id") == "prompt"
    ask_for(visit, "head")
    page.wait_for_selector("#tree.south:not(.north)")
    page.hover("#tree")
    page.mouse.wheel(0, 5000)
    page.wait_for_selector("#tree.north:not(.south)")
    header, legend = (page.locator(name).bounding_box() for name in ("header", ".legend"))
    assert header["y"] == page.evaluate("scrollY") == 0 and legend["y"] + legend["height"] <= 850
    ask_for(visit, "lookup")
    page.wait_for_selector("#tree.east:not(.west)")
    assert page.evaluate("getComputedStyle(tree).maskImage").count("rgba(0, 0, 0, 0)") == 1, "it fades where it goes on"
    page.evaluate("tree.scrollLeft = 9999")
    page.wait_for_selector("#tree.west:not(.east)")
    visit.end()


@pytest.mark.browser
def test_what_was_looked_up_is_told_from_what_a_model_drafted(browser: Any, ending: Running) -> None:
    visit = Visit(browser, ending, 1280, "light")
    page = visit.page
    style = "(all, name) => all.map((element) => getComputedStyle(element)[name])"
    for source, line, said in (
        ("head", "solid", "are the draft model’s guesses."), ("lookup", "dotted", "were looked up in earlier text, not")
    ):  # fmt: skip
        ask_for(visit, source)
        lines = page.locator("#turns > li:last-child .t.tint.here").evaluate_all(style, "borderBottomStyle")
        dashes = page.locator("#tree .yes rect").evaluate_all(style, "strokeDasharray")
        assert len(lines) > 1 and set(lines) == {line} and len(dashes) > 1
        assert ("none" in dashes) == (source == "head")
        assert said in page.inner_text("#said")
    assert page.locator("#tree .root rect").evaluate("r => getComputedStyle(r).strokeDasharray") == "none"
    page.evaluate("select(lens.answer, lens.answer.steps.length - 1)")
    said, tree = page.inner_text("#said"), page.locator("#tree").text_content()
    assert "⟨end⟩" in said and "⟨end⟩" in tree and "<|" not in said + tree, "no raw <|im_end|>"
    assert page.inner_text(".legend").count("looked up") == 1 and not faults(visit)
    visit.end()


CONTRASTS = """() => {
    const light = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
        .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
    const paper = getComputedStyle(document.body).backgroundColor;
    const seen = {header: "borderBottomColor", ".lens": "borderLeftColor", ".box": "borderTopColor",
        "#clear": "borderTopColor", "#temperature": "borderTopColor", "#compare": "borderTopColor",
        ".legend .d0": "borderTopColor", ".tree .root rect": "stroke", ".tree .no rect": "stroke",
        ".tree .yes.d1 rect": "stroke", ".tree .yes.d2 rect": "stroke", ".tree .edge": "stroke", ".bars rect": "fill"};
    for (const depth of [1, 2, 3, 4]) seen[`.legend .d${depth}`] = "borderBottomColor";
    return Object.entries(seen).map(([name, property]) =>
        [name, ratio(getComputedStyle(document.querySelector(name))[property], paper)]);
}"""


@pytest.mark.browser
def test_borders_and_tints_are_seen(browser: Any, ending: Running) -> None:
    visit = Visit(browser, ending, 1280, "light")
    ask_for(visit, "head")
    for scheme in ("light", "dark"):
        visit.page.emulate_media(color_scheme=scheme)
        found = dict(visit.page.evaluate(CONTRASTS))
        assert len(found) == 17 and all(ratio >= 3 for ratio in found.values()), (scheme, found)
    visit.end()
