"""flag > EDGESPEC_* environment > config file > default; nothing unknown or out of range passes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.config.options import SETTINGS, GenerateOptions, LoadOptions, Sampling, ServeOptions, SessionOptions
from edgespec.config.sources import resolve
from edgespec.config.values import parse_endpoints
from edgespec.errors import ConfigError, EngineError, PromptError, SamplingError, UsageError
from edgespec.generation.request import checked_ids
from edgespec.sampling.sampler import Sampler

OWNERS = {
    "load": LoadOptions,
    "sampling": Sampling,
    "generate": GenerateOptions,
    "session": SessionOptions,
    "serve": ServeOptions,
}
# Fields that no flag sets: overridden per generation, or only by the Python API.
# `parallel` is an option of `serve` alone
WITHOUT_FLAG = {"logit_bias", "logprobs", "top_logprobs", "max_wait_s", "prediction", "parallel"}


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_each_layer_overrides_the_one_below(config):
    path = config("temp = 0.1\ntop-k = 11\nseed = 1\n")
    environ = {"EDGESPEC_TEMP": "0.2", "EDGESPEC_TOP_K": "22"}
    settings = resolve({"temperature": 0.3, "top_p": None}, environ, path)
    assert settings.part("sampling") == {"temperature": 0.3, "top_k": 22, "seed": 1}
    assert settings.sources == {"temperature": "the command line", "top_k": "EDGESPEC_TOP_K", "seed": str(path)}


def test_a_recommendation_is_below_everything_given(config):
    settings = resolve({}, {"EDGESPEC_TEMP": "0"}, None).below({"temperature": 0.7, "top_k": 20}, "demo")
    assert settings.part("sampling") == {"temperature": 0.0, "top_k": 20}


@pytest.mark.parametrize("spelling", ["draft-length", "draft_length", "num-draft-tokens", "draft_max"])
def test_every_spelling_of_a_flag_is_a_key(config, spelling):
    assert resolve({}, {}, config(f"{spelling} = 7")).part("load") == {"draft_length": 7}
    variable = "EDGESPEC_" + spelling.upper().replace("-", "_")
    assert resolve({}, {variable: "7"}).part("load") == {"draft_length": 7}


def test_a_budget_is_a_number_of_bytes_or_a_size(config):
    assert resolve({}, {}, config("memory = 6000000000")).part("load") == {"memory": 6_000_000_000}
    assert resolve({}, {}, config("memory = '6GiB'")).part("load") == {"memory": "6GiB"}


def test_paths_in_a_file_are_meant_from_its_folder_and_names_of_models_stay(config, tmp_path):
    for name in ("t.gguf", "g.lark"):
        (tmp_path / name).write_text("start: 'a'")
    texts = ("model = 't.gguf'", "model-draft = './t.gguf'", "heads = 'h.npz'", "grammar = 'g.lark'")
    path = config("\n".join(texts))
    assert resolve({}, {}, path).values == {
        "model": str(tmp_path / "t.gguf"),
        "draft": tmp_path / "t.gguf",
        "heads": tmp_path / "h.npz",
        "grammar": "start: 'a'",
    }
    named = resolve({}, {}, config("model = 'demo'\nmodel-draft = 'qwen3:8b'\nmedium = 'demo'\njson-schema = '{}'"))
    assert named.values == {"model": "demo", "draft": Path("qwen3:8b"), "medium": Path("demo"), "json_schema": "{}"}


def test_the_users_own_file_is_found_and_can_be_switched_off(tmp_path):
    (tmp_path / "config.toml").write_text("threads = 3")
    assert resolve({}, {"EDGESPEC_HOME": str(tmp_path)}).part("load") == {"threads": 3}
    assert resolve({}, {"EDGESPEC_HOME": str(tmp_path), "EDGESPEC_CONFIG": ""}).values == {}
    assert resolve({}, {"EDGESPEC_HOME": str(tmp_path / "none"), "EDGESPEC_MODELS": str(tmp_path)}).values == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tmep = 1", "'tmep'; did you mean 'temp'"),
        ("temp = 'hot'", "temp must be a number from 0 to 100, got 'hot'"),
        ("top-k = 1.5", "top-k must be a whole number of at least -1, got 1.5"),
        ("top-k = true", "must be a whole number"),
        ("ignore-eos = 1", "must be true or false, got 1"),
        ("draft-length = 1.5", "must be auto or a whole number from 0 to 64"),
        ("heads = 1", "must be a path"),
        ("stop = [1]", "must be a string or a list of strings"),
        ("drafter = 'modle'", "'modle' is not known; allowed: auto, none, .*; did you mean 'model'"),
        ("temp = 1\ntemperature = 2", "'temperature' and 'temp' are the same setting"),
        ("[table]\nx = 1", "unknown setting 'table'"),
    ],
)
def test_a_bad_file_names_itself_and_the_fix(config, text, said):
    path = config(text)
    with pytest.raises(UsageError, match=said.replace("(", r"\(")) as caught:
        resolve({}, {}, path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        resolve({}, {"EDGESPEC_CONFIG": str(tmp_path / "nothing")})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("EDGESPEC_TMEP", "1", "EDGESPEC_TMEP; did you mean 'EDGESPEC_TEMP'"),
        ("EDGESPEC_TEMP", "warm", "EDGESPEC_TEMP must be a number from 0 to 100, got 'warm'"),
        ("EDGESPEC_IGNORE_EOS", "maybe", "EDGESPEC_IGNORE_EOS must be true or false"),
        ("EDGESPEC_VERIFY", "exact", "allowed: coupled, rejection, block, typical"),
    ],
)
def test_a_bad_variable_names_itself(variable, value, said):
    with pytest.raises(UsageError, match=said):
        resolve({}, {variable: value, "PATH": "/bin"})


def test_an_empty_variable_counts_as_unset_where_no_text_is_meant():
    environ = {"EDGESPEC_DRAFT_LENGTH": "", "EDGESPEC_THREADS": "", "EDGESPEC_REPRODUCIBLE": "", "EDGESPEC_SYSTEM": ""}
    assert resolve({}, environ).values == {"system": ""}


def test_texts_are_one_string_or_several(config):
    assert resolve({}, {"EDGESPEC_STOP": "END"}).part("generate") == {"stop": ("END",)}
    assert resolve({}, {}, config("stop = ['a', 'b']")).part("generate") == {"stop": ("a", "b")}
    assert resolve({"stop": ()}, {}, config("stop = 'a'")).part("generate") == {"stop": ("a",)}


def test_who_may_call_the_server_is_a_setting(config):
    found = resolve({}, {"EDGESPEC_CORS_ORIGIN": "https://a.example"}, config("allowed-host = ['b.example', 'c']"))
    options = ServeOptions(**found.part("serve"))
    assert options == ServeOptions(cors_origin=("https://a.example",), allowed_host=("b.example", "c"))
    assert resolve({}, {"EDGESPEC_IDLE_UNLOAD": "1.5"}).part("serve") == {"idle_unload": 1.5}
    assert ServeOptions().idle_unload_s is None and ServeOptions(idle_unload=-1).idle_unload_s is None
    for given in ({"allowed_host": ("",)}, *({"idle_unload": seconds} for seconds in (0, math.inf, math.nan))):
        with pytest.raises(ConfigError, match=r"allowed_host|idle.unload"):
            ServeOptions(**given)


def test_the_table_and_the_dataclasses_agree():
    """Every field that is not Python's alone has flags, and no two options share a spelling."""
    fields = {(part, f.name) for part, owner in OWNERS.items() for f in dataclasses.fields(owner)}
    overrides = {("generate", "drafter"), ("generate", "draft_length"), ("generate", "verify")}
    named = {(setting.part, setting.name) for setting in SETTINGS}
    own = {f for f in fields if f[1] not in WITHOUT_FLAG} | {("serve", "parallel")}  # of loading it has no flag
    assert named == own - overrides
    assert len({key for setting in SETTINGS for key in setting.keys}) == sum(len(s.keys) for s in SETTINGS)


def test_paths_may_be_text():
    texts = LoadOptions(model=Path("a"), draft="b.gguf", medium="c.gguf", heads="d.npz")
    assert texts == LoadOptions(model="a", draft=Path("b.gguf"), medium=Path("c.gguf"), heads=Path("d.npz"))


# -- addresses of RPC servers, and where options place target and draft


def test_servers_are_split_at_commas_and_keep_their_order():
    assert parse_endpoints("b:1, a.example-1.net:65535,10.0.0.1:050052") == (
        "b:1",
        "a.example-1.net:65535",
        "10.0.0.1:50052",
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", None, "host", ":50052", "a b:1", "host:", "host:0", "host:65536", "host:x", "host:\u0661"),
        *("[::1]:50052", "::1", "a:1,,b:2", "a:1,b:2,a:01", ",".join(f"h{i}:1" for i in range(17))),
    ],
)
def test_what_is_no_list_of_servers_is_refused_with_the_form(text):
    with pytest.raises(ConfigError, match="is no list of servers: give HOST:PORT"):
        parse_endpoints(text)


def test_options_refuse_it_too():
    for given, said in (({"rpc": "nowhere"}, "HOST:PORT"), ({"device": "Vulkan0,,"}, "is not a device")):
        with pytest.raises(ConfigError, match=said):
            LoadOptions(**given)


@pytest.mark.parametrize(
    ("given", "target", "draft"),
    [
        ({}, (0, None), (0, None)),
        ({"gpu_layers": 5}, (5, None), (5, None)),
        ({"gpu_layers": 5, "draft_gpu_layers": 0}, (5, None), (0, None)),
        ({"device": "A,B"}, (-1, ("A", "B")), (-1, ("A", "B"))),
        ({"device": "A", "draft_device": "none"}, (-1, ("A",)), (0, ())),
        ({"device": "none", "draft_device": "A"}, (0, ()), (-1, ("A",))),
        ({"rpc": "h:1"}, (-1, None), (0, None)),
        ({"rpc": "h:1", "draft_device": "A"}, (-1, None), (-1, ("A",))),
        ({"rpc": "h:1", "device": "RPC0", "draft_gpu_layers": 3}, (-1, ("RPC0",)), (3, None)),
    ],
    ids=str,
)
def test_target_and_draft_are_placed_apart(given, target, draft):
    options = LoadOptions(**given)
    assert (options.target_gpu_layers, options.target_devices) == target
    assert (options.draft_model_gpu_layers, options.draft_devices) == draft


# -- invalid requests raise a typed error that says what was given and what is allowed


NOTHING = np.empty(0, np.int32)


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
WHOLE, REAL = ("top_k", "penalty_window", "seed"), ("temperature", "top_p", "min_p", "repeat_penalty")
HUGE = 10**5000  # Python makes no text of it
NO_NUMBERS: tuple[Any, ...] = (True, np.True_, "1", [1], 1j, math.nan, HUGE)


@pytest.mark.parametrize(
    ("kind", "names", "values", "said"),
    [
        (LoadOptions, (*COUNTS, "draft_length", "max_slowdown"), NO_NUMBERS, "must be"),
        (GenerateOptions, ("max_tokens", "draft_length"), NO_NUMBERS, "must be"),
        (Sampling, (*REAL, "presence_penalty", "frequency_penalty"), (*NO_NUMBERS, None, math.inf, -1e5),
         "{} must be a number from"),
        (Sampling, WHOLE, (*NO_NUMBERS, 4.5, 4.0, np.float32(4), -(10**30)), "{} must be a whole number"),
        (Sampling, ("top_p",), (1.5,), "top_p"),
        (Sampling, ("min_p",), (-0.1,), "min_p"),
        (Sampling, ("repeat_penalty",), (0.0,), "repeat_penalty"),
        (Sampling, ("top_k",), (-2,), "top_k"),
        (LoadOptions, ("reproducible", "corpus", "learn"), ("no", 0, 1.0), "true or false"),
        (GenerateOptions, ("ignore_eos", "logprobs"), ("no", 0, 1.0), "true or false"),
        (LoadOptions, ("engine", "drafter", "verify", "provider", "cache_type_k"), (["auto"], 5, b"auto"), "allowed"),
        (LoadOptions, ("draft", "heads"), (["auto"], 5, b"auto"), "must be a path"),
    ],
)  # fmt: skip
def test_an_option_of_another_kind(kind: Any, names: tuple[str, ...], values: tuple[Any, ...], said: str) -> None:
    for name, value in itertools.product(names, values):
        with pytest.raises(SamplingError if kind is Sampling else ConfigError, match=said.format(name)):
            kind(**{name: value})
