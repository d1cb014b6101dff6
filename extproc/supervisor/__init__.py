"""Several workers as one service: processes that are kept alive, and one admin port over all of them."""
