"""What the page makes of Markdown, formulas, code and files, in a real browser; with the libraries and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.responses import Response
from starlette.routing import Route

from browser import Browser, find_browser
from chat_page import COMPLETE, READY, TEXT, answered, ask, forget, put
from edgespec.server.answer import DONE, sse
from edgespec.server.app import page_routes
from scripted_page import Scripted, part, scripted_server

HAS_LIBRARIES = any(route.path == "/static/vendor/marked.js" for route in page_routes())
NO_LIBRARIES = "the page's libraries are not here: python scripts/vendor_page.py"
pytestmark = pytest.mark.skipif(find_browser() is None, reason="neither chromium nor chrome is installed")
with_libraries = pytest.mark.skipif(not HAS_LIBRARIES, reason=NO_LIBRARIES)
DOCUMENT = r"""## A *title*

Some ~~old~~ text, a bare https://example.org/a, `code`, <b>no HTML</b>, 1 &lt; 2 and 5 \* 3.

- [x] done
- [ ] to **do**
  1. inner
     - deepest

     with a paragraph

A line costs $5 or $10, and $a^2 + b^2 = c^2$ is a formula; \(\frac{1}{2}\) too.

\[
\sum_{i=1}^n i = \frac{n(n+1)}{2}
\]

$$ \href{https://evil.example}{x} \htmlClass{a}{y} $$

| left | right |
|:-----|------:|
| `a`  | 1 \| 2 |

3. three

   ```python
   def f(x):
       return "a" + x  # comment
   ```

![picture](https://elsewhere.example/p.png) [bad](javascript:alert(1)) <img src=x onerror=alert(1)>

<script>document.title = "gone"</script>

> quoted
> twice
"""


HOSTILE = '<img src=x onerror="document.title=1"> <b>bold</b> [a](javascript:alert(1))'


def count(tab: Browser, selector: str) -> int:
    """How many elements of the answer match."""
    code = f"document.querySelector('.assistant .text').querySelectorAll({json.dumps(selector)}).length"
    return int(tab.value(code))


def shown(tab: Browser, source: str, **message: object) -> None:
    messages = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": source} | message]
    put(tab, messages=messages)
    tab.value("location.hash = '#/chat/x'")
    tab.until("document.querySelectorAll('article').length === 2")


@with_libraries
def test_a_document_with_all_of_it(tab: Browser, scripted: Scripted):
    shown(tab, DOCUMENT)
    wanted = {"h4 em": 1, "del": 1, "input[type=checkbox]": 2, "input:checked": 1, "li.task > strong": 1}
    wanted |= {"ul > li > ol > li > ul > li": 1, "a": 2, "td.to-right": 1, ".math .katex-display": 2}
    wanted |= {".hljs-keyword": 2, ".hljs-string": 1, ".hljs-comment": 1, "blockquote": 1, "ol[start='3'] pre": 1}
    wanted |= {"img, script, b": 0, "[style*=url], a[href*=evil], a[href^=javascript]": 0}
    assert {each: count(tab, each) for each in wanted} == wanted
    assert count(tab, ".katex") == 4  # what names an address or a class is shown as text in one
    text = tab.value(TEXT)
    plain = ("<b>no HTML</b>", "1 < 2 and 5 * 3", "$5 or $10", "1 | 2", "onerror=alert(1)", 'document.title = "gone"')
    assert [each for each in plain if each not in text] == []
    assert tab.text("pre > code") == 'def f(x):\n    return "a" + x  # comment'
    assert tab.value("[...document.querySelectorAll('.text a')].map((a) => [a.textContent, a.href, a.rel])") == [
        ["https://example.org/a", "https://example.org/a", "noopener noreferrer nofollow"],
        ["picture", "https://elsewhere.example/p.png", "noopener noreferrer nofollow"],
    ]
    assert tab.text(".user .text") == HOSTILE and tab.value("document.title") == "scripted"


@with_libraries
def test_drafted_parts_are_marked_wherever_they_are(tab: Browser, scripted: Scripted):
    """Every text comes from the source, so that of a document that one drafter proposed all is marked."""
    shown(tab, DOCUMENT, runs=[[len(DOCUMENT), "ngram"]])
    unmarked = tab.value("""(() => {
        const walker = document.createTreeWalker(document.querySelector(".assistant .text"), NodeFilter.SHOW_TEXT);
        const found = [];
        while (walker.nextNode()) {
            const { parentElement: owner, data } = walker.currentNode;
            if (!owner.closest(".t, .katex, .code-head") && data.trim()) found.push(data);
        }
        return found;
    })()""")
    assert unmarked == ["<", "1 | 2"]  # the source has &lt; and 1 \| 2 for them
    start = DOCUMENT.index('return "a"')
    runs = [[start, None], [len('return "a"'), "suffix"], [len(DOCUMENT) - start - len('return "a"'), None]]
    shown_again = {"id": "y", "messages": [{"role": "assistant", "content": DOCUMENT, "runs": runs}]}
    put(tab, **shown_again)
    tab.value("location.hash = '#/chat/y'")
    tab.until("document.querySelectorAll('article').length === 1")
    assert tab.value("[...document.querySelectorAll('.t')].map((e) => e.textContent).join('')") == 'return "a"'


@with_libraries
def test_a_document_that_grows_ends_as_it_is_drawn_at_once(tab: Browser, scripted: Scripted):
    scripted.parts = [*(sse(part(DOCUMENT[at : at + 7], "ngram")) for at in range(0, len(DOCUMENT), 7)), DONE]
    answered(tab, "Hi")
    drawn = "document.querySelector('.assistant .text').innerHTML"
    grown = tab.value(drawn)
    tab.reload()
    tab.until(f"{READY} && document.querySelectorAll('article').length === 2")
    assert tab.value(drawn) == grown


ENDLESS = {
    "emphasis": "*a **b " * 3000,
    "formulas": "\\(" * 10000,
    "macros": r"$\def\a{\a\a}\a$",
    "calls": "<tool_call>" * 3000,
    "entities": "&amp;" * 5000 + "&#x110000;&#0;&nothing;",
    "code": "```python\n" + "((((((((((" * 1000,
    "returns": "a\r\n\r\n```\r\nb\rc\r\n```\r\n",
    "half a pair": "\ud83d and \ud83d\ude00",
}
TURNED = {"calls": "Call<tool_call><tool_call>", "entities": "&&&&\ufffd\ufffd&nothing;", "returns": "b\rc"}


@with_libraries
@pytest.mark.parametrize("name", ENDLESS)
def test_what_a_model_writes_without_end_is_drawn(tab: Browser, scripted: Scripted, name: str):
    source = ENDLESS[name]
    shown(tab, source, runs=[[len(source) // 2, "ngram"], [5, None]])
    text = tab.value("document.querySelector('.assistant > .text').textContent")
    if name in TURNED:
        assert TURNED[name] in text
    else:
        assert "".join(filter(str.isalnum, text)) == "".join(filter(str.isalnum, source))
    ask(tab, "Go on")  # the page still works
    tab.until(COMPLETE)


@pytest.fixture(scope="module", params=["no libraries", "broken libraries"])
def plain(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    """A server whose page lacks the libraries, as one that was installed without a network has it."""

    async def told(_: object) -> Response:
        names = "" if request.param == "no libraries" else '"marked", "pdf"'
        return Response(f"export const libraries = [{names}];", media_type="text/javascript")

    async def absent(_: object) -> Response:
        return Response(status_code=404)

    routes = [Route("/static/libraries.js", told), Route("/static/vendor/{name:path}", absent)]
    with scripted_server(*routes) as found:
        yield found


def test_a_page_without_the_libraries_works(running: Browser, plain: Scripted, tmp_path: Path):
    running.failures.clear()
    running.open(plain.url)
    running.until(READY)
    forget(running)
    shown(running, DOCUMENT)
    for selector in ("h4 em", "blockquote", "table code", "ul > li", "pre > code"):
        assert count(running, selector) >= 1, selector
    assert count(running, "img, script, b") == 0
    (tmp_path / "a.pdf").write_bytes(PDF)
    running.choose_files("#file-input", tmp_path / "a.pdf")
    running.until("document.querySelector('#status').textContent.startsWith('a.pdf: ')")
    assert running.failures == []


# -- files

PDF = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>endobj\n"
    b"4 0 obj<</Length 51>>stream\nBT /F 12 Tf 20 100 Td (The word is marzipan.) Tj ET\nendstream endobj\n"
    b"5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj\ntrailer<</Root 1 0 R>>\n"
)
CHIPS = "[...document.querySelectorAll('#files .chip')].map((e) => e.firstChild.firstChild.textContent)"
PASTE = """(() => {{
    const data = new DataTransfer();
    data.setData("text/plain", "word ".repeat({count}));
    const event = new ClipboardEvent("paste", {{ clipboardData: data, cancelable: true, bubbles: true }});
    return document.querySelector("#prompt").dispatchEvent(event);
}})()"""
DROP = """for (const type of ["dragenter", "dragover", "drop"]) {
    const data = new DataTransfer();
    data.items.add(new File(["dropped text"], "dropped.md"));
    const given = { dataTransfer: data, bubbles: true, cancelable: true };
    document.querySelector("#scroll").dispatchEvent(new DragEvent(type, given));
}"""


def test_files_are_read_shown_sent_and_kept(tab: Browser, scripted: Scripted, tmp_path: Path):
    (tmp_path / "notes.txt").write_bytes("one ```\r\ntwo é".encode())
    (tmp_path / "utf16.txt").write_bytes("wide é".encode("utf-16"))
    (tmp_path / "latin.txt").write_bytes("old é".encode("latin-1"))
    (tmp_path / "x.bin").write_bytes(bytes(range(256)))
    names = ("notes.txt", "utf16.txt", "latin.txt", "x.bin")
    tab.choose_files("#file-input", *(tmp_path / name for name in names))
    tab.until(f"{CHIPS}.length === 3 && document.querySelector('#status').textContent")
    assert tab.text("#status") == "x.bin: Only text files and PDFs can be read."
    tab.value(DROP)
    tab.until(f"{CHIPS}.length === 4")
    assert tab.value(PASTE.format(count=10)) is True  # a short text goes into the field
    assert tab.value(PASTE.format(count=1000)) is False
    tab.until(f"{CHIPS}.length === 5")
    assert tab.value(CHIPS) == ["notes.txt", "utf16.txt", "latin.txt", "dropped.md", "pasted.txt"]
    tab.click("#files .chip:nth-child(5) button:nth-of-type(2)")
    tab.click("#files .chip:first-child button")
    tab.until("document.querySelector('#file-dialog').open")
    assert tab.text("#file-text") == "one ```\ntwo é"
    tab.press("Escape")
    scripted.parts = [sse(part("Read.", finish="stop")), DONE]
    answered(tab, "What is in them?")
    assert tab.value(CHIPS) == []
    told = [("notes.txt", "one ```\ntwo é", "````"), ("utf16.txt", "wide é", "```"), ("latin.txt", "old é", "```")]
    told.append(("dropped.md", "dropped text", "```"))
    files = [f"File {name}:\n{fence}\n{text}\n{fence}" for name, text, fence in told]
    assert scripted.asked[0]["messages"][0]["content"] == "\n\n".join([*files, "What is in them?"])
    tab.reload()
    tab.until(f"{READY} && document.querySelectorAll('.user .chip').length === 4")


@with_libraries
def test_the_text_of_a_pdf_is_read_here(tab: Browser, scripted: Scripted, tmp_path: Path):
    (tmp_path / "a.pdf").write_bytes(PDF)
    (tmp_path / "b.pdf").write_bytes(b"%PDF-1.4 nothing")
    tab.choose_files("#file-input", tmp_path / "a.pdf", tmp_path / "b.pdf")
    tab.until(f"{CHIPS}.length === 1 && document.querySelector('#status').textContent")
    assert tab.text("#status") == "b.pdf: It cannot be read as a PDF."
    scripted.parts = [sse(part("Read.", finish="stop")), DONE]
    answered(tab, "The word?")
    assert json.dumps("The word is marzipan.")[1:-1] in json.dumps(scripted.asked[0])
