"""Models with routed experts: each token's feed-forward is the weighted sum of a few of many (Shazeer et al., 2017).

A router's logits choose them and, by a softmax over the chosen, weigh them: as in Qwen3 MoE, gpt-oss and Gemma 4. In
Qwen3.5 MoE one more expert, which all tokens share, is weighed by the sigmoid of a logit of its own, in Granite 4 H it
is added as it is. In LFM2 MoE each expert is weighed by the sigmoid of its logit, its choice also by a preference, and
the first layers have no experts.
"""

from __future__ import annotations

from edgespec.formats.onnx.llama import KernelGraph
from edgespec.formats.onnx.llama_config import Experts
from edgespec.formats.onnx.tiles import DOMAIN, EXPERTS, GATES, LAYOUT_VERSION


class ExpertsGraph(KernelGraph):
    """A Llama whose layers have experts instead of one feed-forward."""

    def _feed_forward(self, layer: int) -> None:
        experts = self._config.experts
        if experts is None or layer < experts.first_layer:
            super()._feed_forward(layer)
            return
        state = self._norm(f"layers.{layer}/post_attention_layernorm")
        shared = self._dense(layer, state) if experts.has_shared else ""
        self._delta = self._experts(layer, experts, state, state, shared=shared if experts.gates_shared else "")
        if shared and not experts.gates_shared:
            name = f"/model/layers.{layer}/mlp/Add"
            self._nodes.add("Add", [self._delta, shared], [f"{name}/output_0"], name)
            self._delta = f"{name}/output_0"
        self._after(layer, "post_feedforward")

    def _experts(
        self, layer: int, experts: Experts, routed: str, state: str, scales: str = "", shared: str = ""
    ) -> str:
        """The experts of `state`, chosen by `routed`, and `shared`; `scales` [experts]: of their results."""
        here, there = f"/model/layers.{layer}/mlp", f"model.layers.{layer}.mlp"
        logits, output = f"{here}/router/MatMul/output_0", f"{here}/experts/output_0"
        bias = self._stored(f"{there}.router.bias") if experts.has_biases else ""
        routers = [f"{there}.router.weight", *([f"{there}.shared_gate.weight"] if shared else [])]
        self._form.products(f"{here}/router/MatMul", routed, routers, [logits], bias)
        kinds = ["gate", "down"] if experts.is_joined else ["gate", "down", "up"]
        sources = [f"{there}.experts.{kind}.weight" for kind in kinds]
        biases = [self._stored(f"{there}.experts.{kind}.bias") if experts.has_biases else "" for kind in kinds]
        preference = self._stored(f"{there}.router.preference") if experts.has_preference else ""
        missing = [""] * (3 - len(kinds))
        self._nodes.add(
            EXPERTS,
            [
                *(state, logits, *biases, *missing, scales, *map(self._form.tiles, sources)),
                *([*missing, shared] if shared or preference else []),
                *([preference] if preference else []),
            ],
            [output],
            f"{here}/experts",
            domain=DOMAIN,
            K=self._config.hidden_size,
            F=experts.inner,
            experts=experts.count,
            used=experts.used,
            gate=GATES[experts.gate],
            types=[self._form.type_number(source) for source in sources],
            layout=LAYOUT_VERSION,
        )
        return output
