"""Numbers that were chosen, with the reason for each; docs/benchmarks/control.md says what they gain.

Seconds end in _S, shares are of one, and passes are the target's; a plain pass has one row.
"""

from __future__ import annotations

# -- the time bank (bank, auto): how much time speculation may lose, and when
START_PASSES = 3.0  # initial balance in plain passes: one failed draft must not be the last; twice it is most later
START_S = 0.1  # least initial balance: a small model's first rounds take ten times as long to decide as later ones
RETRY_S = 0.01  # least balance of each later answer where a pass takes less
RISKED = 0.5  # share of the balance that a round may risk if it can be shorter: else three failures would empty it
LATE = 0.5  # share by which work may take longer than expected and is charged in full; half of it for the first stall
FORGIVEN_AFTER = 1024  # rounds without a stall until the fine halves
DRAFTING_SHARE = 0.6  # share of the allowed loss that drafts may cost; the rest is for the overhead of a round

# -- a round (auto, prices)
MAX_AUTO_LENGTH = 32  # tokens; no wider pass ever paid in measurements
FORESIGHT = 4  # tokens that a draft looks ahead, since costs rise in steps
RATE_MEMORY = 0.95  # decay per round of the running rate of tokens, and per draft of what asking gains

# -- choosing among drafters (auto, confidence, pool)
LONG_PROMPT = 256  # tokens of a prompt from which on it is taken for one about a given text
PROBE_EVERY = 10  # rounds without a draft of a paid drafter until it is tried again
TRIAL_TOKENS, MOST_TRIAL_TOKENS = 3.5, 12.0  # what a paid drafter may lose at first; most that it may save for later
KNOWN_DRAFTS = 3  # drafts until what a paid drafter gains is more than a guess
READING_ROUNDS = 16  # rounds over which a paid drafter's reading of missed text is spread
USUAL_CONFIDENCE = 0.8  # of a first draft's tokens

# -- confidence: evidence to probability
MOST_PROBABILITY = 0.995  # no token is certain, nor impossible
PRECISION = 4.0  # of the prior of slopes, against 1 of the bias
LOGISTIC_MEMORY = 0.998  # decay of what was seen, per outcome
ERROR_MEMORY = 0.9  # decay of the recent error

# -- cost of passes and drafts
DRIFT_RATE, PLAIN_RATE = 0.05, 0.15  # learning rates of the machine's pace: per pass over several rows, per plain pass
FORMER_PASSES, MOST_OWN_PASSES = 2.0, 32.0  # passes that earlier knowledge of a width counts for; most remembered
LIKENESS = 0.35  # octaves of further rows over which the influence of a pass on other widths decays
MOST_SURPRISE = 0.3  # largest deviation that a single pass counts for, in logarithms of its time
COST_RATE, MOST_DRAFT_SURPRISE = 0.1, 2.0  # learning rate per draft or round; largest surprise, in logarithms
FIRST_ROW, GUESS_PASSES = 0.2, 0.25  # prior cost of another row in plain passes, and how many passes it counts for
KNOWN_AFTER = 2  # passes over several rows, or rounds, until what these cost is more than a guess
MOST_ROW = 2.0  # largest cost of a row, in plain passes, that one pass may suggest; and that times what was believed
SHARED_DRAFT_ROW = 0.45  # of a draft token's time, that another sequence adds to a pass of the draft that they share
HEAD_SHARE = 0.12  # of the target's weights, that a draft head reads for a token
DRAFT_SHARE, READ_SHARE = 1.0, 0.15  # a draft's share in time over its share in bytes; reading a token over drafting it

# -- threads; lateness is in natural logarithms of time
CONTENDED = 0.5  # cores that two threads lacked: .0 to .35 where two are best, .6 and more beside one that computes
BETTER = 0.1  # fewer threads must be faster by this; more threads by half of it
PROBING = 0.03  # share of all time that may be lost on trying numbers of threads that turn out to be worse
FIRST_WAIT_S = 1.0  # until more threads are tried again; longer to keep to that share
