"""The operator Experts: what its matrices give one by one, weighed as the definition says; a row's bits are its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import tiled
from edgespec.kernels import interface
from tiled import Bytes, Floats, bits, node, packed, random_rows, session

COUNT, SIZE, INNER = 7, 256, 64
X = {"x": TensorProto.FLOAT, "logits": TensorProto.FLOAT}
SILU, GELU, CLAMPED = 1, 2, 3
NAMES = ("gate", "down", "up")


class Model:
    """An operator with random weights; `kinds`: of gate, down and, if it is a matrix of its own, up."""

    def __init__(self, kinds: tuple[str, ...], gate: int, used: int, *, has_biases: bool = True) -> None:
        rng = np.random.default_rng(len(kinds) + gate)
        first = INNER if len(kinds) == 3 else 2 * INNER
        self.shapes = [(first, SIZE), (SIZE, INNER), (INNER, SIZE)][: len(kinds)]
        self.kinds, self.gate, self.used = kinds, gate, used
        self.rows = [random_rows(k, COUNT * n, i, rng) for k, (n, i) in zip(kinds, self.shapes, strict=True)]
        made = zip(NAMES, kinds, self.rows, self.shapes, strict=False)
        self.weights: dict[str, Bytes | Floats] = {name: packed(k, rows, i) for name, k, rows, (_, i) in made}
        self.biases = [rng.standard_normal((COUNT, n)).astype(np.float32) * has_biases for n, _ in self.shapes]
        self.scales = rng.uniform(0.5, 2, COUNT).astype(np.float32)
        self.attributes: dict[str, Any] = {"K": SIZE, "F": INNER, "experts": COUNT, "used": used, "gate": gate}
        self.attributes["types"] = [interface.TYPES[kind] for kind in kinds]

    def session(self, threads: int = 1, *, has_shared: bool = False, **changes: Any) -> Any:
        biases = [f"{name}_bias" for name in NAMES[: len(self.kinds)]]
        names = ["x", "logits", *biases, *[""] * (3 - len(biases)), "scales", *NAMES[: len(self.kinds)]]
        names += [*[""] * (3 - len(self.kinds)), "shared"] if has_shared else []
        made = node("Experts", names, ["y"], **{**self.attributes, **changes})
        weights = {**self.weights, "scales": self.scales, **dict(zip(biases, self.biases, strict=True))}
        return session([made], X | ({"shared": TensorProto.FLOAT} if has_shared else {}), ["y"], weights, threads)

    def expert(self, number: int, x: Floats) -> Floats:
        """One expert by the operators and functions of products."""
        tile = [self.weights[name] for name in NAMES[: len(self.kinds)]]
        own = [each.reshape(COUNT, -1)[number].copy() for each in tile]
        first, types = (0, 2) if len(self.kinds) == 3 else (0,), self.attributes["types"]
        names = [NAMES[at] for at in first]
        outputs = [self.shapes[at][0] for at in first]
        kinds = [types[at] for at in first]
        both = node("TiledMatMul", ["x", "bias", *names], ["both"], K=SIZE, types=kinds, outputs=outputs)
        names = ["both", "down_bias", "down"]
        down = node("TiledMatMul", names, ["y"], K=INNER, types=types[1:2], outputs=[SIZE], gate=self.gate)
        bias = np.concatenate([self.biases[at][number] for at in first])
        weights = {"bias": bias, "down_bias": self.biases[1][number], **dict(zip(NAMES, own, strict=False))}
        made = session([both, down], {"x": TensorProto.FLOAT}, ["y"], weights)
        found: Floats = made.run(None, {"x": x})[0]
        return found


def inputs(rows: int, seed: int = 0) -> dict[str, Floats]:
    """Every fifth row with an enormous value, whose block then gets a second product."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, SIZE)).astype(np.float32)
    x[::5, 17] = 900
    return {"x": x, "logits": rng.standard_normal((rows, COUNT)).astype(np.float32)}


MODELS = [
    (("Q4_K", "Q8_0", "Q4_K"), SILU),
    (("MXFP4", "MXFP4", "MXFP4"), CLAMPED),
    (("Q6_K", "Q4_0"), GELU),
    (("Q8_0", "F16", "BF16"), SILU),
]


@pytest.mark.parametrize(("kinds", "gate"), MODELS)
def test_an_experts_result_is_that_of_its_products(kinds: tuple[str, ...], gate: int) -> None:
    """The weight of the only expert is 1, times its scale."""
    model, given = Model(kinds, gate, used=1), inputs(40)
    found = model.session().run(None, given)[0]
    for expert in range(COUNT):
        chosen = given["logits"].argmax(axis=1) == expert
        if chosen.any():
            wanted = model.expert(expert, given["x"][chosen]) * model.scales[expert]
            np.testing.assert_array_equal(bits(found[chosen]), bits(wanted))


@pytest.mark.parametrize(("kinds", "gate"), MODELS[2:])
def test_results_are_weighed_by_the_softmax_of_the_highest_logits(kinds: tuple[str, ...], gate: int) -> None:
    model, given = Model(kinds, gate, used=3), inputs(20)
    given["logits"][4] = 1.0  # of equal ones the first
    given["logits"][5, 2:5] = given["logits"][5].max() + 1
    found = model.session().run(None, given)[0]
    each = np.stack([model.expert(expert, given["x"]) for expert in range(COUNT)]).astype(np.float64)
    for row, logits in enumerate(given["logits"].astype(np.float64)):
        chosen = np.argsort(-logits, kind="stable")[:3]
        shares = np.exp(logits[chosen] - logits.max())
        wanted = (shares / shares.sum() * model.scales[chosen]) @ each[chosen, row]
        assert np.abs(found[row] - wanted).max() < 2e-6 * np.abs(each[chosen, row]).max()


@pytest.mark.parametrize(("kinds", "gate"), MODELS)
def test_a_row_has_the_same_bits_beside_any_others_on_every_path(
    kinds: tuple[str, ...], gate: int, paths: list[str]
) -> None:
    model, given = Model(kinds, gate, used=3), inputs(1100)
    given["x"][3, 5], given["logits"][7, 2] = np.nan, np.inf
    wanted = model.session().run(None, given)[0]
    assert np.isnan(wanted[[3, 7]]).any(axis=1).all() and not np.isnan(np.delete(wanted, [3, 7], axis=0)).any()
    for path in paths:
        assert tiled.choose_path(path)
        for threads in (1, 3):
            found = model.session(threads)
            for start, count in ((0, 1), (1, 9), (8, 2), (11, 70), (40, 17), (500, 30), (100, 600)):
                rows = {name: values[start : start + count] for name, values in given.items()}
                got, expected = found.run(None, rows)[0], wanted[start : start + count]
                assert np.all((bits(got) == bits(expected)) | np.isnan(expected)), (path, threads, start, count)
    assert model.session().run(None, {name: values[:0] for name, values in given.items()})[0].shape == (0, SIZE)


@pytest.mark.parametrize(("kinds", "gate"), [MODELS[0], MODELS[2]])
def test_a_shared_result_is_added_by_the_sigmoid_of_its_logit(kinds: tuple[str, ...], gate: int) -> None:
    """To the very result without one, for each row by itself."""
    model, given, rng = Model(kinds, gate, used=3), inputs(40), np.random.default_rng(1)
    shared, logit = (rng.standard_normal((40, width)).astype(np.float32) for width in (SIZE, 1))
    alone = model.session().run(None, given)[0]
    both = given | {"logits": np.concatenate((given["logits"], logit), axis=1), "shared": shared}
    found = model.session(has_shared=True)
    got = found.run(None, both)[0]
    assert np.abs(got - (alone + shared / (1 + np.exp(-logit)))).max() < 1e-6 * np.abs(alone).max()
    some = {name: values[7:9] for name, values in both.items()}
    assert np.array_equal(bits(found.run(None, some)[0]), bits(got[7:9]))
    with pytest.raises(Exception, match="shared result is not 40 rows"):
        found.run(None, both | {"shared": shared[:3]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"used": 8}, "cannot use 8 of 7 experts"),
        ({"used": 0}, "cannot use 0 of 7"),
        ({"F": 63}, "of 63 x 256"),
        ({"K": 2**40}, "x 1099511627776"),
        ({"experts": 2**40}, "of 1099511627776 experts"),
        ({"experts": 8}, "gate has .* bytes"),
        ({"gate": 0}, "a gate 0"),
        ({"types": [12, 8]}, "2 types and 9 inputs"),
        ({"types": [12, 99, 12]}, "of type 99"),
        ({"types": [12, 12, 12]}, "256 outputs x 64 inputs of type 12"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        Model(*MODELS[0], used=3).session(**change)


def test_inputs_that_do_not_fit_are_refused() -> None:
    model, given = Model(*MODELS[0], used=3), inputs(4)
    found = model.session()
    with pytest.raises(Exception, match="x is 255 wide, expected 256"):
        found.run(None, given | {"x": given["x"][:, 1:]})
    with pytest.raises(Exception, match="logits are not 4 rows of 7"):
        found.run(None, given | {"logits": given["logits"][:3]})
    model.scales = model.scales[1:]
    with pytest.raises(Exception, match="scales has 6 elements, expected 7"):
        model.session().run(None, given)
