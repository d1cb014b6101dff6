"""How many tokens will the engine see? Counted exactly, with the model's own template and tokenizer."""
