"""DeltaNet, Mamba2 and ShortConv: right, and the same bits however rows come, are dropped and come again."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

import tiled
from edgespec.errors import CapabilityError
from edgespec.kernels.interface import NO_FLOOR, KernelStates, StateSizes, states_bytes
from tiled import Floats, Rows, bits, chain, node, session

SLOTS, LENGTH, LOG = 3, 150, 12
KEY_HEADS, VALUE_HEADS, SIZE, TAPS = 2, 6, 48, 4
INNER, CHANNELS = VALUE_HEADS * SIZE, (2 * KEY_HEADS + VALUE_HEADS) * SIZE
WIDTH = 40  # of the short convolution
HEADS, KEYS, VALUES = 3, 32, 80  # of Mamba-2: heads with one key, of so many numbers, and values of others
SEEN, RESULT = 2 * KEYS + HEADS * VALUES, HEADS * VALUES
DELTA, SHORT = StateSizes(CHANNELS, TAPS, KEY_HEADS, VALUE_HEADS, SIZE, SIZE), StateSizes(WIDTH, 3)
MAMBA = StateSizes(SEEN, TAPS, 1, HEADS, KEYS, VALUES)
ATTRIBUTES = {"layer": 1, "key_heads": KEY_HEADS, "value_heads": VALUE_HEADS, "size": SIZE, "value_size": SIZE}
ATTRIBUTES |= {"epsilon": 1e-6}
OF_MAMBA = {"layer": 2, "key_heads": 1, "value_heads": HEADS, "size": KEYS, "value_size": VALUES}
FLOAT, INPUTS = TensorProto.FLOAT, {"rows": TensorProto.INT32, "states": TensorProto.INT64}


class Model:
    """A graph of all three operators, their states, and inputs of three texts [slots, n, width] by name."""

    def __init__(self, threads: int = 1) -> None:
        rng = np.random.default_rng(1)

        def drawn(*shape: int) -> Floats:
            return rng.standard_normal(shape).astype(np.float32)

        self.texts = {"x": drawn(SLOTS, LENGTH, CHANNELS + INNER), "bcx": drawn(SLOTS, LENGTH, 3 * WIDTH)}
        self.texts["rates"] = 2 * drawn(SLOTS, LENGTH, 2 * VALUE_HEADS)
        self.texts |= {"cbx": drawn(SLOTS, LENGTH, SEEN + RESULT), "times": drawn(SLOTS, LENGTH, HEADS)}
        self.weights = {"kernel": drawn(TAPS, CHANNELS), "bias": drawn(VALUE_HEADS), "norm": drawn(SIZE)}
        self.weights |= {"rate": -np.exp(drawn(VALUE_HEADS) - 2), "taps": drawn(3, WIDTH)}
        self.weights |= {"seen": drawn(TAPS, SEEN), "shift": drawn(SEEN), "skip": drawn(HEADS), "later": drawn(HEADS)}
        self.weights |= {"fading": -np.exp(drawn(HEADS) - 2)}
        layers = [SHORT, DELTA, MAMBA]
        self.states = KernelStates(layers, SLOTS, LOG)
        delta = node(
            "DeltaNet", ["x", "rates", "kernel", "bias", "rate", "norm", "rows", "states"], ["y"], **ATTRIBUTES
        )
        short = node("ShortConv", ["bcx", "taps", "rows", "states"], ["z"], layer=0)
        inputs = ["cbx", "times", "seen", "later", "fading", "skip", "shift", "rows", "states"]
        mamba = node("Mamba2", inputs, ["m"], **OF_MAMBA)
        given = INPUTS | dict.fromkeys(self.texts, FLOAT)
        self.session = session([delta, short, mamba], given, ["y", "z", "m"], self.weights, threads)

    def run(self, inputs: dict[str, Floats], rows: Rows) -> Floats:
        """Results [n, width] of the operators side by side, of rows (slot, position, cell, parent)."""
        named = {"rows": np.array(rows, np.int32).reshape(-1, 4), "states": np.array([self.states.number])}
        results = self.session.run(None, {name: array[None] for name, array in inputs.items()} | named)
        found: Floats = np.concatenate([each[0] for each in results], 1)
        return found

    def chain(self, slot: int, start: int, stop: int, text: int | None = None) -> Floats:
        source = slot if text is None else text
        return self.run(self.rows_of(source, range(start, stop)), chain(slot, start, stop))

    def rows_of(self, text: int, places: Sequence[int]) -> dict[str, Floats]:
        return {name: array[text, list(places)] for name, array in self.texts.items()}

    def reference(self, text: int) -> NDArray[np.float64]:
        """Results of a text in double precision."""
        order = ("x", "rates", "bcx", "cbx", "times")
        x, rates, bcx, cbx, times = (self.texts[name][text].astype(np.float64) for name in order)
        weights = {name: array.astype(np.float64) for name, array in self.weights.items()}
        mixed, found = convolved(x[:, :CHANNELS], weights["kernel"]), []
        q, k, v = np.split(mixed / (1 + np.exp(-mixed)), [KEY_HEADS * SIZE, 2 * KEY_HEADS * SIZE], 1)
        q, k = (each.reshape(LENGTH, KEY_HEADS, SIZE) for each in (q, k))
        q, k = (each / np.sqrt((each**2).sum(2, keepdims=True) + 1e-6) for each in (q, k))
        q, k = (np.tile(each, (1, VALUE_HEADS // KEY_HEADS, 1)) for each in (q / SIZE**0.5, k))
        v = v.reshape(LENGTH, VALUE_HEADS, SIZE)
        written = 1 / (1 + np.exp(-rates[:, :VALUE_HEADS]))
        kept = np.exp(weights["rate"] * np.log1p(np.exp(rates[:, VALUE_HEADS:] + weights["bias"])))
        state = np.zeros((VALUE_HEADS, SIZE, SIZE))
        for at in range(LENGTH):
            state = state * kept[at][:, None, None]
            delta = (v[at] - np.einsum("hij,hi->hj", state, k[at])) * written[at][:, None]
            state = state + k[at][:, :, None] * delta[:, None]
            found.append(np.einsum("hij,hi->hj", state, q[at]))
        y = np.array(found)
        y = y / np.sqrt((y**2).mean(2, keepdims=True) + 1e-6) * weights["norm"]
        gates = x[:, CHANNELS:]
        y = y.reshape(LENGTH, INNER) * gates / (1 + np.exp(-gates))
        b, c, given = np.split(bcx, 3, 1)
        short = c * convolved(b * given, weights["taps"])
        mixed, found = convolved(cbx[:, :SEEN], weights["seen"]) + weights["shift"], []
        k, q, v = np.split(mixed / (1 + np.exp(-mixed)), [KEYS, 2 * KEYS], 1)
        v, passed = v.reshape(LENGTH, HEADS, VALUES), np.log1p(np.exp(times + weights["later"]))
        state = np.zeros((HEADS, KEYS, VALUES))
        for at in range(LENGTH):
            state = state * np.exp(passed[at] * weights["fading"])[:, None, None]
            state = state + k[at][:, None] * (passed[at][:, None] * v[at])[:, None]
            found.append(np.einsum("hij,i->hj", state, q[at]) + weights["skip"][:, None] * v[at])
        gates = cbx[:, SEEN:]
        return np.concatenate([y, short, np.array(found).reshape(LENGTH, RESULT) * gates / (1 + np.exp(-gates))], 1)


def convolved(x: NDArray[np.float64], kernel: NDArray[np.float64]) -> NDArray[np.float64]:
    padded = np.concatenate([np.zeros((len(kernel) - 1, x.shape[1])), x])
    return sum((padded[t : t + len(x)] * kernel[t] for t in range(len(kernel))), np.zeros_like(x))


def one_by_one(text: int, stop: int = LENGTH) -> Floats:
    model = Model()
    return np.concatenate([model.chain(text, at, at + 1) for at in range(stop)])


@pytest.fixture(scope="module")
def alone() -> list[Floats]:
    """The results of each text whose rows come one by one."""
    return [one_by_one(text) for text in range(SLOTS)]


def test_results_are_those_of_double_precision(alone: list[Floats]) -> None:
    for text in range(SLOTS):
        wanted = Model().reference(text)
        np.testing.assert_allclose(alone[text], wanted, rtol=1e-4, atol=1e-5 * wanted.std())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("most", [2, LOG + 1, LENGTH + 1])
def test_rows_have_the_bits_that_they_have_alone(alone: list[Floats], threads: int, most: int) -> None:
    """Also after rows of another text that were dropped again, as many as the log has."""
    model, rng, start, got = Model(threads), np.random.default_rng(most), 0, []
    while start < LENGTH:
        stop = min(start + int(rng.integers(1, most)), LENGTH)
        if dropped := min(int(rng.integers(0, LOG + 1)), LENGTH - start):
            model.chain(0, start, start + dropped, text=1)
        if stop - start <= LOG and (extra := min(LOG - (stop - start), LENGTH - stop)) > 0:
            model.chain(0, start, stop + int(rng.integers(0, extra + 1)))  # rows that are accepted, and others
            got.append(alone[0][start:stop])
        else:
            got.append(model.chain(0, start, stop))
        start = stop
    np.testing.assert_array_equal(bits(np.concatenate(got)), bits(alone[0]))


@pytest.mark.parametrize("threads", [1, 2])
def test_texts_that_share_passes_have_their_own_bits(alone: list[Floats], threads: int) -> None:
    model, got = Model(threads), np.zeros((SLOTS, LENGTH, INNER + WIDTH + RESULT), np.float32)
    for parts, rows in tiled.shared_passes(SLOTS, LENGTH):
        inputs = [model.rows_of(slot, range(start, stop)) for slot, start, stop in parts]
        found = model.run({name: np.concatenate([each[name] for each in inputs]) for name in model.texts}, rows)
        for (slot, position, *_), result in zip(rows, found, strict=True):
            got[slot, position] = result
    np.testing.assert_array_equal(bits(got), bits(np.array(alone)))


@pytest.mark.parametrize(("base", "floor"), [(0, 0), (1, NO_FLOOR), (2, 3), (5, 3), (40, 0), (40, 3), (40, NO_FLOOR)])
def test_branches_of_a_tree_have_the_bits_of_chains(base: int, floor: int) -> None:
    """Each node, and what follows a path that is kept."""
    count = LOG - (min(floor, 3) if floor < base < LOG else 0)
    rows, paths = tiled.tree(np.random.default_rng(base), base, count)
    for path in paths:
        model = Model()
        model.states.floors[0] = max(base - floor, 0) if floor < NO_FLOOR else NO_FLOOR
        for at in range(base):
            model.chain(0, at, at + 1)
        got = model.run(model.rows_of(1, range(count)), rows)
        depth = len(path)
        model.states.move(0, base + np.arange(depth, dtype=np.int32), base + np.array(path, np.int32))
        after = model.chain(0, base + depth, base + depth + 5)
        chained = Model()
        chained.chain(0, 0, base) if base else None
        expected = chained.run(chained.rows_of(1, path), chain(0, base, base + depth))
        np.testing.assert_array_equal(bits(got[path]), bits(expected))
        np.testing.assert_array_equal(bits(after), bits(chained.chain(0, base + depth, base + depth + 5)))


def test_a_floor_keeps_rows_droppable_while_the_log_has_room(alone: list[Floats]) -> None:
    model = Model()
    model.chain(0, 0, 50)
    model.states.floors[0] = 50
    for at in range(50, 50 + LOG):
        model.chain(0, at, at + 1, text=1)
    np.testing.assert_array_equal(bits(model.chain(0, 50, 60)), bits(alone[0][50:60]))
    assert model.states.start(0) == 50
    for at in range(60, 70):
        model.chain(0, at, at + 1)
    assert model.states.start(0) == 58
    with pytest.raises(Exception, match="position 57 of a text whose state reaches 58 to 70"):
        model.chain(0, 57, 58)
    np.testing.assert_array_equal(bits(model.chain(0, 58, 70)), bits(alone[0][58:70]))


def test_a_state_is_read_and_written_back(alone: list[Floats]) -> None:
    for length in (1, 2, 60):
        model, other = Model(), Model()
        model.chain(0, 0, length + 7)
        kept = model.states.read(0, length)
        other.chain(2, 0, 20)
        other.states.write(2, length, kept)
        for each, slot in ((other, 2), (model, 0)):
            np.testing.assert_array_equal(
                bits(each.chain(slot, length, length + 30, text=0)), bits(alone[0][length : length + 30])
            )
        model.chain(0, length + 30, length + 35, text=1)
        model.states.copy(0, 1)
        np.testing.assert_array_equal(
            bits(model.chain(1, length + 30, length + 40, text=0)), bits(alone[0][length + 30 : length + 40])
        )
        for beyond in (model.states.start(0) - 1, length + 41):
            with pytest.raises(ValueError, match=f"does not reach to {beyond} tokens"):
                model.states.read(0, beyond)
    with pytest.raises(ValueError, match="are not the state of 3 tokens in slot 3"):
        model.states.write(3, 3, kept)
    with pytest.raises(ValueError, match="outside the states"):
        model.states.move(0, np.array([-1], np.int32), np.array([1], np.int32))


def test_a_text_begins_anew(alone: list[Floats]) -> None:
    model = Model()
    for length in (40, 3, 90):
        model.chain(0, 0, length, text=1)
        np.testing.assert_array_equal(bits(model.chain(0, 0, 25)), bits(alone[0][:25]))


def test_all_paths_give_the_same_bits_and_states(paths: list[str]) -> None:
    found = []
    for path in paths:
        assert tiled.choose_path(path)
        model = Model()
        for texts in model.texts.values():
            texts *= 10.0 ** np.random.default_rng(0).uniform(-6, 1, (SLOTS, LENGTH, 1)).astype(np.float32)
        parts = [model.chain(0, 0, 70), model.chain(0, 70, 75), model.chain(0, 72, 80)]
        found.append((bits(np.concatenate(parts)), model.states.memory.copy()))
    for result, memory in found[1:]:
        np.testing.assert_array_equal(result, found[0][0])
        np.testing.assert_array_equal(memory, found[0][1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(3, 0, 0, -1)], "slot 3"),
        ([(-1, 0, 0, -1)], "slot -1"),
        ([(0, -1, -1, -1)], "position -1"),
        ([(0, 0, 1, -1)], "cell 1"),
        ([(0, 0, 0, 0)], "parent 0"),
        ([(0, 0, 0, -2)], "parent -2"),
        ([(0, 0, 0, -1), (0, 2, 1, 0)], "position 2"),
        ([(0, 0, 0, -1), (1, 0, 0, -1), (0, 0, 0, -1)], "rows of slot 0 apart"),
        ([(0, 5, 5, -1)], "a text whose state reaches 0 to 0"),
        ([(0, 0, 0, -1), *((0, 1, at, 0) for at in range(1, LOG + 1))], "13 rows with branches, its states keep 12"),
    ],
)
def test_rows_that_cannot_be_are_errors(rows: Rows, message: str) -> None:
    model = Model()
    with pytest.raises(Exception, match=message):
        model.run(model.rows_of(0, range(len(rows))), rows)
    assert not model.states.memory.any()
    model.states.close()
    with pytest.raises(Exception, match="states that nobody holds"):
        model.chain(0, 0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_heads": 5}, "5 heads of size 48 for 2"),
        ({"size": 40}, "keys of 40"),
        ({"size": 2048}, "keys of 2048"),
        ({"key_heads": 0}, "for 0 heads of keys"),
        ({"value_size": 32}, "size 32 for 2 heads of keys of 48"),
        ({"layer": 3}, "layer 3 of states of 3 layers"),
        ({"layer": 0}, "layer 0 of states, which has other sizes"),
    ],
)
def test_attributes_that_cannot_be_are_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(Exception, match=message):
        run_delta(Model(), change)


@pytest.mark.parametrize(("name", "wanted"), [("bias", 6), ("rate", 6), ("norm", 48)])
def test_weights_of_no_elements_are_errors(name: str, wanted: int) -> None:
    model = Model()
    model.weights[name] = np.zeros(0, np.float32)
    with pytest.raises(Exception, match=f"{name} has 0 elements, expected {wanted}"):
        run_delta(model, {})


def run_delta(model: Model, change: dict[str, int]) -> None:
    names = ["x", "rates", "kernel", "bias", "rate", "norm", "rows", "states"]
    delta = node("DeltaNet", names, ["y"], **(ATTRIBUTES | change))
    given = INPUTS | {"x": FLOAT, "rates": FLOAT}
    made = session([delta], given, ["y"], {name: model.weights[name] for name in names if name in model.weights})
    named = {"rows": np.array(chain(0, 0, 3), np.int32), "states": np.array([model.states.number])}
    made.run(None, {name: model.texts[name][:1, :3] for name in ("x", "rates")} | named)


def test_sizes_that_cannot_be_have_no_states() -> None:
    wrong = ({"taps": 1}, {"taps": 17}, {"channels": 0}, {"head_size": 40}, {"value_size": 40})
    for change in (*wrong, {"value_heads": 5}, {"key_heads": 0}):
        assert states_bytes([DELTA, DELTA._replace(**change)], 1, LOG) is None
    for slots, log in ((0, 1), (1, 0), (1, 257), (1 << 21, 1)):
        assert states_bytes([DELTA], slots, log) is None
    with pytest.raises(CapabilityError, match="no running states such as"):
        KernelStates([DELTA], 0, LOG)
