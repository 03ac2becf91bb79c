"""What a target is asked: data, arithmetic of templates, code, questions that it makes up, and prompts about texts.

None of Spec-Bench or HumanEval, which measure what was learnt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from edgespec.chat.template import render_chat
from edgespec.errors import CapabilityError, PromptError
from edgespec.vocabulary import Vocabulary
from trainlib.documents import Document, Message

WARM = 0.8
LEAST_PASSAGE = 40  # words of a paragraph that prompts are about
SHORTEST, LONGEST = 60, 620  # words of all paragraphs in a prompt, about 1.4 tokens each
OPEN = "\n\nQuestion:"  # behind which the target makes up a question
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
SUMMARIES: Final = (
    *("Summarize: {}", "Summarize the following article.\n\n{}", "{}\n\nTL;DR", "Summarise in three sentences:\n{}"),
    *("Please write a short summary of the text below.\n\n{}", "{}\n\nGive the main points as a list.", "Shorten: {}"),
    *("What is this text about?\n\n{}", "Write a headline and one paragraph that sum up this report:\n\n{}"),
    *("Here is a document:\n\n{}\n\nSummarize it for somebody who is in a hurry.", "{}\n\nSum up the above."),
)
TEXT_TASKS: Final = (
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

    text: str
    temperature: float
    is_question: bool = False


class Turns:
    """How a target's chat template puts turns together: its text before a user's turn, behind it, and so on.

    Raises CapabilityError for a model without a chat template.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if vocabulary.chat_template is None:
            raise CapabilityError("the model has no chat template, by which it could be asked anything")
        self._template = vocabulary.chat_template
        named = ("bos_token", vocabulary.bos_id), ("eos_token", vocabulary.eos_id)
        self._tokens: dict[str, Any] = {key: "" if at is None else vocabulary.token_name(at) for key, at in named}
        first, answer, second = "<<first>>", "<<answer>>", "<<second>>"
        roles = ("user", "assistant", "user")
        turns = [{"role": role, "content": text} for role, text in zip(roles, (first, answer, second), strict=True)]
        self.opening, self.answer = self.conversation(turns[:1]).split(first)
        self.again = self.conversation(turns).split(answer)[1].split(second)[0]

    def conversation(self, messages: Sequence[Message]) -> str:
        """Up to where the assistant's next turn begins."""
        return render_chat(self._template, messages, **self._tokens)

    def question(self, text: str) -> str:
        return f"{self.opening}{text}{self.answer}"


def prompts(turns: Turns, data: Sequence[Document], seed: int, own: float, about: float) -> Iterator[Asked]:
    """Without an end. `own`: the share of prompts that the target makes up, `about`: of those about texts of `data`.

    After a prompt's first time, its answers are warm: greedy ones would be the same.
    """
    rng = random.Random(seed)
    passages = list(_passages(data))
    for turn in count():
        heats = (0.0, WARM) if turn == 0 else (WARM,)
        found = [Asked(text, heat) for text in (*_of_data(turns, data, rng), *_of_lists(turns)) for heat in heats]
        sentences = [f"{who} {does} {what}.{then}" for who in WHO for does in DOES for what in WHAT for then in THEN]
        for text in rng.sample(sentences, len(sentences) // 12):
            how = rng.choice(("Translate German to English: {}", "Translate into English: {}", "{}\n\nIn English?"))
            found.append(Asked(turns.question(how.format(text)), _mostly_greedy(rng)))
        made_up = round(len(found) * own / (1 - own))
        if passages and about:
            wanted = round((len(found) + made_up) * about / (1 - about))
            found += [_about_passages(turns, passages, rng) for _ in range(wanted)]
        found += [Asked(turns.opening, 1.0, is_question=True)] * made_up
        rng.shuffle(found)
        yield from found


def _mostly_greedy(rng: random.Random) -> float:
    return rng.choice((0.0, 0.0, WARM))


def _of_data(turns: Turns, data: Sequence[Document], rng: random.Random) -> Iterator[str]:
    """The conversations of `data` up to one of their answers."""
    for document in data:
        if isinstance(document, str):
            continue
        answers = [place for place, each in enumerate(document) if place and each["role"] == "assistant"]
        try:
            yield turns.conversation(document[: rng.choice(answers)] if answers else document)
        except PromptError:
            continue  # the template refuses it


def _of_lists(turns: Turns) -> list[str]:
    programs = [turns.question(f"{how} {task}.") for how in PROGRAMS for task in TASKS]
    return programs + [turns.question(request.format(topic)) for request in REQUESTS for topic in TOPICS]


def _passages(data: Sequence[Document]) -> Iterator[str]:
    """Paragraphs of texts and of what users said."""
    for document in data:
        said = [document] if isinstance(document, str) else [str(m["content"]) for m in document if m["role"] == "user"]
        lines = (line.strip() for text in said for line in text.split("\n"))
        yield from (line for line in lines if len(line.split()) >= LEAST_PASSAGE)


def _about_passages(turns: Turns, every: Sequence[str], rng: random.Random) -> Asked:
    """A prompt about paragraphs of some length in all; a head learns to copy from such."""
    wanted, passages = rng.randrange(SHORTEST, LONGEST), list[str]()
    while (missing := wanted - sum(len(passage.split()) for passage in passages)) > LEAST_PASSAGE / 2:
        passages.append(" ".join(rng.choice(every).split(" ")[: missing + LEAST_PASSAGE]))
    joined, chosen = "\n\n".join(passages), rng.random()
    if chosen < 0.45:
        return Asked(turns.question(rng.choice(SUMMARIES).format(joined)), _mostly_greedy(rng))
    if chosen < 0.6:
        return Asked(turns.question(rng.choice(TEXT_TASKS).format(joined)), _mostly_greedy(rng))
    if chosen < 0.75:
        return Asked(f"{turns.opening}{_listed(passages, rng)}{OPEN}", WARM, is_question=True)
    asked = rng.choice(GIVEN).format(_listed(passages, rng), rng.choice(QUESTIONS))
    return Asked(turns.question(asked), _mostly_greedy(rng))


def _listed(passages: Sequence[str], rng: random.Random) -> str:
    if rng.random() < 0.5:
        return "\n\n".join(passages)
    form = rng.choice(NUMBERED)
    return "\n".join(form.format(place, passage) for place, passage in enumerate(passages, 1))
