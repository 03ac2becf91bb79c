"""The page in a real browser: headless Chromium against `edgespec serve demo`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from browser import Browser, find_browser
from chat_page import COMPLETE, READY, STORED, TEXT, answered, ask, choose, put, reopen, set_schema, stored, watched
from serving import read_line, served
from waiting import until

pytestmark = pytest.mark.skipif(find_browser() is None, reason="neither chromium nor chrome is installed")
QUESTION = "Find me a bus to Fresno. Find me a bus to Fresno. Find me a bus"


@pytest.fixture(scope="module")
def url(private_home: Path) -> Iterator[str]:
    options = ("--port", "0", "--reproducible", "--exit-with-stdin", "--drafter", "model", "--draft-length", "4")
    with served(private_home, *options) as process:
        yield read_line(process)["url"]


@pytest.fixture
def browser(running: Browser, url: str) -> Iterator[Browser]:
    with watched(running, url):
        yield running


def test_an_answer_comes_as_the_api_gives_it_with_its_drafts_marked(browser: Browser, url: str):
    choose(browser, temperature=0, max_tokens=48)
    answered(browser, QUESTION)
    fields = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 48}
    whole = httpx.post(url + "/v1/chat/completions", json=fields, timeout=60).json()
    content = whole["choices"][0]["message"]["content"]
    assert "".join(browser.value(TEXT).split()) == "".join(content.split())
    (kept,) = stored(browser)
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


def test_stop_again_and_go_on(browser: Browser, url: str):
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


def test_what_cannot_be_stored_lasts_until_the_page_is_closed(browser: Browser):
    choose(browser, temperature=0, max_tokens=4)
    answered(browser, "One")
    browser.value("IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError') }")
    for number, text in enumerate(("Two " * 50, "Three " * 50), start=2):
        ask(browser, text)
        browser.until(f"document.querySelectorAll('.assistant').length === {number} && {COMPLETE}")
    browser.click("[data-do=new]")
    browser.click("#conversations li button")
    assert browser.value("document.querySelectorAll('#messages article').length") == 6


def test_another_page_that_changes_a_conversation_is_followed(browser: Browser, url: str):
    put(browser, "Hi", "Hello")
    reopen(browser)
    other = json.dumps(stored(browser)[0] | {"head": 3})
    more = '[{role: "user", content: "More?", parent: 1}, {role: "assistant", content: "Yes", parent: 2, runs: []}]'
    change = f"const each = {other}; each.messages.push(...{more}); table.put(each)"
    for code in (change, "table.delete('x')"):
        browser.value(f"""new Promise((resolve) => {{
            const opening = indexedDB.open("edgespec");
            opening.onsuccess = () => {{
                const table = opening.result.transaction("conversations", "readwrite").objectStore("conversations");
                {code};
                table.transaction.oncomplete = () => resolve(new BroadcastChannel("edgespec").postMessage("x"));
            }};
        }})""")
        if code is change:
            browser.until("document.querySelectorAll('#messages article').length === 4")
    browser.until("!document.querySelector('#messages article') && !document.querySelector('#conversations li')")


def test_a_copy_needs_no_secure_page(browser: Browser):
    put(browser, "Copy this", "Hello")
    reopen(browser)
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
        answered(running, "Hi")
        assert not running.text(".problem")
        assert running.value(f"{STORED}.then((all) => !JSON.stringify([all, localStorage]).match('secret'))")
