"""Other runtimes in the same race: each in a child process of its own, all asked for the same tokens in turns.

What it does not know: which of them deserves to win. Losses are reported like gains.
"""
