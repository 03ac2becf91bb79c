"""Every number that was chosen rather than derived, with the reason for it. Seconds end in _S, shares are of one.

"Passes" are passes of the target; a plain pass has one row. What only counts or names things stays where it is used.
"""

from __future__ import annotations

# -- the time bank (bank, auto): how much time speculation may lose, and when
START_PASSES = 4.0  # plain passes that the bank holds at first: one failed draft must not be the last
MOST_PASSES = 6.0  # plain passes that it may hold when a generation begins: old gains must not pay for a slow answer
KEPT_PASSES = 12.0  # plain passes of gains beyond that which later generations may still lose
RISKED = 0.5  # of the balance, that one round may lose where a shorter draft is possible: three failures would end it
LATE = 1.5  # times the expected seconds, up to which work is charged in full
STALL = 0.5  # plain passes beyond that, from which on a delay is a stall of the machine
FIRST_FINE = 0.25  # plain passes charged for the first stall; doubles with each, so that a slow drafter pays after all
FORGIVEN_AFTER = 1024  # rounds without a stall, after which the fine halves
DRAFTING_SHARE = 0.6  # of the share that may be lost, what drafts may cost; the rest is for what a round adds besides
DECIDING_SHARE = 0.25  # of the share that may be lost, that deciding not to draft may take
LONGEST_REST = 64  # rounds without a decision at most: texts change

# -- a round (auto, length, round)
MAX_AUTO_LENGTH = 32  # tokens; no measured pass over more rows paid
FORESIGHT = 16  # tokens that a forecast looks ahead: no kernel's step of cost is wider
LEAST_SHARED_ROWS = 9  # of one sequence in a pass that it shares with others, however many rows these have
RATE_MEMORY = 0.95  # per round, of the running rate of tokens
READING_ROUNDS = 16  # rounds over which a paid drafter's reading of missed text is spread
REFRESH_FIRST, REFRESH_EVERY = 16, 128  # rounds of speculation before a plain pass is timed again, doubling
SAME_PACE = 0.05  # of a plain pass, by which that pass may differ from what is expected after a wide one
MOST_PENDING = 64  # unused drafts that wait for the text that decides about them

# -- trying drafters (choice, auto, pool)
PROBE_EVERY, PROBE_AT_MOST = 8, 32  # rounds between two probes of a paid drafter, doubling while it disappoints
PROBE_READING = 0.25  # of the balance, that a probe may spend on reading first
PROBE_CEILING = 1.02  # the speedup if all was accepted, below which a probe cannot pay
GAIN_RATE = 0.05  # per draft, of the expected gain of asking for one
BIAS_DECAY, BIAS_PRIOR = 0.98, 4.0  # per round; drafts whose outcome chance may explain
UCB_SCALE = 2.5  # tokens: standard deviation of accepted less expected tokens of a draft
HEDGE_RATE = 0.15  # of the weights' logarithms per net token
HEDGE_SHARE = 0.01  # of all weight that is spread again each round, so that a change of domain is followed
HEDGE_MOST_GAIN = 8.0  # net tokens of a round at most: with fewer, drafters that copy long runs all look alike
# A second choice is rarely accepted more than one time in ten, and trying it costs time. The cheapest rows seen on a
# processor cost .05 to .08 of a pass, and trees lost there; noise must not let them in.
CHEAP_ROW, CHEAP_ROWS = 0.03, 9  # of a plain pass, that a row may cost for trees; rows over which that is averaged
EXIT_SHARE = 0.5  # of a target's weights, that an exit without files of its own is taken to read

# -- confidence: evidence to probability
LEAST_PROBABILITY, MOST_PROBABILITY = 0.01, 0.995  # no token is certain
BETA_PRIOR_WEIGHT, BETA_MEMORY = 2.0, 0.98  # outcomes that a class as a whole counts for each position; per outcome
LOGISTIC_PRECISION, PLACE_PRECISION, SLOPE_PRECISION = 1.0, 8.0, 4.0  # of the priors of bias, positions and slopes
LOGISTIC_MEMORY = 0.998  # per outcome, of what was seen
LOGISTIC_SLOPE = 0.5  # of evidence whose slope is not known
ERROR_MEMORY, ERROR_SCALE = 0.9, 4.0  # of the recent error, whose standard deviation is about 0.1
NEXT_RATE, NEXT_FIRST_COUNT = 0.05, 3.0  # per token, of the next one's expected confidence; outcomes its prior counts
NEXT_ABOVE = (0.4, 0.6, 0.75, 0.85, 0.93, 0.97)  # limits of the confidence before
NEXT_FIRST = (0.85, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9, 0.93)  # of a draft's first token, and by the confidence before

# -- cost of passes
DRIFT_RATE, PLAIN_RATE = 0.05, 0.15  # per pass over several rows and per plain pass, of the machine's pace
FORMER_PASSES = 2.0  # that what was known of a width before its first pass counts for
MOST_OWN_PASSES = 32.0  # of one width, that are remembered
LIKENESS = 0.35  # octaves of width, over which what a pass says of others fades
MOST_SURPRISE = 0.3  # largest deviation that a single pass counts for, in logarithms of its time
FIRST_LATENESS = 0.15  # in logarithms: largest deviation at which a single first plain pass counts
FIRST_PASSES = 3  # passes after which a large deviation is taken for real
MOST_STALE = 0.01  # in logarithms, by which a table of costs may be out of date: making one is not free
CONTEXT_STEP = 64  # tokens of context by which a table of costs may be out of date
COST_RATE, MOST_DRAFT_SURPRISE = 0.1, 2.0  # per draft or round; largest deviation that one counts for, in logarithms

# -- cost before anything was timed
FIRST_ROW = 0.45  # of a plain pass, that each further row is taken to cost; measured were 0.05 (tiny models) to 0.9
ROW_WEIGHT = 0.75  # passes that this guess counts for
MOST_ROW = 2.0  # of a plain pass, that one pass may say of a row
MOST_ROW_PASSES = 24.0  # that are remembered of what a row costs
LEAST_ROW_CHANGE = 0.02  # of a row, below which the line stays
PLAIN_PASSES = 2  # of which the faster one counts: the first pass of a run often waits for its weights
GUESSED_BYTES_PER_S, GUESSED_PASS_S = 1e10, 2e-4  # what time is counted in until the first plain passes
DRAFT_SHARE, READ_SHARE = 1.5, 0.3  # of the bytes' share in time; of a drafted token, that a read one takes

# -- measuring
QUICK_S, LEAST_PASSES, MOST_TURNS, LEAST_TURNS = 1.0, 20, 24, 3  # seconds and passes that all widths share; of each
MEASURED_NOISE = 0.08  # of a width's time in so few passes, relative
PREFIX = 8  # tokens cached before: a pass onto nothing is read by another kernel in some engines
READ_WIDTH = 32  # rows of the pass that shows what reading takes
EXIT_PASSES = 6  # of an early exit
CHECKED_WIDTH, CHECKED_TURNS = 8, 2  # the wide pass, and passes of it, that show whether a measurement still holds
MOST_CHANGE = 1.5  # times a kept measurement, beyond which it is made again
LEAST_CHECKED_S = 0.005  # of a plain pass, below which a moment's decoding corrects the costs by itself

# -- threads; lateness is in natural logarithms of time
ON_TIME = 0.3  # by which passes may differ
CONTEXT_UNIT, CONTEXT_RATIO = 256, 0.2  # tokens of context, over which a step of it is counted; logarithm of a step
SLACK, ALARM = 0.25, 1.2  # CUSUM (Page 1954): what is forgiven of each late pass, and the sum that is too much
MOST_LATE = 1.0  # that one pass may add to that sum, so that at least two are needed
STALLED, MOST_STALLS, STALL_MEMORY = 1.0, 1.5, 0.95  # passes that late; how many, fading, are too many
LACKING_S, LACKING_RATE = 0.12, 0.33  # over which the cores that threads lacked are averaged; at most so much of a pass
LACKING_PRIOR_S = 0.03  # of passes that lacked nothing, before the first one
# Cores lacking, of two: .0 on an idle machine, .2 to .35 beside many programs that wake up shortly, where two threads
# are still the best number, .6 and more beside one that computes.
CONTENDED = 0.5
LATE_RUN = 8  # late passes whose mean is compared with that of fewer threads
CLIPPED = 2.0  # largest lateness that one pass counts for in a mean
BETTER = 0.1  # by which fewer threads must be faster; more of them half as much
MOST_WORSE = 0.3  # by which the first pass with more threads may be slower; beyond that it is the last
PACE_RATE, BASE_RATE, LEVEL_RATE = 0.05, 0.1, 0.1  # per pass
TRIED = 3  # passes that decide about a number of threads, after one to settle
PROBING = 0.03  # share of all time that may be lost in trying numbers of threads that turn out to be worse
MOST_DOUBLINGS = 5  # of the time between such trials, as long as fewer threads are of no use
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 10.0  # before more threads are tried again; longer only to keep to that share
PAUSE_S = 5.0  # after which a new generation does not wait to try
# Shares of time that a change which takes seconds gains at most: of a busy machine's (two spinning threads reached .69
# to .76 of what two sleeping ones did), and back, of an idle one's (5 to 12% with 1.2 billion weights).
BUSY_GAIN, IDLE_GAIN = 0.25, 0.1
