"""The race against other runtimes: the protocol and its failures with stand-ins, the rest on the demo pair."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from edgespec.errors import CapabilityError, EngineError
from peers import child
from peers.base import Answer, Peer, Request
from peers.competition import Competition, Journal, tune
from peers.field import Contestant, Field, find_files, make_field
from peers.field import Library as FieldLibrary
from peers.process import PeerProcess
from peers.report import as_json, kinds_table, make_rows, table

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
SCRIPT = ROOT / "scripts" / "lab" / "bench_peers.py"
PLAIN = {"variant": "plain", "threads": 1}
REQUEST = Request((5, 6, 7), 4, settings=PLAIN)
posix_only = pytest.mark.skipif(os.name != "posix", reason="only POSIX has process groups to signal")


class EchoPeer(Peer):
    """Answers with the prompt's last token, repeated."""

    def open(self, files):
        if "lacking" in files:
            raise CapabilityError("echo is not installed: pip install echo")
        return "echo 1"

    def generate(self, request):
        if request.variant == "refused":
            raise CapabilityError("no such variant")
        if request.variant == "crash":
            raise ZeroDivisionError("as a library might")
        return Answer((request.prompt_ids[-1],) * request.max_tokens, request.max_tokens - 1, 0.5, 1.0)


def served(*messages):
    """Replies of a served EchoPeer, and whether it ended by itself."""
    replies = io.StringIO()
    child.serve(EchoPeer(), io.StringIO("".join(json.dumps(message) + "\n" for message in messages)), replies)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


def test_protocol_answers_and_refusals():
    order = {"do": "generate", "request": REQUEST.to_json()}
    refused = {"do": "generate", "request": {**REQUEST.to_json(), "settings": {"variant": "refused"}}}
    opened, answered, refusal, unknown = served({"do": "open", "files": {}}, order, refused, {"do": "dance"})
    assert opened == {"ok": "echo 1"}
    answer = Answer.from_json(answered["ok"])
    assert answer.token_ids == (7, 7, 7, 7)
    assert answer.tokens_per_second == 6
    assert refusal == {"refused": "no such variant"}
    assert "open, generate, encode" in unknown["refused"]


class FakePeer:
    """In place of a PeerProcess: speed by settings, texts by variant."""

    def __init__(self, speeds, fails_after=None):
        self.speeds, self.calls, self.fails_after, self.starts = speeds, [], fails_after, 1
        self.library, self.is_closed = "fake 1", False

    def open(self):
        self.starts += self.is_closed
        self.is_closed = False
        return self.library

    def close(self):
        self.is_closed = True

    def encode(self, texts):
        return [[len(text)] for text in texts]

    def generate(self, request, timeout_s):
        self.calls.append(request)
        if self.fails_after is not None and len(self.calls) > self.fails_after:
            raise EngineError("fake died with -11: bus error")
        speed = self.speeds(request.settings)
        if speed is None:
            raise CapabilityError("not with these settings")
        n = request.max_tokens
        return Answer(tuple(range(n)), n - 1, (n - 1) / speed, n / speed, 4, 3)


def test_sweep_takes_the_best_of_every_axis():
    speeds = {(1, 3): 10, (2, 3): 20, (2, 5): 15, (2, 1): 25, (2, 0): None}
    peer = FakePeer(lambda s: speeds[s["threads"], s["length"]])
    contestant = Contestant("x draft", "x", "draft", "onnx", "x plain", {"threads": (1, 2), "length": (3, 5, 1, 0)})
    told = []
    tuned = tune(contestant, peer, {"dtype": "f32"}, [REQUEST, REQUEST], 9, told.append)
    assert tuned.settings == {"dtype": "f32", "variant": "draft", "threads": 2, "length": 1}
    assert told == list(tuned.trials)
    assert [trial.failure for trial in tuned.trials if trial.failure] == ["not with these settings"]
    assert [trial.tokens_per_second for trial in tuned.trials] == pytest.approx([10, 20, 15, 25, 0])


def fake_competition(tmp_path, peers, keeps_one):
    """edgespec's four variants on ONNX, and a plain and a draft variant of "other", over FakePeers."""
    own = "edgespec onnx"
    contestants = [
        *(
            Contestant(f"{own} {v}", own, v, "onnx", f"{own} {v.replace('auto', 'plain')}")
            for v in ("plain", "auto", "plain reproducible", "auto reproducible")
        ),
        Contestant("other plain", "other", "plain", "onnx", "other plain"),
        Contestant("other draft", "other", "draft", "onnx", "other plain"),
        Contestant("absent plain", "absent", "plain", "onnx", "absent plain"),
    ]
    libraries = {own: FieldLibrary("edgespec", {}), "other": FieldLibrary("transformers", {})}
    libraries["absent"] = FieldLibrary("openvino-genai", {}, "the pair has no checkpoints")
    competition = Competition(
        Field(libraries, tuple(contestants)), {}, tmp_path, 9, lambda text: None, keeps_one=keeps_one
    )
    competition.peers = {**peers, "absent": FakePeer(lambda s: 1)}
    return competition


def raced(tmp_path, others=60, fails_after=None, *, keeps_one=False):
    own = FakePeer(lambda s: 30 if "auto" in s["variant"] else 20)
    other = FakePeer(lambda s: others if s["variant"] == "draft" else 10, fails_after)
    competition = fake_competition(tmp_path, {"edgespec onnx": own, "other": other}, keeps_one)
    journal = Journal(tmp_path / "journal.jsonl", {"run": 1})
    requests = [Request((index,), 8) for index in range(3)]
    competition.open()
    competition.tune(requests[:1], journal)
    competition.measure(requests, requests[0], journal)
    rows = make_rows(competition.field.contestants, journal, {n: p.library for n, p in competition.peers.items()})
    return competition, journal, {row.name: row for row in rows}, own


def test_race_reports_losses_and_who_is_out(tmp_path):
    competition, journal, rows, own = raced(tmp_path)
    assert rows["other draft"].speedup == pytest.approx((6, 6, 6))
    assert rows["other draft"].behind_auto == pytest.approx((0.5, 0.5, 0.5))
    assert rows["other plain"].behind_reproducible == pytest.approx((3, 3, 3))
    assert rows["edgespec onnx auto"].speedup == pytest.approx((1.5, 1.5, 1.5))
    assert rows["other draft"].same_text == rows["other draft"].prompts == 3
    assert rows["other draft"].acceptance_rate == 0.75
    assert competition.out == {"absent plain": "the pair has no checkpoints"}
    text = table(list(rows.values()), competition.out)
    assert "| other draft | 60.0 | 6.00x | 0.50x (0.50-0.50) |" in text
    assert "not in the race: absent plain: the pair has no checkpoints" in text
    found = as_json(list(rows.values()), competition.out, journal, ["a", "b", "c"], {"pair": "x"})
    assert json.loads(json.dumps(found))["prompts"][2]["domain"] == "c"
    by_kind = kinds_table(list(rows.values()), journal, ["a", "b", "a"]).splitlines()
    assert by_kind[0] == "Whole answers over edgespec onnx plain:", "its two plain modes are equally fast"
    columns, row = by_kind[2].split("|"), {line.split("|")[1].strip(): line.split("|") for line in by_kind[4:]}
    assert [int(row[kind][2]) for kind in ("a", "b", "all")] == [2, 1, 3]
    assert row["a"][columns.index(" other draft ")] == " 3.00 "
    assert row["all"][columns.index(" edgespec onnx auto ")] == " 1.500 +- 0.000 "
    first = [request.settings["variant"] for request in own.calls if request.max_tokens == 8][-12:]
    assert first[0] != first[4], "the order rotates from prompt to prompt"


def test_the_field_of_the_demo_pair(tmp_path):
    pair = find_files(DEMO, "q8_0", "int8", DEMO)
    field = make_field(pair, (1,), 512, tmp_path, None)
    names = [contestant.name for contestant in field.contestants]
    assert len(names) == len(set(names))
    assert {c.plain for c in field.contestants} <= set(names)
    assert {library.peer for library in field.libraries.values()} == set(child.PEERS)
    assert all(
        Path(field.libraries["transformers"].files[role], "config.json").is_file() for role in ("target", "draft")
    )
    only = field.only(["transformers"])
    assert set(only.libraries) == {"edgespec onnx", "transformers"}, (
        "and edgespec on the engine that it is compared with"
    )
    assert [c for c in only.contestants if c.process == "transformers"] == list(field.contestants[-3:])


def test_llama_cpp_python_and_edgespec_agree_on_the_demo_pair(tmp_path):
    """Two real children on the same GGUF: the texts are the same, prompt lookup or not."""
    pair = find_files(DEMO, "q8_0", "int8", DEMO)
    libraries = make_field(pair, (1,), 256, tmp_path, None).libraries
    names = ("edgespec llamacpp", "llama-cpp-python")
    peers = [PeerProcess(libraries[n].peer, libraries[n].files, tmp_path / f"{n}.log") for n in names]
    try:
        ids = peers[0].encode(["<|endoftext|><|im_start|>user\nI need a bus to Fresno.<|im_end|>\n"])[0]
        request = Request(tuple(ids), 16, settings=PLAIN)
        own = peers[0].generate(request, 120)
        common = {"threads": 1, "flash_attention": True}
        plain = peers[1].generate(Request(tuple(ids), 16, settings={"variant": "plain", **common}), 120)
        again = peers[1].generate(Request(tuple(ids), 16, settings={"variant": "plain", **common}), 120)
        lookup = {"variant": "lookup", "num_tokens": 4, "max_ngram": 2, **common}
        looked_up = peers[1].generate(Request(tuple(ids), 16, settings=lookup), 120)
        auto = peers[0].generate(Request(tuple(ids), 16, settings={**PLAIN, "variant": "auto reproducible"}), 120)
    finally:
        for peer in peers:
            peer.close()
    assert peers[1].library.startswith("llama-cpp-python 0.")
    assert plain.token_ids == again.token_ids
    assert len(own.token_ids) == len(plain.token_ids) == len(looked_up.token_ids) == len(auto.token_ids) == 16
    assert own.token_ids[:4] == plain.token_ids[:4]
    assert plain.decode_tokens == 15
    assert 0 < plain.decode_s < plain.total_s


@pytest.mark.skipif(which("llama-server") is None, reason="llama.cpp's server is not on the search path")
def test_llama_server_drafts_on_the_demo_pair(tmp_path):
    """The real server; the tests of its client above need none."""
    pair = find_files(DEMO, "q8_0", "int8", DEMO)
    library = make_field(pair, (1,), 256, tmp_path, None).libraries["llama-server"]
    peer = PeerProcess(library.peer, library.files, tmp_path / "log")
    common = {"threads": 1, "flash_attention": "auto"}
    draft = {"variant": "draft", "max_tokens": 5, "min_probability": 0.0, **common}
    lookup = {"variant": "lookup", "ngram": 3, "max_tokens": 8, **common}
    try:
        plain = peer.generate(Request((0, 3, 300), 16, settings={"variant": "plain", **common}), 120)
        drafted = peer.generate(Request((0, 3, 300), 16, settings=draft), 120)
        looked_up = peer.generate(Request((0, 3, 300), 16, settings=lookup), 120)
    finally:
        peer.close()
    assert len(plain.token_ids) == len(drafted.token_ids) == len(looked_up.token_ids) == 16
    assert drafted.drafted_tokens
    assert not plain.drafted_tokens


def test_the_script_runs_and_names_who_is_missing(tmp_path):
    """The whole command on the demo pair with one peer that runs and one that cannot."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"domain": "dialogue", "text": "<|endoftext|><|im_start|>user\\nHello<|im_end|>\\n"}\n')
    command = [sys.executable, str(SCRIPT), "--prompts", str(prompts), "--output", str(tmp_path / "out")]
    command += ["--tokens", "8", "--tuning-tokens", "4", "--threads", "1", "--context-length", "256"]
    command += ["--peers", "llama-cpp-python,llama-server", "--llama-server", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| edgespec llamacpp auto reproducible |" in report
    assert "| llama-cpp-python lookup |" in report
    assert "not in the race: llama-server draft: no llama-server is given or found" in report
    rows = {row["name"]: row for row in json.loads((tmp_path / "out" / "report.json").read_text())["rows"]}
    assert rows["edgespec llamacpp auto reproducible"]["same_text"] == 1
