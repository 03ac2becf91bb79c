"""What a person does with conversations in the page, in a real browser: versions, names, files of them, tools."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, find_browser
from chat_page import COMPLETE, TEXT, answered, ask, put, reload, stored
from edgespec.server.answer import DONE, sse
from scripted_page import Scripted, part
from waiting import until

pytestmark = pytest.mark.skipif(find_browser() is None, reason="neither chromium nor chrome is installed")
TITLES = "[...document.querySelectorAll('#conversations li button:first-child')].map((e) => e.textContent)"
SHOWN = "[...document.querySelectorAll('article .text')].map((e) => e.textContent)"


def answer(text: str) -> list[bytes]:
    return [sse(part(text, finish="stop")), DONE]


def test_answering_again_and_editing_keep_what_was_there(tab: Browser, scripted: Scripted):
    scripted.parts, scripted.later = answer("one"), [answer("two"), answer("three"), answer("four")]
    answered(tab, "Hi")
    tab.press("r", "KeyR", alt=True)
    tab.until(f"{COMPLETE} && {TEXT} === 'two'")
    assert tab.text(".assistant .versions") == "2/2"
    ask(tab, "More")
    tab.until(f"{COMPLETE} && {TEXT} === 'three'")
    tab.click("article:nth-of-type(2) [aria-label='Earlier version']")
    assert tab.value(SHOWN) == ["Hi", "one"]
    tab.click(".user [aria-label='Edit and send again']")
    tab.write(" there")
    tab.press("Enter")
    tab.until(f"{COMPLETE} && {TEXT} === 'four'")
    assert [each["content"] for each in scripted.asked[-1]["messages"]] == ["Hi there"]
    reload(tab)
    assert tab.value(SHOWN) == ["Hi there", "four"] and tab.text(".user .versions") == "2/2"
    tab.click(".user [aria-label='Earlier version']")
    assert tab.value(SHOWN) == ["Hi", "two", "More", "three"]  # what came last behind it
    assert tab.value("document.querySelector('.user [aria-label=\"Earlier version\"]').disabled")
    until(lambda: stored(tab)[0]["head"] == 4)
    assert [each["parent"] for each in stored(tab)[0]["messages"]] == [-1, 0, 0, 2, 3, -1, 5]
    tab.click("article:last-of-type [aria-label='Edit the answer']")
    tab.write(", corrected")
    tab.press("Enter")  # a line, since nothing is sent
    tab.click("article:last-of-type .primary")
    assert tab.value(SHOWN)[-1].strip() == "three, corrected"
    assert tab.text("article:last-of-type .versions") == "2/2" and len(scripted.asked) == 4


def test_a_conversation_has_an_address(tab: Browser, scripted: Scripted):
    scripted.parts = answer("one")
    answered(tab, "First")
    first = tab.value("location.hash")
    tab.click("[data-do=new]")
    assert tab.value("location.hash") == ""
    answered(tab, "Second")
    assert tab.value("location.hash") not in ("", first)
    tab.value("history.go(-2)")
    tab.until(f"location.hash === {json.dumps(first)} && document.querySelector('.user .text').textContent === 'First'")
    reload(tab)
    assert tab.value(SHOWN) == ["First", "one"] and tab.value("document.querySelectorAll('li.current').length") == 1
    tab.value("location.hash = '#/chat/none'")
    tab.until("document.querySelector('#status').textContent === 'This conversation is not in this browser.'")
    assert tab.value(SHOWN) == [] and tab.value("location.hash") == ""


def test_an_answer_goes_on_while_another_conversation_is_read(tab: Browser, scripted: Scripted):
    gate, end = threading.Event(), threading.Event()
    first = [sse(part("one ")), gate, sse(part("two ")), end, sse(part("three", finish="stop")), DONE]
    scripted.parts, scripted.later = first, [answer("other")]
    ask(tab, "First")
    tab.until("document.querySelector('.running .text').textContent === 'one '")
    tab.click("[data-do=new]")
    assert tab.value("document.querySelector('#stop').hidden")
    ask(tab, "Second")
    tab.until(f"{COMPLETE} && {TEXT} === 'other'")
    assert tab.value("document.querySelectorAll('li.answering').length") == 1
    gate.set()
    tab.click("li.answering button")
    tab.until("document.querySelector('.running .text')?.textContent === 'one two '")
    assert not tab.value("document.querySelector('#stop').hidden")
    end.set()
    tab.until(f"{COMPLETE} && {TEXT} === 'one two three' && document.querySelector('#stop').hidden")
    until(lambda: sorted(each["messages"][1]["content"] for each in stored(tab)) == ["one two three", "other"])
    scripted.parts = [sse(part("never")), threading.Event(), DONE]
    ask(tab, "Third")
    tab.until("document.querySelector('.running .text').textContent === 'never'")
    tab.value("document.querySelector('li.answering [aria-label=Delete]').click()")
    tab.click("#ask-yes")
    tab.until("document.querySelectorAll('#conversations li').length === 1 && !document.querySelector('article')")
    scripted.parts[1].set()


def test_search_and_names(tab: Browser, scripted: Scripted):
    put(tab, "A bus to Fresno", "At noon.", id="a", updated=1)
    put(tab, "Cats", "They purr.", id="b", updated=2)
    reload(tab)
    assert tab.value(TITLES) == ["Cats", "A bus to Fresno"]
    tab.press("k", "KeyK", alt=True)
    tab.until("document.activeElement.id === 'search'")
    tab.write("NOON bus")
    assert tab.value(TITLES) == ["A bus to Fresno"]
    tab.value("document.querySelector('#conversations [aria-label=Rename]').click()")
    tab.write("Travel")
    tab.press("Enter")
    tab.until(f"{TITLES}[0] === 'Travel'")
    until(lambda: "Travel" in [each["title"] for each in stored(tab)])
    tab.value("document.querySelector('#search').focus()")
    tab.press("Escape")
    assert tab.value(TITLES) == ["Travel", "Cats"]
    tab.value("document.querySelector('#conversations [aria-label=Rename]').click()")
    tab.write("Never")
    tab.press("Escape")
    assert tab.value(TITLES) == ["Travel", "Cats"]


FILE = {"type": "textFile", "name": "a.txt", "content": "text"}
LLAMACPP = {
    "conv": {"id": "c", "name": "From llama.cpp", "currNode": "m2", "lastModified": 5},
    "messages": [
        {"id": "r", "type": "root", "role": "system", "content": "", "parent": None},
        {"id": "m1", "type": "text", "role": "user", "content": "Q", "parent": "r", "extra": [FILE]},
        {"id": "m2", "type": "text", "role": "assistant", "content": "A", "parent": "m1"},
        {"id": "m3", "type": "text", "role": "assistant", "content": "B", "parent": "m1"},
    ],
}
WRONG: list[Any] = [
    {"messages": [{"role": "user", "content": "x", "parent": 5}]},
    {"messages": [{"role": "user", "content": ["no text"]}]},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": "none"},
    7,
]


def test_what_is_exported_comes_back_and_other_files_too(tab: Browser, scripted: Scripted, tmp_path: Path):
    scripted.parts, scripted.later = answer("one"), [answer("two")]
    answered(tab, "Hi")
    tab.press("r", "KeyR", alt=True)
    tab.until(f"{COMPLETE} && {TEXT} === 'two'")
    until(lambda: len(stored(tab)[0]["messages"]) == 3)
    before = stored(tab)
    tab.value("window.saved = null; URL.createObjectURL = (blob) => { window.saved = blob; return 'blob:none'; }")
    tab.value("HTMLAnchorElement.prototype.click = () => {}")
    tab.value("document.querySelector('[data-do=export-all]').click()")
    (tmp_path / "all.json").write_text(tab.value("saved.text()"))
    tab.value("document.querySelector('[data-do=delete-all]').click()")
    tab.click("#ask-yes")
    tab.until("!document.querySelector('#conversations li')")
    tab.choose_files("#import", tmp_path / "all.json")
    tab.until(f"document.querySelector('.assistant') && {TEXT} === 'two'")
    assert stored(tab) == before
    (tmp_path / "llamacpp.json").write_text(json.dumps([LLAMACPP]))
    tab.choose_files("#import", tmp_path / "llamacpp.json")
    tab.until(f"{TITLES}.includes('From llama.cpp') && {TEXT} === 'A'")
    assert tab.text(".assistant .versions") == "1/2" and tab.text(".user .chip").startswith("a.txt")
    (tmp_path / "list.json").write_text(json.dumps([{"role": "user", "content": "Listed"}]))
    (tmp_path / "wrong.json").write_text(json.dumps(WRONG))
    (tmp_path / "no.json").write_text("{")
    tab.choose_files("#import", tmp_path / "list.json", tmp_path / "no.json")
    tab.until(f"{TITLES}.includes('Listed')")
    count = len(stored(tab))
    tab.choose_files("#import", tmp_path / "wrong.json", tmp_path / "no.json")
    tab.until("document.querySelector('#status').textContent === 'No conversation was found in this file.'")
    assert len(stored(tab)) == count


def test_the_prompt_is_read_before_thoughts_and_the_answer(tab: Browser, scripted: Scripted):
    read, thought = threading.Event(), threading.Event()
    progress = {"total": 2000, "cache": 0, "processed": 500, "time_ms": 10}
    timings = {"prompt_n": 500, "cache_n": 300, "predicted_n": 150, "predicted_ms": 2500.0, "predicted_per_second": 60}
    told = {"choices": [{"index": 0, "delta": {"reasoning_content": "Let me see."}}], "timings": timings}
    scripted.parts = [sse({"choices": [{"delta": {}}], "prompt_progress": progress}), read, sse(told), thought]
    scripted.parts = [*scripted.parts, sse(part("Yes.", finish="stop") | {"timings": timings}), DONE]
    ask(tab, "Why?")
    tab.until("document.querySelector('.reading progress')?.value === 500")
    assert tab.text(".reading") == "Reading the prompt: 500 of 2,000 tokens"
    read.set()
    tab.until("document.querySelector('.assistant .reasoning summary').textContent === 'Thinking…'")
    assert not tab.value("document.querySelector('.assistant .reasoning').open") and not tab.text(".reading")
    thought.set()
    tab.until(COMPLETE)
    assert tab.text(".assistant .reasoning summary") == "Thought for 2.5 s"
    assert tab.text(".assistant .reasoning div") == "Let me see."
    assert tab.text("#context") == "Context: 950 of 1,000 tokens (95%)"
    assert scripted.asked[-1]["return_progress"] is True


def test_thinking_is_switched_where_the_template_can(tab: Browser, scripted: Scripted):
    scripted.parts = answer("one")
    for expected in (True, False):
        answered(tab, "Hi")
        assert scripted.asked[-1]["chat_template_kwargs"] == {"enable_thinking": expected}
        assert "reasoning" not in scripted.asked[-1]["messages"][-1]
        tab.press("t", "KeyT", alt=True)
    assert tab.value("document.querySelector('#thinking').getAttribute('aria-pressed')") == "true"


def test_tools_are_offered_called_and_answered(tab: Browser, scripted: Scripted):
    weather = {"name": "get_weather", "parameters": {"type": "object"}}
    tab.value("document.querySelector('#tools-box').open = true")
    tab.value("document.querySelector('#s-tools').focus()")
    tab.write(json.dumps([weather]))
    assert tab.text("#tools-name") == "Tools"
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    calls = [{**call}, {"index": 0, "function": {"arguments": '{"city": "Bern"}'}}]
    parts = [sse({"choices": [{"index": 0, "delta": {"tool_calls": [each]}}]}) for each in calls]
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    scripted.parts, scripted.later = [*parts, sse(ended), DONE], [answer("Sunny.")]
    ask(tab, "Weather?")
    tab.until("document.querySelector('.results textarea')")
    assert scripted.asked[0]["tools"] == [{"type": "function", "function": weather}]
    assert tab.text(".calls summary") == "Callget_weather"
    assert json.loads(tab.text(".calls pre")) == {"city": "Bern"}
    tab.value("document.querySelector('.results textarea').focus()")
    tab.write("21 degrees")
    tab.click(".results button")
    tab.until(f"{COMPLETE} && {TEXT} === 'Sunny.'")
    made = {**call, "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    del made["index"]
    assert scripted.asked[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "21 degrees", "tool_call_id": "call_1"},
    ]
    reload(tab)
    assert tab.value("document.querySelectorAll('article').length") == 4 and not tab.text(".results")
