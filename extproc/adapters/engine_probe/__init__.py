"""Asks engines for their load: their metrics pages, read within bounds, one task per replica."""
