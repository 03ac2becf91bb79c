"""Stop rules, and the text that can be shown before a stop string is complete."""

from __future__ import annotations

import pytest

from edgespec.errors import VocabularyMismatch
from edgespec.sampling.stopping import StopRules, TextStream
from edgespec.vocabulary import Vocabulary, check_same_vocabulary


class Bytes(Vocabulary):
    """256 byte tokens and one end token."""

    def __init__(self, names: dict[int, str] | None = None, size: int = 257) -> None:
        self.size, self.bos_id, self.end_ids, self.adds_bos = size, None, frozenset({256}), False
        self.chat_template = None
        self._names = names or {}

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_name(self, token_id: int) -> str:
        return self._names.get(token_id, f"<{token_id}>")


def shown(text: str | bytes, *stops: str, max_tokens: int | None = None) -> tuple[list[str], str | None]:
    stream = TextStream(Bytes(), StopRules(frozenset({256}), stops, max_tokens))
    pieces, reason = [], None
    for token_id in text.encode() if isinstance(text, str) else text:
        piece, reason = stream.push(token_id)
        pieces.append(piece)
        if reason:
            break
    return pieces, reason


def test_text_ends_before_the_earliest_stop_string() -> None:
    pieces, reason = shown("one STOP two", "STOP", "OP")
    assert ("".join(pieces), reason) == ("one ", "stop")


def test_a_possible_stop_string_is_held_back_and_released_when_it_is_none() -> None:
    pieces, reason = shown("a<<b", "<<<")
    assert pieces == ["a", "", "", "<<b"]
    assert reason is None


def test_overlapping_beginnings_hold_back_the_longest() -> None:
    pieces, reason = shown("aabaac", "aabaac")
    assert ("".join(pieces), reason) == ("", "stop")
    pieces, _ = shown("aabaab", "aabaac")
    assert "".join(pieces) == "aab"


def test_split_utf8_waits_and_an_incomplete_one_ends_as_replacement() -> None:
    assert shown("é")[0] == ["", "é"]
    assert shown("🦊".encode()[:2], max_tokens=2) == (["", "\ufffd"], "length")


def test_max_tokens_releases_what_was_held() -> None:
    assert shown("ab<", "<stop>", max_tokens=3) == (["a", "b", "<"], "length")


def test_end_token_prints_nothing_and_stops() -> None:
    stream = TextStream(Bytes(), StopRules(frozenset({256}), ("zz",)))
    assert stream.push(ord("z")) == ("", None)
    assert stream.push(256) == ("z", "stop")


def test_vocabulary_mismatch_names_the_first_token_that_differs() -> None:
    with pytest.raises(VocabularyMismatch, match=r"token 7 is '<7>' in the target and 'seven' in the draft"):
        check_same_vocabulary(Bytes(), Bytes({7: "seven", 9: "nine"}))
    check_same_vocabulary(Bytes(), Bytes(size=300))
