"""Token ids that are kept between runs: a user's corpus, and what models wrote. Drafters draw on them."""
