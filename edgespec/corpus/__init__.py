"""Texts that drafters copy from, stored as token ids between runs: the user's corpus, and earlier answers."""
