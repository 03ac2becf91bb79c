"""The page against a server that streams what a test says: all forms of events, errors, a lost connection."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from browser import Browser, find_browser
from chat_page import COMPLETE, READY, TEXT, ask, set_schema
from edgespec.server.app import page_routes
from edgespec.server.exchange import DONE, Exchange, sse
from waiting import until

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="neither chromium nor chrome is installed")
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


@pytest.fixture(scope="module")
def running() -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as browser:
        yield browser


@pytest.fixture
def browser(running: Browser, scripted: Scripted) -> Iterator[Browser]:
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
def test_every_form_of_events_is_the_same_answer(browser: Browser, scripted: Scripted, name: str):
    scripted.parts = FORMS[name]
    ask(browser, "Hi")
    browser.until(COMPLETE)
    assert browser.value(TEXT) == "Hello world é!" and not browser.text(".problem")


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
def test_an_answer_that_breaks_off_is_kept_and_can_go_on(browser: Browser, scripted: Scripted, name: str):
    scripted.parts, problem = ENDS[name]
    ask(browser, "Hi")
    browser.until("document.querySelector('.problem')")
    assert browser.text(".problem p") == problem and browser.value(TEXT) == "Hello "
    kept = browser.value("localStorage[Object.keys(localStorage).find(k => k.includes('conversation'))]")
    assert json.loads(kept)["messages"][1]["content"] == "Hello "
    scripted.parts = [PING, TWO, LAST, DONE]
    browser.click(".problem button:nth-of-type(2)")
    browser.until(f"{COMPLETE} && !document.querySelector('.problem')")
    assert browser.value(TEXT) == "Hello world é!"
    assert scripted.asked[1]["messages"][-1] == {"role": "assistant", "content": "Hello "}
    browser.failures.clear()  # the browser notes a broken connection itself


def test_a_server_that_is_gone_is_said(browser: Browser, scripted: Scripted):
    browser.value("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    ask(browser, "Hi")
    browser.until("document.querySelector('.problem')")
    assert browser.text(".problem p") == "The server does not answer. Is it still running?"
    browser.failures.clear()


DRAFTERS = ["model", "ngram", "suffix", "cache", "forced", "eagle", "eagle3", "lookahead", "mtp", "tree"]


def test_drafters_have_colours_of_their_own_while_an_answer_is_written(browser: Browser, scripted: Scripted):
    gate = threading.Event()
    words = [sse(part(f"{name} ", name)) for name in DRAFTERS]
    scripted.parts = [sse(part("By: ")), *words, gate, LAST, DONE]
    ask(browser, "Hi")
    browser.until(f"document.querySelectorAll('.assistant .t').length === {len(DRAFTERS)}")
    shown = browser.value(COLOURS)
    assert len(set(shown)) == len(DRAFTERS) and CLEAR not in shown
    classes = browser.value("[...document.querySelectorAll('.assistant .t')].map(e => e.className)")
    assert classes == [f"t d{place}" for place in range(len(DRAFTERS))]  # in order of appearance
    gate.set()
    browser.until(COMPLETE)
    assert set(browser.value(COLOURS)) == {CLEAR}
    browser.click("#marks")
    assert browser.value(COLOURS) == shown
    browser.reload()
    browser.until(READY)
    browser.click("#conversations li button")
    assert browser.value(COLOURS) == shown  # asked for, until it is switched off
    browser.click("#marks")
    assert set(browser.value(COLOURS)) == {CLEAR}


def test_a_schema_belongs_to_its_conversation_and_is_told_at_the_message_field(browser: Browser, scripted: Scripted):
    scripted.parts = [ONE, LAST, DONE]
    chip = "!document.querySelector('#schema-chip').hidden"
    assert not browser.value(chip)
    set_schema(browser, '{"type": "objekt"')
    assert browser.value(chip) and browser.text("#schema-name") == "JSON schema: not valid"
    browser.write("}")
    assert browser.text("#schema-name") == "JSON schema"
    ask(browser, "With")
    browser.until(COMPLETE)
    assert scripted.asked[-1]["response_format"]["json_schema"]["schema"] == {"type": "objekt"}
    browser.click("[data-do=new]")
    assert not browser.value(chip)
    ask(browser, "Without")
    browser.until(COMPLETE)
    assert "response_format" not in scripted.asked[-1]
    browser.reload()
    browser.until(READY)
    assert not browser.value(chip)
    browser.click("#conversations li:nth-of-type(2) button")
    assert browser.value(chip) and browser.value("document.querySelector('#s-schema').value") == '{"type": "objekt"}'
    browser.click("[data-do=no-schema]")
    assert not browser.value(chip)
    ask(browser, "More")
    browser.until(f"document.querySelectorAll('article').length === 4 && {COMPLETE}")
    assert "response_format" not in scripted.asked[-1]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_chip_leads_to_the_schema(browser: Browser, scripted: Scripted, width: int):
    browser.open(scripted.url, width=width)
    browser.until(READY)
    browser.value("document.querySelector('#s-schema').value = '{}'")
    browser.value("document.querySelector('#s-schema').dispatchEvent(new Event('input', {bubbles: true}))")
    assert browser.value("document.scrollingElement.scrollWidth") <= width
    browser.click("[data-do=schema]")
    browser.until("document.activeElement.id === 's-schema'")
    assert browser.value("document.querySelector('#panel').getBoundingClientRect().right") <= width
