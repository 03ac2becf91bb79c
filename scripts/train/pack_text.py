"""Pack what a model wrote by itself as the text that comes with edgespec: how models/smollm2/text.npz was made.

    python scripts/train/heads.py write MODEL.gguf --work WORK --minutes 28
    python scripts/train/pack_text.py MODEL.gguf --work WORK --output models/smollm2/text.npz

Without --data the model makes up most questions, and the others are the script's own: no text of a data set is in it.
`write_corpus.py` does the same for a user's own corpus, with any model, and needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from edgespec.config import LoadOptions
from edgespec.corpus.database import joined
from edgespec.corpus.index import sorted_places
from edgespec.corpus.shipped import write_shipped
from edgespec.corpus.store import vocabulary_key
from edgespec.loading.opening import open_vocabulary
from trainlib.head_texts import read
from write_corpus import LEAST_ANSWER, without_loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the model, for its vocabulary")
    parser.add_argument("--work", type=Path, required=True, help="folder with texts-*.npz")
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    written = read(sorted(chosen.work.glob("texts-*.npz"))).answers()
    answers = [ids for ids in map(without_loop, written) if ids.size >= LEAST_ANSWER]
    tokens = joined(answers)
    with open_vocabulary(LoadOptions(model=chosen.model)) as (_, vocabulary):
        write_shipped(chosen.output, tokens, sorted_places(tokens), vocabulary_key(vocabulary), vocabulary.size)
    print(f"{len(answers)} answers, {tokens.size} tokens, {chosen.output.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
