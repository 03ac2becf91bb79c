"""llama-server's `/infill`, which editors use to complete code: fills the gap between two texts."""

from __future__ import annotations

from functools import partial
from typing import Any

from edgespec.server.exchange import Exchange
from edgespec.server.fields import Fields
from edgespec.server.fim import ExtraFile, fitted, require_fim
from edgespec.server.http_errors import bad_request
from edgespec.server.native import read_form
from edgespec.server.native_answer import Prompt
from edgespec.server.service import Loaded
from edgespec.vocabulary import FimTokens

_MOST_FILES = 1024
_LEAST_ANSWER = 256  # tokens kept free for an answer of unlimited length, where the context allows


def read_infill(loaded: Loaded, fields: Fields) -> Exchange:
    """Check a request and encode its prompt. Blocks meanwhile. Raises HttpError and EdgespecError."""
    read_prompt = partial(_read_prompt, require_fim(loaded, "/infill"))
    return read_form(loaded, fields, read_prompt, any_order=True)  # editors send "infill", which is not built in


def _read_prompt(tokens: FimTokens, loaded: Loaded, fields: Fields, max_tokens: int | None) -> list[Prompt]:
    before, after = fields.text("input_prefix"), fields.text("input_suffix")
    begun = fields.text("prompt") or ""  # what the user has typed of the answer
    for name, text in (("input_prefix", before), ("input_suffix", after)):
        if text is None:
            raise bad_request(f"{name} is missing: give the text on that side of the gap, which may be empty", name)
    files = [_read_file(each, index) for index, each in enumerate(fields.listed("input_extra", _MOST_FILES) or ())]
    vocabulary, length = loaded.model.target.vocabulary, loaded.model.context_length
    reserve = min(max_tokens or loaded.options.max_tokens or _LEAST_ANSWER, length // 4)
    before_ids, after_ids = vocabulary.encode((before or "") + begun), vocabulary.encode(after or "")
    ids, is_cut = fitted(vocabulary, tokens, before_ids, after_ids, files, length - reserve)
    shown = b"".join(vocabulary.piece(each) or vocabulary.token_name(each).encode() for each in ids)
    return [Prompt(ids, shown.decode("utf-8", "replace"), is_cut)]


def _read_file(given: Any, index: int) -> ExtraFile:
    where = f"input_extra.{index}"
    if not isinstance(given, dict):
        raise bad_request(f'{where} must be {{"filename": ..., "text": ...}}', where)
    file = Fields(given, where)
    name, text = file.text("filename"), file.text("text")
    file.ignore("time")  # llama.vim's note of when it took the text
    file.finish()
    if text is None:
        raise bad_request(f"{where}.text is missing: give the text of the file", f"{where}.text")
    return ExtraFile(name or "file", text)
