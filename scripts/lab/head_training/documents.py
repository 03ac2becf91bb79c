"""Prompts about given texts: passages of the instructions, alone or several in a row, and dialogues.

A head learns from them to copy: what a summary or an answer says stands in the prompt, hundreds of tokens before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

LEAST_PASSAGE = 40  # words
SHORTEST, LONGEST = 60, 620  # words of a document, about 1.4 tokens each
LONGEST_QUESTION = 24  # words
OPEN = "\n\nQuestion:"  # behind which the target makes up a question

SUMMARIES: Final = (
    *("Summarize: {}", "Summarize the following article.\n\n{}", "{}\n\nTL;DR", "Summarise in three sentences:\n{}"),
    *("Please write a short summary of the text below.\n\n{}", "{}\n\nGive the main points as a list.", "Shorten: {}"),
    *("What is this text about?\n\n{}", "Write a headline and one paragraph that sum up this report:\n\n{}"),
    *("Here is a document:\n\n{}\n\nSummarize it for somebody who is in a hurry.", "{}\n\nSum up the above."),
)
TASKS: Final = (
    *("Extract all names of people, places and organisations from this text as JSON:\n\n{}", "Rewrite politely:\n\n{}"),
    *("List the facts and numbers in the text, one per line.\n\n{}", "{}\n\nIs the author in favour or against? Why?"),
    *("Read this and rate from 1 to 5 how positive it is, with a reason:\n\n{}", "Correct the grammar of this:\n\n{}"),
    *("{}\n\nWrite three questions about this text and answer each.", "Repeat the first paragraph of this:\n\n{}"),
    *("Put the following into a table with two columns:\n\n{}", "Explain the following to a child:\n\n{}"),
    *("Which sentences of the text are the most important? Quote them.\n\n{}", "{}\n\nContinue this text."),
)
GIVEN: Final = (
    *("{}\n\nQuestion: {}", "{}\n\nUse the passages above to answer: {}", "Context:\n{}\n\nQ: {}\nA:"),
    *("Answer the question from the documents.\n\n{}\n\nQuestion: {}\nAnswer:", "Question: {1}\n\nDocuments:\n{0}"),
    *("Read:\n\n{}\n\n{}", "{}\n\nWith the given information, answer the question in full sentences.\n{}"),
)
QUESTIONS: Final = (
    *("What happened, and who was involved?", "What is the most surprising fact here?", "Where does this take place?"),
    *("What does the text say about the cause?", "Which of these texts has to do with science?", "Who is mentioned?"),
    *("What do the passages have in common?", "What would you do in this situation?", "When did it happen?"),
    *("Why is this important?", "How does it end?", "What is the first passage about?", "What are the numbers?"),
)
NUMBERED: Final = ("[{}] {}", "{}. {}", "Passage {}: {}", "Document {}:\n{}")


class Documents:
    """Of `instructions` and `dialogues`, the rows of the data files."""

    def __init__(self, instructions: Sequence[dict[str, Any]], dialogues: Sequence[dict[str, Any]]) -> None:
        self._passages: list[str] = []
        self._asked: dict[str, str] = {}  # the question that came with a passage
        self._dialogues = dialogues
        for row in instructions:
            lines = [line.strip() for line in row["prompt"].split("\n")]
            questions = [line for line in lines if line.endswith("?") and len(line.split()) <= LONGEST_QUESTION]
            for line in lines:
                if len(line.split()) >= LEAST_PASSAGE and line not in self._asked:
                    self._passages.append(line)
                    self._asked[line] = questions[-1] if questions else ""

    def prompts(self, rng: random.Random, count: int) -> Iterator[tuple[str, bool]]:
        """What a user says, and whether the target has to end it with a question."""
        for _ in range(count):
            chosen = rng.random()
            if chosen < 0.1:
                yield rng.choice(SUMMARIES).format(self._dialogue(rng)), False
                continue
            passages = self._drawn(rng)
            joined = "\n\n".join(passages)
            if chosen < 0.4:
                yield rng.choice(SUMMARIES).format(joined), False
            elif chosen < 0.55:
                yield rng.choice(TASKS).format(joined), False
            elif chosen < 0.7:
                yield self._listed(rng, passages) + OPEN, True
            else:
                about = self._asked[rng.choice(passages)] or rng.choice(QUESTIONS)
                yield rng.choice(GIVEN).format(self._listed(rng, passages), about), False

    def _drawn(self, rng: random.Random) -> list[str]:
        """Passages of some length in all."""
        wanted, found = rng.randrange(SHORTEST, LONGEST), list[str]()
        while (missing := wanted - sum(len(passage.split()) for passage in found)) > LEAST_PASSAGE / 2:
            words = rng.choice(self._passages).split(" ")
            found.append(" ".join(words[: missing + LEAST_PASSAGE]))
            self._asked.setdefault(found[-1], "")
        return found

    @staticmethod
    def _listed(rng: random.Random, passages: Sequence[str]) -> str:
        if rng.random() < 0.5:
            return "\n\n".join(passages)
        form = rng.choice(NUMBERED)
        return "\n".join(form.format(place, passage) for place, passage in enumerate(passages, 1))

    def _dialogue(self, rng: random.Random) -> str:
        said = [turn for turn in rng.choice(self._dialogues)["messages"] if turn["role"] in ("user", "assistant")]
        return "\n".join(f"{turn['role'].title()}: {turn['content']}" for turn in said if turn["content"])
