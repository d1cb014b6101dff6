"""The decision itself: pure functions and values, integers only, time is an argument."""
