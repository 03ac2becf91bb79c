"""Every number that was chosen rather than derived, with the reason for it. Seconds end in _S, shares are of one.

"Passes" are passes of the target; a plain pass has one row. Constants that only count or name things stay where they
are used.
"""

from __future__ import annotations

# -- the time bank (bank, auto): how much time speculation may lose, and when
START_PASSES = 4.0  # initial balance in plain passes: one failed draft must not be the last
MOST_PASSES = 6.0  # highest balance at the start of a generation: old gains must not pay for a slow answer
KEPT_PASSES = 12.0  # gains beyond that, in plain passes, which are kept for later generations
RISKED = 0.5  # share of the balance that a round may risk if it can be shorter: else three failures would empty it
LATE = 1.5  # work is charged in full up to this multiple of its expected time
STALL = 0.5  # a delay longer than that by so many plain passes is a stall of the machine
FIRST_FINE = 0.25  # plain passes charged for the first stall; doubles with each, so that a slow drafter pays after all
FORGIVEN_AFTER = 1024  # rounds without a stall until the fine halves
DRAFTING_SHARE = 0.6  # share of the allowed loss that drafts may cost; the rest is for the overhead of a round
DECIDING_SHARE = 0.25  # share of the allowed loss that deciding not to draft may take
SCORE_RATE, SCORE_FIRST = 0.03, 4.0  # learning rate, per decision, of what one gains; decisions its prior counts for
LEAST_SCORE = 0.03  # tokens that a decision must gain: the mean is off by as much where rows are dear
LONGEST_REST = 64  # most rounds without a decision: texts change

# -- a round (auto, length, round)
MAX_AUTO_LENGTH = 32  # tokens; no wider pass ever paid in measurements
FORESIGHT = 16  # tokens that a forecast looks ahead: no kernel has a wider step in its cost
LEAST_SHARED_ROWS = 9  # rows that one sequence may have in a shared pass, however many rows the others have
RATE_MEMORY = 0.95  # decay per round of the running rate of tokens
READING_ROUNDS = 16  # rounds over which a paid drafter's reading of missed text is spread
REFRESH_FIRST, REFRESH_EVERY = 16, 128  # rounds of speculation before a plain pass is timed again, doubling
SAME_PACE = 0.05  # largest deviation, in plain passes, of a pass after a wide one from what was expected
MOST_PENDING = 64  # unused drafts that wait for the text that decides about them

# -- trying drafters (choice, auto, pool)
LONG_PROMPT = 256  # tokens of a prompt from which on it is taken for one about a given text
PROBE_EVERY, PROBE_AT_MOST = 8, 32  # rounds between two probes of a paid drafter, doubling while it disappoints
FIRST_PROBE, FIRST_TRIALS = 2, 4  # rounds until a paid drafter is tried that nothing is known of; how often
PROBE_READING, FIRST_READING = 0.25, 0.75  # share of the balance that a probe may spend on reading first; the first one
# The share for a part of a long text; plain passes that reading all of it takes at least: waiting for less pays.
PART_READING, LONG_READING = 0.5, 8.0
PROBE_CEILING = 1.02  # a probe cannot pay if the speedup with everything accepted is below this
GAIN_RATE, GAIN_FIRST = 0.05, 4.0  # learning rate, per draft, of the gain of asking; drafts its prior counts for
USUAL_RATE = 0.1  # decay per text of what former ones say of a new one
BIAS_DECAY, BIAS_PRIOR = 0.98, 4.0  # decay per round; number of drafts whose outcome may be chance
UCB_SCALE = 2.5  # tokens: standard deviation of accepted less expected tokens of a draft
HEDGE_RATE = 0.15  # change of a weight's logarithm per net token
HEDGE_SHARE = 0.01  # share of all weight that is redistributed each round, so that a change of domain is followed
HEDGE_MOST_GAIN = 8.0  # most net tokens that a round counts for: with less, drafters that copy long runs all look alike
# A second choice is rarely accepted more than one time in ten, and trying it costs time. The cheapest rows seen on a
# CPU cost .05 to .08 of a pass, and trees lost there; noise must not let them in.
CHEAP_ROW, CHEAP_ROWS = 0.03, 9  # most that a row may cost for trees, in plain passes; averaged over so many rows
EXIT_SHARE = 0.5  # share of a target's weights that an exit without files of its own is assumed to read

# -- confidence: evidence to probability
LEAST_PROBABILITY, MOST_PROBABILITY = 0.01, 0.995  # no token is certain
BETA_PRIOR_WEIGHT, BETA_MEMORY = 2.0, 0.98  # outcomes that a whole class counts for at each position; decay per outcome
LOGISTIC_PRECISION, PLACE_PRECISION, SLOPE_PRECISION = 1.0, 8.0, 4.0  # of the priors of bias, positions and slopes
LOGISTIC_MEMORY = 0.998  # decay of past observations per outcome
LOGISTIC_SLOPE = 0.5  # prior for evidence whose slope is not known
ERROR_MEMORY, ERROR_SCALE = 0.9, 4.0  # decay and scale of the recent error, whose standard deviation is about 0.1
NEXT_RATE, NEXT_FIRST_COUNT = 0.05, 3.0  # learning rate per token of the next confidence; outcomes its prior counts for
NEXT_ABOVE = (0.4, 0.6, 0.75, 0.85, 0.93, 0.97)  # classes of the previous token's confidence
NEXT_FIRST = (0.85, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9, 0.93)  # priors: of a draft's first token, then by that class

# -- cost of passes
DRIFT_RATE, PLAIN_RATE = 0.05, 0.15  # learning rates of the machine's pace: per pass over several rows, per plain pass
FORMER_PASSES = 2.0  # passes that the prior of a width counts for
MOST_OWN_PASSES = 32.0  # passes of one width that are remembered
LIKENESS = 0.35  # octaves of width over which the influence of a pass on other widths decays
MOST_SURPRISE = 0.3  # largest deviation that a single pass counts for, in logarithms of its time
FIRST_LATENESS = 0.15  # largest lateness that the very first plain passes count for
FIRST_PASSES = 3  # passes after which a large deviation is believed
UNTOLD_PASSES = 5  # late passes over several rows without a plain one between, after which they are believed too
MOST_STALE = 0.01  # how far, in logarithms, a table of costs may be out of date: making one is not free
CONTEXT_STEP = 64  # the same in tokens of context
COST_RATE, MOST_DRAFT_SURPRISE = 0.1, 2.0  # learning rate per draft or round; largest surprise, in logarithms

# -- cost before anything was timed
FIRST_ROW = 0.2  # prior cost of another row in plain passes; measured were 0.05 (tiny models) to 0.9
ROW_WEIGHT, ROW_PASSES = 0.75, 2  # passes that this prior counts for; wide ones until it is more than a guess
ROW_FACTOR, ROW_STEP = 2.0, 0.1  # one pass may suggest at most so much of what a row was believed to cost, and that
MOST_ROW = 2.0  # largest cost of a row, in plain passes, that one pass may suggest
MOST_ROW_PASSES = 24.0  # passes that the cost of a row is averaged over
LEAST_ROW_CHANGE = 0.02  # smaller changes of a pass, in plain passes, leave the line as it is
# Rows of passes up to NARROW cost what narrow ones do, those from WIDE on WIDE_ROW times a prompt's token: measured
# were 1.1 to 1.5 at 32 rows (llama.cpp Q4_K_M, Q8_0; ONNX Runtime w8a8). A slower prompt counts for
# PROMPT_RATE; a wide pass that ran for WIDE_RATE, more, since one behind a long text may be the first.
NARROW, WIDE, WIDE_ROW, PROMPT_RATE, WIDE_RATE = 8, 32, 1.5, 0.2, 0.5
LEAST_READ = 64  # tokens of a prompt whose time tells what they cost
PLAIN_PASSES = 2  # the faster of so many counts: the first pass of a run often waits for its weights
GUESSED_BYTES_PER_S, GUESSED_PASS_S = 1e10, 2e-4  # the unit of time until the first plain passes were timed
SHARED_DRAFT_ROW = 0.45  # of a draft token's time, that another sequence adds to a pass of the draft that they share
DRAFT_SHARE = 1.5  # a draft's share in time over its share in bytes
READ_SHARE = {"onnx": 0.1, "": 0.2}  # reading a token over drafting one; llama.cpp had 0.1 (Q4_K_M) to 0.35 (Q4_1)

# -- measuring
QUICK_S, LEAST_PASSES, MOST_TURNS, LEAST_TURNS = 1.0, 20, 24, 3  # seconds and passes for all widths; turns of each
MEASURED_NOISE = 0.08  # relative noise of a width's time from so few passes
PREFIX = 8  # tokens cached before: on an empty cache some engines use another kernel
READ_WIDTH = 32  # rows of the pass that shows what reading costs
EXIT_PASSES = 6  # passes that time an early exit
CHECKED_WIDTH, CHECKED_TURNS = 8, 2  # the wide pass, and how many of it, that show whether a measurement still holds
MOST_CHANGE = 1.5  # a kept measurement is repeated if it is off by more than this factor
LEAST_CHECKED_S = 0.005  # with shorter plain passes, a moment of decoding corrects the costs anyway

# -- threads; lateness is in natural logarithms of time
ON_TIME = 0.3  # passes less late than this correct what is usual
CONTEXT_UNIT, CONTEXT_RATIO = 256, 0.2  # steps of context are log(1 + tokens / unit) / ratio
SLACK, ALARM = 0.25, 1.2  # CUSUM (Page 1954): allowance for each late pass, and the sum that raises the alarm
MOST_LATE = 1.0  # most that one pass may add to that sum, so that at least two are needed
STALLED, MOST_STALLS, STALL_MEMORY = 1.0, 1.5, 0.95  # lateness of a stall; too many of them, decaying; their decay
LACKING_S, LACKING_RATE = 0.12, 0.33  # seconds that the lacking cores are averaged over; most weight of one pass
LACKING_PRIOR_S = 0.03  # prior for that: so many seconds of passes that lacked nothing
# Cores that two threads lacked: .0 on an idle machine, .2 to .35 beside many programs that wake up briefly, where two
# threads are still best, .6 and more beside one that computes.
CONTENDED = 0.5
LATE_RUN = 8  # late passes whose mean is compared with that of fewer threads
CLIPPED = 2.0  # largest lateness that one pass counts for in a mean
BETTER = 0.1  # fewer threads must be faster by this; more threads by half of it
MOST_WORSE = 0.3  # more threads are given up at once if the first pass is slower by this
PACE_RATE, BASE_RATE, LEVEL_RATE = 0.05, 0.1, 0.1  # per pass
TRIED = 3  # passes that decide about a number of threads, after one to settle
PROBING = 0.03  # share of all time that may be lost on trying numbers of threads that turn out to be worse
MOST_DOUBLINGS = 5  # how often the time between such trials doubles while fewer threads are of no use
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 10.0  # until more threads are tried again; longer only to keep to that share
PAUSE_S = 5.0  # after such a pause, a new generation does not wait to try more threads
# Most that a change of threads which takes seconds can gain, as a share of the time: on a busy machine (two spinning
# threads reached .69 to .76 of two sleeping ones), and back on an idle one (5 to 12% with 1.2 billion weights).
BUSY_GAIN, IDLE_GAIN = 0.25, 0.1
