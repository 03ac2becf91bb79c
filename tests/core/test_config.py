"""flag > EDGESPEC_* environment > config file > default; nothing unknown passes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from edgespec.config.options import SETTINGS, GenerateOptions, LoadOptions, Sampling, ServeOptions, SessionOptions
from edgespec.config.sources import resolve
from edgespec.config.table import did_you_mean
from edgespec.errors import ConfigError, UsageError

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
        ("draft-lenght = 6", "'draft-lenght'; did you mean 'draft-length'"),
        ("temp = 'hot'", "temp must be a number from 0 to 100, got 'hot'"),
        ("top-k = 1.5", "top-k must be a whole number of at least -1, got 1.5"),
        ("top-k = true", "must be a whole number"),
        ("ignore-eos = 1", "must be True or False, got 1"),
        ("draft-length = 1.5", "must be auto or a whole number from 0 to 64"),
        ("heads = 1", "must be a path"),
        ("stop = [1]", "must be a string or a list of strings"),
        ("drafter = 'modle'", "'modle' is not known; allowed: auto, none, .*; did you mean 'model'"),
        ("temp = 1\ntemperature = 2", "'temperature' and 'temp' are the same setting"),
        ("[table]\nx = 1", "unknown setting 'table'"),
        ("temp =", "is not TOML"),
    ],
)
def test_a_bad_file_names_itself_and_the_fix(config, text, said):
    path = config(text)
    with pytest.raises(UsageError, match=said.replace("(", r"\(")) as caught:
        resolve({}, {}, path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_text_or_missing(tmp_path):
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        resolve({}, {}, tmp_path / "config.toml")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        resolve({}, {"EDGESPEC_CONFIG": str(tmp_path / "nothing")})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("EDGESPEC_TMEP", "1", "EDGESPEC_TMEP; did you mean 'EDGESPEC_TEMP'"),
        ("EDGESPEC_TEMP", "warm", "EDGESPEC_TEMP must be a number from 0 to 100, got 'warm'"),
        ("EDGESPEC_THREADS", "two", "EDGESPEC_THREADS must be a whole number of at least 1, got 'two'"),
        ("EDGESPEC_IGNORE_EOS", "maybe", "EDGESPEC_IGNORE_EOS must be True or False"),
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


@pytest.mark.parametrize(
    ("typed", "near"),
    [("--tmep", "--temp"), ("--modle", "--model"), ("genrate", ""), ("zzzz", "")],
)
def test_the_nearest_name(typed, near):
    hint = did_you_mean(typed, ["--temp", "--top-k", "--chat-template", "--model", "-m"])
    assert hint == (f"; did you mean '{near}'?" if near else "")


def test_paths_may_be_text():
    options = LoadOptions(model=Path("a"), draft="b.gguf", medium=Path("c.gguf"), heads="d.npz")
    assert (options.model, options.draft, options.medium, options.heads) == (
        "a",
        Path("b.gguf"),
        Path("c.gguf"),
        Path("d.npz"),
    )
