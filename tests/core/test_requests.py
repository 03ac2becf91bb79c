"""Invalid requests raise a typed error that says what was given and what is allowed."""

from __future__ import annotations

import itertools
import math
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

from edgespec.chat.messages import checked_messages
from edgespec.chat.template import encode_messages
from edgespec.config.options import GenerateOptions, LoadOptions, Sampling, SessionOptions
from edgespec.errors import ConfigError, EngineError, ModelFileError, PromptError, SamplingError
from edgespec.generation.request import checked_ids
from edgespec.sampling.sampler import Sampler
from head_tables import KINDS, VOCABULARY, request, table
from table_engine import LetterVocabulary, TableEngine
from tiny_heads import drafter_of, random_heads

NOTHING = np.empty(0, np.int32)
HUGE = pytest.param(10**5000, id="huge")  # Python makes no text of it
NO_NUMBERS: tuple[Any, ...] = (True, np.True_, None, "1", [1], 1j, math.nan, HUGE)


@pytest.mark.parametrize("value", [*NO_NUMBERS, math.inf, -math.inf, -(10.0**5)])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"]
)
def test_a_sampling_setting_that_is_no_number_in_range(name: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=rf"{name} must be a number from"):
        Sampling(**{name: value})


@pytest.mark.parametrize("value", [*NO_NUMBERS, 4.5, 4.0, np.float32(4), -(10**30)])
@pytest.mark.parametrize("name", ["top_k", "penalty_window", "seed"])
def test_a_sampling_setting_that_is_no_whole_number(name: str, value: Any) -> None:
    if name == "seed" and value is None:
        return
    with pytest.raises(SamplingError, match=rf"{name} must be a whole number"):
        Sampling(**{name: value})


def test_a_sampling_setting_just_out_of_its_range() -> None:
    for name, value in {"top_p": 1.5, "min_p": -0.1, "repeat_penalty": 0.0, "top_k": -2}.items():
        with pytest.raises(SamplingError, match=name):
            Sampling(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [{1: math.inf}, {1: math.nan}, {1: 1e39}, {1: True}, {1: "2"}, {1.5: 1.0}, {"1": 1.0},
                                  {True: 1.0}, [(1, 2.0)], None, 5, {-1: 1.0}])  # fmt: skip
def test_a_logit_bias_that_cannot_be_added(bias: Any) -> None:
    with pytest.raises(SamplingError, match="logit_bias"):
        Sampling(logit_bias=bias)


def test_numbers_of_numpy_are_numbers() -> None:
    found = Sampling(temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int32(1): np.float64(-2)})
    assert found == Sampling(temperature=0.5, top_k=3, logit_bias={1: -2.0})
    assert [type(found.top_k), type(found.temperature)] == [int, float]


def test_a_bias_that_forbids_all_tokens() -> None:
    sampling = Sampling(logit_bias=dict.fromkeys(range(4), -math.inf))
    with pytest.raises(SamplingError, match="forbids all 4 tokens"):
        Sampler(sampling, 4)
    assert Sampler(sampling, 5).distribution(np.zeros(5, np.float32), NOTHING).token_ids.tolist() == [4]


def test_a_bias_that_is_changed_afterwards_changes_nothing() -> None:
    bias = {1: -2.0}
    sampling = Sampling(logit_bias=bias)
    bias[1] = math.nan
    assert sampling.logit_bias == {1: -2.0}


@pytest.mark.parametrize(
    "value, message", [(-math.inf, "no token can be sampled"), (math.inf, "infinite"), (math.nan, "NaN")]
)
@pytest.mark.parametrize("settings", [Sampling(temperature=0.0), Sampling(), Sampling(top_k=0, top_p=1.0)])
def test_rows_that_hold_no_numbers(settings: Sampling, value: float, message: str) -> None:
    row = np.full(6, -math.inf, np.float32)
    row[2] = value
    sampler = Sampler(settings, 6)
    for use in (sampler.distribution, partial(sampler.likeliest, count=3)):
        with pytest.raises(EngineError, match=message):
            use(row, NOTHING)


@pytest.mark.parametrize(
    "ids", [[[1, 2], [3, 4]], [1.0, 2.0], [True], [1, None], ["1"], [2**70], [-1], [10], None, 5, 1.5, b"ab", {1: 2},
            np.zeros((2, 2), np.int64), np.array([1.5]), np.array([True]), np.array(3), [[1], [2, 3]], [10**5000]]
)  # fmt: skip
def test_a_prompt_that_is_no_list_of_token_ids(ids: Any) -> None:
    with pytest.raises(PromptError, match=r"token id"):
        checked_ids(ids, 10)


@pytest.mark.parametrize("ids", [[1, 9], (1, 9), np.array([1, 9], np.uint8), range(1, 10, 8), [np.int64(1), 9]])
def test_a_prompt_of_token_ids(ids: Any) -> None:
    found = checked_ids(ids, 10)
    assert found.tolist() == [1, 9] and found.dtype == np.int32
    assert checked_ids([], 10).size == 0


COUNTS = ("threads", "context_length", "draft_context_length", "gpu_layers", "draft_gpu_layers", "exit_layer")
FACTORS = ("draft_length", "max_slowdown")


WRONG: dict[str, tuple[Any, ...]] = {"must be": (True, "7", [1], 10**5000, math.nan), "True or False": ("no", 0, 1.0)}
WRONG |= {"allowed": (["auto"], 5, b"auto"), "must be a path": (["auto"], 5, b"auto")}


@pytest.mark.parametrize(
    "kind, names, said",
    [
        (LoadOptions, COUNTS + FACTORS, "must be"),
        (GenerateOptions, ("max_tokens", "draft_length"), "must be"),
        (LoadOptions, ("reproducible", "corpus", "learn"), "True or False"),
        (GenerateOptions, ("ignore_eos", "logprobs"), "True or False"),
        (SessionOptions, ("chat_template", "stats"), "True or False"),
        (LoadOptions, ("engine", "drafter", "verify", "provider", "cache_type_k"), "allowed"),
        (LoadOptions, ("draft", "heads"), "must be a path"),
    ],
)
def test_an_option_of_another_kind(kind: Any, names: tuple[str, ...], said: str) -> None:
    for name, value in itertools.product(names, WRONG[said]):
        with pytest.raises(ConfigError, match=said):
            kind(**{name: value})


# -- conversations


@pytest.mark.parametrize("messages", ["hi", b"hi", {"role": "user"}, 5, None, ["hi"], [None], [["role", "user"]],
                                      [{"role": ["user"], "content": "x"}], [{"role": "user", "content": 5}],
                                      [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
                                      [{"role": "assistant", "content": "", "tool_calls": 5}]])  # fmt: skip
def test_a_conversation_that_is_not_valid(messages: Any) -> None:
    with pytest.raises(PromptError):
        checked_messages(messages)
    with pytest.raises(PromptError):
        encode_messages(templated(LetterVocabulary(26)), messages, None, "m")


def templated(vocabulary: LetterVocabulary) -> LetterVocabulary:
    vocabulary.chat_template = "z{{ messages[0].content }}"
    return vocabulary


class Marked(LetterVocabulary):
    """Letters, of which `z` is a control token and `y` one without a name."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in (24, 25) else super().token_bytes(token_id)

    def token_name(self, token_id: int) -> str:
        return "" if token_id == 24 else super().token_name(token_id)

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        return [ord(letter) - (97 if parse_special or letter != "z" else -1000) for letter in text]


def test_a_control_token_without_a_name_splits_no_message() -> None:
    vocabulary = Marked(26)
    assert vocabulary.control_names == ("z",)
    assert encode_messages(templated(vocabulary), [{"role": "user", "content": "abc"}], None, "m") == [25, 0, 1, 2]


def test_parts_of_a_message_cannot_forge_a_turn_either() -> None:
    parts = [{"type": "text", "text": "az"}, {"type": "text", "text": "b"}]
    found = encode_messages(templated(Marked(26)), [{"role": "user", "content": parts}], None, "m")
    assert found == [25, 0, ord("z") + 1000, 1]


# -- heads that overflow


@pytest.mark.parametrize("factor", [0.0, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_whose_vocabulary_cannot_be_scaled(kind: str, factor: float) -> None:
    heads = random_heads(kind, table(), VOCABULARY, draft_vocabulary=VOCABULARY)
    heads.vocabulary[...] *= np.float32(factor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ModelFileError, match="vocabulary"):
            drafter_of(heads, VOCABULARY)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("branches", [0, 8])
def test_heads_whose_products_overflow_say_so(kind: str, temperature: float, branches: int) -> None:
    target: TableEngine = table()
    heads = random_heads(kind, target, VOCABULARY, draft_vocabulary=VOCABULARY)
    for name, array in heads.arrays.items():
        if kind == "medusa" or name in ("q_proj", "k_proj"):  # what a norm follows comes out as zero
            array *= np.float32(3e30)
    drafter = drafter_of(heads, VOCABULARY)
    states = np.ones((4, VOCABULARY), np.float32)
    text = np.arange(5, dtype=np.int32)
    drafter.begin(text)
    asked = request(text, states, 4, temperature)._replace(max_branches=branches)
    asked = asked._replace(sampler=Sampler(Sampling(temperature=temperature), VOCABULARY))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy's own warning would be printed beside the answer
        with pytest.raises(EngineError, match="heads gave scores that are not finite"):
            drafter.draft(asked)
