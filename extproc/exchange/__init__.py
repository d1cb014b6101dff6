"""The life of one HTTP exchange, without I/O: events in, effects out."""
