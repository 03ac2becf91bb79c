"""The page in a real browser: headless Chromium against `edgespec serve demo`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from browser import Browser, find_browser
from chat_page import COMPLETE, READY, TEXT, ask, choose, set_schema
from edgespec.server.app import page_routes
from edgespec.server.exchange import DONE, Exchange, sse
from serving import read_line, served
from waiting import until

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="neither chromium nor chrome is installed")
QUESTION = "Find me a bus to Fresno. Find me a bus to Fresno. Find me a bus"
HOSTILE = '<img src=x onerror="document.title=\'gone\'"><script>document.title="gone"</script> [a](javascript:alert(1))'
ANSWER = f"""# Title

Some **bold and *more* of it** text with `code` and [a link](https://example.org/a).
{HOSTILE}

1. one
2. two
   - inner <b>item</b>

> quoted

| a | b |
|---|---|
| 1 | **2** |

```python
print("<i>hi</i>")
```
"""


@pytest.fixture(scope="module")
def url(private_home: Path) -> Iterator[str]:
    options = ("--port", "0", "--reproducible", "--exit-with-stdin", "--drafter", "model", "--draft-length", "4")
    with served(private_home, *options) as process:
        yield read_line(process)["url"]


@pytest.fixture(scope="module")
def running() -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as browser:
        yield browser


@pytest.fixture
def browser(running: Browser, url: str) -> Iterator[Browser]:
    """A page without stored conversations, which complains of nothing and asks nobody else for anything."""
    running.failures.clear()
    running.requested.clear()
    running.open(url)
    running.value("localStorage.clear()")
    running.reload()
    running.until(READY)
    yield running
    assert running.failures == []
    assert [each for each in running.requested if not each.startswith((url, "data:", "blob:"))] == []


def test_an_answer_comes_as_the_api_gives_it_with_its_drafts_marked(browser: Browser, url: str):
    choose(browser, temperature=0, max_tokens=48)
    ask(browser, QUESTION)
    browser.until(COMPLETE)
    fields = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 48}
    whole = httpx.post(url + "/v1/chat/completions", json=fields, timeout=60).json()
    content = whole["choices"][0]["message"]["content"]
    assert "".join(browser.value(TEXT).split()) == "".join(content.split())
    kept = json.loads(browser.value("localStorage[Object.keys(localStorage).find(k => k.includes('conversation'))]"))
    message = kept["messages"][1]
    assert message["content"] == content and sum(length for length, _ in message["runs"]) == len(content)
    drafted = sum(length for length, drafter in message["runs"] if drafter == "model")
    shown = browser.value("[...document.querySelectorAll('.assistant .t')].map(e => e.textContent).join('').length")
    assert drafted >= shown > 0 and message["timings"]["draft_n_accepted"] > 0
    assert f"{message['timings']['predicted_n']} tokens" in browser.text(".assistant .meta")
    assert browser.text("#f-acceptance").endswith("%") and float(browser.text("#f-width")) > 1
    assert "drafted by model" in browser.text("#legend") and "MiB" in browser.text("#memory-total")
    coloured = "getComputedStyle(document.querySelector('.assistant .t')).backgroundColor"
    before = browser.value(coloured)
    browser.press("d", "KeyD", alt=True)
    assert browser.value(coloured) != before == "rgba(0, 0, 0, 0)"
    assert browser.value("document.querySelector('#marks').getAttribute('aria-pressed')") == "true"


def test_stop_again_edit_and_a_reload(browser: Browser, url: str):
    choose(browser, temperature=5, seed=1, top_k=0)  # rambles on until the context is full
    ask(browser, "Tell me a long story")
    browser.until("document.querySelector('.running .text').textContent.length > 10")
    assert browser.value("document.querySelector('#messages').getAttribute('aria-busy')") == "true"
    browser.press("Escape")
    browser.until(COMPLETE)
    until(lambda: httpx.get(url + "/health").json()["running"] == 0)
    assert browser.text(".assistant .note p") == "Stopped."
    browser.value("document.querySelector('[data-do=reset]').click()")
    choose(browser, temperature=0, max_tokens=3)
    browser.press("r", "KeyR", alt=True)
    browser.until(f"{COMPLETE} && !document.querySelector('.note p')?.textContent.includes('Stopped')")
    assert "3 tokens" in browser.text(".assistant .meta") and "limit of tokens" in browser.text(".assistant .note")
    begun = browser.value(TEXT)
    browser.click(".assistant .ending button")
    browser.until(f"{COMPLETE} && {TEXT}.length > {len(begun)}")
    assert browser.value(TEXT).startswith(begun) and browser.value("document.querySelectorAll('article').length") == 2
    browser.value("document.querySelector('#prompt').focus()")
    browser.press("ArrowUp")
    browser.until("document.activeElement.closest('.editing')")
    browser.write(" about a bus")
    browser.press("Enter")
    browser.until(
        f"{COMPLETE} && document.querySelector('.user .text').textContent === 'Tell me a long story about a bus'"
    )
    answer = browser.value(TEXT)
    browser.reload()
    browser.until(READY)
    browser.click("#conversations li button")
    assert browser.value(TEXT) == answer and browser.value("document.querySelectorAll('article').length") == 2


def test_a_click_on_the_conversation_that_is_open_goes_on_with_its_answer(browser: Browser, url: str):
    choose(browser, temperature=5, seed=1, top_k=0)
    ask(browser, "Tell me a long story")
    browser.until("document.querySelector('.running .text').textContent.length > 10")
    browser.value("document.querySelector('#conversations li button').click()")
    length = browser.value(f"({TEXT}).length")
    browser.until(f"({TEXT}).length > {length} || {COMPLETE}")
    browser.press("Escape")
    browser.until(COMPLETE)
    until(lambda: httpx.get(url + "/health").json()["running"] == 0)
    kept = json.loads(browser.value("localStorage[Object.keys(localStorage).find(k => k.includes('conversation'))]"))
    assert length > 10 and len(kept["messages"][1]["content"]) > 10


def test_what_a_model_writes_is_text(browser: Browser):
    stored = {
        "id": "x",
        "system": "",
        "updated": 1,
        "messages": [
            {"role": "user", "content": HOSTILE},
            {"role": "assistant", "content": ANSWER, "runs": [[20, None], [300, "ngram"]]},
        ],
    }
    browser.value(f"localStorage['edgespec.conversation.x'] = {json.dumps(json.dumps(stored))}")
    browser.reload()
    browser.until(READY)
    browser.click("#conversations li button")
    count = "document.querySelectorAll('#messages :is({})').length"
    assert browser.value(count.format("img, script, b, i, a[href^=javascript]")) == 0
    assert browser.text(".user .text") == HOSTILE and HOSTILE.split(" [")[0] in browser.value(TEXT)
    structure = ("strong em", "p > code", "ol > li > ul > li", "blockquote", "td > strong", "pre > code")
    for selector in (".text h3", *structure):
        assert browser.value(f"document.querySelectorAll('#messages .assistant {selector}').length") == 1, selector
    assert browser.value("document.querySelector('#messages a').rel") == "noopener noreferrer nofollow"
    assert browser.text("pre > code") == 'print("<i>hi</i>")'
    assert browser.value("document.title") == "demo"


LISTED = """1. Install:
   ```python
   if __name__ == '__main__':
       print(**x)
   ```
2. Use `foo__bar__baz` or foo__bar__baz and __this__.
"""


def store(browser: Browser, *contents: str, updated: int = 1) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": content, "runs": []} for place, content in enumerate(contents)]
    stored = {"id": "x", "system": "", "updated": updated, "messages": messages}
    browser.value(f"localStorage['edgespec.conversation.x'] = {json.dumps(json.dumps(stored))}")


def test_code_in_a_list_and_names_with_underscores(browser: Browser):
    store(browser, "Hi", LISTED)
    browser.reload()
    browser.until(READY)
    browser.click("#conversations li button")
    assert browser.text("pre > code") == "if __name__ == '__main__':\n    print(**x)"
    assert browser.value("[...document.querySelectorAll('.assistant strong')].map(e => e.textContent)") == ["this"]
    assert "foo__bar__baz or foo__bar__baz" in browser.value(TEXT)
    assert browser.value("document.querySelectorAll('.assistant ol')[1].start") == 2


def test_common_values_are_taken(browser: Browser):
    choose(browser, temperature=0.72, top_p=0.955, min_p=0.005, repeat_penalty=1.1, max_tokens=4)
    ask(browser, "Hi")
    browser.until(COMPLETE)
    assert not browser.value("!!document.querySelector('.problem')")


def test_what_cannot_be_stored_lasts_until_the_page_is_closed(browser: Browser):
    choose(browser, temperature=0, max_tokens=4)
    ask(browser, "One")
    browser.until(COMPLETE)
    browser.value("for (let n = 1 << 22; n; n >>= 1) try { localStorage['fill' + n] = 'x'.repeat(n) } catch {}")
    for number, text in enumerate(("Two " * 50, "Three " * 50), start=2):
        ask(browser, text)
        browser.until(f"document.querySelectorAll('.assistant').length === {number} && {COMPLETE}")
    browser.click("[data-do=new]")
    browser.click("#conversations li button")
    assert browser.value("document.querySelectorAll('#messages article').length") == 6


def test_another_page_that_changes_a_conversation_is_followed(browser: Browser):
    store(browser, "Hi", "Hello")
    browser.reload()
    browser.until(READY)
    browser.click("#conversations li button")
    store(browser, "Hi", "Hello", "More?", "Yes", updated=2)
    browser.value("dispatchEvent(new StorageEvent('storage', {key: 'edgespec.conversation.x'}))")  # as from another tab
    browser.until("document.querySelectorAll('#messages article').length === 4")
    browser.value("localStorage.removeItem('edgespec.conversation.x')")
    browser.value("dispatchEvent(new StorageEvent('storage', {key: 'edgespec.conversation.x'}))")
    browser.until("!document.querySelector('#messages article') && !document.querySelector('#conversations li')")


def test_an_unusable_schema_can_be_left_out(browser: Browser):
    choose(browser, max_tokens=4)
    set_schema(browser, '{"type": "nonsense"}')
    ask(browser, "Hello")
    browser.until("[...document.querySelectorAll('.problem button')].length === 2")
    browser.click(".problem button:nth-of-type(2)")
    browser.until(COMPLETE)
    browser.until("!document.querySelector('.problem')")
    browser.failures = [each for each in browser.failures if "400" not in each]


def test_a_copy_needs_no_secure_page(browser: Browser):
    store(browser, "Copy this", "Hello")
    browser.reload()
    browser.until(READY)
    browser.click("#conversations li button")
    browser.value("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    browser.value(
        "addEventListener('copy', () => document.title = getSelection().toString() || document.activeElement.value)"
    )
    browser.click(".user [aria-label=Copy]")
    browser.until("document.title === 'Copy this' && document.querySelector('#status').textContent === 'Copied'")


def test_what_is_wrong_is_said_at_the_answer(browser: Browser):
    set_schema(browser, '{"type":')
    assert "Not valid JSON" in browser.text("#schema-state")
    ask(browser, "Hello")
    assert "Not valid JSON" in browser.text(".problem")
    browser.click("[data-do=no-schema]")
    browser.click(".problem button")
    browser.until(COMPLETE)
    browser.until("!document.querySelector('.problem')")
    ask(browser, "word " * 4000)
    browser.until("document.querySelector('.problem')")
    assert "context" in browser.text(".problem p")
    browser.failures = [each for each in browser.failures if "400" not in each]  # the browser notes the status


def test_keys_themes_and_small_screens(browser: Browser, url: str):
    browser.value("document.activeElement.blur()")
    browser.press("?")
    browser.until("document.querySelector('#help-dialog').open")
    browser.press("Escape")
    browser.until("!document.querySelector('#help-dialog').open")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = browser.value(paper)
    browser.prefer("dark")
    assert browser.value(paper) != light
    browser.click("[data-do=theme]")  # against the system
    assert browser.value(paper) == light
    browser.open(url, width=360, height=640, phone=True)
    browser.until(READY)
    browser.value("document.querySelector('#model').textContent = 'SmolLM2-135M-Instruct.Q4_1'.repeat(2)")
    assert browser.value("document.scrollingElement.scrollWidth") <= 360
    right = "document.querySelector('#panel-button').getBoundingClientRect().right"
    assert browser.value(right) <= 360  # the name gives way to the buttons
    assert browser.value("getComputedStyle(document.querySelector('#side')).display") == "none"
    browser.click("[data-do=side]")
    browser.until("document.querySelector('#side').contains(document.activeElement)")
    browser.press("Escape")
    browser.click("#panel-button")
    assert browser.value("document.querySelector('#panel').getBoundingClientRect().right") <= 360
    unnamed = "[...document.querySelectorAll('button, input, textarea')].filter(e => !e.textContent.trim()"
    unnamed += " && !e.getAttribute('aria-label') && !e.labels?.length).length"
    assert browser.value(unnamed) == 0


def test_a_key_is_asked_for(running: Browser, private_home: Path):
    with served(private_home, "--port", "0", "--exit-with-stdin", EDGESPEC_API_KEY="secret") as process:
        running.open(read_line(process)["url"])
        running.until("document.querySelector('#key-dialog').open")
        running.press("Escape")  # and the next message asks again
        running.until("!document.querySelector('#key-dialog').open")
        running.value("document.querySelector('#prompt').focus()")
        running.write("Hi")
        running.press("Enter")
        for key in ("wrong", "secret"):
            running.until("document.querySelector('#key-dialog').open")
            running.until("document.activeElement.id === 'key'")
            running.write(key)
            running.press("Enter")
            running.until(f"{READY} || document.querySelector('#key-error').textContent")
        running.until(READY)
        ask(running, "Hi")
        running.until(COMPLETE)
        assert running.value(
            "!document.querySelector('.problem') && !Object.values(localStorage).join().match('secret')"
        )


# -- The page against a server that streams what a test says: all forms of events, errors, a lost connection


PING = Exchange.ping
ABOUT = {"model_alias": "scripted", "engine": "none", "device": "cpu", "drafter": "auto", "memory": None}
ABOUT |= {"default_generation_settings": {"params": {}}}
LOST = "The connection was lost before the answer was complete."
COLOURS = "[...document.querySelectorAll('.assistant .t')].map(e => getComputedStyle(e).backgroundColor)"
CLEAR = "rgba(0, 0, 0, 0)"


def part(text: str, drafter: str | None = None, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return {"choices": [choice], "tokens": [{"text": text, "drafter": drafter}]}


class Scripted:
    """A server with the page; `parts` are what it answers with: bytes, what to wait for, or None: it goes away."""

    def __init__(self) -> None:
        self.parts: Sequence[bytes | threading.Event | None] = ()
        self.asked: list[dict[str, Any]] = []
        same = {"/props": ABOUT, "/api/tags": {"models": [{"name": "scripted"}]}, "/health": {"running": 0}}
        routes = [Route(path, self._fixed(value)) for path, value in same.items()]
        chat = Route("/v1/chat/completions", self._chat, methods=["POST"])
        config = uvicorn.Config(Starlette(routes=[*page_routes(), *routes, chat]), port=0, log_config=None, ws="none")
        self.server = uvicorn.Server(config)

    def _fixed(self, value: Any) -> Any:
        async def answer(_: Request) -> Response:
            return JSONResponse(value)

        return answer

    async def _chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        for each in self.parts:
            if each is None:
                raise ConnectionAbortedError
            if isinstance(each, threading.Event):
                await asyncio.to_thread(each.wait, 60)
            else:
                yield each
                await asyncio.sleep(0.01)  # a packet of its own

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    found = Scripted()
    thread = threading.Thread(target=found.server.run)
    thread.start()
    until(lambda: found.server.started)
    yield found
    found.server.should_exit = True
    thread.join()


@pytest.fixture
def tab(running: Browser, scripted: Scripted) -> Iterator[Browser]:
    running.failures.clear()
    running.open(scripted.url)
    running.value("localStorage.clear()")
    running.reload()
    running.until(READY)
    scripted.asked.clear()
    yield running
    assert running.failures == []


ONE, TWO = sse(part("Hello ")), sse(part("world é"))
LAST = sse(part("!", finish="stop"))
SPLIT = ONE + TWO + LAST + DONE
FORMS = {
    "a ping first": [PING, ONE, TWO, LAST, DONE],
    "a ping in the middle": [ONE, PING, TWO, LAST, DONE],
    "a ping at the end": [ONE, TWO, LAST, PING, DONE, PING],
    "pings everywhere in one packet": [PING + PING + ONE + PING + TWO + LAST + PING + DONE],
    "a comment within an event": [b": ping\n" + ONE.replace(b"\n\n", b"\n: more\n\n"), TWO, LAST, DONE],
    "every byte alone": [SPLIT[at : at + 1] for at in range(len(SPLIT))],
    "lines end with CR LF": [SPLIT.replace(b"\n", b"\r\n")],
    "CR and LF in two packets": [piece for line in SPLIT.split(b"\n") for piece in (line + b"\r", b"\n")],
    "lines end with CR": [SPLIT.replace(b"\n", b"\r")],
    "no space after the colon": [SPLIT.replace(b"data: ", b"data:")],
    "several data lines": [b"data: {\n" + ONE.replace(b"data: {", b"data: ", 1), TWO, LAST, DONE],
    "fields that nobody needs": [b"id: 7\nretry: 10\nevent: message\n" + ONE, TWO, LAST, DONE],
    "events of other types": [b"event: ping\ndata: {}\n\n", ONE, b"event: usage\ndata: 12\n\n", TWO, LAST, DONE],
    "an event without data": [b"event: message\n\n", ONE, b"\n\n\n", b"id\n\n", TWO, LAST, DONE],
    "a byte order mark": ["\ufeff".encode() + SPLIT],
    "a part without choices": [sse({"choices": []}), ONE, TWO, sse({"usage": {}}), LAST, DONE],
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_events_is_the_same_answer(tab: Browser, scripted: Scripted, name: str):
    scripted.parts = FORMS[name]
    ask(tab, "Hi")
    tab.until(COMPLETE)
    assert tab.value(TEXT) == "Hello world é!" and not tab.text(".problem")


ENDS = {
    "an error as OpenAI's": ([ONE, sse({"error": {"message": "It broke.", "code": "x"}})], "It broke."),
    "an error event": ([ONE, PING, sse({"error": {"message": "It broke."}}, "error")], "It broke."),
    "an error event with its own fields": ([ONE, b'event: error\ndata: {"message":"It broke."}\n\n'], "It broke."),
    "an error event with a text": ([ONE, b"event: error\ndata: It\ndata: broke.\n\n"], "It\nbroke."),
    "an error that is a text": ([ONE, sse({"error": "It broke."})], "It broke."),
    "no JSON": ([ONE, b"data: {oops\n\n"], "The server sent what is no part of an answer: {oops"),
    "an end without the last event": ([ONE, PING], LOST),
    "an end within an event": ([ONE, TWO[:20]], LOST),
    "a server that goes away": ([ONE, PING, None], LOST),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_that_breaks_off_is_kept_and_can_go_on(tab: Browser, scripted: Scripted, name: str):
    scripted.parts, problem = ENDS[name]
    ask(tab, "Hi")
    tab.until("document.querySelector('.problem')")
    assert tab.text(".problem p") == problem and tab.value(TEXT) == "Hello "
    kept = tab.value("localStorage[Object.keys(localStorage).find(k => k.includes('conversation'))]")
    assert json.loads(kept)["messages"][1]["content"] == "Hello "
    scripted.parts = [PING, TWO, LAST, DONE]
    tab.click(".problem button:nth-of-type(2)")
    tab.until(f"{COMPLETE} && !document.querySelector('.problem')")
    assert tab.value(TEXT) == "Hello world é!"
    assert scripted.asked[1]["messages"][-1] == {"role": "assistant", "content": "Hello "}
    tab.failures.clear()  # the tab notes a broken connection itself


def test_a_server_that_is_gone_is_said(tab: Browser, scripted: Scripted):
    tab.value("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    ask(tab, "Hi")
    tab.until("document.querySelector('.problem')")
    assert tab.text(".problem p") == "The server does not answer. Is it still running?"
    tab.failures.clear()


DRAFTERS = ["model", "ngram", "suffix", "cache", "forced", "eagle", "eagle3", "lookahead", "mtp", "tree"]


def test_drafters_have_colours_of_their_own_while_an_answer_is_written(tab: Browser, scripted: Scripted):
    gate = threading.Event()
    words = [sse(part(f"{name} ", name)) for name in DRAFTERS]
    scripted.parts = [sse(part("By: ")), *words, gate, LAST, DONE]
    ask(tab, "Hi")
    tab.until(f"document.querySelectorAll('.assistant .t').length === {len(DRAFTERS)}")
    shown = tab.value(COLOURS)
    assert len(set(shown)) == len(DRAFTERS) and CLEAR not in shown
    classes = tab.value("[...document.querySelectorAll('.assistant .t')].map(e => e.className)")
    assert classes == [f"t d{place}" for place in range(len(DRAFTERS))]  # in order of appearance
    gate.set()
    tab.until(COMPLETE)
    assert set(tab.value(COLOURS)) == {CLEAR}
    tab.click("#marks")
    assert tab.value(COLOURS) == shown
    tab.reload()
    tab.until(READY)
    tab.click("#conversations li button")
    assert tab.value(COLOURS) == shown  # asked for, until it is switched off
    tab.click("#marks")
    assert set(tab.value(COLOURS)) == {CLEAR}


def test_a_schema_belongs_to_its_conversation_and_is_told_at_the_message_field(tab: Browser, scripted: Scripted):
    scripted.parts = [ONE, LAST, DONE]
    chip = "!document.querySelector('#schema-chip').hidden"
    assert not tab.value(chip)
    set_schema(tab, '{"type": "objekt"')
    assert tab.value(chip) and tab.text("#schema-name") == "JSON schema: not valid"
    tab.write("}")
    assert tab.text("#schema-name") == "JSON schema"
    ask(tab, "With")
    tab.until(COMPLETE)
    assert scripted.asked[-1]["response_format"]["json_schema"]["schema"] == {"type": "objekt"}
    tab.click("[data-do=new]")
    assert not tab.value(chip)
    ask(tab, "Without")
    tab.until(COMPLETE)
    assert "response_format" not in scripted.asked[-1]
    tab.reload()
    tab.until(READY)
    assert not tab.value(chip)
    tab.click("#conversations li:nth-of-type(2) button")
    assert tab.value(chip) and tab.value("document.querySelector('#s-schema').value") == '{"type": "objekt"}'
    tab.click("[data-do=no-schema]")
    assert not tab.value(chip)
    ask(tab, "More")
    tab.until(f"document.querySelectorAll('article').length === 4 && {COMPLETE}")
    assert "response_format" not in scripted.asked[-1]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_chip_leads_to_the_schema(tab: Browser, scripted: Scripted, width: int):
    tab.open(scripted.url, width=width)
    tab.until(READY)
    tab.value("document.querySelector('#s-schema').value = '{}'")
    tab.value("document.querySelector('#s-schema').dispatchEvent(new Event('input', {bubbles: true}))")
    assert tab.value("document.scrollingElement.scrollWidth") <= width
    tab.click("[data-do=schema]")
    tab.until("document.activeElement.id === 's-schema'")
    assert tab.value("document.querySelector('#panel').getBoundingClientRect().right") <= width
