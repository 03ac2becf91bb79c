"""Starts `edgespec serve` as a child on a free port and talks to it with the official `openai` package.

    python docs/examples/openai_client.py [MODEL]

The server ends with this process, however that ends: its standard input closes then.
"""

from __future__ import annotations

import json
import subprocess
import sys

from openai import OpenAI

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
command = [sys.executable, "-m", "edgespec", "serve", model, "--port", "0", "--exit-with-stdin"]
with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
    assert server.stdin is not None and server.stdout is not None
    url = json.loads(server.stdout.readline())["url"]
    with OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Find me a bus to Fresno."}],
            max_tokens=40,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print(f"\n{chunk.model_extra['timings']['predicted_per_second']:.0f} tokens/s")
    server.stdin.close()
print(f"ended with code {server.returncode}")
