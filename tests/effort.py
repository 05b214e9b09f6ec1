"""How many examples a property is tried with: as many as it says in `make test-all`, and in `make test` half of them.

Examples are drawn anew in every run, so what half of them leave out, the next run may find.
"""

import os

from hypothesis import settings

THOROUGH = os.environ.get("SPARDL_THOROUGH") == "1"
USUAL = 100  # what hypothesis tries where a test says nothing


def tries(count: int = USUAL) -> settings:
    """Settings for a test that wants this many."""
    return settings(max_examples=count if THOROUGH else -(-count // 2), deadline=None)
