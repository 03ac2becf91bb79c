"""Typical text in a model's own tokens, on which its kernels are compared."""

from __future__ import annotations

import numpy as np

from edgespec.engines.base import Engine
from edgespec.errors import UsageError
from edgespec.types import TokenIds

# Typical input: prose, code, JSON, several languages. It is tokenised with the model's own vocabulary.
TEXT = """The committee met on Tuesday, 14 March 1989, to discuss the bridge over the Severn; nobody had expected rain.
"Why not wait until spring?" asked Dr. Alvarez. She had measured 3.75 m of water at the north pier, up 12% in a week.
def moving_average(values: list[float], window: int = 5) -> list[float]:
    \"\"\"Mean of the last `window` values.\"\"\"
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
{"name": "find_train", "arguments": {"from": "Lyon", "to": "Torino", "day": "2024-05-17", "seats": 2}}
1. Preheat the oven to 220 degrees. 2. Chop two onions, a clove of garlic and 300 g of mushrooms. 3. Fry them gently.
Der Zug nach Köln fährt um 7:42 Uhr ab. ¿Dónde está la biblioteca? Il pleut depuis trois jours. 今日は天気がいいですね。
SELECT city, COUNT(*) AS visits FROM trips WHERE year >= 2020 GROUP BY city ORDER BY visits DESC LIMIT 10;
If 7 apples cost $2.10, how much do 12 apples cost? One apple costs $2.10 / 7 = $0.30, so 12 cost 12 * 0.30 = $3.60.
User: my laptop no longer starts after the update, can you help?
Assistant: I am sorry to hear that. Please hold the power button for ten seconds, then tell me what you see on screen.
Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. It happens in the chloroplasts of plants.
Once upon a time a fox lived at the edge of a dark forest, and every evening it walked to the river to look at the moon.
"""


def sample_text(engine: Engine, wanted: int) -> TokenIds:
    """Token ids [at most `wanted` and the context length] of real text in the model's own vocabulary."""
    try:
        ids = np.array(engine.vocabulary.encode(TEXT), np.int32)
    except UsageError:  # a vocabulary of a few letters, in which any tokens are text
        ids = np.arange(engine.vocabulary.size, dtype=np.int32)
    return np.resize(ids, min(wanted, engine.facts.context_length))
