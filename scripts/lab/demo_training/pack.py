"""From trained weights to shipped files: GGUFs, Hugging Face folders, manifest, training logs and curves."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from demo_training.corpus import BOS, TURN_END, load_corpus
from demo_training.curves import draw_curves
from demo_training.evaluate import acceptance, early_exit_agreement, write_continuations
from demo_training.network import Network
from demo_training.pipeline import EDITS, Run
from demo_training.pretrain import held_out_loss
from demo_training.vocabulary import mark_id, save_hf_tokenizer, special_ids
from edgespec.export.gguf import convert
from edgespec.export.manifest import write_manifest
from edgespec.export.onnx import export_onnx
from edgespec.formats.manifest import sha256_of
from edgespec.loading.registry import GRAPH
from edgespec.platform.files import atomic_file

CONTEXT_LENGTH = 2048  # the longest window of the training schedule
LICENCE = "CC-BY-SA-4.0"
HF_ROLES = ("target", "draft")
RECOMMENDED = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
DESCRIPTION = (
    "A demonstration family trained from scratch on task dialogues with tool calls, Python functions and arithmetic "
    "word problems: it shows how speculative decoding works and invents names, numbers and facts"
)
BANNER = "demo is an 8M-parameter demonstration model: it invents names, numbers and facts"
EVALUATION_PROMPTS = 32  # per domain
EVALUATION_LENGTH = 96  # tokens the target writes after each


def save_hf_model(network: Network, tokenizer: Tokenizer, chat_template: str, folder: Path) -> None:
    """Write config.json, model.safetensors (fp16, the tied head once) and the tokenizer files to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = network.shape.hf_config(CONTEXT_LENGTH, special_ids(tokenizer))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_hf_tokenizer(tokenizer, folder, chat_template)
    weights = {name: value.to(torch.float16).contiguous() for name, value in network.state_dict().items()}
    with atomic_file(folder / "model.safetensors") as temporary:
        save_file(weights, temporary, metadata={"format": "pt"})
        temporary.chmod(0o644)  # safetensors writes files that only their owner may read


def evaluation_prompts(tokenizer: Tokenizer, documents: list[str], count: int) -> list[list[int]]:
    """Token ids of `count` unseen prompts: a chat up to one of its replies, a bare document's first 24 tokens."""
    header = "<|im_start|>assistant\n"
    prompts = []
    for index, document in enumerate(documents[:: max(1, len(documents) // count)][:count]):
        turns = document.split(header)
        if len(turns) > 1:
            kept = 1 + index % min(4, len(turns) - 1)
            prompts.append(tokenizer.encode(header.join(turns[:kept]) + header, add_special_tokens=False).ids)
        else:
            prompts.append(tokenizer.encode(document, add_special_tokens=False).ids[:24])
    return [prompt[-512:] for prompt in prompts]


def measure(run: Run, networks: dict[str, Network]) -> dict[str, Any]:
    """All figures of the manifest; see `evaluate` for what they mean."""
    tokenizer = run.tokenizer()
    target = networks["target"]
    turn_end = mark_id(tokenizer, TURN_END)
    _, held_out_streams = run.streams()
    _, held_out = load_corpus(run.data, run.seed)
    figures: dict[str, Any] = {
        "held_out_loss": {
            name: {domain: round(held_out_loss(network, s), 4) for domain, s in held_out_streams.items()}
            for name, network in networks.items()
        }
    }
    for domain in ("dialogue", "code"):
        prompts = evaluation_prompts(tokenizer, held_out[domain], EVALUATION_PROMPTS)
        written = write_continuations(target, prompts, EVALUATION_LENGTH, mark_id(tokenizer, BOS), run.seed)
        figures[f"acceptance_{domain}"] = {
            name: asdict(acceptance(target, networks[name], written, turn_end)) for name in ("draft", "medium")
        }
        figures[f"early_exit_{domain}"] = {"greedy_agreement_by_layer": early_exit_agreement(target, written)}
    return figures


def write_description(out: Path, networks: dict[str, Network], figures: dict[str, Any]) -> None:
    """Describe the models of `out` in its manifest, which comes last: it never names a file that is not there."""
    values: dict[str, Any] = {
        "name": "demo",
        "description": DESCRIPTION,
        "licence": LICENCE,
        "banner": BANNER,
        "context_length": CONTEXT_LENGTH,
        "files": {role: _file(out, out / gguf_name(role), network) for role, network in networks.items()},
        "onnx": {},
        "sampling": RECOMMENDED,
        "figures": figures,
    }
    for role, network in networks.items():
        graph, *others = sorted((out / "onnx" / role).iterdir(), key=lambda path: path.name != GRAPH)
        values["onnx"][role] = {**_file(out, graph, network), "parts": [_file(out, path) for path in others]}
    write_manifest(out, values)


def _file(out: Path, path: Path, network: Network | None = None) -> dict[str, Any]:
    entry = {"path": path.relative_to(out).as_posix(), "bytes": path.stat().st_size, "sha256": sha256_of(path)}
    return entry if network is None else {**entry, "parameters": network.parameter_count()}


def gguf_name(role: str) -> str:
    return f"demo-{role}-q8_0.gguf"


def pack_edits(run: Run, shipped: Path, total_tokens: int) -> None:
    """Teach the target of the pair `shipped` to copy; its Hugging Face folder goes to `edits/hf` of the run."""
    target = shipped / "hf" / "target"
    network = run.train_to_copy(target, total_tokens)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    template = (shipped / "chat_template.jinja").read_text(encoding="utf-8")
    save_hf_model(network.eval(), tokenizer, template, run.work / EDITS / "hf")


def pack(run: Run, out: Path, *, with_figures: bool = True) -> None:
    """Write everything that ships to `out`, which holds `chat_template.jinja` already."""
    template = (out / "chat_template.jinja").read_text(encoding="utf-8")
    networks, tokenizer = run.load_networks(), run.tokenizer()
    for role, network in networks.items():
        folder = (out if role in HF_ROLES else run.work) / "hf" / role
        save_hf_model(network, tokenizer, template, folder)
        convert(folder, out / gguf_name(role), "q8_0", name=f"edgespec demo {role}", licence=LICENCE.lower())
        shutil.rmtree(out / "onnx" / role, ignore_errors=True)
        export_onnx(folder, out / "onnx" / role, "int8")
    for name in ("target", "distill"):
        shutil.copyfile(run.work / f"{name}.csv", out / f"training_{name}.csv")
    draw_curves(out / "training_target.csv", out / "training_distill.csv", out / "curves.png")
    write_description(out, networks, measure(run, networks) if with_figures else {})
