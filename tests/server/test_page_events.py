"""The page in a real browser against a server that streams what a test says."""

from __future__ import annotations

import json
import threading

import pytest

from browser import Browser, find_browser
from chat_page import COMPLETE, READY, TEXT, answered, ask, reload, reopen, set_schema, stored
from edgespec.server.answer import DONE, sse
from scripted_page import PING, Scripted, part
from waiting import until

pytestmark = pytest.mark.skipif(find_browser() is None, reason="neither chromium nor chrome is installed")
LOST = "The connection was lost before the answer was complete."
COLOURS = "[...document.querySelectorAll('.assistant .t')].map(e => getComputedStyle(e).backgroundColor)"
CLEAR = "rgba(0, 0, 0, 0)"


ONE, TWO = sse(part("Hello ")), sse(part("world é"))
LAST = sse(part("!", finish="stop"))
SPLIT_PARTS = [ONE, TWO, LAST, DONE]
SPLIT = ONE + TWO + LAST + DONE
FORMS = {
    "pings everywhere in one packet": [PING + PING + ONE + PING + TWO + LAST + PING + DONE],
    "a comment within an event": [b": ping\n" + ONE.replace(b"\n\n", b"\n: more\n\n"), TWO, LAST, DONE],
    "every byte alone": [SPLIT[at : at + 1] for at in range(len(SPLIT))],
    "lines end with CR LF": [SPLIT.replace(b"\n", b"\r\n")],
    "CR and LF in two packets": [piece for line in SPLIT.split(b"\n") for piece in (line + b"\r", b"\n")],
    "events of other types": [b"event: ping\ndata: {}\n\n", ONE, b"event: usage\ndata: 12\n\n", TWO, LAST, DONE],
    "an event without data": [b"event: message\n\n", ONE, b"\n\n\n", b"id\n\n", TWO, LAST, DONE],
    "a part without choices": [sse({"choices": []}), ONE, TWO, sse({"usage": {}}), LAST, DONE],
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_events_is_the_same_answer(tab: Browser, scripted: Scripted, name: str):
    scripted.parts = FORMS[name]
    answered(tab, "Hi")
    assert tab.value(TEXT) == "Hello world é!" and not tab.text(".problem")


ENDS = {
    "an error as OpenAI's": ([ONE, sse({"error": {"message": "It broke.", "code": "x"}})], "It broke."),
    "an error event": ([ONE, PING, sse({"error": {"message": "It broke."}}, "error")], "It broke."),
    "an error that is a text": ([ONE, sse({"error": "It broke."})], "It broke."),
    "no JSON": ([ONE, b"data: {oops\n\n"], "The server sent what is no part of an answer: {oops"),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_that_breaks_off_is_kept_and_can_go_on(tab: Browser, scripted: Scripted, name: str):
    scripted.parts, problem = ENDS[name]
    ask(tab, "Hi")
    tab.until("document.querySelector('.problem')")
    assert tab.text(".problem p") == problem and tab.value(TEXT) == "Hello "
    until(lambda: stored(tab)[0]["messages"][1].get("error"))
    assert stored(tab)[0]["messages"][1]["content"] == "Hello "
    scripted.parts = [PING, TWO, LAST, DONE]
    tab.click(".problem button:nth-of-type(2)")
    tab.until(f"{COMPLETE} && !document.querySelector('.problem')")
    assert tab.value(TEXT) == "Hello world é!"
    assert scripted.asked[1]["messages"][-1] == {"role": "assistant", "content": "Hello "}


LOSSES = {
    "an end without the last event": [ONE, PING],
    "an end within an event": [ONE, TWO[:20]],
    "a server that goes away": [ONE, PING, None],
}


@pytest.mark.parametrize("name", LOSSES)
def test_an_answer_whose_connection_is_lost_goes_on_by_itself_once(tab: Browser, scripted: Scripted, name: str):
    scripted.parts, scripted.later = LOSSES[name], [[PING, TWO, LAST, DONE]]
    ask(tab, "Hi")
    tab.until(f"{COMPLETE} && {TEXT} === 'Hello world é!' && !document.querySelector('.problem')")
    assert scripted.asked[1]["messages"][-1] == {"role": "assistant", "content": "Hello "}
    scripted.parts = LOSSES[name]
    ask(tab, "More")
    tab.until(f"{COMPLETE} && document.querySelector('.problem p')?.textContent === {json.dumps(LOST)}")
    until(lambda: len(scripted.asked) == 4)
    tab.failures.clear()  # the tab notes a broken connection itself


def test_a_server_that_is_gone_is_said_and_asked_again(tab: Browser, scripted: Scripted):
    scripted.parts = SPLIT_PARTS
    tab.value("window.real = fetch; window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    ask(tab, "Hi")
    tab.until("document.querySelector('.problem') && !document.querySelector('#absence').hidden")
    assert tab.text(".problem p") == "The server does not answer. Is it still running?"
    tab.value("document.querySelector('#prompt').focus()")
    tab.write("kept")
    tab.press("Enter")
    assert tab.value("document.querySelector('#prompt').value") == "kept"
    tab.value("window.fetch = real")
    tab.until(f"{READY} && {COMPLETE} && document.querySelector('#absence').hidden")
    assert tab.value(TEXT) == "Hello world é!" and len(scripted.asked) == 1


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
    reopen(tab)
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
    answered(tab, "With")
    assert scripted.asked[-1]["response_format"]["json_schema"]["schema"] == {"type": "objekt"}
    tab.click("[data-do=new]")
    assert not tab.value(chip)
    answered(tab, "Without")
    assert "response_format" not in scripted.asked[-1]
    reload(tab)
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
