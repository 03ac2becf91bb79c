"""What tests of the chat page look for in it, and how they write to it."""

from __future__ import annotations

from typing import Any

from browser import Browser

READY = "document.querySelector('#state').dataset.state === 'ready'"
COMPLETE = "!document.querySelector('.running') && document.querySelector('.assistant .meta button')"
TEXT = "[...document.querySelectorAll('.assistant .text')].at(-1).textContent"


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
