"""--json-schema, --grammar, --regex and --free-until on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import refusal, run
from edgespec.config.options import GenerateOptions
from edgespec.config.sources import resolve
from edgespec.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")
SCHEMA = {
    "type": "object",
    "properties": {"seats": {"enum": [2, 4]}},
    "required": ["seats"],
    "additionalProperties": False,
}


def test_a_schema_comes_from_a_file_or_the_line_itself(tmp_path: Path, pair):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    for given in (str(file), json.dumps(SCHEMA)):
        result = run("generate", *pair, "-p", "A table", "-n", "40", "--temp", "0", "--json-schema", given, "--json")
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        assert answer["finish_reason"] == "stop" and json.loads(answer["text"])["seats"] in (2, 4)


def test_a_grammar_comes_from_a_file(tmp_path: Path, pair):
    file = tmp_path / "answer.gbnf"
    file.write_text('root ::= "yes" | "no"\n', encoding="utf-8")
    result = run("generate", *pair, "-p", "Well?", "--grammar", str(file))
    assert result.exit_code == 0 and result.stdout in ("yes\n", "no\n")


@pytest.mark.parametrize(
    ("structure", "quiet"), [(["--json-schema", json.dumps(SCHEMA)], []), (["--regex", "[0-9]{40}"], ["-q", "--json"])]
)
def test_an_answer_that_is_cut_before_its_end_is_an_error(pair, structure: list[str], quiet: list[str]):
    result = run("generate", *pair, "-p", "A table", "-n", "2", *structure, *quiet)
    assert result.exit_code == 1 and result.stdout
    lines = [line for line in result.stderr.splitlines() if "cut at 2 tokens" in line]
    more = "a larger -n (--max-tokens) gives more"
    assert lines == [f"error: the answer ends before {structure[0]} is complete, cut at 2 tokens: {more}"]
    assert not quiet or result.stderr.splitlines() == lines
    assert not quiet or json.loads(result.stdout)["finish_reason"] == "length"


def test_a_config_file_and_the_environment_name_a_schema_too(tmp_path: Path):
    wrong = run("generate", "demo", "-p", "x", "--json-schema", "nowhere.json")
    refusal(wrong, "the file 'nowhere.json' cannot be read: No such file")
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    config = tmp_path / "config.toml"
    config.write_text(f"json-schema = '{file}'\n", encoding="utf-8")
    for settings in (resolve({}, {}, config), resolve({}, {"EDGESPEC_JSON_SCHEMA": str(file), "EDGESPEC_CONFIG": ""})):
        assert GenerateOptions(**settings.part("generate")).json_schema == json.dumps(SCHEMA)
    with pytest.raises(ConfigError, match="EDGESPEC_GRAMMAR: the file 'gone' cannot be read"):
        resolve({}, {"EDGESPEC_GRAMMAR": "gone", "EDGESPEC_CONFIG": ""})
