"""The programs in docs/examples run, where what they need is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from demo import ROOT
from edgespec.installation import is_importable

EXAMPLES = ROOT / "docs" / "examples"
NODE, XVFB = shutil.which("node"), shutil.which("xvfb-run")


def run(home: Path, *command: str) -> str:
    """What a program prints; it must end with 0."""
    environment = os.environ | {"EDGESPEC_HOME": str(home), "EDGESPEC_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_node_drives_the_sidecar(private_home: Path):
    serve = (sys.executable, "-m", "edgespec", "serve", "demo", "--stdio")
    first, *_, stopped, last = run(private_home, str(NODE), str(EXAMPLES / "sidecar.mjs"), *serve).splitlines()
    assert first.startswith("demo, ") and stopped == "stopped: cancelled" and last == "ended with code 0"


@pytest.mark.skipif(not is_importable("openai"), reason="the openai package is not installed")
def test_the_openai_client(private_home: Path):
    *_, speed, last = run(private_home, sys.executable, str(EXAMPLES / "openai_client.py")).splitlines()
    assert speed.endswith("tokens/s") and last == "ended with code 0"


@pytest.mark.skipif(not is_importable("llm"), reason="the llm package is not installed")
def test_the_llm_plugin(private_home: Path):
    """A conversation of two turns with options and a schema, through llm's own classes."""
    code = f"""
import json, os, sys
sys.path.insert(0, {str(EXAMPLES / "llm-edgespec")!r})
os.environ["LLM_LOAD_PLUGINS"] = ""  # none that are installed
import llm, llm_edgespec

llm.plugins.pm.register(llm_edgespec)
model = llm.get_model("edgespec/demo")
conversation = model.conversation()
first = conversation.prompt("Find me a bus to Fresno.", system="You book buses.", temperature=0, max_tokens=30)
pieces = list(first)
print(len(pieces) > 1, first.usage().output == first.response_json["tokens"], "".join(pieces) == first.text())
second = conversation.prompt("Is it cheap?", schema={{"type": "boolean"}}, seed=1, drafter="none", max_tokens=9)
print(json.loads(second.text()) in (True, False), second.usage().input > first.usage().input + first.usage().output)
"""
    answers = run(private_home, sys.executable, "-c", code).split()
    assert answers == ["True"] * 5


@pytest.mark.skipif(not is_importable("tkinter"), reason="this Python has no tkinter")
@pytest.mark.skipif(not (XVFB or os.environ.get("DISPLAY")), reason="there is no display and no xvfb-run")
def test_the_window_answers_and_stops(private_home: Path):
    """Ask, wait for the answer, ask again and stop: all from the window's own loop, which never blocks."""
    code = f"""
import sys, time, tkinter as tk
sys.path.insert(0, {str(EXAMPLES)!r})
from tk_chat import Chat

root = tk.Tk()
chat = Chat(root, "demo")
waits, began = [], time.monotonic()

def step(last=[time.monotonic()]):
    waits.append(time.monotonic() - last[0])
    last[0] = time.monotonic()
    if chat.finished == 1 and chat._running is None:
        chat.ask("Tell me more about it, at length")
        chat.stop()
    if chat.finished == 2 or time.monotonic() - began > 60:
        print(chat.finished, len(chat.page.get("1.0", "end")) > 40, len(waits) > 3)
        chat.close()
        return
    root.after(10, step)

chat.ask("Find me a bus to Fresno.")
step()
root.mainloop()
"""
    wrapper = () if os.environ.get("DISPLAY") else (str(XVFB), "-a")
    assert run(private_home, *wrapper, sys.executable, "-c", code).split() == ["2", "True", "True"]
