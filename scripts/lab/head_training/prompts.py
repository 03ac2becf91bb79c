"""What the target is asked: instructions of many kinds, arithmetic, dialogues, code, and questions that it makes up.

None of Spec-Bench or HumanEval, which measure what was learnt.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from head_training.documents import Documents

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
QUESTION, ANSWER = "<|im_start|>user\n", "<|im_start|>assistant\n"
END_OF_TURN = "<|im_end|>\n"
WARM = 0.8
PROGRAMS: Final = (
    *("Write a Python function that", "Write a JavaScript function that", "Write a short program in C that"),
    *("Show me a Python class that", "Write a Rust function that", "Write a SQL query that"),
    *("Write a bash script that", "Explain, with a Python example, how to write code that"),
    *("Write Python unit tests for a function that", "Complete this: a Java method that"),
)
TASKS: Final = (
    *("reverses the words of a sentence", "finds the largest prime below n", "merges two sorted lists"),
    *("counts how often each word occurs in a file", "parses a CSV file and sums one column", "inverts a binary tree"),
    *("removes duplicates from a list and keeps the order", "checks whether two strings are anagrams"),
    *("computes the moving average of a list of numbers", "validates an email address", "rotates a matrix"),
    *("converts Roman numerals to integers", "finds the shortest path in a grid", "implements binary search"),
    *("implements a queue with two stacks", "renames all files in a folder by date", "sorts dictionaries by a key"),
    *("returns the second highest salary per department", "downloads a web page and prints its title"),
    *("computes Fibonacci numbers with memoisation", "flattens a nested list", "reads JSON and prints it as a table"),
    *("finds the longest common prefix of strings", "simulates a bank account with deposit and withdraw"),
    *("draws a histogram of random numbers", "rate limits calls to a function", "splits text into sentences"),
    *("computes the distance between two points on Earth", "implements an LRU cache", "multiplies two matrices"),
    *("converts temperatures between Celsius and Fahrenheit", "finds all files larger than ten megabytes"),
    *("generates a random password", "computes the factorial of a number recursively", "formats a phone number"),
    *("groups a list of people by age", "detects a cycle in a linked list", "compresses a string by run lengths"),
    *("prints a calendar month", "retries a network request with backoff"),
)
REQUESTS: Final = (
    *("Write a blog post about {}.", "Explain {} to a ten year old.", "Give me five tips about {}."),
    *("What are the advantages and disadvantages of {}?", "Write an email to a colleague about {}."),
    *("Summarize what is known about {}.", "Write a short story about {}.", "Make a lesson plan on {}."),
    *("Compare {} with its closest alternative.", "Write a product description for {}.", "Write a poem about {}."),
    *("Describe the history of {}.", "Pretend you are an expert on {} and introduce yourself."),
    "What questions would you ask about {}?",
)
TOPICS: Final = (
    *("electric bicycles", "the water cycle", "remote work", "volcanoes", "learning to cook", "the Roman Empire"),
    *("machine learning", "healthy sleep", "gardening on a balcony", "the stock market", "jazz music", "coffee"),
    *("photosynthesis", "public libraries", "space telescopes", "time management", "chess openings", "drones"),
    *("renewable energy", "childhood friendships", "the human heart", "travelling by train", "black holes"),
    *("inflation", "urban planning", "vaccines", "the French Revolution", "online privacy", "marathon training"),
    *("coral reefs", "negotiating a salary", "quantum computers", "antibiotics", "bread baking", "the Silk Road"),
    *("mental health", "recycling", "the Olympic Games", "supply and demand", "beekeeping"),
)


FOLLOW_UPS: Final = (
    *("Make it shorter.", "Can you explain the second point in more detail?", "Give me an example.", "Why?"),
    *(
        "Summarize that in one sentence.",
        "Turn it into a table.",
        "Are you sure? Check it again.",
        "Thanks! What next?",
    ),
    *("Now write it for children.", "Write it as a list of bullet points.", "What are the risks of that?"),
    *("Rewrite it in a more formal tone.", "Translate it into Spanish.", "Can you add a conclusion?", "Show the code."),
    *("Do the same for another case of your choice.", "Which of these matters most, and why?", "Continue."),
    *("Add comments to the code.", "What would an opponent say?", "Explain your reasoning step by step."),
)
ABOUT_TEXTS: Final = (
    *("Summarize: {}", "Summarize the following text in a few sentences.\n\n{}", "{}\n\nWhat is the main idea?"),
    *("Read the text and list its key facts.\n\n{}", "Rewrite this text in simpler words:\n\n{}", "TL;DR of this: {}"),
    *("Text: {}\n\nWrite three questions about the text and answer them.", "Give this text a title:\n\n{}"),
    *("Use the passage to answer.\n\nPassage: {}\n\nQuestion: What does the passage say, and why?\nAnswer:",),
    *("Correct any mistakes in the following text:\n\n{}", "Extract all names, places and numbers from it:\n\n{}"),
    *("Translate into German: {}", "Is the following text right? Explain.\n\n{}", "Write a reply to this:\n\n{}"),
)
# German sentences to be translated are put together, since the model cannot write any.
WHO: Final = (
    *("Die Regierung", "Der Trainer", "Ein Sprecher der Polizei", "Die Firma aus München", "Meine Nachbarin"),
    *("Der neue Bürgermeister", "Das Unternehmen", "Die Mannschaft", "Eine junge Forscherin", "Der Verein"),
)
DOES: Final = (
    *("hat gestern erklärt, dass", "sagte am Montag, dass", "ist sicher, dass", "teilte der Zeitung mit, dass"),
    *("glaubt nicht, dass", "bestätigte im Gespräch, dass", "hofft seit langem, dass", "warnte davor, dass"),
)
WHAT: Final = (
    *("die Preise in diesem Jahr weiter steigen", "das Projekt im Herbst fertig wird", "niemand verletzt wurde"),
    *("mehr Geld für Schulen gebraucht wird", "das Spiel wegen Regens ausfällt", "die Straße gesperrt bleibt"),
    *("viele Gäste aus dem Ausland kommen", "die Verhandlungen schwierig sind", "der Zug pünktlich ankommt"),
    *("neue Arbeitsplätze in der Stadt entstehen", "die Wahl verschoben werden muss", "es keine einfache Lösung gibt"),
)
THEN: Final = (
    *("", " Einzelheiten wurden nicht genannt.", " Darüber wird nächste Woche entschieden.", " Das freut nicht alle."),
    *(" Im vergangenen Jahr waren es noch 250.", " Die Ursache ist noch unklar.", " Mehr dazu am Abend."),
)


@dataclass(frozen=True)
class Asked:
    """`text` up to where the target goes on at `temperature`; `is_question`: it makes up what a user asks."""

    kind: str
    text: str
    temperature: float
    is_question: bool = False


def conversation(*turns: str) -> str:
    """Turns of user and assistant, up to where the assistant's next one begins."""
    said = (f"{ANSWER if place % 2 else QUESTION}{turn}{END_OF_TURN}" for place, turn in enumerate(turns))
    return f"{SYSTEM}{''.join(said)}{ANSWER}"


def prompts(data: Path | None, seed: int, own_questions: float = 0.5, documents: float = 0.0) -> Iterator[Asked]:
    """Without an end; `own_questions`: the share of prompts that the model makes up, `documents`: of those about texts.

    `data`: folder of the data files. After a prompt's first time, its answers are warm: greedy ones would be the same.
    """
    rng = random.Random(seed)
    for turn in count():
        found = [] if data is None else _of_data(data, rng, is_first=turn == 0)
        for programs in (PROGRAMS, PROGRAMS[:6]):
            heat = WARM if turn or programs is not PROGRAMS else 0.0
            found += [Asked("code", conversation(f"{how} {task}."), heat) for how in programs for task in TASKS]
        said = [request.format(topic) for request in REQUESTS for topic in TOPICS]
        found += [
            Asked("topic", conversation(text), heat) for text in said for heat in {0.0 if turn == 0 else WARM, WARM}
        ]
        sentences = [f"{who} {does} {what}.{then}" for who in WHO for does in DOES for what in WHAT for then in THEN]
        for text in rng.sample(sentences, len(sentences) // 12):
            how = rng.choice(("Translate German to English: {}", "Translate into English: {}", "{}\n\nIn English?"))
            found.append(Asked("translation", conversation(how.format(text)), rng.choice((0.0, 0.0, WARM))))
        own = round(len(found) * own_questions / (1 - own_questions))
        if data is not None and documents:
            found += _about_documents(data, rng, round((len(found) + own) * documents / (1 - documents)))
        found += [Asked("own question", SYSTEM + QUESTION, 1.0, is_question=True)] * own
        rng.shuffle(found)
        yield from found


def _of_data(data: Path, rng: random.Random, *, is_first: bool) -> list[Asked]:
    heats = (0.0, WARM) if is_first else (WARM,)
    found = []
    for row in _rows(data, "instructions"):
        found += [Asked("instruction", conversation(row["prompt"]), heat) for heat in heats]
    for row in rng.sample(_rows(data, "gsm8k_train"), 3000):
        found.append(Asked("arithmetic", conversation(row["question"]), rng.choice((0.0, 0.0, WARM))))
    for row in rng.sample(_rows(data, "sgd_train"), 3000):
        turns = [turn["content"] for turn in row["messages"] if turn["role"] in ("user", "assistant")]
        turns = [turn for turn in turns if turn][: rng.choice((1, 3, 5, 7))]
        if len(turns) % 2:
            found.append(Asked("dialogue", conversation(*turns), rng.choice((0.0, 0.0, WARM))))
    return found


def _about_documents(data: Path, rng: random.Random, number: int) -> list[Asked]:
    found = []
    for text, is_open in Documents(_rows(data, "instructions"), _rows(data, "sgd_train")).prompts(rng, number):
        heat = rng.choice((0.0, 0.0, WARM))
        said = f"{SYSTEM}{QUESTION}{text}" if is_open else conversation(text)
        found.append(Asked("document", said, WARM if is_open else heat, is_question=is_open))
    return found


def _rows(data: Path, name: str) -> list[dict[str, Any]]:
    with lzma.open(data / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
