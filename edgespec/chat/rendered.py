"""The text of a conversation as the chat template renders it, for programs that send it back as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from edgespec.chat.call_ids import wants_short_ids, with_short_ids
from edgespec.chat.continuation import USUAL_ENDING, Ending, cut_at, marked, without_empty_end
from edgespec.chat.history import checked_messages
from edgespec.chat.stand_ins import texts, unused_characters
from edgespec.chat.template import render_chat
from edgespec.errors import PromptError
from edgespec.vocabulary import Vocabulary


def chat_text(
    vocabulary: Vocabulary,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    ending: Ending = USUAL_ENDING,
) -> str:
    """The rendered text, without a token at its beginning that encoding puts there again.

    It ends behind an assistant's text at the end of the conversation, as in `encode_messages`.
    Control tokens are spelled out, those in messages too: unlike in `encode_messages` these can forge a turn.
    Raises PromptError without a template or where it leaves that text out, and the errors of `render_chat`.
    """
    source = vocabulary.chat_template
    if source is None:
        raise PromptError("this model has no chat template")
    bos, eos = (
        "" if token_id is None else vocabulary.token_name(token_id)
        for token_id in (vocabulary.bos_id, vocabulary.eos_id)
    )
    given = without_empty_end(checked_messages(messages))
    given = with_short_ids(given) if wants_short_ids(source) else given
    render = partial(render_chat, source, tools=tools, bos_token=bos, eos_token=eos, arguments=arguments)
    if ending.is_begun(given[-1]):
        (end,) = unused_characters(1, "\0".join(texts([given, list(tools or ()), dict(arguments or {})])))
        text = cut_at(render(marked(given, end), add_generation_prompt=False), end)
    else:
        text = render(given, add_generation_prompt=ending.opens)
    return text.removeprefix(bos) if vocabulary.adds_bos else text
