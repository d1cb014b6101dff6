"""The shape of each inference API: what to count, what the output ceiling is, how an error looks."""
