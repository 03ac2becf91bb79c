"""Write the texts that come with edgespec, from which lookups propose what models usually say.

    python scripts/train/texts.py write MODEL.gguf --work WORK --seed 5 --prompts 3000
    python scripts/train/texts.py pack --work WORK -o models/texts/texts.txt.gz

`write` asks MODEL, on edgespec's kernels, greedily, and goes on from where an earlier run ended. All prompts are put
together from the lists below: nothing is taken from a data set.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.platform.files import write_atomically

AT_ONCE, TOKENS = 16, 160


def _listed(text: str) -> list[str]:
    return text.replace("\n", " ").strip().split("; ")


TOPICS: Final = _listed("""
the water cycle; photosynthesis; black holes; the French Revolution; inflation; machine learning; neural networks; the
human heart; vaccines; climate change; renewable energy; electric cars; solar panels; plate tectonics; earthquakes;
volcanoes; the solar system; gravity; DNA; evolution; antibiotics; the immune system; sleep; meditation; yoga;
running; strength training; a healthy diet; vegetarian cooking; baking bread; coffee; tea; chocolate; gardening;
indoor plants; dogs; cats; birds; bees; whales; elephants; the rainforest; the ocean; rivers; mountains; deserts;
Japan; Italy; Brazil; Kenya; India; Canada; Paris; London; New York; Rome; ancient Egypt; the Roman Empire; the
Renaissance; the Industrial Revolution; World War II; the Cold War; the Space Race; democracy; human rights; the stock
market; budgeting; saving money; mortgages; taxes; starting a business; marketing; customer service; job interviews;
resumes; teamwork; leadership; time management; remote work; public speaking; learning a language; reading; writing a
novel; poetry; painting; photography; music theory; the guitar; the piano; jazz; classical music; film making;
theatre; chess; football; basketball; swimming; cycling; hiking; camping; travel on a budget; air travel; trains;
bridges; skyscrapers; 3D printing; robotics; quantum computing; cryptography; passwords; the internet; databases;
operating systems; open source; version control; unit tests; recursion; sorting algorithms; binary search; linked
lists; hash tables; graphs; dynamic programming; object-oriented programming; functional programming; web servers;
REST APIs; JSON; regular expressions; compilers; cloud computing; containers; probability; statistics; linear algebra;
calculus; prime numbers; geometry; logic; ethics; philosophy of mind; psychology; memory; stress; friendship;
parenting; education; school uniforms; homework; social media; video games; smartphones; artificial intelligence;
self-driving cars; recycling; plastic waste; water pollution; public transport; housing; immigration; charity;
volunteering; wedding speeches; birthday parties; weather forecasts; insurance; medicine; dentists; first aid; eye
care; skin care; fashion; furniture; cleaning; home repair; security cameras; wireless networks; printers;
spreadsheets; presentations
""")
TASKS: Final = _listed("""
reverses a string; checks whether a number is prime; computes the factorial of a number; finds the largest element of
a list; sorts a list of dictionaries by a key; counts words in a text file; merges two sorted lists; removes
duplicates from a list while keeping the order; checks whether a string is a palindrome; computes Fibonacci numbers
with memoization; reads a CSV file and sums a column; validates an email address; flattens a nested list; finds the
longest common prefix of strings; implements binary search; implements a stack with push and pop; implements a queue
with two stacks; inserts into a binary search tree; traverses a graph breadth first; computes the greatest common
divisor; converts Celsius to Fahrenheit; parses a date string; downloads a web page; writes a dictionary to a JSON
file; groups anagrams; rotates a matrix; transposes a matrix; multiplies two matrices; computes the moving average of
a list; generates a random password; counts vowels; finds the second largest number; checks balanced brackets;
implements quicksort; implements merge sort; computes the nth triangular number; converts an integer to Roman
numerals; encodes text with a Caesar cipher; finds all permutations of a string; computes compound interest; finds
missing numbers in a sequence; splits a list into chunks; retries a function on failure; measures how long a function
takes; caches results on disk; logs errors to a file; sends a request and handles timeouts; queries a SQLite database;
draws a bar chart; parses command line arguments
""")
REQUESTS: Final = (
    *("Explain {t} to a beginner.", "What is {t}?", "What are the main benefits of {t}?"),
    *("What are the advantages and disadvantages of {t}?", "Write a short essay about {t}."),
    *("Write a blog post about {t}.", "Give me five tips about {t}."),
    *("List ten interesting facts about {t}.", "Write a short story that involves {t}."),
    *("Write a poem about {t}.", "Summarize the history of {t}.", "How has {t} changed over time?"),
    *("Why does {t} matter today?", "Describe {t} in three sentences.", "Compare {t} and {u}."),
    *("How are {t} and {u} related?", "Write an email to a friend about {t}."),
    *("Write a formal letter to a company about {t}.",),
    *("Imagine you are a teacher. Introduce {t} to your class.",),
    *("Pretend that you are an expert in {t} and answer a journalist's questions.",),
    *("What are common misconceptions about {t}?", "Create a one-week plan to learn about {t}."),
    *("Write a dialogue between two people about {t}.", "What questions should I ask about {t}?"),
    *("Argue for and against {t}.", "How would you explain {t} to a child?"),
    *("Give an example of how {t} affects everyday life.", "Write the introduction of a report on {t}."),
    *("Make a table that compares {t} with {u}.", "What are the key steps to get started with {t}?"),
    *("Write a product description related to {t}.", "Who are important people in the field of {t}?"),
    *("Translate into English: Ich interessiere mich sehr für Bücher über {t}.",),
    *("Translate into French: I would like to know more about {t}.",),
    *("Translate into German: Many people talk about {t} nowadays.", "Write a news article about {t}."),
    *("What challenges does {t} face?", "Recommend books and films about {t}.", "Write a speech about {t}."),
    *("What could the future of {t} look like?",),
)
PROGRAMS: Final = (
    *("Write a Python function that {c}.", "Write a Python program that {c} and explain how it works."),
    *("How do I write code that {c}?", "Write a JavaScript function that {c}."),
    *("Write a C++ program that {c}.", "Write unit tests in Python for a function that {c}."),
    *("Write a Java method that {c}.", "Implement a class in Python that {c}."),
    *("Explain the time complexity of an algorithm that {c}.",),
)
SUMS: Final = (
    *("A train travels {a} km in {b} hours. How far does it travel in {c} hours?",),
    *("{n} has {a} apples and buys {b} bags with {c} apples each. How many apples does {n} have now?",),
    *("A shop sells shirts for ${a} each. {n} buys {b} shirts and pays with ${d}. How much change is due?",),
    *("Solve for x: {b}x + {c} = {a}.", "What is {a} times {b} minus {c}?"),
    *("{n} earns ${a} a day and spends ${b}. How much does {n} save in {c} weeks?",),
    *("A rectangle is {a} cm long and {b} cm wide. What are its area and perimeter?",),
    *("If {c} workers build a wall in {b} days, how long do {a} workers need?", "What is {b}% of {d}?"),
    *("{n} reads {b} pages on the first day and {c} more each day. How many pages are read after 5 days?",),
)
NUMBERS, ROUND = ((12, 96), (2, 12), (2, 10)), (100, 200, 500, 250)
NAMES: Final = _listed(
    "Anna; Ben; Carla; David; Emma; Farid; Grace; Hugo; Ines; Jonas; Kim; Lena; Maria; Noah; Olivia; Peter"
)


def prompts(seed: int) -> Iterator[str]:
    """Without an end and without repetition: 64% about topics, 20% about programs, 16% sums."""
    chance, seen = random.Random(seed), set[str]()
    while True:
        kind = chance.random()
        if kind < 0.64:
            prompt = chance.choice(REQUESTS).format(t=chance.choice(TOPICS), u=chance.choice(TOPICS))
        elif kind < 0.84:
            prompt = chance.choice(PROGRAMS).format(c=chance.choice(TASKS))
        else:
            sums, (a, b, c) = chance.choice(SUMS), (chance.choice(range(*each)) for each in NUMBERS)
            prompt = sums.format(a=a, b=b, c=c, d=chance.choice(ROUND), n=chance.choice(NAMES))
        if prompt not in seen:
            seen.add(prompt)
            yield prompt


def write(model_path: Path, work: Path, seed: int, num_prompts: int) -> None:
    """Append the answers to the first `num_prompts` prompts that are not yet in the model's file of texts."""
    written = work / f"{model_path.stem}-{seed}.jsonl"
    work.mkdir(parents=True, exist_ok=True)
    num_done = len(written.read_text("utf-8").splitlines()) if written.exists() else 0
    asked = list(islice(prompts(seed), num_done, num_prompts))
    options = GenerateOptions(max_tokens=TOKENS, drafter="none", logprobs=False)
    with edgespec.load(model_path, parallel=AT_ONCE, context_length=1024) as model, written.open("a") as output:
        for first in range(0, len(asked), 4 * AT_ONCE):
            part = asked[first : first + 4 * AT_ONCE]
            turns = [model.encode_chat([{"role": "user", "content": prompt}]) for prompt in part]
            for prompt, result in zip(part, model.generate_all(turns, Sampling(temperature=0), options), strict=True):
                output.write(json.dumps({"prompt": prompt, "text": result.text}) + "\n")
            output.flush()
            print(f"{num_done + first + len(part)} of {num_prompts}", flush=True)


def pack(work: Path, output: Path) -> None:
    """All texts in `work`, each once, as one compressed text."""
    found = [json.loads(line)["text"].strip() for path in sorted(work.glob("*.jsonl")) for line in path.open()]
    text = "\n\n".join(dict.fromkeys(filter(None, found)))
    write_atomically(output, gzip.compress(text.encode(), mtime=0), parents=True)
    print(f"{len(found)} texts, {len(text)} characters, {output.stat().st_size} bytes")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    writes, packs = stages.add_parser("write"), stages.add_parser("pack")
    writes.add_argument("model", type=Path)
    writes.add_argument("--seed", type=int, default=5)
    writes.add_argument("--prompts", type=int, default=3000)
    packs.add_argument("-o", "--output", type=Path, required=True)
    for each in (writes, packs):
        each.add_argument("--work", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.stage == "write":
        write(given.model, given.work, given.seed, given.prompts)
    else:
        pack(given.work, given.output)


if __name__ == "__main__":
    main()
