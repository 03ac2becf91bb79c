"""What tests of the chat page look for in it, and how they write to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from browser import Browser

READY = "document.querySelector('#state').dataset.state === 'ready'"
COMPLETE = "!document.querySelector('.running') && document.querySelector('.assistant .meta button')"
TEXT = "[...document.querySelectorAll('.assistant > .text')].at(-1).textContent"
STORED = """new Promise((resolve) => {
  const opening = indexedDB.open("edgespec");
  opening.onsuccess = () => {
    const asked = opening.result.transaction("conversations").objectStore("conversations").getAll();
    asked.onsuccess = () => { opening.result.close(); resolve(asked.result); };
  };
})"""


def stored(browser: Browser) -> list[dict[str, Any]]:
    """The conversations in the browser's database."""
    found: list[dict[str, Any]] = browser.value(STORED)
    return found


def forget(browser: Browser) -> None:
    """Remove all conversations and preferences, and load the page anew."""
    code = "for (const { id } of s.conversations()) await s.removeConversation(id); localStorage.clear()"
    browser.value(f"import('/static/store.js').then(async (s) => {{ {code} }})")
    browser.value("history.replaceState(null, '', '/')")
    reload(browser)


@contextmanager
def watched(browser: Browser, url: str) -> Iterator[None]:
    """The page without stored conversations; in the block it complains of nothing and asks nobody else."""
    browser.failures.clear()
    browser.requested.clear()
    browser.open(url)
    browser.until(READY)
    forget(browser)
    yield
    assert browser.failures == []
    assert [each for each in browser.requested if not each.startswith((url, "data:", "blob:"))] == []


def put(browser: Browser, *contents: str, **fields: Any) -> dict[str, Any]:
    """Store a conversation of the user and the model in turns, as another page of the browser would."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": each} for place, each in enumerate(contents)]
    value = {"id": "x", "messages": messages} | fields
    code = (
        f"Promise.all(['store', 'thread'].map((each) => import(`/static/${{each}}.js`))).then(([s, t]) => "
        f"s.putConversation(t.readConversation({json.dumps(value)})))"
    )
    assert browser.value(code)
    return value


def choose(browser: Browser, **fields: Any) -> None:
    """Write into fields of the panel."""
    for name, value in fields.items():
        browser.value(f"document.querySelector('[name={name}]').focus()")
        browser.write(str(value))


def set_schema(browser: Browser, text: str) -> None:
    """Write into the schema's field."""
    browser.value("document.querySelector('#schema-box').open = true")
    browser.value("document.querySelector('#s-schema').focus()")
    browser.write(text)


def ask(browser: Browser, text: str) -> None:
    """Send a message; return once its answer has begun."""
    count = browser.value("document.querySelectorAll('.assistant').length")
    browser.value("document.querySelector('#prompt').focus()")
    browser.write(text)
    browser.press("Enter")
    browser.until(f"document.querySelectorAll('.assistant').length > {count}")


def answered(browser: Browser, text: str) -> None:
    """Send a message; return once its answer is complete."""
    ask(browser, text)
    browser.until(COMPLETE)


def reload(browser: Browser) -> None:
    browser.reload()
    browser.until(READY)


def reopen(browser: Browser) -> None:
    """Load the page anew, and open the latest conversation."""
    reload(browser)
    browser.click("#conversations li button")
