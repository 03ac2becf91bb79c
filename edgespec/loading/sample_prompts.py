"""Built-in prompts of several domains, for checks of any model without a data set."""

from __future__ import annotations

from typing import NamedTuple


class BuiltInPrompt(NamedTuple):
    domain: str
    text: str


PROMPTS: tuple[BuiltInPrompt, ...] = (
    BuiltInPrompt("dialogue", "Hi, can you find me a restaurant in San Jose that serves Italian food?"),
    BuiltInPrompt("dialogue", "I need a one-way bus ticket for two people, leaving next Friday morning."),
    BuiltInPrompt(
        "arithmetic", "A box holds 12 pencils. Tom has 4 full boxes and gives away 9 pencils. How many are left?"
    ),
    BuiltInPrompt(
        "arithmetic", "A train travels 60 miles in the first hour and 45 in the second. How far is that in all?"
    ),
    BuiltInPrompt(
        "code",
        "Write the Python function below.\ndef is_palindrome(text):\nReturn True if text reads the same backwards.",
    ),
    BuiltInPrompt("code", "Write a Python function that returns the largest element of a list of numbers."),
    BuiltInPrompt(
        "copying",
        "Repeat this list without changes: red, green, blue, yellow, orange, purple, brown, black, white, grey, pink.",
    ),
    BuiltInPrompt("prose", "Tell me in a few sentences why the sky is blue during the day and red in the evening."),
)
