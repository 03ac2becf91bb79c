"""What bench_peers.py takes of a real model without a draft model: its GGUF and its conversion to ONNX, as links.

    edgespec export MODEL.gguf --to onnx --quant w8a8 -o w8a8
    python scripts/lab/make_peer_files.py MODEL.gguf w8a8 --output FOLDER
    python scripts/lab/held_out_prompts.py --data DATA --out prompts.jsonl --domains edits --count 8 \
        --chars 1600 --system TEXT
    python scripts/lab/bench_peers.py --pair FOLDER --gguf gguf --onnx onnx --prompts prompts.jsonl ...

The conversion's draft heads come with it; its folder also gets a genai_config.json, which onnxruntime-genai wants.
`--checkpoint` adds the GGUF, a Llama's, as a Hugging Face folder for the libraries that convert one. FOLDER has to be
on the disk of both.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edgespec.errors import EdgespecError
from edgespec.export.workspace import write_manifest
from edgespec.formats.manifest import HEADS, read_pair
from edgespec.platform.files import atomic_folder
from expansion.real import RealBench, entry_of, genai_config


def link(files: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in files:
        (folder / file.name).hardlink_to(file.resolve())


def make(gguf: Path, conversion: Path, output: Path, *, has_checkpoint: bool) -> None:
    pair = read_pair(conversion, "onnx", check_hashes=False)
    graph = pair.files["target"].path
    with atomic_folder(output) as folder:
        link([gguf], folder / "gguf")
        target = folder / "onnx" / "target"
        link(sorted(path for path in graph.parent.iterdir() if path.is_file()), target)
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        (target / "genai_config.json").write_text(json.dumps(genai_config(config), indent=2), encoding="utf-8")
        heads = [file.path for file in pair.heads.values()]
        if heads:
            link(heads, folder / "onnx" / HEADS)
        for table, kind, model in (("files", "gguf", gguf.name), ("onnx", "onnx", "target")):
            place = folder / kind
            about = {"name": kind, "context_length": 2048, table: {"target": entry_of(place, place / model)}}
            if table == "onnx" and heads:
                about[HEADS] = {
                    each: entry_of(place, place / HEADS / pair.heads[each].path.name) for each in pair.heads
                }
            write_manifest(place, about)
        if has_checkpoint:
            RealBench(gguf, folder).checkpoint()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("conversion", type=Path, help="folder that edgespec export wrote")
    parser.add_argument("--checkpoint", action="store_true", help="also write the GGUF as a Hugging Face folder")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    try:
        make(given.gguf, given.conversion, given.output, has_checkpoint=given.checkpoint)
    except EdgespecError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
